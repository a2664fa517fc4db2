"""The HTTP server that agents call: OpenAI's chat completions and responses, and Anthropic's
messages.

    request --form--> AgentCall --queue of its session--> choices --form--> response, or its events

A request's key says which rollout it belongs to. vLLM's protocol classes read the requests. The
sampling settings of a request are the run's, since the trainer must know them: `temperature`,
`top_p` and `seed` are taken and have no effect; what would change what is sampled is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import uvicorn
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from vllm.exceptions import VLLMValidationError

from megarl.apps.gateway.calls import AgentCall, ApiError
from megarl.apps.gateway.forms import Asked, ChatCompletions, Event, Form, unsupported
from megarl.apps.gateway.other_forms import CountTokens, Messages, Responses
from megarl.apps.tools.markup import TurnMarkup
from megarl.environments.codec import Codec
from megarl.settings.agents import AgentConfig

FORMS: tuple[Form, ...] = (ChatCompletions(), Responses(), CountTokens(), Messages())
"""The APIs that the gateway speaks."""
MOST_BYTES = 2**22
"""Longest request."""
MOST_ITEMS = 5_000
"""Most items in all lists of a request: messages, parts of contents, tools."""
MOST_OPEN = 256
"""Calls of one rollout that may be open at the same time."""
ESTABLISHED, CLOSED = 1, 7
"""States of a TCP connection (Linux): both sides may write; it was reset."""
MOST_TOLD = 32
"""Types of tools of which is told that the model is not shown them."""


class OpenRollout(Protocol):
    """What the gateway uses of an `AgentSession`."""

    open: int
    reading: asyncio.Semaphore

    def submit(self, call: AgentCall, is_retry: bool) -> AgentCall: ...


class Agents(Protocol):
    """What the gateway uses of an `AgentKit`."""

    settings: AgentConfig
    markup: TurnMarkup

    @property
    def codec(self) -> Codec: ...

    @property
    def sessions(self) -> Mapping[str, OpenRollout]: ...

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ClientConnection(AutoHTTPProtocol):  # pyright: ignore[reportGeneralTypeIssues]
    """A client's connection, which notes on the call that came in on it when its client leaves, and
    whether the answer was then unread: the kernel resets a connection that is closed with unread
    data, and one that is written to after the client has closed it.
    """

    client: Any
    transport: Any

    def __init__(self, *given: Any, known: dict[Any, ClientConnection], **more: Any) -> None:
        super().__init__(*given, **more)
        self._known, self.left = known, asyncio.Event()
        self.call: AgentCall | None = None
        """The newest call on it."""
        self._was_reset = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._known[self.client] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self._known.pop(self.client, None)
        self.left.set()
        call, self._was_reset = self.call, exc is not None or self._state() == CLOSED
        if call is not None and call.connection is self:
            call.connection = None
            if self._was_reset:
                call.read_at = 0.0
        super().connection_lost(exc)

    def take(self, call: AgentCall) -> None:
        """Note that `call` is to be answered on this connection."""
        self.call, call.connection, call.read_at = call, self, 0.0

    def wrote(self, call: AgentCall) -> None:
        """Note that the whole answer to `call` was written. A client that has closed the connection
        since, as Codex does at an answer's last event, has read it, unless that was a reset.
        """
        if not (self._was_reset if self.left.is_set() else self._state() == CLOSED):
            call.read_at = time.monotonic()

    async def wait(self, call: AgentCall, limit_s: float | None) -> None:
        """Wait until the call is answered or the client has left, for `limit_s` at most."""
        waits = [asyncio.ensure_future(event.wait()) for event in (call.ended, self.left)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def is_open(self) -> bool:
        """Whether the client has not closed it, also if this process was not yet told so."""
        return not self.left.is_set() and self._state() == ESTABLISHED

    def _state(self) -> int:
        sock = self.transport.get_extra_info("socket")
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


async def serve_agents(kit: Agents) -> tuple[int, asyncio.Task[None]]:
    """Serve the model to the agents of `kit` over HTTP, on a free port of the loopback address, in
    this event loop, to the end of the process. Returns (port, open already; the server's task).
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    gateway = Gateway(kit)
    server = _Server(
        uvicorn.Config(
            gateway,
            http=partial(ClientConnection, known=gateway.connections),  # pyright: ignore[reportArgumentType]
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=600,
        )
    )
    return int(listener.getsockname()[1]), asyncio.create_task(server.serve([listener]))


class Gateway:
    """The ASGI application that answers the calls of the agents of `kit`."""

    def __init__(self, kit: Agents) -> None:
        """`kit`: the agents' settings, open rollouts, chat template and codec."""
        self._kit = kit
        self._is_for_tools: bool | None = None
        """Whether the chat template shows tools to the model; None until a call has tools."""
        self._left_out: set[str] = set()
        """Types of tools that the model is not shown, and of which the user has been told so."""
        self.connections: dict[Any, ClientConnection] = {}
        """{(host, port) of a client: its connection}"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        forms = {form.path: form for form in FORMS if request.method == "POST"}
        form = forms.get(request.url.path)
        try:
            if form is None:
                return await _json(self._page(request))(scope, receive, send)
            session = self._session(request)
            if session.open >= MOST_OPEN:  # before the body, which takes memory, is read
                raise ApiError(f"{MOST_OPEN} calls of this rollout are open already", status=429)
            session.open += 1
            try:
                return await self._answer(form, request, session, send)
            finally:
                session.open -= 1
        except ClientDisconnect:  # uvicorn may not know of it yet
            return await Response(status_code=499)(scope, receive, send)
        except ApiError as one:
            error = one
        except Exception as one:
            error = ApiError(f"the gateway failed: {one!r:.500}", status=500)
        form = form or FORMS[-1 if "anthropic-version" in request.headers else 0]
        await _json(form.error(error), error.status)(scope, receive, send)

    async def _answer(self, form: Form, request: Request, session: OpenRollout, send: Send) -> None:
        async with session.reading:
            asked = await self._read(form, request)
        self._check_model(asked.model)
        self._tell(asked.left_out)
        call, beside = asked.call, self._kit.beside
        if call.tools and not await beside(self._shows_tools, call.tools):
            raise unsupported("tools", "the model's chat template does not show them to the model")
        whole = (request.scope, request.receive, send)
        if asked.is_count:
            call.prompt_tokens = await beside(self._count, call)
            return await _json(form.answer(asked, call, []))(*whole)
        session = self._session(request)  # which may have ended while the request arrived
        connection = self.connections.get(request.scope["client"])
        if connection is None:
            raise ClientDisconnect
        again = request.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's, Anthropic's
        call = session.submit(call, again)
        connection.take(call)
        # Until a streamed response begins, its errors have a status of their own.
        await connection.wait(call, 0.1 if asked.is_stream else None)
        if call.error is not None:
            raise call.error
        if asked.is_stream:
            await _start_stream(send)
            while not call.ended.is_set() and connection.is_open:
                await _write(send, b": the model is at work\n\n", more=True)
                await connection.wait(call, 0.4)
        if not connection.is_open:
            if asked.is_stream:
                return await _write(send, b"")
            raise ClientDisconnect
        if not asked.is_stream:
            await _json(form.answer(asked, call, call.choices))(*whole)
        elif call.error is None:
            await _write(send, _encoded(form.events(asked, call, call.choices)))
        else:  # what begins with `error` is one for the clients of all of these APIs
            return await _write(send, _encoded([("error", form.error(call.error))]))
        connection.wrote(call)

    async def _read(self, form: Form, request: Request) -> Asked:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ApiError(f"the request has more than {MOST_BYTES:,} bytes", status=413)
        return await self._kit.beside(_read, form, body)

    def _tell(self, left_out: Sequence[str]) -> None:
        """Tell the user, once for each, of types of tools that the model is not shown."""
        for name in sorted(set(left_out) - self._left_out)[: MOST_TOLD - len(self._left_out)]:
            self._left_out.add(name)
            words = "megarl: the agent's calls have tools of type"
            print(
                f"{words} {name!r:.60}, which the model is not shown", file=sys.stderr, flush=True
            )

    def _shows_tools(self, tools: Sequence[Any]) -> bool:
        """Whether the chat template writes tools; `tools`: those of a call."""
        if self._is_for_tools is None:
            chat, write = [{"role": "user", "content": "?"}], self._kit.markup.whole
            with contextlib.suppress(ValueError):
                self._is_for_tools = write(chat, tools) != write(chat, [])
        return self._is_for_tools is not False

    def _count(self, call: AgentCall) -> int:
        """The tokens of a conversation as the chat template writes it."""
        try:
            text = self._kit.markup.whole(call.chat, call.tools)
            return len(self._kit.codec.encode(text))
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None

    def _session(self, request: Request) -> OpenRollout:
        """The running rollout to which the request's API key belongs. Raises `ApiError` (401)."""
        for name in ("x-api-key", "authorization"):
            token = request.headers.get(name, "").removeprefix("Bearer ").strip()
            if (session := self._kit.sessions.get(token)) is not None:
                return session
        raise ApiError(
            "Incorrect API key provided; an agent's key is in its environment, and holds for"
            " one rollout",
            status=401,
            code="invalid_api_key",
        )

    def _page(self, request: Request) -> dict[str, Any]:
        """What there is beside the APIs: the list of models, or one of them, in OpenAI's and
        Anthropic's form at once, and a sign of life.
        """
        path, name = request.url.path, self._kit.settings.model
        if path == "/":
            return {"status": "ok"}
        top, _, asked = path.removeprefix("/v1/").partition("/")
        if top != "models" or request.method not in ("GET", "HEAD"):
            known = ", ".join(form.path for form in FORMS)
            raise ApiError(f"there is no {request.method} {path}, only {known}", status=404)
        self._session(request)
        self._check_model(asked or name)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        listed = {"object": "list", "data": [model], "has_more": False}
        return model if asked else listed | {"first_id": name, "last_id": name}

    def _check_model(self, name: str) -> None:
        """Raise `ApiError` for a model that there is not."""
        model = self._kit.settings.model
        if name != model:
            raise ApiError(
                f"The model `{name:.200}` does not exist; ask for `{model}`, or set"
                " environment.agent.model to the name that the agent uses",
                status=404,
                code="model_not_found",
                param="model",
            )


async def _start_stream(send: Send) -> None:
    head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def _write(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _json(data: dict[str, Any], status: int = 200) -> Response:
    """A response of JSON in ASCII, which also holds half of a surrogate pair."""
    return Response(json.dumps(data), status, media_type="application/json")


def _read(form: Form, body: bytes | bytearray) -> Asked:
    """The request `body`. Raises `ApiError` for whatever is wrong with it."""
    try:
        tree = json.loads(body, parse_constant=_finite, parse_float=_finite)
        if b"\\u" in body:  # half of a surrogate pair is no text for a tokenizer
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError("the request is no JSON object; send one with `model`")
    if _items(tree) > MOST_ITEMS:  # each may be told about by several errors
        raise ApiError(f"the request has more than {MOST_ITEMS:,} items in lists", status=413)
    try:
        asked = form.read(tree)
        asked.call.digest = asked.call.same()
        return asked
    except ApiError:
        raise
    except ValidationError as error:
        raise _invalid(tree, error) from None
    except VLLMValidationError as error:
        raise ApiError(str(error.args[0]), param=error.parameter) from None
    except Exception as error:  # checks of vLLM that read a value before they know its type
        raise ApiError(f"the request has a value that cannot be read: {error}") from None


def _items(value: Any) -> int:
    """The number of items in the lists of JSON data; counting ends above `MOST_ITEMS`."""
    count, left = 0, [value]
    while left and count <= MOST_ITEMS:
        item = left.pop()
        if isinstance(item, list):
            count += len(item)
            left += item[: MOST_ITEMS - count] if count < MOST_ITEMS else []
        elif isinstance(item, dict):
            left += item.values()
    return count


def _finite(text: str) -> float:
    """A number of a JSON text."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is no number of JSON")
    return number


def _invalid(request: Any, error: ValidationError) -> ApiError:
    """The error for a request that its protocol class refuses. Of pydantic's errors the deepest in
    the request: for a union there are also those of the types that were not meant.
    """
    paths = list[tuple[int, str, str]]()
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        path, value = list[str](), request
        for step in item["loc"]:  # without the names of a union's forms
            if item["type"] == "missing" and step == item["loc"][-1]:
                path.append(str(step))
                break
            with contextlib.suppress(LookupError, TypeError):
                value = value[step]
                path.append(str(step))
        paths.append((len(path), ".".join(path), item["msg"].removeprefix("Value error, ")))
    _, name, reason = max(paths, key=lambda entry: entry[0])
    return ApiError(f"{name}: {reason}" if name else reason, param=name or None)


def _encoded(events: Iterable[Event]) -> bytes:
    """Server-sent events: (name or "", data) each."""
    texts = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        texts.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(texts).encode()
