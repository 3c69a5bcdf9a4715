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
from miniserve.kvcache.layout import KVGeometry
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig
from miniserve.models.layers import linear, rope_fields, rotary_embedding
from miniserve.ops import Activation, Ops, Rotation

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(ModelConfig):
    """GPT-NeoX and MLKV's additions."""

    num_heads: int  # Hq
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
    """Project q and attend to the group's memory; an owner also fills it."""

    def __init__(self, config: NeoXConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops = config, layer, ops
        self.owns = config.sharing.owns(layer)
        self.scale = config.head_dim**-0.5
        name, hidden, bias = f"gpt_neox.layers.{layer}.attention", config.hidden_size, config.attention_bias
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.fused_qkv:
            self.query, key, value = _split_qkv(config, weights, ops, f"{name}.query_key_value")
        else:
            self.query = linear(weights, ops, f"{name}.query", q_size, hidden, bias=bias)
        self.dense = linear(weights, ops, f"{name}.dense", hidden, q_size, bias=bias)
        if self.owns and config.fused_qkv:
            self.key, self.value = [key], [value]
        elif self.owns:
            self.key, self.value = (
                _key_or_value(config, weights, ops, f"{name}.{n}", kv_size) for n in ("key", "value")
            )

    def write(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> None:
        """Owners: x (T, H) -> k, v into the group's memory; k un-rotated unless the family shares rotated keys."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        k, v = self._project(x, self.key).unflatten(-1, heads), self._project(x, self.value).unflatten(-1, heads)
        written = rotation if self.config.rotate_shared_keys else None
        self.ops.write_kv(k, v, kv_pool.of_layer(self.layer), batch, written)

    def read(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, kv_pool: KVPool, rotary: Any, rotation: Rotation
    ) -> Tensor:
        """x (T, H) -> attention over the group's memory (+ residual), (T, H)."""
        q = self.ops.linear(x, self.query).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        rotate_on_read = self.owns and not self.config.rotate_shared_keys
        out = self.ops.attend(
            self.ops.rotate(q, rotation),
            kv_pool.of_layer(self.layer),
            batch,
            scale=self.scale,
            window=self.config.sharing.windows[self.layer],
            key_rotary=rotary if rotate_on_read else None,
        )
        return self.ops.linear(out.flatten(1), self.dense, residual)

    def _project(self, x: Tensor, stages: list[Any]) -> Tensor:
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

    def __init__(self, config: NeoXConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.ops = config, ops
        name, hidden, inner = f"gpt_neox.layers.{layer}", config.hidden_size, config.intermediate_size
        self.input_norm = _layer_norm(weights, f"{name}.input_layernorm", hidden)
        self.mlp_norm = _layer_norm(weights, f"{name}.post_attention_layernorm", hidden)
        self.attention = Attention(config, layer, weights, ops)
        self.up = linear(weights, ops, f"{name}.mlp.dense_h_to_4h", inner, hidden, bias=True)
        self.down = linear(weights, ops, f"{name}.mlp.dense_4h_to_h", hidden, inner, bias=True)

    def mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        """x (T, H) -> residual + MLP(norm(x))."""
        normed = self.ops.layer_norm(x, *self.mlp_norm, self.config.layer_norm_eps)
        return self.ops.linear(self.ops.activated_linear(normed, self.up, self.config.activation), self.down, residual)


def _layer_norm(weights: Checkpoint, name: str, size: int) -> tuple[Tensor, Tensor]:
    return weights.take(f"{name}.weight", (size,)), weights.take(f"{name}.bias", (size,))


class Model:
    """token ids -> hidden states of the rows behind the cut -> logits."""

    def __init__(self, config: NeoXConfig, weights: Checkpoint, ops: Ops, max_model_len: int) -> None:
        self.config, self.ops = config, ops
        table = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("gpt_neox.embed_in.weight", table)
        self.layers = [Layer(config, i, weights, ops) for i in range(config.sharing.num_layers)]
        self.norm = _layer_norm(weights, "gpt_neox.final_layer_norm", config.hidden_size)
        if config.tie_word_embeddings:
            weights.ignore(r"^embed_out\.weight$", "tied to the embedding")
        self.embed_out = ops.pack(
            self.embedding if config.tie_word_embeddings else weights.take("embed_out.weight", table)
        )
        readers = "|".join(str(i) for i in range(config.sharing.num_layers) if not config.sharing.owns(i)) or "none"
        weights.ignore(rf"^gpt_neox\.layers\.({readers})\.attention\.(key|value)\.", "K/V of reader layers")
        weights.ignore(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
        self.rotary = rotary_embedding(
            config.rope, config.rotary_dim, config.max_position_embeddings, max_model_len, self.embedding.device
        )

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        x = self.ops.embed(batch.token_ids, self.embedding)  # (T, H)
        rotation = self.rotary(batch.positions)
        for i, layer in enumerate(self.layers):
            normed = self.ops.layer_norm(x, *layer.input_norm, self.config.layer_norm_eps)
            if layer.attention.owns:
                layer.attention.write(normed, batch, kv_pool, rotation)
            if i == self.config.sharing.cut:
                batch, (x, normed) = batch.cut(x, normed)
                rotation = self.rotary(batch.positions)
            after = layer.attention.read(normed, x, batch, kv_pool, self.rotary, rotation)  # x + attention
            x = layer.mlp(x if self.config.parallel_residual else after, after)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32."""
        return self.ops.head(self.ops.layer_norm(hidden, *self.norm, self.config.layer_norm_eps), self.embed_out)
