"""One attempt at a prompt: model and environment write segments in turn until there is a verdict.

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
from typing import Literal

import numpy as np

from megarl.environments.scoring import Environment
from megarl.rollout.requests import EnginePool, RequestRoute
from megarl.system.spans import Requests
from megarl.types import Prompt, Segment, Verdict


def request_seed(run_seed: int, *position: int | str) -> int:
    """Sampling seed, 62 bits, of the request at `position` (such as group, sample, turn):
    independent of the order of arrival.
    """
    text = "/".join(str(word) for word in (run_seed, *position))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass
class Attempts:
    """Generates and scores single rollouts, in one event loop."""

    engines: EnginePool
    environment: Environment
    run_seed: int
    max_new_tokens: int
    """Of all segments together, without the prompt."""
    max_turns: int = 0
    """Limit of model segments; 0 is none."""
    max_together: int = 0
    """Limit of all tokens of a tree, each counted once; 0 for `max_new_tokens`."""
    max_failure_share: float = 1.0
    """Fraction of failed verdicts from which an evaluation raises `UserError`."""
    penalises_cut_off: bool = False
    """Whether a rollout that is cut off has the length penalty -1."""

    moved_at: float = field(default_factory=time.monotonic)
    """When an engine or the environment last answered."""
    scoring: Requests = field(default_factory=lambda: Requests("verdicts", kind="score"))

    def seed(self, *position: int | str) -> int:
        """Sampling seed of a rollout's first request."""
        return request_seed(self.run_seed, *position)

    async def attempt(
        self, prompt: Prompt, *position: int | str, temperature: float
    ) -> tuple[list[Segment], Verdict]:
        """Generate and score one rollout; returns its segments (none if the environment failed
        before the model's first turn) and verdict.

        `position`: of the rollout in the run, for example (group, sample). Request n > 0 has the
        seed `request_seed(run_seed, *position, n)`. A rollout whose session is lost with its
        process is made again, once. Raises `RuntimeError` if an engine does not answer.
        """
        key = "/".join(map(str, position))
        try:
            segments, verdict = await self._attempt(key, prompt, position, temperature)
            if verdict.lost:
                first_warning = verdict.warning
                segments, verdict = await self._attempt(key, prompt, position, temperature)
                warning = "; ".join(filter(None, [first_warning, verdict.warning]))
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
        self, key: str, prompt: Prompt, position: tuple[int | str, ...], temperature: float
    ) -> tuple[list[Segment], Verdict]:
        ids, route = np.asarray(prompt.token_ids, dtype=np.int32), RequestRoute()

        async def generate(earlier: list[Segment], turn: int, max_tokens: int) -> Segment:
            begins_anew = bool(earlier) and earlier[0].follows == -1
            return await self.engines.generate(
                prompt,
                ids[:0] if begins_anew else ids,
                earlier,
                seed=self.seed(*position, *([turn] if turn else [])),
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
            segment = await generate(earlier, turn, min(room, asked) if asked else room)
            segments.append(segment)
            generated = sum(segment.num_tokens for segment in segments if segment.kind == "model")
            # A turn that its own limit has ended is no rollout that was cut off.
            is_short = segment.finish == "length" and segment.num_tokens < room
            with self.scoring:
                answer = await self.environment.step(
                    *(key, prompt, replace(segment, finish="stop") if is_short else segment),
                    num_tokens=generated,
                )
            self.moved_at = time.monotonic()
            if isinstance(answer, Verdict):
                segments[-1] = replace(segment, finish=answer.finish or segment.finish)
                return segments, answer
            if answer.follows is not None and not -1 <= answer.follows < len(segments):
                fault = (
                    f"an observation follows segment {answer.follows}, but the rollout has segments"
                    f" 0 to {len(segments) - 1}; return one of these, -1 or None"
                )
                return segments, await self.environment.cut_off(key, generated, fault)
            if answer.follows == len(segments) - 1:
                answer = replace(answer, follows=None)
            if reached := self._limit_reached(turn, [*segments, answer]):
                segments[-1] = replace(segment, finish=reached)
                verdict = await self.environment.cut_off(key, generated)
                return segments, replace(verdict, reward=verdict.reward + answer.reward)
            segments.append(answer)
            turn += 1

    def _room(self, segments: Sequence[Segment]) -> int:
        """Most tokens of the model's next turn."""
        read = self.max_new_tokens - sum(segment.num_tokens for segment in path(segments))
        together = self.max_together or self.max_new_tokens
        return min(read, together - sum(segment.num_tokens for segment in segments))

    def _limit_reached(
        self, turn: int, segments: Sequence[Segment]
    ) -> Literal["", "length", "turns"]:
        """The limit, if any, that ends the rollout before the model replies to the last segment.
        `turn`: the model's last one, from 0.
        """
        if self._room(segments) <= 0:
            return "length"
        return "turns" if turn + 1 == self.max_turns else ""


def path(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that the last one continues, and itself, in order."""
    return [segments[number] for number in path_numbers(segments, len(segments) - 1)]


def path_numbers(segments: Sequence[Segment], last: int) -> list[int]:
    """Numbers of the segments that segment `last` continues, and its own, in order."""
    chain: list[int] = []
    while last >= 0:
        chain.append(last)
        follows = segments[last].follows
        last = last - 1 if follows is None else follows
    return chain[::-1]


def trained_part(segments: list[Segment], verdict: Verdict) -> tuple[list[Segment], Verdict]:
    """The segments without those that are not trained (`verdict.untrained`) and what was read for
    these alone; the verdict. If none is trained, it is a failure.
    """
    models = [number for number, segment in enumerate(segments) if segment.kind == "model"]
    lines = [path_numbers(segments, number) for number in models if number not in verdict.untrained]
    if not verdict.untrained:
        return segments, verdict
    if not lines:
        detail = verdict.detail or "no client has read an answer of the model"
        failure = verdict.failure or "error"
        return segments, replace(verdict, failure=failure, detail=detail, left_out=True)
    kept = sorted({number for line in lines for number in line})
    before = {number: earlier for line in lines for earlier, number in pairwise([-1, *line])}
    trained: list[Segment] = []
    for new, number in enumerate(kept):
        segment, follows = segments[number], before[number]
        if follows >= 0 or segment.follows is not None:
            parent = kept.index(follows) if follows >= 0 else -1
            segment = replace(segment, follows=None if new and parent == new - 1 else parent)
        trained.append(segment)
    return [*trained[:-1], replace(trained[-1], finish=segments[-1].finish)], verdict
