"""Qwen2: the Llama body with biases on q, k and v; upper layers may be windowed."""

from __future__ import annotations

from miniserve.errors import ConfigError
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read Qwen2's config.json."""
    return llama_config(fields, windowed_map(fields), qkv_bias=True)


def windowed_map(fields: Fields) -> KVSharing:
    """No sharing; windows as `layer_types` says or, in older files, from layer `max_window_layers` on.

    `sliding_window` counts only if `use_sliding_window` is true.
    """
    num_layers = fields.size("num_hidden_layers")
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = fields.layer_kinds(num_layers)
    if kinds is None:
        first = fields.count("max_window_layers", num_layers)
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention but no sliding_window is in use")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return KVSharing.none(num_layers).with_windows(windows)
