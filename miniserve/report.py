"""What sharing buys, as numbers and as a drawing: for `miniserve plan`, `Engine.kv_report()` and the start-up log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.sharing import KVSharing

log = logging.getLogger(__name__)


def kv_report(layout: KVLayout, num_pages: int, max_model_len: int, num_heads: int) -> dict[str, Any]:
    """The KV cache of a model in plain numbers, ready for JSON. `num_heads` are its query heads.

    `capacity_tokens` is what requests of `max_model_len` tokens can keep together; with full classes only, it is
    exactly the slots of the pool. `multi_head_reduction` compares a request of that length with one whose layers all
    kept a key and a value of every query head, in 16 bits.
    """
    states = [c for c in layout.classes if c.state_bytes]
    kept = sum(c.bytes_per_token * min(max_model_len, c.window or max_model_len) for c in layout.classes)
    kept += sum(c.blocks_for(max_model_len) * layout.page_bytes for c in states)
    one_head = (KVGeometry(1, g.geometry.head_dim, g.geometry.value_dim) for g in layout.groups for _ in g.layers)
    multi_head = num_heads * max_model_len * sum(head.bytes_per_token(2) for head in one_head)
    return {
        "kv_sharing": str(layout.sharing),
        "cyclic": layout.sharing.cyclic,
        "state_bytes": sum(c.state_bytes for c in states),
        "bytes_per_token": layout.bytes_per_token,
        "capacity_tokens": num_pages * layout.page_bytes * max_model_len // kept,
        "max_model_len": max_model_len,
        "max_full_requests": num_pages // layout.blocks_for(max_model_len),
        "reduction": layout.reduction,
        "multi_head_reduction": multi_head / kept,
        "kv_cache_bytes": num_pages * layout.page_bytes,
        "num_blocks": num_pages,
        "block_bytes": layout.page_bytes,
        "groups": [
            {
                "owner": group.owner,
                "readers": list(group.layers[1:]),
                "kv_heads": group.geometry.kv_heads,
                "head_dim": group.geometry.head_dim,
                "window": group.window,
                "bytes_per_token": group.bytes_per_token,
            }
            for group in layout.groups
        ],
        "classes": [
            {"window": c.window, "groups": list(c.groups), "block_size": c.block_size, "state_bytes": c.state_bytes}
            for c in layout.classes
        ],
    }


def draw_report(report: Mapping[str, Any], drawing: str | None = None) -> str:
    """The KV report as a few lines of text, below a drawing of the map if one is given."""
    groups, classes = report["groups"], report["classes"]
    num_layers = sum(1 + len(group["readers"]) for group in groups)
    lines = [drawing, ""] if drawing else []
    for index, cls in enumerate(classes):
        kept = "all tokens" if cls["window"] is None else f"the last {cls['window']} tokens"
        size = sum(groups[g]["bytes_per_token"] for g in cls["groups"])
        if cls["state_bytes"]:
            continue
        lines.append(
            f"class {index}: {_count(len(cls['groups']), 'layer group')} keeping {kept}, "
            f"{size:,} bytes per token, {cls['block_size']} tokens per block"
        )
    if report["state_bytes"]:
        blocks = min(cls["block_size"] for cls in classes if cls["state_bytes"])
        lines.append(
            f"states of {_count(sum(cls['state_bytes'] > 0 for cls in classes), 'layer')}: "
            f"{human_bytes(report['state_bytes'])} per request of any length, kept for reuse every {blocks} tokens"
        )
    if report["cyclic"]:
        lines.append("layers read K/V made above them: prompts are computed token by token, as slowly as they decode")
    lines += [
        f"{num_layers} layers in {_count(len(groups), 'layer group')}: {report['bytes_per_token']:,} bytes per token, "
        f"{report['reduction']:.2f}x less than without sharing",
        f"{report['multi_head_reduction']:.1f}x less than multi-head attention in 16 bits takes for "
        f"{report['max_model_len']:,} tokens",
        f"{human_bytes(report['kv_cache_bytes'])} in {report['num_blocks']:,} blocks: "
        f"{report['capacity_tokens']:,} tokens or {report['max_full_requests']:,} requests of "
        f"{report['max_model_len']:,} tokens",
    ]
    return "\n".join(lines)


def log_kv_report(report: Mapping[str, Any], max_total_tokens: int, machine: str) -> None:
    """The report in the log, once at start, and a warning if the pool cannot hold a request of full length."""
    log.info("%s; KV cache\n%s", machine, draw_report(report))
    if max_total_tokens < report["max_model_len"]:
        log.warning(
            "the KV pool holds %d tokens of one request, less than max_model_len=%d; longer ones end early with "
            "finish_reason 'length'. Raise kv_cache_memory to change that",
            max_total_tokens - 1,
            report["max_model_len"],
        )


def draw_map(sharing: KVSharing) -> str:
    """The picture at the top of `kvcache/sharing.py`, for any map."""
    width = len(str(sharing.num_layers - 1)) + 1
    lines = ["layer   " + "".join(f"{layer:>{width}}" for layer in range(sharing.num_layers))]
    for group, owner in enumerate(sharing.group_owners):
        cells = [_symbol(sharing, i) if read == owner else "·" for i, read in enumerate(sharing.owners)]
        lines.append(f"group {group:<2}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _symbol(sharing: KVSharing, layer: int) -> str:
    windowed = sharing.windows[layer] is not None
    return ("◧" if windowed else "■") if sharing.owns(layer) else ("○" if windowed else "●")


def draw_groups(sharing: KVSharing) -> str:
    """The map with its legend; a model without sharing is said in one line."""
    if len(sharing.group_owners) == sharing.num_layers:
        return f"each of the {sharing.num_layers} layers owns its K/V (no sharing)"
    legend = "■ owner  ● reader" + ("  ◧ ○ the same, windowed" if any(sharing.windows) else "")
    return f"{draw_map(sharing)}\n{legend}"


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
