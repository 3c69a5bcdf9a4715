"""The bodies of /v1/chat/completions, as OpenAI defines them. What both endpoints share is in `protocol`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from miniserve.checks import shorten
from miniserve.errors import RequestError
from miniserve.output import CompletionOutput, PositionLogprobs, RequestOutput
from miniserve.protocol import SamplingFields, Texts, finite, usage
from miniserve.request import SamplingParams

MAX_MESSAGES = 4096


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions. Without a limit the answer may be as long as there is room."""

    not_here: ClassVar[tuple[str, ...]] = ("prompt", "echo", "prompt_logprobs", "best_of", "functions")

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None
    add_generation_prompt: bool | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them, text parts joined.

        Raises:
            RequestError: a message is none, or holds something else than text.
        """
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise RequestError(f"messages: there must be 1 to {MAX_MESSAGES}, not {len(self.messages)}", "messages")
        return [_message(number, message) for number, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        """What the template is told beside the messages."""
        tools = None if self.tool_choice == "none" else self.tools
        return {"tools": tools, "add_generation_prompt": self.add_generation_prompt is not False}

    def sampling_params(self) -> SamplingParams:
        """What the engine gets.

        Raises:
            RequestError: a field that miniserve does not support, or one that contradicts another.
        """
        given = self.given()
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice can be none or auto; calls cannot be forced", "tool_choice")
        if self.tools is not None and not all(isinstance(tool, dict) for tool in self.tools):
            raise RequestError("tools must be a list of objects", "tools")
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind not in (None, "text"):
            raise RequestError("response_format: only text is supported", "response_format")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs=true", "top_logprobs")
        given["max_tokens"] = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**given)


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{number}] must be an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) < len(content):
            raise RequestError(f"messages[{number}].content: only parts of type text are supported", "messages")
        return message | {"content": "".join(texts)}
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{number}].content must be text, not {shorten(content)}", "messages")
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class ChatWriter:
    """Turns the growing snapshots of one sample into deltas."""

    def __init__(self, body: ChatRequest, index: int, texts: Texts) -> None:
        self._body = body
        self._index = index
        self._texts = texts
        self._num_chars = 0  # of the sample's text given out
        self._num_tokens = 0  # of the sample's tokens given out
        self._begun = False
        self._finished = False

    def write(self, answer: RequestOutput, sample: CompletionOutput) -> dict[str, Any] | None:
        """The choice of what came since the last one; None if there is nothing (more) to tell."""
        if self._finished:
            return None
        text, ids = sample.text[self._num_chars :], sample.token_ids[self._num_tokens :]
        if sample.finish_reason is None and not text and not (self._body.logprobs and ids):
            return None
        delta = {"content": text} if self._begun else {"role": "assistant", "content": text}
        choice = _choice(self._body, self._index, sample, self._num_tokens, self._texts) | {"delta": delta}
        self._num_chars, self._num_tokens, self._begun = len(sample.text), len(sample.token_ids), True
        self._finished = sample.finish_reason is not None
        return choice


def chat_completion(
    body: ChatRequest, answers: Sequence[RequestOutput], head: Mapping[str, Any], texts: Texts
) -> dict[str, Any]:
    """The whole answer: one prompt with n samples."""
    choices = [
        _choice(body, sample.index, sample, 0, texts) | {"message": {"role": "assistant", "content": sample.text}}
        for sample in answers[0].outputs
    ]
    return {**head, "choices": choices, "usage": usage(answers)}


def _choice(body: ChatRequest, index: int, sample: CompletionOutput, first: int, texts: Texts) -> dict[str, Any]:
    """What a choice has beside its text, for the tokens from `first` on."""
    entries = list(zip(sample.token_ids, sample.logprobs or []))[first:]
    logprobs = {"content": [_token(body, *entry, texts) for entry in entries], "refusal": None}
    return {
        "index": index,
        "logprobs": logprobs if body.logprobs else None,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


def _token(body: ChatRequest, token: int, entry: PositionLogprobs, texts: Texts) -> dict[str, Any]:
    likeliest = sorted(entry, key=lambda other: entry[other].rank)[: body.top_logprobs or 0]
    return _logprob(token, entry, texts) | {"top_logprobs": [_logprob(other, entry, texts) for other in likeliest]}


def _logprob(token: int, entry: PositionLogprobs, texts: Texts) -> dict[str, Any]:
    text = texts.of_token(token)
    return {"token": text, "logprob": finite(entry[token].logprob), "bytes": list(text.encode("utf-8", "replace"))}
