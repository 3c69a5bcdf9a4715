"""Tiny random checkpoints in HuggingFace's form: config.json and model.safetensors under Llama's names.

Weights are scaled so that every layer matters and logits have a standard deviation of about 2.5: greedy tokens
then win by far more than rounding, and a wrong layer, window or position moves logits by whole numbers. Norm
weights and biases are random too, so that leaving one out shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_llama(
    folder: Path,
    *,
    num_layers: int = 4,
    reads: Sequence[int] | None = None,
    windows: Sequence[int | None] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    hidden: int = 32,
    intermediate: int = 48,
    vocab: int = 96,
    seed: int = 0,
    **config_fields: Any,
) -> Path:
    """Write a random Llama to a folder and return it.

    With `reads` (one owner per layer) or `windows` (tokens seen per layer, None: all) it is an `lckv-llama`
    whose readers have no K/V weights; without, a plain `llama`. `config_fields` are added to config.json:
    `attention_bias`, `mlp_bias` and `tie_word_embeddings` change the weights as well.
    """
    config = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if reads is not None or windows is not None:
        config |= {"model_type": "lckv-llama", "layer_types": lckv_text(num_layers, reads, windows)}
    config |= config_fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, reads or range(num_layers), seed), folder / "model.safetensors")
    return folder


def lckv_text(num_layers: int, reads: Sequence[int] | None, windows: Sequence[int | None] | None) -> str:
    """`0_0_2s8_2`: LCKV's notation, with the size behind `s` so that windows may differ."""
    reads, windows = reads or range(num_layers), windows or [None] * num_layers
    return "_".join(f"{owner}" if window is None else f"{owner}s{window}" for owner, window in zip(reads, windows))


def _weights(config: dict[str, Any], reads: Sequence[int], seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=random) * (gain / columns**0.5)

    def linear(name: str, rows: int, columns: int, bias_field: str) -> None:
        matrix(name, rows, columns, gain=1.3)
        if config.get(bias_field):
            weights[f"{name}.bias"] = torch.randn(rows, generator=random) * 0.3

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=random)

    matrix("model.embed_tokens", config["vocab_size"], hidden, gain=2.5)
    for layer, owner in enumerate(reads):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm")
        linear(f"{at}.self_attn.q_proj", q_size, hidden, "attention_bias")
        if owner == layer:
            linear(f"{at}.self_attn.k_proj", kv_size, hidden, "attention_bias")
            linear(f"{at}.self_attn.v_proj", kv_size, hidden, "attention_bias")
        linear(f"{at}.self_attn.o_proj", hidden, q_size, "attention_bias")
        norm(f"{at}.post_attention_layernorm")
        linear(f"{at}.mlp.gate_proj", inner, hidden, "mlp_bias")
        linear(f"{at}.mlp.up_proj", inner, hidden, "mlp_bias")
        linear(f"{at}.mlp.down_proj", hidden, inner, "mlp_bias")
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, gain=2.5)
    return weights
