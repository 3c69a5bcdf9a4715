"""The main job: load a model, complete a few prompts together, print the text and what the KV cache costs.

python examples/01_generate.py path/to/model
"""

import sys

from miniserve import Engine, SamplingParams
from miniserve.report import draw_report

PROMPTS = [
    "The capital of France is",
    "Once upon a time, a small robot",
    "Water boils at",
    "The three primary colours are",
]


def main(model: str) -> None:
    engine = Engine(model)
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
    for output in outputs:
        sample = output.outputs[0]
        print(f"{output.prompt}\033[1m{sample.text}\033[0m" if sys.stdout.isatty() else f"{output.prompt}{sample.text}")
        print(f"  [{len(output.prompt_token_ids)} + {len(sample.token_ids)} tokens, {sample.finish_reason}]\n")
    print(draw_report(engine.kv_report()))


if __name__ == "__main__":
    main(sys.argv[1])
