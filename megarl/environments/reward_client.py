"""The client of a reward server: batches, a pool of connections, retries, a circuit breaker.

    score(prompt, response) --BatchQueue--> lanes, one connection each --POST--> Outcome

Every response ends with an outcome: its score, or a failure that says what the server said. The
time limit of a response runs from when its batch gets a connection; while the circuit breaker is
open it runs also for those that wait for one. So a slow server loses nothing to its queue, and a
dead one does not hold up a run for longer than the limit.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.environments.addresses import Token
from megarl.environments.batch_queue import BatchQueue, Waiting
from megarl.environments.config import EnvironmentConfig, RemoteConfig
from megarl.environments.scores import DETAIL_CHARACTERS, Outcome
from megarl.environments.wire import (
    ROUTE,
    WITHIN,
    BadMessage,
    read_answer,
    request_body,
    sample_json,
)
from megarl.schema import shortened
from megarl.types import Prompt


class Breaker:
    """Decides when a request may be sent to one server. Not for several threads."""

    def __init__(self, failures: int, pause_s: float) -> None:
        """`failures`: failed requests in a row that open the breaker. `pause_s`: seconds between
        two probes while it is open.
        """
        self._limit, self._pause_s = failures, pause_s
        self._row = 0
        self._next_probe, self._probing = 0.0, False
        self.open_since: float | None = None
        """When the breaker opened; None while it is closed."""
        self.openings = 0
        """Times that the breaker has opened."""

    def may_send(self, now: float) -> bool:
        """Whether a request may be sent at `now`. If the breaker is open, True is the permission
        for the one probe, and must be followed by `succeeded` or `failed`.
        """
        if self.open_since is None:
            return True
        if self._probing or now < self._next_probe:
            return False
        self._probing = True
        return True

    def wait_s(self, now: float) -> float:
        """Seconds after which `may_send` is worth asking again; 0 while a probe is under way."""
        return 0.0 if self._probing else max(0.0, self._next_probe - now)

    def succeeded(self) -> None:
        """Note that the server has answered: the breaker is closed."""
        self._row, self._probing, self.open_since = 0, False, None

    def failed(self, now: float, *, sent_at: float) -> bool:
        """Note that a request sent at `sent_at` has failed; returns True if that opens the breaker.
        A failed probe begins another pause; a request that was under way when the breaker opened
        changes nothing.
        """
        if self.open_since is not None:
            if self._probing and sent_at >= self._next_probe:
                self._probing, self._next_probe = False, now + self._pause_s
            return False
        self._row += 1
        if self._row < self._limit:
            return False
        self.open_since, self._next_probe = now, now + self._pause_s
        self.openings += 1
        return True


REQUEST_BYTES = 8 * 2**20
"""A batch ends before its request grows beyond this, unless a single response does."""
ANSWER_BYTES_PER_SAMPLE, ANSWER_BYTES = 64 * 2**10, 2**20
"""Largest answer that is read: so many bytes for each sample, and so many more."""
ANSWER_SHARE = 0.9
"""Share of an attempt's time within which the server is asked to answer; the rest is for the way
back."""
POLL_S = 0.02
"""Seconds between two looks at an open breaker while another request probes the server."""
WORDS = 300
"""Most characters of a server's own words in a message."""


@dataclass
class Counters:
    """What a client has done so far."""

    samples: int = 0
    """Responses that were given to the client."""
    scored: int = 0
    failed: dict[str, int] = field(default_factory=lambda: {"error": 0, "timeout": 0, "nan": 0})
    """{kind of failure: responses}"""
    requests: int = 0
    """Requests sent, also those that failed."""
    requests_failed: int = 0
    """Requests without an answer of status 200."""


class _Refused(Exception):
    """Raised for a request that failed, with what happened."""

    def __init__(self, said: str, *, again: bool, timed_out: bool = False, after_s: float = 0.0):
        """`again`: whether sending the request once more may help, after `after_s` seconds at
        least.
        """
        super().__init__(said)
        self.again, self.timed_out, self.after_s = again, timed_out, after_s


@dataclass
class _Delivery:
    """A batch on its way to the server."""

    until: float
    """When the last of its responses fails, in seconds of `time.monotonic`."""
    words: str = ""
    """What happened to its last request, if that failed."""


class _TooLarge(Exception):
    """Raised for a request of several samples that the server finds too large."""


class RewardClient:
    """Scores responses with the reward server at one address. All calls are from one event loop."""

    def __init__(self, url: str, config: EnvironmentConfig, token: Token | None) -> None:
        self.url, self._token = url, token
        self._config: RemoteConfig = config.remote
        self._limit_s, self._maps_scores = config.time_limit_s, not config.maps_no_scores
        attempt_s = config.remote.attempt_limit_s
        self._attempt_s = config.time_limit_s / 2 if attempt_s is None else attempt_s
        self.breaker = Breaker(config.remote.breaker_failures, config.remote.breaker_pause_s)
        self.counters = Counters()
        self._queue: BatchQueue[bytes] = BatchQueue()
        self._lanes: list[asyncio.Task[None]] = []
        self._session: Any = None
        self._under_way: set[Waiting[bytes]] = set()
        self._closed = False
        self._last_words, self._warning = "", ""

    async def score(self, prompt: Prompt, response: str) -> Outcome:
        """Score a response. Failures are part of the outcome; raises `RuntimeError` only if the
        client is closed.
        """
        if self._closed:
            raise RuntimeError("the environment's reward client is closed")
        self.counters.samples += 1
        try:
            body = sample_json(prompt, response)
        except ValueError as error:
            found = Outcome(failure="error", detail=str(error))
        else:
            if not self._lanes:
                self._open()
            found = await self._queue.put(body, len(body)).result
        if found.failure:
            self.counters.failed[found.failure] += 1
        else:
            self.counters.scored += 1
        return found

    def _open(self) -> None:
        """Start the lanes, in the caller's event loop."""
        import aiohttp  # takes a quarter of a second, and most runs have no reward server

        self._session = aiohttp.ClientSession(
            connector=_connector(self._config.connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy would see the token
        )
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._config.connections)]

    async def close(self) -> None:
        """Cancel what is under way and close the connections. May be called twice."""
        self._closed = True
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._queue.cancel()
        for waiting in self._under_way:
            waiting.result.cancel()
        self._under_way.clear()
        if self._session is not None:
            await self._session.close()

    async def _lane(self) -> None:
        """Send batches, one after another."""
        config, loop = self._config, asyncio.get_running_loop()
        while True:
            batch = await self._queue.take(config.batch_size, config.linger_ms / 1e3, REQUEST_BYTES)
            self._under_way |= set(batch)
            now = time.monotonic()
            opened = self.breaker.open_since
            delivery, timers = _Delivery(now + self._limit_s), []
            for one in batch:
                since = now if opened is None else max(one.since, opened)
                left = since + self._limit_s - now
                timers.append(loop.call_later(left, self._too_late, one, delivery))
            try:
                await self._deliver(batch, delivery)
            except Exception as error:  # a mistake of ours must not leave anybody waiting
                self._fail(batch, f"{type(error).__name__}: {error}")
            finally:
                for timer in timers:
                    timer.cancel()
            for one in batch:  # whose timers were about to say so
                self._too_late(one, delivery)
            self._under_way -= set(batch)

    def _too_late(self, waiting: Waiting[bytes], delivery: _Delivery) -> None:
        """Have `waiting` fail as a time-out, unless it has an outcome."""
        said = f"no score within environment.time_limit_s = {self._limit_s:g} s from {self.url}"
        if self.breaker.open_since is not None:
            said += ", whose circuit breaker is open"
        words = delivery.words or (self._last_words if self.breaker.open_since is not None else "")
        said += f": it {words}" if words else ""
        self._answer(waiting, Outcome(failure="timeout", detail=said[:DETAIL_CHARACTERS]))

    def _fail(self, batch: Sequence[Waiting[bytes]], said: str, *, timed_out: bool = False) -> None:
        detail = f"the reward server {self.url} {said}"[:DETAIL_CHARACTERS]
        for one in batch:
            self._answer(one, Outcome(failure="timeout" if timed_out else "error", detail=detail))

    def _answer(self, waiting: Waiting[bytes], outcome: Outcome) -> None:
        """Set the outcome of `waiting`, with a warning if there is one that nobody has got."""
        if waiting.result.done():
            return
        # Once more: what a server repeats may come out of its JSON only now.
        detail, warning = self._without_token(outcome.detail), self._without_token(self._warning)
        waiting.answer(replace(outcome, detail=detail, warning=warning))
        self._warning = ""

    def _without_token(self, text: str) -> str:
        """`text` with the token replaced: a server may repeat what it was sent."""
        return text if self._token is None else text.replace(self._token.value, "(token)")

    async def _deliver(self, batch: Sequence[Waiting[bytes]], delivery: _Delivery) -> None:
        """Send a batch until it is answered, its attempts are used up, or its time is. A probe of a
        server whose breaker is open is none of its attempts.
        """
        config, attempt, until = self._config, 0, delivery.until
        while wanted := [one for one in batch if not one.result.done()]:
            now = time.monotonic()
            if now >= until:
                return
            probes = self.breaker.open_since is not None
            if not self.breaker.may_send(now):
                await asyncio.sleep(min(max(self.breaker.wait_s(now), POLL_S), until - now))
                continue
            attempt += not probes
            try:
                outcomes = await self._attempt(wanted, min(self._attempt_s, until - now))
            except _TooLarge:
                for half in (wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]):
                    await self._deliver(half, delivery)
                return
            except _Refused as refused:
                delivery.words = str(refused)
                if probes and refused.again:
                    continue
                if not refused.again or attempt >= config.attempts:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    self._fail(wanted, f"{refused}{tries}", timed_out=refused.timed_out)
                    return
                pause = min(config.backoff_s * 2 ** min(attempt - 1, 60), config.longest_backoff_s)
                pause = max(pause * random.uniform(0.5, 1.0), refused.after_s)
                await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
                continue
            for one, outcome in zip(wanted, outcomes, strict=True):
                if outcome is not None:
                    self._answer(one, outcome)
            if left := [one for one in wanted if not one.result.done()]:
                delivery.words = f"had not scored it when attempt {attempt} ended"
                if attempt >= config.attempts:
                    self._fail(left, f"{delivery.words}, the last one", timed_out=True)

    async def _attempt(
        self, batch: Sequence[Waiting[bytes]], limit_s: float
    ) -> list[Outcome | None]:
        """Send a request; the outcomes of its samples, None for those not scored yet. Raises
        `_Refused` or `_TooLarge`. The breaker is told how it went.
        """
        sent_at, failed = time.monotonic(), True
        self.counters.requests += 1
        try:
            found = await self._post(batch, limit_s)
            failed = False
            return found
        except _Refused as refused:
            failed = refused.again
            self.counters.requests_failed += 1
            self._last_words = str(refused)
            raise
        except _TooLarge:
            failed = False
            self.counters.requests_failed += 1
            raise
        finally:
            if not failed:
                self.breaker.succeeded()
            elif self.breaker.failed(time.monotonic(), sent_at=sent_at):
                self._warning = (
                    f"the reward server {self.url} failed {self._config.breaker_failures} times in"
                    f" a row: it {self._last_words}; requests wait until it answers again"
                )

    async def _post(self, batch: Sequence[Waiting[bytes]], limit_s: float) -> list[Outcome | None]:
        import aiohttp

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers[WITHIN] = f"{ANSWER_SHARE * limit_s:.3f}"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.value}"
        most = ANSWER_BYTES + ANSWER_BYTES_PER_SAMPLE * len(batch)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.post(
                    self.url,
                    data=request_body([one.item for one in batch]),
                    headers=headers,
                    allow_redirects=False,  # the token is for this address
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as reply,
            ):
                body = bytearray()
                async for part in reply.content.iter_chunked(1 << 16):
                    body += part
                    if len(body) > most:
                        raise _Refused(f"answered more than {most:,} bytes", again=False)
                status, after = reply.status, reply.headers.get("Retry-After", "")
        except TimeoutError:
            raise _Refused(
                f"did not answer within {limit_s:.3g} s (environment.remote.attempt_limit_s)",
                again=True,
                timed_out=True,
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            # Before it is shortened: a part of the token would not be found.
            said = shortened(self._without_token(f"{type(error).__name__}: {error}"), WORDS)
            raise _Refused(f"cannot be reached: {said}", again=True) from None
        if self._token is not None:
            body = body.replace(self._token.value.encode(), b"(token)")
        if status != 200:
            self._refuse(status, bytes(body), after, len(batch))
        try:
            return read_answer(bytes(body), len(batch), maps_scores=self._maps_scores)
        except BadMessage as error:
            raise _Refused(
                f"gave an answer that {error}; see docs/rewards.md for what it must be", again=False
            ) from None

    def _refuse(self, status: int, body: bytes, after: str, count: int) -> None:
        """Raise what an answer of another status than 200 stands for."""
        said = f"answered {status}{self._words(body)}"
        if status == 413 and count > 1:
            raise _TooLarge
        if status == 429 or status >= 500:
            seconds = float(after) if after.isascii() and after.isdecimal() else 0.0
            raise _Refused(said, again=True, after_s=min(seconds, self._limit_s))
        raise _Refused(f"{said}; {self._advice(status)}", again=False)

    def _advice(self, status: int) -> str:
        variable = self._config.token_variable
        if status in (401, 403):
            return (
                f"export {variable} (environment.remote.token_variable) with the server's own token"
                if variable
                else "set environment.remote.token_variable to the name of the environment variable"
                " that holds its token"
            )
        if status in (404, 405):
            return f"set the address of its scoring route, such as http://host:port{ROUTE}"
        if status in (400, 415, 422):
            return "have it read the requests that docs/rewards.md describes"
        if status == 413:
            return "have it take larger requests (server.max_request_mib of megarl serve-reward)"
        if 300 <= status < 400:
            return "set the address it redirects to, since the token is sent to no other"
        return "see its log"

    def _words(self, body: bytes) -> str:
        """A server's own words, after a colon and without the token; empty if there are none."""
        text = body[:65536].decode(errors="replace")
        try:
            tree = json.loads(text)
            if isinstance(tree, dict):
                text = str(tree.get("error") or tree.get("detail") or text)
        except (ValueError, RecursionError):
            pass
        if self._token is not None:  # before the text is cut, or half of the token could stay
            text = text.replace(self._token.value, "(token)")
        text = shortened(text, WORDS)
        return f": {text}" if text else ""


def _connector(connections: int) -> Any:
    """A pool of connections that leaves out those on which something came that nobody had asked
    for: it would be read as the answer to the next request, and each verdict as that of the next.
    """
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        async def connect(self, *arguments: Any, **named: Any) -> Any:
            while True:
                found = await super().connect(*arguments, **named)
                if found.protocol is None or not found.protocol.should_close:
                    return found
                found.close()

    return Connector(limit=connections)
