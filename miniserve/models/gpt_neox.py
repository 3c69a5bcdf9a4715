"""GPT-NeoX (Pythia), plain or with MLKV (2406.09297): several layers read one layer's K/V.

    layer i:   x ──┬── norm ── q (k, v if owner) ── attend ── dense ──┐
                   ├── norm ── h_to_4h ── gelu ── 4h_to_h ────────────┤  parallel residual
                   └──────────────────────────────────────────────────+──►

MLKV's authors hand the key to readers *before* RoPE, and their weights are trained that way: the owner
attends with rotated keys, each reader with rotated queries against un-rotated keys. So the pool keeps
un-rotated keys and the owner rotates them as it reads. `"rotate_shared_keys": true` in config.json (or
`hf_overrides`) gives the usual form, one rotated key for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVGeometry
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig
from miniserve.models.layers import (
    ignore_reader_kv,
    linear,
    output_head,
    rope_fields,
    rotary_embedding,
    run_layers,
)
from miniserve.ops import Activation, Ops, RotaryEmbedding, Rotation

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(ModelConfig):
    """GPT-NeoX and MLKV's additions."""

    num_kv_heads: int  # Hkv
    head_dim: int  # D
    rotary_dim: int  # R: the first R dims of a head are rotated
    intermediate_size: int
    layer_norm_eps: float
    rope: dict[str, Any]
    activation: Activation
    attention_bias: bool
    parallel_residual: bool
    fused_qkv: bool  # stock checkpoints store q, k, v of each head together
    kv_mlp_size: int | None  # width of the MLPs that MLKV may have in place of k and v
    rotate_shared_keys: bool
    tie_word_embeddings: bool


def parse(fields: Fields) -> NeoXConfig:
    """Read GPT-NeoX's config.json, with or without `num_key_value_layers`."""
    num_layers = fields.size("num_hidden_layers")
    is_mlkv = fields.get("num_key_value_layers") is not None
    num_heads, num_kv_heads, head_dim = fields.heads()
    rope = rope_fields(fields) | {"rope_theta": fields.number("rotary_emb_base", rope_fields(fields)["rope_theta"])}
    rotary_dim = int(head_dim * fields.number("rotary_pct", rope.get("partial_rotary_factor", 0.25)))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"config.json: rotary_pct makes {rotary_dim} of {head_dim} dims rotate; it must be an even part"
        )
    if not is_mlkv and num_kv_heads != num_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={num_kv_heads} of {num_heads} heads: a GPT-NeoX checkpoint without "
            "num_key_value_layers stores q, k and v of each head together"
        )
    activation = fields.choice("hidden_act", tuple(_ACTIVATIONS), "gelu")
    return NeoXConfig(
        **fields.common(),
        sharing=KVSharing.mlkv(num_layers, fields.size("num_key_value_layers", num_layers)),
        geometry=(KVGeometry(num_kv_heads, head_dim),) * num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        intermediate_size=fields.size("intermediate_size"),
        layer_norm_eps=fields.number("layer_norm_eps", 1e-5),
        rope=rope,
        activation=_ACTIVATIONS[activation],
        attention_bias=fields.flag("attention_bias", True),
        parallel_residual=fields.flag("use_parallel_residual", True),
        fused_qkv=not is_mlkv,
        kv_mlp_size=fields.size("kv_intermediate_size") if fields.flag("use_key_value_mlp") else None,
        rotate_shared_keys=fields.flag("rotate_shared_keys", not is_mlkv),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


class Attention:
    """Project q and attend to the group's memory; an owner also projects and writes k, v."""

    def __init__(self, config: NeoXConfig, layer: int, weights: Checkpoint, ops: Ops, rotary: RotaryEmbedding) -> None:
        self.config, self.layer, self.ops, self.rotary = config, layer, ops, rotary
        self.owns = config.sharing.owns(layer)
        self.scale = config.head_dim**-0.5
        name, hidden, bias = f"gpt_neox.layers.{layer}.attention", config.hidden_size, config.attention_bias
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.fused_qkv:
            self.query, key, value = _split_qkv(config, weights, ops, f"{name}.query_key_value")
            self.key, self.value = [key], [value]  # a reader has them too and never uses them
        else:
            self.query = linear(weights, ops, f"{name}.query", q_size, hidden, bias=bias)
            if self.owns:
                self.key = _key_or_value(config, weights, ops, f"{name}.key", kv_size)
                self.value = _key_or_value(config, weights, ops, f"{name}.value", kv_size)
        self.dense = linear(weights, ops, f"{name}.dense", hidden, q_size, bias=bias)

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> q (T, Hq, D). An owner writes k, v, with k un-rotated if readers want it so."""
        q = self._heads(self.ops.linear(x, self.query))
        if self.owns:
            k, v = self._heads(self._stages(x, self.key)), self._heads(self._stages(x, self.value))
            written = rotation if self.config.rotate_shared_keys else None
            self.ops.write_kv(k, v, kv_pool.of_layer(self.layer), batch, written)
        return q

    def attend(self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D) -> residual + attention over the group's memory, (T, H)."""
        rotate_on_read = self.owns and not self.config.rotate_shared_keys
        out = self.ops.attend(
            q,
            kv_pool.of_layer(self.layer),
            batch,
            scale=self.scale,
            rotation=rotation,
            **self.config.sharing.sight(self.layer),
            key_rotary=self.rotary if rotate_on_read else None,
        )
        return self.ops.linear(out.flatten(1), self.dense, residual)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _stages(self, x: Tensor, stages: list[Any]) -> Tensor:
        """One linear, or MLKV's two-layer MLP."""
        for stage in stages[:-1]:
            x = self.ops.activated_linear(x, stage, self.config.activation)
        return self.ops.linear(x, stages[-1])


def _key_or_value(config: NeoXConfig, weights: Checkpoint, ops: Ops, name: str, kv_size: int) -> list[Any]:
    hidden, inner, bias = config.hidden_size, config.kv_mlp_size, config.attention_bias
    if inner is None:
        return [linear(weights, ops, name, kv_size, hidden, bias=bias)]
    return [
        linear(weights, ops, f"{name}.dense_in", inner, hidden, bias=bias),
        linear(weights, ops, f"{name}.dense_out", kv_size, inner, bias=bias),
    ]


def _split_qkv(config: NeoXConfig, weights: Checkpoint, ops: Ops, name: str) -> list[Any]:
    """Stock GPT-NeoX: rows ordered (head, q/k/v, D) -> three packed linears."""
    rows = 3 * config.num_heads * config.head_dim
    per_head = (config.num_heads, 3, config.head_dim)
    weight = weights.take(f"{name}.weight", (rows, config.hidden_size)).view(*per_head, -1)
    bias = weights.take_optional(f"{name}.bias", (rows,), config.attention_bias)
    parts = []
    for which in range(3):
        part_bias = None if bias is None else bias.view(*per_head)[:, which].flatten().contiguous()
        parts.append(ops.pack(weight[:, which].flatten(0, 1).contiguous(), part_bias))
    return parts


class Layer:
    """Attention and MLP side by side on the same input (or one after the other)."""

    def __init__(self, config: NeoXConfig, layer: int, weights: Checkpoint, ops: Ops, rotary: RotaryEmbedding) -> None:
        self.config, self.ops = config, ops
        name, hidden, inner = f"gpt_neox.layers.{layer}", config.hidden_size, config.intermediate_size
        self.input_norm = _layer_norm(weights, f"{name}.input_layernorm", hidden)
        self.mlp_norm = _layer_norm(weights, f"{name}.post_attention_layernorm", hidden)
        self.attention = Attention(config, layer, weights, ops, rotary)
        self.up = linear(weights, ops, f"{name}.mlp.dense_h_to_4h", inner, hidden, bias=True)
        self.down = linear(weights, ops, f"{name}.mlp.dense_4h_to_h", hidden, inner, bias=True)

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> q (T, Hq, D); K/V of an owner are written."""
        normed = self.ops.layer_norm(x, *self.input_norm, self.config.layer_norm_eps)
        return self.attention.project(normed, batch, kv_pool, rotation)

    def finish(self, q: Tensor, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D), x (T, H) -> x + attention + MLP, (T, H)."""
        after = self.attention.attend(q, x, batch, kv_pool, rotation)  # x + attention
        mlp_input = x if self.config.parallel_residual else after
        normed = self.ops.layer_norm(mlp_input, *self.mlp_norm, self.config.layer_norm_eps)
        return self.ops.linear(self.ops.activated_linear(normed, self.up, self.config.activation), self.down, after)


def _layer_norm(weights: Checkpoint, name: str, size: int) -> tuple[Tensor, Tensor]:
    return weights.take(f"{name}.weight", (size,)), weights.take(f"{name}.bias", (size,))


class Model:
    """token ids -> hidden states of the rows behind the cut -> logits."""

    def __init__(self, config: NeoXConfig, weights: Checkpoint, ops: Ops, max_model_len: int) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights.take("gpt_neox.embed_in.weight", (config.vocab_size, config.hidden_size))
        self.rotary = rotary_embedding(
            config.rope, config.rotary_dim, config.max_position_embeddings, max_model_len, self.embedding.device
        )
        self.layers = [Layer(config, i, weights, ops, self.rotary) for i in range(config.sharing.num_layers)]
        self.norm = _layer_norm(weights, "gpt_neox.final_layer_norm", config.hidden_size)
        self.embed_out = output_head(weights, ops, "embed_out.weight", self.embedding, tied=config.tie_word_embeddings)
        ignore_reader_kv(weights, config.sharing, "gpt_neox.layers", r"attention\.(key|value)")
        weights.ignore(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        x = self.ops.embed(batch.token_ids, self.embedding)  # (T, H)
        return run_layers(self.ops, self.layers, x, batch, kv_pool, self.rotary, self.config.cut)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32."""
        return self.ops.head(self.ops.layer_norm(hidden, *self.norm, self.config.layer_norm_eps), self.embed_out)
