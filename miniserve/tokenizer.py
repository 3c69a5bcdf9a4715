"""Text <-> token ids: chat template, incremental detokenisation, stop strings. Home of transformers.

A model folder without tokenizer files still serves token ids: then there is no `Tokenizer` at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miniserve.errors import ModelError, RequestError

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A HuggingFace tokenizer, loaded from local files only and without running any code from them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedConfig  # seconds to import: only when text is wanted

        try:
            # A config of no family: transformers refuses those it does not know (LCKV's `layer_types` string).
            self._hf: Any = AutoTokenizer.from_pretrained(
                folder, config=PreTrainedConfig(), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # its parsers raise anything
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error

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
        """Text to ids.

        Raises:
            RequestError: the text is no valid Unicode, or the tokenizer fails on it.
        """
        try:
            text.encode()
            return list(_guarded(self._hf.encode, text, add_special_tokens=add_special_tokens))
        except UnicodeEncodeError:
            raise RequestError("prompt holds a lone surrogate, which is no text in UTF-8", "prompt") from None
        except Exception as error:
            raise RequestError(f"prompt cannot be tokenised: {type(error).__name__}", "prompt") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, without special tokens."""
        # The Rust object itself takes a tenth of the wrapper's time.
        decoder = self._hf.backend_tokenizer if self._hf.is_fast else self._hf
        return _guarded(decoder.decode, list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text (a part of a character becomes U+FFFD)."""
        return _guarded(self._hf.decode, [token_id])

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Messages through the model's own chat template; it writes all special tokens itself.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if not self._hf.chat_template:
            raise RequestError("this model has no chat template; use a completion instead", "messages")
        try:
            text = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
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
    in U+FFFD waits for the token that completes the character. The tail keeps the left context on which
    tokenizers' leading-space rules depend.
    """

    _CONTEXT = 6
    _MAX_PENDING = 8  # a character has at most 4 bytes: what is not one after 8 tokens never becomes one

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-self._CONTEXT :])
        self._emitted = len(self._ids)  # ids whose text has been given out
        self._context = 0  # where decoding of the tail begins

    def step(self, token_id: int) -> str:
        """The text that this token completes, perhaps empty."""
        self._ids.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """What is still waiting: the tail of a character that was never completed."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._emitted])
        after = self._tokenizer.decode(self._ids[self._context :])
        waits = after.endswith(_REPLACEMENT) and len(self._ids) - self._emitted <= self._MAX_PENDING
        if waits and not final:
            return ""
        self._context, self._emitted = max(self._emitted - self._CONTEXT, 0), len(self._ids)
        return after[len(before) :]


class StopChecker:
    """Finds stop strings in a growing text and holds back what might still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """New text -> (text that is safe to give out, the stop string that ended it, if one did)."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
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
