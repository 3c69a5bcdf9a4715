"""Families that transformers has: random configs and weights, the same logits and tokens. And what is refused.

The judge is transformers' own eager float32 forward without a cache on the same folder; for maps that it does not
know it is `reference.py`. The second half of the file is about folders that must not load: weights that do not fit
config.json and the map, files that cannot be trusted, and config.json files that have no meaning.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import reference
import torch
from checkpoints import write_llama
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from miniserve import Engine, SamplingParams
from miniserve.errors import CheckpointMismatch, ConfigError, MiniserveError, ModelError, UnsupportedModel
from miniserve.models import load_config, supported_model_types

LIMIT = 1e-4
LIMITS = {"gemma3n": 1e-3, "gemma4": 1e-3}
"""Attention without a scale has larger scores, and so larger rounding; the goldens allow as much."""
PROMPTS = [[5], list(range(3, 20)), [(i * i + 7) % 64 for i in range(45)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


# -------------------------------------------------------------------- equal to transformers


def rope(rope_type: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | fields}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMAS = {
    "default": {},
    "theta": rope("default", rope_theta=500.0),
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope("llama3", **LLAMA3),
    "yarn": rope("yarn", **YARN),
    "yarn-attention-factor": rope("yarn", **YARN, attention_factor=1.3),
    "yarn-mscale": rope("yarn", **YARN, mscale=1.2, mscale_all_dim=0.6),
    "yarn-mscale-alone": rope("yarn", **YARN, mscale=1.2),
    "yarn-betas": rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn-not-truncated": rope("yarn", **YARN, truncate=False),
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24},
    "narrow-heads": {"head_dim": 2},
    "one-kv-head": {"num_key_value_heads": 1},
    "all-kv-heads": {"num_key_value_heads": 4},
    "one-layer": {"num_hidden_layers": 1},
    "eps": {"rms_norm_eps": 0.1},
}
MISTRALS = {"windowed": {"sliding_window": 6}, "full": {"sliding_window": None}, "one": {"sliding_window": 1}}
QWENS = {
    "full": {},
    "windowed-above": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "all-windowed": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "window-not-used": {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    "wide-heads": {"head_dim": 24},
}
NEOXES = {
    "parallel": {},
    "sequential": {"use_parallel_residual": False},
    "all-rotated": {"rotary_pct": 1.0},
    "no-bias": {"attention_bias": False},
    "tied": {"tie_word_embeddings": True},
    "gelu-new": {"hidden_act": "gelu_new"},
}
HUNYUANS = {
    "plain": {"head_dim": 8},
    "biases": {"head_dim": 8, "attention_bias": True},
    "wide-heads": {"head_dim": 24},
    "tied": {"head_dim": 8, "tie_word_embeddings": True},
}
HUNYUAN_MOES = {
    "top-2": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "top-1": {"head_dim": 8, "num_experts": 3, "moe_topk": 1},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TOLD = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64, "head_dim": 8, "sliding_window": 6}
GEMMA = TOLD | {"layer_types": KINDS, "num_kv_shared_layers": 2, "pad_token_id": 0}
GEMMA3NS = {
    "shared": GEMMA,
    "unshared": GEMMA | {"num_kv_shared_layers": 0},
    "sparse": GEMMA | {"activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0], "intermediate_size": [40, 48, 24, 64]},
    "three-streams": GEMMA | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False},
    "words-it-is-not-told": GEMMA | {"vocab_size_per_layer_input": 20},
}
GEMMA4S = {
    "shared": GEMMA | {"global_head_dim": 16},
    "double-wide": GEMMA | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "told-nothing": GEMMA | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "keys-are-values": GEMMA
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16, "num_kv_shared_layers": 0},
    "experts": GEMMA | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
}
FAMILIES = {
    "hunyuan_v1_dense": (HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, HUNYUANS),
    "hunyuan_v1_moe": (HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM, HUNYUAN_MOES),
    "gemma3n": (Gemma3nTextConfig, Gemma3nForCausalLM, GEMMA3NS),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM, GEMMA4S),
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMAS),
    "mistral": (MistralConfig, MistralForCausalLM, MISTRALS),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, QWENS),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, QWENS),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, NEOXES),
}


@pytest.mark.parametrize("family, variant", [(f, v) for f, (_, _, variants) in FAMILIES.items() for v in variants])
def test_equals_transformers(tmp_path, serve, watch_logits, family, variant):
    make_config, make_model, variants = FAMILIES[family]
    judge = random_model(make_model(make_config(**TINY | variants[variant])))
    judge.save_pretrained(tmp_path)
    if family == "gpt_neox":
        edit_config(tmp_path, num_key_value_heads=None)  # from TINY; transformers' GPT-NeoX does not know it
    compare(judge, tmp_path, serve, watch_logits, LIMITS.get(family, LIMIT))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_older_config_files(tmp_path, serve, watch_logits, family):
    """Before transformers 4.53 there was no `layer_types`, only `max_window_layers`."""
    make_config, make_model, variants = FAMILIES[family]
    judge = random_model(make_model(make_config(**TINY | variants["windowed-above"])))
    judge.save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=None)
    compare(judge, tmp_path, serve, watch_logits)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 3.0}, {"rope_type": "llama3"} | LLAMA3])
def test_rope_of_older_config_files(tmp_path, serve, watch_logits, scaling):
    """transformers 4 wrote `rope_theta` and `rope_scaling`, before 4.43 with `type`."""
    kind = scaling.get("rope_type") or scaling["type"]
    judge = random_model(LlamaForCausalLM(LlamaConfig(**TINY | LLAMAS[kind])))
    judge.save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    compare(judge, tmp_path, serve, watch_logits)


def test_dynamic_rope_beyond_the_trained_length(tmp_path, serve, watch_logits):
    """Keys in a cache cannot change their angles: they are those of transformers for a text of `max_model_len`."""
    judge = random_model(LlamaForCausalLM(LlamaConfig(**TINY | rope("dynamic", factor=2.0))))
    judge.save_pretrained(tmp_path)
    text = [(i * 5 + 1) % 64 for i in range(100)]
    engine = Engine(tmp_path, dtype="float32", block_size=4, max_model_len=100)
    seen = watch_logits(engine)
    serve(engine, [text[:99]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    with torch.inference_mode():
        expected = judge(torch.tensor([text]), use_cache=False).logits[0]
    for position in range(99):
        assert (seen[tuple(text[: position + 1])][0] - expected[position]).abs().max() <= LIMIT


def compare(judge: PreTrainedModel, folder: Path, serve, watch_logits, limit: float = LIMIT) -> None:
    """Prompts served together by each kernel set: every row's logits and every token are the judge's."""
    expected = [greedy(judge, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for ops in ("reference", "auto"):
        engine = Engine(folder, ops=ops, dtype="float32", block_size=4, max_num_batched_tokens=16)
        seen = watch_logits(engine)
        outputs = serve(engine, PROMPTS, GREEDY)
        for prompt, output, (text, logits) in zip(PROMPTS, outputs, expected):
            assert prompt + output.outputs[0].token_ids == text
            rows = torch.stack([seen[tuple(text[:stop])][0] for stop in range(1, len(text))])
            assert (rows - logits).abs().max() <= limit
            assert logits.std() > 1, "the judge itself says nothing: its logits are all alike"


@torch.inference_mode()
def greedy(judge: PreTrainedModel, prompt: list[int], n: int) -> tuple[list[int], torch.Tensor]:
    """The prompt with n more tokens, and the logits of all but the last; everything computed again each time."""
    text = list(prompt)
    for _ in range(n):
        logits = judge(torch.tensor([text]), use_cache=False).logits[0]
        text.append(int(logits[-1].argmax()))
    return text, logits


def random_model(model: PreTrainedModel) -> PreTrainedModel:
    """Weights as in `checkpoints.py`: every tensor matters, logits have a standard deviation of about 2.5."""
    random = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=random)
        if weight.dim() == 2:
            gain = 2.5 if re.search("embed|lm_head", name) else 1.3
            weight.data = noise * gain / weight.shape[1] ** 0.5
        else:
            weight.data = noise * 0.3 + ("norm" in name and name.endswith("weight"))
    return model.float().eval()


def edit_config(folder: Path, **changes) -> Path:
    """Change fields of config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


# -------------------------------------------------------------------- another map than config.json's


@pytest.mark.parametrize(
    "kv_sharing, reads",
    [
        ("cla:2", [0, 0, 2, 2, 4, 4]),
        ("mlkv:4", [0, 1, 1, 3, 4, 4]),
        ("suffix:3", [0, 1, 2, 2, 2, 2]),
        ("0_0_1_2_0_5", [0, 0, 0, 0, 0, 5]),
        ([0, 1, 1, 0, 4, 4], [0, 1, 1, 0, 4, 4]),
        ("none", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_map_forced_on_an_ordinary_llama(tmp_path, serve, watch_logits, kv_sharing, reads, caplog):
    """The readers' own K/V weights are ignored, with one line in the log; chains end at their root."""
    folder = write_llama(tmp_path, num_layers=6)
    with caplog.at_level(logging.INFO, logger="miniserve"):
        engine = Engine(folder, kv_sharing=kv_sharing, block_size=4, kv_cache_memory="1MiB")
    ignored = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    num_ignored = 2 * sum(owner != layer for layer, owner in enumerate(reads))
    assert [re.match(r"ignored (\d+) tensors", line)[1] for line in ignored] == [str(num_ignored)] * bool(num_ignored)
    seen = watch_logits(engine)
    outputs = serve(engine, PROMPTS, GREEDY)
    model = reference.load(folder, reads=reads)
    for prompt, output in zip(PROMPTS, outputs):
        assert output.outputs[0].token_ids == reference.greedy(folder, prompt, 12, reads=reads)
        for position, row in enumerate(model(prompt)):
            assert (seen[tuple(prompt[: position + 1])][0] - row).abs().max() <= LIMIT


def test_a_window_forced_by_the_map(tmp_path, serve):
    folder = write_llama(tmp_path, num_layers=4)
    engine = Engine(folder, kv_sharing="0s5_0_2s9_2s5", block_size=4, kv_cache_memory="1MiB")
    expected = [reference.greedy(folder, p, 12, reads=[0, 0, 2, 2], windows=[5, None, 9, 5]) for p in PROMPTS]
    assert [output.outputs[0].token_ids for output in serve(engine, PROMPTS, GREEDY)] == expected


# -------------------------------------------------------------------- weights that do not fit


def shard(folder: Path, num_shards: int = 3) -> Path:
    """Split model.safetensors into shards with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[number::num_shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def edit_weights(folder: Path, change) -> Path:
    """Let `change` alter the dictionary of tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def remap(folder: Path, name: str, file: str | None) -> Path:
    """Point one tensor of the index to another file, or leave it out."""
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"] | {name: file}
    path.write_text(json.dumps({"weight_map": {n: f for n, f in weight_map.items() if f is not None}}))
    return folder


def test_shards_load_like_one_file(tmp_path):
    folder = write_llama(tmp_path, attention_bias=True)
    expected = [reference.greedy(folder, prompt, 12) for prompt in PROMPTS]
    outputs = Engine(shard(folder), kv_cache_memory="1MiB").generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_missing_weights_of_owners_are_listed(tmp_path):
    """A checkpoint with sharing, loaded as if there were none."""
    folder = write_llama(tmp_path, reads=[0, 0, 2, 2])
    with pytest.raises(CheckpointMismatch) as error:
        Engine(folder, kv_sharing="none")
    for layer in (1, 3):
        for name in ("k_proj", "v_proj"):
            assert f"missing: model.layers.{layer}.self_attn.{name}.weight [16, 32]" in str(error.value)
    assert "layers.0" not in str(error.value) and "layers.2" not in str(error.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.update(stray=torch.zeros(1)), "left over: stray"),
        (
            lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(48, 32)}),
            "left over: model.layers.9.mlp",
        ),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "left over: .*q_proj.bias"),
        (lambda w: w.pop("model.norm.weight"), r"missing: model.norm.weight \[32\]"),
        (lambda w: w.pop("lm_head.weight"), r"missing: lm_head.weight \[96, 32\]"),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(97, 32)}),
            r"shape: lm_head.weight is \[97, 32\].* \[96, 32\]",
        ),
        (lambda w: w.update({"model.norm.weight": torch.zeros(32).int()}), "dtype: model.norm.weight .*int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, words):
    folder = edit_weights(write_llama(tmp_path), change)
    with pytest.raises(CheckpointMismatch, match=words):
        Engine(folder)


def test_all_problems_are_said_at_once(tmp_path):
    def change(weights):
        weights["stray"] = weights.pop("model.norm.weight")

    with pytest.raises(CheckpointMismatch, match=r"(?s)missing: model.norm.weight.*left over: stray"):
        Engine(edit_weights(write_llama(tmp_path), change))


def test_pickles_are_never_read(tmp_path):
    folder = write_llama(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pytorch_model.bin cannot be used: only safetensors"):
        Engine(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1}'])
def test_broken_safetensors(tmp_path, content):
    folder = write_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="model.safetensors: cannot be read"):
        Engine(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 7])
def test_an_index_that_points_outside_the_folder(tmp_path, place):
    folder = remap(shard(write_llama(tmp_path / "model")), "lm_head.weight", place)
    with pytest.raises(ModelError, match="lm_head.weight is mapped to .*no file of this folder"):
        Engine(folder)


@pytest.mark.parametrize(
    "name, file, words",
    [
        ("no.such.tensor", "model-00002-of-00003.safetensors", "lacks no.such.tensor"),
        ("lm_head.weight", "model-00002-of-00003.safetensors", "lacks lm_head.weight|holds lm_head.weight"),
        ("lm_head.weight", None, "holds lm_head.weight, which .* does not list"),
        ("lm_head.weight", "model-00009-of-00003.safetensors", "model-00009-of-00003.safetensors|holds lm_head.weight"),
    ],
)
def test_an_index_that_lies(tmp_path, name, file, words):
    folder = remap(shard(write_llama(tmp_path)), name, file)
    with pytest.raises(ModelError, match=words):
        Engine(folder)


def test_a_shard_that_is_not_there(tmp_path):
    (shard(write_llama(tmp_path)) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003.safetensors: cannot be read"):
        Engine(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": 3}', "{}", "[" * 100_000])
def test_an_index_without_meaning(tmp_path, content):
    shard(write_llama(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="index.json"):
        Engine(tmp_path)


# -------------------------------------------------------------------- config.json without meaning


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"vocab_size": [96]}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate"),
        ({"model_type": "lckv-llama"}, "layer_types"),
        ({"model_type": "lckv-llama", "layer_types": "0_0_2"}, "kv_sharing: 3 entries for a model of 4 layers"),
        ({"model_type": "lckv-llama", "layer_types": "0_2_1_3"}, "layer 1 reads in a ring"),
        ({"model_type": "lckv-llama", "layer_types": "0_2s4_2_3"}, "layer 1 reads a layer above"),
        ({"model_type": "lckv-llama", "layer_types": "0_0_1_3"}, "layer_types: layer 2 reads layer 1"),
        ({"model_type": "lckv-llama", "layer_types": "0_0_2_9"}, "layer 3 reads layer 9"),
        ({"model_type": "lckv-llama", "layer_types": "0_0_2_x"}, "entry 'x' of layer 3"),
        ({"model_type": "lckv-llama", "layer_types": "0_0s_2_2"}, "sliding_window"),
        ({"model_type": "lckv-llama", "layer_types": "0_0s_2_2", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "lckv-llama", "layer_types": [0, 0, 2, 2]}, "layer_types"),
        ({"model_type": "lckv-llama", "layer_types": "0_0_2_2", "force_nodiag": True}, "force_nodiag"),
        ({"model_type": "cla-llama", "layer_types": "1_2_1_2"}, "layer_types"),
        ({"model_type": "cla-llama", "layer_types": "2_1_3_1"}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["ring"]}, r"layer_types\[3\]"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "layer_types|sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": "2"},
            "max_window_layers",
        ),
        ({"model_type": "gpt_neox", "hidden_act": "gelu", "num_key_value_layers": 5}, "num_key_value_layers"),
        ({"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": "all"}, "rotary_pct"),
    ],
)
def test_fields_without_meaning_are_named(tmp_path, changes, field):
    folder = edit_config(write_llama(tmp_path), **changes)
    with pytest.raises((ConfigError, ModelError), match=field):
        Engine(folder, max_model_len=32, kv_cache_memory="1MiB")


def test_heads_of_an_odd_size_cannot_be_rotated(tmp_path):
    folder = write_llama(tmp_path, head_dim=7)
    with pytest.raises(ConfigError, match="head_dim"):
        Engine(folder, kv_cache_memory="1MiB")


def test_neox_with_fused_weights_has_as_many_kv_heads_as_heads(tmp_path):
    """Stock checkpoints store q, k and v of each head together; fewer KV heads cannot be meant."""
    GPTNeoXForCausalLM(GPTNeoXConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        Engine(tmp_path, kv_cache_memory="1MiB")


def test_a_vocabulary_of_another_size_than_the_embedding(tmp_path):
    folder = edit_config(write_llama(tmp_path), vocab_size=100)
    with pytest.raises(CheckpointMismatch, match=r"model.embed_tokens.weight is \[96, 32\]"):
        Engine(folder)


@pytest.mark.parametrize("model_type", ["bert", None, 7, ["llama"], "checkpoint", "../llama", "x" * 10_000])
def test_unknown_families_are_told_the_known_ones(tmp_path, model_type):
    folder = edit_config(write_llama(tmp_path), model_type=model_type)
    with pytest.raises(UnsupportedModel) as error:
        load_config(folder)
    assert "model_type" in str(error.value) and len(str(error.value)) < 1000
    assert {"llama", "lckv_llama", "cla_llama", "mistral", "qwen2", "qwen3", "gpt_neox"} <= set(supported_model_types())
    assert all(family in str(error.value) for family in supported_model_types())


@pytest.mark.parametrize("content", ["", "3", "[]", "{", "\x00", "[" * 100_000])
def test_a_config_file_that_is_none(tmp_path, content):
    (write_llama(tmp_path) / "config.json").write_text(content)
    with pytest.raises(ModelError, match="config.json"):
        Engine(tmp_path)


def test_no_folder_and_an_empty_folder(tmp_path):
    for folder, words in ((tmp_path / "nowhere", "nowhere: no such file"), (tmp_path, "config.json: no such file")):
        with pytest.raises(MiniserveError, match=words):
            Engine(folder)
