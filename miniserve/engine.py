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
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from miniserve import batch as batches
from miniserve import sampling
from miniserve.answer import Answer, OnOutput, Sample
from miniserve.config import EngineConfig
from miniserve.errors import ConfigError, EngineError, QueueFull, RequestError
from miniserve.kvcache.block_manager import BlockManager
from miniserve.kvcache.layout import KVLayout
from miniserve.kvcache.pool import KVPool
from miniserve.models import load_config, load_model
from miniserve.ops import load_ops
from miniserve.report import draw_report
from miniserve.request import Request, RequestOutput, SamplingParams, shorten, token_id
from miniserve.scheduler.scheduler import ScheduledRequest, Scheduler
from miniserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}."""


class Engine:
    """Serve a model folder from Python: `Engine(model, **settings)`, the settings being those of `EngineConfig`.

    Raises:
        MiniserveError: the folder or a setting cannot be used; the message says why and what to do.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.config = config = EngineConfig.build(model, settings)
        folder = Path(config.model)
        self.model_config = load_config(folder, kv_sharing=config.kv_sharing, overrides=config.hf_overrides)
        self.device = _pick_device(config.device)
        self.dtype = _pick_dtype(config.dtype, self.model_config.dtype, self.device)
        self.ops = load_ops(config.ops)
        self.max_model_len = config.model_len or self.model_config.max_position_embeddings
        self.layout = KVLayout.build(
            self.model_config.sharing,
            self.model_config.geometry,
            itemsize=self.dtype.itemsize,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            block_size_multiple=self.ops.block_size_multiple,
        )
        num_pages = self._num_pages()
        self.model = load_model(
            folder,
            self.model_config,
            self.ops,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            show_progress=sys.stderr.isatty(),
        )
        self.kv_pool = KVPool(self.layout, num_pages, dtype=self.dtype, device=self.device)
        self.block_manager = BlockManager(self.layout, num_pages, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
        )
        fits = self.layout.max_request_tokens(num_pages)
        # The last token sampled is never read, so it needs no slot.
        self.max_total_tokens = self.max_model_len if fits is None else min(self.max_model_len, fits + 1)
        self.tokenizer = _load_tokenizer(folder, config.tokenizer)
        self._keys = count()
        self._seeds = Random(config.seed)
        self._answers: dict[str, Answer] = {}
        self._sample_of: dict[int, tuple[Answer, Sample]] = {}  # by request key
        self._arrivals: deque[Answer] = deque()
        self._aborts: deque[Answer] = deque()
        self._intake = threading.Lock()  # guards keys, seeds, _answers and the two queues
        self._stepping = threading.Lock()
        self._log_start()

    # ---------------------------------------------------------------- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; the answers come in prompt order.

        Args:
            prompts: text, token ids or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: one for all, or one per prompt; default `SamplingParams()`.
            use_tqdm: a progress bar on stderr, if that is a terminal.

        Raises:
            RequestError: a prompt or parameter cannot be served; then none of them has run.
            EngineError: a step failed.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several, through the model's chat template.

        Raises:
            RequestError, EngineError: as `generate`; also if there is no template or it refuses the messages.
        """
        if not messages:
            raise RequestError("messages is empty; give at least one", "messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self._need_tokenizer().render_chat(c)} for c in conversations]
        return self._run(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the growing answer to one prompt, the last one with `finished`. Leaving the loop aborts the request."""
        outputs: deque[RequestOutput] = deque()
        answer = self._prepare(prompt, sampling_params or SamplingParams(), on_output=outputs.append)
        self._enqueue([answer])
        try:
            while not (outputs and outputs[0].finished):
                if outputs:
                    yield outputs.popleft()
                else:
                    self.step()
            _raise_error(answer)
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

        `on_output` is called by the stepping thread with each output of this request, or only with the last.

        Raises:
            RequestError: it cannot be served as asked, or a request of this id is under way.
            QueueFull: too many wait already.
        """
        answer = self._prepare(
            prompt,
            sampling_params or SamplingParams(),
            request_id=request_id,
            on_output=on_output,
            final_only=final_only,
        )
        with self._intake:
            new, pending = len(answer.samples), sum(len(other.samples) for other in self._arrivals)
            if new + pending > self.scheduler.room:
                raise QueueFull(
                    f"{len(self.scheduler.waiting) + pending} requests are waiting already "
                    f"(max_waiting={self.config.max_waiting}); try again later"
                )
        self._enqueue([answer])
        return answer.request_id

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is and free its blocks, at once or after the step under way.

        Unknown ids are ignored: the request may just have ended.
        """
        with self._intake:
            if request_id in self._answers:
                self._aborts.append(self._answers[request_id])
        if self._aborts and self._stepping.acquire(blocking=False):
            try:
                self._take_in()
                self._deliver()
            finally:
                self._stepping.release()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._arrivals or self._aborts or self.scheduler.has_work)

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
                except Exception as error:  # whatever it is, it must stay with the requests that ran
                    log.exception("a step failed; its %d requests end", len(scheduled))
                    self._fail(scheduled, error)
                else:
                    self.scheduler.update(scheduled, tokens)
                    self._extend_answers(scheduled)
            return self._deliver()

    # ---------------------------------------------------------------- questions

    def kv_report(self) -> dict[str, Any]:
        """What the sharing map buys in this engine: see `KVLayout.report`."""
        return self.layout.report(self.kv_pool.num_pages, self.max_model_len)

    def token_text(self, token_id: int) -> str:
        """One token as text; `token_id:N` without a tokenizer."""
        return f"token_id:{token_id}" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def stats(self) -> dict[str, int]:
        """Counts of the moment: requests running and waiting, KV blocks used and in all, preemptions so far."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self._arrivals),
            "blocks_used": self.block_manager.num_used,
            "blocks_total": self.block_manager.num_pages,
            "preemptions": self.scheduler.num_preemptions,
        }

    # ---------------------------------------------------------------- the step, in parts

    @torch.inference_mode()
    def _compute(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        """Batch, model and sampler: one token for each scheduled request that samples."""
        batch, plan = batches.build(scheduled, self.block_manager, self.device)
        hidden = self.model(batch, self.kv_pool)  # (T', H)
        logits = self.model.logits(hidden[plan.rows])  # (R, V)
        for rows in plan.prompt:
            self._add_prompt_logprobs(rows, logits)
        requests = [item.request for item in scheduled if item.samples]
        if not requests:
            return []
        sampled = logits[plan.sampled]  # (S', V)
        tokens = sampling.sample(sampled, requests)
        self._add_logprobs(requests, sampled, tokens)
        return tokens

    def _add_prompt_logprobs(self, rows: batches.PromptRows, logits: Tensor) -> None:
        """Rows at positions i tell the logprobs of the prompt's tokens i + 1."""
        request, answer = rows.request, self._sample_of[rows.request.key][0]
        if request.params.prompt_logprobs is None or answer.prompt_logprobs is None:
            return
        part = logits[rows.first_row : rows.first_row + rows.stop - rows.start]
        actual = request.prompt_token_ids[rows.start + 1 : rows.stop + 1]
        entries = sampling.logprobs(part, actual, [request.params.prompt_logprobs] * len(actual))
        answer.prompt_logprobs.extend(answer.named(entries))
        request.num_prompt_logprobs += len(actual)

    def _add_logprobs(self, requests: Sequence[Request], logits: Tensor, tokens: Sequence[int]) -> None:
        wanted = [(row, request.params.logprobs) for row, request in enumerate(requests)]
        rows, num_top = [row for row, k in wanted if k is not None], [k for _, k in wanted if k is not None]
        if not rows:
            return
        for row, entry in zip(rows, sampling.logprobs(logits[rows], [tokens[row] for row in rows], num_top)):
            answer, sample = self._sample_of[requests[row].key]
            if sample.logprobs is not None:
                sample.logprobs.extend(answer.named([entry]))

    def _extend_answers(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Turn the sampled tokens into text, and end what a stop string ends."""
        for item in scheduled:
            if item.samples:
                answer, sample = self._sample_of[item.request.key]
                stop = sample.extend()
                if stop is not None:
                    self.scheduler.finish(item.request, "stop", stop)
                answer.changed = True

    def _fail(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> None:
        self.scheduler.fail(scheduled)
        for item in scheduled:
            answer, _ = self._sample_of[item.request.key]
            answer.error = error
            self._end(answer, "error")

    def _end(self, answer: Answer, reason: str) -> None:
        for sample in answer.samples:
            self.scheduler.finish(sample.request, reason)
        answer.changed = True

    def _deliver(self) -> list[RequestOutput]:
        """Hand every answer that changed to its caller, and forget those that are finished."""
        outputs = []
        for answer in [answer for answer in self._answers.values() if answer.changed]:
            answer.changed = False
            finished = answer.finished
            if finished:
                self._forget(answer)
            if finished or not answer.final_only:
                outputs.append(answer.output())
                if answer.on_output is not None:
                    answer.on_output(outputs[-1])
        return outputs

    def _forget(self, answer: Answer) -> None:
        with self._intake:
            del self._answers[answer.request_id]
        for sample in answer.samples:
            self._sample_of.pop(sample.request.key, None)

    # ---------------------------------------------------------------- taking requests in

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Serve many prompts to the end."""
        params = _one_each(prompts, sampling_params)
        done: dict[str, RequestOutput] = {}
        show = use_tqdm and sys.stderr.isatty()
        with tqdm(total=len(prompts), desc="Processed prompts", unit="prompt", disable=not show) as bar:

            def collect(output: RequestOutput) -> None:
                done[output.request_id] = output
                bar.update()

            answers = [self._prepare(p, q, on_output=collect, final_only=True) for p, q in zip(prompts, params)]
            self._enqueue(answers)
            try:
                while len(done) < len(answers):
                    self.step()
            finally:
                for answer in answers:
                    self.abort(answer.request_id)
        for answer in answers:
            _raise_error(answer)
        return [done[answer.request_id] for answer in answers]

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
        final_only: bool = False,
    ) -> Answer:
        """Make all checks and the answer to be filled; nothing in the engine has changed yet."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", "sampling_params"
            )
        params.validate(vocab_size=self.model_config.vocab_size, max_logprobs=self.config.max_logprobs)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop: the model folder has no tokenizer, so there is no text to search", "stop")
        text, ids = self.encode(prompt)
        room = self.max_total_tokens - len(ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: there is room for {room} tokens after the prompt; lower it",
                "min_tokens",
            )
        with self._intake:
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            keys = [next(self._keys) for _ in range(params.n)]
        requests = [self._request(params, ids, keys[0], key, seed + i) for i, key in enumerate(keys)]
        return Answer(
            request_id=f"request-{keys[0]}" if request_id is None else request_id,
            prompt=text,
            samples=[Sample(request, self.tokenizer) for request in requests],
            tokenizer=self.tokenizer,
            on_output=on_output,
            final_only=final_only,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],  # nothing predicts the first token
        )

    def _request(self, params: SamplingParams, ids: list[int], parent_key: int, key: int, seed: int) -> Request:
        """One sample's request. Prompt logprobs are the same for all samples: the first computes them."""
        own = params if key == parent_key else replace(params, prompt_logprobs=None)
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos())
        return Request(
            key=key,
            parent_key=parent_key,
            prompt_token_ids=ids,
            params=own,
            max_total_tokens=self.max_total_tokens,
            stop_token_ids=stop_ids,
            seed=seed,
            num_prompt_logprobs=0 if own.prompt_logprobs is None else 1,
        )

    def _eos(self) -> frozenset[int]:
        ids = self.model_config.eos_token_ids
        if not ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids = (self.tokenizer.eos_token_id,)
        return frozenset(token for token in ids if token < self.model_config.vocab_size)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text (None if it came as ids) and its token ids, checked.

        Raises:
            RequestError: empty, too long for context or KV pool, of no known form, or ids outside the vocabulary.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt and "prompt" not in prompt:
                raise RequestError('prompt: a mapping needs "prompt_token_ids" or "prompt"', "prompt")
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if not isinstance(prompt, (str, list, tuple)):
            raise RequestError(f"prompt must be text or a list of token ids, not {shorten(prompt)}", "prompt")
        if not prompt:
            raise RequestError("prompt is empty; give at least one token", "prompt")
        text = prompt if isinstance(prompt, str) else None
        limit = self.max_model_len
        too_long = f"the maximum context length of {limit} tokens (max_model_len); shorten it"
        if text is not None and len(text) > 128 * limit:  # no token is that long: do not even start
            message = f"the prompt has {len(text)} characters, far more than {too_long}"
            raise RequestError(message, "prompt", "context_length_exceeded")
        ids = list(prompt) if text is None else self._need_tokenizer().encode(text)
        if len(ids) >= limit:
            message = f"the prompt has {len(ids)} tokens, which with one token to generate exceeds {too_long}"
            raise RequestError(message, "prompt", "context_length_exceeded")
        if not ids:
            raise RequestError("prompt: the text gives no tokens; give at least one", "prompt")
        for token in ids:
            token_id("prompt", token, self.model_config.vocab_size)
        self.scheduler.check_fits(ids)
        return text, ids

    def _enqueue(self, answers: Sequence[Answer]) -> None:
        """Hand checked requests to the stepping thread, all or none."""
        with self._intake:
            for answer in answers:
                if answer.request_id in self._answers:
                    raise RequestError(
                        f"request_id {shorten(answer.request_id)} is under way; use another", "request_id"
                    )
            for answer in answers:
                self._answers[answer.request_id] = answer
                self._arrivals.append(answer)

    def _take_in(self) -> None:
        """Carry out what was asked since the last step."""
        while self._arrivals:
            answer = self._arrivals.popleft()
            for sample in answer.samples:
                self._sample_of[sample.request.key] = (answer, sample)
                self.scheduler.add(sample.request)
        while self._aborts:
            self._end(self._aborts.popleft(), "abort")

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "prompt: the model folder has no tokenizer; give token ids, or set tokenizer to a folder with one",
                "prompt",
            )
        return self.tokenizer

    # ---------------------------------------------------------------- start

    def _num_pages(self) -> int:
        """N: the pages of the budget given, or of what `max_num_seqs` full-length requests can use at most."""
        budget = self.config.kv_cache_bytes
        if budget is None:
            full_request = self.layout.blocks_for(self.max_model_len, self.config.max_num_batched_tokens)
            affordable = self.layout.num_pages(_free_memory(self.device) // 4)
            return max(1, min(self.config.max_num_seqs * full_request, affordable))
        num_pages = self.layout.num_pages(budget)
        if num_pages < len(self.layout.classes):
            raise ConfigError(
                f"kv_cache_memory={budget} bytes hold {num_pages} blocks of {self.layout.page_bytes} bytes; "
                f"this model needs at least {len(self.layout.classes)}, one per retention class"
            )
        return num_pages

    def _log_start(self) -> None:
        config, kind = self.config, type(self.ops).__name__
        log.info("%s: %s, %s on %s, %s", config.model, self.model_config.model_type, self.dtype, self.device, kind)
        log.info("KV cache\n%s", draw_report(self.kv_report()))
        if self.max_total_tokens < self.max_model_len:
            log.warning(
                "the KV pool holds %d tokens of one request, less than max_model_len=%d; longer ones end early "
                "with finish_reason 'length'. Raise kv_cache_memory to change that",
                self.max_total_tokens - 1,
                self.max_model_len,
            )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(f"prompts must be text, token ids or a list of these, not {shorten(prompts)}", "prompt")
    is_ids = bool(prompts) and not isinstance(prompts[0], (str, Mapping, list, tuple))
    return [prompts] if is_ids else list(prompts)


def _one_each(
    prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one for all or one for each",
            "sampling_params",
        )
    return list(sampling_params)


def _raise_error(answer: Answer) -> None:
    if answer.error is not None:
        raise EngineError(f"the step that ran this request failed: {answer.error!r}") from answer.error


def _load_tokenizer(folder: Path, other: str | None) -> Tokenizer | None:
    if other is not None:
        return Tokenizer(Path(other))
    return Tokenizer(folder) if Tokenizer.exists(folder) else None


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: use auto, cpu or cuda") from None


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _pick_dtype(asked: str, stored: Any, device: torch.device) -> torch.dtype:
    """The dtype asked for; `auto` keeps the checkpoint's, but on a CPU without bfloat16 instructions takes float32."""
    if asked != "auto":
        return _DTYPES[asked]
    dtype = _DTYPES.get(str(stored).removeprefix("torch."), torch.float32)
    if device.type == "cpu" and not (dtype == torch.bfloat16 and _cpu_has_bfloat16()):
        return torch.float32
    return dtype


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30
