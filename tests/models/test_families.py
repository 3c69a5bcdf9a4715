"""What the families of `test_goldens.py` promise beside their logits: memory, the cut, what loads and what is refused.

Closed forms are from the released config.json files and arithmetic on them; nothing here trusts the layout's own sums.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from miniserve import Engine, SamplingParams
from miniserve.errors import CheckpointMismatch, ConfigError, ModelError, UnsupportedModel
from miniserve.kvcache.layout import KVLayout
from miniserve.models import load_config, supported_model_types
from miniserve.models.layers import GatedMlp

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def layout_of(fields: dict[str, Any], folder: Path, itemsize: int = 2) -> KVLayout:
    """The layout of a config.json with these fields."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    config = load_config(path)
    return KVLayout.build(
        config.sharing, config.geometry, itemsize=itemsize, block_size=16, max_model_len=config.max_position_embeddings
    )


def changed(goldens: Path, name: str, folder: Path, **fields: Any) -> Path:
    """A golden's folder with other fields in config.json; None removes one."""
    values = json.loads((goldens / name / "config.json").read_text()) | fields
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    (folder / "model.safetensors").write_bytes((goldens / name / "model.safetensors").read_bytes())
    return folder


def golden_tokens(goldens: Path, name: str) -> tuple[list[list[int]], list[list[int]]]:
    expected = load_file(goldens / name / "expected.safetensors")
    prompts, tokens = ([expected[f"{what}.{i}"].tolist() for i in range(3)] for what in ("input_ids", "greedy_ids"))
    return prompts, tokens


def check_tokens(engine: Engine, goldens: Path, name: str) -> None:
    prompts, tokens = golden_tokens(goldens, name)
    outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == tokens


def float32(folder: Path, **settings: Any) -> Engine:
    return Engine(folder, dtype="float32", kv_cache_memory="2MiB", **settings)


# -------------------------------------------------------------------- memory

GEMMA = {
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "sliding_window": 512,
}


def gemma_types(num_layers: int, period: int) -> list[str]:
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]


def gemma3n(num_layers: int, num_shared: int) -> dict[str, Any]:
    return GEMMA | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_shared,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "layer_types": gemma_types(num_layers, 5),
    }


def gemma4(num_layers: int, num_shared: int, kv_heads: int, period: int) -> dict[str, Any]:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    return GEMMA | {
        "model_type": "gemma4_text",
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_shared,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "layer_types": gemma_types(num_layers, period),
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}},
    }


@pytest.mark.parametrize(
    ("fields", "full", "windowed", "reduction"),
    [
        (gemma3n(30, 10), 4 * 2048, 16 * 2048, 1.5),
        (gemma3n(35, 15), 4 * 2048, 16 * 2048, 1.75),
        (gemma4(35, 20, 1, 5), 3 * 2048, 12 * 1024, None),
        (gemma4(42, 18, 2, 6), 4 * 4096, 20 * 2048, 1.75),
    ],
    ids=["gemma3n E2B", "gemma3n E4B", "gemma4 E2B", "gemma4 E4B"],
)
def test_bytes_of_released_gemmas(tmp_path, fields, full, windowed, reduction):
    """2 (K and V) x heads x head size x 2 bytes, times the owners of each kind."""
    layout = layout_of(fields, tmp_path)
    by_window = {c.window: c.bytes_per_token for c in layout.classes}
    assert by_window == {None: full, 512: windowed}
    assert layout.bytes_per_token == full + windowed
    if reduction is not None:
        assert layout.reduction == reduction
    else:  # 35 layers of two sizes: 7 full ones and 28 windowed ones against 3 and 12
        assert layout.reduction == (7 * 2048 + 28 * 1024) / (3 * 2048 + 12 * 1024)


def test_hunyuan_cla2_holds_exactly_twice_the_tokens(goldens, tmp_path):
    """In the same budget; the readers' key norms cost nothing."""
    fields = json.loads((goldens / "hunyuan-cla2" / "config.json").read_text())
    shared, unshared = (layout_of(fields | {"use_cla": use_cla}, tmp_path) for use_cla in (True, False))
    assert len(shared.groups) == 4 and len(unshared.groups) == 8
    tokens = [layout.num_pages(1 << 20) * layout.classes[0].block_size for layout in (shared, unshared)]
    assert tokens[0] == 2 * tokens[1]
    engine = float32(goldens / "hunyuan-cla2")
    assert engine.kv_pool.num_bytes == engine.kv_pool.num_pages * 16 * 4 * (2 * 2 * 16) * 4  # groups, K and V, float32


def test_hunyuan_large_in_numbers(tmp_path):
    """64 layers, 80 query heads, 8 KV heads of 80: 20 times less than multi-head attention (2411.02265, table 1)."""
    fields = {
        "model_type": "hunyuan",
        "num_hidden_layers": 64,
        "hidden_size": 6400,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "intermediate_size": 18304,
        "vocab_size": 128512,
        "max_position_embeddings": 131072,
        "use_cla": True,
        "cla_share_factor": 2,
        "use_qk_norm": True,
        "num_experts": 16,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    }
    layout = layout_of(fields, tmp_path)
    assert layout.bytes_per_token == 32 * 8 * 2 * 80 * 2
    assert 64 * 80 * 2 * 80 * 2 == 20 * layout.bytes_per_token


def test_yoco_keeps_one_kv_and_states_of_one_size(goldens):
    engine = float32(goldens / "yoco-gret", block_size=1)
    assert engine.layout.bytes_per_token == 2 * 2 * 16 * 4  # one K and V, 2 heads of 16
    states = [c for c in engine.layout.classes if c.state_bytes]
    assert [c.state_bytes for c in states] == [2 * 32 * 32 * 4] * 3  # 2 heads, (32, 32) float32
    assert engine.layout.page_bytes >= 2 * 32 * 32 * 4
    assert [c.blocks_for(1000) for c in states] == [2, 2, 2]  # whatever the length
    assert engine.kv_report()["state_bytes"] == 3 * 2 * 32 * 32 * 4


# -------------------------------------------------------------------- states


def test_a_state_is_found_again_at_a_block_boundary(goldens, serve):
    """A prompt with a known beginning goes on from the snapshot behind its last full block."""
    engine = float32(goldens / "yoco-gret")
    size = engine.layout.alignment
    prompts, tokens = golden_tokens(goldens, "yoco-gret")
    check_tokens(engine, goldens, "yoco-gret")
    (output,) = serve(engine, prompts[2:], GREEDY)
    assert output.num_cached_tokens == 69 // size * size > 0
    assert output.outputs[0].token_ids == tokens[2]


def test_a_request_may_go_on_from_a_state_made_in_the_same_step(goldens):
    """The first request fills its block with one token, and the second, which begins alike, joins in that very step."""
    engine = float32(goldens / "yoco-gret", max_num_batched_tokens=64)
    size = engine.layout.alignment
    prompts, tokens = golden_tokens(goldens, "yoco-gret")
    text = prompts[2][: size - 1]
    (first,) = engine.generate([text], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    longer = text + first.outputs[0].token_ids[:1] + [7]
    (alone,) = engine.generate([longer], GREEDY, use_tqdm=False)
    engine.block_manager.forget_prefixes()
    done: dict[str, Any] = {}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add_request("first", text, params, on_output=lambda o: done.update({o.request_id: o}))
    engine.step()  # the prompt; its next token fills the block
    engine.add_request("second", longer, GREEDY, on_output=lambda o: done.update({o.request_id: o}))
    while engine.has_unfinished_requests():
        engine.step()
    assert done["second"].num_cached_tokens == size
    assert done["second"].outputs[0].token_ids == alone.outputs[0].token_ids
    assert done["first"].outputs[0].token_ids == first.outputs[0].token_ids


# -------------------------------------------------------------------- the cut

CUTS = {"gemma3n": 4, "gemma4-e2b": 4, "gemma4-nested": 2, "yoco-swa": 4, "yoco-gret": 3, "swiftkv-llama": 4}
CUTS |= {"swiftkv-acrosskv": 4, "hunyuan-cla2": 6}
"""Golden -> the layer behind which only sampled rows go on."""


@pytest.mark.parametrize("name", CUTS)
def test_prompt_tokens_end_at_the_cut_unless_their_logprobs_are_wanted(goldens, monkeypatch, name):
    """Per request: in one step 33 tokens of one prompt end there, all 70 of another go on."""
    engine = float32(goldens / name, max_num_batched_tokens=512)
    prompts, tokens = golden_tokens(goldens, name)
    assert engine.model_config.cut == CUTS[name]
    rows: dict[int, list[int]] = defaultdict(list)
    layer_of = {id(layer.mlp): i for i, layer in enumerate(engine.model.layers)}
    run = GatedMlp.__call__

    def watched(mlp, x, *args, **kwargs):
        if id(mlp) in layer_of:
            rows[layer_of[id(mlp)]].append(len(x))
        return run(mlp, x, *args, **kwargs)

    monkeypatch.setattr(GatedMlp, "__call__", watched)
    params = [SamplingParams(temperature=0, max_tokens=1), SamplingParams(temperature=0, max_tokens=1)]
    engine.generate(prompts[1:], params, use_tqdm=False)
    watched_layers = sorted(rows)
    assert watched_layers and all(rows[i] == [103 if i < CUTS[name] else 2] for i in watched_layers)

    rows.clear()
    engine.block_manager.forget_prefixes()
    params[1] = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate(prompts[1:], params, use_tqdm=False)
    assert all(rows[i] == [103 if i < CUTS[name] else 71] for i in watched_layers)
    logits = load_file(goldens / name / "expected.safetensors")["logits.2"].log_softmax(-1)
    for position, entry in enumerate(outputs[1].prompt_logprobs[1:]):
        token = prompts[2][position + 1]
        assert entry[token].logprob == pytest.approx(logits[position, token].item(), abs=1e-3)


# -------------------------------------------------------------------- what loads


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-e2b", "gemma4-nested"])
def test_gemma_readers_may_have_kv_weights_or_not(goldens, tmp_path, name):
    """The goldens have dead ones; re-saved checkpoints do not."""
    changed(goldens, name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    owners = load_config(tmp_path).sharing.owners
    dead = [
        tensor
        for tensor in weights
        for i, owner in enumerate(owners)
        if owner != i and any(f".layers.{i}.self_attn.{part}" in tensor for part in ("k_proj", "v_proj", "k_norm"))
    ]
    assert dead
    save_file({tensor: w for tensor, w in weights.items() if tensor not in dead}, tmp_path / "model.safetensors")
    check_tokens(float32(tmp_path), goldens, name)


def test_gemma3n_with_the_newer_rope_fields(goldens, tmp_path):
    full, sliding = ({"rope_type": "default", "rope_theta": theta} for theta in (1e6, 1e4))
    rope = {"full_attention": full, "sliding_attention": sliding}
    fields = {"rope_theta": None, "rope_local_base_freq": None, "rope_parameters": rope}
    check_tokens(float32(changed(goldens, "gemma3n", tmp_path, **fields)), goldens, "gemma3n")


def test_gemma4_with_its_text_fields_at_the_top(goldens, tmp_path):
    text = json.loads((goldens / "gemma4-nested" / "config.json").read_text())["text_config"]
    folder = changed(goldens, "gemma4-nested", tmp_path, text_config=None, **text)
    assert "text_config" not in json.loads((folder / "config.json").read_text())
    check_tokens(float32(folder), goldens, "gemma4-nested")


def test_vision_weights_beside_the_text_model_are_left_alone(goldens, tmp_path, caplog):
    changed(goldens, "gemma4-nested", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.vision_tower.patch.weight"] = weights["model.language_model.norm.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        check_tokens(float32(tmp_path), goldens, "gemma4-nested")
    assert "vision" in caplog.text


def test_swiftkv_may_carry_the_projections_it_replaces(goldens, tmp_path):
    changed(goldens, "swiftkv-llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.5.self_attn.q_proj.weight"] = weights["model.layers.5.self_attn.q_proj_swiftkv.weight"] * 0
    save_file(weights, tmp_path / "model.safetensors")
    check_tokens(float32(tmp_path), goldens, "swiftkv-llama")


def test_swiftkv_with_a_map_whose_upper_layers_own_nothing_names_the_weights(goldens):
    """Layers 4 to 7 would all read layer 3: what the checkpoint has for them is left over, and said."""
    with pytest.raises(CheckpointMismatch, match="left over: model.layers.4.self_attn.k_proj_swiftkv.weight"):
        float32(goldens / "swiftkv-llama", kv_sharing="suffix:4")


def test_swiftkv_on_qwen2_is_the_llama_form_with_biases(goldens, tmp_path, serve, watch_logits):
    """Biases of zero change nothing; one that is not zero does."""
    changed(goldens, "swiftkv-llama", tmp_path, model_type="qwen2_swiftkv")
    weights = load_file(tmp_path / "model.safetensors")
    projections = [n for n in weights if any(f".{p}_proj" in n for p in "qkv")]
    biases = {n.replace("weight", "bias"): weights[n][:, 0].clone() * 0 for n in projections}
    save_file(weights | biases, tmp_path / "model.safetensors")
    check_tokens(float32(tmp_path), goldens, "swiftkv-llama")
    biases["model.layers.6.self_attn.v_proj_swiftkv.bias"] += 1.0
    save_file(weights | biases, tmp_path / "model.safetensors")
    prompts, tokens = golden_tokens(goldens, "swiftkv-llama")
    outputs = float32(tmp_path).generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] != tokens


# -------------------------------------------------------------------- what is refused

REFUSED = {
    "mla": ("hunyuan-cla2", {"use_mla": True}, UnsupportedModel, "use_mla"),
    "dropped tokens": ("hunyuan-cla2-moe", {"moe_drop_tokens": True}, UnsupportedModel, "moe_drop_tokens"),
    "no rotation": ("hunyuan-cla2", {"use_rotary_pos_emb": False}, UnsupportedModel, "use_rotary_pos_emb"),
    "scaled routing": ("hunyuan-cla2-moe", {"routed_scaling_factor": 2.5}, UnsupportedModel, "routed_scaling_factor"),
    "more experts than there are": ("hunyuan-cla2-moe", {"moe_topk": 5}, ConfigError, "moe_topk=5"),
    "too few experts listed": ("hunyuan-a13b-moe", {"moe_topk": [2, 2]}, ConfigError, "moe_topk"),
    "a rope type": ("gemma4-e2b", {"rope_parameters": {"full_attention": {"rope_type": "new"}}}, ModelError, "full"),
    "a scaled rope": ("gemma3n", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ModelError, "rope_scaling"),
    "both directions": ("gemma4-e2b", {"use_bidirectional_attention": "all"}, UnsupportedModel, "bidirectional"),
    "an activation": ("gemma4-e2b", {"hidden_activation": "relu"}, ConfigError, "hidden_activation"),
    "no kinds": ("gemma4-e2b", {"layer_types": None}, ConfigError, "layer_types"),
    "all shared": ("gemma4-e2b", {"num_kv_shared_layers": 10}, ConfigError, "num_kv_shared_layers=10"),
    "a text_config that is none": ("gemma4-nested", {"text_config": 3}, ConfigError, "text_config"),
    "experts of experts": ("gemma4-moe", {"top_k_experts": 5}, ConfigError, "top_k_experts=5"),
    "streams": ("gemma3n", {"altup_active_idx": 4}, ConfigError, "altup_active_idx=4"),
    "sparsity": ("gemma3n", {"activation_sparsity_pattern": 1.0}, ConfigError, "activation_sparsity_pattern"),
    "widths": ("gemma3n", {"intermediate_size": [64, 64]}, ConfigError, "intermediate_size"),
    "odd": ("yoco-swa", {"n_layers": 7}, ConfigError, "n_layers=7"),
    "heads": ("yoco-swa", {"n_attn_heads": 3}, ConfigError, "n_attn_heads=3"),
    "swiftkv off": ("swiftkv-llama", {"swiftkv": False}, UnsupportedModel, "swiftkv=false"),
    "too many own layers": ("swiftkv-llama", {"num_key_value_layers": 9}, ConfigError, "num_key_value_layers=9"),
    "no diagonal anywhere": ("lckv-w2", {"force_nodiag": True}, UnsupportedModel, "force_nodiag"),
    "a window above": ("lckv-w2", {"layer_types": "0_6s8_6_6_6_6_6_7"}, ConfigError, "layer 1"),
}


@pytest.mark.parametrize(("name", "fields", "kind", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_supported_is_named(goldens, tmp_path, name, fields, kind, words):
    with pytest.raises(kind, match=words):
        load_config(changed(goldens, name, tmp_path, **fields))


@pytest.mark.parametrize("model_type", ["gemma4_audio", "hunyuan_v1_vl", "llama4", "gemma", "layers"])
def test_other_families_are_told_what_is_supported(goldens, tmp_path, model_type):
    folder = changed(goldens, "gemma4-e2b", tmp_path, model_type=model_type)
    with pytest.raises(UnsupportedModel) as refusal:
        load_config(folder)
    assert all(known in str(refusal.value) for known in supported_model_types())
    assert {"gemma3n", "gemma4", "hunyuan", "yoco", "llama_swiftkv"} <= set(supported_model_types())
