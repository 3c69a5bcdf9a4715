"""The HTTP endpoint: OpenAI's completions on FastAPI. Home of fastapi, starlette, uvicorn and sse-starlette.

    body ─► protocol.parse ─► SamplingParams ─► AsyncEngine.submit ─► Stream ─► protocol.* ─► JSON or SSE
    (chat: ─► the model's template ─► token ids)

Handlers translate and nothing more: what a value means is decided by `SamplingParams.validate`, what fits by
the engine. All errors have OpenAI's shape; a client that goes away aborts its requests.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from miniserve import __version__
from miniserve.async_engine import AsyncEngine, Stream
from miniserve.chat_protocol import ChatRequest, ChatWriter, chat_completion
from miniserve.checks import check_token_id
from miniserve.engine import Engine
from miniserve.errors import EngineError, QueueFull, RequestError
from miniserve.output import RequestOutput
from miniserve.protocol import (
    ChoiceWriter,
    CompletionRequest,
    DetokenizeRequest,
    Texts,
    TokenizeRequest,
    completion,
    error_body,
    parse,
    usage,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
PING_SECONDS = 15
SEND_TIMEOUT_SECONDS = 30
"""A client that does not read for so long is given up and its request aborted."""
LAST_WORDS_SECONDS = 2
"""Time to tell clients that the engine was stopped, when a server shuts down."""

T = TypeVar("T")


def create_app(async_engine: AsyncEngine, model_name: str, api_key: str | None = None) -> FastAPI:
    """The application around an engine: any ASGI server can run it. With a key, all but health checks need it."""
    app = FastAPI(title="miniserve", docs_url=None, redoc_url=None)
    if api_key is not None:
        app.add_middleware(_KeyGuard, key=api_key)
    texts = _texts(async_engine.engine)
    created = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are served, else 503."""
        return Response(status_code=200 if async_engine.alive else 503)

    @app.get("/live")
    async def live() -> Response:
        """200 as long as the process answers."""
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Of this package."""
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [_card(async_engine.engine, model_name, created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by its name."""
        return _unknown_model(name, model_name) or JSONResponse(_card(async_engine.engine, model_name, created))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Complete one or many prompts, whole or as a stream of server-sent events."""
        body = parse(CompletionRequest, await _read_json(request))
        head = _head("cmpl", "text_completion", model_name)
        form = _Form(
            chunk_head=head,
            writer=lambda index: ChoiceWriter(body, index, texts),
            whole=lambda answers: completion(body, answers, head, texts),
            usage=lambda answers: usage(answers, prompt_alone=body.is_prompt_alone),
        )
        return _unknown_model(body.model, model_name) or await _answer(request, async_engine, body, body.prompts, form)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        body = parse(ChatRequest, await _read_json(request))
        head = _head("chatcmpl", "chat.completion", model_name)
        form = _Form(
            chunk_head=head | {"object": "chat.completion.chunk"},
            writer=lambda index: ChatWriter(body, index, texts),
            whole=lambda answers: chat_completion(body, answers, head, texts),
            usage=usage,
        )

        def prompts() -> list[Any]:
            tokenizer = async_engine.engine.intake.need_tokenizer()
            ids = tokenizer.render_chat(body.conversation(), **body.template_options())
            return [{"prompt_token_ids": ids}]

        return _unknown_model(body.model, model_name) or await _answer(request, async_engine, body, prompts, form)

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of a conversation."""
        body = parse(TokenizeRequest, await _read_json(request))
        ids = await asyncio.to_thread(_tokenized, async_engine.engine, body)
        answer = {"count": len(ids), "max_model_len": async_engine.engine.max_model_len, "tokens": ids}
        strings = [texts.of_token(token) for token in ids] if body.return_token_strs else None
        return _unknown_model(body.model, model_name) or JSONResponse(answer | {"token_strs": strings})

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = parse(DetokenizeRequest, await _read_json(request))
        for token in body.tokens:
            check_token_id("tokens", token, async_engine.engine.model_config.vocab_size)
        text = await asyncio.to_thread(async_engine.engine.intake.need_tokenizer().decode, body.tokens)
        return _unknown_model(body.model, model_name) or JSONResponse({"prompt": text})

    _add_error_handlers(app)
    return app


def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str,
    api_key: str | None = None,
    shutdown_timeout: float = 30.0,
) -> int:
    """Serve until SIGTERM or SIGINT; requests under way get `shutdown_timeout` seconds to end. Returns an exit code."""
    async_engine = AsyncEngine(engine, on_death=lambda: server.give_up())
    server = _Server(
        uvicorn.Config(
            create_app(async_engine, model_name, api_key),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=ceil(shutdown_timeout) + LAST_WORDS_SECONDS,
            limit_concurrency=engine.config.max_num_seqs + engine.config.max_waiting + 64,
        ),
        async_engine,
        shutdown_timeout,
    )
    # uvicorn shuts down in an orderly way and then raises the signal again; that must not end us with an error.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        log.info("serving %s on http://%s:%d", model_name, host, port)
        server.run()
    except KeyboardInterrupt:
        log.info("interrupted")
    finally:
        signal.signal(signal.SIGTERM, previous)
        async_engine.close()
    return 0 if server.started and not server.gave_up else 1


class _KeyGuard:
    """Lets nobody in who does not bring the key, but for the two paths that load balancers ask."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/live"):
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        refusal = _error(401, "the API key is missing or wrong", "invalid_request_error", "invalid_api_key")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        await refusal(scope, receive, send)


class _Server(uvicorn.Server):
    """Stops the engine when the time is up for requests under way, so that each is told and none just cut off."""

    def __init__(self, config: uvicorn.Config, async_engine: AsyncEngine, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._async_engine = async_engine
        self._shutdown_timeout = shutdown_timeout
        self.gave_up = False

    def give_up(self) -> None:
        """Shut down because there is no engine any more."""
        self.gave_up = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for requests under way, the engine being stopped after `shutdown_timeout` seconds."""
        stopping = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._async_engine.close)
        for listener in self.servers:
            listener.close()
        await asyncio.sleep(0.1)  # uvicorn would wait for a connection that is just being accepted to end by itself
        await super().shutdown(sockets)
        stopping.cancel()


# -------------------------------------------------------------------- requests


@dataclass(frozen=True)
class _Form:
    """How an endpoint writes its answers."""

    chunk_head: dict[str, Any]  # of each event of a stream
    writer: Callable[[int], ChoiceWriter | ChatWriter]  # of the choice of this index
    whole: Callable[[Sequence[RequestOutput]], dict[str, Any]]
    usage: Callable[[Sequence[RequestOutput]], dict[str, Any]]


async def _answer(
    request: Request,
    async_engine: AsyncEngine,
    body: CompletionRequest | ChatRequest,
    prompts: Callable[[], list[Any]],
    form: _Form,
) -> Response:
    """Hand in all prompts of a body and answer in its form, or give up if the client goes away."""
    streams = await _until_disconnect(request, _submit(async_engine, body, prompts))
    if streams is None:
        return Response(status_code=499)
    if body.stream:
        return _EventStream(_events(streams, body, form), streams)
    answers = await _until_disconnect(request, _last_outputs(streams))
    return Response(status_code=499) if answers is None else JSONResponse(form.whole(answers))


async def _submit(
    async_engine: AsyncEngine, body: CompletionRequest | ChatRequest, prompts: Callable[[], list[Any]]
) -> list[Stream]:
    """Hand in all prompts of a body, or none. Making them may take a while: a template is a program."""
    params = body.sampling_params()
    streams: list[Stream] = []
    try:
        for prompt in await asyncio.to_thread(prompts):
            streams.append(await async_engine.submit(prompt, params, final_only=not body.stream))
    except BaseException:
        _close(streams)
        raise
    return streams


async def _last_outputs(streams: Sequence[Stream]) -> list[RequestOutput]:
    """The whole answers, in prompt order."""
    try:
        return [await anext(stream) for stream in streams]
    finally:
        _close(streams)


async def _events(
    streams: Sequence[Stream], body: CompletionRequest | ChatRequest, form: _Form
) -> AsyncIterator[bytes]:
    """Server-sent events: chunks of all samples as they come, perhaps the usage, then [DONE]."""
    merged: asyncio.Queue[tuple[int, RequestOutput] | EngineError] = asyncio.Queue(maxsize=len(streams))
    readers = [asyncio.create_task(_forward(number, stream, merged)) for number, stream in enumerate(streams)]
    last: dict[int, RequestOutput] = {}
    writers: dict[int, ChoiceWriter | ChatWriter] = {}
    try:
        while len(last) < len(streams) or not all(answer.finished for answer in last.values()):
            item = await merged.get()
            if isinstance(item, EngineError):
                yield _event(error_body(str(item), "server_error"))
                break
            number, answer = item
            last[number] = answer
            for sample in answer.outputs:
                index = number * len(answer.outputs) + sample.index
                if index not in writers:
                    writers[index] = form.writer(index)
                choice = writers[index].write(answer, sample)
                if choice is not None:
                    yield _event({**form.chunk_head, "choices": [choice]})
        else:
            if body.wants_usage:
                yield _event({**form.chunk_head, "choices": [], "usage": form.usage(list(last.values()))})
        yield b"data: [DONE]\n\n"
    finally:
        for reader in readers:
            reader.cancel()
        _close(streams)


class _EventStream(EventSourceResponse):
    """The response of a stream: pings while nothing comes, and closes the streams however it ends."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[Stream]) -> None:
        # Without a grace period streams would be cut off as soon as the server is asked to stop.
        super().__init__(events, ping=PING_SECONDS, send_timeout=SEND_TIMEOUT_SECONDS, shutdown_grace_period=inf)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("gave up a client that has not read for %d seconds", self.send_timeout)
        finally:
            _close(self._streams)  # `events` cannot do it if the client left before it began


async def _forward(number: int, stream: Stream, merged: asyncio.Queue[tuple[int, RequestOutput] | EngineError]) -> None:
    try:
        async for answer in stream:
            await merged.put((number, answer))
    except EngineError as error:
        await merged.put(error)


def _close(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()


async def _until_disconnect(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None (and the work cancelled) if the client goes away first.

    Starlette cancels streaming responses by itself, but not a handler that has not answered yet.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        watching.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_json(request: Request) -> Any:
    """The decoded body, read no further than `MAX_BODY_BYTES`."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON with Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "compressed bodies are not supported; send plain JSON")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes", {"Connection": "close"})
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON") from None


def _tokenized(engine: Engine, body: TokenizeRequest) -> list[int]:
    tokenizer = engine.intake.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    chat = ChatRequest(messages=body.messages or [], add_generation_prompt=body.add_generation_prompt)
    return tokenizer.render_chat(chat.conversation(), **chat.template_options())


def _texts(engine: Engine) -> Texts:
    """The tokenizer's words; without one, prompts read `token_id:3token_id:7`."""
    if engine.tokenizer is not None:
        return Texts(engine.tokenizer.token_text, engine.tokenizer.decode)
    return Texts("token_id:{}".format, lambda ids: "".join(map("token_id:{}".format, ids)))


def _head(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }


def _card(engine: Engine, model_name: str, created: int) -> dict[str, Any]:
    card = {"id": model_name, "object": "model", "created": created, "owned_by": "miniserve"}
    return {**card, "root": model_name, "max_model_len": engine.max_model_len}


def _unknown_model(asked: str | None, model_name: str) -> Response | None:
    """404 if another model than the one there is was asked for."""
    if asked is None or asked == model_name:
        return None
    message = f"the model {asked[:100]!r} does not exist; this server has {model_name!r}"
    return _error(404, message, "invalid_request_error", "model_not_found", "model")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


def _body_schema(model: type[Any]) -> dict[str, Any]:
    """For /openapi.json: the body is read by hand, so that its limits and errors are ours."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


# -------------------------------------------------------------------- errors


def _add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape, none with a path or a traceback in it."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        if isinstance(error, QueueFull):
            return _error(503, str(error), "server_error", "queue_full", retry_after=1)
        return _error(400, str(error), "invalid_request_error", error.code, error.param)

    @app.exception_handler(EngineError)
    async def engine_error(_: Request, error: EngineError) -> Response:
        return _error(500, str(error), "server_error", "engine_error")

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        response = _error(error.status_code, str(error.detail), "invalid_request_error")
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def other_error(_: Request, error: Exception) -> Response:
        log.error("a handler failed", exc_info=error)
        return _error(500, "internal error", "server_error")


def _error(
    status: int,
    message: str,
    kind: str,
    code: str | None = None,
    param: str | None = None,
    retry_after: int | None = None,
) -> Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(error_body(message, kind, code, param), status_code=status, headers=headers)
