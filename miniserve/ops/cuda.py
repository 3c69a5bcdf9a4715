"""The `cuda` set: attention by flash-attn or by torch's `varlen_attn`, all else by torch.

    q (T, Hq, D) ─────────────────────────┐
    k, v (N, P, Hkv, D), the pool's views ┼──► FlashAttention-2 ──► (T, Hq, D)
    block_table, cu_seqlens_q, seqused_k ─┘

Both are the same kernel (FlashAttention-2, 2307.08691). It reads a group's memory where it lies, whatever the stride
between its pages, so owner and reader alike hand over nothing but queries. Query and key ends are aligned: the last
query of a request sees its last key.

No operation waits for the GPU or asks it for a number, and every shape follows from the number of rows and requests and
from the width of the block tables. So a decode step whose batch was padded to a bucket (`pad_decode`) can be captured
in a CUDA graph. What the kernels cannot do (`PagedKernel.lacks`) is computed by the reference's attention, which walks
over the requests and waits for the GPU: right, but slow and not to be captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVLayout
from miniserve.kvcache.pool import GroupMemory
from miniserve.ops.interface import RotaryEmbedding, Rotation
from miniserve.ops.reference import ReferenceOps

Function = Callable[..., Any]  # a kernel of another package, see `flash_attn_kernel` and `varlen_attn_kernel`

_HALVES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8  # 16 bytes: one load
_MIN_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True)
class PagedKernel:
    """A paged attention function, called through `run`, and what it can do."""

    name: str
    run: Callable[[Tensor, GroupMemory, ForwardBatch, float, int | None, float | None], Tensor]
    softcap: bool
    dtypes: tuple[torch.dtype, ...] = _HALVES

    def lacks(self, q: Tensor, memory: GroupMemory, softcap: float | None, rotates_keys: bool) -> str | None:
        """What this attention needs and the kernel does not have, or None. Looks at no element of any tensor."""
        key_dim, value_dim = q.shape[-1], memory.v.shape[-1]
        if q.dtype not in self.dtypes or memory.k.dtype != q.dtype:
            return f"queries in {q.dtype} on keys in {memory.k.dtype}"
        if key_dim != value_dim:
            return f"keys of {key_dim} and values of {value_dim} dimensions"
        if key_dim > _MAX_HEAD_DIM or key_dim % _HEAD_DIM_MULTIPLE:
            return f"a head size of {key_dim}"
        if rotates_keys:
            return "keys rotated as they are read"
        if softcap is not None and not self.softcap:
            return "a soft cap"
        return None


class CudaOps(ReferenceOps):
    """The reference's formulas, which torch runs well on a GPU, with a kernel for attention.

    `attention` is the kernel to use; by default flash-attn's if it is installed, else torch's.

    Raises:
        ConfigError: there is no such kernel.
    """

    block_size_multiple = 256  # the kernel's tiles of up to 256 keys must not cross a page

    def __init__(self, attention: PagedKernel | None = None) -> None:
        self.attention = attention or find_kernel()
        self.attention_kernel = self.attention.name

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`: one kernel instead of the formula's six."""
        return F.rms_norm(x, weight.shape, weight, eps)

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
        """See `Ops.attend`. Without the diagonal a request has one key less: ends are aligned, so each query has."""
        q = q if rotation is None else self.rotate(q, rotation)
        if batch.token_ids.shape[0] == 0:  # behind the cut of a step that samples nothing; kernels refuse it
            return q.new_empty(0, q.shape[1], memory.v.shape[-1])
        two_ends = window is not None and not diagonal  # which "one key less" would move, both of them
        if two_ends or self.attention.lacks(q, memory, softcap, key_rotary is not None):
            options: dict[str, Any] = {
                "window": window,
                "diagonal": diagonal,
                "softcap": softcap,
                "key_rotary": key_rotary,
            }
            return super().attend(q, memory, batch, scale=scale, **options)
        seen = batch
        if not diagonal:
            seen = replace(batch, seqused_k=batch.seqused_k - 1, max_seqlen_k=max(1, batch.max_seqlen_k - 1))
        return self.attention.run(q, memory, seen, scale, window, softcap)


# ---------------------------------------------------------------- the kernels, in their own words


def flash_attn_kernel(function: Function, dtypes: tuple[torch.dtype, ...] = _HALVES) -> PagedKernel:
    """The kernel behind a function like `flash_attn.flash_attn_varlen_func` (flash-attn 2.7 and later)."""
    return PagedKernel("flash-attn", partial(_run_flash_attn, function), softcap=True, dtypes=dtypes)


def varlen_attn_kernel(function: Function, dtypes: tuple[torch.dtype, ...] = _HALVES) -> PagedKernel:
    """The kernel behind a function like `torch.nn.attention.varlen.varlen_attn` (torch 2.12 and later)."""
    return PagedKernel("torch varlen_attn", partial(_run_varlen_attn, function), softcap=False, dtypes=dtypes)


def _run_flash_attn(
    function: Function,
    q: Tensor,
    memory: GroupMemory,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Not `flash_attn_with_kvcache`: it takes no ragged queries, and from 2.8.4 on it waits for the longest length."""
    return function(
        q,
        memory.k,
        memory.v,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=_cu_seqlens_k(batch),
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        block_table=batch.block_tables[memory.retention_class],
    )


def _run_varlen_attn(
    function: Function,
    q: Tensor,
    memory: GroupMemory,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal is said by the window's right end, 0.

    A decode step without a window is called un-causal: its one query sees every key, and the kernel then lays the
    queries of a KV head side by side and reads the keys once for all of them.
    """
    full = (-1, -1) if batch.max_seqlen_q == 1 else (-1, 0)
    return function(
        q,
        memory.k,
        memory.v,
        cu_seq_q=batch.cu_seqlens_q,
        cu_seq_k=_cu_seqlens_k(batch),  # never looked up beside seqused_k, but FlashAttention-2 wants both or none
        max_q=batch.max_seqlen_q,
        max_k=batch.max_seqlen_k,
        scale=scale,
        window_size=full if window is None else (window - 1, 0),
        enable_gqa=q.shape[1] != memory.k.shape[2],
        seqused_k=batch.seqused_k,
        block_table=batch.block_tables[memory.retention_class],
    )


def _cu_seqlens_k(batch: ForwardBatch) -> Tensor:
    """seqused_k [3, 1, 2] -> [0, 3, 4, 6], (S + 1,) int32. Made anew each time, so that a graph contains it."""
    return F.pad(batch.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))


# ---------------------------------------------------------------- what runs here


def obstacle(device: torch.device) -> str | None:
    """Why the cuda set cannot be used on this device, with the remedy, or None."""
    if device.type != "cuda":
        return f"it runs on a CUDA device, not on {device}; use device='cuda', or ops='auto'"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "torch finds no NVIDIA GPU; install torch for CUDA and the driver, or use ops='reference'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, _MIN_CAPABILITY))
        return f"its kernels need compute capability {need} (Ampere), {device} has {have}; use ops='reference'"
    if _find_kernel() is None:
        return _NO_KERNEL
    return None


def find_kernel() -> PagedKernel:
    """flash-attn's kernel if it is installed, else torch's.

    Raises:
        ConfigError: there is neither.
    """
    kernel = _find_kernel()
    if kernel is None:
        raise ConfigError(f"ops='cuda': {_NO_KERNEL}")
    return kernel


_NO_KERNEL = (
    "there is neither flash-attn nor a torch with paged varlen_attn; install torch>=2.12 or miniserve[flash-attn], "
    "or use ops='reference'"
)


def _find_kernel() -> PagedKernel | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:  # not installed, or built for another torch
        pass
    else:
        return flash_attn_kernel(flash_attn_varlen_func)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn_kernel(varlen_attn) if "block_table" in inspect.signature(varlen_attn).parameters else None


# ---------------------------------------------------------------- static shapes


def pad_decode(batch: ForwardBatch, layout: KVLayout, num_requests: int, max_seqlen_k: int) -> ForwardBatch:
    """A decode step (one sampled token a request) in the shapes of a bucket, so that one CUDA graph serves all of it.

    T = S = `num_requests`, block tables reach to `max_seqlen_k` keys, and the cut keeps every row. The rows added
    repeat the last request: what they write is what it writes, where it writes it, so they need no memory of their
    own. The caller drops their hidden states. To replay a graph, copy each tensor of the padded batch into the one
    that was captured.

    Raises:
        ValueError: this is no decode step, or it exceeds the bucket.
    """
    size, kept = batch.token_ids.shape[0], batch.kept
    if batch.max_seqlen_q != 1 or kept is None or kept.shape[0] != size:
        raise ValueError("only a step in which every request has one token, and samples, can be padded")
    if size > num_requests or batch.max_seqlen_k > max_seqlen_k:
        raise ValueError(
            f"{size} requests of up to {batch.max_seqlen_k} keys exceed the bucket of {num_requests} x {max_seqlen_k}"
        )
    padded = replace(
        batch,
        token_ids=_repeat_last(batch.token_ids, num_requests),
        positions=_repeat_last(batch.positions, num_requests),
        cu_seqlens_q=torch.arange(num_requests + 1, dtype=torch.int32, device=kept.device),
        seqused_k=_repeat_last(batch.seqused_k, num_requests),
        max_seqlen_k=max_seqlen_k,
        block_tables=tuple(
            _repeat_last(_widen(table, -(-max_seqlen_k // cls.block_size)), num_requests)
            for table, cls in zip(batch.block_tables, layout.classes)
        ),
        slot_mapping=tuple(_repeat_last(slots, num_requests) for slots in batch.slot_mapping),
        kept=None,
        behind_cut=None,
    )
    return replace(padded, kept=torch.arange(num_requests, device=kept.device), behind_cut=padded)


def _repeat_last(rows: Tensor, count: int) -> Tensor:
    """(n, ...) -> (count, ...)."""
    return torch.cat([rows, rows[-1:].expand(count - rows.shape[0], *rows.shape[1:])])


def _widen(table: Tensor, width: int) -> Tensor:
    """(S, blocks) -> (S, width), with 0 where there is no block."""
    return F.pad(table, (0, width - table.shape[1]))
