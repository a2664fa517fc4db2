"""The reward server: an environment's verifier, a reward model or a judge, behind HTTP.

    POST /v1/score   the wire format of docs/reference_rewards.md   GET /health   GET /metrics

Every request but `GET /health` needs the bearer token, if the server has one; without it the answer
is 401 and says nothing else. Requests are bounded in size, time and number.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megarl.environments.scores import BadScore, Outcome
from megarl.environments.wire import ROUTE, WITHIN, Sample, answer_body, read_request
from megarl.errors import ProcessLost
from megarl.settings.addresses import Token
from megarl.settings.environments import RewardServerConfig
from megarl.types import Prompt

HEALTH = "/health"
AGAIN = {"Retry-After": "1"}


@dataclass(frozen=True)
class Backend:
    """What scores the responses that a reward server is sent: an async function `score` (prompt,
    response), which returns the score or the failure of the response, and how many calls of it may
    run at the same time (`lanes`).
    """

    score: Callable[[Prompt, str], Awaitable[Outcome]]
    """Async function (prompt, response) to the outcome of the response; an exception that it raises
    becomes the failure of this response alone. The call is cancelled once no client waits for the
    outcome any more."""
    lanes: int
    """Most calls of `score` at the same time; further responses wait in the server."""


class RewardServer:
    """The ASGI application of a reward server, for uvicorn. POST /v1/score gets JSON {"samples":
    [{"prompt", "response"}, ...]} and answers {"scores": [...]} with an object for each sample, in
    their order: with `reward`, with `failure` and `detail`, or `unfinished` if the client's time
    limit came first. GET /health and GET /metrics (Prometheus) tell the server's state. Made in the
    event loop in which it runs.
    """

    def __init__(self, backend: Backend, settings: RewardServerConfig, token: Token | None) -> None:
        self._backend, self._settings = backend, settings
        self._free, self._waiting = asyncio.Semaphore(backend.lanes), 0
        self.lost = ""
        """Why the backend cannot score any more, in words; empty while it can."""
        self.on_lost: Callable[[], None] = lambda: None
        """Function that is called, without arguments, once the backend cannot score any more."""
        self._expected = None if token is None else _digest(f"Bearer {token.value}".encode())
        self._registry = own = CollectorRegistry()
        name, sizes = "megarl_reward", [2**power for power in range(13)]
        self._requests = Counter("requests", "Requests to score", ["status"], name, registry=own)
        self._samples = Counter("samples", "Samples answered", ["outcome"], name, registry=own)
        for outcome in ("scored", "error", "timeout", "nan", "unfinished"):
            self._samples.labels(outcome)  # shown from the start, as 0
        self._seconds = Histogram(f"{name}_request_seconds", "Seconds of a request", registry=own)
        self._sizes = Histogram(
            f"{name}_batch_samples", "Samples of a request", buckets=sizes, registry=own
        )
        gauge = Gauge(f"{name}_queue_samples", "Samples that wait", registry=own)
        gauge.set_function(lambda: self._waiting)
        self._app = Starlette(
            routes=[
                Route(ROUTE, self._score, methods=["POST"]),
                Route(HEALTH, self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks for: with 401 if it needs the bearer token and does not
        carry it.
        """
        app: ASGIApp = self._app
        is_health = scope["path"] == HEALTH and scope["method"] == "GET"
        if self._expected is not None and not is_health:
            values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
            # Digests have one length, so that not even that of the token can be timed.
            if not hmac.compare_digest(_digest(b"\n".join(values)), self._expected):
                app = JSONResponse({"error": "unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "stopping" if self.lost else "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _score(self, request: Request) -> Response:
        started_at = time.monotonic()
        try:
            answer = await self._answer(request)
        except HTTPException as refused:
            body = {"error": refused.detail}
            answer = JSONResponse(body, refused.status_code, dict(refused.headers or {}))
        self._requests.labels(str(answer.status_code)).inc()
        self._seconds.observe(time.monotonic() - started_at)
        return answer

    async def _answer(self, request: Request) -> Response:
        samples, most = await self._read(request), self._settings.queue_samples
        if len(samples) > most:  # however long the client waits
            refusal = f"the request has {len(samples)} samples, and at most {most} may wait"
            raise HTTPException(413, refusal)
        if self._waiting + len(samples) > most:
            refusal = f"{self._waiting} samples wait, at most {most} may"
            raise HTTPException(429, refusal, headers=AGAIN)
        self._sizes.observe(len(samples))
        tasks = [asyncio.create_task(self._outcome(*sample)) for sample in samples]
        gone = asyncio.create_task(_gone(request))
        scored = asyncio.gather(*tasks, return_exceptions=True)
        try:
            await asyncio.wait(
                {scored, gone}, timeout=_within_s(request), return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():
                raise HTTPException(400, "the client went away")
            outcomes = [task.result() if task.done() else None for task in tasks]
        except ProcessLost:
            # 503 has the client ask again: another server may be in its place by then.
            raise HTTPException(503, "the server has stopped", headers=AGAIN) from None
        finally:
            scored.cancel()
            gone.cancel()
        for outcome in outcomes:
            self._samples.labels(_label(outcome)).inc()
        return Response(answer_body(outcomes), media_type="application/json")

    async def _read(self, request: Request) -> list[Sample]:
        """The samples of a request. Raises `HTTPException` for one that is late, too large, or has
        another format.
        """
        limit_s, most = self._settings.read_limit_s, self._settings.max_request_mib * 2**20
        body = bytearray()
        too_large = HTTPException(413, f"the request has more than {most:,} bytes")
        if int(request.headers.get("content-length", "0")) > most:
            raise too_large
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise too_large
            return read_request(bytes(body))
        except TimeoutError:
            message = f"the request did not arrive within {limit_s:g} s"
            raise HTTPException(408, message) from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away") from None
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    async def _outcome(self, prompt: Prompt, response: str) -> Outcome:
        """The outcome of a sample, once there is room for it. Raises `ProcessLost`."""
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._backend.score(prompt, response)
        except ProcessLost as error:
            self.lost = str(error)
            self.on_lost()
            raise
        except BadScore as error:
            return Outcome(failure=error.failure, detail=str(error))
        except Exception as error:
            return Outcome(failure="error", detail=f"{type(error).__name__}: {error}")
        finally:
            self._free.release()


def _label(outcome: Outcome | None) -> str:
    """What became of a sample, for the counter."""
    if outcome is None:
        return "unfinished"
    return outcome.failure or ("abstained" if outcome.abstained else "scored")


def _within_s(request: Request) -> float | None:
    """Seconds within which the client needs an answer; None if it does not say."""
    value = request.headers.get(WITHIN, "")
    return float(value) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]*)?", value) else None


async def _gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
