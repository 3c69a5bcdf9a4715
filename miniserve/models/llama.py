"""The Llama body with any sharing map: Cross-Layer Attention (2405.12981, section 2).

    layer i:   x ──norm──┬── q ───────────────┐
                         └── k, v ──► pool    attend ── o ──+──norm── gate, up ── down ──+──►
                          (owners only)  └────┘

The attention of an owner and of a reader differ in one thing: the owner also projects, rotates and writes
K/V. Other files of this folder (mistral, qwen2, lckv_llama, ...) only read another config.json into `LlamaConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import UnsupportedModel
from miniserve.kvcache.layout import KVGeometry
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig
from miniserve.models.layers import (
    GatedMlp,
    ignore_reader_kv,
    linear,
    output_head,
    rms_norm,
    rope_fields,
    rotary_embedding,
    run_layers,
    stacked_linear,
)
from miniserve.ops import Norm, Ops, Rotation


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The Llama body and its options."""

    num_kv_heads: int  # Hkv
    head_dim: int  # D
    intermediate_size: int  # F
    rms_norm_eps: float
    rope: dict[str, Any]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on each head of q and k before RoPE (Qwen3)
    tie_word_embeddings: bool


def parse(fields: Fields) -> LlamaConfig:
    """Plain Llama: every layer owns its K/V and sees everything."""
    bias = fields.flag("attention_bias")
    return llama_config(fields, KVSharing.none(fields.size("num_hidden_layers")), qkv_bias=bias, output_bias=bias)


def llama_config(
    fields: Fields, sharing: KVSharing, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
) -> LlamaConfig:
    """The fields that all families with a Llama body store alike."""
    num_heads, num_kv_heads, head_dim = fields.heads()
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel("config.json: partial_rotary_factor must be 1; this body rotates whole heads")
    return LlamaConfig(
        **fields.common(),
        sharing=sharing,
        geometry=(KVGeometry(num_kv_heads, head_dim),) * sharing.num_layers,
        sliding_window=fields.optional_size("sliding_window"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_fields(fields),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


class Attention:
    """Project q and attend to the group's memory; an owner also projects, rotates and writes k, v."""

    def __init__(self, config: LlamaConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops = config, layer, ops
        self.owns, self.scale = config.sharing.owns(layer), config.head_dim**-0.5
        name, head, hidden = f"model.layers.{layer}.self_attn", config.head_dim, config.hidden_size
        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
        sizes = {f"{name}.q_proj": q_size}
        if self.owns:
            sizes |= {f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.qkv_proj = stacked_linear(weights, ops, sizes, hidden, bias=config.qkv_bias)
        self.o_proj = linear(weights, ops, f"{name}.o_proj", hidden, q_size, bias=config.output_bias)
        eps = config.rms_norm_eps
        self.q_norm = rms_norm(weights, f"{name}.q_norm", head, eps) if config.qk_norm else None
        self.k_norm = rms_norm(weights, f"{name}.k_norm", head, eps) if config.qk_norm and self.owns else None

    def project(self, x: Tensor, norm: Norm, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first -> q (T, Hq, D). An owner writes the rows' k, v to the group's memory, k rotated."""
        heads = self.ops.linear(x, self.qkv_proj, norm=norm).unflatten(-1, (-1, self.config.head_dim))
        if not self.owns:
            return self.ops.normed(heads, self.q_norm)
        q, k, v = heads.split(self.sizes, dim=1)  # (T, Hq, D) and twice (T, Hkv, D)
        self.ops.write_kv(self.ops.normed(k, self.k_norm), v, kv_pool.of_layer(self.layer), batch, rotation)
        return self.ops.normed(q, self.q_norm)

    def attend(
        self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation | None
    ) -> Tensor:
        """q (T, Hq, D) -> residual + attention over the group's memory, (T, H)."""
        memory, sight = kv_pool.of_layer(self.layer), self.config.sharing.sight(self.layer)
        out = self.ops.attend(q, memory, batch, scale=self.scale, rotation=rotation, **sight)
        return self.ops.linear(out.flatten(1), self.o_proj, residual)


class Layer:
    """Two norms, attention, gated MLP."""

    def __init__(self, config: LlamaConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.input_norm = rms_norm(weights, f"{name}.input_layernorm", hidden, eps)
        self.attention = Attention(config, layer, weights, ops)
        self.mlp_norm = rms_norm(weights, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = llama_mlp(config, f"{name}.mlp", weights, ops)

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> q (T, Hq, D); K/V of an owner are written."""
        return self.attention.project(x, self.input_norm, batch, kv_pool, rotation)

    def finish(self, q: Tensor, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D), x (T, H) -> x + attention + MLP, (T, H)."""
        x = self.attention.attend(q, x, batch, kv_pool, rotation)
        return self.mlp(x, norm=self.mlp_norm, residual=x)


def llama_mlp(config: LlamaConfig, name: str, weights: Checkpoint, ops: Ops, scale: int = 1) -> GatedMlp:
    """The MLP called `name`, `scale` times as wide as the config says."""
    names = f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"
    return GatedMlp(weights, ops, names, config.hidden_size, scale * config.intermediate_size, bias=config.mlp_bias)


class Model:
    """token ids -> hidden states of the rows behind the cut -> logits. Other families bring their own `layer`."""

    def __init__(
        self, config: LlamaConfig, weights: Checkpoint, ops: Ops, max_model_len: int, layer: Callable[..., Any] = Layer
    ) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [layer(config, i, weights, ops) for i in range(config.sharing.num_layers)]
        self.norm = rms_norm(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = output_head(weights, ops, "lm_head.weight", self.embedding, tied=config.tie_word_embeddings)
        ignore_reader_kv(weights, config.sharing, "model.layers", r"self_attn\.(k_proj|v_proj|k_norm)")
        weights.ignore(r"rotary_emb\.inv_freq$")
        self.rotary = rotary_embedding(
            config.rope, config.head_dim, config.max_position_embeddings, max_model_len, self.embedding.device
        )

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        x = self.ops.embed(batch.token_ids, self.embedding)  # (T, H)
        return run_layers(self.ops, self.layers, x, batch, kv_pool, self.rotary, self.config.cut)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32."""
        return self.ops.head(hidden, self.lm_head, norm=self.norm)
