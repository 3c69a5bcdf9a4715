"""SwiftKV (2410.03960) on the Llama body: all upper layers' K/V come from one vector, the input of the first of them.

    layers 0 .. N-1    ordinary
    layer N            x ── norm_swiftkv ──┬── k, v of layer N       written for all upper layers at once, so a token
                                           ├── k, v of layer N + 1   that is not sampled is done here: the cut is N,
                                           └── ...                   not the last owner
    layers N .. L-1    q from their own stream, K/V from the pool

With AcrossKV (section 3.3 there) every `key_value_group_size` upper layers also share one K/V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import UnsupportedModel
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models import llama
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields
from miniserve.models.layers import linear, rms_norm, stacked_linear
from miniserve.models.llama import LlamaConfig, llama_config, llama_mlp
from miniserve.ops import Ops, Rotation

__all__ = ["Model", "parse"]


@dataclass(frozen=True, kw_only=True)
class SwiftKVConfig(LlamaConfig):
    """The Llama body and where its upper layers begin."""

    first_upper: int  # N

    @property
    def cut(self) -> int:
        """The first upper layer writes the K/V of all of them."""
        return min(self.first_upper, self.sharing.cut)


def parse(fields: Fields) -> SwiftKVConfig:
    """Read ArcticTraining's config.json."""
    return swiftkv_config(fields, qkv_bias=fields.flag("attention_bias"), output_bias=fields.flag("attention_bias"))


def swiftkv_config(fields: Fields, *, qkv_bias: bool, output_bias: bool) -> SwiftKVConfig:
    """The fields that the Llama and the Qwen2 form store alike."""
    if not fields.flag("swiftkv", True):
        raise UnsupportedModel("config.json: swiftkv=false; such a checkpoint is an ordinary model of its base family")
    num_layers = fields.size("num_hidden_layers")
    first_upper = fields.count("num_key_value_layers", num_layers)
    sharing = KVSharing.acrosskv(num_layers, first_upper, fields.size("key_value_group_size", 1))
    body = llama_config(fields, sharing, qkv_bias=qkv_bias, output_bias=output_bias)
    return SwiftKVConfig(**vars(body), first_upper=first_upper)


class UpperAttention(llama.Attention):
    """Llama's attention as a reader has it, with the query projection that SwiftKV trained."""

    def __init__(self, config: SwiftKVConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops, self.scale = config, layer, ops, config.head_dim**-0.5
        self.owns, self.q_norm = False, None  # the first upper layer writes
        name, q_size, hidden = f"model.layers.{layer}.self_attn", config.num_heads * config.head_dim, config.hidden_size
        self.qkv_proj = linear(weights, ops, f"{name}.q_proj_swiftkv", q_size, hidden, bias=config.qkv_bias)
        self.o_proj = linear(weights, ops, f"{name}.o_proj", hidden, q_size, bias=config.output_bias)


class UpperKV:
    """K/V of all upper layers out of one vector."""

    def __init__(self, config: SwiftKVConfig, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.ops = config, ops
        self.owners = [i for i in config.sharing.group_owners if i >= config.first_upper]
        names = [f"model.layers.{i}.self_attn.{part}_proj_swiftkv" for i in self.owners for part in "kv"]
        sizes = dict.fromkeys(names, config.num_kv_heads * config.head_dim)
        self.norm = rms_norm(weights, "model.norm_swiftkv", config.hidden_size, config.rms_norm_eps)
        self.projection = stacked_linear(weights, ops, sizes, config.hidden_size, bias=config.qkv_bias)

    def write(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> None:
        """x (T, H) -> the rows' K/V in the memory of every upper group, k rotated."""
        heads = self.ops.linear(x, self.projection, norm=self.norm).unflatten(-1, (-1, self.config.head_dim))
        parts = heads.split(self.config.num_kv_heads, dim=1)  # k, v, k, v, ... each (T, Hkv, D)
        for owner, k, v in zip(self.owners, parts[::2], parts[1::2]):
            self.ops.write_kv(k, v, kv_pool.of_layer(owner), batch, rotation)


class Layer(llama.Layer):
    """Llama's layer; upper ones project only queries, and the first of them writes K/V for all."""

    def __init__(self, config: SwiftKVConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attention = llama.Attention if layer < config.first_upper else UpperAttention
        self.input_norm = rms_norm(weights, f"{name}.input_layernorm", hidden, eps)
        self.attention = attention(config, layer, weights, ops)
        self.mlp_norm = rms_norm(weights, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = llama_mlp(config, f"{name}.mlp", weights, ops)
        begins_upper = layer == config.first_upper <= config.sharing.cut  # else nobody owns K/V from here on
        self.upper_kv = UpperKV(config, weights, ops) if begins_upper else None
        if attention is UpperAttention:  # what the base model had here
            weights.ignore(rf"^{name}\.self_attn\.[qkv]_proj\.", "replaced by SwiftKV's own")

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> q (T, Hq, D); K/V of an owner, or of all upper layers, are written."""
        if self.upper_kv is not None:
            self.upper_kv.write(x, batch, kv_pool, rotation)
        return super().project(x, batch, kv_pool, rotation)


Model = partial(llama.Model, layer=Layer)
