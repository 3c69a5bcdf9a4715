"""What several families build from: reading RoPE and linears. No family's own rules live here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields
from miniserve.ops import Ops, RotaryEmbedding
from miniserve.request import shorten


def linear(weights: Checkpoint, ops: Ops, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Any:
    """Take `name`.weight (and `name`.bias) and pack them for this kernel set."""
    weight = weights.take(f"{name}.weight", (out_features, in_features))
    return ops.pack(weight, weights.take_optional(f"{name}.bias", (out_features,), bias))


def stacked_linear(
    weights: Checkpoint, ops: Ops, names: list[str], out_features: int, in_features: int, *, bias: bool = False
) -> Any:
    """Several linears of one input as one product, their outputs side by side."""
    stacked = torch.cat([weights.take(f"{name}.weight", (out_features, in_features)) for name in names])
    biases = [weights.take(f"{name}.bias", (out_features,)) for name in names] if bias else []
    return ops.pack(stacked, torch.cat(biases) if biases else None)


def rope_fields(fields: Fields) -> dict[str, Any]:
    """RoPE settings in one form: transformers 5's `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
    settings = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {shorten(settings)}")
    settings = {"rope_theta": fields.get("rope_theta", 10000.0)} | settings
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    if settings["rope_type"] not in ROPE_TYPES:
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
    """Dynamic NTK: a larger base for longer texts."""
    factor = fields.number("factor")
    stretch = factor * max(max_model_len, max_positions) / max_positions - (factor - 1)
    return _inv_freq(fields.number("rope_theta") * stretch ** (dim / (dim - 2)), dim), 1.0


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
    "llama3": _llama3,
    "yarn": _yarn,
}
