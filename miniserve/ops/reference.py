"""The reference set: plain torch, any dtype, any device, differentiable. It is the judge of all other sets.

Each operation is its definition, one request at a time where requests differ. Read this first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.kvcache.pool import GroupMemory
from miniserve.ops.interface import Activation, Norm, Ops, RotaryEmbedding, Rotation

Packed = tuple[Tensor, Tensor | None]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class ReferenceOps(Ops):
    """Every operation as its formula."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Nothing to prepare: (weight, bias) as they are."""
        return weight, bias

    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Nothing to prepare here either."""
        return weight, bias

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.linear`."""
        y = F.linear(self.normed(x, norm), *packed)
        return y if residual is None else residual + y

    def activated_linear(self, x: Tensor, packed: Packed, activation: Activation) -> Tensor:
        """See `Ops.activated_linear`."""
        return _ACTIVATIONS[activation](F.linear(x, *packed))

    def gated_linear(self, x: Tensor, packed: Packed, activation: Activation, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.gated_linear`."""
        gate, up = F.linear(self.normed(x, norm), *packed).chunk(2, dim=-1)  # each (T, F)
        return _ACTIVATIONS[activation](gate) * up

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`. The weight is multiplied in x's dtype, as Llama does."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `Ops.layer_norm`."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Ops.rotate` (RoFormer, 2104.09864, in the half-split form of GPT-NeoX and Llama)."""
        half = rotation.cos.shape[-1]
        cos, sin = rotation.cos[:, None].to(x.dtype), rotation.sin[:, None].to(x.dtype)  # (T, 1, R / 2)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def write_kv(
        self, k: Tensor, v: Tensor, memory: GroupMemory, batch: ForwardBatch, rotation: Rotation | None
    ) -> None:
        """See `Ops.write_kv`."""
        slots = batch.slot_mapping[memory.retention_class]
        block, offset = slots // memory.block_size, slots % memory.block_size
        k = k if rotation is None else self.rotate(k, rotation)
        for x, stored, scale in ((k, memory.k, memory.k_scale), (v, memory.v, memory.v_scale)):
            if scale is not None:
                x, scale[block, offset] = _quantised(x)
            stored[block, offset] = x

    def attend(
        self,
        q: Tensor,
        memory: GroupMemory,
        batch: ForwardBatch,
        *,
        scale: float,
        rotation: Rotation | None = None,
        window: int | None = None,
        diagonal: bool = True,
        softcap: float | None = None,
        key_rotary: RotaryEmbedding | None = None,
    ) -> Tensor:
        """See `Ops.attend`: one request after the other, its keys gathered by block table."""
        q = q if rotation is None else self.rotate(q, rotation)
        offsets = batch.cu_seqlens_q.tolist()
        tables = batch.block_tables[memory.retention_class]
        outputs = [q.new_empty(0, q.shape[1], memory.v.shape[-1])]
        for s, seqlen_k in enumerate(batch.seqused_k.tolist()):
            queries = q[offsets[s] : offsets[s + 1]]  # (n, Hq, Dk)
            first_query = seqlen_k - queries.shape[0]  # its position
            first_key = 0 if window is None else max(0, first_query - window + 1)
            stop = seqlen_k if diagonal else max(first_key, seqlen_k - 1)
            k, v = (x.to(q.dtype) for x in _gather(memory, tables[s], first_key, stop))  # (m, Hkv, D) each
            keys = torch.arange(first_key, stop, device=q.device)  # (m,) positions
            if key_rotary is not None:
                k = self.rotate(k, key_rotary(keys))
            mask = _visible(torch.arange(first_query, seqlen_k, device=q.device)[:, None], keys, window, diagonal)
            outputs.append(_attend_one(queries, k, v, mask, scale, softcap))
        return torch.cat(outputs)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Ops.embed`."""
        return F.embedding(token_ids, table)

    def head(self, hidden: Tensor, packed: Packed, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.head`."""
        return F.linear(self.normed(hidden, norm), *packed).float()

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`."""
        return logits.argmax(dim=-1)


def _gather(memory: GroupMemory, table: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values at positions `first` to `stop`, (m, Hkv, D) each; no other block is touched."""
    block_size = memory.block_size
    first_block = first // block_size
    blocks = table[first_block : -(-stop // block_size)]
    span = slice(first - first_block * block_size, stop - first_block * block_size)
    k, v = memory.k[blocks].flatten(0, 1)[span], memory.v[blocks].flatten(0, 1)[span]
    if memory.k_scale is None or memory.v_scale is None:
        return k, v
    scales = (scale[blocks].flatten(0, 1)[span, :, None] for scale in (memory.k_scale, memory.v_scale))
    return k * next(scales), v * next(scales)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, Hkv, D) -> whole numbers from -127 to 127 and what each is worth, (T, Hkv)."""
    scale = x.float().abs().amax(-1) / 127
    return (x.float() / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8), scale


def _visible(queries: Tensor, keys: Tensor, window: int | None, diagonal: bool) -> Tensor:
    """(n, m) bool: which key each query sees, from their positions (n, 1) and (m,)."""
    visible = keys <= queries if diagonal else keys < queries
    return visible if window is None else visible & (keys > queries - window)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention of one request: q (n, Hq, Dk), k and v (m, Hkv, D), mask (n, m) -> (n, Hq, Dv).

    Query head h reads KV head h // (Hq / Hkv) (grouped-query attention, 2305.13245).
    """
    n, num_heads, head_dim = q.shape
    grouped = q.view(n, k.shape[1], -1, head_dim)  # (n, Hkv, Hq / Hkv, Dk)
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0)  # of nothing it is NaN
    return torch.einsum("hgnm,mhd->nhgd", weights.to(q.dtype), v).reshape(n, num_heads, -1)
