"""YOCO (2405.05254): a lower half that keeps little, and an upper half that reads one K/V.

    self-decoder     layers 0 .. L/2-1    windowed attention (a K/V each), or gated retention (a state each)
         │
         ├── kv_layer_norm ── k, v        the only K/V of full length, made once; RoPE on k
         ▼
    cross-decoder    layers L/2 .. L-1    q of their own, all read that K/V; a token that is not sampled ends here

Gated retention (section 3.2) is linear attention with a decay, and so a recurrence. For each head, with k scaled:

    S_t = exp(g_t) S_(t-1) + k_t' v_t           o_t = q_t S_t           g_t = log sigmoid(x_t w) / 16

RoPE here turns neighbouring dimensions in pairs, and its exponents run from 0 to 1 with the end included. The rows of
the q and k weights are reordered at loading, so that pairs become halves, which is what the operations rotate; scores
do not depend on the order of dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVGeometry, StateGeometry
from miniserve.kvcache.pool import KVPool, StateMemory
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig
from miniserve.models.layers import GatedMlp, linear, output_head, rms_norm, run_layers
from miniserve.ops import Norm, Ops, RotaryEmbedding, Rotation

_GATE_SLOWDOWN = 16  # gates are divided by it: a state forgets over many tokens
_MAX_LENGTH = 1 << 20  # where params.json does not say: what the authors trained for (section 4.3)


@dataclass(frozen=True, kw_only=True)
class YocoConfig(ModelConfig):
    """Both decoders."""

    num_self_heads: int  # of q, k and v in the self-decoder
    num_kv_heads: int  # Hkv of the cross-decoder
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @property
    def first_cross(self) -> int:
        """The first layer of the cross-decoder, which owns the shared K/V."""
        return self.sharing.num_layers // 2


def parse(fields: Fields) -> YocoConfig:
    """Read the authors' params.json, which stands in config.json with a `model_type`."""
    num_layers, dim = fields.size("n_layers"), fields.size("dim")
    self_heads, num_heads, num_kv_heads = (fields.size(f"n_{name}_heads") for name in ("self", "attn", "attn_kv"))
    if num_layers % 2:
        raise ConfigError(f"config.json: n_layers={num_layers} is odd; both decoders have half of the layers")
    if dim % (2 * self_heads) or dim % (2 * num_heads) or num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: dim={dim} must be an even multiple of n_self_heads={self_heads} and "
            f"n_attn_heads={num_heads}, and this a multiple of n_attn_kv_heads={num_kv_heads}"
        )
    window, half = fields.optional_size("sliding_window"), num_layers // 2
    self_dim, cross = dim // self_heads, KVGeometry(num_kv_heads, dim // num_heads)
    below = KVGeometry(self_heads, self_dim) if window else StateGeometry(self_heads, self_dim, self_dim)
    longest = fields.get("max_seq_len", -1)  # the authors' -1: not said
    length = longest if longest != -1 else _MAX_LENGTH
    return YocoConfig(
        **fields.replaced(hidden_size=dim, max_position_embeddings=length).common(),
        sharing=KVSharing.yoco(num_layers).with_windows([window] * half + [None] * half),
        geometry=(below,) * half + (cross,) * half,
        sliding_window=window,
        num_self_heads=self_heads,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=fields.size("hidden_dim"),
        rms_norm_eps=fields.number("norm_eps", 1e-5),
        rope_theta=fields.number("rope_theta", 10000.0),
        tie_word_embeddings=fields.flag("share_input_output_embed"),
    )


class WindowedAttention:
    """Multi-head attention over the layer's own windowed K/V."""

    def __init__(self, config: YocoConfig, layer: int, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops, self.heads = config, layer, ops, config.num_self_heads
        hidden = config.hidden_size
        self.qkv_proj = ops.pack(_stacked(weights, name, {"q": self.heads, "k": self.heads, "v": None}, hidden))
        self.out_proj = linear(weights, ops, f"{name}.out_proj", hidden, hidden)

    def project(self, x: Tensor, norm: Norm, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first -> q (T, heads, D); k, v are written."""
        heads = self.ops.linear(x, self.qkv_proj, norm=norm).unflatten(-1, (3 * self.heads, -1))
        q, k, v = heads.split(self.heads, dim=1)  # (T, heads, D) each
        self.ops.write_kv(k, v, kv_pool.of_layer(self.layer), batch, rotation)
        return q

    def attend(self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, heads, D) -> residual + attention, (T, H)."""
        return _attended(self, q, residual, batch, kv_pool, rotation)


class GatedRetention:
    """A recurrence in place of attention: the layer keeps a (D, D) state per head and request."""

    def __init__(self, config: YocoConfig, layer: int, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.layer, self.ops, self.heads, hidden = layer, ops, config.num_self_heads, config.hidden_size
        parts = {"q": self.heads, "k": self.heads, "v": None, "g": None}
        self.projection = ops.pack(_stacked(weights, name, parts, hidden))
        self.gate = linear(weights, ops, f"{name}.gt_proj", self.heads, hidden)
        self.out_proj = linear(weights, ops, f"{name}.out_proj", hidden, hidden)
        ones = torch.ones(hidden // self.heads, dtype=weights.vector_dtype, device=weights.device)
        self.norm = Norm(ones, config.rms_norm_eps)

    def project(self, x: Tensor, norm: Norm, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first -> gated, normed outputs (T, H); the requests' states are carried on."""
        x = self.ops.normed(x, norm)
        heads = self.ops.linear(x, self.projection).unflatten(-1, (4 * self.heads, -1))
        q, k, v, g = heads.split(self.heads, dim=1)  # (T, heads, D) each
        decay = F.logsigmoid(self.ops.linear(x, self.gate).float()) / _GATE_SLOWDOWN  # (T, heads)
        q, k = self.ops.rotate(q, rotation).float(), self.ops.rotate(k, rotation).float() * k.shape[-1] ** -0.5
        out = retain(q, k, v.float(), decay, kv_pool.of_layer(self.layer), batch).to(x.dtype)
        return (F.silu(g) * self.ops.normed(out, self.norm)).flatten(1)

    def attend(self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """What `project` gave (T, H) -> residual + its projection, (T, H)."""
        return self.ops.linear(q, self.out_proj, residual)


class CrossAttention:
    """Queries over the one shared K/V; the first cross layer also makes that, by a norm of its own."""

    def __init__(self, config: YocoConfig, layer: int, name: str, weights: Checkpoint, ops: Ops) -> None:
        self.config, self.layer, self.ops, hidden = config, layer, ops, config.hidden_size
        self.q_proj = ops.pack(_stacked(weights, name, {"q": config.num_heads}, hidden))
        self.out_proj = linear(weights, ops, f"{name}.out_proj", hidden, hidden)
        self.owns, head_dim = config.sharing.owns(layer), config.geometry[layer].head_dim
        if self.owns:
            shared = _stacked(weights, "cross_decoder", {"k": config.num_kv_heads}, hidden, head_dim)
            value = weights.take("cross_decoder.v_proj.weight", (config.num_kv_heads * head_dim, hidden))
            self.kv_proj = ops.pack(torch.cat([shared, value]))
            self.kv_norm = rms_norm(weights, "cross_decoder.kv_layer_norm", hidden, config.rms_norm_eps)

    def project(self, x: Tensor, norm: Norm, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H), normed first -> q (T, Hq, D); the owner writes the shared k, v."""
        if self.owns:
            heads = self.ops.linear(x, self.kv_proj, norm=self.kv_norm).unflatten(
                -1, (2 * self.config.num_kv_heads, -1)
            )
            k, v = heads.split(self.config.num_kv_heads, dim=1)  # (T, Hkv, D) each
            self.ops.write_kv(k, v, kv_pool.of_layer(self.layer), batch, rotation)
        return self.ops.linear(x, self.q_proj, norm=norm).unflatten(-1, (self.config.num_heads, -1))

    def attend(self, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """q (T, Hq, D) -> residual + attention, (T, H)."""
        return _attended(self, q, residual, batch, kv_pool, rotation)


def _attended(
    mixer: Any, q: Tensor, residual: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation
) -> Tensor:
    memory, sight = kv_pool.of_layer(mixer.layer), mixer.config.sharing.sight(mixer.layer)
    out = mixer.ops.attend(q, memory, batch, scale=q.shape[-1] ** -0.5, rotation=rotation, **sight)
    return mixer.ops.linear(out.flatten(1), mixer.out_proj, residual)


def _stacked(
    weights: Checkpoint, name: str, parts: dict[str, int | None], hidden: int, head_dim: int | None = None
) -> Tensor:
    """Projections side by side (part -> its heads if RoPE turns it), rotated pairs of dimensions made halves."""
    stacked = []
    for part, heads in parts.items():
        rows = hidden if heads is None or head_dim is None else heads * head_dim
        weight = weights.take(f"{name}.{part}_proj.weight", (rows, hidden))
        if heads is not None:  # (2i, 2i + 1) -> (i, i + D / 2)
            weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        stacked.append(weight)
    return torch.cat(stacked)


# ---------------------------------------------------------------- the recurrence


def retain(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, memory: StateMemory, batch: ForwardBatch) -> Tensor:
    """q, k, v (T, heads, D) and log-decays (T, heads), all float32 -> outputs (T, heads, D).

    Each request goes on from its state in `memory` and leaves its new one there, and one more at every block boundary
    that it passes: those are what a later request with the same text can start from.
    """
    spans = _spans(memory, batch)
    if batch.max_seqlen_q == 1 and not _depend(spans):  # S requests of one token, all at once
        before = memory.load([span.page_before for span in spans])
        out, after = _recur(q[:, None], k[:, None], v[:, None], decay[:, None], before)
        memory.store([span.page for span in spans], after)
        return out[:, 0]
    out = torch.empty_like(v)
    for span in spans:
        rows = slice(span.first_row, span.stop_row)
        before = memory.load([span.page_before])
        (out[rows],), after = _recur(q[None, rows], k[None, rows], v[None, rows], decay[None, rows], before)
        memory.store([span.page], after)
    return out


def _recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """n tokens of B texts at once (the parallel form): q, k, v (B, n, heads, D), decay (B, n, heads), state
    (B, heads, D, D) -> outputs (B, n, heads, D), states after the last token.
    """
    total = decay.cumsum(1)  # log of what is left of the first state, (B, n, heads)
    left = (total[:, :, None] - total[:, None]).exp()  # (B, n, m, heads): of token m's part when token n reads
    causal = torch.ones(left.shape[1:3], dtype=torch.bool, device=left.device).tril()[:, :, None]
    left = left.where(causal, 0)  # above the diagonal it grows beyond all numbers
    scores = torch.einsum("bnhd,bmhd->bnmh", q, k) * left
    out = torch.einsum("bnmh,bmhe->bnhe", scores, v)
    out = out + torch.einsum("bnhd,bhde->bnhe", q * total.exp()[..., None], state)
    rest = (total[:, -1:] - total).exp()[..., None]  # (B, n, heads, 1)
    after = total[:, -1].exp()[..., None, None] * state + torch.einsum("bnhd,bnhe->bhde", k * rest, v)
    return out, after


@dataclass(frozen=True)
class _Span:
    """Neighbouring rows of a request in one block: the state before them lies in one page, that behind in another."""

    first_row: int
    stop_row: int
    page_before: int | None  # None: the text begins here
    page: int


def _spans(memory: StateMemory, batch: ForwardBatch) -> list[_Span]:
    table, size = batch.block_tables[memory.retention_class].tolist(), memory.block_size
    offsets, spans = batch.cu_seqlens_q.tolist(), []
    for s, stop in enumerate(batch.seqused_k.tolist()):
        row, position = offsets[s], stop - (offsets[s + 1] - offsets[s])
        while position < stop:
            count = min(stop, (position // size + 1) * size) - position
            before = table[s][(position - 1) // size] if position else None
            spans.append(_Span(row, row + count, before, table[s][position // size]))
            row, position = row + count, position + count
    return spans


def _depend(spans: list[_Span]) -> bool:
    """Whether one request starts from what another leaves in the same step (a prefix found in the very step)."""
    writer = {span.page: span for span in spans}
    return any(writer.get(span.page_before, span) is not span for span in spans if span.page_before is not None)


# ---------------------------------------------------------------- the model


class Layer:
    """Two norms, a mixer, a gated MLP."""

    def __init__(self, config: YocoConfig, layer: int, weights: Checkpoint, ops: Ops) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        below = layer < config.first_cross
        name = f"self_decoder.layers.{layer}" if below else f"cross_decoder.layers.{layer - config.first_cross}"
        in_self = WindowedAttention if config.sliding_window else GatedRetention
        mixer = in_self if below else CrossAttention
        self.mixer_norm = rms_norm(weights, f"{name}.mixer_layer_norm", hidden, eps)
        self.mixer = mixer(config, layer, f"{name}.mixer", weights, ops)
        self.mlp_norm = rms_norm(weights, f"{name}.final_layer_norm", hidden, eps)
        names = f"{name}.ffn.fc1", f"{name}.ffn.gate", f"{name}.ffn.fc2"
        self.mlp = GatedMlp(weights, ops, names, hidden, config.intermediate_size)

    def project(self, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """x (T, H) -> what the mixer needs of these rows; K/V or states are written."""
        return self.mixer.project(x, self.mixer_norm, batch, kv_pool, rotation)

    def finish(self, q: Tensor, x: Tensor, batch: ForwardBatch, kv_pool: KVPool, rotation: Rotation) -> Tensor:
        """The mixer's q, x (T, H) -> x + mixer + MLP, (T, H)."""
        x = self.mixer.attend(q, x, batch, kv_pool, rotation)
        return self.mlp(x, norm=self.mlp_norm, residual=x)


class Model:
    """token ids -> hidden states of the rows behind the cut -> logits."""

    def __init__(self, config: YocoConfig, weights: Checkpoint, ops: Ops, max_model_len: int) -> None:
        self.config, self.ops, hidden = config, ops, config.hidden_size
        self.embedding = weights.take("embed_tokens.weight", (config.vocab_size, hidden))
        self.layers = [Layer(config, i, weights, ops) for i in range(config.sharing.num_layers)]
        self.norm = rms_norm(weights, "layer_norm", hidden, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = output_head(weights, ops, "output_projection.weight", self.embedding, tied=tied)
        device = self.embedding.device
        self.self_rotary = _rotary(config.rope_theta, hidden // config.num_self_heads, device)
        self.cross_rotary = _rotary(config.rope_theta, hidden // config.num_heads, device)

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""
        x = self.ops.embed(batch.token_ids, self.embedding) * self.config.hidden_size**0.5  # (T, H)
        below, above = self.layers[: self.config.first_cross], self.layers[self.config.first_cross :]
        x = run_layers(self.ops, below, x, batch, kv_pool, self.self_rotary, cut=None)
        return run_layers(self.ops, above, x, batch, kv_pool, self.cross_rotary, cut=0)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32."""
        return self.ops.head(hidden, self.head, norm=self.norm)


def _rotary(theta: float, dim: int, device: torch.device) -> RotaryEmbedding:
    """theta ** -(0 ... 1), the end included."""
    return RotaryEmbedding((theta ** -torch.linspace(0, 1, dim // 2)).to(device))
