"""`EngineConfig`: every setting of the engine, once. The command line's flags, their `MINISERVE_*` twins in the
environment and `--help` are made from it (see `cli.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from miniserve.checks import shorten
from miniserve.errors import ConfigError


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Names are vLLM's where it has them."""

    model: str = field(metadata={"help": "model folder: config.json, safetensors, tokenizer files"})
    tokenizer: str | None = _setting(None, "folder of the tokenizer, if it is not the model's")
    dtype: str = _setting("auto", "float32, bfloat16 or float16; auto: the checkpoint's if the machine is fast at it")
    quantization: str | None = _setting(None, "int8: hold the weights of all products in 8 bits (cpu kernel set)")
    kv_cache_dtype: str = _setting("auto", "int8: hold K/V in 8 bits with a scale per token and head; auto: as dtype")
    device: str = _setting("auto", "cpu or cuda; auto: cuda if there is one")
    kv_sharing: str | Sequence[int] | None = _setting(
        None, "another sharing map: none, cla:2, mlkv:3, suffix:10, yoco or one entry per layer as in 0_0_2s_2s"
    )
    kv_cache_memory: int | str | None = _setting(
        None,
        "bytes for the KV pool, as in 4GiB; default: what max_num_seqs full-length requests use, "
        "at most a quarter of free memory",
    )
    block_size: int = _setting(16, "token slots in a KV block (of the retention class with the largest tokens)")
    max_model_len: int | str | None = _setting(
        None, "longest prompt + output in tokens (8k = 8000); default: the model's"
    )
    max_num_seqs: int = _setting(128, "requests that run at once")
    max_num_batched_tokens: int = _setting(512, "token budget of a step")
    max_waiting: int = _setting(1024, "requests that may wait; more are refused")
    enable_prefix_caching: bool = _setting(True, "reuse the K/V of prompts that begin alike")
    ops: str = _setting("auto", "kernel set: reference, cpu or cuda; auto: the best that runs here")
    enforce_eager: bool = _setting(False, "run the model's own code in every step, never repeat a recorded one")
    seed: int = _setting(0, "seed for requests that bring none")
    max_logprobs: int = _setting(20, "most logprobs per token that a request may ask for; -1: the whole vocabulary")
    hf_overrides: Mapping[str, Any] | None = _setting(None, "fields that replace those of config.json (JSON)")

    def __post_init__(self) -> None:
        """Refuse values that have no meaning whatever the model.

        Raises:
            ConfigError: names the field, its value and what is allowed.
        """
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be the path of a model folder, not {self.model!r}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_waiting", self.max_waiting, 0)
        _at_least("max_logprobs", self.max_logprobs, -1)
        _at_least("seed", self.seed, -(2**63))
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype={self.dtype!r}: use auto, float32, bfloat16 or float16")
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization={shorten(self.quantization)}: use int8, or leave it out")
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise ConfigError(f"kv_cache_dtype={shorten(self.kv_cache_dtype)}: use auto or int8")
        for name in ("device", "ops"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a name, not {shorten(getattr(self, name))}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise ConfigError(f"tokenizer must be the path of a folder, not {shorten(self.tokenizer)}")
        if self.kv_sharing is not None and not isinstance(self.kv_sharing, (str, list, tuple)):
            raise ConfigError(f"kv_sharing must be text or one layer index per layer, not {shorten(self.kv_sharing)}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.max_model_len is not None:
            _at_least("max_model_len", self.model_len, 1)
        if self.kv_cache_memory is not None:
            _at_least("kv_cache_memory", self.kv_cache_bytes, 1)
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError("hf_overrides must map fields of config.json to values")

    @property
    def model_len(self) -> int | None:
        """`max_model_len` as a number."""
        return None if self.max_model_len is None else parse_size("max_model_len", self.max_model_len)

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` as a number of bytes."""
        return None if self.kv_cache_memory is None else parse_size("kv_cache_memory", self.kv_cache_memory)

    @classmethod
    def build(cls, model: Any, settings: Mapping[str, Any]) -> EngineConfig:
        """From keyword arguments.

        Raises:
            ConfigError: an unknown setting (with the ones there are), or a value without meaning.
        """
        known = [setting.name for setting in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
        return cls(model=str(model), **settings)


def parse_size(name: str, value: int | str) -> int:
    """A count or a number of bytes: 4096, "8k" (8000), "8K" (8192), "4GB" (10^9), "4GiB" or "4G" (2^30).

    Raises:
        ConfigError: anything else.
    """
    if type(value) is int:
        return value
    pattern = r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kKMGT])(iB|B)?|B)?"
    match = re.fullmatch(pattern, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{name}={shorten(value)} is no size; write a number, or one as in 8k, 512MiB or 4GiB")
    number, unit, suffix = match.groups()
    base = 1000 if suffix == "B" or (unit == "k" and suffix is None) else 1024
    return int(Fraction(number) * base ** (" KMGT".index(unit.upper()) if unit else 0))


def _at_least(name: str, value: Any, lowest: int) -> None:
    if type(value) is not int or value < lowest:
        raise ConfigError(f"{name} must be a whole number of at least {lowest}, not {value!r}")
