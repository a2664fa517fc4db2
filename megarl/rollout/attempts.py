"""One attempt at a prompt: the model and the environment write segments in turn until there is a
verdict.

    prompt -> [environment] -> model -> environment -> model -> ... -> Verdict

Model tokens are handed on as sampled; they are never tokenised again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from megarl.rollout.requests import EnginePool, RequestRoute
from megarl.system.spans import Requests
from megarl.types import Prompt, Segment, Verdict


class PromptSource(Protocol):
    """Interface of the training prompts in their order: position n has the same prompt in every
    process and after every resume, so that a position in the data is a single number. `len` is the
    number of prompts of an epoch.
    """

    def __len__(self) -> int: ...

    def at(self, ordinal: int) -> Prompt:
        """The prompt at position `ordinal` of training, from 0, counted over all epochs; each epoch
        is shuffled anew.
        """
        ...


class EnvironmentHandle(Protocol):
    """Interface of an environment, as the rollout service calls it: it scores the model's text and,
    in rollouts of several turns, responds to it. A session is the environment's state for one
    rollout, and has a `key`.
    """

    has_start: bool
    """Whether `begin` must be called before the model's first segment."""

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """Start the session of the rollout with this `key`, a text that no other rollout has.

        Returns what the model reads after the prompt: an environment segment (token ids), or None
        for nothing. Returns a verdict (reward and the reason of the failure) if the session could
        not start.
        """
        ...

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """Respond to the model's newest `segment` (token ids) of the rollout `key`: by an
        environment segment, after which the model goes on, or by the verdict (reward, and whether
        the response is correct) that ends the rollout. `num_tokens`: tokens that the model has
        generated in the whole rollout.
        """
        ...

    async def cut_off(self, key: str, num_tokens: int, fault: str = "") -> Verdict:
        """End the session of the rollout `key`, which has reached its limit of tokens or turns;
        returns the verdict (reward, and whether the response is correct). `num_tokens`: tokens that
        the model has generated in the rollout. `fault`: what the session did wrong, if anything,
        which makes the verdict a failure.
        """
        ...

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """Decode each segment, whose token arrays may be in another process, to text without
        special tokens; one text for each.
        """
        ...


def request_seed(run_seed: int, *place: int | str) -> int:
    """Sampling seed of a generation request, an int of 62 bits. It depends only on the run's seed
    and `place`, which names the request in the run (such as group, sample, turn), so results do not
    depend on the order of arrival.
    """
    text = "/".join(str(part) for part in (run_seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass
class Attempts:
    """Generates and scores single rollouts with a run's engines and environment, by `await
    attempt(prompt, ...)`. Used in one event loop, in which many rollouts run at the same time.
    """

    engines: EnginePool
    environment: EnvironmentHandle
    run_seed: int
    max_new_tokens: int
    """Token limit of a rollout: all segments together, without the prompt."""
    max_turns: int = 0
    """Limit of model segments in a rollout; 0 is none."""
    max_together: int = 0
    """Token limit of a rollout whose segments are a tree: all of them together, each counted once;
    0 for `max_new_tokens`."""
    max_failure_share: float = 1.0
    """Fraction, 0 to 1, of failed verdicts from which an evaluation raises `UserError`."""
    penalises_cut_off: bool = False
    """Whether the length penalty of a rollout that is cut off is -1, that at the token limit."""

    moved_at: float = field(default_factory=time.monotonic)
    """When an engine or the environment has last given an answer."""
    scoring: Requests = field(default_factory=lambda: Requests("verdicts", kind="score"))
    """Records in the activity files that the environment is at work."""

    def seed(self, *place: int | str) -> int:
        """Sampling seed of the first generation request of a rollout. `place` names the rollout in
        the run, for example (group, sample).
        """
        return request_seed(self.run_seed, *place)

    async def attempt(
        self, prompt: Prompt, *place: int | str, temperature: float
    ) -> tuple[list[Segment], Verdict]:
        """Generate and score one rollout of `prompt`. Returns (the segments in order, with token
        ids and log-probs, of the model and of the environment, none if the environment failed
        before the model's first turn; the verdict, with the reward and whether the response is
        correct). `temperature`: of sampling, 0 is greedy.

        `place` names the rollout in the run, for example (group, sample). The seed of its first
        request is `request_seed(run_seed, *place)`, that of request n > 0 is
        `request_seed(run_seed, *place, n)`. Raises `RuntimeError` if an engine does not answer.

        A rollout whose session is lost with its process is made again, once: any of the sessions
        there may have ended the process, or none of them.
        """
        key = "/".join(map(str, place))
        try:
            segments, verdict = await self._attempt(key, prompt, place, temperature)
            if verdict.lost:
                told = verdict.warning
                segments, verdict = await self._attempt(key, prompt, place, temperature)
                warning = "; ".join(filter(None, [told, verdict.warning]))
                verdict = replace(verdict, warning=warning)
            if self.penalises_cut_off and segments and segments[-1].finish != "stop":
                reward = verdict.reward - verdict.penalty - 1.0
                verdict = replace(verdict, reward=reward, penalty=-1.0)
            return trained_part(segments, verdict)
        except BaseException:
            if self.environment.has_start:  # or the session stays open in its process
                asyncio.gather(self.environment.cut_off(key, 0), return_exceptions=True)
            raise

    async def _attempt(
        self, key: str, prompt: Prompt, place: tuple[int | str, ...], temperature: float
    ) -> tuple[list[Segment], Verdict]:
        ids, route = np.asarray(prompt.token_ids, dtype=np.int32), RequestRoute()

        async def generate(earlier: list[Segment], turn: int, max_tokens: int) -> Segment:
            begins_anew = bool(earlier) and earlier[0].follows == -1
            return await self.engines.generate(
                prompt,
                ids[:0] if begins_anew else ids,
                earlier,
                seed=self.seed(*place, *([turn] if turn else [])),
                max_tokens=max_tokens,
                temperature=temperature,
                stop=earlier[-1].stop_next if earlier else (),
                route=route,
            )

        segments: list[Segment] = []
        if self.environment.has_start:
            with self.scoring:
                first = await self.environment.begin(key, prompt)
            self.moved_at = time.monotonic()
            if isinstance(first, Verdict):
                return [], first
            if first is not None:
                segments.append(first)
                if first.num_tokens >= self.max_new_tokens:
                    fault = (
                        f"the environment's first observation has {first.num_tokens} tokens, but"
                        f" rollout.max_new_tokens is {self.max_new_tokens}; set it higher, or make"
                        " the observation shorter"
                    )
                    verdict = await self.environment.cut_off(key, 0, fault)
                    return [], replace(verdict, left_out=True)
        turn = 0
        while True:
            earlier = path(segments)
            room = self._room(segments)
            asked = segments[-1].max_next if segments else 0
            part = await generate(earlier, turn, min(room, asked) if asked else room)
            segments.append(part)
            said = sum(one.num_tokens for one in segments if one.kind == "model")
            # A turn that its own limit has ended is no rollout that was cut off.
            is_short = part.finish == "length" and part.num_tokens < room
            with self.scoring:
                answer = await self.environment.step(
                    *(key, prompt, replace(part, finish="stop") if is_short else part),
                    num_tokens=said,
                )
            self.moved_at = time.monotonic()
            if isinstance(answer, Verdict):
                segments[-1] = replace(part, finish=answer.finish or part.finish)
                return segments, answer
            if answer.follows is not None and not -1 <= answer.follows < len(segments):
                fault = (
                    f"an observation follows segment {answer.follows}, but the rollout has segments"
                    f" 0 to {len(segments) - 1}; return one of these, -1 or None"
                )
                return segments, await self.environment.cut_off(key, said, fault)
            if answer.follows == len(segments) - 1:
                answer = replace(answer, follows=None)
            if reached := self._limit_reached(turn, [*segments, answer]):
                segments[-1] = replace(part, finish=reached)
                verdict = await self.environment.cut_off(key, said)
                return segments, replace(verdict, reward=verdict.reward + answer.reward)
            segments.append(answer)
            turn += 1

    def _room(self, segments: Sequence[Segment]) -> int:
        """The number of tokens that the model's next turn may have at most, after the rollout's
        `segments` so far. Two limits hold: what the model reads for the turn, with the turn, has at
        most `max_new_tokens` after the prompt, and all segments together at most `max_together`.
        """
        read = self.max_new_tokens - sum(one.num_tokens for one in path(segments))
        together = self.max_together or self.max_new_tokens
        return min(read, together - sum(one.num_tokens for one in segments))

    def _limit_reached(
        self, turn: int, segments: Sequence[Segment]
    ) -> Literal["", "length", "turns"]:
        """The limit that ends the rollout before the model replies to the last of `segments`, an
        observation: "length" if no token is left, "turns" if the model has had all its turns, ""
        if neither is reached. `turn`: number of the model's last turn, from 0.
        """
        if self._room(segments) <= 0:
            return "length"
        return "turns" if turn + 1 == self.max_turns else ""


def path(segments: Sequence[Segment]) -> list[Segment]:
    """Those of a rollout's `segments` that the last one continues, and the last one, in order: all
    of them, unless the rollout is a tree (`Segment.follows`).
    """
    return [segments[number] for number in _numbers(segments, len(segments) - 1)]


def _numbers(segments: Sequence[Segment], last: int) -> list[int]:
    """Numbers of the `segments` that segment `last` continues, and `last`, in order."""
    found: list[int] = []
    while last >= 0:
        found.append(last)
        follows = segments[last].follows
        last = last - 1 if follows is None else follows
    return found[::-1]


def trained_part(segments: list[Segment], verdict: Verdict) -> tuple[list[Segment], Verdict]:
    """(the `segments` of a rollout without those that are not trained (`verdict.untrained`), and
    without what the model has read for these alone; the verdict). If none is trained the rollout is
    a failure, with all segments.
    """
    models = [number for number, part in enumerate(segments) if part.kind == "model"]
    lines = [_numbers(segments, number) for number in models if number not in verdict.untrained]
    if not verdict.untrained:
        return segments, verdict
    if not lines:
        detail = verdict.detail or "no client has read an answer of the model"
        failure = verdict.failure or "error"
        return segments, replace(verdict, failure=failure, detail=detail, left_out=True)
    kept = sorted({number for line in lines for number in line})
    before = {number: earlier for line in lines for earlier, number in pairwise([-1, *line])}
    found: list[Segment] = []
    for new, number in enumerate(kept):
        part, follows = segments[number], before[number]
        if follows >= 0 or part.follows is not None:
            place = kept.index(follows) if follows >= 0 else -1
            part = replace(part, follows=None if new and place == new - 1 else place)
        found.append(part)
    return [*found[:-1], replace(found[-1], finish=segments[-1].finish)], verdict
