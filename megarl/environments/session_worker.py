"""Sessions inside a worker process: many are open, and their calls wait beside one another.

(command, arguments) --SessionHost--> {observation | score | answer | failure}
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megarl.environments.config import EnvironmentConfig
from megarl.environments.plain_calls import LimitExceeded, PlainCalls, within
from megarl.environments.scores import read_score
from megarl.environments.session import Answer, Observation
from megarl.environments.worker import Host, MemoryLimit, Reply, said, score_reply

MOST_CHARACTERS = 4_000_000
"""Characters of an observation. More cannot be read by a model, and tokenising takes seconds."""
THREAD_CHARACTERS = 20_000
"""Longer observations are tokenised on a thread, so that other sessions do not wait."""


class SessionHost(Host):
    """The open sessions of one worker process."""

    def __init__(
        self,
        make: Callable[[], Any],
        codec: Any,
        limit: MemoryLimit,
        config: EnvironmentConfig,
    ) -> None:
        """`make` creates a session."""
        super().__init__(codec, limit, config)
        self._make, self._plain = make, PlainCalls(config.threads)
        self._open: dict[str, Any] = {}
        self._busy: set[str] = set()
        """Rollouts whose session is in a call."""
        self._discarded: set[str] = set()
        """Those of `_busy` that were discarded meanwhile."""
        self._encoding = threading.Lock()

    async def _begin(self, key: str, prompt: Any) -> Reply:
        with self._in_call(key):
            return await self._begun(key, prompt)

    async def _begun(self, key: str, prompt: Any) -> Reply:
        limit_s, setting = self._config.start_limit_s, "start_limit_s"
        session = await self._call(self._make, (), limit_s, setting)
        observation = await self._call(session.start, (prompt,), limit_s, setting)
        if not isinstance(observation, Observation):
            said = f"the session's start returned {observation!r:.200}, not an Observation"
            raise TypeError(said)
        if observation.reward != 0.0:
            raise ValueError("the session's start returned a reward, but no turn was taken yet")
        reply = await self._observation(observation)
        await self._keep(key, session)
        return reply

    @contextlib.contextmanager
    def _in_call(self, key: str) -> Iterator[None]:
        """Mark the session of `key` as busy, so that `_cut_off` can find it."""
        self._busy.add(key)
        try:
            yield
        finally:
            self._busy.discard(key)
            self._discarded.discard(key)

    async def _keep(self, key: str, session: Any) -> None:
        """Leave a session open, unless it was discarded during the call."""
        if key in self._discarded:
            await self._close(session)
        else:
            self._open[key] = session

    async def _step(self, key: str, token_ids: Any) -> Reply:
        session = self._open.pop(key, None)
        if session is None:
            detail = "the session ended with the process it ran in, which another session broke"
            return {"failure": "error", "detail": detail}
        with self._in_call(key):
            return await self._stepped(key, session, token_ids)

    async def _stepped(self, key: str, session: Any, token_ids: Any) -> Reply:
        goes_on = False
        try:
            text = self._codec.decode(token_ids)
            limit_s = self._config.time_limit_s
            if getattr(session, "limits_its_calls", False):
                answer = await session.step(text, token_ids)
            else:
                answer = await self._call(session.step, (text, token_ids), limit_s, "time_limit_s")
            if isinstance(answer, Observation):
                reply = await self._observation(answer)
                if not reply["observation"]:
                    raise ValueError(
                        f"the session's step returned the observation {answer.text!r:.80}, which"
                        " has no tokens in the model's tokenizer"
                    )
                goes_on = True
                await self._keep(key, session)
                return reply
        finally:
            if not goes_on:
                await self._close(session)
        if isinstance(answer, Answer):
            if not isinstance(answer.text, str):
                raise TypeError(f"the session's answer is {answer.text!r:.200}, not a text")
            metrics = read_score({"reward": 0.0, **answer.metrics}).metrics
            return {"answer": answer.text, "metrics": metrics}
        return score_reply(answer, maps_scores=not self._config.maps_no_scores)

    async def _cut_off(self, key: str, token_ids: Any) -> Reply:
        """Discard session `key`, whose response is cut off; a session with a method
        `cut_off_inside` says inside what.
        """
        if key in self._busy:
            self._discarded.add(key)
        session = self._open.pop(key, None)
        if session is None:
            return {"finish": ""}
        inside = getattr(session, "cut_off_inside", None)
        try:
            if inside is None or token_ids is None:
                return {"finish": ""}
            limit_s = self._config.time_limit_s
            finish = await self._call(inside, (token_ids,), limit_s, "time_limit_s")
            if finish not in ("", "tool_call"):
                raise TypeError(f"cut_off_inside returned {finish!r:.80}, not '' or 'tool_call'")
            return {"finish": finish}
        finally:
            await self._close(session)

    async def _observation(self, observation: Observation) -> Reply:
        text = observation.text
        if not isinstance(text, str):
            raise TypeError(f"the session's observation is {text!r:.200}, not a text")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"the session's observation has {len(text):,} characters, more than"
                f" {MOST_CHARACTERS:,}; shorten it"
            )
        reward = read_score(observation.reward).reward
        if len(text) > THREAD_CHARACTERS:
            return {"observation": await asyncio.to_thread(self._encode, text), "reward": reward}
        return {"observation": self._encode(text), "reward": reward}

    def _encode(self, text: str) -> list[int]:
        with self._encoding:  # a tokenizer is used by one thread at a time
            return self._codec.encode(text)

    async def _call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float, setting: str
    ) -> Any:
        """What a function of the user returns; raises `LimitExceeded` after `limit_s` seconds. A
        plain function may return an awaitable.
        """
        try:
            if inspect.iscoroutinefunction(function):
                made = function(*arguments)
            else:
                made = await self._plain.run(function, arguments, limit_s)
            return await within(limit_s, made) if inspect.isawaitable(made) else made
        except LimitExceeded:
            limit = f"environment.{setting} = {limit_s:g} s"
            raise LimitExceeded(f"no reply within {limit}") from None

    async def _close(self, session: Any) -> None:
        """Call the session's method `close`, if it has one. The rollout has ended, so that an error
        there is only printed.
        """
        close = getattr(session, "close", None)
        if close is None:
            return
        try:
            await self._call(close, (), self._config.time_limit_s, "time_limit_s")
        except BaseException as error:
            print(f"a session's close failed: {said(error)}", file=sys.stderr)
