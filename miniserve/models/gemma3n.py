"""Gemma 3n (text): shared K/V in the upper layers, four parallel streams (AltUp), a low-rank residual (LAuReL).

    streams (T, 4, H) ── predict ──► active one ──norm──┬── attention ──norm──+── / √2 ── MLP ──► correct all four,
                                                        └── LAuReL ───────────┘                   tell all but the first

AltUp: Baykal and others 2023 (2301.13310); LAuReL: 2411.07501. The MLP of the first layers is sparse: only the largest
of a gate's outputs stay, as many as a normal distribution with their mean and deviation puts above a quantile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.checks import shorten
from miniserve.errors import ConfigError
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
from miniserve.models.layers import GatedMlp, linear, rms_norm, stacked_linear
from miniserve.ops import Norm, Ops, Rotation


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(GemmaConfig):
    """Gemma 3n's own fields."""

    num_streams: int  # A
    active_stream: int
    scales_corrected: bool
    laurel_rank: int
    sparsity: tuple[float, ...]  # per layer: the part of the gate's outputs that is dropped


def parse(fields: Fields) -> Gemma3nConfig:
    """Read Gemma 3n's config.json, with the text fields at the top or under `text_config`."""
    fields = text_fields(fields)
    _, kv_heads, head_dim = fields.heads()
    common = gemma_fields(fields, [KVGeometry(kv_heads, head_dim)] * len(layer_kinds(fields)))
    num_layers = common["sharing"].num_layers
    num_streams, active = fields.size("altup_num_inputs", 4), fields.count("altup_active_idx", 0)
    if active >= num_streams:
        raise ConfigError(f"config.json: altup_active_idx={active} is no stream of altup_num_inputs={num_streams}")
    if not common["told_size"]:
        raise ConfigError("config.json: hidden_size_per_layer_input must be at least 1 in this family")
    sizes = _per_layer(fields, "intermediate_size", num_layers, None)
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(f"config.json: intermediate_size must hold whole numbers from 1 on, not {shorten(sizes)}")
    sparsity = _per_layer(fields, "activation_sparsity_pattern", num_layers, 0.0)
    if any(type(part) not in (int, float) or not 0 <= part < 1 for part in sparsity):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern must hold numbers from 0 to below 1, not {shorten(sparsity)}"
        )
    return Gemma3nConfig(
        **common,
        keys_are_values=False,
        intermediate_sizes=tuple(sizes),
        num_streams=num_streams,
        active_stream=active,
        scales_corrected=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.size("laurel_rank", 64),
        sparsity=tuple(map(float, sparsity)),
    )


def _per_layer(fields: Fields, name: str, num_layers: int, default: Any) -> list[Any]:
    """A value for all layers, or a list with one for each."""
    value = fields.get(name, default)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers:
        raise ConfigError(f"config.json: {name} must have one entry for each of the {num_layers} layers")
    return values


class AltUp:
    """Predicts all streams from all, and corrects them by what the layer made of the active one."""

    def __init__(self, config: Gemma3nConfig, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.ops = config, ops
        count, hidden = config.num_streams, config.hidden_size
        router_norm = rms_norm(weights, f"{name}.router_norm", hidden, config.rms_norm_eps)
        self.router_norm = Norm(router_norm.weight / hidden, router_norm.eps)
        self.router = linear(weights, ops, f"{name}.modality_router", count, hidden)
        self.prediction = linear(weights, ops, f"{name}.prediction_coefs", count * count, count)
        self.correction = linear(weights, ops, f"{name}.correction_coefs", count, count)
        self.scale = weights.take(f"{name}.correct_output_scale", (hidden,))

    def predict(self, streams: Tensor) -> Tensor:
        """streams (T, A, H) -> each plus a mixture of all, (T, A, H)."""
        modalities = self._modalities(streams[:, self.config.active_stream])
        mixture = self.ops.linear(modalities, self.prediction).unflatten(-1, (self.config.num_streams, -1))
        return streams + mixture @ streams

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """predicted (T, A, H), activated (T, H), the layer's output -> (T, A, H)."""
        innovation = activated - predicted[:, self.config.active_stream]  # (T, H)
        strength = self.ops.linear(self._modalities(activated), self.correction) + 1.0  # (T, A)
        return predicted + strength[..., None] * innovation[:, None]

    def told_by(self, corrected: Tensor) -> Tensor:
        """What the per-layer gate looks at: the active stream of corrected (T, A, H), scaled."""
        active = corrected[:, self.config.active_stream]
        return active * self.scale if self.config.scales_corrected else active

    def _modalities(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, A)."""
        return self.ops.linear(x.contiguous(), self.router, norm=self.router_norm).float().tanh().to(x.dtype)


class SparseMlp:
    """A gated MLP most of whose gate's outputs are dropped: those below mean + z * deviation."""

    def __init__(
        self, weights: Checkpoint, ops: Ops, names: tuple[str, str, str], hidden: int, inner: int, dropped: float
    ) -> None:
        gate, up, down = names
        self.ops, self.z = ops, NormalDist().inv_cdf(dropped)
        self.gate_up = stacked_linear(weights, ops, {gate: inner, up: inner}, hidden)
        self.down = linear(weights, ops, down, hidden, inner)

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x (T, H), normed first -> (T, H)."""
        gate, up = self.ops.linear(x, self.gate_up, norm=norm).chunk(2, dim=-1)  # (T, F) each
        deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
        kept = F.relu(gate - (mean + deviation * self.z))
        return self.ops.linear(F.gelu(kept, approximate="tanh") * up, self.down)


class Layer:
    """Attention and LAuReL side by side on the active stream, then the MLP; the other streams follow."""

    def __init__(self, config: Gemma3nConfig, layer: int, prefix: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.ops = config, ops
        name, hidden, eps = f"{prefix}layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.altup = AltUp(config, f"{name}.altup", weights, ops)
        self.attention = Attention(config, layer, f"{name}.self_attn", weights, ops)
        self.laurel_left = linear(weights, ops, f"{name}.laurel.linear_left", config.laurel_rank, hidden)
        self.laurel_right = linear(weights, ops, f"{name}.laurel.linear_right", hidden, config.laurel_rank)
        self.laurel_norm = rms_norm(weights, f"{name}.laurel.post_laurel_norm", hidden, eps)
        self.input_norm = rms_norm(weights, f"{name}.input_layernorm", hidden, eps)
        self.attention_norm = rms_norm(weights, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp_norm = rms_norm(weights, f"{name}.pre_feedforward_layernorm", hidden, eps)
        self.norm_behind_mlp = rms_norm(weights, f"{name}.post_feedforward_layernorm", hidden, eps)
        names = f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", f"{name}.mlp.down_proj"
        inner, dropped = config.intermediate_sizes[layer], config.sparsity[layer]
        self.mlp: SparseMlp | GatedMlp = (
            SparseMlp(weights, ops, names, hidden, inner, dropped)
            if dropped
            else GatedMlp(weights, ops, names, hidden, inner, activation=ACTIVATION)
        )
        self.gate = PerLayerGate(config, name, weights, ops)

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> tuple[Tensor, ...]:
        """x (T, A, H) -> (q, predicted streams, LAuReL's output); K/V of an owner are written."""
        predicted = self.altup.predict(x)
        active = self.ops.normed(predicted[:, self.config.active_stream].contiguous(), self.input_norm)
        laurel = self.ops.linear(self.ops.linear(active, self.laurel_left), self.laurel_right)
        q = self.attention.project(active, None, batch, kv_pool, rotation)
        return q, predicted, active + self.ops.normed(laurel, self.laurel_norm)

    def finish(
        self,
        projected: Sequence[Tensor],
        x: Tensor,
        told: Tensor | None,
        batch: ForwardBatch,
        kv_pool: KVPool,
        rotation: Rotation,
    ) -> Tensor:
        """(q, predicted (T, A, H), laurel (T, H)), told (T, P) -> the streams behind this layer, (T, A, H)."""
        q, predicted, laurel = projected
        attended = self.ops.normed(self.attention.attend(q, batch, kv_pool, rotation), self.attention_norm)
        mixed = (predicted[:, self.config.active_stream] + attended + laurel) * 2**-0.5
        inner = self.mlp(mixed, norm=self.mlp_norm)
        streams = self.altup.correct(predicted, mixed + self.ops.normed(inner, self.norm_behind_mlp))
        if told is None:
            raise RuntimeError("this family's layers are told each token")
        news = self.gate(self.altup.told_by(streams), told)  # (T, H)
        hears = torch.ones(self.config.num_streams, 1, dtype=news.dtype, device=news.device)
        hears[0] = 0  # all streams but the first, whichever is the active one
        return streams + hears * news[:, None]


class Model(GemmaModel):
    """token ids -> hidden states of the rows behind the cut -> logits."""

    def __init__(self, config: Gemma3nConfig, weights: Checkpoint, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len, Layer)
        prefix, hidden, others = self.prefix, config.hidden_size, range(config.num_streams - 1)
        self.spread = [linear(weights, ops, f"{prefix}altup_projections.{i}", hidden, hidden) for i in others]
        self.gather = [linear(weights, ops, f"{prefix}altup_unembed_projections.{i}", hidden, hidden) for i in others]

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        x, told = self.embed(batch.token_ids)
        streams = torch.stack([x, *(_as_large(self.ops.linear(x, w), x) for w in self.spread)], dim=1)  # (T, A, H)
        streams = self.run(streams, told, batch, kv_pool)
        first, *rest = (stream.contiguous() for stream in streams.unbind(1))
        gathered = [_as_large(self.ops.linear(stream, w), first) for stream, w in zip(rest, self.gather)]
        return torch.stack([first, *gathered]).mean(dim=0)


def _as_large(x: Tensor, model: Tensor) -> Tensor:
    """x (T, H), scaled to the RMS of `model`'s rows."""
    wanted, actual = (t.square().mean(-1, keepdim=True) for t in (model, x))
    return x * wanted.sqrt() / actual.clamp(min=1e-5).sqrt()
