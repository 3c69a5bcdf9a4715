"""config.json, read strictly: every field that a family asks for is checked, and errors name it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniserve.checks import shorten
from miniserve.errors import ConfigError, ModelError
from miniserve.kvcache.layout import Geometry
from miniserve.kvcache.sharing import KVSharing

MAX_SIZE = 1 << 24
"""No count in a config.json may exceed this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine asks of any model; each family's file adds its own fields."""

    model_type: str
    vocab_size: int  # V: rows of the embedding table
    hidden_size: int  # H
    max_position_embeddings: int
    dtype: str  # as stored in the checkpoint
    eos_token_ids: tuple[int, ...]
    sharing: KVSharing
    num_heads: int  # Hq
    geometry: tuple[Geometry, ...]  # per layer
    sliding_window: int | None = None  # what `s` means in a map given by the user

    @property
    def cut(self) -> int:
        """The layer behind which only sampled rows go on."""
        return self.sharing.cut


class Fields:
    """Typed access to config.json.

    Raises:
        ConfigError: a field is missing or has no meaning; the message names it.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def replaced(self, **values: Any) -> Fields:
        """The same fields with some of them set anew."""
        return Fields({**self.values, **values})

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise ConfigError(f"config.json: {name} must be a whole number from 1 to {MAX_SIZE}, not {shorten(value)}")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number from 0 on."""
        return 0 if self.get(name, default) == 0 else self.size(name, default)

    def optional_size(self, name: str) -> int | None:
        """A whole number from 1 on, or None."""
        return None if self.get(name) is None else self.size(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ConfigError(f"config.json: {name} must be a number above 0, not {shorten(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise ConfigError(f"config.json: {name} must be true or false, not {shorten(value)}")
        return value

    def choice(self, name: str, options: Sequence[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self.get(name, default)
        if value not in options:
            raise ConfigError(f"config.json: {name}={shorten(value)} is not supported; known: {', '.join(options)}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"config.json: {name} must be a string, not {shorten(value)}")
        return value

    def layer_kinds(self, num_layers: int) -> list[str] | None:
        """transformers' `layer_types`: one attention kind per layer, or None where the field is absent."""
        kinds = self.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ConfigError(f"config.json: layer_types must list one kind for each of the {num_layers} layers")
        for layer, kind in enumerate(kinds):
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"config.json: layer_types[{layer}]={shorten(kind)} is not supported")
        return kinds

    def common(self) -> dict[str, Any]:
        """The fields of `ModelConfig` that every family stores under the same names."""
        return {
            "model_type": self.text("model_type"),
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "max_position_embeddings": self.size("max_position_embeddings"),
            "dtype": self.get("dtype", self.get("torch_dtype", "float32")),
            "eos_token_ids": _token_ids(self.get("eos_token_id")),
        }

    def heads(self) -> tuple[int, int, int]:
        """Hq, Hkv and D, checked against each other and the hidden size."""
        num_heads = self.size("num_attention_heads")
        num_kv_heads = self.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
            )
        hidden_size = self.size("hidden_size")
        if self.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads} "
                "and no head_dim is given"
            )
        head_dim = self.size("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim={head_dim} is odd; RoPE rotates pairs")
        return num_heads, num_kv_heads, head_dim


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> Fields:
    """config.json of a folder (or the file itself), with generation_config.json's end tokens and overrides on top.

    Raises:
        ModelError: there is no readable config.json.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    if path.suffix == ".gguf":
        raise ModelError(f"{path}: GGUF files are not supported; give a HuggingFace folder with safetensors")
    values = read_json(path)
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        values |= {k: v for k, v in read_json(generation).items() if k == "eos_token_id" and v is not None}
    return Fields(values | dict(overrides or {}))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: no such file, or no JSON object in it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; give a HuggingFace model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return values


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ConfigError(f"config.json: eos_token_id must be token ids, not {shorten(value)}")
    return tuple(ids)
