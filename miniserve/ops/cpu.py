"""The `cpu` set: own C++ kernels (`csrc/`) called through ctypes. The fastest set without a GPU.

Weights and K/V are kept in float32 or bfloat16, activations always in float32. Weights are repacked once at loading
(the original is let go); K/V lies inside a block as the attention kernel reads it. Each result is a fixed order of
sums that does not depend on the other rows of the batch or on the number of threads.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.kvcache.pool import GroupMemory
from miniserve.ops.interface import Activation, Ops, RotaryEmbedding, Rotation
from miniserve.ops.native import FLAGS, load_library

PANEL = 32  # outputs of a weight panel, as in csrc/matmul.h
_LANES = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_PACK = {torch.float32: 1, torch.bfloat16: 2}
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "pool_new": ([_I], _P),
    "pool_delete": ([_P], None),
    "pack": ([_P, _I, _P, _I, _N, _N, _I, _P], None),
    "linear": ([_P, _I, _P, _N, _N, _N, _P, _N, _P, _P, _N, _I, _I, _P, _N, _N], None),
    "rms_norm": ([_P, _P, _N, _N, _N, _N, _P, _F, _P], None),
    "layer_norm": ([_P, _P, _N, _N, _N, _N, _P, _P, _F, _P], None),
    "rotate": ([_P, _P, _N, _N, _N, _N, _P, _P, _N, _P], None),
    "write_kv": ([_P, _I, _P, _N, _P, _N, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _N, _N], None),
    "attend": ([_P, _I, _P, _N, _N, _P, _P, _N, _N, _N, _N, _N, _P, _P, _N, _P, _N, _F, _N, _F, _P, _P, _N, _P], None),
    "argmax": ([_P, _P, _N, _N, _N, _P], None),
}


@dataclass(frozen=True)
class Packed:
    """A weight in panels (see csrc/matmul.h), with its bias in the same order."""

    panels: Tensor  # (num_panels, steps, 32, kPack), flat
    num_panels: int
    outputs: int
    inputs: int
    bias: Tensor | None
    gated: bool


class CpuOps(Ops):
    """Own kernels for float32 and bfloat16. Inputs may be views: rows any distance apart, each row dense.

    `flags` are the compiler's; other than the default ones are for tests.

    Raises:
        BuildError: they cannot be built here.
    """

    block_size_multiple = _LANES
    widens_bfloat16 = True

    def __init__(self, num_threads: int | None = None, flags: tuple[str, ...] = FLAGS) -> None:
        library = load_library(flags)
        for name, (argument_types, result_type) in _SIGNATURES.items():
            function = getattr(library, f"miniserve_{name}")
            function.argtypes, function.restype = argument_types, result_type
        pool = ctypes.c_void_p(library.miniserve_pool_new(num_threads or torch.get_num_threads()))
        # Not at exit too: a daemon thread may be in a kernel then, and sleeping helpers end with the process.
        weakref.finalize(self, library.miniserve_pool_delete, pool).atexit = False
        self._pack = partial(library.miniserve_pack, pool)
        self._linear = partial(library.miniserve_linear, pool)
        self._rms_norm = partial(library.miniserve_rms_norm, pool)
        self._layer_norm = partial(library.miniserve_layer_norm, pool)
        self._rotate = partial(library.miniserve_rotate, pool)
        self._write_kv = partial(library.miniserve_write_kv, pool)
        self._attend = partial(library.miniserve_attend, pool)
        self._argmax = partial(library.miniserve_argmax, pool)

    def vector_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Norm weights and biases meet float32 activations."""
        return torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """See `Ops.pack`."""
        return self._packed(weight, bias, gated=False)

    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """See `Ops.pack_gated`: panels of 16 gates beside their 16 ups."""
        return self._packed(weight, bias, gated=True)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        return self._product(x, packed, None, residual)

    def activated_linear(self, x: Tensor, packed: Packed, activation: Activation) -> Tensor:
        """See `Ops.activated_linear`."""
        return self._product(x, packed, activation)

    def gated_linear(self, x: Tensor, packed: Packed, activation: Activation) -> Tensor:
        """See `Ops.gated_linear`."""
        return self._product(x, packed, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        y = torch.empty(x.shape)
        self._rms_norm(*_rows(x), weight.data_ptr(), eps, y.data_ptr())
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `Ops.layer_norm`."""
        y = torch.empty(x.shape)
        self._layer_norm(*_rows(x), weight.data_ptr(), bias.data_ptr(), eps, y.data_ptr())
        return y

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Ops.rotate`."""
        y = torch.empty(x.shape)
        self._rotate(*_rows(x), *_angles(rotation), y.data_ptr())
        return y

    def write_kv(
        self, k: Tensor, v: Tensor, memory: GroupMemory, batch: ForwardBatch, rotation: Rotation | None
    ) -> None:
        """See `Ops.write_kv`."""
        slots = batch.slot_mapping[memory.retention_class]
        cos, sin, half = (0, 0, 0) if rotation is None else _angles(rotation)
        self._write_kv(
            _DTYPES[memory.k.dtype],
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k.shape[0]),
            *(slots.data_ptr(), cos, sin, half),
            *_memory_arguments(memory),
        )

    def attend(
        self,
        q: Tensor,
        memory: GroupMemory,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        key_rotary: RotaryEmbedding | None = None,
    ) -> Tensor:
        """See `Ops.attend`."""
        out = torch.empty(q.shape[0], q.shape[1], memory.v.shape[-1])
        table = batch.block_tables[memory.retention_class]
        cos, sin, half, angles = 0, 0, 0, None
        if key_rotary is not None:  # a table of all positions, to whole blocks
            angles = key_rotary(torch.arange(-(-batch.max_seqlen_k // _LANES) * _LANES))
            cos, sin, half = _angles(angles)
        self._attend(
            _DTYPES[memory.k.dtype],
            *(q.data_ptr(), q.stride(0), q.shape[1]),
            *_memory_arguments(memory),
            *(batch.cu_seqlens_q.data_ptr(), batch.seqused_k.data_ptr(), table.shape[0]),
            *(table.data_ptr(), table.shape[1]),
            *(scale, window or 0, softcap or 0.0),
            *(cos, sin, half),
            out.data_ptr(),
        )
        return out

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Ops.embed`; float32, as all activations."""
        return F.embedding(token_ids, table).float()

    def head(self, hidden: Tensor, packed: Packed) -> Tensor:
        """See `Ops.head`."""
        return self._product(hidden, packed, None)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._argmax(logits.data_ptr(), logits.stride(0), *logits.shape, tokens.data_ptr())
        return tokens

    def _packed(self, weight: Tensor, bias: Tensor | None, gated: bool) -> Packed:
        weight = weight.contiguous()
        rows, inputs = weight.shape
        outputs = rows // 2 if gated else rows
        num_panels = -(-outputs // (_LANES if gated else PANEL))
        pack = _PACK[weight.dtype]
        panels = torch.empty(num_panels * PANEL * -(-inputs // pack) * pack, dtype=weight.dtype)
        is_bfloat16 = int(weight.dtype == torch.bfloat16)
        self._pack(_DTYPES[weight.dtype], weight.data_ptr(), is_bfloat16, rows, inputs, int(gated), panels.data_ptr())
        return Packed(panels, num_panels, outputs, inputs, _panel_order(bias, num_panels, gated), gated)

    def _product(
        self, x: Tensor, packed: Packed, activation: Activation | None, residual: Tensor | None = None
    ) -> Tensor:
        y = torch.empty(x.shape[0], packed.outputs)
        self._linear(
            _DTYPES[packed.panels.dtype],
            *(x.data_ptr(), x.stride(0), x.shape[0], packed.inputs),
            *(packed.panels.data_ptr(), packed.num_panels),
            0 if packed.bias is None else packed.bias.data_ptr(),
            *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
            *(_ACTIVATIONS[activation], packed.gated),
            *(y.data_ptr(), packed.outputs, packed.outputs),
        )
        return y


def _panel_order(bias: Tensor | None, num_panels: int, gated: bool) -> Tensor | None:
    """A bias as the panels have their outputs, padded with zeros."""
    if bias is None:
        return None
    if not gated:
        return F.pad(bias.float(), (0, num_panels * PANEL - bias.shape[0]))
    halves = F.pad(bias.float().view(2, -1), (0, num_panels * _LANES - bias.shape[0] // 2))
    return halves.view(2, num_panels, _LANES).transpose(0, 1).flatten()


def _rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """Address, row stride, rows, heads and head size of x (T, H) or (T, heads, D)."""
    heads = 1 if x.dim() == 2 else x.shape[1]
    return x.data_ptr(), x.stride(0), x.shape[0], heads, x.shape[-1]


def _angles(rotation: Rotation) -> tuple[int, int, int]:
    return rotation.cos.data_ptr(), rotation.sin.data_ptr(), rotation.cos.shape[1]


def _memory_arguments(memory: GroupMemory) -> tuple[int, ...]:
    _, block_size, kv_heads, key_dim = memory.k.shape
    value_dim = memory.v.shape[-1]
    return memory.k.data_ptr(), memory.v.data_ptr(), memory.k.stride(0), block_size, kv_heads, key_dim, value_dim
