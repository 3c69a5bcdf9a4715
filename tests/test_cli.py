"""The command line, called as a function for speed and as a process where only that shows it. Texts are told by the
cache-less reference and the `tokenizers` package, the numbers of `plan` by arithmetic on the golden's config.json
(8 layers, 2 KV heads of 16, 256 positions), flags by the fields of `EngineConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reference
import tokenizers
from tiny_tokenizers import byte_ids, write_byte_level

import miniserve.engine
import miniserve.server
from miniserve import Engine, EngineConfig, MiniserveError, cli

PROMPTS = ("hello world", "é 日本")
LAYER_BYTES = 2 * 2 * 16 * 4  # K and V of one token in one layer: 2 heads of 16 numbers of 4 bytes


@pytest.fixture(scope="module")
def folder(goldens):
    return goldens / "lckv-cla2"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def expected(folder, tokenizer_folder):
    """`expected(prompt, n)`: the text of the n likeliest tokens behind a prompt, given as text or ids."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))

    def expected(prompt: str | list[int], n: int) -> str:
        ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        return tokenizer.decode(reference.greedy(folder, ids, n))

    return expected


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments)`: exit code, stdout and stderr of a command."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def run(*arguments: Any) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way
            code = end.code
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def plan(run, folder):
    """`plan(*flags)`: the numbers for the golden, or for another model given first."""

    def plan(*flags: Any, model: Path = folder) -> dict[str, Any]:
        code, out, err = run("plan", model, "--json", *flags)
        assert (code, err) == (0, "")
        return json.loads(out)

    return plan


# -------------------------------------------------------------------- generate


def test_generate_prints_prompts_and_texts(run, folder, tokenizer_folder, expected):
    flags = ("--tokenizer", tokenizer_folder, "--dtype", "float32", "--max-tokens", "6")
    code, out, _ = run("generate", folder, *flags, "-p", PROMPTS[0], "--prompt", PROMPTS[1], "--n", "2")
    lines = [prompt + expected(prompt, 6) for prompt in PROMPTS for _ in range(2)]
    assert (code, out) == (0, "".join(f"{line}\n" for line in lines))


def test_generate_finds_the_tokenizer_beside_the_weights(run, folder, tmp_path, expected):
    model = shutil.copytree(folder, tmp_path / "model")
    write_byte_level(model)
    code, out, err = run("generate", model, "-p", PROMPTS[0], "--max-tokens", "6", "--dtype", "float32")
    assert (code, out) == (0, f"{PROMPTS[0]}{expected(PROMPTS[0], 6)}\n"), err


def test_generate_stops_at_a_string(run, folder, tokenizer_folder, expected):
    text = expected(PROMPTS[0], 16)
    at = next(i for i in range(3, len(text)) if text[i] != "\ufffd" and text.index(text[i]) == i)
    flags = ("--tokenizer", tokenizer_folder, "--dtype", "float32", "--max-tokens", "16")
    code, out, _ = run("generate", folder, *flags, "-p", PROMPTS[0], "--stop", text[at], "--stop", "never")
    assert (code, out) == (0, f"{PROMPTS[0]}{text[:at]}\n")


def test_generate_chat_uses_the_template(run, folder, tokenizer_folder, expected):
    """The prompt itself is not printed."""
    flags = ("--tokenizer", tokenizer_folder, "--dtype", "float32", "--max-tokens", "4")
    code, out, _ = run("generate", folder, *flags, "--chat", "-p", "hi")
    text = expected([1, *byte_ids(b"[user] hi\n[assistant]")], 4)
    assert (code, out) == (0, f"{text}\n")


# -------------------------------------------------------------------- plan


def test_plan_in_numbers(plan):
    report = plan("--memory", "1MiB")
    groups = [
        {"owner": i, "readers": [i + 1], "kv_heads": 2, "head_dim": 16, "window": None, "bytes_per_token": LAYER_BYTES}
        for i in (0, 2, 4, 6)
    ]
    expected = {
        "bytes_per_token": 4 * LAYER_BYTES,
        "capacity_tokens": 2**20 // (4 * LAYER_BYTES),
        "max_model_len": 256,
        "max_full_requests": 2**20 // (4 * LAYER_BYTES) // 256,
        "reduction": 2.0,
        "groups": groups,
    }
    assert {name: report[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kv_sharing", "owners"),
    [
        ("none", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("cla:2", [0, 2, 4, 6]),
        ("cla:3", [0, 3, 6]),
        ("cla:8", [0]),
        ("suffix:5", [0, 1, 2]),
        ("0_0_0_0_0_0_0_7", [0, 7]),
    ],
)
def test_plan_what_if(plan, kv_sharing, owners):
    report = plan("--kv-sharing", kv_sharing, "--memory", "1GiB")
    assert [group["owner"] for group in report["groups"]] == owners
    assert sorted(sum((group["readers"] for group in report["groups"]), owners)) == list(range(8))
    assert report["bytes_per_token"] == len(owners) * LAYER_BYTES
    assert report["reduction"] == 8 / len(owners)
    page = 16 * len(owners) * LAYER_BYTES
    assert report["capacity_tokens"] == 2**30 // page * 16


def test_plan_with_windows(plan):
    """A window longer than any request is none."""
    windows = {
        size: [group["window"] for group in plan("--kv-sharing", f"0_0_0_0_4s{size}_4s{size}_4s{size}_4s8")["groups"]]
        for size in (64, 255, 256, 1000)
    }
    assert windows == {64: [None, 64], 255: [None, 255], 256: [None, None], 1000: [None, None]}


@pytest.mark.parametrize(
    ("memory", "size"),
    [("65536", 2**16), ("64KiB", 2**16), ("64K", 2**16), ("1MB", 10**6), ("1.5GiB", 3 * 2**29), ("0", 0), ("1", 0)],
)
def test_plan_reads_sizes(plan, memory, size):
    assert plan("--memory", memory)["capacity_tokens"] == size // (16 * 4 * LAYER_BYTES) * 16


def test_plan_flags_change_the_numbers(plan):
    assert plan("--dtype", "bfloat16")["bytes_per_token"] == 4 * LAYER_BYTES // 2
    assert plan("--max-model-len", "8k")["max_model_len"] == 8000
    assert plan("--max-model-len", "8K")["max_model_len"] == 8192
    assert plan("--hf-overrides", '{"num_key_value_heads": 4}')["bytes_per_token"] == 8 * LAYER_BYTES
    assert plan("--block-size", "64", "--memory", "64KiB")["capacity_tokens"] == 64


def test_plan_needs_nothing_but_config_json(plan, folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    assert plan(model=tmp_path) == plan(model=tmp_path / "config.json") == plan()


def test_plan_draws_the_map(run, folder):
    code, out, _ = run("plan", folder, "--memory", "8MiB", "--kv-sharing", "0_0_0_3_3s32_3s32_6_6")
    assert code == 0
    assert out.splitlines()[:6] == [
        "layer    0 1 2 3 4 5 6 7",
        "group 0  ■ ● ● · · · · ·",
        "group 1  · · · ■ ○ ○ · ·",
        "group 2  · · · · · · ■ ●",
        "■ owner  ● reader  ◧ ○ the same, windowed",
        "",
    ]
    assert "768 bytes per token" in out and "2.67x" in out and "requests of 256 tokens" in out


def test_plan_says_when_nothing_is_shared(run, folder):
    code, out, _ = run("plan", folder, "--kv-sharing", "none")
    assert code == 0 and "no sharing" in out and "1.00x" in out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_sharing": "cla:4", "max_model_len": "100"},
        {"block_size": 4, "dtype": "bfloat16"},
        {"kv_sharing": "0_0_0_0_4s16_4s16_4s16_4s16", "block_size": 32},
    ],
)
def test_the_engine_reports_what_plan_promises(plan, folder, settings):
    settings = {"dtype": "float32"} | settings
    engine = Engine(folder, kv_cache_memory="3MiB", ops="reference", **settings)
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    assert plan("--memory", "3MiB", *flags) == engine.kv_report()


# -------------------------------------------------------------------- flags and their twins

VALUES: dict[str, tuple[str, Any]] = {
    "tokenizer": ("some/folder", "some/folder"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "kv_cache_dtype": ("int8", "int8"),
    "device": ("cpu", "cpu"),
    "kv_sharing": ("cla:2", "cla:2"),
    "kv_cache_memory": ("4MiB", "4MiB"),
    "block_size": ("4", 4),
    "max_model_len": ("8k", "8k"),
    "max_num_seqs": ("7", 7),
    "max_num_batched_tokens": ("8k", 8000),
    "max_waiting": ("5", 5),
    "enable_prefix_caching": ("false", False),
    "enforce_eager": ("true", True),
    "ops": ("reference", "reference"),
    "seed": ("-3", -3),
    "max_logprobs": ("-1", -1),
    "hf_overrides": ('{"rope_theta": 5.0}', {"rope_theta": 5.0}),
}
"""Each setting as it is written, and what the engine must get."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name != "model"}


def test_every_setting_is_tried():
    assert set(VALUES) == set(DEFAULTS)
    assert all(value != DEFAULTS[name] for name, (_, value) in VALUES.items())


@pytest.fixture
def settings_of(run, monkeypatch):
    """`settings_of(command, *flags)`: what the engine would be made with."""

    class NotToday(MiniserveError):
        pass

    def settings_of(*arguments: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def engine(model: str, **settings: Any) -> None:
            seen.update(settings)
            raise NotToday

        monkeypatch.setattr(miniserve.engine, "Engine", engine)
        assert run(*arguments)[0] == 1
        return seen

    return settings_of


COMMANDS = {"generate": ("generate", "M", "-p", "a"), "serve": ("serve", "M")}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_a_flag(settings_of, command):
    assert settings_of(*COMMANDS[command]) == DEFAULTS
    for name, (text, value) in VALUES.items():
        flag = ("--no-" if value is False else "--") + name.replace("_", "-")
        flags = (flag,) if isinstance(value, bool) else (flag, text)
        assert settings_of(*COMMANDS[command], *flags) == DEFAULTS | {name: value}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_has_a_twin_in_the_environment(settings_of, monkeypatch, command):
    for name, (text, value) in VALUES.items():
        with monkeypatch.context() as environment:
            environment.setenv(f"MINISERVE_{name.upper()}", text)
            assert settings_of(*COMMANDS[command]) == DEFAULTS | {name: value}


def test_a_flag_beats_the_environment(settings_of, monkeypatch):
    monkeypatch.setenv("MINISERVE_BLOCK_SIZE", "4")
    monkeypatch.setenv("MINISERVE_ENABLE_PREFIX_CACHING", "0")
    settings = settings_of("serve", "M", "--block-size", "8", "--enable-prefix-caching")
    assert settings["block_size"] == 8 and settings["enable_prefix_caching"] is True


def test_plan_reads_the_environment_too(plan, monkeypatch):
    for name, value in {"MEMORY": "1MiB", "KV_SHARING": "cla:4", "DTYPE": "bfloat16", "MAX_MODEL_LEN": "32"}.items():
        monkeypatch.setenv(f"MINISERVE_{name}", value)
    report = plan("--dtype", "float32")
    assert report["bytes_per_token"] == 2 * LAYER_BYTES
    assert (report["capacity_tokens"], report["max_model_len"]) == (2**20 // (2 * LAYER_BYTES), 32)


def test_serve_hands_on_where_and_how(run, folder, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(miniserve.server, "serve", lambda engine, **how: calls.append(how) or 3)
    monkeypatch.setenv("MINISERVE_SHUTDOWN_TIMEOUT", "2.5")
    flags = ("--kv-cache-memory", "1MiB", "--ops", "reference")
    assert run("serve", folder, *flags)[0] == 3
    (tmp_path / "key").write_text("from a file\n")
    monkeypatch.setenv("MINISERVE_API_KEY", f"@{tmp_path / 'key'}")
    assert run("serve", folder, *flags, "--host", "::1", "--port", "0", "--served-model-name", "it")[0] == 3
    assert run("serve", folder, *flags, "--api-key", "secret")[0] == 3
    assert calls == [
        {"host": "127.0.0.1", "port": 8000, "model_name": "lckv-cla2", "api_key": None, "shutdown_timeout": 2.5},
        {"host": "::1", "port": 0, "model_name": "it", "api_key": "from a file", "shutdown_timeout": 2.5},
        {"host": "127.0.0.1", "port": 8000, "model_name": "lckv-cla2", "api_key": "secret", "shutdown_timeout": 2.5},
    ]


@pytest.mark.parametrize("key", ["", "@", "@/no/such/file", "\u00e9", "a\nb"])
def test_keys_that_are_none(run, folder, key):
    code, _, err = run("serve", folder, "--api-key", key)
    assert code == 2 and "--api-key" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_every_setting(run, command):
    code, out, _ = run(command, "--help")
    words = " ".join(out.split())
    assert code == 0
    for field in dataclasses.fields(EngineConfig):
        assert " ".join(field.metadata["help"].split()) in words
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')}" in words
        if field.name in DEFAULTS and field.default is not None:
            assert f"(default: {field.default})" in words


def test_help_tells_the_commands_and_the_twins(run):
    code, out, _ = run("--help")
    assert code == 0 and all(command in out for command in ("serve", "generate", "plan", "MINISERVE_MAX_NUM_SEQS"))


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "{nowhere}"), "no such file"),
        (("plan", "{empty}"), "config.json"),
        (("plan", "{folder}", "--block-size", "0"), "block_size"),
        (("plan", "{folder}", "--block-size", "-1"), "block_size"),
        (("plan", "{folder}", "--max-model-len", "0"), "max_model_len"),
        (("plan", "{folder}", "--max-model-len", "long"), "max_model_len"),
        (("plan", "{folder}", "--dtype", "int8"), "dtype"),
        (("plan", "{folder}", "--memory", "much"), "memory"),
        (("plan", "{folder}", "--memory", "-1"), "memory"),
        (("plan", "{folder}", "--kv-sharing", "ring"), "kv_sharing"),
        (("plan", "{folder}", "--kv-sharing", "0_0"), "kv_sharing"),
        (("plan", "{folder}", "--kv-sharing", "1_0_2_3_4_5_6_7"), "kv_sharing"),
        (("plan", "{folder}", "--hf-overrides", '{{"num_hidden_layers": 0}}'), "num_hidden_layers"),
        (("plan", "{folder}", "--hf-overrides", '{{"model_type": "other"}}'), "model_type"),
        (("generate", "{nowhere}", "-p", "a"), "no such file"),
        (("generate", "{empty}", "-p", "a"), "config.json"),
        (("generate", "{folder}", "-p", "a"), "tokenizer"),
        (("generate", "{folder}", "-p", "a", "--dtype", "int8"), "dtype"),
        (("generate", "{folder}", "-p", "a", "--kv-cache-memory", "1"), "kv_cache_memory"),
        (("generate", "{folder}", "-p", "a", "--tokenizer", "{nowhere}"), "tokenizer"),
        (("generate", "{folder}", "--tokenizer", "{tokenizer}", "-p", ""), "prompt"),
        (("generate", "{folder}", "--tokenizer", "{tokenizer}", "-p", "a", "--max-tokens", "0"), "max_tokens"),
        (("generate", "{folder}", "--tokenizer", "{tokenizer}", "-p", "a", "--temperature", "nan"), "temperature"),
        (("generate", "{folder}", "--tokenizer", "{tokenizer}", "-p", "a", "--n", "1000000000"), "n must"),
        (("serve", "{nowhere}"), "no such file"),
        (("serve", "{folder}", "--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_errors_are_one_line_that_says_what(run, folder, tokenizer_folder, tmp_path, arguments, said):
    names = {"nowhere": tmp_path / "nowhere", "empty": tmp_path, "folder": folder, "tokenizer": tokenizer_folder}
    code, out, err = run(*(argument.format(**names) for argument in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("miniserve: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("sing",),
        ("plan",),
        ("serve",),
        ("generate", "M"),
        ("plan", "M", "N"),
        ("plan", "M", "--nothing"),
        ("serve", "M", "--nothing", "1"),
        ("serve", "M", "--port", "99999"),
        ("serve", "M", "--port", "-1"),
        ("serve", "M", "--port", "http"),
        ("serve", "M", "--shutdown-timeout", "nan"),
        ("serve", "M", "--shutdown-timeout", "-1"),
        ("serve", "M", "--max-num-seqs", "many"),
        ("serve", "M", "--max-waiting", "1.5"),
        ("serve", "M", "--hf-overrides", "[]"),
        ("serve", "M", "--hf-overrides", "{"),
        ("serve", "M", "--seed"),
        ("generate", "M", "-p", "a", "--temperature", "hot"),
        ("--log-level", "loud", "plan", "M"),
    ],
)
def test_what_the_command_line_cannot_mean_is_exit_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith("usage: miniserve") and ": error: " in err


@pytest.mark.parametrize(
    ("name", "value"),
    [("MAX_NUM_SEQS", "many"), ("ENABLE_PREFIX_CACHING", "maybe"), ("PORT", "99999"), ("HF_OVERRIDES", "["), ("N", "")],
)
def test_what_the_environment_cannot_mean_is_exit_code_2(run, monkeypatch, name, value):
    monkeypatch.setenv(f"MINISERVE_{name}", value)
    code, out, err = run("serve", "M")
    assert (code, out) == (2, "") and f"MINISERVE_{name}={value!r}" in err


def test_an_interrupt_is_no_traceback(run, folder, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(miniserve.engine, "Engine", interrupted)
    assert run("generate", folder, "-p", "a") == (130, "", "")


# -------------------------------------------------------------------- as processes


def test_as_a_module():
    ended = subprocess.run(
        [sys.executable, "-m", "miniserve", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{miniserve.__version__}\n", "")


def test_as_a_program(folder):
    program = [Path(sys.executable).with_name("miniserve"), "plan", folder, "--memory", "1MiB"]
    ended = subprocess.run(program, capture_output=True, timeout=120, encoding="utf-8")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("layer ") and "1,024 tokens or 4 requests of 256 tokens" in ended.stdout
