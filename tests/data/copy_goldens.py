"""Copy golden models into tests/data/goldens, in the smallest form that loses nothing.

    python tests/data/copy_goldens.py SOURCE DESTINATION [NAME ...]

SOURCE holds one folder per golden (config.json, model.safetensors in float32, expected.safetensors,
README.md); without names, all of `NAMES` are copied. Weights become bfloat16, which every one of them is
exactly: a weight that is not ends the script. Buffers that old checkpoints carry along stay as they are, since
loading must ignore them in whatever form. Of expected.safetensors all but the logits of the greedy steps is
kept: their ids and margins say as much.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = (
    "cla-llama-2",
    "cla-llama-3",
    "gemma3n",
    "gemma4-e2b",
    "gemma4-kv-eq",
    "gemma4-moe",
    "gemma4-nested",
    "hunyuan-a13b-moe",
    "hunyuan-cla2",
    "hunyuan-cla2-moe",
    "hunyuan-cla3-nonorm",
    "hunyuan-dense-v1",
    "lckv-cla-map",
    "lckv-cla2",
    "lckv-cla3",
    "lckv-mixattn",
    "lckv-w2",
    "lckv-yoco",
    "llama-bias",
    "llama3-rope",
    "mistral-swa",
    "mlkv-neox-2x1",
    "mlkv-neox-3x4",
    "mlkv-neox-4x2",
    "mlkv-neox-kvmlp",
    "qwen2-bias",
    "qwen3-qknorm",
    "swiftkv-acrosskv",
    "swiftkv-llama",
    "yoco-gret",
    "yoco-swa",
)
BUFFER = re.compile(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
NOT_NEEDED = re.compile(r"greedy_logits\.")


def copy_golden(source: Path, destination: Path) -> None:
    """Copy one folder."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "README.md"):
        (destination / name).write_bytes((source / name).read_bytes())
    weights = load_file(source / "model.safetensors")
    save({name: compact(name, tensor) for name, tensor in weights.items()}, destination / "model.safetensors")
    expected = load_file(source / "expected.safetensors")
    kept = {name: tensor for name, tensor in expected.items() if not NOT_NEEDED.match(name)}
    save(kept, destination / "expected.safetensors")


def compact(name: str, tensor: Tensor) -> Tensor:
    """A weight in bfloat16, a buffer as it is.

    Raises:
        ValueError: the weight is not exactly a bfloat16.
    """
    if BUFFER.search(name):
        return tensor
    small = tensor.to(torch.bfloat16)
    if not torch.equal(small.to(tensor.dtype), tensor):
        raise ValueError(f"{name} is not exactly representable in bfloat16")
    return small


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file that everybody may read."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def main(source: str, destination: str, *names: str) -> None:
    """Copy the goldens named, or all."""
    for name in names or NAMES:
        copy_golden(Path(source) / name, Path(destination) / name)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
