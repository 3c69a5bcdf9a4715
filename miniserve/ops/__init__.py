"""Kernel sets, by name. `auto` takes the best one that runs on this machine."""

from __future__ import annotations

import logging

import torch

from miniserve.errors import ConfigError
from miniserve.ops.interface import Activation, Norm, Ops, RotaryEmbedding, Rotation
from miniserve.ops.native import BuildError, load_library

__all__ = ["Activation", "Norm", "Ops", "RotaryEmbedding", "Rotation", "load_ops"]

log = logging.getLogger(__name__)

KERNEL_SETS = ("reference", "cpu", "cuda")


def load_ops(name: str, device: torch.device, dtype: str = "auto", quantization: str | None = None) -> Ops:
    """The kernel set called `name`, or for `auto` the best one that runs on the device and in this dtype.

    `quantization` "int8" makes it hold the weights of all products so; only the `cpu` set can.

    Raises:
        ConfigError: there is no such set, or it cannot run here.
    """
    if name not in ("auto", *KERNEL_SETS):
        raise ConfigError(f"ops={name!r}: there is no such kernel set; use 'auto' or one of {', '.join(KERNEL_SETS)}")
    best = device.type if device.type in KERNEL_SETS else "reference"
    chosen = best if name == "auto" else name
    obstacle = _obstacle(chosen, device, dtype)
    if quantization is not None and (chosen != "cpu" or obstacle is not None):
        reason = obstacle or f"the {chosen} set has no such kernels"
        raise ConfigError(f"quantization={quantization!r}: only the cpu set holds quantised weights, but {reason}")
    if obstacle is None:
        return _load(chosen, quantization)
    if name != "auto":
        raise ConfigError(f"ops={name!r}: {obstacle}")
    log.warning("the slower reference kernels are used, not the %s set: %s", chosen, obstacle)
    return _load("reference")


def _obstacle(name: str, device: torch.device, dtype: str) -> str | None:
    """Why a set cannot be used, or None."""
    if name == "cpu":
        return _cpu_obstacle(device, dtype)
    if name == "cuda":
        from miniserve.ops import cuda

        return cuda.obstacle(device)
    return None


def _load(name: str, quantization: str | None = None) -> Ops:
    """Only the set that is used is imported."""
    if name == "cpu":
        from miniserve.ops.cpu import CpuOps

        return CpuOps(quantization=quantization)
    if name == "cuda":
        from miniserve.ops.cuda import CudaOps

        return CudaOps()
    from miniserve.ops.reference import ReferenceOps

    return ReferenceOps()


def _cpu_obstacle(device: torch.device, dtype: str) -> str | None:
    """Why the cpu set cannot be used, or None."""
    if device.type != "cpu":
        return f"it does not run on device {device}"
    if dtype == "float16":
        return "it computes in float32 and bfloat16, not in float16"
    try:
        load_library()
    except BuildError as error:
        return str(error)
    return None
