"""Load one checkpoint under several sharing maps and see what each costs and how the text changes.

    python examples/03_what_if.py path/to/model

An ordinary checkpoint was not trained to share, so its text suffers; the memory figures are real all the same.
"""

import sys

from miniserve import Engine, SamplingParams

PROMPT = "The capital of France is"


def main(model: str) -> None:
    for kv_sharing in ("none", "suffix:2", "cla:2"):
        engine = Engine(model, kv_sharing=kv_sharing, kv_cache_memory="64MiB")
        report = engine.kv_report()
        answer = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0]
        print(
            f"{kv_sharing:9} {report['bytes_per_token']:7,} bytes per token, {report['capacity_tokens']:6,} tokens fit"
        )
        print(f"          {PROMPT}{answer.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
