"""The HTTP server that agents call: OpenAI's chat completions, completions and responses, and
Anthropic's messages.

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
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from vllm.exceptions import VLLMValidationError

from megarl.apps.gateway.calls import AgentCall, ApiError
from megarl.apps.gateway.forms import Asked, ChatCompletions, Completions, Event, Form, unsupported
from megarl.apps.gateway.other_forms import CountTokens, Messages, Responses

if TYPE_CHECKING:
    from megarl.apps.gateway.agent_kit import AgentKit, AgentSession

FORMS: tuple[Form, ...] = (
    *(ChatCompletions(), Completions(), Responses()),
    *(CountTokens(), Messages()),
)
"""The APIs that the gateway speaks."""
MOST_BYTES = 2**22
"""Longest request."""
MOST_ITEMS = 20_000
"""Most items in all lists of a request: messages, parts of contents, tools."""
MOST_TOLD = 32
"""Types of tools of which is told that the model is not shown them."""
MOST_OPEN = 256
"""Calls of one rollout that may wait at the same time."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_agents(kit: AgentKit) -> int:
    """Serve the calls of the agents of `kit` on a free port of the loopback address, in this event
    loop, to the end of the process. Returns the port, which is open.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    web = _Server(
        uvicorn.Config(
            Gateway(kit).app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=600,
        )
    )
    kit.serving = asyncio.create_task(web.serve([listener]))
    return int(listener.getsockname()[1])


class Gateway:
    """The ASGI application `app`, which answers the calls of the agents of `kit`."""

    def __init__(self, kit: AgentKit) -> None:
        self._kit = kit
        self._is_for_tools: bool | None = None
        """Whether the chat template writes tools; None until a call has some."""
        self._left_out: set[str] = set()
        """Types of tools which the model was not shown, as they were told."""
        routes = [Route(form.path, self._handler(form), methods=["POST"]) for form in FORMS]
        routes += [Route(path, self._models) for path in ("/v1/models", "/v1/models/{name:path}")]
        routes.append(Route("/", _alive))
        self.app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def _handler(self, form: Form) -> Any:
        async def handle(request: Request) -> Response:
            try:
                return await self._answer(form, request)
            except ApiError as error:
                return _json(form.error(error), error.status)
            except Exception as error:
                failed = ApiError(f"the gateway failed: {error!r:.500}", status=500)
                return _json(form.error(failed), failed.status)

        return handle

    async def _answer(self, form: Form, request: Request) -> Response:
        self._session(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ApiError(f"the request has more than {MOST_BYTES:,} bytes", status=413)
        asked = _read(form, body)
        self._check_model(asked.model)
        self._tell(asked.left_out)
        call = asked.call
        if call.tools and not self._shows_tools(call.tools):
            raise unsupported("tools", "the model's chat template does not show them to the model")
        if asked.is_count:
            call.prompt_tokens = self._count(call)
            return _json(form.answer(asked, call, []))
        session = self._session(request)  # which may have ended while the request arrived
        if session.calls.qsize() >= MOST_OPEN:
            raise ApiError(f"{MOST_OPEN} calls of this rollout wait already", status=429)
        session.calls.put_nowait(call)
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({call.answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if not call.answer.done():
            call.answer.cancel()  # nobody waits for it any more
            return Response(status_code=499)
        choices = call.answer.result()
        if asked.is_stream:
            events = _encoded(form.events(asked, call, choices))
            return StreamingResponse(events, media_type="text/event-stream")
        return _json(form.answer(asked, call, choices))

    def _tell(self, left_out: Sequence[str]) -> None:
        """Tell the user, once for each, of types of tools that the model is not shown."""
        for name in sorted(set(left_out) - self._left_out)[: MOST_TOLD - len(self._left_out)]:
            self._left_out.add(name)
            said = "megarl: the agent's calls have tools of type"
            print(f"{said} {name!r:.60}, which the model is not shown", file=sys.stderr, flush=True)

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
            return len(self._kit.codec.encode(self._kit.markup.whole(call.chat, call.tools)))
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None

    def _session(self, request: Request) -> AgentSession:
        """The session whose key the request has."""
        for name in ("x-api-key", "authorization"):
            given = request.headers.get(name, "").removeprefix("Bearer ").strip()
            if (session := self._kit.sessions.get(given)) is not None:
                return session
        raise ApiError(
            "Incorrect API key provided; an agent's key is in its environment, and holds for"
            " one rollout",
            status=401,
            code="invalid_api_key",
        )

    async def _models(self, request: Request) -> Response:
        """The list of models, or one of them, in OpenAI's and Anthropic's form at once."""
        name, asked = self._kit.settings.model, request.path_params.get("name")
        form = FORMS[-1] if "anthropic-version" in request.headers else FORMS[0]
        try:
            self._session(request)
            self._check_model(asked or name)
        except ApiError as error:
            return _json(form.error(error), error.status)
        about = {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}
        about |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        listed = {"object": "list", "data": [about], "has_more": False}
        return _json(about if asked else listed | {"first_id": name, "last_id": name})

    def _check_model(self, name: str) -> None:
        """Raise `ApiError` for a model that there is not."""
        own = self._kit.settings.model
        if name != own:
            raise ApiError(
                f"The model `{name:.200}` does not exist; ask for `{own}`, or set"
                " environment.agent.model to the name that the agent uses",
                status=404,
                code="model_not_found",
                param="model",
            )


async def _alive(request: Request) -> Response:
    """The answer to a client that looks whether there is a server."""
    return _json({"status": "ok"})


async def _not_found(request: Request, _: Exception) -> Response:
    paths = ", ".join(form.path for form in FORMS)
    error = ApiError(f"there is no {request.method} {request.url.path}, only {paths}", status=404)
    form = FORMS[-1] if "anthropic-version" in request.headers else FORMS[0]
    return _json(form.error(error), 404)


def _json(data: dict[str, Any], status: int = 200) -> Response:
    """A response of JSON in ASCII, which also holds half of a surrogate pair."""
    return Response(json.dumps(data), status, media_type="application/json")


def _read(form: Form, body: bytes | bytearray) -> Asked:
    """The request `body`. Raises `ApiError` for whatever is wrong with it."""
    try:
        found = json.loads(body, parse_constant=_finite, parse_float=_finite)
        if b"\\u" in body:  # half of a surrogate pair is no text for a tokenizer
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError("the request is no JSON object; send one with `model`")
    if _items(found) > MOST_ITEMS:  # each may be told about by several errors
        raise ApiError(f"the request has more than {MOST_ITEMS:,} items in lists", status=413)
    try:
        return form.read(found)
    except ApiError:
        raise
    except ValidationError as error:
        raise _invalid(found, error) from None
    except VLLMValidationError as error:
        raise ApiError(str(error.args[0]), param=error.parameter) from None
    except Exception as error:  # checks of vLLM that read a value before they know its type
        raise ApiError(f"the request has a value that cannot be read: {error}") from None


def _items(value: Any) -> int:
    """The number of items in the lists of JSON data; counting ends above `MOST_ITEMS`."""
    count, left = 0, [value]
    while left and count <= MOST_ITEMS:
        one = left.pop()
        if isinstance(one, list):
            count += len(one)
            left += one[: MOST_ITEMS - count] if count < MOST_ITEMS else []
        elif isinstance(one, dict):
            left += one.values()
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
    places = []
    for one in error.errors(include_url=False, include_context=False):
        parts = list[Any](one["loc"])
        place, value = [], request
        for part in parts:  # without the names of a union's forms
            known = dict(enumerate(value)) if isinstance(value, list) else value
            if isinstance(known, dict) and part in known:
                value = known[part]
                place.append(part)
        if one["type"] == "missing":
            place.append(parts[-1])
        said = one["msg"].removeprefix("Value error, ")
        places.append((".".join(map(str, place)), said, len(place)))
    name, said, _ = max(places, key=lambda one: one[2])
    return ApiError(f"{name}: {said}" if name else said, param=name or None)


async def _encoded(events: Iterator[Event]) -> AsyncIterator[bytes]:
    """Server-sent events: (name or "", data) each."""
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        yield (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
