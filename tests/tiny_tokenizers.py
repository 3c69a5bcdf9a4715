"""Small tokenizer folders, made from scratch: byte-level, byte fallback (Llama style), and a SentencePiece model.

All three put <unk>, <s> and </s> at ids 0, 1 and 2, where the golden models' config.json has its begin and end
tokens, and are small enough for their embedding tables: 256 rows for the byte-level one, 300 for the others.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role: ' ~ message.role) }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SENTENCES = (
    "the cat sat on the mat",
    "a dog ran after the cat",
    "hello world, how are you today?",
    "once upon a time there was a small model",
    "layers that share their keys and values",
)
UTF8_BYTES = tuple(b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5)
"""The 243 bytes that occur in UTF-8."""


def write_byte_level(
    folder: Path,
    merges: Sequence[tuple[str, str]] = (("t", "h"), ("th", "e"), (" ", "the")),
    pieces: Sequence[bytes] = (),
    runaway_normalizer: bool = False,
    **settings: Any,
) -> Path:
    """GPT-2 style: a token is some bytes. Ids 3 to 245 are single bytes, then come the merges, then `pieces`.

    `pieces` are tokens of any bytes that encoding never makes but decoding knows. `runaway_normalizer` adds a
    regular expression that backtracks without end on "aaaa...!".
    """
    units = [bytes([b]) for b in UTF8_BYTES] + [(a + b).encode() for a, b in merges] + list(pieces)
    vocab = {token: i for i, token in enumerate([UNK, BOS, EOS, *map(_visible, units)])}
    pairs = [(_visible(a.encode()), _visible(b.encode())) for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=UNK))
    if runaway_normalizer:
        tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "b")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, settings)


def write_byte_fallback(folder: Path, **settings: Any) -> Path:
    """Llama style: a piece is some characters, a space is ▁, and what no piece covers becomes <0x..> tokens."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?", "▁the", "▁a", "日"]
    tokens = [UNK, BOS, EOS, *(f"<0x{b:02X}>" for b in range(256)), *letters[:31], "th", "the", *letters[31:]]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder, settings)


def write_sentencepiece(folder: Path, tokenizer_class: str, vocab_size: int = 300, byte_fallback: bool = True) -> Path:
    """A real tokenizer.model, trained on `SENTENCES`, and nothing else to load from."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return _save_config(folder, tokenizer_class=tokenizer_class)


def byte_ids(data: bytes) -> list[int]:
    """The single-byte tokens of the byte-level tokenizer."""
    return [3 + UTF8_BYTES.index(b) for b in data]


def fallback_ids(data: bytes) -> list[int]:
    """The <0x..> tokens of the byte-fallback tokenizer."""
    return [3 + b for b in data]


def _save(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> Path:
    tokenizer.add_special_tokens([UNK, BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return _save_config(
        folder, **{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE} | settings
    )


def _save_config(folder: Path, **settings: Any) -> Path:
    config = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "clean_up_tokenization_spaces": False} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _visible(data: bytes) -> str:
    """Bytes as the printable characters that byte-level vocabularies are written in (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return "".join(chr(b if b in printable else 256 + hidden.index(b)) for b in data)
