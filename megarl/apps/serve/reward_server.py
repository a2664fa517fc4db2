"""The reward server: an environment's verifier, or another scorer, behind HTTP.

    POST /v1/score   the wire format of docs/rewards.md        GET /health   GET /metrics

Every request but `GET /health` needs the bearer token, if there is one; without it the answer is
401 and says nothing else. Requests are bounded in size, time and number.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megarl.environments.addresses import Token
from megarl.environments.batch_queue import BatchQueue, Waiting
from megarl.environments.config import RewardServerConfig
from megarl.environments.scores import Outcome
from megarl.environments.wire import ROUTE, WITHIN, BadMessage, Sample, answer_body, read_request
from megarl.errors import EngineLost
from megarl.limits import LONGEST_WAIT_S

NO_LIMIT_BYTES = 2**62
HEALTH = "/health"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class Backend:
    """What scores the samples of a server."""

    score: Callable[[Sequence[Sample]], Awaitable[list[Outcome]]]
    """The outcomes of some samples. Failures are part of the outcomes; what it raises becomes the
    failure of these samples."""
    lanes: int
    """Calls of `score` at the same time."""
    most: int
    """Most samples of one call."""
    linger_s: float = 0.0
    """Seconds that a sample waits for others to fill a call."""
    drops: bool = False
    """Whether a call is cancelled once nobody waits for its samples any more."""


class Metrics:
    """What `GET /metrics` shows, in a registry of its own."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "megarl_reward_requests", "Requests to score", ["status"], registry=self.registry
        )
        self.samples = Counter(
            "megarl_reward_samples", "Samples answered", ["outcome"], registry=self.registry
        )
        self.seconds = Histogram(
            "megarl_reward_request_seconds", "Seconds of a request", registry=self.registry
        )
        self.batch = Histogram(
            "megarl_reward_batch_samples",
            "Samples scored in one call",
            buckets=[2**power for power in range(13)],
            registry=self.registry,
        )
        gauge = Gauge("megarl_reward_queue_samples", "Samples that wait", registry=self.registry)
        gauge.set_function(waiting)
        for outcome in (
            "scored",
            "error",
            "timeout",
            "nan",
            "unfinished",
        ):  # shown from the start, as 0
            self.samples.labels(outcome)


class RewardServer:
    """The routes of a reward server and the queue behind them. `app` is its ASGI application."""

    def __init__(self, backend: Backend, settings: RewardServerConfig, token: Token | None) -> None:
        self._backend, self._settings = backend, settings
        self._queue: BatchQueue[Sample] = BatchQueue()
        self._lanes: list[asyncio.Task[None]] = []
        self.stopping = False
        """Whether new requests are refused with 503."""
        self.lost = ""
        """Why the backend cannot score any more; empty while it can."""
        self.metrics = Metrics(lambda: len(self._queue))
        routes = [
            Route(ROUTE, self._score, methods=["POST"]),
            Route(HEALTH, self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self.app = Guard(Starlette(routes=routes), token)

    def start(self) -> None:
        """Start the lanes in the running event loop."""
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._backend.lanes)]

    async def close(self) -> None:
        """Cancel what waits and what is under way."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._queue.cancel()

    async def _lane(self) -> None:
        """Score batches, one after another."""
        backend = self._backend
        while True:
            batch = await self._queue.take(backend.most, backend.linger_s, NO_LIMIT_BYTES)
            self.metrics.batch.observe(len(batch))
            try:
                outcomes = await self._scored(batch)
                if outcomes is None:
                    continue
            except EngineLost as error:
                # 503 has the clients ask again: another server may be in its place by then.
                self.stopping, self.lost = True, self.lost or str(error)
                for one in batch:
                    one.result.cancel()
                self._queue.cancel()
                return
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                outcomes = [Outcome(failure="error", detail=said)] * len(batch)
            except BaseException:
                for one in batch:
                    one.result.cancel()
                raise
            for one, outcome in zip(batch, outcomes, strict=True):
                one.answer(outcome)

    async def _scored(self, batch: Sequence[Waiting[Sample]]) -> list[Outcome] | None:
        """The outcomes of `batch`; None if the call was cancelled, because nobody waits for it."""
        call = asyncio.ensure_future(self._backend.score([one.item for one in batch]))

        def drop(done: asyncio.Future[Outcome]) -> None:
            if all(one.result.done() for one in batch):
                call.cancel()

        if self._backend.drops:
            for one in batch:
                one.result.add_done_callback(drop)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([call])
            raise
        return None if call.cancelled() else call.result()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "stopping" if self.stopping else "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _score(self, request: Request) -> Response:
        started_at = time.monotonic()
        answer = await self._answer(request)
        self.metrics.requests.labels(str(answer.status_code)).inc()
        self.metrics.seconds.observe(time.monotonic() - started_at)
        return answer

    async def _answer(self, request: Request) -> Response:
        settings = self._settings
        if self.stopping:
            return _refusal(503, "the server is stopping", after_s=1)
        most = settings.max_request_mib * 2**20
        try:
            async with asyncio.timeout(settings.read_limit_s):
                body = await _body(request, most)
        except TimeoutError:
            return _refusal(408, f"the request did not arrive within {settings.read_limit_s:g} s")
        except ClientDisconnect:
            return _refusal(400, "the client went away")
        if body is None:
            return _refusal(413, f"the request has more than {most:,} bytes")
        try:
            samples = read_request(body)
        except BadMessage as error:
            return _refusal(422, str(error))
        if len(samples) > settings.queue_samples:  # however long the client waits
            said = f"{len(samples)} samples, and at most {settings.queue_samples} may wait"
            return _refusal(413, f"the request has {said}")
        if len(self._queue) + len(samples) > settings.queue_samples:
            waiting = f"{len(self._queue)} samples wait, at most {settings.queue_samples} may"
            return _refusal(429, waiting, after_s=1)
        waiting = [self._queue.put(sample) for sample in samples]
        outcomes = await _unless_gone(request, waiting, _within_s(request))
        if outcomes is None:
            gone = "the server has stopped" if self.stopping else "the client went away"
            return _refusal(503 if self.stopping else 400, gone)
        for outcome in outcomes:
            kind = "unfinished" if outcome is None else outcome.failure or "scored"
            self.metrics.samples.labels(kind).inc()
        return Response(answer_body(outcomes), media_type="application/json")


def _refusal(status: int, said: str, *, after_s: int = 0) -> Response:
    headers = {"Retry-After": f"{after_s}"} if after_s else {}
    return JSONResponse({"error": said}, status_code=status, headers=headers)


async def _body(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it has more than `most` bytes."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        return None
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return bytes(body)


def _within_s(request: Request) -> float | None:
    """Seconds within which the client needs an answer; None if it does not say."""
    try:
        seconds = float(request.headers.get(WITHIN, ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < LONGEST_WAIT_S else None


async def _unless_gone(
    request: Request, waiting: Sequence[Waiting[Sample]], within_s: float | None
) -> list[Outcome | None] | None:
    """The outcomes of `waiting`, None for those that are not scored after `within_s`; None for all
    if they were cancelled, or once the client has closed the connection: nobody needs its samples
    any more.
    """
    scored = asyncio.ensure_future(_all(waiting))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([scored, gone], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not scored.done() and not gone.done():
            results = [one.result for one in waiting]
            return [one.result() if one.done() and not one.cancelled() else None for one in results]
        return scored.result() if scored.done() and not scored.cancelled() else None
    finally:
        scored.cancel()
        gone.cancel()
        for one in waiting:
            one.result.cancel()


async def _all(waiting: Sequence[Waiting[Sample]]) -> list[Outcome | None]:
    return [await one.result for one in waiting]


async def _gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Lets requests pass that carry the token, and `GET /health`; answers all others with 401."""

    def __init__(self, app: Starlette, token: Token | None) -> None:
        self._app = app
        self._expected = None if token is None else _digest(f"Bearer {token.value}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"WWW-Authenticate": "Bearer"}
            await JSONResponse({"error": "unauthorized"}, 401, headers)(scope, receive, send)
        else:
            raise RuntimeError(f"no connection of type {scope['type']} is served")

    def _may_pass(self, scope: Message) -> bool:
        if scope["type"] != "http":
            return False
        if self._expected is None or (scope["path"] == HEALTH and scope["method"] == "GET"):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # Digests have one length, so that not even that of the token can be timed.
        return hmac.compare_digest(_digest(given[0] if len(given) == 1 else b""), self._expected)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
