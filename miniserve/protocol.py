"""The bodies of the HTTP API, as OpenAI defines them: pydantic models in, plain dicts out.

Types are checked here; what the values mean is `SamplingParams.validate`'s business, as for the library. So are the
items of lists and mappings: pydantic would collect an error for each of a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miniserve.errors import RequestError
from miniserve.output import CompletionOutput, PositionLogprobs, RequestOutput
from miniserve.request import SamplingParams

Body = TypeVar("Body", bound=BaseModel)

MAX_PROMPTS = 1024
MAX_TOKENIZED = 2**20  # characters or tokens
LOWEST_LOGPROB = -9999.0
"""JSON has no -inf: log probabilities below this are given as this."""

_UNSUPPORTED = ("suffix", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """What both endpoints take alike. Fields that miniserve does not know are tolerated."""

    model_config = ConfigDict(strict=True, extra="allow")
    not_here: ClassVar[tuple[str, ...]] = ()  # what only the other endpoint takes

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[Any] | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, Any] | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def given(self) -> dict[str, Any]:
        """The fields that are `SamplingParams`' too, as far as they are given; null means the default.

        Raises:
            RequestError: a field that miniserve does not support, or one that contradicts another.
        """
        extra = self.model_extra or {}
        for name in (*_UNSUPPORTED, *self.not_here):
            if extra.get(name) is not None:
                raise RequestError(f"{name} is not supported", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        given = {name: getattr(self, name) for name in _PARAMS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return given


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    not_here: ClassVar[tuple[str, ...]] = ("response_format", "tools", "messages", "top_logprobs")

    prompt: Any = Field(description="text, token ids, or a list of these")
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def prompts(self) -> list[Any]:
        """The prompts, one by one; a list of numbers is one prompt.

        Raises:
            RequestError: none or too many.
        """
        value = self.prompt
        if isinstance(value, list) and value and isinstance(value[0], (str, list)):
            if len(value) > MAX_PROMPTS:
                raise RequestError(f"prompt: {len(value)} prompts in one request; at most {MAX_PROMPTS}", "prompt")
            return value
        return [value]

    def sampling_params(self) -> SamplingParams:
        """What the engine gets.

        Raises:
            RequestError: a field that miniserve does not support, or one that contradicts another.
        """
        given = self.given()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is not supported; leave it out or set it to n", "best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed; use stream=false", "prompt_logprobs")
        if self.echo and self.logprobs is not None and self.prompt_logprobs not in (None, self.logprobs):
            raise RequestError("prompt_logprobs must equal logprobs if the prompt is echoed", "prompt_logprobs")
        given |= {n: v for n in ("logprobs", "prompt_logprobs") if (v := getattr(self, n)) is not None}
        if self.echo and self.logprobs is not None:
            given["prompt_logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            given["max_tokens"] = 1  # computed for its prompt's sake and left out of the answer
        return SamplingParams(**given)

    @property
    def is_prompt_alone(self) -> bool:
        """Whether the prompt is asked back and nothing else."""
        return bool(self.echo and self.max_tokens == 0)


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize, in vLLM's shape: a prompt, or messages."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TOKENIZED)
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENIZED)


_PARAMS = tuple(
    name for name in SamplingParams.__dataclass_fields__ if name in SamplingFields.model_fields and name != "logit_bias"
)


def parse(kind: type[Body], body: Any) -> Body:
    """A decoded JSON body as a request of this kind.

    Raises:
        RequestError: names the first field at fault; never repeats the body.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"][:3])
        param = str(first["loc"][0]) if first["loc"] else None
        raise RequestError(f"{path[:100]}: {first['msg'][:200]}", param) from None


# -------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Texts:
    """How token ids become text."""

    of_token: Callable[[int], str]  # one alone: special tokens too, and parts of characters as U+FFFD
    of_prompt: Callable[[Sequence[int]], str]


class ChoiceWriter:
    """Turns the growing snapshots of one sample into choices: what is new each time, or everything at once."""

    def __init__(self, body: CompletionRequest, index: int, texts: Texts) -> None:
        self._body = body
        self._index = index
        self._texts = texts
        self._keep = not body.is_prompt_alone  # whether generated tokens are part of the answer
        self._num_chars = 0  # of the sample's text given out
        self._num_tokens = 0  # of the sample's tokens given out
        self._echoed = not body.echo
        self._offset = 0
        self.finished = False

    def write(self, answer: RequestOutput, sample: CompletionOutput) -> dict[str, Any] | None:
        """The choice of what came since the last one; None if there is nothing (more) to tell."""
        if self.finished:
            return None
        prompt_done = answer.prompt_logprobs is None or len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
        if not prompt_done and sample.finish_reason is None:
            return None  # an echo with logprobs waits until all of the prompt's are there
        text, ids, entries = self._echo(answer)
        if self._keep:
            text += sample.text[self._num_chars :]
            ids += sample.token_ids[self._num_tokens :]
            entries += (sample.logprobs or [])[self._num_tokens :]
            self._num_chars, self._num_tokens = len(sample.text), len(sample.token_ids)
        wants_logprobs = self._body.logprobs is not None
        if sample.finish_reason is None and not text and not (wants_logprobs and ids):
            return None
        self.finished = sample.finish_reason is not None
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(ids, entries) if wants_logprobs else None,
            "finish_reason": sample.finish_reason if self._keep or sample.finish_reason is None else "length",
            "stop_reason": sample.stop_reason if self._keep else None,
        }

    def _echo(self, answer: RequestOutput) -> tuple[str, list[int], list[PositionLogprobs | None]]:
        if self._echoed:
            return "", [], []
        self._echoed = True
        text = answer.prompt if answer.prompt is not None else self._texts.of_prompt(answer.prompt_token_ids)
        return text, list(answer.prompt_token_ids), list(answer.prompt_logprobs or [])

    def _logprobs(self, ids: Sequence[int], entries: Sequence[PositionLogprobs | None]) -> dict[str, list[Any]]:
        """The legacy shape: four lists with one entry per token; a prompt's first token has none (null)."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(ids, entries):
            text = self._texts.of_token(token)
            result["tokens"].append(text)
            result["text_offset"].append(self._offset)
            result["token_logprobs"].append(None if entry is None else finite(entry[token].logprob))
            result["top_logprobs"].append(None if entry is None else self._top(entry))
            self._offset += len(text)
        return result

    def _top(self, entry: PositionLogprobs) -> dict[str, float]:
        """Text -> logprob; an id whose text an earlier one has already is named `token_id:N`."""
        top: dict[str, float] = {}
        for token, value in entry.items():
            text = self._texts.of_token(token)
            top[f"token_id:{token}" if text in top else text] = finite(value.logprob)
        return top


def completion(
    body: CompletionRequest, answers: Sequence[RequestOutput], head: Mapping[str, Any], texts: Texts
) -> dict[str, Any]:
    """The whole answer to a request of several prompts with n samples each, numbered prompt * n + sample."""
    choices = []
    for number, answer in enumerate(answers):
        for sample in answer.outputs:
            writer = ChoiceWriter(body, number * len(answer.outputs) + sample.index, texts)
            choice = writer.write(answer, sample) or {}
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [_prompt_entry(entry) for entry in answer.prompt_logprobs or []]
            choices.append(choice)
    return {**head, "choices": choices, "usage": usage(answers, prompt_alone=body.is_prompt_alone)}


def usage(answers: Sequence[RequestOutput], *, prompt_alone: bool = False) -> dict[str, Any]:
    """Token counts over all prompts and samples."""
    prompt_tokens = sum(len(answer.prompt_token_ids) for answer in answers)
    output_tokens = sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)
    completion_tokens = 0 if prompt_alone else output_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens for answer in answers)},
    }


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message[:2000], "type": kind, "param": param, "code": code}}


def _prompt_entry(entry: PositionLogprobs | None) -> dict[str, Any] | None:
    """vLLM's shape of one prompt position: token id -> logprob, rank, text."""
    if entry is None:
        return None
    return {
        str(token): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for token, p in entry.items()
    }


def finite(value: float) -> float:
    """As JSON can hold it."""
    return max(LOWEST_LOGPROB, value)  # in this order, so that NaN is replaced too


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise RequestError(f"logit_bias: {text[:20]!r} is not a token id", "logit_bias")
    return int(text)
