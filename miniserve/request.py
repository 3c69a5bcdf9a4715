"""What is asked and what is under way. Plain data: no tensors, no scheduling.

`SamplingParams` (how to sample; `validate` is the one judge for library and HTTP), `Request` (one
sequence under way: `n` samples are `n` requests). What the caller gets is in `output.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miniserve.checks import check_encodable, check_flag, check_number, check_token_id, check_whole
from miniserve.errors import RequestError

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 128
GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy: dividing by them would only overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's, except that `max_tokens` may be None.

    Attributes:
        n: independent samples of one prompt; they share the K/V of its blocks.
        temperature: 0 is greedy.
        top_p, top_k, min_p: keep the smallest set of tokens of this mass; the k likeliest (0 or -1: all);
            those at least `min_p` times as likely as the likeliest.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for generated tokens.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output.
        seed: the same seed gives the same text whatever else is in the batch.
        stop: strings that end the text (they are not part of it).
        stop_token_ids: tokens that end it, besides the model's own end tokens.
        ignore_eos: do not end at the model's end tokens.
        min_tokens: no end before this many tokens.
        max_tokens: at most this many; None: as many as there is room for.
        logprobs: report this many likeliest tokens per generated token, and the sampled one (-1: whole vocabulary).
        prompt_logprobs: the same for each prompt token. Values are of the raw distribution.
        logit_bias: token id -> amount added to its logit, -100 to 100.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    cache_salt: str | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def penalized(self) -> bool:
        """Whether logits depend on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def validate(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Refuse values that have no meaning for this model.

        Raises:
            RequestError: names the field, its value and what is allowed.
        """
        check_whole("n", self.n, 1, MAX_N)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_whole("top_k", self.top_k, -1, 2**31 - 1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check_whole("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        check_flag("ignore_eos", self.ignore_eos)
        check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; lower it", "min_tokens"
            )
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            lowest = -1 if max_logprobs == -1 else 0
            check_whole(name, value, lowest, limit, optional=True, remedy="raise the engine's max_logprobs to get more")
        self._validate_stops(vocab_size)
        self._validate_bias(vocab_size)
        if self.cache_salt is not None:
            if not isinstance(self.cache_salt, str) or not 0 < len(self.cache_salt) <= MAX_SALT_CHARS:
                raise RequestError(f"cache_salt must be text of 1 to {MAX_SALT_CHARS} characters", "cache_salt")
            check_encodable("cache_salt", self.cache_salt)

    def _validate_stops(self, vocab_size: int) -> None:
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            raise RequestError("stop must be a string or a list of strings", "stop")
        if isinstance(self.stop, (list, tuple)) and len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed", "stop")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"stop: each must be a string of 1 to {MAX_STOP_CHARS} characters", "stop")
            check_encodable("stop", text)
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, (list, tuple)) or len(self.stop_token_ids) > vocab_size:
                raise RequestError("stop_token_ids must be a list of token ids", "stop_token_ids")
            for token in self.stop_token_ids:
                check_token_id("stop_token_ids", token, vocab_size)

    def _validate_bias(self, vocab_size: int) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > vocab_size:
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
        for token, bias in self.logit_bias.items():
            check_token_id("logit_bias", token, vocab_size)
            check_number("logit_bias", bias, -100.0, 100.0)


@dataclass(eq=False)
class Request:
    """One sequence under way. There is one counter instead of phases: a step closes the gap between
    `num_computed_tokens` and `num_tokens`, be it a prompt, a recomputation after preemption or one new token.

    The scheduler alone changes it.
    """

    key: int  # unique in the engine, whatever the caller calls the request
    parent_key: int  # equal for the `n` samples of one prompt
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int  # prompt and output together never exceed this
    stop_token_ids: frozenset[int]  # those that end this request, the model's own included
    seed: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prompt tokens served by the prefix cache when it first ran
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs the caller already has
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token or string, if one of those ended it

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """Whether no further step will run it."""
        return self.finish_reason is not None

    @property
    def first_logit_needed(self) -> int | None:
        """The first position whose logits a prompt logprob still needs; None if only the last row is sampled."""
        if self.params.prompt_logprobs is None or self.num_prompt_logprobs >= len(self.prompt_token_ids):
            return None
        return max(0, self.num_prompt_logprobs - 1)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions `start` to `stop` (exclusive)."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
