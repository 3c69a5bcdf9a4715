"""Read an answer while it grows. Leaving the loop would abort the request and free its blocks.

python examples/02_stream.py path/to/model
"""

import sys

from miniserve import Engine, SamplingParams


def main(model: str) -> None:
    shown = 0
    for output in Engine(model).stream("Once upon a time", SamplingParams(temperature=0, max_tokens=48)):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


if __name__ == "__main__":
    main(sys.argv[1])
