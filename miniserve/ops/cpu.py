"""The `cpu` set: own C++ kernels (`csrc/`) called through ctypes. The fastest set without a GPU.

Weights and K/V are kept in float32 or bfloat16, activations always in float32. Weights are repacked once at loading
(the original is let go); K/V lies inside a block as the attention kernel reads it. Each result is a fixed order of
sums that does not depend on the other rows of the batch or on the number of threads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.kvcache.pool import GroupMemory, KVPool
from miniserve.ops import abi, replay
from miniserve.ops.interface import Activation, Norm, Ops, RotaryEmbedding, Rotation
from miniserve.ops.native import FLAGS, load_library

PANEL = 32  # outputs of a weight panel, as in csrc/matmul.h
_LANES = 16
_MOST_DESCRIBED = 256
_SLAB_BYTES = 64 << 20  # weights lie in slabs of this size, so that large pages hold them without gaps
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PACK = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


@dataclass(frozen=True)
class Packed:
    """A weight in panels (see csrc/matmul.h), with its bias in the same order."""

    panels: Tensor  # (num_panels, steps, 32, kPack), flat
    scales: Tensor | None  # of int8 weights: one per output
    bias: Tensor | None
    twin: Any  # abi.Weight, with the addresses of the above
    address: int  # of the twin
    outputs: int


class CpuOps(Ops):
    """Own kernels for float32 and bfloat16. Inputs may be views: rows any distance apart, each row dense.

    With `quantization` "int8" products hold 8-bit weights with a scale per output, and quantise each row of their
    input by its own scale. `flags` are the compiler's; other than the default ones are for tests.

    Raises:
        BuildError: they cannot be built here.
    """

    block_size_multiple = _LANES
    widens_bfloat16 = True

    def __init__(
        self, num_threads: int | None = None, flags: tuple[str, ...] = FLAGS, quantization: str | None = None
    ) -> None:
        self._quantize = quantization == "int8"
        self._twins: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._recording: replay.Program | None = None
        self._watch = replay.TorchWatch()  # of the newest recording
        self._programs: OrderedDict[Hashable, replay.Program] = OrderedDict()
        self._never_recorded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._workspace = replay.Workspace()
        library = load_library(flags)
        for name, (argument_types, result_type) in abi.SIGNATURES.items():
            function = getattr(library, f"miniserve_{name}")
            function.argtypes, function.restype = argument_types, result_type
        pool = ctypes.c_void_p(library.miniserve_pool_new(num_threads or torch.get_num_threads()))
        # Not at exit too: a daemon thread may be in a kernel then, and sleeping helpers end with the process.
        weakref.finalize(self, library.miniserve_pool_delete, pool).atexit = False
        self._pack, self._argmax = partial(library.miniserve_pack, pool), partial(library.miniserve_argmax, pool)
        self._use_large_pages = library.miniserve_use_large_pages
        self._slab = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one
        self._run_calls = partial(library.miniserve_run, pool)
        functions = {name: getattr(library, f"miniserve_{name}") for name in abi.OPERATIONS}
        self._functions = {name: partial(function, pool) for name, function in functions.items()}
        self._addresses = {
            name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()
        }

    @property
    def name(self) -> str:
        """See `Ops.name`."""
        return super().name + (" with int8 weights" if self._quantize else "")

    def adopt(self, arena: Tensor) -> None:
        """See `Ops.adopt`: large pages, since attention jumps from block to block."""
        self._use_large_pages(arena.data_ptr(), arena.nbytes)

    def run(
        self, model: Callable[[ForwardBatch, KVPool], Tensor], batch: ForwardBatch, kv_pool: KVPool, *, eager: bool
    ) -> Tensor:
        """See `Ops.run`: decode steps are recorded the first time and repeated from then on (`replay.py`)."""
        key = None if eager or model in self._never_recorded else replay.key_of(model, batch, kv_pool)
        if key is None:
            return model(batch, kv_pool)
        program = self._programs.get(key)
        if program is None:
            return self._record(key, model, batch, kv_pool)
        self._programs.move_to_end(key)
        program.fill(batch)
        self._run_calls(ctypes.addressof(program.array), len(program.array))
        return program.result()

    def _record(
        self, key: Hashable, model: Callable[[ForwardBatch, KVPool], Tensor], batch: ForwardBatch, kv_pool: KVPool
    ) -> Tensor:
        self._recording = program = replay.program_for(model, batch, kv_pool)
        try:
            with replay.TorchWatch() as self._watch:
                program.finish(model(program.batch, kv_pool))
        finally:
            self._recording = None
        if self._watch.has_computed:
            self._never_recorded.add(model)
            return program.result()
        self._programs[key] = program
        if len(self._programs) > replay.MOST_PROGRAMS:
            self._programs.popitem(last=False)
        return program.result()

    def vector_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Norm weights and biases meet float32 activations."""
        return torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """See `Ops.pack`."""
        return self._packed(weight, bias, gated=False)

    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """See `Ops.pack_gated`: panels of 16 gates beside their 16 ups."""
        return self._packed(weight, bias, gated=True)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.linear`."""
        return self._product(x, packed, None, norm, residual)

    def activated_linear(self, x: Tensor, packed: Packed, activation: Activation) -> Tensor:
        """See `Ops.activated_linear`."""
        return self._product(x, packed, activation)

    def gated_linear(self, x: Tensor, packed: Packed, activation: Activation, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.gated_linear`."""
        return self._product(x, packed, activation, norm)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return self._on_rows("rms_norm", x, weight=weight.data_ptr(), eps=eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `Ops.layer_norm`."""
        return self._on_rows("layer_norm", x, weight=weight.data_ptr(), bias=bias.data_ptr(), eps=eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Ops.rotate`."""
        twin = self._twin(rotation, _rotation_twin)
        return self._on_rows("rotate", x, twin, rotation=twin.address)

    def angles(self, rotary: RotaryEmbedding, positions: Tensor) -> Rotation:
        """See `Ops.angles`."""
        rows, half = positions.shape[0], rotary.inv_freq.shape[0]
        rotation = Rotation(self._empty(rows, half), self._empty(rows, half))
        addresses = (x.data_ptr() for x in (positions, rotary.inv_freq, rotation.cos, rotation.sin))
        self._call("angles", abi.AngleArguments(*addresses, rows, half, rotary.attention_factor))
        return rotation

    def write_kv(
        self, k: Tensor, v: Tensor, memory: GroupMemory, batch: ForwardBatch, rotation: Rotation | None
    ) -> None:
        """See `Ops.write_kv`."""
        twins = self._memory_and_requests(memory, batch)
        angles = self._twin(rotation, _rotation_twin)
        self._call(
            "write_kv",
            abi.WriteArguments(
                *(twins[0].address, twins[1].address, k.data_ptr(), v.data_ptr(), angles and angles.address),
                *(k.stride(0), v.stride(0)),
            ),
            *(*twins, angles),
        )

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
        """See `Ops.attend`."""
        out = self._empty(q.shape[0], q.shape[1], memory.v.shape[-1])
        key_rotation = None  # of all positions, to whole blocks
        if key_rotary is not None:
            with self._watch.constants():
                key_rotation = key_rotary(torch.arange(-(-batch.max_seqlen_k // _LANES) * _LANES))
        twins = self._memory_and_requests(memory, batch)
        angles, key_angles = self._twin(rotation, _rotation_twin), self._twin(key_rotation, _rotation_twin)
        self._call(
            "attend",
            abi.AttendArguments(
                *(twins[0].address, twins[1].address, q.data_ptr()),
                *(angles and angles.address, key_angles and key_angles.address, out.data_ptr()),
                *(q.stride(0), q.shape[1], window or 0, scale, softcap or 0.0, diagonal),
            ),
            *(*twins, angles, key_angles, key_rotation),
        )
        return out

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Ops.embed`; float32, as all activations."""
        y = self._empty(token_ids.shape[0], table.shape[1])
        addresses = token_ids.data_ptr(), table.data_ptr(), y.data_ptr()
        self._call("embed", abi.EmbedArguments(*addresses, *y.shape, _DTYPES[table.dtype]))
        return y

    def head(self, hidden: Tensor, packed: Packed, *, norm: Norm | None = None) -> Tensor:
        """See `Ops.head`."""
        return self._product(hidden, packed, None, norm)

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
        dtype = torch.int8 if self._quantize else weight.dtype
        panels = self._room(num_panels * PANEL * -(-inputs // _PACK[dtype]) * _PACK[dtype], dtype)
        scales = torch.empty(num_panels * PANEL) if self._quantize else None
        is_bfloat16 = int(weight.dtype == torch.bfloat16)
        self._pack(
            *(_DTYPES[dtype], weight.data_ptr(), is_bfloat16, rows, inputs, int(gated)),
            *(panels.data_ptr(), _address(scales)),
        )
        bias = _panel_order(bias, num_panels, gated)
        addresses = panels.data_ptr(), _address(scales), _address(bias)
        twin = abi.Weight(*addresses, num_panels, inputs, outputs, _DTYPES[dtype], gated)
        return Packed(panels, scales, bias, twin, ctypes.addressof(twin), outputs)

    def _room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for so many numbers of a weight, behind the weight before."""
        num_bytes = -(-count * dtype.itemsize // 64) * 64
        if self._slab.nbytes < num_bytes:
            self._slab = torch.empty(max(num_bytes, _SLAB_BYTES), dtype=torch.uint8)
            self._use_large_pages(self._slab.data_ptr(), self._slab.nbytes)
        room, self._slab = self._slab[:num_bytes], self._slab[num_bytes:]
        return room.view(dtype)[:count]

    def _product(
        self,
        x: Tensor,
        packed: Packed,
        activation: Activation | None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        y = self._empty(x.shape[0], packed.outputs)
        weight, eps = (None, 0.0) if norm is None else norm
        arguments = abi.LinearArguments(
            *(packed.address, x.data_ptr(), _address(weight), _address(residual), y.data_ptr()),
            *(x.stride(0), x.shape[0], 0 if residual is None else residual.stride(0), eps, _ACTIVATIONS[activation]),
        )
        self._call("linear", arguments)
        return y

    def _on_rows(self, operation: str, x: Tensor, *held: Any, **more: Any) -> Tensor:
        """An operation on each row of x (T, H), or on each head of x (T, heads, D)."""
        y = self._empty(*x.shape)
        sizes = {"x_stride": x.stride(0), "rows": x.shape[0], "heads": x.shape[1] if x.dim() == 3 else 1}
        arguments = abi.RowArguments(x=x.data_ptr(), y=y.data_ptr(), dim=x.shape[-1], **sizes, **more)
        self._call(operation, arguments, *held)
        return y

    def _call(self, operation: str, arguments: Any, *held: Any) -> None:
        """Run an operation now, and record it if a step is being recorded. `held` is what the arguments point to,
        unless the model, the pool or the batch hold it."""
        self._functions[operation](ctypes.byref(arguments))
        if self._recording is not None:
            self._recording.add(self._addresses[operation], arguments, held)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape) if self._recording is None else self._workspace.take(shape)

    def _memory_and_requests(self, memory: GroupMemory, batch: ForwardBatch) -> tuple[Any, Any]:
        requests = self._twin(batch, partial(_requests_twin, memory.retention_class), memory.retention_class)
        return self._twin(memory, _memory_twin), requests

    def _twin(self, thing: Any, make: Callable[[Any], Any], index: int = 0) -> Any:
        """A thing's struct. All layers of a step ask for the same few: they are kept for a while."""
        if thing is None:
            return None
        found = self._twins.get((id(thing), index))
        if found is None or found[0] is not thing:
            if len(self._twins) >= _MOST_DESCRIBED:
                self._twins.clear()
            found = self._twins[id(thing), index] = thing, make(thing)
            found[1].address = ctypes.addressof(found[1])
        return found[1]


def _memory_twin(memory: GroupMemory) -> Any:
    _, block_size, kv_heads, key_dim = memory.k.shape
    addresses = memory.k.data_ptr(), memory.v.data_ptr()
    sizes = block_size, kv_heads, key_dim, memory.v.shape[-1]
    scales = _address(memory.k_scale), _address(memory.v_scale)
    scale_stride = 0 if memory.k_scale is None else memory.k_scale.stride(0)
    return abi.Memory(*addresses, memory.k.stride(0), *sizes, _DTYPES[memory.k.dtype], *scales, scale_stride)


def _requests_twin(retention_class: int, batch: ForwardBatch) -> Any:
    table, slots = batch.block_tables[retention_class], batch.slot_mapping[retention_class]
    addresses = [x.data_ptr() for x in (batch.cu_seqlens_q, batch.seqused_k, table, slots)]
    return abi.Requests(*addresses, *table.shape, slots.shape[0])


def _rotation_twin(rotation: Rotation) -> Any:
    return abi.Rotation(rotation.cos.data_ptr(), rotation.sin.data_ptr(), rotation.cos.shape[1])


def _panel_order(bias: Tensor | None, num_panels: int, gated: bool) -> Tensor | None:
    """A bias as the panels have their outputs, padded with zeros."""
    if bias is None:
        return None
    if not gated:
        return F.pad(bias.float(), (0, num_panels * PANEL - bias.shape[0]))
    halves = F.pad(bias.float().view(2, -1), (0, num_panels * _LANES - bias.shape[0] // 2))
    return halves.view(2, num_panels, _LANES).transpose(0, 1).flatten()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
