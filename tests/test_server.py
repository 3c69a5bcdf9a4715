"""The HTTP endpoint, as its clients see it: the unmodified openai package against `miniserve serve`, and raw
requests against a server in this process whose engine can be looked into. Judges are the golden (tokens and logits
of the model's authors, text by the `tokenizers` package), OpenAI's documented shapes, and for sampled text the same
request sent another way. After everything that is refused, broken off or failed, the engine is idle and the golden
answer comes as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_tokenizers import byte_ids, write_byte_level

import miniserve
from miniserve import AsyncEngine, Engine, RequestOutput, server
from miniserve.server import create_app

VOCAB = 256
MAX_MODEL_LEN = 256
MINISERVE = Path(sys.executable).with_name("miniserve")
JSON = {"Content-Type": "application/json"}
ENDLESS = {"prompt": [1, 2, 3], "n": 64, "max_tokens": 200, "ignore_eos": True}
"""64 samples of 200 tokens: 20 of these would run for minutes."""

NAN, INF = float("nan"), float("inf")
SURROGATE = "a\ud800b"


# -------------------------------------------------------------------- what must come out


@dataclass(frozen=True)
class Golden:
    """The authors' prompts, greedy tokens and logits; texts by the tokenizers package."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[Any]  # (T, V) each, of the prompt's rows
    margins: list[Any]  # (T,) each: likeliest minus second likeliest
    tokenizer: tokenizers.Tokenizer

    @classmethod
    def load(cls, folder: Path, tokenizer: Path) -> Golden:
        expected = load_file(folder / "expected.safetensors")
        prompts, tokens = ([expected[f"{name}.{i}"].tolist() for i in range(3)] for name in ("input_ids", "greedy_ids"))
        logprobs = [expected[f"logits.{i}"].log_softmax(-1) for i in range(3)]
        top = [rows.topk(2).values for rows in logprobs]
        margins = [rows[:, 0] - rows[:, 1] for rows in top]
        return cls(
            prompts, tokens, logprobs, margins, tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        )

    def text(self, number: int) -> str:
        return self.decode(self.tokens[number])

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def request(self, number: int, **fields: Any) -> dict[str, Any]:
        return {"prompt": self.prompts[number], "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def golden(goldens, tokenizer_folder):
    return Golden.load(goldens / "lckv-cla2", tokenizer_folder)


# -------------------------------------------------------------------- a server in this process


@dataclass
class Live:
    """A running server and the engine behind it."""

    engine: Engine
    async_engine: AsyncEngine
    http: httpx.Client

    @property
    def port(self) -> int:
        return self.http.base_url.port

    def post(self, **body: Any) -> httpx.Response:
        return self.send(json.dumps(body))

    def send(self, body: str | bytes, **headers: str) -> httpx.Response:
        return self.http.post("/v1/completions", content=body, headers=JSON | headers)

    def answer(self, **body: Any) -> dict[str, Any]:
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        response = self.post(stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)

    def connect(self, body: dict[str, Any]) -> socket.socket:
        """A request on a socket of its own, its answer unread."""
        return connect(self.port, body)

    def check_golden(self, golden: Golden) -> None:
        """An ordinary request gives its answer, and afterwards nothing is in use."""
        (choice,) = self.answer(**golden.request(0))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (golden.text(0), "length")
        self.wait_idle()

    def wait_idle(self, seconds: float = 10.0) -> None:
        wait_until(lambda: not any(self.load().values()), seconds)

    def load(self) -> dict[str, int]:
        return {name: self.engine.stats()[name] for name in ("running", "waiting", "blocks_used")}


@pytest.fixture(scope="module")
def live(goldens, tokenizer_folder, golden):
    with live_server(goldens, tokenizer_folder) as live:
        yield live
        live.check_golden(golden)


@contextlib.contextmanager
def live_server(
    goldens: Path, tokenizer_folder: Path, send_buffer: int | None = None, api_key: str | None = None, **fields: Any
) -> Iterator[Live]:
    fields = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_num_seqs": 16, "max_waiting": 4096} | fields
    engine = Engine(goldens / "lckv-cla2", tokenizer=str(tokenizer_folder), **fields)
    async_engine = AsyncEngine(engine)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    app = create_app(async_engine, "tiny", api_key)
    web = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=web.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            wait_until(lambda: web.started)
            yield Live(engine, async_engine, http)
    finally:
        web.should_exit = True
        thread.join()
        async_engine.close()


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for something that must come; the bound is only there to fail instead of hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def connect(port: int, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(30)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    return client


def read_some(client: socket.socket) -> bytes:
    """What is there, b"" if the server has closed or reset the connection."""
    try:
        return client.recv(2**16)
    except ConnectionError:
        return b""


def read_to_end(client: socket.socket) -> bytes:
    received = b""
    while part := read_some(client):
        received += part
    return received


# -------------------------------------------------------------------- a server of its own


@dataclass
class Served:
    """A `miniserve serve` process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait_healthy(self) -> Served:
        wait_until(self.healthy, 120)
        return self

    def healthy(self) -> bool:
        """Connections are refused until the model is loaded, then it must be healthy at once."""
        assert self.process.poll() is None, self.log.read_text()
        return not self.refuses_connections() and httpx.get(f"{self.url}/health").status_code == 200

    def refuses_connections(self) -> bool:
        time.sleep(0.05)
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) != 0


@pytest.fixture(scope="module", autouse=True)
def start_early(request):
    """If any test will need the processes, they start now, while others run."""
    if any("processes" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("processes")


@pytest.fixture(scope="module")
def processes(goldens, tokenizer_folder, tmp_path_factory):
    """The processes that tests ask and put an end to, by name."""
    model = [goldens / "lckv-cla2", "--tokenizer", tokenizer_folder, "--served-model-name", "tiny"]
    flags = ["serve", *model, "--dtype", "float32", "--kv-cache-memory", "8MiB", "--ops", "reference"]
    slowly = ["--max-num-seqs", "1"]
    commands: dict[str, list[Any]] = {
        "asked": [MINISERVE, *flags, "--shutdown-timeout", "60"],
        "bounded": [MINISERVE, *flags, *slowly, "--shutdown-timeout", "1"],
        "interrupted": [MINISERVE, *flags, *slowly, "--shutdown-timeout", "60"],
        "dying": [sys.executable, "-c", DYING, *flags],
        "too late": [MINISERVE, *flags],
    }
    folder = tmp_path_factory.mktemp("logs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {name: free_port() for name in commands} | {"too late": taken.getsockname()[1]}
        servers = {name: start(command, ports[name], folder / name) for name, command in commands.items()}
        yield servers
    for served in servers.values():
        served.process.kill()
        served.process.wait()


@pytest.fixture(scope="module")
def served(processes):
    """The one that most tests only ask."""
    return processes["asked"].wait_healthy()


def start(command: list[Any], port: int, log: Path) -> Served:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output, env=environment)
    return Served(process, port, log)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# -------------------------------------------------------------------- reading answers


def events(content: bytes) -> list[dict[str, Any]]:
    """Server-sent events: each is one line of JSON, the last is [DONE]."""
    blocks = [block for block in content.decode().replace("\r\n", "\n").split("\n\n") if block]
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert all("\n" not in line for line in data) and data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that the chunks of a stream amount to, by index; none has anything after its `finish_reason`."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert whole["finish_reason"] is None
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                lists = whole["logprobs"] or {name: [] for name in part["logprobs"]}
                whole["logprobs"] = {name: lists[name] + more for name, more in part["logprobs"].items()}
    return choices


def by_index(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    choices = {choice["index"]: choice for choice in answer["choices"]}
    assert list(choices) == list(range(len(answer["choices"]))), "choices come in order"
    return choices


def check_same_choice(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Text, reason and tokens are equal; logprobs up to the rounding of another batch."""
    assert (got["text"], got["finish_reason"]) == (expected["text"], expected["finish_reason"])
    if expected["logprobs"] is None:
        assert got["logprobs"] is None
        return
    for name in ("tokens", "text_offset"):
        assert got["logprobs"][name] == expected["logprobs"][name]
    for name in ("token_logprobs", "top_logprobs"):
        assert got["logprobs"][name] == [approximately(value) for value in expected["logprobs"][name]]


def approximately(value: Any) -> Any:
    return None if value is None else pytest.approx(value, abs=1e-4)


def check_refused(
    response: httpx.Response, param: str | None, status: int = 400, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object, short, naming the field, telling nothing of the server's insides."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) <= 8192
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"] and not any(part in error["message"] for part in ("Traceback", ".py", "0x"))
    return error


# -------------------------------------------------------------------- echo and logprobs, as evaluations read them


def check_echo(golden: Golden, number: int, length: int, choice: dict[str, Any], num_top: int = 1) -> None:
    """The first `length` tokens of a golden prompt and one greedy token: logprobs of the authors' logits."""
    ids, rows = golden.prompts[number][:length], golden.logprobs[number][:length]
    got = choice["logprobs"]
    values, tops = got["token_logprobs"], got["top_logprobs"]
    assert len(got["tokens"]) == len(values) == len(tops) == len(got["text_offset"]) == length + 1
    assert values[0] is None and tops[0] is None
    next_ids = [*ids[1:], int(rows[-1].argmax())]
    assert values[1:] == pytest.approx([float(row[i]) for row, i in zip(rows, next_ids)], abs=1e-4)
    assert got["tokens"] == [golden.token_text(token) for token in [ids[0], *next_ids]]
    assert choice["text"].startswith(golden.decode(ids))
    check_offsets(got)
    for row, token, margin, value, top in zip(rows, next_ids, golden.margins[number], values[1:], tops[1:]):
        check_top(row, token, value, top, num_top)
        if margin > 1e-3:  # lm-eval's `is_greedy` is this very comparison of floats
            assert (value == max(top.values())) == (token == int(row.argmax()))


def check_offsets(got: dict[str, Any]) -> None:
    expected = [sum(map(len, got["tokens"][:i])) for i in range(len(got["tokens"]))]
    assert got["text_offset"] == expected
    assert all(a < b for a, b, token in zip(expected, expected[1:], got["tokens"]) if token)


def check_top(row: Any, token: int, value: float, top: dict[str, float], num_top: int) -> None:
    """The likeliest tokens and the actual one: an entry for each, whatever their texts."""
    likeliest = row.topk(num_top)
    expected = likeliest.values.tolist() + ([] if token in likeliest.indices.tolist() else [float(row[token])])
    assert sorted(top.values()) == pytest.approx(sorted(expected), abs=1e-4)
    assert value in top.values()


def lm_eval_body(prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True} | fields


def test_lm_eval_loglikelihood(live, golden):
    lengths = [1, 2, 50, 70]
    answer = live.answer(**lm_eval_body([golden.prompts[2][:length] for length in lengths], seed=1234))
    for choice, length in zip(by_index(answer).values(), lengths):
        check_echo(golden, 2, length, choice)
    assert answer["usage"]["prompt_tokens"] == sum(lengths) and answer["usage"]["completion_tokens"] == len(lengths)


def test_token_ids_of_equal_text_do_not_overwrite_each_other(live, golden):
    """Most of the 256 ids are bytes that alone are no character (U+FFFD), the last seven have no text at all."""
    (choice,) = live.answer(**lm_eval_body([golden.prompts[1]], logprobs=20))["choices"]
    check_echo(golden, 1, 33, choice, num_top=20)


def test_logprobs_zero_is_the_actual_token_alone(live, golden):
    (choice,) = live.answer(**lm_eval_body([golden.prompts[1]], logprobs=0))["choices"]
    tops, values = choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"]
    assert [list(top.values()) for top in tops[1:]] == [[value] for value in values[1:]]
    assert values[1:-1] == pytest.approx(expected_prompt_logprobs(golden, 1), abs=1e-4)


def test_echo_of_the_prompt_alone(live, golden):
    answer = live.answer(**lm_eval_body(golden.prompts, max_tokens=0, n=2))
    for index, choice in by_index(answer).items():
        number = index // 2
        assert choice["text"] == golden.decode(golden.prompts[number]) and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"][0] is None
        values = choice["logprobs"]["token_logprobs"][1:]
        assert values == pytest.approx(expected_prompt_logprobs(golden, number), abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 7 + 33 + 70


def expected_prompt_logprobs(golden: Golden, number: int) -> list[float]:
    ids, rows = golden.prompts[number], golden.logprobs[number]
    return [float(row[token]) for row, token in zip(rows, ids[1:])]


@pytest.mark.parametrize("text", ["the cat", "é 日本 😀", "\n\ndata: [DONE]\n\n"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_gives_the_prompt_back_as_it_was(live, text, as_ids):
    """Also characters of several tokens, and text that looks like the protocol's."""
    body = {"prompt": byte_ids(text.encode()) if as_ids else text, "echo": True, "max_tokens": 0}
    assert live.answer(**body)["choices"][0]["text"] == text
    assert joined(live.stream(**body))[0]["text"] == text


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 0}, {"max_tokens": 9, "n": 3, "logprobs": 5}])
def test_streamed_echo_equals_the_whole(live, golden, fields):
    body = lm_eval_body(golden.prompts, ignore_eos=True, **fields)
    whole, streamed = by_index(live.answer(**body)), joined(live.stream(**body))
    assert sorted(streamed) == sorted(whole)
    for index, choice in streamed.items():
        check_same_choice(choice, whole[index])
        values = choice["logprobs"]["token_logprobs"][1 : len(golden.prompts[index // fields.get("n", 1)])]
        assert values == pytest.approx(expected_prompt_logprobs(golden, index // fields.get("n", 1)), abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_k": 1},
        {"temperature": 0.01, "top_p": 0.3},
        {"temperature": 1, "logit_bias": {str(token): -100 for token in range(0, VOCAB, 2)}},
        {"temperature": 1, "stop_token_ids": list(range(VOCAB)), "min_tokens": 3},
        {"temperature": 2, "repetition_penalty": 2, "presence_penalty": 2, "min_p": 1},
    ],
)
def test_logprobs_are_finite_and_of_the_raw_distribution(live, golden, fields):
    body = lm_eval_body([golden.prompts[1]], **{"max_tokens": 3, "logprobs": 5} | fields)
    logprobs = live.answer(**body)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1:33] == pytest.approx(expected_prompt_logprobs(golden, 1), abs=1e-4)
    assert all(-9999 <= value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(-9999 <= value <= 0 for top in logprobs["top_logprobs"][1:] for value in top.values())


def test_prompt_logprobs(live, golden):
    """vLLM's extra field: token id -> logprob, rank, text."""
    body = golden.request(1, prompt_logprobs=2, max_tokens=1)
    first, *rest = live.answer(**body)["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == 32
    for entry, row, token in zip(rest, golden.logprobs[1], golden.prompts[1][1:]):
        assert {str(token), *map(str, row.topk(2).indices.tolist())} == set(entry)
        for name, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(name)]), abs=1e-4)
            assert value["decoded_token"] == golden.token_text(int(name))
    check_refused(live.post(**body, stream=True), "prompt_logprobs")


# -------------------------------------------------------------------- sampling, stops, streams


def test_stop_ends_the_text_before_it(live, golden):
    text = golden.text(2)
    at = next(i for i in range(4, len(text) - 1) if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i)
    for stop in (text[at : at + 2], [text[at : at + 2]], ["never", text[at : at + 2]]):
        body = golden.request(2, stop=stop)
        for choice in (live.answer(**body)["choices"][0], joined(live.stream(**body))[0]):
            assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")


def test_seed_gives_the_same_text_alone_and_in_a_crowd(live, golden):
    def texts(seed):
        body = golden.request(1, temperature=1, seed=seed, n=2, max_tokens=16)
        return [choice["text"] for choice in live.answer(**body)["choices"]]

    alone = [texts(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(texts, [0, 1, 2, 3] * 2))
    assert crowd == alone * 2
    assert len({text for pair in alone for text in pair}) > 4


def random_body(golden: Golden, rng: random.Random) -> dict[str, Any]:
    prompts: list[Any] = [ids[: rng.randint(1, len(ids))] for ids in golden.prompts] + ["the cat", "é 日本"]
    body = {
        "prompt": rng.choice([*prompts, rng.sample(prompts, rng.randint(1, 3))]),
        "max_tokens": rng.randint(1, 12),
        "n": rng.randint(1, 3),
        "seed": rng.randint(0, 2**40),
        "temperature": rng.choice([0, 0.5, 1, 2]),
        "top_p": rng.choice([0.5, 1]),
        "top_k": rng.choice([0, 10]),
        "presence_penalty": rng.choice([0, 1]),
        "ignore_eos": rng.choice([True, False]),
        "stop_token_ids": rng.sample(range(VOCAB), rng.choice([0, 0, 20])),
    }
    return body | rng.choice([{}, {"logprobs": rng.randint(0, 5)}]) | rng.choice([{}, {"echo": True}])


@pytest.mark.parametrize("number", range(40))
def test_stream_equals_the_whole(live, golden, number):
    """Also with a stop string out of the text, which then ends before its first occurrence."""
    rng = random.Random(number)
    body = random_body(golden, rng)
    if number % 2 and not body.get("echo"):
        text = rng.choice(live.answer(**body)["choices"])["text"]
        candidates = [text[i : i + 2] for i in range(len(text)) if "\ufffd" not in text[i : i + 2]]
        body["stop"] = rng.sample(candidates, min(2, len(candidates)))
    whole = live.answer(**body)
    chunks = live.stream(**body, stream_options={"include_usage": True})
    choices, streamed = by_index(whole), joined(chunks)
    assert sorted(streamed) == sorted(choices)
    for index, choice in choices.items():
        check_same_choice(streamed[index], choice)
        assert not any(stop in choice["text"] for stop in body.get("stop", []))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][count] == whole["usage"][count]


def test_shape_of_a_stream(live, golden):
    chunks = live.stream(**golden.request(0, n=2))
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert (chunk["object"], chunk["model"]) == ("text_completion", "tiny")
        assert all({"index", "text", "logprobs", "finish_reason"} <= set(choice) for choice in chunk["choices"])
    reasons = [[c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == i] for i in (0, 1)]
    assert all(r[-1] == "length" and set(r[:-1]) == {None} for r in reasons)


def test_ids_of_callers_are_not_keys(live, golden):
    """Two requests at once under one id of the caller's: both get their own answer, under an id of their own."""

    def complete(number):
        body = golden.request(number, request_id="mine", user="me")
        return live.send(json.dumps(body), **{"X-Request-Id": "mine"}).json()

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(complete, range(3)))
    assert [answer["choices"][0]["text"] for answer in answers] == [golden.text(i) for i in range(3)]
    assert len({answer["id"] for answer in answers}) == 3


def test_null_means_default(live, golden):
    nulls = (
        "n temperature top_p top_k stop seed logprobs echo stream stream_options logit_bias suffix best_of user model"
    )
    answer = live.answer(prompt=golden.prompts[0], max_tokens=None, **dict.fromkeys(nulls.split()))
    assert answer["usage"]["completion_tokens"] <= 16 and len(answer["choices"]) == 1


# -------------------------------------------------------------------- the other routes


def test_routes(live):
    """No more than these: what is not there cannot be attacked."""
    paths = live.http.get("/openapi.json").json()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == {
        ("/health", "get"),
        ("/live", "get"),
        ("/version", "get"),
        ("/v1/models", "get"),
        ("/v1/models/{name}", "get"),
        ("/v1/completions", "post"),
        ("/v1/chat/completions", "post"),
        ("/tokenize", "post"),
        ("/detokenize", "post"),
    }
    assert live.http.get("/health").status_code == 200
    for method, path in (("GET", "/"), ("GET", "/docs"), ("GET", "/v1/nothing"), ("POST", "/v1/chat"), ("GET", "//v1")):
        check_refused(live.http.request(method, path), None, 404)
    check_refused(live.http.get("/v1/completions"), None, 405)
    check_refused(live.http.delete("/v1/models"), None, 405)


def test_models(live):
    listed = live.http.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list" and abs(card["created"] - time.time()) < 600
    assert live.http.get("/v1/models/tiny").json() == card
    card.pop("created")
    assert card == {"id": "tiny", "object": "model", "owned_by": "miniserve", "root": "tiny", "max_model_len": 256}
    check_refused(live.http.get("/v1/models/other/one"), "model", 404, "model_not_found")
    assert live.http.get("/live").status_code == 200
    assert live.http.get("/version").json() == {"version": miniserve.__version__}


def test_nobody_gets_in_without_the_key_but_health_checks(goldens, tokenizer_folder, golden):
    with live_server(goldens, tokenizer_folder, api_key="s3cret") as live:
        assert live.http.get("/health").status_code == live.http.get("/live").status_code == 200
        wrong = ["", "Bearer", "Bearer s3cre", "Bearer s3crets", "bearer s3cret", "Basic s3cret", "s3cret"]
        for headers in ({}, *({"Authorization": value} for value in wrong)):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nothing")):
                refused = live.http.request(method, path, headers=headers)
                check_refused(refused, None, 401, "invalid_api_key")
                assert refused.headers["www-authenticate"] == "Bearer"
        live.http.headers["Authorization"] = "Bearer s3cret"
        live.check_golden(golden)
        client = openai.OpenAI(base_url=str(live.http.base_url) + "/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_unknown_model(live):
    check_refused(live.post(model="other", prompt="a"), "model", 404, "model_not_found")
    check_refused(live.post(model="\u0000" * 2**20, prompt="a"), "model", 404, "model_not_found")
    check_refused(live.post(model=SURROGATE, prompt="a"), "model", 404, "model_not_found")


# -------------------------------------------------------------------- conversations

MESSAGES = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]


def chat(live: Live, **body: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | body
    return live.http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)


def same_as_completion(live: Live, **body: Any) -> dict[str, Any]:
    """The same text through the other endpoint: the template's token ids as a prompt."""
    ids = live.engine.tokenizer.render_chat(MESSAGES)
    return live.answer(**{"prompt": ids, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | body)


def test_a_chat_is_the_completion_of_its_template(live):
    answer, completion = chat(live).json(), same_as_completion(live)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,), (expected,) = answer["choices"], completion["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": expected["text"]},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == completion["usage"] | {"prompt_tokens_details": answer["usage"]["prompt_tokens_details"]}


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 5}, {"stop": ["e", "\u00e9"], "n": 2}])
def test_a_streamed_chat_equals_the_whole(live, fields):
    whole = chat(live, **fields).json()
    response = chat(live, stream=True, stream_options={"include_usage": True}, **fields)
    chunks = events(response.content)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    *told, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [c for chunk in told for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_chat_logprobs_are_the_completions_in_another_shape(live):
    (choice,) = chat(live, logprobs=True, top_logprobs=3).json()["choices"]
    expected = same_as_completion(live, logprobs=3)["choices"][0]["logprobs"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == expected["tokens"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected["token_logprobs"])
    for entry in entries:
        assert entry["bytes"] == list(entry["token"].encode())
        likeliest = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(likeliest) == 3 and likeliest == sorted(likeliest, reverse=True)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
    streamed = events(chat(live, logprobs=True, top_logprobs=3, stream=True).content)
    assert [e for chunk in streamed for e in chunk["choices"][0]["logprobs"]["content"]] == entries
    (plain,) = chat(live, logprobs=True).json()["choices"]
    assert all(entry["top_logprobs"] == [] for entry in plain["logprobs"]["content"])


def test_a_chat_without_limit_uses_the_room_there_is(live):
    answer = chat(live, max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN and answer["choices"][0]["finish_reason"] == "length"
    assert chat(live, max_tokens=None, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert chat(live, max_completion_tokens=12).json()["usage"]["completion_tokens"] == 12


def test_text_parts_are_joined_and_what_clients_send_along_is_tolerated(live):
    parts = [{"type": "text", "text": "t"}, {"type": "text", "text": "he"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, *MESSAGES[1:]]
    fields = {"store": True, "metadata": {}, "response_format": {"type": "text"}, "tool_choice": "auto", "user": "u"}
    answer = chat(live, messages=messages, **fields).json()
    assert answer["choices"] == chat(live).json()["choices"]


CHATS_REFUSED = {
    "no messages": ({"messages": []}, "messages"),
    "not a list": ({"messages": "the"}, "messages"),
    "null": ({"messages": None}, "messages"),
    "not an object": ({"messages": ["the"]}, "messages"),
    "no role": ({"messages": [{"content": "the"}]}, "messages"),
    "a number": ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    "a lone surrogate": ({"messages": [{"role": "user", "content": SURROGATE}]}, "prompt"),
    "too long": ({"messages": [{"role": "user", "content": "b" * 300}]}, "prompt"),
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    "a forced call": ({"tool_choice": "required"}, "tool_choice"),
    "tools that are none": ({"tools": [5]}, "tools"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "too many top": ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    "two limits": ({"max_completion_tokens": 5}, "max_completion_tokens"),
    "a prompt": ({"prompt": "a"}, "prompt"),
    "echo": ({"echo": True}, "echo"),
}


@pytest.mark.parametrize(("fields", "param"), CHATS_REFUSED.values(), ids=CHATS_REFUSED.keys())
def test_chats_without_meaning_are_refused(live, fields, param):
    code = "context_length_exceeded" if fields.get("messages") == CHATS_REFUSED["too long"][0]["messages"] else None
    check_refused(chat(live, **fields), param, code=code)


def test_tokenize_and_detokenize_are_the_tokenizers_own(live, golden):
    def post(path: str, **body: Any) -> httpx.Response:
        return live.http.post(path, content=json.dumps(body), headers=JSON)

    text = "the b\u00e9a"
    expected = golden.tokenizer.encode(text).ids
    answer = {"count": len(expected), "max_model_len": 256, "tokens": expected, "token_strs": None}
    assert post("/tokenize", prompt=text).json() == answer
    strings = post("/tokenize", prompt=text, return_token_strs=True, model="tiny").json()["token_strs"]
    assert strings == [golden.token_text(token) for token in expected]
    assert post("/detokenize", tokens=expected).json() == {"prompt": text}
    rendered = live.engine.tokenizer.render_chat(MESSAGES)
    assert post("/tokenize", messages=MESSAGES).json()["tokens"] == rendered
    open_end = live.engine.tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
    assert post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"] == open_end != rendered
    assert post("/tokenize", prompt="").json()["tokens"] == golden.tokenizer.encode("").ids
    bare = golden.tokenizer.encode(text, add_special_tokens=False).ids
    assert post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"] == bare

    check_refused(post("/tokenize"), "prompt")
    check_refused(post("/tokenize", prompt="a", messages=MESSAGES), "prompt")
    check_refused(post("/tokenize", prompt=["a"]), "prompt")
    check_refused(post("/tokenize", prompt=SURROGATE), "prompt")
    check_refused(post("/tokenize", prompt="a" * (2**20 + 1)), "prompt")
    check_refused(post("/tokenize", messages=[5]), "messages")
    check_refused(post("/tokenize", prompt="a", model="other"), "model", 404, "model_not_found")
    check_refused(post("/detokenize", tokens=[256]), "tokens")
    check_refused(post("/detokenize", tokens=[-1]), "tokens")
    check_refused(post("/detokenize", tokens="a"), "tokens")


def test_openai_chat(served):
    client = served.client()
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=8)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=8, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=[], max_tokens=8)
    assert refusal.value.param == "messages"
    assert client.models.retrieve("tiny").id == "tiny"


# -------------------------------------------------------------------- what is refused

NO_NUMBERS = ["1", "", [], [1], {}, True, False, NAN, INF, -INF, 10**400, -(10**40), [[[]]]]
NO_INTEGERS = [*NO_NUMBERS, 1.0, 0.5, 1e300, 2**63, 2**64, 2**70, -(2**64)]
NO_FLAGS = [0, 1, "true", [], {}, 0.0, NAN]
NO_STRINGS = [0, 1.5, True, {}, [], ["a"]]
NO_TOKEN = [-1, VOCAB, 2**31, 2**63, 2**70, True, 1.0, "1", None, [1], NAN]

REFUSED: dict[str, list[Any]] = {
    "prompt": [
        *(None, "", [], [[]], [""], [[], [1]], 5, 1.5, True, {}, {"a": 1}, [{"prompt": "a"}], [[[1]]], [None]),
        *([token] for token in NO_TOKEN if token not in ("1", [1])),
        *([1, token] for token in NO_TOKEN),
        *([[1], [token]] for token in NO_TOKEN),
        *(["a", 1], [1, "a"], [["a"]], [[1], None], SURROGATE, [SURROGATE], ["a", SURROGATE]),
        *(["a"] * 10**5, [[1]] * 1025),
    ],
    "n": [*NO_INTEGERS, 0, -1, 129, 10**9],
    "best_of": [*NO_INTEGERS, 0, 2, 10**6],
    "max_tokens": [*NO_INTEGERS, -1, 0],
    "min_tokens": [*NO_INTEGERS, -1, 2, 10**9],
    "temperature": [*NO_NUMBERS, -1, 1e300],
    "top_p": [*NO_NUMBERS, 0, -0.1, 1.1],
    "top_k": [*NO_INTEGERS, -2],
    "min_p": [*NO_NUMBERS, -0.1, 1.1],
    "presence_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NO_NUMBERS, 0, -1, 1e300],
    "seed": [value for value in NO_INTEGERS],
    "logprobs": [*NO_INTEGERS, -2, -1, 21, 10**6],
    "prompt_logprobs": [*NO_INTEGERS, -2, -1, 21, 10**6],
    "ignore_eos": NO_FLAGS,
    "echo": NO_FLAGS,
    "stream": NO_FLAGS,
    "model": NO_STRINGS,
    "cache_salt": [*NO_STRINGS, "", "x" * 129, "x" * 2**20, SURROGATE],
    "stop": [
        *(0, 1.5, True, {}, "", [""], ["a", ""], [None], [1], [["a"]], ["a", {}], SURROGATE, ["a", SURROGATE]),
        *("x" * 2**20, ["x" * 1025], ["a"] * 65, ["a"] * 10**5, [1] * 10**5),
    ],
    "stop_token_ids": [5, "5", {}, True, *([1, token] for token in NO_TOKEN), [1] * 10**5, ["a"] * 10**5],
    "logit_bias": [
        *([], [1], "a", 5, True, {"a": 1}, {"": 1}, {"-1": 1}, {"256": 1}, {"9" * 40: 1}, {"1.0": 1}, {"1e2": 1}),
        *({" 1": 1}, {SURROGATE: 1}, {str(i): "x" for i in range(10**4)}, {str(i): 1 for i in range(10**4)}),
        *({"5": value} for value in [*NO_NUMBERS, None, -100.1, 101]),
    ],
    "stream_options": [0, 1.5, True, "a", [], {"include_usage": 1}, {"include_usage": "yes"}, {"include_usage": []}],
    "suffix": ["", "a", 5],
    "response_format": [{"type": "json_object"}],
    "tools": [[{"type": "function"}]],
    "guided_regex": ["a*"],
}
"""For every field the values that have no meaning."""


@pytest.mark.parametrize("field", REFUSED)
def test_values_without_meaning_are_refused_by_name(live, field):
    others = {"prompt": "a", "max_tokens": 1, **({"stream": True} if field == "stream_options" else {})}
    for value in REFUSED[field]:
        check_refused(live.post(**others | {field: value}), field)
        if field == "prompt" and value is None:
            check_refused(live.post(max_tokens=1), field)
    live.wait_idle()


def test_after_all_refusals_the_golden_answer(live, golden):
    live.check_golden(golden)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "seed"],
)
def test_numbers_that_are_none(live, field, number):
    """As raw bytes: Python's JSON reader takes them all."""
    check_refused(live.send(f'{{"prompt": "a", "{field}": {number}}}'), field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 10**9, "max_tokens": None}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 255, "max_tokens": 255}, "min_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, "prompt_logprobs"),
    ],
)
def test_fields_that_contradict_each_other(live, fields, param):
    check_refused(live.post(prompt=[1, 2], **fields), param)


BODIES: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "string": b'"prompt"',
    "number": b"1",
    "cut": b'{"prompt": "a',
    "trailing comma": b'{"prompt": "a",}',
    "two": b'{"prompt": "a"} {"prompt": "b"}',
    "single quotes": b"{'prompt': 'a'}",
    "deep lists": b"[" * 10**5,
    "deep objects": b'{"a":' * 10**5,
    "deep prompt": b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16 without end": '{"prompt": "a"}'.encode("utf-16-le")[:-1],
    "NUL": b'{"prompt": "a"}\x00',
    "long integer": b'{"prompt": "a", "seed": ' + b"9" * 10**4 + b"}",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(live, name):
    check_refused(live.send(BODIES[name]), None)


@pytest.mark.parametrize("depth", [100, 900, 950, 980, 1000, 10**4])
def test_nesting_of_any_depth(live, depth):
    """Whatever the depth at which Python gives up, it is the caller's fault."""
    nested = "[" * depth + "]" * depth
    for body in ('{"prompt": %s}', '{"prompt": "a", "n": %s}', '{"prompt": "a", "logit_bias": {"1": %s}}'):
        response = live.send(body % nested)
        check_refused(response, response.json()["error"]["param"])


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"prompt": [5, 6], "max_tokens": 1}',
        b'{"prompt": "x", "prompt": [5, 6], "max_tokens": 9, "max_tokens": 1}',
        b'{"prompt": [5, 6], "max_tokens": 1, "unknown": NaN, "store": true, "metadata": {"a": [{}]}}',
        b' \r\n\t{"prompt": [5, 6], "max_tokens": 1}\n',
    ],
    ids=["byte order mark", "double keys", "unknown fields", "white space"],
)
def test_odd_bodies_that_are_requests(live, body):
    answer = live.send(body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
        {"Content-Encoding": "gzip, identity"},
    ],
)
def test_wrong_media_types(live, headers):
    check_refused(live.send('{"prompt": "a"}', **headers), None, 415)


def test_a_body_without_media_type_is_refused(live):
    """A web page can send one to a server on this machine without asking it first."""
    response = live.http.request("POST", "/v1/completions", content=b'{"prompt": "a"}')
    assert "content-type" not in response.request.headers
    check_refused(response, None, 415)


def test_media_type_with_charset(live):
    response = live.send('{"prompt": "a", "max_tokens": 1}', **{"Content-Type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


@pytest.mark.parametrize("framing", ["Content-Length: 104857600", "Transfer-Encoding: chunked"])
def test_a_body_without_end_is_refused_on_the_way(live, framing):
    """100 MiB: the answer comes, and the connection goes, when not much more than 32 MiB of it have been sent."""
    part = b" " * 2**20
    if "chunked" in framing:
        part = b"100000\r\n" + part + b"\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
        client.sendall(head.encode())
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.sendall(part)
                num_sent += 1
        answer = read_some(client)
    assert answer.startswith(b"HTTP/1.1 413 ") and num_sent <= 48
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["type"] == "invalid_request_error" and "33554432" in body["error"]["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"X-Giant: " + b"x" * 2**20 + b"\r\n",
        b"".join(b"X-%d: %s\r\n" % (i, b"x" * 100) for i in range(10**4)),
        b"Content-Length: -1\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n",
        b"no colon\r\n",
    ],
    ids=["giant", "many", "negative length", "two lengths", "no colon"],
)
def test_headers_without_meaning(live, golden, head):
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        status = read_some(client).split(b" ")[1:2]
    assert status in ([b"400"], [b"431"], [b"415"])
    live.check_golden(golden)


def test_too_many_prompts_never_reach_the_engine(live, monkeypatch):
    calls = []
    monkeypatch.setattr(live.engine, "add_request", lambda *args, **kwargs: calls.append(args))
    check_refused(live.post(prompt=["a"] * 10**5), "prompt")
    check_refused(live.post(prompt=[[1]] * 10**5), "prompt")
    assert calls == []


def test_prompts_are_served_all_or_none(live):
    """The last of many is wrong: none of the others goes on."""
    check_refused(live.post(prompt=[[1, 2]] * 50 + [[VOCAB]], n=8, max_tokens=200, ignore_eos=True), "prompt")
    live.wait_idle()


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10**6])
@pytest.mark.parametrize("form", ["ids", "text", "list"])
def test_prompts_longer_than_the_context(live, length, form):
    prompt = {"ids": [5] * length, "text": "a" * length, "list": [[5], [5] * length]}[form]
    error = check_refused(live.post(prompt=prompt), "prompt", code="context_length_exceeded")
    assert f"maximum context length of {MAX_MODEL_LEN} tokens" in error["message"]
    if form == "ids":
        assert f" {length} tokens" in error["message"]


def test_the_longest_prompt(live):
    """One token is left, whatever is asked."""
    for max_tokens in (1, 100, 2**31 - 1):
        answer = live.answer(prompt=[5] * (MAX_MODEL_LEN - 1), max_tokens=max_tokens, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1


def test_token_ids_at_the_edge_of_the_table(live):
    """The model has ids that the tokenizer does not know."""
    answer = live.answer(prompt=[0, VOCAB - 1], max_tokens=2, stop_token_ids=[VOCAB - 1], logit_bias={"255": -1})
    assert answer["usage"]["prompt_tokens"] == 2


def test_ids_that_only_the_tokenizer_knows(goldens, tmp_path):
    """A tokenizer larger than the embedding table: such text is refused, not looked up behind its end."""
    letters = "abcdefghijklmnop"
    folder = write_byte_level(tmp_path, merges=list(zip(letters, letters[1:])))
    last = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("op").ids[-1]
    assert last >= VOCAB
    with live_server(goldens, folder) as live:
        check_refused(live.post(prompt="op"), "prompt")
        check_refused(live.post(prompt="a", stop_token_ids=[last]), "stop_token_ids")
        check_refused(live.post(prompt="a", logit_bias={str(last): 1}), "logit_bias")
        assert live.answer(prompt="ab", max_tokens=1)["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): -100 for token in range(VOCAB)}},
        {"logit_bias": {str(token): -100 for token in range(VOCAB)}, "temperature": 0},
        {"stop_token_ids": list(range(VOCAB)), "min_tokens": 8, "logprobs": 5},
        {"logit_bias": {"2": 100}, "min_tokens": 8},
        {"temperature": 5e-324, "top_p": 1e-300, "top_k": 2**31 - 1, "min_p": 1},
    ],
)
def test_settings_that_leave_no_token_disturb_no_neighbour(live, golden, fields):
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(live.answer, **golden.request(i)) for i in range(3)]
        odd = live.answer(**{"prompt": [5, 6], "max_tokens": 8} | fields)
    assert odd["usage"]["completion_tokens"] >= 1
    assert [n.result()["choices"][0]["text"] for n in neighbours] == [golden.text(i) for i in range(3)]


# -------------------------------------------------------------------- anything at all

TEXT = st.text(min_size=1, max_size=8)
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(TEXT, IDS, st.lists(st.one_of(TEXT, IDS), min_size=1, max_size=3)),
    "max_tokens": st.integers(1, 8),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=4)),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=200),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-100, 100), max_size=4),
    "cache_salt": TEXT,
    "echo": st.booleans(),
    "stream": st.booleans(),
}
"""What must be answered, together with any of the others."""

FIELDS = sorted({*SENSIBLE, "min_tokens", "best_of", "prompt_logprobs", "stream_options", "model", "suffix", "unknown"})
EDGES = [-1, 0, 1, 2, 255, 256, 2**31, 2**63, 2**64, -(2**70), 1.0, 0.5, NAN, INF, 1e-300, "", "1", "\0", SURROGATE]
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(EDGES)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)


def sensible_bodies() -> st.SearchStrategy[dict[str, Any]]:
    needed = {name: SENSIBLE[name] for name in ("prompt", "max_tokens")}
    return st.fixed_dictionaries(needed, optional={name: SENSIBLE[name] for name in SENSIBLE if name not in needed})


@settings(max_examples=60, deadline=None)
@given(body=sensible_bodies())
def test_any_sensible_request_is_answered(live, body):
    check_answered(live.post(**body), body)


@settings(max_examples=150, deadline=None)
@given(body=sensible_bodies(), odd=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=2))
def test_any_request_is_answered_or_refused(live, body, odd):
    """If it is refused then for one of the odd fields, or for one that goes ill with it."""
    response = live.post(**body | odd)
    if response.status_code == 200:
        check_answered(response, body | odd)
    else:
        error = response.json()["error"]
        check_refused(response, error["param"], 404 if error["code"] else 400, error["code"])
        assert error["param"] in odd or error["param"] in ("min_tokens", "best_of", "stream_options", "max_tokens")
    live.wait_idle()


def check_answered(response: httpx.Response, body: dict[str, Any]) -> None:
    assert response.status_code == 200, response.text
    choices = joined(events(response.content)) if body.get("stream") else by_index(response.json())
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices.values())
    assert len(choices) % (body.get("n") or 1) == 0


# -------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [True, False])
def test_killed_clients_leave_nothing_behind(live, golden, stream):
    clients = [live.connect(ENDLESS | {"stream": stream}) for _ in range(20)]
    wait_until(lambda: sum(live.load().values()) - live.load()["blocks_used"] == 20 * 64, 30)
    if stream:
        assert all(read_some(client).startswith(b"HTTP/1.1 200 ") for client in clients[:3])
    for client in clients:
        client.close()
    live.wait_idle()
    live.check_golden(golden)


def test_a_client_killed_while_its_request_is_handed_in(live, monkeypatch):
    tokenising, go_on, encode = threading.Event(), threading.Event(), live.engine.intake.encode

    def slow(prompt):
        tokenising.set()
        assert go_on.wait(10)
        return encode(prompt)

    monkeypatch.setattr(live.engine.intake, "encode", slow)
    client = live.connect(ENDLESS)
    assert tokenising.wait(10)
    client.close()
    go_on.set()
    assert live.answer(prompt=[1, 2], max_tokens=1)
    live.wait_idle()


def test_a_client_that_leaves_before_its_stream_begins(live):
    """It is there while the request is handed in and gone when the first byte is due."""
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body}, None, {"type": "http.disconnect"}])

    async def receive():
        return next(messages) or await asyncio.Event().wait()

    async def send(message):
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    app = create_app(live.async_engine, "tiny")
    asyncio.run(app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send))
    live.wait_idle()


def test_closing_a_stream_of_the_openai_client(live):
    client = openai.OpenAI(base_url=f"{live.http.base_url}/v1", api_key="none", max_retries=0)
    extra = {"ignore_eos": True}
    with client.completions.create(
        model="tiny", prompt="a", n=64, max_tokens=200, stream=True, extra_body=extra
    ) as stream:
        next(stream)
        assert live.load()["running"] > 0
    live.wait_idle()


def outputs_alive():
    gc.collect()
    return sum(type(thing) is RequestOutput for thing in gc.get_objects())


def test_a_client_that_does_not_read(goldens, tokenizer_folder, golden, monkeypatch):
    """It costs one output and full buffers, delays nobody, and is given up in the end."""
    monkeypatch.setattr(server, "SEND_TIMEOUT_SECONDS", 5)
    body = ENDLESS | {"n": 15, "stream": True, "logprobs": 5}
    with (
        live_server(goldens, tokenizer_folder, send_buffer=4096) as live,
        connect(live.port, body, receive_buffer=4096) as client,
    ):
        before = outputs_alive()  # what other tests still hold
        wait_until(lambda: live.load()["running"] == 15)
        assert live.answer(**golden.request(0))["choices"][0]["text"] == golden.text(0)
        assert live.load()["running"] == 15, "the other is still at it"
        assert outputs_alive() - before <= 8
        live.wait_idle(20)
        wait_until(lambda: not live.async_engine._streams)
        assert b"[DONE]" not in read_to_end(client)


# -------------------------------------------------------------------- too much at once, and steps that fail


def test_a_full_queue(goldens, tokenizer_folder, golden, monkeypatch):
    with live_server(goldens, tokenizer_folder, max_num_seqs=1, max_waiting=2) as live, ThreadPoolExecutor(3) as pool:
        may_step, step = threading.Event(), live.engine.step
        monkeypatch.setattr(live.engine, "step", lambda: may_step.wait() and step())
        served = []
        for number in range(3):
            served.append(pool.submit(live.answer, **golden.request(number)))
            wait_until(lambda: live.load()["waiting"] == len(served))
        for body in ({}, {"stream": True}, {"n": 2}):
            response = live.post(**golden.request(0), **body)
            check_refused(response, None, 503, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert live.load()["waiting"] == 3
        may_step.set()
        assert [answer.result()["choices"][0]["text"] for answer in served] == [golden.text(i) for i in range(3)]
        check_refused(live.post(prompt=golden.prompts * 2, max_tokens=200), None, 503, "queue_full")
        live.wait_idle()
        live.check_golden(golden)


def test_a_prompt_that_the_pool_can_never_hold(goldens, tokenizer_folder, golden):
    with live_server(goldens, tokenizer_folder, kv_cache_memory="64KiB") as live:  # 4 blocks of 16 tokens
        error = check_refused(live.post(prompt=[5] * 65), "prompt")
        assert "5 KV blocks" in error["message"] and "has 4" in error["message"]
        answer = live.answer(prompt=[5] * 60, max_tokens=100, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 65
        live.check_golden(golden)


class FailingRun:
    """A kernel set's `run`, except that the `step`-th step raises."""

    def __init__(self, run: Any, step: int, error: BaseException) -> None:
        self._run, self._left, self._error = run, step, error

    def __call__(self, *arguments, **more):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._run(*arguments, **more)


@pytest.mark.parametrize("error", [RuntimeError("secret /path"), MemoryError()], ids=lambda error: type(error).__name__)
def test_a_step_that_fails(live, golden, monkeypatch, error):
    """A stream ends with an error event and [DONE]; a whole answer is a 500. Nothing of the cause gets out."""
    body = golden.request(0, max_tokens=200)
    monkeypatch.setattr(live.engine.ops, "run", FailingRun(live.engine.ops.run, 100, error))
    *chunks, last = live.stream(**body)
    assert chunks and all("error" not in chunk for chunk in chunks)
    assert last["error"]["type"] == "server_error" and "secret" not in str(last)
    monkeypatch.setattr(live.engine.ops, "run", FailingRun(live.engine.ops.run, 5, error))
    assert "secret" not in check_refused(live.post(**body), None, 500, "engine_error")["message"]
    live.check_golden(golden)


def test_openai_raises_on_a_step_that_fails(live, golden, monkeypatch):
    client = openai.OpenAI(base_url=f"{live.http.base_url}/v1", api_key="none", max_retries=0)
    monkeypatch.setattr(live.engine.ops, "run", FailingRun(live.engine.ops.run, 5, RuntimeError()))
    with pytest.raises(openai.APIError):
        for _ in client.completions.create(model="tiny", prompt=golden.prompts[0], max_tokens=200, stream=True):
            pass
    monkeypatch.setattr(live.engine.ops, "run", FailingRun(live.engine.ops.run, 5, RuntimeError()))
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt=golden.prompts[0], max_tokens=200)


class Kill(BaseException):
    """What no request can be blamed for."""


def test_death_of_the_engine(goldens, tokenizer_folder, monkeypatch):
    with live_server(goldens, tokenizer_folder) as live, ThreadPoolExecutor(2) as pool:
        may_die, step = threading.Event(), live.engine.step

        def deadly():
            if may_die.is_set():
                raise Kill
            return step()

        monkeypatch.setattr(live.engine, "step", deadly)
        whole = pool.submit(live.post, **ENDLESS)
        stream = pool.submit(live.stream, **ENDLESS)
        wait_until(lambda: sum(live.load().values()) - live.load()["blocks_used"] == 2 * 64)
        wait_until(lambda: len(live.async_engine._streams) == 2)
        died = time.monotonic()
        may_die.set()
        check_refused(whole.result(), None, 500, "engine_error")
        assert stream.result()[-1]["error"]["type"] == "server_error"
        assert time.monotonic() - died < 1
        assert live.http.get("/health").status_code == 503
        check_refused(live.post(prompt="a"), None, 500, "engine_error")


# -------------------------------------------------------------------- the openai package


def test_openai_completion(served, golden):
    answer = served.client().completions.create(
        model="tiny", prompt=golden.prompts[0], max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, golden.text(0), "length")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.id.startswith("cmpl-") and abs(answer.created - time.time()) < 60
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 24, 31)


def test_openai_list_of_prompts_times_n(served, golden):
    """`choices` are numbered prompt * n + k."""
    answer = served.client().completions.create(
        model="tiny", prompt=golden.prompts, n=2, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [golden.text(i // 2) for i in range(6)]
    assert answer.usage.prompt_tokens == 7 + 33 + 70 and answer.usage.completion_tokens == 6 * 24


def test_openai_text_prompts_equal_their_token_ids(served, golden):
    texts = ["the cat", "é 日本 😀", "\n\ndata: [DONE]\n\n"]
    ids = [golden.tokenizer.encode(text).ids for text in texts]
    client = served.client()

    def complete(prompt):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        return [choice.text for choice in answer.choices]

    assert complete(texts) == complete(ids) == [complete(one)[0] for one in texts] == [complete(one)[0] for one in ids]


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_openai_stream(served, golden, include_usage):
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    chunks = list(
        served.client().completions.create(
            model="tiny",
            prompt=golden.prompts[:2],
            n=2,
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            **options,
        )
    )
    usage_chunks = [chunk for chunk in chunks if not chunk.choices]
    if include_usage:
        assert usage_chunks == chunks[-1:] and chunks[-1].usage.completion_tokens == 4 * 24
        assert chunks[-1].usage.prompt_tokens == 7 + 33
    else:
        assert usage_chunks == []
    assert len({chunk.id for chunk in chunks}) == 1
    whole = joined([chunk.model_dump() for chunk in chunks])
    assert {i: (c["text"], c["finish_reason"]) for i, c in whole.items()} == {
        i: (golden.text(i // 2), "length") for i in range(4)
    }


def test_openai_echo_and_logprobs(served, golden):
    answer = served.client().completions.create(
        model="tiny", prompt=golden.prompts[1], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    check_echo(golden, 1, 33, answer.choices[0].model_dump())


def test_openai_models(served):
    (model,) = served.client().models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "miniserve")
    assert model.max_model_len == MAX_MODEL_LEN and abs(model.created - time.time()) < 600


def test_openai_errors_have_their_class(served):
    client = served.client()
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="a")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "temperature")


# -------------------------------------------------------------------- the process


def open_stream(served: Served, **fields: Any) -> socket.socket:
    """A stream that has begun."""
    client = connect(served.port, ENDLESS | {"stream": True} | fields)
    received = b""
    while b"data: " not in received:
        received += client.recv(2**16)
    return client


def test_sigterm_lets_requests_finish(served):
    """Also when there is a connection that asks nothing. The last of `served`."""
    with open_stream(served, n=8, max_tokens=100) as stream, socket.create_connection(("127.0.0.1", served.port)):
        served.process.send_signal(signal.SIGTERM)
        wait_until(served.refuses_connections)
        rest = read_to_end(stream)
        assert rest.count(b'"finish_reason": "length"') == 8 and b"data: [DONE]" in rest
        assert served.process.wait(10) == 0
    assert "Traceback" not in served.log.read_text()


def test_sigterm_is_bounded(processes):
    """One second to finish what would take minutes; then the client is told. The bound is for a busy machine."""
    served = processes["bounded"].wait_healthy()
    with open_stream(served) as stream:
        served.process.send_signal(signal.SIGTERM)
        rest = read_to_end(stream)
        assert b'"error": {"message": "the engine was stopped"' in rest and b"data: [DONE]" in rest
        assert served.process.wait(10) == 0
    assert "Traceback" not in served.log.read_text()


def test_second_sigint_ends_at_once(processes):
    """It would have a minute."""
    served = processes["interrupted"].wait_healthy()
    with open_stream(served):
        served.process.send_signal(signal.SIGINT)
        wait_until(served.refuses_connections)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 0


class ServerInThread(server._Server):
    """Tells its event loop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


def test_shutdown_waits_for_no_connection_that_asks_nothing(live):
    """Not even for one that comes in the very moment: the event loop is held up so that it learns of both at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(live.async_engine, "tiny"), log_level="critical", timeout_graceful_shutdown=30)
    web = ServerInThread(config, live.async_engine, shutdown_timeout=60)
    thread = threading.Thread(target=web.run, args=([listener],))
    thread.start()
    wait_until(lambda: web.started)
    web.loop.call_soon_threadsafe(time.sleep, 0.5)
    time.sleep(0.1)
    with socket.create_connection(listener.getsockname()):
        web.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def test_port_in_use(processes):
    late = processes["too late"]
    assert late.process.wait(120) > 0
    assert "address already in use" in late.log.read_text() and "Traceback" not in late.log.read_text()


DYING = """
import sys
from miniserve import Engine, cli

class Kill(BaseException):
    pass

def step(self):
    raise Kill

Engine.step = step
sys.exit(cli.main())
"""


def test_death_of_the_engine_ends_the_process(processes):
    """A supervisor must see it."""
    served = processes["dying"].wait_healthy()
    check_refused(httpx.post(f"{served.url}/v1/completions", json=ENDLESS, timeout=10), None, 500, "engine_error")
    assert served.process.wait(10) == 1
