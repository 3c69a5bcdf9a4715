"""SwiftKV on the Qwen2 body: biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from miniserve.models.config import Fields
from miniserve.models.llama_swiftkv import Model, SwiftKVConfig, swiftkv_config
from miniserve.models.qwen2 import windowed_map

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> SwiftKVConfig:
    """Read ArcticTraining's config.json; windows as in Qwen2."""
    config = swiftkv_config(fields, qkv_bias=True, output_bias=False)
    return replace(config, sharing=config.sharing.with_windows(windowed_map(fields).windows))
