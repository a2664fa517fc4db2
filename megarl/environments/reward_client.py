"""The HTTP client of a reward server, with batches, retries and a circuit breaker.

    score(prompt, response) --batches--> connections, one request each --POST--> Outcome

The time limit of a response runs from when a connection takes its batch from the queue; while the
circuit breaker is open, also in the queue. So a slow server's queue costs no time, and a dead
server does not hold up a run for longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.environments.scores import DETAIL_CHARACTERS, Outcome
from megarl.environments.wire import ROUTE, WITHIN, read_answer, request_body, sample_json
from megarl.settings.addresses import Token
from megarl.settings.environments import EnvironmentConfig, RemoteConfig
from megarl.settings.schema import shortened
from megarl.types import Prompt

REQUEST_BYTES = 8 * 2**20
"""A batch of more bytes is split, unless it is a single sample."""
ANSWER_BYTES_PER_SAMPLE, ANSWER_BYTES = 64 * 2**10, 2**20
"""Largest answer that is read: so many bytes for each sample, and so many more."""
ANSWER_SHARE = 0.9
"""Fraction of a request's time limit within which the server is asked to answer."""
WORDS = 300
"""Most characters of a server's own words in a message."""
ADVICE = {
    (300, 301, 302, 303, 307, 308): "set the address it redirects to, since the token is sent to no"
    " other",
    (401, 403): "set environment.remote.token_variable to the name of the environment variable that"
    " holds its token, and export that",
    (404, 405): f"set the address of its scoring route, such as http://host:port{ROUTE}",
    (400, 415, 422): "have it read the requests that docs/reference_rewards.md describes",
    (413,): "have it take larger requests (server.max_request_mib of megarl serve-reward)",
}
"""{statuses of an answer: what to set or do}"""


@dataclass(eq=False)
class Item:
    """A response that waits for its outcome."""

    body: bytes
    """As JSON, with its prompt."""
    since: float
    """By `time.monotonic`."""
    result: asyncio.Future[Outcome]
    words: str = ""
    """What the server did at the last attempt."""


@dataclass
class Refusal:
    """Why a request failed."""

    said: str
    """What the server did, as the rest of a sentence about it."""
    again: bool = False
    """Whether repeating the request may help, after `after_s` seconds at least."""
    after_s: float = 0.0
    timed_out: bool = False
    too_large: bool = False


class RewardClient:
    """Scores responses with the reward server at `url`. All calls in one event loop; connections
    open with the first `score`.
    """

    def __init__(self, url: str, config: EnvironmentConfig, token: Token | None) -> None:
        self.url, self._token = url, token
        self._config: RemoteConfig = config.remote
        self._limit_s, self._maps_scores = config.time_limit_s, not config.maps_no_scores
        attempt_s = config.remote.attempt_limit_s
        self._attempt_s = config.time_limit_s / 2 if attempt_s is None else attempt_s
        self._queue, self._taking = asyncio.Queue[Item](), asyncio.Lock()
        self._waiting = set[Item]()
        self._lanes: list[asyncio.Task[None]] = []
        self._session: Any = None
        self._closed = False
        self._failures = 0
        """Failed requests in a row."""
        self._open_since: float | None = None
        """When the circuit breaker opened; None: it is closed."""
        self._probing, self._probe_at = asyncio.Lock(), 0.0
        self._last_words, self._warning = "", ""

    async def score(self, prompt: Prompt, response: str) -> Outcome:
        """Score one response; any failure of the server is the outcome's. Raises `RuntimeError` if
        the client is closed.
        """
        if self._closed:
            raise RuntimeError("the environment's reward client is closed")
        try:
            body = sample_json(prompt, response)
        except ValueError as error:
            return Outcome(failure="error", detail=str(error))
        if not self._lanes:
            self._open()
        item = Item(body, time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.add(item)
        self._queue.put_nowait(item)
        try:
            return await item.result
        finally:
            self._waiting.discard(item)

    def _open(self) -> None:
        import aiohttp  # takes a quarter of a second, and most runs have no reward server

        self._session = aiohttp.ClientSession(
            # Of a connection that is used again, what came unasked would be the next answer.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,  # a proxy would see the token
        )
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._config.connections)]

    async def close(self) -> None:
        """Cancel the requests under way (their `score` raises `CancelledError`) and close the
        connections.
        """
        self._closed = True
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for item in self._waiting:
            item.result.cancel()
        if self._session is not None:
            await self._session.close()

    async def _lane(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._batch()
            now, opened = time.monotonic(), self._open_since
            timers, until = list[asyncio.TimerHandle](), now
            for item in batch:
                ends = self._limit_s + (now if opened is None else max(item.since, opened))
                timers.append(loop.call_later(ends - now, self._too_late, item))
                until = max(until, ends)
            try:
                async with asyncio.timeout(until - now):
                    await self._deliver(batch, until)
            except TimeoutError:
                for item in batch:
                    self._too_late(item)
            except Exception as error:  # a mistake of ours must not leave anybody waiting
                self._fail(batch, f"{type(error).__name__}: {error}")
            finally:
                for timer in timers:
                    timer.cancel()

    async def _batch(self) -> list[Item]:
        """The next responses: as soon as `batch_size` are there, or the first has waited for
        `linger_ms`. Connections are served in turn.
        """
        config = self._config
        async with self._taking:
            batch = [await self._queue.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(batch[0].since + config.linger_ms / 1e3):
                    while len(batch) < config.batch_size:
                        batch.append(await self._queue.get())
            return batch

    def _too_late(self, waiting: Item) -> None:
        detail = f"no score within environment.time_limit_s = {self._limit_s:g} s from {self.url}"
        words = waiting.words
        if self._open_since is not None:
            detail, words = f"{detail}, whose circuit breaker is open", words or self._last_words
        detail += f": it {words}" if words else ""
        self._answer(waiting, Outcome(failure="timeout", detail=detail))

    def _fail(self, batch: Sequence[Item], reason: str, *, timed_out: bool = False) -> None:
        detail = f"the reward server {self.url} {reason}"
        outcome = Outcome(failure="timeout" if timed_out else "error", detail=detail)
        for item in batch:
            self._answer(item, outcome)

    def _answer(self, waiting: Item, outcome: Outcome) -> None:
        """Set the outcome of `waiting`, with a warning that nobody has got yet."""
        if not waiting.result.done():
            # Once more: what a server repeats may come out of its JSON only now.
            detail = self._without_token(outcome.detail)[:DETAIL_CHARACTERS]
            waiting.result.set_result(replace(outcome, detail=detail, warning=self._warning))
            self._warning = ""

    def _without_token(self, text: str) -> str:
        """`text` with the token replaced: a server may repeat what it was sent."""
        return text if self._token is None else text.replace(self._token.value, "(token)")

    async def _deliver(self, batch: Sequence[Item], until: float) -> None:
        """Send a batch until it is answered, its attempts are used up, or `until` (by
        `time.monotonic`). Probes of a server whose breaker is open count as no attempts.
        """
        config, attempt = self._config, 0
        while unscored := [item for item in batch if not item.result.done()]:
            probes, refusal = self._open_since is not None, None
            if len(unscored) > 1 and sum(len(item.body) for item in unscored) > REQUEST_BYTES:
                refusal = Refusal("", too_large=True)
            elif not probes:
                attempt += 1
                refusal = await self._attempt(unscored, until)
            else:
                async with self._probing:
                    if self._open_since is not None:  # the probe before may have closed it
                        await asyncio.sleep(max(0.0, self._probe_at - time.monotonic()))
                        refusal = await self._attempt(unscored, until)
            if refusal is None:
                continue
            for item in unscored:
                item.words = refusal.said
            if refusal.too_large and len(unscored) > 1:
                half = len(unscored) // 2
                await self._deliver(unscored[:half], until)
                await self._deliver(unscored[half:], until)
            elif not refusal.again or (attempt >= config.attempts and not probes):
                tries = f" ({attempt} attempts)" if attempt > 1 else ""
                self._fail(unscored, f"{refusal.said}{tries}", timed_out=refusal.timed_out)
            elif not probes:
                pause = min(config.backoff_s * 2 ** (attempt - 1), config.longest_backoff_s)
                await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), refusal.after_s))

    async def _attempt(self, batch: Sequence[Item], until: float) -> Refusal | None:
        """Send a request and set the outcomes in its answer. Returns what failed, also if the
        server has not scored all in time. Opens or closes the circuit breaker.
        """
        failed = True
        try:
            limit_s = min(self._attempt_s, until - time.monotonic())
            outcomes = await self._post([item.body for item in batch], limit_s)
            failed = False
            if isinstance(outcomes, Refusal):
                failed, self._last_words = outcomes.again, outcomes.said
        finally:
            self._failures = self._failures + 1 if failed else 0
            if not failed:
                self._open_since = None
            elif self._failures >= self._config.breaker_failures:
                self._probe_at = time.monotonic() + self._config.breaker_pause_s
            if self._failures == self._config.breaker_failures:
                self._open_since = time.monotonic()
                self._warning = (
                    f"the reward server {self.url} failed {self._failures} times in a row: it"
                    f" {self._last_words}; requests wait until it answers again"
                )
        if isinstance(outcomes, Refusal):
            return outcomes
        for item, outcome in zip(batch, outcomes, strict=True):
            if outcome is not None:
                self._answer(item, outcome)
        late = Refusal("had not scored it in time", again=True, timed_out=True)
        return late if None in outcomes else None

    async def _post(
        self, samples: Sequence[bytes], limit_s: float
    ) -> list[Outcome | None] | Refusal:
        """The outcomes of one request, None for samples that are not scored yet."""
        import aiohttp

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers[WITHIN] = f"{ANSWER_SHARE * limit_s:.3f}"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.value}"
        most = ANSWER_BYTES + ANSWER_BYTES_PER_SAMPLE * len(samples)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.post(
                    self.url,
                    data=request_body(samples),
                    headers=headers,
                    allow_redirects=False,  # the token is for this address
                ) as reply,
            ):
                body = b""
                async for chunk in reply.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > most:
                        return Refusal(f"answered more than {most:,} bytes")
        except TimeoutError:
            why = f"did not answer within {limit_s:.3g} s (environment.remote.attempt_limit_s)"
            return Refusal(why, again=True, timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            # Before it is shortened: a part of the token would not be found.
            why = shortened(self._without_token(f"{type(error).__name__}: {error}"), WORDS)
            return Refusal(f"cannot be reached: {why}", again=True)
        text = self._without_token(body.decode(errors="replace"))
        if reply.status != 200:
            return self._refusal(reply.status, text, reply.headers.get("Retry-After", ""))
        try:
            return read_answer(text, len(samples), maps_scores=self._maps_scores)
        except ValueError as error:
            why = f"gave an answer that {error}; see docs/reference_rewards.md for what it must be"
            return Refusal(why)

    def _refusal(self, status: int, text: str, after: str) -> Refusal:
        """What an answer of another status than 200 stands for. `text`: its body. `after`: its
        header `Retry-After`.
        """
        words = text
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            tree = json.loads(text)
            words = str(tree.get("error") or tree.get("detail") or text)
        words = shortened(self._without_token(words), WORDS)
        reason = f"answered {status}" + (f": {words}" if words else "")
        if status == 429 or status >= 500:
            seconds = float(after) if after.isascii() and after.isdecimal() else 0.0
            return Refusal(reason, again=True, after_s=seconds)
        advice = next((fix for codes, fix in ADVICE.items() if status in codes), "see its log")
        if status in (401, 403) and (variable := self._config.token_variable):
            advice = (
                f"export {variable} (environment.remote.token_variable) with the server's own token"
            )
        return Refusal(f"{reason}; {advice}", too_large=status == 413)
