"""Mistral (2310.06825): the Llama body, every layer windowed if `sliding_window` is set."""

from __future__ import annotations

from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read Mistral's config.json."""
    num_layers = fields.size("num_hidden_layers")
    window = fields.optional_size("sliding_window")
    return llama_config(fields, KVSharing.none(num_layers).with_windows([window] * num_layers))
