"""Qwen3 (2505.09388): the Llama body with an RMSNorm on each head of q and k, before RoPE."""

from __future__ import annotations

from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config
from miniserve.models.qwen2 import windowed_map

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read Qwen3's config.json."""
    bias = fields.flag("attention_bias")
    return llama_config(fields, windowed_map(fields), qkv_bias=bias, output_bias=bias, qk_norm=True)
