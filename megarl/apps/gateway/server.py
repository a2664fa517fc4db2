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
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megarl.apps.gateway.calls import ApiError
from megarl.apps.gateway.forms import ChatCompletions, Completions, Event, Form
from megarl.apps.gateway.other_forms import Messages, Responses

if TYPE_CHECKING:
    from megarl.apps.gateway.agent_kit import AgentKit, AgentSession

FORMS: tuple[Form, ...] = (ChatCompletions(), Completions(), Responses(), Messages())
"""The APIs that the gateway speaks."""
MOST_BYTES = 2**22
"""Longest request."""
MOST_OPEN = 256
"""Calls of one rollout that may wait at the same time."""


class _Server(uvicorn.Server):
    """uvicorn in a process whose signals are another's."""

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
        routes = [Route(form.path, self._handler(form), methods=["POST"]) for form in FORMS]
        routes.append(Route("/v1/models", self._models, methods=["GET"]))
        self.app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def _handler(self, form: Form) -> Any:
        async def handle(request: Request) -> Response:
            try:
                return await self._answer(form, request)
            except ApiError as error:
                return JSONResponse(form.error(error), error.status)
            except Exception as error:
                failed = ApiError(f"the gateway failed: {error!r:.500}", status=500)
                return JSONResponse(form.error(failed), failed.status)

        return handle

    async def _answer(self, form: Form, request: Request) -> Response:
        self._session(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ApiError(f"the request has more than {MOST_BYTES:,} bytes", status=413)
        try:
            asked = form.read(json.loads(body))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ApiError(f"{place}: {first['msg']}", param=place) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(str(error)) from None
        if asked.model != self._kit.settings.model:
            raise ApiError(
                f"The model `{asked.model}` does not exist; ask for `{self._kit.settings.model}`,"
                " or set environment.agent.model to the name that the agent uses",
                status=404,
                code="model_not_found",
                param="model",
            )
        call = asked.call
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
        return JSONResponse(form.answer(asked, call, choices))

    def _session(self, request: Request) -> AgentSession:
        """The session whose key the request has."""
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        session = self._kit.sessions.get(given.removeprefix("Bearer ").strip())
        if session is None:
            raise ApiError(
                "Incorrect API key provided; an agent's key is in its environment, and holds for"
                " one rollout",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except ApiError as error:
            return JSONResponse(FORMS[0].error(error), error.status)
        name = self._kit.settings.model
        listed = {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}
        return JSONResponse({"object": "list", "data": [listed]})


async def _not_found(request: Request, _: Exception) -> Response:
    paths = ", ".join(form.path for form in FORMS)
    error = ApiError(f"there is no {request.method} {request.url.path}, only {paths}", status=404)
    return JSONResponse(FORMS[0].error(error), 404)


async def _encoded(events: Iterator[Event]) -> AsyncIterator[bytes]:
    """Server-sent events: (name or "", data) each."""
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        yield (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
