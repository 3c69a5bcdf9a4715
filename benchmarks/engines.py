"""One engine in one process: reads workload names from stdin, answers each with one line of JSON.

    python benchmarks/engines.py miniserve path/to/model [key=value ...]

The same interface for all, so that `offline.py` can alternate between engines that live in different environments.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from workloads import Item, workload

Run = Callable[[list[Item]], tuple[float, float, int]]
"""Requests -> (seconds until the first token of the first request, seconds in all, tokens generated)."""

MAX_LEN = 4352
"""Context that all engines reserve: W3's prompt and a little."""


def miniserve(model: str, options: dict[str, str]) -> tuple[Run, int]:
    """This project."""
    from miniserve import Engine, SamplingParams

    engine = Engine(model, max_model_len=MAX_LEN, kv_cache_memory="2GiB", **options)

    def run(items: list[Item]) -> tuple[float, float, int]:
        engine.block_manager.forget_prefixes()
        first: list[float] = []
        start = time.perf_counter()
        for item in items:
            params = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
            engine.add_request(
                None, item.prompt, params, on_output=lambda _: first or first.append(time.perf_counter())
            )
        while engine.has_unfinished_requests():
            engine.step()
        return first[0] - start, time.perf_counter() - start, sum(item.max_tokens for item in items)

    return run, engine.model_config.vocab_size


def miniserve_serve(model: str, options: dict[str, str]) -> tuple[Run, int]:
    """This project over HTTP: `miniserve serve` in a process of its own, all requests sent at once.

    Client and server share the cores, so the client is as light as can be: it reads bytes and takes none apart.
    """
    from miniserve.models import load_config

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "miniserve", "serve", model, "--port", str(port), "--max-model-len", str(MAX_LEN)]
    server = subprocess.Popen([*command, "--kv-cache-memory", "2GiB", *flags])
    atexit.register(server.terminate)
    rounds: list[list[Item]] = []
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            break
        time.sleep(0.1)

    async def complete(item: Item) -> float:
        """One request; returns when its first token came."""
        body = {"prompt": item.prompt, "max_tokens": item.max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": str(len(rounds)), "stream": True}  # no prefixes from the round before
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        status, _ = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"data: ")
        if b" 200 " not in status[:20]:
            raise RuntimeError(status.decode())
        arrived, tail = time.perf_counter(), b""
        while part := await reader.read(1 << 16):
            tail = (tail + part)[-64:]
        if b"data: [DONE]" not in tail:
            raise RuntimeError("the stream ended early")
        writer.close()
        return arrived

    async def complete_all(items: list[Item]) -> float:
        return (await asyncio.gather(*map(complete, items)))[0]

    def run(items: list[Item]) -> tuple[float, float, int]:
        rounds.append(items)
        start = time.perf_counter()
        first = asyncio.run(complete_all(items))
        return first - start, time.perf_counter() - start, sum(item.max_tokens for item in items)

    return run, load_config(Path(model)).vocab_size


def vllm(model: str, options: dict[str, str]) -> tuple[Run, int]:
    """vLLM's CPU build, in process, with the settings that were fastest here."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    dtype = options.pop("dtype", "bfloat16")
    llm = LLM(model, dtype=dtype, max_model_len=MAX_LEN, distributed_executor_backend="uni", **options)

    def run(items: list[Item]) -> tuple[float, float, int]:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=i.max_tokens, ignore_eos=True) for i in items]
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": i.prompt} for i in items], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        first = _first_token_seconds(outputs[0], lambda: _one_token(llm, SamplingParams, items[0]))
        return first, seconds, sum(len(o.outputs[0].token_ids) for o in outputs)

    return run, llm.llm_engine.model_config.get_vocab_size()


def _first_token_seconds(output: object, measure: Callable[[], float]) -> float:
    """From the engine's own clock if it tells, else measured with a request of one token."""
    latency = getattr(getattr(output, "metrics", None), "first_token_latency", None)
    return latency if latency else measure()


def _one_token(llm: object, sampling_params: type, item: Item) -> float:
    llm.reset_prefix_cache()  # type: ignore[attr-defined]
    start = time.perf_counter()
    params = sampling_params(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([{"prompt_token_ids": item.prompt}], params, use_tqdm=False)  # type: ignore[attr-defined]
    return time.perf_counter() - start


def transformers(model: str, options: dict[str, str]) -> tuple[Run, int]:
    """HuggingFace's generate, one request after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.get("dtype", "bfloat16"))).eval()

    def generate(item: Item, max_tokens: int) -> None:
        ids = torch.tensor([item.prompt])
        hf.generate(ids, do_sample=False, min_new_tokens=max_tokens, max_new_tokens=max_tokens, pad_token_id=0)

    def run(items: list[Item]) -> tuple[float, float, int]:
        start = time.perf_counter()
        generate(items[0], 1)
        first = time.perf_counter() - start
        start = time.perf_counter()
        for item in items:
            generate(item, item.max_tokens)
        return first, time.perf_counter() - start, sum(item.max_tokens for item in items)

    return run, hf.config.vocab_size


def llama_cpp(model: str, options: dict[str, str]) -> tuple[Run, int]:
    """llama.cpp through llama-cpp-python, one request after the other; the model is a GGUF file (see gguf_copy.py)."""
    from llama_cpp import Llama

    threads = os.cpu_count()
    llm = Llama(options["gguf"], n_ctx=MAX_LEN, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(items: list[Item]) -> tuple[float, float, int]:
        start = time.perf_counter()
        first = 0.0
        for item in items:
            llm.reset()
            for count, _ in enumerate(llm.generate(item.prompt, temp=0.0, reset=True), start=1):
                first = first or time.perf_counter() - start
                if count == item.max_tokens:
                    break
        return first, time.perf_counter() - start, sum(item.max_tokens for item in items)

    return run, llm.n_vocab()


ENGINES = {
    "miniserve": miniserve,
    "miniserve-serve": miniserve_serve,
    "vllm": vllm,
    "transformers": transformers,
    "llama-cpp": llama_cpp,
}


def main() -> None:
    """Serve workloads until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not mix with the answers
    name, model, *settings = sys.argv[1:]
    start = time.perf_counter()
    run, vocab_size = ENGINES[name](model, dict(setting.split("=", 1) for setting in settings))
    print(json.dumps({"ready_seconds": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        first, seconds, tokens = run(workload(line.strip(), vocab_size))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result = {"first_token_seconds": first, "seconds": seconds, "tokens": tokens, "peak_rss": peak}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
