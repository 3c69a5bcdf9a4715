"""Settings: every one that has no meaning is a `ConfigError` that names it, before any weight is read. The second
half builds engines, for what only the model can tell (memory, dtype, sharing map, tokenizer).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import write_byte_level

from miniserve import Engine, EngineConfig, SamplingParams
from miniserve.config import parse_size
from miniserve.errors import ConfigError, MiniserveError, ModelError, RequestError

NAN, INF = float("nan"), float("inf")
NO_COUNTS = [None, -1, 0.5, 1.0, "1", True, [], NAN, INF, b"1", 1j]
NO_SIZES = [
    0,
    -1,
    0.5,
    1e9,
    "",
    "lots",
    "-1",
    "1e9",
    "4 GiBs",
    "GiB",
    "4PB",
    "0x10",
    "1_000",
    True,
    [],
    b"4GiB",
    NAN,
    INF,
]
REFUSED: dict[str, list[Any]] = {
    "model": ["", None, 5],
    "tokenizer": [5, b"x", ["a"]],
    "dtype": ["float64", "fp32", "int8", "", None, torch.float32, 32],
    "quantization": ["int4", "", 8, True],
    "kv_cache_dtype": ["fp8", "", None, 8, "bfloat16"],
    "enforce_eager": [None, 1, "yes"],
    "device": ["banana", "", 5, None],
    "kv_sharing": [5, 2.5, True, {"a": 1}],
    "kv_cache_memory": [*NO_SIZES, "9" * 400, "9" * 400 + "GiB"],
    "block_size": [*NO_COUNTS, 0],
    "max_model_len": [*NO_SIZES, "9" * 400],
    "max_num_seqs": [*NO_COUNTS, 0],
    "max_num_batched_tokens": [*NO_COUNTS, 0],
    "max_waiting": NO_COUNTS,
    "enable_prefix_caching": [None, 0, 1, "true", []],
    "ops": ["banana", "", None, 5],
    "seed": [None, 0.5, "1", True, -(2**63) - 1],
    "max_logprobs": [None, -2, 0.5, "20", True],
    "hf_overrides": ["{}", [1], 5, True],
}
"""Refused wherever the engine first looks, in `EngineConfig` or when it is built."""
ALLOWED: dict[str, list[Any]] = {
    "model": ["folder"],
    "tokenizer": [None, "folder"],
    "dtype": ["auto", "float32", "bfloat16", "float16"],
    "quantization": [None, "int8"],
    "kv_cache_dtype": ["auto", "int8"],
    "enforce_eager": [True, False],
    "device": ["auto", "cpu", "cuda"],
    "kv_sharing": [None, "none", "cla:2", "0_0_2_2", [0, 0, 2, 2], (0, 1)],
    "kv_cache_memory": [None, 1, 2**40, "4GiB", "512MiB", "100kB", "4096"],
    "block_size": [1, 16, 256],
    "max_model_len": [None, 1, 8192, "8k", "8K"],
    "max_num_seqs": [1, 1024],
    "max_num_batched_tokens": [1, 8192],
    "max_waiting": [0, 10**6],
    "enable_prefix_caching": [True, False],
    "ops": ["auto", "reference"],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "max_logprobs": [-1, 0, 20, 10**6],
    "hf_overrides": [None, {}, {"rope_theta": 5.0}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers in pairs; 2 KV heads of 8 numbers, so 64 bytes of K and V per group and token in bfloat16."""
    path = tmp_path_factory.mktemp("model")
    return write_llama(path, num_layers=8, reads=(0, 0, 2, 2, 4, 4, 6, 6), max_position_embeddings=64)


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("unshared"), num_layers=4, max_position_embeddings=64)


# ---------------------------------------------------------------- values


def test_the_tables_cover_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(ALLOWED) == set(REFUSED) == names


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    for value in ALLOWED[name]:
        config = EngineConfig(**{"model": "folder"} | {name: value})
        assert getattr(config, name) == value


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "model"])
def test_refused_naming_the_setting(folder: Path, name: str) -> None:
    wrong = [problem for value in REFUSED[name] if (problem := _problem(folder, name, value))]
    assert not wrong


def _problem(folder: Path, name: str, value: Any) -> str | None:
    try:
        Engine(folder, **{name: value})
    except ConfigError as error:
        return (
            None if name in str(error) and len(str(error)) < 1000 else f"{value!r:.40}: not named in {str(error):.200}"
        )
    except Exception as error:
        return f"{value!r:.40} raises {type(error).__name__}: {str(error):.100}"
    return f"{value!r:.40} is accepted"


def test_model_must_be_a_path() -> None:
    for value in REFUSED["model"]:
        with pytest.raises(ConfigError, match="model"):
            EngineConfig(model=value)


def test_an_unknown_setting_is_named_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(folder, max_num_sequences=5)
    message = str(caught.value)
    assert "max_num_sequences" in message
    for field in dataclasses.fields(EngineConfig):
        assert field.name in message


def test_every_setting_has_a_help_text_and_none_can_change() -> None:
    assert all(field.metadata.get("help") for field in dataclasses.fields(EngineConfig))
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig("folder").seed = 1  # type: ignore[misc]


def test_config_errors_belong_to_the_tree() -> None:
    for kind in (MiniserveError, ValueError):
        with pytest.raises(kind):
            EngineConfig("folder", block_size=0)


# ---------------------------------------------------------------- sizes

SIZES = {
    "0": 0,
    "4096": 4096,
    "9007199254740993": 9007199254740993,
    "8k": 8_000,
    "8K": 8_192,
    "8kB": 8_000,
    "8KB": 8_000,
    "8KiB": 8_192,
    "8kiB": 8_192,
    "1M": 2**20,
    "1MB": 10**6,
    "1MiB": 2**20,
    "4G": 2**32,
    "4GB": 4 * 10**9,
    "4GiB": 2**32,
    "4 GiB": 2**32,
    "  4GiB\n": 2**32,
    "1.5GiB": 3 * 2**29,
    "0.5k": 500,
    "2T": 2**41,
    "2TB": 2 * 10**12,
    "100B": 100,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_as_people_write_them(text: str) -> None:
    assert parse_size("kv_cache_memory", text) == SIZES[text]


@settings(deadline=None)
@given(st.integers(0, 2**62))
def test_a_plain_number_is_itself(number: int) -> None:
    assert parse_size("kv_cache_memory", number) == number
    assert parse_size("kv_cache_memory", str(number)) == number


@settings(deadline=None, max_examples=150)
@given(st.text(st.sampled_from("0123456789.kKMGTiB +-e"), max_size=12) | st.text(max_size=6))
def test_any_other_text_is_a_config_error(text: str) -> None:
    try:
        assert parse_size("max_model_len", text) >= 0
    except ConfigError as error:
        assert "max_model_len" in str(error)


def test_sizes_reach_the_engine_as_numbers() -> None:
    config = EngineConfig("folder", max_model_len="8k", kv_cache_memory="1.5GiB")
    assert (config.model_len, config.kv_cache_bytes) == (8_000, 3 * 2**29)
    config = EngineConfig("folder")
    assert (config.model_len, config.kv_cache_bytes) == (None, None)


# ---------------------------------------------------------------- what the model decides


def test_a_path_may_be_text_or_a_path(folder: Path) -> None:
    for model in (folder, str(folder)):
        assert Engine(model, max_model_len=16).config.model == str(folder)


def test_no_such_folder_is_a_model_error(tmp_path: Path) -> None:
    for model in (tmp_path / "nowhere", tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match=str(model)):
            Engine(model)


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        Engine(folder, device=device)


def test_memory_that_holds_no_block_is_refused_with_the_numbers(folder: Path) -> None:
    page = 4 * 4 * 2 * 8 * 2 * 4  # slots, groups, K and V, head size, KV heads, bytes
    engine = Engine(folder, block_size=4, kv_cache_memory=page, ops="reference")
    assert engine.block_manager.num_pages == 1
    with pytest.raises(ConfigError, match=rf"kv_cache_memory.*{page - 1}.* {page} bytes"):
        Engine(folder, block_size=4, kv_cache_memory=page - 1, ops="reference")


def test_memory_that_no_machine_has_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        Engine(folder, kv_cache_memory="1000T")


def test_memory_is_what_was_asked_for_rounded_down_to_blocks(folder: Path) -> None:
    engine = Engine(folder, kv_cache_memory="100KiB", block_size=4)
    page = engine.layout.page_bytes
    assert engine.kv_pool.num_bytes == 100 * 1024 // page * page
    assert engine.kv_report()["kv_cache_bytes"] == engine.kv_pool.num_bytes


def test_without_memory_given_all_seats_hold_a_full_request(folder: Path) -> None:
    engine = Engine(folder, max_num_seqs=3, block_size=16)
    assert engine.block_manager.num_pages == 3 * 64 // 16
    assert engine.kv_report()["max_full_requests"] == 3


def test_max_model_len_is_the_models_unless_given(folder: Path) -> None:
    assert Engine(folder).max_model_len == 64
    assert Engine(folder, max_model_len=16).max_model_len == 16
    assert Engine(folder, max_model_len="0.05k").max_model_len == 50


@pytest.mark.parametrize("stored", ["float32", "torch.float32", "float64"])
def test_dtype_auto_is_float32_for_wide_checkpoints(tmp_path: Path, stored: str) -> None:
    engine = Engine(write_llama(tmp_path, num_layers=1, torch_dtype=stored), device="cpu", max_model_len=16)
    assert engine.dtype == engine.kv_pool.arena.dtype == torch.float32


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_dtype_auto_is_narrow_only_where_the_cpu_is_fast_at_it(tmp_path: Path, stored: str, ops: str) -> None:
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    folder = write_llama(tmp_path, num_layers=1, dtype=stored)
    engine = Engine(folder, device="cpu", max_model_len=16, ops=ops)
    fast = "avx512_bf16" in flags or "amx_bf16" in flags or engine.ops.widens_bfloat16
    assert engine.dtype == engine.kv_pool.arena.dtype == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_dtype_asked_for_is_taken_and_sizes_the_cache(folder: Path, name: str, size: int) -> None:
    engine = Engine(folder, dtype=name, device="cpu", max_model_len=16)
    assert engine.kv_pool.arena.dtype == getattr(torch, name)
    assert engine.kv_report()["bytes_per_token"] == 4 * 2 * 8 * 2 * size
    output = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output[0].outputs[0].token_ids) == 2


def test_kv_sharing_replaces_the_models_own_map(unshared: Path) -> None:
    whole = Engine(unshared).kv_report()["bytes_per_token"]
    for kv_sharing, groups in (("cla:2", 2), ("0_0_0_3", 2), ([0, 1, 0, 0], 2), ("none", 4), ((0, 0, 0, 0), 1)):
        report = Engine(unshared, kv_sharing=kv_sharing).kv_report()
        assert len(report["groups"]) == groups
        assert report["bytes_per_token"] * 4 == whole * groups


@pytest.mark.parametrize(
    "kv_sharing", ["", "0_0", "1_0_2_3", "cla:0", "cla:x", "0_a_0_0", [0], [1, 2, 0, 3], ["a"] * 4]
)
def test_a_map_without_meaning_is_a_config_error(unshared: Path, kv_sharing: Any) -> None:
    with pytest.raises(ConfigError):
        Engine(unshared, kv_sharing=kv_sharing)


def test_hf_overrides_replace_fields_of_config_json(folder: Path) -> None:
    engine = Engine(folder, hf_overrides={"max_position_embeddings": 32, "eos_token_id": [5, 6]})
    assert engine.max_model_len == 32
    assert engine.model_config.eos_token_ids == (5, 6)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        Engine(folder, hf_overrides={"num_attention_heads": 0})


def test_a_checkpoint_of_another_map_is_a_model_error(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj"):
        Engine(folder, kv_sharing="none")


# ---------------------------------------------------------------- tokenizers


def test_without_a_tokenizer_text_is_refused_with_the_remedy(folder: Path) -> None:
    engine = Engine(folder)
    assert engine.tokenizer is None
    for call in (
        lambda: engine.generate("text"),
        lambda: engine.generate({"prompt": "text"}),
        lambda: engine.add_request(None, "text"),
        lambda: list(engine.stream("text")),
        lambda: engine.chat([{"role": "user", "content": "text"}]),
    ):
        with pytest.raises(RequestError, match=r"no tokenizer.*(token ids|tokenizer)"):
            call()
    with pytest.raises(RequestError, match="stop") as caught:
        engine.generate([[1, 2]], SamplingParams(stop="x"))
    assert caught.value.param == "stop"
    assert not engine.has_unfinished_requests()


def test_without_a_tokenizer_token_ids_are_served(folder: Path) -> None:
    (output,) = Engine(folder).generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1))
    assert output.prompt is None and output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 3
    assert all(p.decoded_token is None for entry in output.outputs[0].logprobs for p in entry.values())


def test_the_tokenizer_may_lie_elsewhere(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", num_layers=1, vocab=256)
    engine = Engine(model, tokenizer=str(write_byte_level(tmp_path / "tokenizer")), max_model_len=32)
    (output,) = engine.generate("the cat", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == engine.tokenizer.encode("the cat")


def test_a_tokenizer_that_is_not_there_or_broken_stops_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        Engine(folder, tokenizer=str(tmp_path / "nowhere"))
    (write_byte_level(tmp_path / "broken") / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=str(tmp_path / "broken")):
        Engine(folder, tokenizer=str(tmp_path / "broken"))


def test_the_tokenizers_end_token_is_used_where_the_config_has_none(tmp_path: Path) -> None:
    model = write_byte_level(write_llama(tmp_path, num_layers=1, vocab=256))
    engine = Engine(model, max_model_len=32)
    (output,) = engine.generate([[5, 6]], SamplingParams(temperature=0, logit_bias={2: 100.0}))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == [2]
