"""Text <-> token ids: chat template, incremental detokenisation, stop strings. Home of transformers.

A model folder without tokenizer files still serves token ids: then there is no `Tokenizer` at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miniserve.errors import ModelError, RequestError

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REPLACEMENT = "\ufffd"
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that add nothing to tokenizer.json: `AutoTokenizer` makes the same of them, whatever the family."""


def _load(folder: Path) -> Any:
    """What transformers makes of the folder. It takes a second to import, and `AutoTokenizer` two more."""
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if (folder / "tokenizer.json").is_file() and _class_named_in(folder) in _PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception:
        # It may be config.json that transformers does not like (LCKV's `layer_types`): do without its family.
        return AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig(), **options)


def _class_named_in(folder: Path) -> Any:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("tokenizer_class") if isinstance(config, dict) and "auto_map" not in config else None


class Tokenizer:
    """A HuggingFace tokenizer, loaded from local files only and without running any code from them."""

    def __init__(self, folder: Path) -> None:
        try:
            self._hf: Any = _load(folder)
        except Exception as error:  # its parsers raise anything
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        self._size = len(self._hf)

    @classmethod
    def of_model(cls, folder: Path, other: str | None = None) -> Tokenizer | None:
        """The tokenizer in a model's folder, or in `other` if given; None if the folder holds no tokenizer files."""
        if other is not None:
            return cls(Path(other))
        return cls(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        return self._hf.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. A text that begins with the BOS token's own text gets no second one.

        Raises:
            RequestError: the text is no valid Unicode, or the tokenizer fails on it.
        """
        try:
            text.encode()
            ids = list(_guarded(self._hf.encode, text, add_special_tokens=add_special_tokens))
            bos = self._hf.bos_token_id
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        except UnicodeEncodeError:
            raise RequestError("prompt holds a lone surrogate, which is no text in UTF-8", "prompt") from None
        except Exception as error:
            raise RequestError(f"prompt cannot be tokenised: {type(error).__name__}", "prompt") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, without special tokens."""
        # The Rust object itself takes a tenth of the wrapper's time.
        decoder = self._hf.backend_tokenizer if self._hf.is_fast else self._hf
        known = [token for token in token_ids if token < self._size]  # the model's table may be wider
        return _guarded(decoder.decode, known, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text (a part of a character becomes U+FFFD)."""
        return _guarded(self._hf.decode, [token_id]) if token_id < self._size else ""

    def is_byte(self, token_id: int) -> bool:
        """Whether this is one of SentencePiece's byte tokens, <0x00> to <0xFF>."""
        return token_id < self._size and str(self._hf.convert_ids_to_tokens(token_id)).startswith("<0x")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Messages, and tools if there are any, through the model's own chat template; it writes all special tokens.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if not self._hf.chat_template:
            raise RequestError("this model has no chat template; use a completion instead", "messages")
        try:
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
            text = self._hf.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            raise RequestError(f"messages: the chat template refuses them: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)


def _guarded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call into a tokenizer; a panic of its Rust code, which is no `Exception`, becomes one."""
    try:
        return function(*arguments, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"the tokenizer panicked: {panic}") from None


class Detokenizer:
    """Token by token to text, never splitting a character.

    Decodes a short tail twice, with and without the new tokens; what the longer text adds is new. Text that ends
    in U+FFFD waits for the token that completes the character. The tail begins where text was given out whole, so
    that it never begins within a character; it gives the left context on which leading-space rules depend.
    """

    _CONTEXT = 6
    _MAX_PENDING = 128  # what has not become a character after so many tokens is given out as it is

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-self._CONTEXT :])
        while self._ids and _REPLACEMENT in tokenizer.decode(self._ids):
            del self._ids[0]  # the tail of the prompt begins within a character
        self._emitted = len(self._ids)  # ids whose text has been given out
        self._context = 0  # where decoding of the tail begins

    def step(self, token_id: int) -> str:
        """The text that this token completes, perhaps empty."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._emitted <= self._MAX_PENDING:
            return ""
        self._context, self._emitted = self._emitted, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still waiting: one U+FFFD for a character that was never completed."""
        text, pending = self._new_text(), self._ids[self._emitted :]
        self._context, self._emitted = self._emitted, len(self._ids)
        cut_off = text == _REPLACEMENT * len(pending) and all(map(self._tokenizer.is_byte, pending))
        return text[:1] if cut_off and len(pending) < 4 else text  # byte fallback gives one for each byte

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._emitted])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]


class StopChecker:
    """Finds stop strings in a growing text and holds back what might still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, ending: bool = True) -> tuple[str, str | None]:
        """New text -> (text that is safe to give out, the stop string that ended it, if one did).

        Unless `ending`, a stop string that is complete now is text like any other.
        """
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if ending and (at := self._held.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            safe, self._held = self._held[:at], ""
            return safe, stop
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, None

    def flush(self) -> str:
        """The text held back: the end came before it became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
