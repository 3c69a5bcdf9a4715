"""CLA-Llama of the LCKV authors: `layer_types` is a string of codes; 1 reads the nearest owner below, 0 and 2 own."""

from __future__ import annotations

from miniserve.errors import ConfigError
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read cla-llama's config.json."""
    num_layers = fields.size("num_hidden_layers")
    codes = fields.text("layer_types").split("_")
    if len(codes) != num_layers or not set(codes) <= {"0", "1", "2"}:
        raise ConfigError(f"config.json: layer_types must be {num_layers} codes 0, 1 or 2 joined by '_'")
    if codes[0] == "1":
        raise ConfigError("config.json: layer_types starts with 1, but layer 0 has no owner below it")
    owners = [layer for layer, code in enumerate(codes) if code != "1"]
    bias = fields.flag("attention_bias")
    return llama_config(fields, KVSharing.nearest_owner(num_layers, owners), qkv_bias=bias, output_bias=bias)
