"""LCKV's Llama (2405.10637; systematic study 2410.14442): the map stands in `layer_types`, as `0_0_2s_2s`."""

from __future__ import annotations

from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.llama import LlamaConfig, Model, llama_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> LlamaConfig:
    """Read whyNLP/LCKV's config.json."""
    if fields.flag("force_nodiag"):
        raise UnsupportedModel("config.json: force_nodiag=true (no token attends to itself) is not supported")
    num_layers = fields.size("num_hidden_layers")
    sharing = lckv_map(fields.text("layer_types"), num_layers, fields.optional_size("sliding_window"))
    bias = fields.flag("attention_bias")
    return llama_config(fields, sharing, qkv_bias=bias, output_bias=bias)


def lckv_map(layer_types: str, num_layers: int, window: int | None) -> KVSharing:
    """A checkpoint's own map.

    Here a layer that anybody names owns K/V even if it reads another layer itself, so a chain means something else
    than in `KVSharing.from_list`: it is refused instead of resolved.
    """
    sharing = KVSharing.parse(f"lckv:{layer_types}", num_layers, window=window)
    for layer, entry in enumerate(layer_types.split("_")):
        if int(entry.split("s")[0]) != sharing.owners[layer]:
            raise ConfigError(
                f"layer_types: layer {layer} reads layer {entry}, which itself reads another layer; "
                "an owner that does not read its own K/V is not supported"
            )
    return sharing
