"""The engine: add requests, step, collect. Scheduler, batch, model and sampler meet here and nowhere else.

    scheduled = scheduler.schedule()          who runs, how many tokens each; blocks are already theirs
    batch     = batches.build(scheduled)      ragged -> flat
    hidden    = model(batch, kv_pool)         owners write K/V, all read their group's, cut applied
    tokens    = sample(model.logits(hidden))  only rows that are sampled
    scheduler.update(scheduled, tokens)

Any thread may add and abort; one thread at a time steps. What a request has produced goes to its own
callback, so several callers can share one engine.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from miniserve import batch as batches
from miniserve import sampling
from miniserve.answer import Answer, OnOutput, Sample
from miniserve.config import EngineConfig
from miniserve.inbox import Inbox
from miniserve.intake import Intake, Prompt, conversation_list, one_each, prompt_list
from miniserve.kvcache.block_manager import BlockManager
from miniserve.kvcache.layout import KVLayout
from miniserve.kvcache.pool import KVPool
from miniserve.machine import pick_device, pick_dtype, pool_pages
from miniserve.models import load_config, load_model
from miniserve.ops import load_ops
from miniserve.output import RequestOutput
from miniserve.report import kv_report, log_kv_report
from miniserve.request import Request, SamplingParams
from miniserve.scheduler.scheduler import ScheduledRequest, Scheduler
from miniserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None


class Engine:
    """Serve a model folder from Python: `Engine(model, **settings)`, the settings being those of `EngineConfig`.

    Raises:
        MiniserveError: the folder or a setting cannot be used; the message says why and what to do.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.config = config = EngineConfig.build(model, settings)
        folder = Path(config.model)
        self.model_config = load_config(folder, kv_sharing=config.kv_sharing, overrides=config.hf_overrides)
        self.device = pick_device(config.device)
        self.ops = load_ops(config.ops, self.device, config.dtype, config.quantization)
        self.dtype = pick_dtype(
            config.dtype, self.model_config.dtype, self.device, widens_bfloat16=self.ops.widens_bfloat16
        )
        kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else self.dtype
        self.max_model_len = config.model_len or self.model_config.max_position_embeddings
        self.layout = KVLayout.build(
            self.model_config.sharing,
            self.model_config.geometry,
            itemsize=kv_dtype.itemsize,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            block_size_multiple=self.ops.block_size_multiple,
        )
        num_pages = pool_pages(config, self.layout, self.max_model_len, self.device)
        self.model = load_model(
            folder,
            self.model_config,
            self.ops,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            show_progress=sys.stderr.isatty(),
        )
        self.kv_pool = KVPool(self.layout, num_pages, dtype=kv_dtype, device=self.device)
        self.ops.adopt(self.kv_pool.arena)
        self.block_manager = BlockManager(self.layout, num_pages, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            max_chunk=1 if self.model_config.sharing.cyclic else None,
        )
        fits = self.layout.max_request_tokens(num_pages)
        # The last token sampled is never read, so it needs no slot.
        self.max_total_tokens = self.max_model_len if fits is None else min(self.max_model_len, fits + 1)
        self.tokenizer = Tokenizer.of_model(folder, config.tokenizer)
        self.intake = Intake(
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            max_logprobs=config.max_logprobs,
            max_model_len=self.max_model_len,
            max_total_tokens=self.max_total_tokens,
            check_fits=self.scheduler.check_fits,
            seed=config.seed,
        )
        self.inbox = Inbox(config.max_waiting)
        self._stepping = threading.Lock()  # held by the thread that steps; the next two are its own
        self._sample_of: dict[int, tuple[Answer, Sample]] = {}  # by request key
        self._changed: dict[int, Answer] = {}  # answers to hand out, by the key of their first request
        log_kv_report(self.kv_report(), self.max_total_tokens, f"{self.dtype} on {self.device}, {self.ops.name}")

    # ---------------------------------------------------------------- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; the answers come in prompt order.

        A prompt is text, token ids or {"prompt_token_ids": [...]}; `sampling_params` are for all, or one for each.
        `use_tqdm` shows a progress bar on stderr, if that is a terminal.

        Raises:
            RequestError: a prompt or parameter cannot be served; then none of them has run.
            EngineError: a step failed.
        """
        return self._run(prompt_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several, through the model's chat template.

        Raises:
            RequestError, EngineError: as `generate`; also if there is no template or it refuses the messages.
        """
        render = self.intake.need_tokenizer().render_chat
        prompts = [{"prompt_token_ids": render(conversation)} for conversation in conversation_list(messages)]
        return self._run(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the growing answer to one prompt, the last one with `finished`. Leaving the loop aborts the request."""
        outputs: deque[RequestOutput] = deque()
        answer = self.intake.prepare(prompt, sampling_params or SamplingParams(), on_output=outputs.append)
        self._enqueue([answer], bounded=False)
        try:
            while not (outputs and outputs[0].finished):
                if outputs:
                    yield outputs.popleft()
                else:
                    self.step()
            answer.raise_error()
            yield outputs.popleft()
        finally:
            self.abort(answer.request_id)

    # ---------------------------------------------------------------- one step at a time

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_output: OnOutput | None = None,
        final_only: bool = False,
    ) -> str:
        """Queue a request for the coming steps; returns its id (made up if None is given).

        `on_output` is called by the stepping thread with each output, or with `final_only` the last.

        Raises:
            RequestError: it cannot be served as asked, or a request of this id is under way.
            QueueFull: too many wait already.
        """
        params = sampling_params or SamplingParams()
        answer = self.intake.prepare(prompt, params, request_id=request_id, on_output=on_output, final_only=final_only)
        self._enqueue([answer], bounded=True)
        return answer.request_id

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is and free its blocks, at once or after the step under way.

        Unknown ids are ignored: the request may just have ended.
        """
        if self.inbox.abort(request_id):
            self._settle()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.inbox.num_arrivals or self.inbox.has_aborts or self.scheduler.has_work)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that it advanced.

        If the model fails, the requests of this step end with `finish_reason` "error"; all others go on.
        """
        with self._stepping:
            self._take_in()
            scheduled = self.scheduler.schedule()
            if scheduled:
                try:
                    tokens = self._compute(scheduled)
                except BaseException as error:  # whatever it is, it must stay with the requests that ran
                    self._fail(scheduled, error)
                    if not isinstance(error, Exception):
                        raise
                    log.exception("a step failed; its %d requests ended", len(scheduled))
                else:
                    self.scheduler.update(scheduled, tokens)
                    self._extend_answers(scheduled)
            outputs = self._deliver()
        return outputs + self._settle()

    # ---------------------------------------------------------------- questions

    def kv_report(self) -> dict[str, Any]:
        """What the sharing map buys in this engine: see `report.kv_report`."""
        return kv_report(self.layout, self.kv_pool.num_pages, self.max_model_len, self.model_config.num_heads)

    def stats(self) -> dict[str, int]:
        """Counts of the moment: requests running and waiting, KV blocks used and in all, preemptions so far."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + self.inbox.num_arrivals,
            "blocks_used": self.block_manager.num_used,
            "blocks_total": self.block_manager.num_pages,
            "preemptions": self.scheduler.num_preemptions,
        }

    # ---------------------------------------------------------------- the step, in parts

    @torch.inference_mode()
    def _compute(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        """Batch, model and sampler: one token for each scheduled request that samples."""
        batch, plan = batches.build(scheduled, self.block_manager, self.device)
        hidden = self.ops.run(self.model, batch, self.kv_pool, eager=self.config.enforce_eager)  # (T', H)
        logits = self.model.logits(hidden[plan.rows])  # (R, V)
        for rows in plan.prompt:
            self._add_prompt_logprobs(rows, logits)
        requests = [item.request for item in scheduled if item.samples]
        if not requests:
            return []
        sampled = logits[plan.sampled] if plan.prompt else logits  # (S', V)
        tokens = sampling.sample(sampled, requests, self.ops.argmax)
        self._add_logprobs(requests, sampled, tokens)
        return tokens

    def _add_prompt_logprobs(self, rows: batches.PromptRows, logits: Tensor) -> None:
        """Rows at positions i tell the logprobs of the prompt's tokens i + 1."""
        request, answer = rows.request, self._sample_of[rows.request.key][0]
        part = logits[rows.first_row : rows.first_row + rows.stop - rows.start]
        actual = request.prompt_token_ids[rows.start + 1 : rows.stop + 1]
        entries = sampling.logprobs(part, actual, [request.params.prompt_logprobs or 0] * len(actual))
        answer.add_logprobs(entries, answer.prompt_logprobs)
        request.num_prompt_logprobs += len(actual)

    def _add_logprobs(self, requests: Sequence[Request], logits: Tensor, tokens: Sequence[int]) -> None:
        wanted = [(row, request.params.logprobs) for row, request in enumerate(requests)]
        rows, num_top = [row for row, k in wanted if k is not None], [k for _, k in wanted if k is not None]
        if not rows:
            return
        for row, entry in zip(rows, sampling.logprobs(logits[rows], [tokens[row] for row in rows], num_top)):
            answer, sample = self._sample_of[requests[row].key]
            answer.add_logprobs([entry], sample.logprobs)

    def _extend_answers(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Turn the sampled tokens into text, and end what a stop string ends."""
        for item in scheduled:
            if item.samples:
                answer, sample = self._sample_of[item.request.key]
                self._changed[answer.key] = answer
                stop = answer.attempt(sample.extend)
                if stop is not None:
                    self.scheduler.finish(item.request, "stop", stop)
            answer = self._sample_of[item.request.key][0]
            if answer.error is not None:  # its text could not be made: it ends, and nobody else
                self._end(answer, "error")

    def _fail(self, scheduled: Sequence[ScheduledRequest], error: BaseException) -> None:
        self.scheduler.fail(scheduled)
        for item in scheduled:
            answer = self._sample_of[item.request.key][0]
            answer.error = error
            self._end(answer, "error")

    def _end(self, answer: Answer, reason: str) -> None:
        for sample in answer.samples:
            self.scheduler.finish(sample.request, reason)
        self._changed[answer.key] = answer

    def _settle(self) -> list[RequestOutput]:
        """Carry out aborts that no step under way will see."""
        outputs: list[RequestOutput] = []
        while self.inbox.has_aborts and self._stepping.acquire(blocking=False):
            try:
                self._take_in()
                outputs += self._deliver()
            finally:
                self._stepping.release()
        return outputs

    def _deliver(self) -> list[RequestOutput]:
        """Hand every answer that changed to its caller, and forget those that are finished."""
        outputs = []
        for answer in self._changed.values():
            finished = answer.finished
            if finished:
                self._forget(answer)
            if finished or not answer.final_only:
                outputs.append(answer.output())
                answer.deliver(outputs[-1])
        self._changed.clear()
        return outputs

    def _forget(self, answer: Answer) -> None:
        self.inbox.forget(answer)
        for sample in answer.samples:
            self._sample_of.pop(sample.request.key, None)

    # ---------------------------------------------------------------- taking requests in

    def _run(self, prompts: Sequence[Prompt], sampling_params: Params, use_tqdm: bool) -> list[RequestOutput]:
        """Serve many prompts to the end."""
        params = one_each(prompts, sampling_params)
        done: dict[str, RequestOutput] = {}
        show = use_tqdm and sys.stderr.isatty()
        with tqdm(total=len(prompts), desc="Processed prompts", unit="prompt", disable=not show) as bar:

            def collect(output: RequestOutput) -> None:
                done[output.request_id] = output
                bar.update()

            prepare = self.intake.prepare
            answers = [prepare(p, q, on_output=collect, final_only=True) for p, q in zip(prompts, params)]
            self._enqueue(answers, bounded=False)
            try:
                while len(done) < len(answers):
                    self.step()
            finally:
                for answer in answers:
                    self.abort(answer.request_id)
        for answer in answers:
            answer.raise_error()
        return [done[answer.request_id] for answer in answers]

    def _enqueue(self, answers: Sequence[Answer], *, bounded: bool) -> None:
        """Hand checked requests to the stepping thread, all or none; `bounded` by the waiting queue."""
        room = self.scheduler.room if bounded else None
        self.inbox.put(answers, room=room, num_waiting=len(self.scheduler.waiting))

    def _take_in(self) -> None:
        """Carry out what was asked since the last step."""
        arrivals, aborts = self.inbox.take()
        for answer in arrivals:
            for sample in answer.samples:
                self._sample_of[sample.request.key] = (answer, sample)
                self.scheduler.add(sample.request)
        for answer in aborts:
            self._end(answer, "abort")
