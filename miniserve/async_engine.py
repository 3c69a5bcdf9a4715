"""One thread steps the engine; every caller awaits its own stream.

    event loop                              engine thread
    ──────────                              ─────────────
    submit(prompt) ──add_request──► inbox   while not closing:
         │                                      wait until there is work
         ▼                                      engine.step()
    Stream ◄── queue ◄──────on_output───────────┘

Nothing of the engine runs on the event loop, and nothing of asyncio in the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Callable

from miniserve.engine import Engine, Prompt
from miniserve.errors import EngineError
from miniserve.output import RequestOutput
from miniserve.request import SamplingParams

log = logging.getLogger(__name__)


class Stream:
    """The growing answer of one accepted request, for `async for`. `close` aborts it if it is still under way.

    Each output tells all that came before, so only the newest is kept: whoever reads slowly skips some, and an
    answer that nobody reads does not pile up.
    """

    def __init__(self, owner: AsyncEngine) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._newest: asyncio.Queue[RequestOutput | EngineError] = asyncio.Queue(maxsize=1)
        self._arrived: RequestOutput | EngineError | None = None  # by `put`, not yet seen by the event loop
        self._lock = threading.Lock()  # guards `_arrived`
        self._complete = False  # the last output has come, though perhaps nobody has taken it yet
        self.closed = False
        self.request_id: str | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.closed:
            raise StopAsyncIteration
        output = await self._newest.get()
        if isinstance(output, EngineError):
            self.close()
            raise output
        if output.finished:
            self.close()
            if any(sample.finish_reason == "error" for sample in output.outputs):
                raise EngineError("the step that ran this request failed")
        return output

    def put(self, item: RequestOutput | EngineError) -> None:
        """Take an output, from any thread. One wake-up of the event loop serves all that come before it runs."""
        with self._lock:
            asleep = self._arrived is None
            if asleep or not _is_last(self._arrived):
                self._arrived = item
        if asleep:
            try:
                self._loop.call_soon_threadsafe(self._receive)
            except RuntimeError:  # the loop is closed: nobody waits any more
                log.debug("dropped an output: its event loop is closed")

    def close(self) -> None:
        """End the request, if it has not ended."""
        if not self.closed:
            self.closed = True
            self._owner._release(self)

    def _receive(self) -> None:
        with self._lock:
            item, self._arrived = self._arrived, None
        if item is None or self._complete:
            return
        self._complete = _is_last(item)
        if self._newest.full():
            self._newest.get_nowait()
        self._newest.put_nowait(item)


def _is_last(item: RequestOutput | EngineError | None) -> bool:
    return isinstance(item, EngineError) or (item is not None and item.finished)


class AsyncEngine:
    """An `Engine` for asyncio. Owns the stepping thread; `close` ends it.

    `on_death` is called, from the thread, if the thread dies of something that is no fault of a request.
    """

    def __init__(self, engine: Engine, *, on_death: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self._on_death = on_death
        self._work = threading.Condition()
        self._closing = False
        self._death: BaseException | None = None
        self._streams: set[Stream] = set()
        self._thread = threading.Thread(target=self._run, name="miniserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside a kernel must not outlive the interpreter

    @property
    def alive(self) -> bool:
        """Whether requests are being served."""
        return self._death is None and not self._closing

    async def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, final_only: bool = False
    ) -> Stream:
        """Hand in a request; its outputs (or only the last) come from the stream that is returned.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine has stopped.
        """
        stream = Stream(self)
        self._streams.add(stream)
        try:
            self._raise_if_stopped()
            # In a thread of its own: tokenising a long prompt takes a while.
            await asyncio.to_thread(self._hand_in, stream, prompt, sampling_params, final_only)
            self._raise_if_stopped()
        except BaseException:
            stream.close()
            raise
        return stream

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing answer. Leaving the loop, or cancelling it, aborts the request.

        Raises:
            RequestError, EngineError: as `submit`; also if the step that ran this request failed.
        """
        stream = await self.submit(prompt, sampling_params)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The whole answer to one prompt. Cancelling it aborts the request.

        Raises:
            RequestError, EngineError: as `stream`.
        """
        stream = await self.submit(prompt, sampling_params, final_only=True)
        try:
            return await anext(stream)
        finally:
            stream.close()

    def close(self, timeout: float = 10.0) -> None:
        """Stop stepping; requests still under way get an `EngineError`. Returns within `timeout` seconds."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake()
        self._thread.join(timeout)
        self._fail_streams("the engine was stopped")

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._work:
                    while not (self._closing or self.engine.has_unfinished_requests()):
                        self._work.wait()
                if not self._closing:
                    self.engine.step()
        except BaseException as error:  # nothing may end this thread unnoticed
            log.critical("the engine thread died", exc_info=True)
            self._death = error
            self._fail_streams("the engine has died")
            if self._on_death is not None:
                self._on_death()

    # ---------------------------------------------------------------- in and out

    def _hand_in(
        self, stream: Stream, prompt: Prompt, sampling_params: SamplingParams | None, final_only: bool
    ) -> None:
        stream.request_id = self.engine.add_request(
            None, prompt, sampling_params, on_output=stream.put, final_only=final_only
        )
        self._wake()
        if stream.closed:  # the caller went away meanwhile, when there was nothing to abort yet
            self._release(stream)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _release(self, stream: Stream) -> None:
        self._streams.discard(stream)
        if stream.request_id is not None:
            self.engine.abort(stream.request_id)
            self._wake()

    def _raise_if_stopped(self) -> None:
        if self._death is not None:
            raise EngineError("the engine has died")
        if self._closing:
            raise EngineError("the engine was stopped")

    def _fail_streams(self, message: str) -> None:
        for stream in list(self._streams):
            stream.put(EngineError(message))
