"""One attempt at a prompt: the model and the environment write segments in turn until there is a
verdict.

    prompt -> [environment] -> model -> environment -> model -> ... -> Verdict

Model tokens are handed on as sampled; they are never tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megarl.rollout.requests import EnginePool
from megarl.types import Prompt, Segment, Verdict


class EnvironmentHandle(Protocol):
    """Interface that the rollout service needs of an environment, in this process or a remote
    one.
    """

    has_start: bool
    """Whether `begin` must be called before the model's first segment."""

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """Start the session of rollout `key`.

        Returns what the model reads after the prompt: a segment, or None for nothing. Returns a
        verdict if the session could not start.
        """
        ...

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """Respond to the model's `segment` with an observation, or with the verdict that ends the
        rollout. `num_tokens`: tokens the model has generated in the whole rollout.
        """
        ...

    async def cut_off(self, key: str, num_tokens: int) -> Verdict:
        """End the session of rollout `key`, whose token limit is used up; returns the verdict."""
        ...

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """Decode each segment to text, without special tokens."""
        ...


def request_seed(run_seed: int, *place: int | str) -> int:
    """Sampling seed of a generation request. The seed depends only on the run's seed and `place`
    (such as group, sample, turn), so results do not depend on the order of arrival.
    """
    text = "/".join(str(part) for part in (run_seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True)
class Attempts:
    """Generates and scores rollouts with a run's engines and environment."""

    engines: EnginePool
    environment: EnvironmentHandle
    run_seed: int
    max_new_tokens: int
    """Token limit of a rollout: all segments together, without the prompt."""
    max_failure_share: float = 1.0
    """An evaluation raises `UserError` if at least this share of its verdicts has failed."""

    def seed(self, *place: int | str) -> int:
        """Sampling seed of the first generation request of the rollout at `place`."""
        return request_seed(self.run_seed, *place)

    async def attempt(
        self, prompt: Prompt, *place: int | str, temperature: float
    ) -> tuple[list[Segment], Verdict]:
        """Generate and score one rollout of `prompt`: (segments, verdict).

        `place` identifies the rollout in the run, for example (group, sample). The seed of its
        first request is `request_seed(run_seed, *place)`, that of request n > 0 is
        `request_seed(run_seed, *place, n)`.
        """
        key = "/".join(map(str, place))
        prompt_ids = np.asarray(prompt.token_ids, dtype=np.int32)
        segments: list[Segment] = []
        if self.environment.has_start:
            first = await self.environment.begin(key, prompt)
            if isinstance(first, Verdict):
                # A rollout ends with a model segment: one token, trained with the failure's reward.
                part = await self._generate(prompt, prompt_ids, [], place, 0, 1, temperature)
                return [part], first
            if first is not None:
                segments.append(first)
                if first.num_tokens >= self.max_new_tokens:
                    raise RuntimeError(
                        f"the environment's first observation has {first.num_tokens} tokens, but"
                        f" rollout.max_new_tokens is {self.max_new_tokens}; set it higher, or make"
                        " the observation shorter"
                    )
        turn, used = 0, sum(part.num_tokens for part in segments)
        while True:
            left = self.max_new_tokens - used
            part = await self._generate(
                prompt, prompt_ids, segments, place, turn, left, temperature
            )
            segments.append(part)
            used += part.num_tokens
            said = sum(one.num_tokens for one in segments if one.kind == "model")
            answer = await self.environment.step(key, prompt, part, num_tokens=said)
            if isinstance(answer, Segment) and (
                part.finish == "length" or used + answer.num_tokens >= self.max_new_tokens
            ):
                # No token is left for the model to answer with.
                segments[-1] = replace(part, finish="length")
                answer = await self.environment.cut_off(key, said)
            if isinstance(answer, Verdict):
                return segments, answer
            segments.append(answer)
            used += answer.num_tokens
            turn += 1

    async def _generate(
        self,
        prompt: Prompt,
        prompt_ids: np.ndarray,
        segments: list[Segment],
        place: tuple[int | str, ...],
        turn: int,
        max_tokens: int,
        temperature: float,
    ) -> Segment:
        return await self.engines.generate(
            prompt,
            prompt_ids,
            segments,
            seed=self.seed(*place, *([turn] if turn else [])),
            max_tokens=max_tokens,
            temperature=temperature,
        )
