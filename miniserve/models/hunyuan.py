"""HunYuan (Hunyuan-Large, 2411.02265; A13B): Cross-Layer Attention whose readers keep a key norm of their own.

The Llama body with two changes. The norms of q and k come *behind* RoPE, and an owner hands its readers the raw key:
each layer rotates it and norms it with its own weight. The authors' code therefore keeps one cache per layer. Ours
keeps one per group, and is exact:

    q . (w_k * k̂)  =  (q * w_k) . k̂         k̂: the rotated key divided by its RMS, without any weight

k̂ is the same for all layers of the group (a rotation leaves the RMS as it is), so the pool holds k̂, and every
layer, owner or reader, multiplies its query by its own key weight. That product with the query's weight is made at
loading.

The MLP may be a mixture of experts beside a shared one (section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.checks import shorten
from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models import llama
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields
from miniserve.models.layers import Experts, linear, rms_norm
from miniserve.models.llama import LlamaConfig, llama_config, llama_mlp
from miniserve.ops import Norm, Ops, Rotation

__all__ = ["Model", "parse"]


@dataclass(frozen=True, kw_only=True)
class HunYuanConfig(LlamaConfig):
    """The Llama body with HunYuan's norms and experts; the lists have one entry per layer."""

    norm_behind_rope: bool
    num_experts: tuple[int, ...]  # 1: a plain MLP
    experts_per_token: tuple[int, ...]
    num_shared_experts: tuple[int, ...]  # width of the shared MLP in units of `intermediate_size`
    expert_size: tuple[int, ...]  # F of a routed expert
    shares_sum_to_one: bool  # also where a token has a single expert


def parse(fields: Fields) -> HunYuanConfig:
    """Read Tencent's config.json."""
    num_layers = fields.size("num_hidden_layers")
    factor = fields.size("cla_share_factor", 1) if fields.flag("use_cla") else 1
    return hunyuan_config(fields, KVSharing.cla(num_layers, factor), shares_sum_to_one=False)


def hunyuan_config(fields: Fields, sharing: KVSharing, *, shares_sum_to_one: bool) -> HunYuanConfig:
    """The fields that all HunYuan families store alike."""
    head_dim = fields.get("head_dim", fields.get("attention_head_dim"))
    fields = fields.replaced(head_dim=head_dim)
    for name, wanted in (("use_mla", False), ("moe_drop_tokens", False), ("use_rotary_pos_emb", True)):
        if fields.flag(name, wanted) != wanted:
            raise UnsupportedModel(f"config.json: {name}={not wanted} is not supported".lower())
    if fields.number("routed_scaling_factor", 1.0) != 1.0:
        raise UnsupportedModel("config.json: routed_scaling_factor must be 1")
    num_layers, bias = sharing.num_layers, fields.flag("attention_bias")
    body = llama_config(fields, sharing, qkv_bias=bias, output_bias=bias)
    dense_layers = fields.count("moe_layer_num_skipped", 0)
    num_experts = _per_layer(fields, "num_experts", num_layers, 1)
    num_experts = tuple(1 if i < dense_layers else count for i, count in enumerate(num_experts))
    experts_per_token = _per_layer(fields, "moe_topk", num_layers, 1)
    for layer, (k, count) in enumerate(zip(experts_per_token, num_experts)):
        if count > 1 and k > count:
            raise ConfigError(f"config.json: moe_topk={k} of layer {layer} exceeds its num_experts={count}")
    shared = _per_layer(fields, "num_shared_expert", num_layers, 1)
    return HunYuanConfig(
        **vars(body),
        norm_behind_rope=fields.flag("use_qk_norm"),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_shared_experts=shared if fields.flag("use_mixed_mlp_moe", True) else (0,) * num_layers,
        expert_size=_per_layer(fields, "moe_intermediate_size", num_layers, body.intermediate_size),
        shares_sum_to_one=shares_sum_to_one,
    )


def _per_layer(fields: Fields, name: str, num_layers: int, default: int) -> tuple[int, ...]:
    """A number for all layers, or a list with one for each."""
    value = fields.get(name, default)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) < num_layers or any(type(v) is not int or v < 1 for v in values):
        raise ConfigError(
            f"config.json: {name} must be a whole number from 1 on, or a list of {num_layers}, not {shorten(value)}"
        )
    return tuple(values[:num_layers])


class Attention(llama.Attention):
    """Llama's, with norms behind the rotation and the key's weight on the query's side."""

    def __init__(self, config: HunYuanConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        name, head, eps = f"model.layers.{layer}.self_attn", config.head_dim, config.rms_norm_eps
        query, key = (rms_norm(weights, f"{name}.{which}_layernorm", head, eps) for which in ("query", "key"))
        self.query_norm = Norm(query.weight * key.weight, eps)
        self.key_norm = Norm(torch.ones_like(key.weight), eps)

    def project(self, x: Tensor, norm: Norm, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first -> q (T, Hq, D), rotated and normed. An owner writes k̂ and v."""
        heads = self.ops.linear(x, self.qkv_proj, norm=norm).unflatten(-1, (-1, self.config.head_dim))
        q, *kv = heads.split(self.sizes if self.owns else self.sizes[:1], dim=1)  # (T, Hq, D), (T, Hkv, D) twice
        if self.owns:
            k, v = kv
            unit = self.ops.normed(self.ops.rotate(k, rotation), self.key_norm)
            self.ops.write_kv(unit, v, kv_pool.of_layer(self.layer), batch, None)
        return self.ops.normed(self.ops.rotate(q, rotation), self.query_norm)

    def attend(
        self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation | None
    ) -> Tensor:
        """q (T, Hq, D), rotated already -> residual + attention over the group's memory, (T, H)."""
        return super().attend(q, residual, batch, kv_pool, rotation=None)


class MixtureOfExperts:
    """A few of the routed MLPs per token, and one shared MLP for all."""

    def __init__(self, config: HunYuanConfig, layer: int, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.ops, self.k = ops, config.experts_per_token[layer]
        self.shares_sum_to_one = config.shares_sum_to_one or self.k > 1
        count, inner, hidden = config.num_experts[layer], config.expert_size[layer], config.hidden_size
        self.router = linear(weights, ops, f"{name}.gate.wg", count, hidden)
        gate_up, down = [], []
        for expert in range(count):
            at = f"{name}.experts.{expert}"
            pair = [weights.take(f"{at}.{which}_proj.weight", (inner, hidden)) for which in ("gate", "up")]
            gate_up.append(torch.cat(pair))
            down.append(weights.take(f"{at}.down_proj.weight", (hidden, inner)))
        self.experts = Experts(ops, gate_up, down, "silu")
        shared = config.num_shared_experts[layer]
        self.shared = llama_mlp(config, f"{name}.shared_mlp", weights, ops, shared) if shared else None

    def __call__(self, x: Tensor, norm: Norm, residual: Tensor) -> Tensor:
        """x (T, H), normed first -> residual + shared MLP + routed experts, (T, H)."""
        x = self.ops.normed(x, norm)
        shares, chosen = self.ops.linear(x, self.router).float().softmax(-1).topk(self.k)  # (T, k) each
        if self.shares_sum_to_one:
            shares = shares / shares.sum(-1, keepdim=True)
        routed = residual + self.experts(x, chosen, shares)
        return routed if self.shared is None else self.shared(x, residual=routed)


class Layer(llama.Layer):
    """Llama's layer with this family's attention and MLP where the config asks for them."""

    def __init__(self, config: HunYuanConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attention = Attention if config.norm_behind_rope else llama.Attention
        self.input_norm = rms_norm(weights, f"{name}.input_layernorm", hidden, eps)
        self.attention = attention(config, layer, weights, ops)
        self.mlp_norm = rms_norm(weights, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp: Any = (
            MixtureOfExperts(config, layer, f"{name}.mlp", weights, ops)
            if config.num_experts[layer] > 1
            else llama_mlp(config, f"{name}.mlp", weights, ops)
        )


Model = partial(llama.Model, layer=Layer)
