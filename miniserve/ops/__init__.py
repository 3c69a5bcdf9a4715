"""Kernel sets, by name. `auto` takes the best one that runs on this machine."""

from __future__ import annotations

from miniserve.errors import ConfigError
from miniserve.ops.interface import Activation, Ops, RotaryEmbedding, Rotation

__all__ = ["Activation", "Ops", "RotaryEmbedding", "Rotation", "load_ops"]

KERNEL_SETS = ("reference",)


def load_ops(name: str) -> Ops:
    """The kernel set called `name`, or the best one for `auto`.

    Raises:
        ConfigError: there is no such set.
    """
    if name in ("auto", "reference"):
        from miniserve.ops.reference import ReferenceOps

        return ReferenceOps()
    raise ConfigError(f"ops={name!r}: there is no such kernel set; use 'auto' or one of {', '.join(KERNEL_SETS)}")
