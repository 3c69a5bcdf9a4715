"""From sampled tokens to the caller's answer: text, stop strings, logprobs of one prompt under way.

An `Answer` follows one prompt from arrival to its final `RequestOutput`. It knows no scheduler and no tensors:
it is told what was sampled and says when a stop string has ended a sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from miniserve.errors import EngineError
from miniserve.output import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from miniserve.request import Request
from miniserve.tokenizer import Detokenizer, StopChecker, Tokenizer

log = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]
Result = TypeVar("Result")


class Sample:
    """One of the `n` continuations: its request and what has been made of its tokens."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.text = ""
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids) if tokenizer else None
        self._stops = StopChecker(params.stop_strings)

    def extend(self) -> str | None:
        """Add the text of the token just sampled; returns the stop string that it completed, if it did.

        A stop token is not part of the text, nor is a stop string; one complete before `min_tokens` is text.
        """
        request = self.request
        if self._detokenizer is None:
            return None
        ended_by_token = request.finish_reason == "stop"
        text = "" if ended_by_token else self._detokenizer.step(request.output_token_ids[-1])
        if request.finished:
            text += self._detokenizer.flush()
        too_early = len(request.output_token_ids) < request.params.min_tokens
        safe, stop = self._stops.push(text, ending=not too_early)
        self.text += safe
        if request.finished and stop is None:
            self.text += self._stops.flush()
        return stop

    def output(self, index: int) -> CompletionOutput:
        """A snapshot for the caller."""
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(self.request.output_token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.request.finish_reason,
            stop_reason=self.request.stop_reason,
        )


@dataclass(eq=False)
class Answer:
    """All samples of one prompt."""

    request_id: str
    prompt: str | None
    samples: list[Sample]
    tokenizer: Tokenizer | None
    on_output: OnOutput | None
    final_only: bool  # the caller wants the whole answer only
    prompt_logprobs: list[PositionLogprobs | None] | None
    error: BaseException | None = None  # what failed, if something did

    @property
    def key(self) -> int:
        """Unique in the engine, whatever the caller calls the request."""
        return self.samples[0].request.key

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.request.finished for sample in self.samples)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Do something for this answer; if it fails, remember the error and return None: nobody else is concerned."""
        try:
            return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the tokenizers' Rust panics are no `Exception`
            log.exception("the text of request %s cannot be made", self.request_id)
            self.error = error
            return None

    def raise_error(self) -> None:
        """Raise an `EngineError` if something failed."""
        if self.error is not None:
            raise EngineError(f"the step that ran this request failed: {self.error!r}") from self.error

    def add_logprobs(self, entries: Sequence[PositionLogprobs], kept: list[Any] | None) -> None:
        """Append logprobs with each token's text to `kept`: the prompt's or a sample's, if they were asked for."""
        if kept is not None:
            kept.extend(self.attempt(partial(self._named, entries)) or entries)

    def _named(self, entries: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
        """Logprobs with each token's text beside it."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return list(entries)
        return [{t: Logprob(p.logprob, p.rank, tokenizer.token_text(t)) for t, p in e.items()} for e in entries]

    def output(self) -> RequestOutput:
        """A snapshot for the caller; later steps do not change it."""
        first = self.samples[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[sample.output(index) for index, sample in enumerate(self.samples)],
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=first.num_cached_tokens or 0,
            finished=self.finished,
        )

    def deliver(self, output: RequestOutput) -> None:
        """Call the caller back; what fails there is his affair and stops nobody else."""
        if self.on_output is not None:
            try:
                self.on_output(output)
            except Exception:
                log.exception("the on_output of request %s failed", self.request_id)
