"""What this machine offers: device, the dtype to compute in, memory for the KV pool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from miniserve.config import EngineConfig
from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", name)
    if match is None:
        raise ConfigError(f"device={name!r}: use auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices here; use auto or cpu")
    return torch.device(name)


def pick_dtype(asked: str, stored: Any, device: torch.device, *, widens_bfloat16: bool) -> torch.dtype:
    """The dtype asked for; `auto` keeps the checkpoint's (`stored`) where the machine is fast at it.

    On a CPU float16 becomes bfloat16, and that becomes float32 unless the CPU has instructions for it or the
    kernel set widens it as it loads (`widens_bfloat16`).
    """
    if asked != "auto":
        return DTYPES[asked]
    dtype = DTYPES.get(str(stored).removeprefix("torch."), torch.float32)
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.bfloat16 if widens_bfloat16 or _cpu_has_bfloat16() else torch.float32


def pool_pages(config: EngineConfig, layout: KVLayout, max_model_len: int, device: torch.device) -> int:
    """N: the pages of the budget given, or of what `max_num_seqs` full-length requests can use at most.

    Raises:
        ConfigError: the budget does not hold a page for each retention class.
    """
    budget = config.kv_cache_bytes
    if budget is None:
        full_request = layout.blocks_for(max_model_len, config.max_num_batched_tokens)
        affordable = layout.num_pages(_free_memory(device) // 4)
        return max(len(layout.classes), min(config.max_num_seqs * full_request, affordable))
    num_pages = layout.num_pages(budget)
    if num_pages < len(layout.classes):
        raise ConfigError(
            f"kv_cache_memory={budget} bytes hold {num_pages} blocks of {layout.page_bytes} bytes; "
            f"this model needs at least {len(layout.classes)}, one per retention class"
        )
    return num_pages


def _free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now, within the container's limit if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = _read("/proc/meminfo").splitlines()
    free = next((int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable")), 4 * 2**30)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(free, max(0, int(limit) - int(used))) if limit.isdecimal() and used.isdecimal() else free


def _cpu_has_bfloat16() -> bool:
    flags = _read("/proc/cpuinfo")
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="ignore")
    except OSError:
        return ""
