"""Talk to a running server with the openai package.

miniserve serve path/to/model --served-model-name tiny &
python examples/04_openai_client.py http://127.0.0.1:8000/v1 tiny
"""

import sys

from openai import OpenAI


def main(base_url: str, model: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    stream = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
