"""The judge: decoders whose layers share K/V, without any cache. Shares no line with the engine.

`logits` runs all tokens through all layers in float64 with one loop over the layers; `greedy` runs it again from
the first token for every token it adds. Sharing is a dictionary: an owner puts its K/V in, readers take it out.
Written from the papers (CLA 2405.12981, LCKV 2405.10637, MLKV 2406.09297) and HuggingFace's Llama, Qwen and
GPT-NeoX; `test_goldens.py` holds it against the logits of the authors' own code.

    reads[i]    the layer whose K/V layer i uses; i itself: it makes its own
    windows[i]  how many tokens layer i sees, the token itself included; None: all

A layer may read one above it (LCKV, section 2.2): then a token sees what the tokens before it left there. All tokens
go through the layers again and again, as often as there are tokens: each time one token more is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def logits(folder: Path, token_ids: Sequence[int], **how: Any) -> Tensor:
    """(T, V): the logits behind each token; see `load` for what else can be said."""
    return load(folder, **how)(token_ids)


def greedy(folder: Path, token_ids: Sequence[int], n: int, **how: Any) -> list[int]:
    """The n likeliest tokens one after the other, everything computed again for each."""
    model, ids = load(folder, **how), list(token_ids)
    for _ in range(n):
        ids.append(int(model(ids)[-1].argmax()))
    return ids[len(token_ids) :]


def load(
    folder: Path,
    reads: Sequence[int] | None = None,
    windows: Sequence[int | None] | None = None,
    rotated_keys: bool = False,
) -> Callable[[Sequence[int]], Tensor]:
    """The model as a function from token ids to logits. Map and windows are config.json's unless given.

    `rotated_keys` is for MLKV: hand keys to readers after RoPE instead of before it, as its authors do.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {n: t.double() for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    own_reads, own_windows = _map(config)
    if config["model_type"] == "gpt_neox":
        return lambda ids: _neox(config, weights, torch.tensor(ids), reads or own_reads, rotated_keys)
    return lambda ids: _llama(config, weights, torch.tensor(ids), reads or own_reads, windows or own_windows)


def _map(config: dict) -> tuple[list[int], list[int | None]]:
    """Who reads whom and how far, as each family writes it down."""
    kind, n, types = config["model_type"], config["num_hidden_layers"], config.get("layer_types")
    reads, windows = list(range(n)), [config["sliding_window"] if kind == "mistral" else None] * n
    if kind == "lckv-llama":
        entries = [entry.partition("s") for entry in types.split("_")]
        reads = [int(owner) for owner, _, _ in entries]
        windows = [int(size or config["sliding_window"]) if s else None for _, s, size in entries]
    elif kind == "cla-llama":
        owners = [i for i, code in enumerate(types.split("_")) if code != "1"]
        reads = [max(o for o in owners if o <= i) for i in range(n)]
    elif kind == "gpt_neox":
        m = config.get("num_key_value_layers", n)
        owners = [0] + [int((i + 1) * (n / m)) for i in range(m - 1)]
        reads = [max(o for o in owners if o <= i) for i in range(n)]
    return reads, windows


def _llama(config: dict, w: dict[str, Tensor], ids: Tensor, reads: Sequence[int], windows: Sequence) -> Tensor:
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    angles = _angles(rope.get("rope_theta", 10000.0), dim, len(ids), config.get("rope_scaling"))
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    cyclic = any(owner > i for i, owner in enumerate(reads))
    for _ in range(len(ids) if cyclic else 1):
        hidden = _llama_layers(config, w, ids, reads, windows, angles, shared)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _rms(hidden, w["model.norm.weight"], eps) @ w[head].T


def _llama_layers(config, w, ids, reads, windows, angles, shared) -> Tensor:
    """Hidden states (T, H); `shared` holds what owners made, this time or, for readers below them, the last time."""
    eps, dim = config["rms_norm_eps"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    x = w["model.embed_tokens.weight"][ids]
    nothing = torch.zeros(len(ids), config["num_key_value_heads"], dim, dtype=x.dtype)
    for i, owner in enumerate(reads):
        at = f"model.layers.{i}"
        h = _rms(x, w[f"{at}.input_layernorm.weight"], eps)
        if owner == i:
            k, v = (_linear(w, f"{at}.self_attn.{n}_proj", h).unflatten(-1, (-1, dim)) for n in "kv")
            shared[i] = _rotate(_rms(k, w.get(f"{at}.self_attn.k_norm.weight"), eps), angles), v
        q = _linear(w, f"{at}.self_attn.q_proj", h).unflatten(-1, (-1, dim))
        q = _rotate(_rms(q, w.get(f"{at}.self_attn.q_norm.weight"), eps), angles)
        k, v = shared.get(owner, (nothing, nothing))
        x = x + _linear(w, f"{at}.self_attn.o_proj", _attend(q, k, v, windows[i], diagonal=owner <= i))
        h = _rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = _linear(w, f"{at}.mlp.gate_proj", h), _linear(w, f"{at}.mlp.up_proj", h)
        x = x + _linear(w, f"{at}.mlp.down_proj", F.silu(gate) * up)
    return x


def _neox(config: dict, w: dict[str, Tensor], ids: Tensor, reads: Sequence[int], rotated_keys: bool) -> Tensor:
    dim = config["hidden_size"] // config["num_attention_heads"]
    angles = _angles(config["rotary_emb_base"], int(dim * config["rotary_pct"]), len(ids))
    x, shared = w["gpt_neox.embed_in.weight"][ids], {}

    def norm(t: Tensor, name: str) -> Tensor:
        weight, bias = w[f"gpt_neox.{name}.weight"], w[f"gpt_neox.{name}.bias"]
        return F.layer_norm(t, weight.shape, weight, bias, config["layer_norm_eps"])

    for i, owner in enumerate(reads):
        at = f"gpt_neox.layers.{i}.attention"
        h = norm(x, f"layers.{i}.input_layernorm")
        if owner == i:
            k, v = (_linear_or_mlp(w, f"{at}.{name}", h).unflatten(-1, (-1, dim)) for name in ("key", "value"))
            shared[i] = (_rotate(k, angles) if rotated_keys else k), v
        q = _rotate(_linear(w, f"{at}.query", h).unflatten(-1, (-1, dim)), angles)
        k, v = shared[owner]
        k = _rotate(k, angles) if owner == i and not rotated_keys else k  # only the owner itself rotates it
        after = x + _linear(w, f"{at}.dense", _attend(q, k, v, None))
        h = norm(x if config["use_parallel_residual"] else after, f"layers.{i}.post_attention_layernorm")
        inner = F.gelu(_linear(w, f"gpt_neox.layers.{i}.mlp.dense_h_to_4h", h))
        x = after + _linear(w, f"gpt_neox.layers.{i}.mlp.dense_4h_to_h", inner)
    return norm(x, "final_layer_norm") @ w["embed_out.weight"].T


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, diagonal: bool = True) -> Tensor:
    """q (T, Hq, D), k and v (T, Hkv, D) -> (T, Hq * D); without the diagonal the first token gets 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    age = torch.arange(len(q))[:, None] - torch.arange(len(k))  # of key j, seen from query i
    hidden = (age < (0 if diagonal else 1)) | (age >= (window or len(k)))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _linear_or_mlp(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" in w:
        return _linear(w, name, x)
    return _linear(w, f"{name}.dense_out", F.gelu(_linear(w, f"{name}.dense_in", x)))


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm; no weight, no norm."""
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE in halves on the first 2 R dimensions of x (T, heads, D); angles (T, R)."""
    half, (cos, sin) = angles.shape[-1], (angles.cos()[:, None], angles.sin()[:, None])
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


def _angles(theta: float, dim: int, num_tokens: int, scaling: dict | None = None) -> Tensor:
    """(T, dim / 2): position times frequency; Llama 3 slows down the long waves."""
    frequencies = theta ** -(torch.arange(0, dim, 2).double() / dim)
    if scaling:
        factor, low, high = (scaling[n] for n in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * keep + frequencies / factor * (1 - keep)
    return torch.arange(num_tokens).double()[:, None] * frequencies
