"""Weights out of safetensors files, strict by name and shape.

    weights = Checkpoint(folder, dtype, device)
    w = weights.take("model.norm.weight", (64,))     every tensor the model needs, once
    weights.ignore(r"rotary_emb\\.inv_freq$")          what old checkpoints carry along
    weights.finish()                                 missing, left-over or misshapen: one error with all names

Only safetensors are read: opening a pickle can run code.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from miniserve.errors import CheckpointMismatch, ModelError
from miniserve.models.config import read_json

log = logging.getLogger(__name__)

_SHOWN = 8
"""Names listed in an error before the rest is counted."""


class Checkpoint:
    """The tensors of a model folder. Collects everything that is wrong and says it once, in `finish`."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        vector_dtype: torch.dtype | None = None,
        show_progress: bool = False,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.vector_dtype = vector_dtype or dtype  # of tensors with one dimension: norm weights and biases
        self.device = device
        self._file_of = _index(folder)
        self._open: dict[Path, safe_open] = {}
        self._taken: set[str] = set()
        self._problems: list[str] = []
        self._bar = tqdm(total=len(self._file_of), desc="Loading weights", unit="tensor", disable=not show_progress)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of this name in the engine's dtype; if there is none of this shape, `finish` will say so."""
        self._taken.add(name)
        self._bar.update()
        if name not in self._file_of:
            self._problems.append(f"missing: {name} {list(shape)}")
        elif (found := self._shape(name)) != list(shape):
            self._problems.append(f"shape: {name} is {found}, config.json says {list(shape)}")
        else:
            return self._read(name)
        return torch.empty(tuple(shape), dtype=self._dtype_of(shape), device=self.device)

    def take_optional(self, name: str, shape: Sequence[int], present: bool) -> Tensor | None:
        """`take` if the config says that the tensor exists, else None."""
        return self.take(name, shape) if present else None

    def ignore(self, pattern: str, reason: str = "") -> None:
        """Let tensors whose name matches be left over; with a reason, say so in the log."""
        names = {name for name in self._file_of if re.search(pattern, name)} - self._taken
        if names and reason:
            log.info("ignored %d tensors (%s): %s", len(names), reason, ", ".join(sorted(names)[:_SHOWN]))
        self._taken |= names

    def finish(self) -> None:
        """Close the files.

        Raises:
            CheckpointMismatch: tensors are missing, left over or of another shape; all are named.
        """
        self._bar.close()
        self._open.clear()
        problems = self._problems + [f"left over: {name}" for name in sorted(self._file_of.keys() - self._taken)]
        if problems:
            rest = f"\n  and {len(problems) - 4 * _SHOWN} more" if len(problems) > 4 * _SHOWN else ""
            raise CheckpointMismatch(
                f"{self.folder}: the checkpoint does not fit config.json and the sharing map; "
                "check model_type, kv_sharing and the files:\n  " + "\n  ".join(problems[: 4 * _SHOWN]) + rest
            )

    def _handle(self, name: str) -> safe_open:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]

    def _shape(self, name: str) -> list[int]:
        return list(self._handle(name).get_slice(name).get_shape())

    def _read(self, name: str) -> Tensor:
        tensor = self._handle(name).get_tensor(name)
        if not tensor.is_floating_point():
            self._problems.append(f"dtype: {name} holds {tensor.dtype}; only floating-point weights are supported")
        return tensor.to(device=self.device, dtype=self._dtype_of(tensor.shape))

    def _dtype_of(self, shape: Sequence[int]) -> torch.dtype:
        return self.vector_dtype if len(shape) == 1 else self.dtype


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors: {error}") from None


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from one file or an index of shards."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.is_file():
        others = [p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".pkl")]
        hint = f" ({', '.join(sorted(others)[:3])} cannot be used: only safetensors are read)" if others else ""
        raise ModelError(f"{folder}: holds no model.safetensors and no model.safetensors.index.json{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: has no weight_map")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        in_folder = isinstance(file_name, str) and Path(file_name).name == file_name
        if not in_folder or not file_name.endswith(".safetensors"):
            raise ModelError(f"{index}: tensor {name} is mapped to {file_name!r}, which is no file of this folder")
        files[name] = folder / file_name
    _check_shards(index, files)
    return files


def _check_shards(index: Path, files: dict[str, Path]) -> None:
    """Each shard holds exactly the tensors that the index gives it."""
    for path in sorted(set(files.values())):
        held = set(_open(path).keys())
        promised = {name for name, file in files.items() if file == path}
        if promised - held:
            raise ModelError(f"{path}: lacks {sorted(promised - held)[0]}, which {index.name} promises")
        if held - promised:
            stray = sorted(held - promised)[0]
            where = f"gives to {files[stray].name}" if stray in files else "does not list"
            raise ModelError(f"{path}: holds {stray}, which {index.name} {where}")
