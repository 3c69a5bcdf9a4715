"""The few operations that model files speak. A kernel set is one class that says them all.

A model gets its set in the constructor and never asks which one it is, nor on which device. To add a set,
write `ops/<name>.py` with a subclass of `Ops` and name it in `ops/__init__.py`.

Shapes: T rows, H hidden, Hq query heads, Hkv KV heads, D head size. No operation changes its inputs,
except `write_kv`, which writes the pool. Activations have whatever dtype the set's `embed` gives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.kvcache.pool import GroupMemory, KVPool

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class Rotation:
    """Angles of some rows: cos and sin, each (T, R / 2). The first R dims of a head are rotated in halves."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RotaryEmbedding:
    """RoPE: position -> `Rotation`. `attention_factor` scales both cos and sin (YaRN)."""

    inv_freq: Tensor  # (R / 2,) float32
    attention_factor: float = 1.0

    def __call__(self, positions: Tensor) -> Rotation:
        """Angles for positions (T,)."""
        angles = positions[:, None].float() * self.inv_freq  # (T, R / 2)
        return Rotation(angles.cos() * self.attention_factor, angles.sin() * self.attention_factor)


class Norm(NamedTuple):
    """An RMSNorm that a product applies to its input first: weight (in,), eps."""

    weight: Tensor
    eps: float


class Ops(ABC):
    """The vocabulary. Weights pass through `pack` once at loading, so a set may keep them in any form."""

    block_size_multiple: int = 1
    """Slots in a block must be a multiple of this."""

    widens_bfloat16: bool = False
    """Whether bfloat16 weights run at full speed on any CPU, since the set widens them as it loads them."""

    @property
    def name(self) -> str:
        """What the log says: the set, and the attention kernel where there is a choice."""
        return " with ".join([type(self).__name__, *filter(None, [getattr(self, "attention_kernel", None)])])

    def vector_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the set wants norm weights and biases of a model held in `dtype`."""
        return dtype

    def adopt(self, arena: Tensor) -> None:  # noqa: B027 - most sets do not care
        """Told once of the KV pool's memory, before anything is written: a set may ask the system for another kind."""

    def run(
        self, model: Callable[[ForwardBatch, KVPool], Tensor], batch: ForwardBatch, kv_pool: KVPool, *, eager: bool
    ) -> Tensor:
        """model(batch, kv_pool): the hidden states (T', H), valid until the next step.

        Unless `eager`, a set may remember what a step does and repeat it without asking the model again.
        """
        return model(batch, kv_pool)

    def angles(self, rotary: RotaryEmbedding, positions: Tensor) -> Rotation:
        """The angles at positions (T,)."""
        return rotary(positions)

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Take a weight (out, in) and a bias (out,) in the set's own form; the result goes to the linears below."""

    @abstractmethod
    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Take the weight of a gated product, gate (F, in) over up (F, in), for `gated_linear`."""

    @abstractmethod
    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None, *, norm: Norm | None = None) -> Tensor:
        """x (T, in) -> norm(x) W^T + b (+ residual), (T, out)."""

    @abstractmethod
    def activated_linear(self, x: Tensor, packed: Any, activation: Activation) -> Tensor:
        """x (T, in) -> activation(x W^T + b), (T, out)."""

    @abstractmethod
    def gated_linear(self, x: Tensor, packed: Any, activation: Activation, *, norm: Norm | None = None) -> Tensor:
        """x (T, in), packed by `pack_gated` -> activation(gate) * up of norm(x), (T, F)."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension of (T, H) or (T, heads, D), computed in float32."""

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """`rms_norm` where there is one."""
        return x if norm is None else self.rms_norm(x, *norm)

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last dimension, computed in float32."""

    @abstractmethod
    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """RoPE on x (T, heads, D)."""

    @abstractmethod
    def write_kv(
        self, k: Tensor, v: Tensor, memory: GroupMemory, batch: ForwardBatch, rotation: Rotation | None
    ) -> None:
        """Write k, v (T, Hkv, D) of an owner to its rows' slots, k rotated first unless `rotation` is None."""

    @abstractmethod
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
        """Causal attention of q (T, Hq, Dk), rotated if `rotation` says how, over a group's memory -> (T, Hq, Dv).

        Owner and reader call it alike: neither brings K or V, both read the pool. The row at position i sees keys i -
        window + 1 to i, or to i - 1 without the `diagonal`; one that sees nothing gets 0. `softcap` c turns scores s
        into c * tanh(s / c). `key_rotary` rotates keys that are stored un-rotated as they are read (MLKV's owners).
        Blocks that the window has passed are never touched.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids (T,), table (V, H) -> (T, H)."""

    @abstractmethod
    def head(self, hidden: Tensor, packed: Any, *, norm: Norm | None = None) -> Tensor:
        """hidden (R, H) -> logits (R, V) of norm(hidden), in float32."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """logits (R, V) -> the likeliest token of each row, (R,) int64; the lowest id of equals."""
