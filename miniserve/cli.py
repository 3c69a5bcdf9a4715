"""`miniserve serve | generate | plan`.

The flags are made from `EngineConfig`, and each has a twin in the environment: `--max-num-seqs` is
`MINISERVE_MAX_NUM_SEQS`. A flag beats the environment, the environment beats the default.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from miniserve import __version__
from miniserve.config import EngineConfig, parse_size
from miniserve.errors import ConfigError, MiniserveError
from miniserve.report import draw_groups, draw_report, kv_report
from miniserve.request import SamplingParams

_ENV = "MINISERVE_"
_PLAN_SETTINGS = ("kv_sharing", "max_model_len", "block_size", "dtype", "kv_cache_dtype", "hf_overrides")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that a user can act on are one line on stderr and exit code 1."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        return arguments.command(arguments)
    except MiniserveError as error:
        print(f"miniserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# -------------------------------------------------------------------- commands


def _serve(arguments: argparse.Namespace) -> int:
    from miniserve.engine import Engine
    from miniserve.server import serve

    name = arguments.served_model_name or Path(arguments.model).resolve().name
    engine = Engine(arguments.model, **_settings(arguments))
    return serve(
        engine,
        host=arguments.host,
        port=arguments.port,
        model_name=name,
        api_key=arguments.api_key,
        shutdown_timeout=arguments.shutdown_timeout,
    )


def _generate(arguments: argparse.Namespace) -> int:
    from miniserve.engine import Engine

    params = SamplingParams(
        n=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
    )
    engine = Engine(arguments.model, **_settings(arguments))
    if arguments.chat:
        answers = engine.chat([[{"role": "user", "content": prompt}] for prompt in arguments.prompt], params)
    else:
        answers = engine.generate(arguments.prompt, params)
    for prompt, answer in zip(arguments.prompt, answers):
        for sample in answer.outputs:
            print(sample.text if arguments.chat else prompt + sample.text)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """What a model's K/V costs, from its config.json alone."""
    from miniserve.kvcache.layout import KVLayout
    from miniserve.models import load_config

    settings = EngineConfig.build(arguments.model, {name: getattr(arguments, name) for name in _PLAN_SETTINGS})
    config = load_config(Path(settings.model), kv_sharing=settings.kv_sharing, overrides=settings.hf_overrides)
    max_model_len = settings.model_len or config.max_position_embeddings
    itemsize = 4 if "32" in str(config.dtype if settings.dtype == "auto" else settings.dtype) else 2
    layout = KVLayout.build(
        config.sharing,
        config.geometry,
        itemsize=1 if settings.kv_cache_dtype == "int8" else itemsize,
        block_size=settings.block_size,
        max_model_len=max_model_len,
    )
    num_pages = layout.num_pages(parse_size("memory", arguments.memory))
    report = kv_report(layout, num_pages, max_model_len, config.num_heads)
    print(json.dumps(report) if arguments.json else draw_report(report, draw_groups(config.sharing)))
    return 0


# -------------------------------------------------------------------- flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miniserve",
        description="Inference for language models whose layers share KV cache.",
        epilog=f"Each flag has a twin in the environment: --max-num-seqs is {_ENV}MAX_NUM_SEQS.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add(parser, "log_level", "info", _log_level, "debug, info, warning or error")
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="serve a model over HTTP (OpenAI's completions)")
    serve.set_defaults(command=_serve)
    _add_engine_flags(serve)
    _add(serve, "host", "127.0.0.1", str, "address to listen on")
    _add(serve, "port", 8000, _port, "port to listen on")
    _add(serve, "served_model_name", None, str, "name of the model in the API; default: the folder's name")
    _add(serve, "api_key", None, _api_key, "key that clients must send as a bearer token; @FILE reads it from a file")
    _add(serve, "shutdown_timeout", 30.0, _seconds, "seconds that requests get to end after SIGTERM")

    generate = commands.add_parser("generate", help="complete prompts and print the text")
    generate.set_defaults(command=_generate)
    _add_engine_flags(generate)
    generate.add_argument("-p", "--prompt", action="append", required=True, help="a prompt; may be given many times")
    generate.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    _add(generate, "max_tokens", 128, int, "most tokens to generate")
    _add(generate, "temperature", 0.0, float, "0 is greedy")
    _add(generate, "top_p", 1.0, float, "keep the smallest set of tokens of this mass")
    _add(generate, "n", 1, int, "samples per prompt")
    generate.add_argument("--stop", action="append", help="a string that ends the text; may be given many times")

    plan = commands.add_parser("plan", help="what the K/V of a model costs, from its config.json alone")
    plan.set_defaults(command=_plan)
    plan.add_argument("model", metavar="PATH", help="model folder or config.json")
    _add(plan, "memory", "8GiB", str, "memory for the KV pool, as in 8GiB")
    plan.add_argument("--json", action="store_true", help="print the numbers as JSON")
    for name in _PLAN_SETTINGS:
        _add_setting(plan, name)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH", help=EngineConfig.__dataclass_fields__["model"].metadata["help"])
    for setting in fields(EngineConfig):
        if setting.name != "model":
            _add_setting(parser, setting.name)


def _add_setting(parser: argparse.ArgumentParser, name: str) -> None:
    setting = EngineConfig.__dataclass_fields__[name]
    _add(parser, name, setting.default, _READERS.get(name, _reader(setting.default)), setting.metadata["help"])


def _add(parser: argparse.ArgumentParser, name: str, default: Any, read: Any, text: str) -> None:
    """One flag with its twin in the environment."""
    flag = "--" + name.replace("_", "-")
    shown = "" if default is None else f" (default: {default})"
    from_env = os.environ.get(_ENV + name.upper())
    if from_env is not None:
        try:
            default = read(from_env)
        except (ValueError, argparse.ArgumentTypeError):
            parser.error(f"{_ENV}{name.upper()}={from_env!r} has no meaning for {flag}")
    if read is _boolean:
        parser.add_argument(flag, default=default, action=argparse.BooleanOptionalAction, help=text + shown)
    else:
        metavar = name.rpartition("_")[2].upper()
        parser.add_argument(flag, default=default, type=read, metavar=metavar, help=(text + shown).replace("%", "%%"))


def _reader(default: Any) -> Any:
    return {bool: _boolean, int: int, float: float}.get(type(default), str)


def _boolean(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false"):
        raise ValueError(text)
    return text.lower() in ("1", "true")


def _log_level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of debug, info, warning and error")
    return text.upper()


def _api_key(text: str) -> str:
    try:
        key = Path(text[1:]).read_text(encoding="utf-8").strip() if text.startswith("@") else text
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text[1:]!r} cannot be read: {error.__class__.__name__}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise argparse.ArgumentTypeError("the key must be printable ASCII, and not empty")
    return key


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; they go from 0 to {2**16 - 1}")
    return int(text)


def _seconds(text: str) -> float:
    if re.fullmatch(r"\d{1,9}(\.\d*)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return float(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _count_or_size(text: str) -> int:
    try:
        return parse_size("value", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_READERS: dict[str, Any] = {
    "hf_overrides": _json_object,
    "max_num_batched_tokens": _count_or_size,
    "max_num_seqs": _count_or_size,
}
"""Settings whose default does not tell how to read them."""


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [setting.name for setting in fields(EngineConfig) if setting.name != "model"]
    return {name: getattr(arguments, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
