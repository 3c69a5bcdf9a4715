"""Model families, found by `model_type`: one file each, named after it, with `parse(fields)` and `Model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.checks import shorten
from miniserve.errors import UnsupportedModel
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import Fields, ModelConfig, read_config
from miniserve.ops import Ops

_NOT_FAMILIES = {"checkpoint", "config", "gemma", "layers"}


class Model(Protocol):
    """What the engine needs of a model."""

    config: ModelConfig

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Run a step; returns the hidden states of `batch.behind_cut`, (T', H)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> logits (R, V), float32."""


def supported_model_types() -> list[str]:
    """All values of `model_type` that load, as written with underscores."""
    return sorted(module.name for module in iter_modules(__path__) if module.name not in _NOT_FAMILIES)


def load_config(
    model: Path,
    *,
    kv_sharing: str | Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read config.json of a folder (or the file itself), with another sharing map if one is given.

    Raises:
        ModelError, ConfigError: no such file, a family that is not supported, or a field without meaning.
    """
    fields = read_config(model, overrides)
    config = _family(fields).parse(fields)
    if kv_sharing is None:
        return config
    num_layers, own = config.sharing.num_layers, config.sharing.windows
    if isinstance(kv_sharing, str):
        sharing = KVSharing.parse(kv_sharing, num_layers, window=config.sliding_window, own_windows=own)
    else:
        text = "_".join(map(str, kv_sharing))
        sharing = KVSharing.parse(f"lckv:{text}", num_layers, own_windows=own)
    return replace(config, sharing=sharing)


def load_model(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    show_progress: bool = False,
) -> Model:
    """Build the model and fill it from the folder's safetensors.

    Raises:
        ModelError: unreadable files, or tensors that do not fit the config (`CheckpointMismatch`).
    """
    weights = Checkpoint(
        folder, dtype=dtype, device=device, vector_dtype=ops.vector_dtype(dtype), show_progress=show_progress
    )
    model = import_module(f"{__name__}.{_module_name(config.model_type)}").Model(config, weights, ops, max_model_len)
    weights.finish()
    return model


def _family(fields: Fields) -> ModuleType:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or _module_name(model_type) not in supported_model_types():
        raise UnsupportedModel(
            f"config.json: model_type {shorten(model_type)} is not supported; "
            f"known: {', '.join(supported_model_types())}"
        )
    return import_module(f"{__name__}.{_module_name(model_type)}")


def _module_name(model_type: str) -> str:
    """Text-only configs of multimodal families say so: `gemma4_text`."""
    return model_type.replace("-", "_").removesuffix("_text")
