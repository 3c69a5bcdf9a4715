"""What several families build from: the walk through the layers, linears, RoPE. No family's own rules live here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.checks import shorten
from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields
from miniserve.ops import Activation, Norm, Ops, RotaryEmbedding, Rotation


class Layer(Protocol):
    """A decoder layer in two halves, with the cut between them."""

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> q (T, Hq, D), not rotated yet. An owner writes the rows' K/V to its group's memory."""

    def finish(self, q: Tensor, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D), x (T, H) -> the layer's output (T, H), from attention over the group's memory on."""


def run_layers(
    ops: Ops,
    layers: Sequence[Layer],
    x: Tensor,
    batch: ForwardBatch,
    kv_pool: KVPool,
    rotary: RotaryEmbedding,
    cut: int | None,
) -> Tensor:
    """x (T, H) through all layers -> the hidden states of `batch.behind_cut`, (T', H).

    Once layer `cut`, the last owner, has written its K/V, no token needs the others' hidden states any more: only
    rows whose logits are wanted go on. With None nothing is cut, and all (T, H) come back.
    """
    rotation = ops.angles(rotary, batch.positions)
    for i, layer in enumerate(layers):
        q = layer.project(x, batch, kv_pool, rotation)
        if i == cut:
            batch, (x, q) = batch.cut(x, q)
            rotation = ops.angles(rotary, batch.positions)
        x = layer.finish(q, x, batch, kv_pool, rotation)
    return x


class GatedMlp:
    """down(activation(gate x) * up x): the MLP of Llama (SwiGLU, 2002.05202) and of most others."""

    def __init__(
        self,
        weights: Checkpoint,
        ops: Ops,
        names: tuple[str, str, str],  # gate, up, down
        hidden_size: int,
        inner_size: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        gate, up, down = names
        self.ops, self.activation = ops, activation
        self.gate_up = gated_linear(weights, ops, gate, up, inner_size, hidden_size, bias=bias)
        self.down = linear(weights, ops, down, hidden_size, inner_size, bias=bias)

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """x (T, H), normed first if `norm` says how -> (T, H), added to `residual` if there is one."""
        inner = self.ops.gated_linear(x, self.gate_up, self.activation, norm=norm)
        return self.ops.linear(inner, self.down, residual)


class Experts:
    """Gated MLPs of which each row uses a few (mixture of experts, 1701.06538)."""

    def __init__(self, ops: Ops, gate_up: Sequence[Tensor], down: Sequence[Tensor], activation: Activation) -> None:
        self.ops, self.activation = ops, activation
        self.gate_up = [ops.pack_gated(weight) for weight in gate_up]  # each (2 F, H), gate first
        self.down = [ops.pack(weight) for weight in down]  # each (H, F)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x (T, H); per row `chosen` (T, k) experts with their `shares` (T, k) -> the sum of their outputs, (T, H).

        A row's experts are added in the order of their numbers, whatever the other rows use.
        """
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            inner = self.ops.gated_linear(x[rows], self.gate_up[expert], self.activation)
            mixed = self.ops.linear(inner, self.down[expert]) * shares[rows, place, None]
            out.index_add_(0, rows, mixed.to(out.dtype))
        return out


def output_head(weights: Checkpoint, ops: Ops, name: str, embedding: Tensor, *, tied: bool) -> Any:
    """The packed product that makes logits: the embedding itself if tied."""
    if tied:
        weights.ignore(rf"^{re.escape(name)}$", "tied to the embedding")
    return ops.pack(embedding if tied else weights.take(name, embedding.shape))


def ignore_reader_kv(weights: Checkpoint, sharing: KVSharing, layer_name: str, names: str) -> None:
    """Let K/V weights of layers that only read be left over. `names` is a pattern behind `layer_name`.<i>."""
    readers = [str(i) for i in range(sharing.num_layers) if not sharing.owns(i)]
    if readers:
        weights.ignore(rf"^{re.escape(layer_name)}\.({'|'.join(readers)})\.({names})\.", "K/V of reader layers")


def rms_norm(weights: Checkpoint, name: str, size: int, eps: float) -> Norm:
    """Take `name`.weight as an RMSNorm."""
    return Norm(weights.take(f"{name}.weight", (size,)), eps)


def linear(weights: Checkpoint, ops: Ops, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Any:
    """Take `name`.weight (and `name`.bias) and pack them for this kernel set."""
    weight = weights.take(f"{name}.weight", (out_features, in_features))
    return ops.pack(weight, weights.take_optional(f"{name}.bias", (out_features,), bias))


def stacked_linear(
    weights: Checkpoint, ops: Ops, out_features: dict[str, int], in_features: int, *, bias: bool = False
) -> Any:
    """Several linears of one input (name -> outputs) as one product, their outputs side by side."""
    return ops.pack(*_stack(weights, out_features, in_features, bias))


def gated_linear(
    weights: Checkpoint, ops: Ops, gate: str, up: str, out_features: int, in_features: int, *, bias: bool = False
) -> Any:
    """The two linears of a gated MLP as one product whose epilogue is activation(gate) * up."""
    return ops.pack_gated(*_stack(weights, {gate: out_features, up: out_features}, in_features, bias))


def _stack(
    weights: Checkpoint, out_features: dict[str, int], in_features: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    stacked = torch.cat([weights.take(f"{name}.weight", (size, in_features)) for name, size in out_features.items()])
    biases = [weights.take(f"{name}.bias", (size,)) for name, size in out_features.items()] if bias else []
    return stacked, torch.cat(biases) if biases else None


def rope_fields(fields: Fields) -> dict[str, Any]:
    """RoPE settings in one form: transformers 5's `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
    settings = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {shorten(settings)}")
    settings = {"rope_theta": fields.get("rope_theta", 10000.0)} | settings
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(settings["rope_type"], str) or settings["rope_type"] not in ROPE_TYPES:
        raise UnsupportedModel(
            f"config.json: rope type {shorten(settings['rope_type'])} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    return settings


def rotary_embedding(
    settings: dict[str, Any], dim: int, max_position_embeddings: int, max_model_len: int, device: torch.device
) -> RotaryEmbedding:
    """RoPE frequencies for `dim` rotated dimensions.

    The types are those of transformers (`modeling_rope_utils`). `dynamic` depends on the length of the text
    there; cached keys cannot change their angles, so it is fixed for `max_model_len`: exact up to
    `max_position_embeddings`, and beyond it what transformers computes for a text of that length.
    """
    fields = Fields(settings)
    frequencies = ROPE_TYPES[settings["rope_type"]]
    inv_freq, attention_factor = frequencies(fields, dim, max_position_embeddings, max_model_len)
    return RotaryEmbedding(inv_freq.to(device), attention_factor)


def _inv_freq(theta: float, dim: int) -> Tensor:
    """theta ** (-2 i / dim), (dim / 2,) (RoFormer, 2104.09864)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    return _inv_freq(fields.number("rope_theta"), dim), 1.0


def _linear(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    """Position interpolation (2306.15595)."""
    return _inv_freq(fields.number("rope_theta"), dim) / fields.number("factor"), 1.0


def _dynamic(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    """Dynamic NTK: a larger base for longer texts; with `alpha` (HunYuan), one that no longer depends on the length."""
    factor = fields.number("factor")
    stretch = fields.number("alpha", factor * max(max_model_len, max_positions) / max_positions - (factor - 1))
    return _inv_freq(fields.number("rope_theta") * stretch ** (dim / (dim - 2)), dim), 1.0


def _proportional(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    """Gemma 4's full layers: the slower frequencies do not turn at all."""
    inv_freq = _inv_freq(fields.number("rope_theta"), dim)
    turning = int(fields.number("partial_rotary_factor", 1.0) * dim // 2)
    return torch.where(torch.arange(dim // 2) < turning, inv_freq, 0.0) / fields.number("factor", 1.0), 1.0


def _llama3(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    inv_freq = _inv_freq(fields.number("rope_theta"), dim)
    factor, original = fields.number("factor"), fields.number("original_max_position_embeddings")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise ConfigError(f"config.json: low_freq_factor={low} must be below high_freq_factor={high}")
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor, 1.0


def _yarn(fields: Fields, dim: int, max_positions: int, max_model_len: int) -> tuple[Tensor, float]:
    """YaRN (2309.00071): dims that turn often are kept, those that turn seldom interpolated, with a ramp between."""
    theta, factor = fields.number("rope_theta"), fields.number("factor")
    original = fields.number("original_max_position_embeddings", max_positions)

    def dim_of(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(fields.number("beta_fast", 32)), dim_of(fields.number("beta_slow", 1))
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = _inv_freq(theta, dim)
    return ramp * inv_freq / factor + (1 - ramp) * inv_freq, _yarn_attention_factor(fields, factor)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(fields.number("mscale")) / scale(fields.number("mscale_all_dim"))
    return scale(1.0)


ROPE_TYPES: dict[str, Callable[[Fields, int, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
}
