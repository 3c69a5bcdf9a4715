"""From a prompt and `SamplingParams` to an `Answer` ready to be filled, or a `RequestError`.

All checks of a request are made here, before anything in the engine has changed: what the values mean, whether the
text can be tokenised, whether the prompt fits the context and the KV pool. Any thread may call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from secrets import token_hex
from typing import Any

from miniserve.answer import Answer, OnOutput, Sample
from miniserve.checks import check_token_id, shorten
from miniserve.errors import RequestError
from miniserve.request import Request, SamplingParams
from miniserve.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}."""

_MAX_CHARS_PER_TOKEN = 128
"""No tokenizer packs more: a longer text is refused before it is tokenised."""


class Intake:
    """Owns the request keys and the seeds of requests that bring none; knows the limits of one engine."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_logprobs: int,
        max_model_len: int,
        max_total_tokens: int,
        check_fits: Callable[[Sequence[int]], None],
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.max_model_len = max_model_len  # prompt and output, by configuration
        self.max_total_tokens = max_total_tokens  # the same, by what the KV pool can hold
        self._check_fits = check_fits
        if not eos_token_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_token_ids = (tokenizer.eos_token_id,)
        self._eos = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._keys = count()
        self._seeds = Random(seed)
        self._lock = threading.Lock()  # guards the two above

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
        final_only: bool = False,
    ) -> Answer:
        """Check a request and make the answer that it will fill.

        Raises:
            RequestError: it cannot be served as asked.
        """
        if not isinstance(params, SamplingParams):
            message = f"sampling_params must be SamplingParams, not {type(params).__name__}"
            raise RequestError(message, "sampling_params")
        params.validate(vocab_size=self.vocab_size, max_logprobs=self.max_logprobs)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop: the model folder has no tokenizer, so there is no text to search", "stop")
        text, ids = self.encode(prompt)
        room = self.max_total_tokens - len(ids)
        if params.min_tokens > room:
            message = f"min_tokens={params.min_tokens}: there is room for {room} tokens after the prompt; lower it"
            raise RequestError(message, "min_tokens")
        with self._lock:
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            keys = [next(self._keys) for _ in range(params.n)]
        requests = [self._request(params, ids, keys[0], key, seed + i) for i, key in enumerate(keys)]
        return Answer(
            request_id=f"request-{keys[0]}-{token_hex(8)}" if request_id is None else request_id,
            prompt=text,
            samples=[Sample(request, self.tokenizer) for request in requests],
            tokenizer=self.tokenizer,
            on_output=on_output,
            final_only=final_only,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],  # nothing predicts the first token
        )

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text (None if it came as ids) and its token ids, checked.

        Raises:
            RequestError: empty, too long for context or KV pool, of no known form, or ids outside the vocabulary.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt and "prompt" not in prompt:
                raise RequestError('prompt: a mapping needs "prompt_token_ids" or "prompt"', "prompt")
            wanted = (list, tuple) if "prompt_token_ids" in prompt else (str, list, tuple)
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if not isinstance(prompt, wanted):
                raise RequestError(f"prompt_token_ids must be a list of token ids, not {shorten(prompt)}", "prompt")
        if not isinstance(prompt, (str, list, tuple)):
            raise RequestError(f"prompt must be text or a list of token ids, not {shorten(prompt)}", "prompt")
        if not prompt:
            raise RequestError("prompt is empty; give at least one token", "prompt")
        text = prompt if isinstance(prompt, str) else None
        too_long = f"the maximum context length of {self.max_model_len} tokens (max_model_len); shorten it"
        if text is not None and len(text) > _MAX_CHARS_PER_TOKEN * self.max_model_len:
            message = f"the prompt has {len(text)} characters, far more than {too_long}"
            raise RequestError(message, "prompt", "context_length_exceeded")
        ids = list(prompt) if text is None else self.need_tokenizer().encode(text)
        if len(ids) >= self.max_model_len:
            message = f"the prompt has {len(ids)} tokens, which with one token to generate exceeds {too_long}"
            raise RequestError(message, "prompt", "context_length_exceeded")
        if not ids:
            raise RequestError("prompt: the text gives no tokens; give at least one", "prompt")
        for token in ids:
            check_token_id("prompt", token, self.vocab_size)
        self._check_fits(ids)
        return text, ids

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(
                "prompt: the model folder has no tokenizer; give token ids, or set tokenizer to a folder with one",
                "prompt",
            )
        return self.tokenizer

    def _request(self, params: SamplingParams, ids: list[int], parent_key: int, key: int, seed: int) -> Request:
        """One sample's request. Prompt logprobs are the same for all samples: the first computes them."""
        own = params if key == parent_key else replace(params, prompt_logprobs=None)
        return Request(
            key=key,
            parent_key=parent_key,
            prompt_token_ids=ids,
            params=own,
            max_total_tokens=self.max_total_tokens,
            stop_token_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos),
            seed=seed,
            num_prompt_logprobs=0 if own.prompt_logprobs is None else 1,
        )


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of numbers is one prompt of token ids.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(f"prompts must be text, token ids or a list of these, not {shorten(prompts)}", "prompt")
    is_ids = bool(prompts) and not isinstance(prompts[0], (str, Mapping, list, tuple))
    return [prompts] if is_ids else list(prompts)


def conversation_list(messages: Any) -> list[Any]:
    """One conversation (a list of messages) or many -> many.

    Raises:
        RequestError: it is neither.
    """
    one = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], Mapping)
    conversations = [messages] if one else messages
    if not isinstance(conversations, (list, tuple)) or not conversations:
        raise RequestError('messages must be a list of {"role", "content"}, or a list of such lists', "messages")
    for conversation in conversations:
        good = isinstance(conversation, (list, tuple)) and conversation
        if not good or not all(isinstance(message, Mapping) for message in conversation):
            raise RequestError('messages: a conversation is a list of {"role", "content"}, not empty', "messages")
    return list(conversations)


def one_each(
    prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One `SamplingParams` for all prompts, or one for each -> one for each.

    Raises:
        RequestError: their number is another.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    if not isinstance(sampling_params, (list, tuple)):
        message = f"sampling_params must be SamplingParams or a list of them, not {shorten(sampling_params)}"
        raise RequestError(message, "sampling_params")
    if len(sampling_params) != len(prompts):
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one for all or one for each",
            "sampling_params",
        )
    return list(sampling_params)
