"""Gemma 4 (text): shared K/V in the upper layers, two head sizes, per-layer embeddings, a scalar behind each layer.

    x ──norm── attention ──norm──+──norm── MLP ──norm──+── told ──+── * layer_scalar ──►
                                 └── (experts beside) ─┘

Windowed and full layers have heads, bases and RoPE of their own, and so layer groups of two geometries. Readers may
have MLPs of twice the width (E2B). In the largest models full layers have no value projection (`attention_k_eq_v`), and
routed experts stand beside the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.kvcache.layout import KVGeometry
from miniserve.kvcache.pool import KVPool
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields
from miniserve.models.gemma import (
    ACTIVATION,
    Attention,
    GemmaConfig,
    GemmaModel,
    PerLayerGate,
    gemma_fields,
    layer_kinds,
    text_fields,
)
from miniserve.models.layers import Experts, GatedMlp, linear, rms_norm
from miniserve.ops import Norm, Ops, Rotation

_GLOBAL_HEAD_DIM = 512  # of full layers, where config.json does not say


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """Gemma 4's own fields."""

    num_experts: int  # 0: none
    experts_per_token: int
    expert_size: int


def parse(fields: Fields) -> Gemma4Config:
    """Read Gemma 4's config.json, with the text fields at the top or under `text_config`."""
    fields = text_fields(fields)
    keys_are_values = fields.flag("attention_k_eq_v")
    geometry = [_geometry(fields, layer, kind, keys_are_values) for layer, kind in enumerate(layer_kinds(fields))]
    common = gemma_fields(fields, geometry)
    sharing, inner = common["sharing"], fields.size("intermediate_size")
    wide = 2 if fields.flag("use_double_wide_mlp") else 1
    has_experts = fields.flag("enable_moe_block")
    config = Gemma4Config(
        **common,
        keys_are_values=keys_are_values,
        intermediate_sizes=tuple(inner if sharing.owns(i) else wide * inner for i in range(sharing.num_layers)),
        num_experts=fields.size("num_experts") if has_experts else 0,
        experts_per_token=fields.size("top_k_experts") if has_experts else 0,
        expert_size=fields.size("moe_intermediate_size") if has_experts else 0,
    )
    if config.experts_per_token > config.num_experts:
        raise ConfigError(
            f"config.json: top_k_experts={config.experts_per_token} exceeds num_experts={config.num_experts}"
        )
    return config


def _geometry(fields: Fields, layer: int, kind: str, keys_are_values: bool) -> KVGeometry:
    """A layer's K/V: full layers differ by fields of their own, or, in newer files, in `per_layer_config`."""
    num_heads, kv_heads, head_dim = fields.heads()
    own = fields.get("per_layer_config")
    if own is None and kind == "full_attention":
        head_dim = fields.size("global_head_dim", _GLOBAL_HEAD_DIM)
        kv_heads = fields.size("num_global_key_value_heads", kv_heads) if keys_are_values else kv_heads
    elif own is not None:
        changes = own.get(str(layer), {}) if isinstance(own, dict) else None
        if not isinstance(changes, dict):
            raise ConfigError("config.json: per_layer_config must map layers to the fields that they change")
        unknown = changes.keys() - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise UnsupportedModel(
                f"config.json: per_layer_config[{layer}] changes {min(unknown)}, which is not supported"
            )
        kv_heads = Fields(changes).size("num_key_value_heads", kv_heads)
        head_dim = Fields(changes).size("head_dim", head_dim)
    if num_heads % kv_heads:
        raise ConfigError(f"config.json: layer {layer} has {kv_heads} KV heads for {num_heads} query heads")
    return KVGeometry(kv_heads, head_dim)


class RoutedExperts:
    """A few experts per token, chosen by what enters the MLP's branch, un-normed."""

    def __init__(self, config: Gemma4Config, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.ops, self.k = ops, config.experts_per_token
        hidden, inner, count, eps = config.hidden_size, config.expert_size, config.num_experts, config.rms_norm_eps
        scale = weights.take(f"{name}.router.scale", (hidden,))
        self.router_norm = Norm(scale * hidden**-0.5, eps)
        self.router = linear(weights, ops, f"{name}.router.proj", count, hidden)
        self.expert_scale = weights.take(f"{name}.router.per_expert_scale", (count,))
        self.norm = rms_norm(weights, f"{name}.pre_feedforward_layernorm_2", hidden, eps)
        self.norm_behind = rms_norm(weights, f"{name}.post_feedforward_layernorm_2", hidden, eps)
        gate_up = weights.take(f"{name}.experts.gate_up_proj", (count, 2 * inner, hidden))
        down = weights.take(f"{name}.experts.down_proj", (count, hidden, inner))
        self.experts = Experts(ops, gate_up.unbind(), down.unbind(), ACTIVATION)

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        scores = self.ops.linear(x, self.router, norm=self.router_norm)
        shares, chosen = scores.float().softmax(-1).topk(self.k)  # (T, k) each
        shares = shares / shares.sum(-1, keepdim=True) * self.expert_scale[chosen]
        return self.ops.normed(self.experts(self.ops.normed(x, self.norm), chosen, shares), self.norm_behind)


class Layer:
    """Attention and MLP, each between two norms, then what the layer is told."""

    def __init__(self, config: Gemma4Config, layer: int, prefix: str, weights: Checkpoint, ops: Ops) -> None:
        self.ops = ops
        name, hidden, eps = f"{prefix}layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.attention = Attention(config, layer, f"{name}.self_attn", weights, ops)
        self.input_norm = rms_norm(weights, f"{name}.input_layernorm", hidden, eps)
        self.attention_norm = rms_norm(weights, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp_norm = rms_norm(weights, f"{name}.pre_feedforward_layernorm", hidden, eps)
        self.norm_behind_mlp = rms_norm(weights, f"{name}.post_feedforward_layernorm", hidden, eps)
        names = f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", f"{name}.mlp.down_proj"
        inner = config.intermediate_sizes[layer]
        self.mlp = GatedMlp(weights, ops, names, hidden, inner, activation=ACTIVATION)
        self.experts = RoutedExperts(config, name, weights, ops) if config.num_experts else None
        if self.experts is not None:
            self.dense_norm = rms_norm(weights, f"{name}.post_feedforward_layernorm_1", hidden, eps)
        self.gate = PerLayerGate(config, name, weights, ops) if config.told_size else None
        self.scalar = weights.take(f"{name}.layer_scalar", (1,))

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> tuple[Tensor, ...]:
        """x (T, H) -> (q,); K/V of an owner are written."""
        return (self.attention.project(x, self.input_norm, batch, kv_pool, rotation),)

    def finish(
        self,
        projected: Sequence[Tensor],
        x: Tensor,
        told: Tensor | None,
        batch: ForwardBatch,
        kv_pool: KVPool,
        rotation: Rotation,
    ) -> Tensor:
        """(q,), x (T, H), told (T, P) -> the layer's output (T, H)."""
        x = x + self.ops.normed(self.attention.attend(projected[0], batch, kv_pool, rotation), self.attention_norm)
        inner = self.mlp(x, norm=self.mlp_norm)
        if self.experts is not None:
            inner = self.ops.normed(inner, self.dense_norm) + self.experts(x)
        x = x + self.ops.normed(inner, self.norm_behind_mlp)
        if self.gate is not None and told is not None:
            x = x + self.gate(x, told)
        return x * self.scalar


class Model(GemmaModel):
    """token ids -> hidden states of the rows behind the cut -> logits."""

    def __init__(self, config: Gemma4Config, weights: Checkpoint, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len, Layer)

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        return self.run(*self.embed(batch.token_ids), batch, kv_pool)
