"""Kernel sets, by name. `auto` takes the best one that runs on this machine."""

from __future__ import annotations

import logging

import torch

from miniserve.errors import ConfigError
from miniserve.ops.interface import Activation, Ops, RotaryEmbedding, Rotation
from miniserve.ops.native import BuildError, load_library

__all__ = ["Activation", "Ops", "RotaryEmbedding", "Rotation", "load_ops"]

log = logging.getLogger(__name__)

KERNEL_SETS = ("reference", "cpu")


def load_ops(name: str, device: torch.device, dtype: str = "auto") -> Ops:
    """The kernel set called `name`, or for `auto` the best one that runs on the device and in this dtype.

    Raises:
        ConfigError: there is no such set, or it cannot run here.
    """
    if name not in ("auto", *KERNEL_SETS):
        raise ConfigError(f"ops={name!r}: there is no such kernel set; use 'auto' or one of {', '.join(KERNEL_SETS)}")
    obstacle = None if name == "reference" else _cpu_obstacle(device, dtype)
    if name == "reference" or (name == "auto" and obstacle):
        if obstacle and device.type == "cpu":
            log.warning("the slower reference kernels are used, not the cpu set: %s", obstacle)
        from miniserve.ops.reference import ReferenceOps

        return ReferenceOps()
    if obstacle:
        raise ConfigError(f"ops='cpu': {obstacle}")
    from miniserve.ops.cpu import CpuOps

    return CpuOps()


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
