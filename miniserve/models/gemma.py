"""What Gemma 3n and Gemma 4 have in common: attention without a scale, per-layer embeddings, the model, the fields.

The upper `num_kv_shared_layers` layers read the K/V of the last layer below them that is of their own kind, windowed or
full. Keys are shared finished: normed, then rotated as that kind rotates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.checks import shorten
from miniserve.errors import ConfigError, UnsupportedModel
from miniserve.kvcache.layout import KVGeometry
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig
from miniserve.models.layers import (
    ROPE_TYPES,
    ignore_reader_kv,
    linear,
    output_head,
    rms_norm,
    rotary_embedding,
    stacked_linear,
)
from miniserve.ops import Activation, Norm, Ops, Rotation

ACTIVATION: Activation = "gelu_tanh"
_TOWERS = r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\."


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Fields of both families; tuples have one entry per layer."""

    layer_kinds: tuple[str, ...]
    intermediate_sizes: tuple[int, ...]
    rms_norm_eps: float
    ropes: Mapping[str, dict[str, Any]]  # by kind
    attention_bias: bool
    keys_are_values: bool  # full layers have no v projection: the value is the key before norm and RoPE
    told_size: int  # P: numbers that each layer is told of each token once more; 0: none
    told_vocab_size: int
    logit_softcap: float | None


def text_fields(fields: Fields) -> Fields:
    """The language model's fields, which multimodal checkpoints keep under `text_config`."""
    nested = fields.get("text_config", {})
    if not isinstance(nested, dict):
        raise ConfigError(f"config.json: text_config must be an object, not {shorten(nested)}")
    above = {k: v for k, v in fields.values.items() if k in ("model_type", "eos_token_id") and v is not None}
    return Fields({**fields.values, **nested, **above})


def layer_kinds(fields: Fields) -> list[str]:
    """Each layer's kind of attention."""
    kinds = fields.layer_kinds(fields.size("num_hidden_layers"))
    if kinds is None:
        raise ConfigError("config.json: layer_types is missing; it lists each layer's kind of attention")
    return kinds


def gemma_fields(fields: Fields, geometry: Sequence[KVGeometry]) -> dict[str, Any]:
    """What `GemmaConfig` needs and both families store alike. `geometry` is per layer."""
    kinds = layer_kinds(fields)
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if fields.get("use_bidirectional_attention") is not None:
        raise UnsupportedModel("config.json: use_bidirectional_attention is not supported; this engine is causal")
    window = fields.size("sliding_window") if "sliding_attention" in kinds else None
    sharing = KVSharing.last_of_same_kind(kinds, fields.count("num_kv_shared_layers", 0))
    vocab_size = fields.size("vocab_size")
    return {
        **fields.common(),
        "sharing": sharing.with_windows([window if kind == "sliding_attention" else None for kind in kinds]),
        "geometry": tuple(geometry),
        "sliding_window": window,
        "num_heads": fields.size("num_attention_heads"),
        "layer_kinds": tuple(kinds),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "ropes": _ropes(fields, sorted(set(kinds))),
        "attention_bias": fields.flag("attention_bias"),
        "told_size": fields.count("hidden_size_per_layer_input", 0),
        "told_vocab_size": fields.size("vocab_size_per_layer_input", vocab_size),
        "logit_softcap": fields.number("final_logit_softcapping") if fields.get("final_logit_softcapping") else None,
    }


def _ropes(fields: Fields, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """RoPE settings of each kind: transformers 5's `rope_parameters`, or two bases as older files have them."""
    given = fields.get("rope_parameters")
    if given is None:
        if fields.get("rope_scaling") is not None:
            raise UnsupportedModel("config.json: rope_scaling is not supported in this family; only rope_parameters is")
        bases = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
        return {k: {"rope_type": "default", "rope_theta": fields.number(*bases[k])} for k in kinds}
    ropes = {}
    for kind in kinds:
        settings = given.get(kind) if isinstance(given, dict) else None
        if not isinstance(settings, dict) or settings.get("rope_type", "default") not in ROPE_TYPES:
            raise UnsupportedModel(
                f"config.json: rope_parameters[{kind!r}] must be an object whose rope_type is one of "
                f"{', '.join(ROPE_TYPES)}"
            )
        ropes[kind] = {"rope_type": "default"} | settings
    return ropes


class Attention:
    """Normed, rotated queries against the group's memory, unscaled. An owner norms, rotates and writes k, norms v."""

    def __init__(self, config: GemmaConfig, layer: int, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops = config, layer, ops
        head, kv_heads = config.geometry[layer].head_dim, config.geometry[layer].kv_heads
        self.owns, self.head_dim = config.sharing.owns(layer), head
        value_is_key = config.keys_are_values and config.layer_kinds[layer] == "full_attention"
        parts = {"q": config.num_heads}
        if self.owns:
            parts |= {"k": kv_heads} if value_is_key else {"k": kv_heads, "v": kv_heads}
        self.sizes = list(parts.values())
        sizes = {f"{name}.{part}_proj": heads * head for part, heads in parts.items()}
        self.projection = stacked_linear(weights, ops, sizes, config.hidden_size, bias=config.attention_bias)
        q_size, bias = config.num_heads * head, config.attention_bias
        self.o_proj = linear(weights, ops, f"{name}.o_proj", config.hidden_size, q_size, bias=bias)
        self.q_norm = rms_norm(weights, f"{name}.q_norm", head, config.rms_norm_eps)
        if self.owns:
            self.k_norm = rms_norm(weights, f"{name}.k_norm", head, config.rms_norm_eps)
            self.v_norm = Norm(torch.ones_like(self.k_norm.weight), config.rms_norm_eps)

    def project(self, x: Tensor, norm: Norm | None, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first if `norm` says how -> q (T, Hq, D). An owner writes the rows' K/V."""
        heads = self.ops.linear(x, self.projection, norm=norm).unflatten(-1, (-1, self.head_dim))
        q, *kv = heads.split(self.sizes, dim=1)  # (T, Hq, D), then (T, Hkv, D) once or twice
        if self.owns:
            k, v = self.ops.normed(kv[0], self.k_norm), self.ops.normed(kv[-1], self.v_norm)
            self.ops.write_kv(k, v, kv_pool.of_layer(self.layer), batch, rotation)
        return self.ops.normed(q, self.q_norm)

    def attend(self, q: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D) -> attention over the group's memory, projected to (T, H)."""
        memory, sight = kv_pool.of_layer(self.layer), self.config.sharing.sight(self.layer)
        out = self.ops.attend(q, memory, batch, scale=1.0, rotation=rotation, **sight)
        return self.ops.linear(out.flatten(1), self.o_proj)


class PerLayerEmbedding:
    """What each layer is told of each token once more: a second embedding plus a projection of the first."""

    def __init__(self, config: GemmaConfig, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.ops = config, ops
        size, hidden = config.sharing.num_layers * config.told_size, config.hidden_size
        self.table = weights.take(f"{name}embed_tokens_per_layer.weight", (config.told_vocab_size, size))
        self.projection = linear(weights, ops, f"{name}per_layer_model_projection", size, hidden)
        self.norm = rms_norm(weights, f"{name}per_layer_projection_norm", config.told_size, config.rms_norm_eps)

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids (T,), x (T, H): their scaled embeddings -> (T, L, P)."""
        known = token_ids.where(token_ids < self.config.told_vocab_size, 0)
        told = self.ops.embed(known, self.table) * self.config.told_size**0.5  # (T, L P)
        projected = self.ops.linear(x, self.projection) * self.config.hidden_size**-0.5
        shape = (-1, self.config.told_size)
        return (self.ops.normed(projected.unflatten(-1, shape), self.norm) + told.unflatten(-1, shape)) * 2**-0.5


class PerLayerGate:
    """Mixes what the layer is told into its stream: norm(P -> H of gelu(H -> P of x) * told)."""

    def __init__(self, config: GemmaConfig, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.ops, size, hidden = ops, config.told_size, config.hidden_size
        self.gate = linear(weights, ops, f"{name}.per_layer_input_gate", size, hidden)
        self.projection = linear(weights, ops, f"{name}.per_layer_projection", hidden, size)
        self.norm = rms_norm(weights, f"{name}.post_per_layer_input_norm", hidden, config.rms_norm_eps)

    def __call__(self, x: Tensor, told: Tensor) -> Tensor:
        """x (T, H), told (T, P) -> (T, H)."""
        gated = self.ops.activated_linear(x, self.gate, ACTIVATION) * told
        return self.ops.normed(self.ops.linear(gated, self.projection), self.norm)


class Layer(Protocol):
    """A decoder layer in two halves, with the cut between them."""

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> tuple[Tensor, ...]:
        """x (T, ..., H) -> what `finish` needs of each row, the query first. An owner writes the rows' K/V."""

    def finish(
        self,
        projected: Sequence[Tensor],
        x: Tensor,
        told: Tensor | None,
        batch: ForwardBatch,
        kv_pool: KVPool,
        rotation: Rotation,
    ) -> Tensor:
        """The layer's output (T, ..., H), from attention on; `told` is (T, P)."""


class GemmaModel:
    """What both models have around their layers. `layer` makes one: (config, index, name prefix, weights, ops)."""

    def __init__(
        self, config: Any, weights: Checkpoint, ops: Ops, max_model_len: int, layer: Callable[..., Layer]
    ) -> None:
        self.config, self.ops = config, ops
        nested = "model.language_model.embed_tokens.weight" in weights  # as multimodal checkpoints name it
        self.prefix = prefix = "model.language_model." if nested else "model."
        self.embedding = weights.take(f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.told = PerLayerEmbedding(config, prefix, weights, ops) if config.told_size else None
        self.layers = [layer(config, i, prefix, weights, ops) for i in range(config.sharing.num_layers)]
        self.norm = rms_norm(weights, f"{prefix}norm", config.hidden_size, config.rms_norm_eps)
        self.head = output_head(weights, ops, "lm_head.weight", self.embedding, tied=True)
        ignore_reader_kv(weights, config.sharing, f"{prefix}layers", r"self_attn\.(k_proj|v_proj|k_norm|v_norm)")
        weights.ignore(_TOWERS, "vision and audio, which are not served")
        head_dims = {kind: config.geometry[i].head_dim for i, kind in enumerate(config.layer_kinds)}
        longest, device = config.max_position_embeddings, self.embedding.device
        self.rotaries = {  # one for windowed layers, one for full ones
            kind: rotary_embedding(rope, head_dims[kind], longest, max_model_len, device)
            for kind, rope in config.ropes.items()
        }

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """token_ids (T,) -> x (T, H) and what each layer is told, (T, L, P)."""
        x = self.ops.embed(token_ids, self.embedding)
        x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded as the authors round it
        return x, None if self.told is None else self.told(token_ids, x)

    def run(self, x: Tensor, told: Tensor | None, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """x (T, ..., H) through all layers -> the rows of `batch.behind_cut` (see `layers.run_layers`)."""
        rotations = self._rotations(batch)
        for i, layer in enumerate(self.layers):
            kind = self.config.layer_kinds[i]
            projected: Sequence[Tensor] = layer.project(x, batch, kv_pool, rotations[kind])
            if i == self.config.cut:
                carried = [x, *projected] if told is None else [x, *projected, told]
                batch, (x, *projected) = batch.cut(*carried)
                told = None if told is None else projected.pop()
                rotations = self._rotations(batch)
            x = layer.finish(projected, x, None if told is None else told[:, i], batch, kv_pool, rotations[kind])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32, none beyond the soft cap."""
        logits, cap = self.ops.head(hidden, self.head, norm=self.norm), self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _rotations(self, batch: ForwardBatch) -> dict[str, Rotation]:
        return {kind: self.ops.angles(rotary, batch.positions) for kind, rotary in self.rotaries.items()}
