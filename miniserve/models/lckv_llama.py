"""LCKV's Llama (2405.10637; systematic study 2410.14442): the map stands in `layer_types`, as `0_0_2s_2s`."""

from __future__ import annotations

from miniserve.errors import UnsupportedModel
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read whyNLP/LCKV's config.json."""
    if fields.flag("force_nodiag"):
        raise UnsupportedModel("config.json: force_nodiag=true (no token attends to itself) is not supported")
    num_layers = fields.size("num_hidden_layers")
    sharing = KVSharing.lckv(fields.text("layer_types"), num_layers, fields.optional_size("sliding_window"))
    bias = fields.flag("attention_bias")
    return llama_config(fields, sharing, qkv_bias=bias, output_bias=bias)
