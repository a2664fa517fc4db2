"""Parts of rollouts for tests: segments, prompts, an environment, a rollout service and its shares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.rollout.batch import SharePlan, shares
from megarl.rollout.requests import EnginePool, RequestRoute
from megarl.rollout.service import RolloutService
from megarl.settings.rollout import RolloutConfig
from megarl.types import Group, Prompt, Segment, TokenArrays, Verdict


def segment(
    tokens: Sequence[int], version: int = 0, *, logprob: float = 0.0, **more: Any
) -> Segment:
    """What the model has generated: `tokens`, all with weights of `version` and `logprob`. `more`:
    other fields of the segment.
    """
    count = len(tokens)
    arrays = TokenArrays(np.array(tokens, np.int32), np.full(count, logprob, np.float32))
    return Segment(
        "model", count, arrays, **({"versions": [(version, count)], "finish": "stop"} | more)
    )


async def requested(
    pool: EnginePool, prompt: Prompt, seed: int, route: RequestRoute | None = None
) -> Segment:
    """The answer of an engine of the pool to a request of a rollout of `prompt`."""
    settings: dict[str, Any] = dict(max_tokens=4, temperature=1.0, route=route or RequestRoute())
    return await pool.generate(prompt, np.array([1, 2], np.int32), [], seed=seed, **settings)


@dataclass
class Prompts:
    """A thousand prompts: `of` an ordinal."""

    of: Callable[[int], Prompt]

    def __len__(self) -> int:
        return 1000

    def at(self, ordinal: int) -> Prompt:
        return self.of(ordinal)


class OneStep:
    """An environment without observations, in which each response is right."""

    has_start = False

    async def step(self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int) -> Verdict:
        return Verdict(1.0, correct=True)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        return [str(part.arrays.token_ids.tolist()) for part in segments]


def rollout_service(
    engines: Sequence[Any],
    config: RolloutConfig,
    prompts: Prompts,
    *,
    kind: type[RolloutService] = RolloutService,
    **settings: Any,
) -> RolloutService:
    """A service for one rank, whose last step is 5. `settings`: further arguments of `kind` and of
    `run_settings`, and `transcripts`, a number for each step, and `dealing`, further arguments of `shares`.
    """
    ranks = settings.setdefault("num_data_ranks", 1)
    deal = functools.partial(
        shares,
        num_data_ranks=ranks,
        num_mini_batches=1,
        micro_batch_tokens=40,
        transcripts=settings.pop("transcripts", 0),
        **settings.pop("dealing", {}),
    )
    usual: dict[str, Any] = {"environment": OneStep(), "deal": deal}
    run = run_settings(config, **{name: settings.pop(name) for name in SETTINGS & settings.keys()})
    return kind(config=run, prompts=prompts, engines=engines, **usual | settings)


SETTINGS = {"last_step", "group_filter", "greedy_baseline", "max_failure_share"}


def run_settings(
    rollout: RolloutConfig,
    *,
    last_step: int = 5,
    group_filter: str = "differing",
    greedy_baseline: bool = False,
    max_failure_share: float = 1.0,
) -> Any:
    """What the service reads of a `RunConfig`."""
    return SimpleNamespace(
        rollout=rollout,
        seed=3,
        steps=last_step + 1,
        group_filter=group_filter,
        greedy_baseline=greedy_baseline,
        algorithm=SimpleNamespace(truncated="train"),
        environment=SimpleNamespace(max_turns=0, max_failure_share=max_failure_share),
    )


def dealt(groups: list[Group], **settings: Any) -> SharePlan:
    """The shares of a step that has drawn and accepted `groups`, without transcripts, for one rank
    and one mini-batch. `settings`: further arguments of `shares`.
    """
    usual: dict[str, Any] = dict(
        step=0, drawn=groups, accepted=groups, seconds=1.0, num_data_ranks=1, num_mini_batches=1,
        micro_batch_tokens=50, transcripts=0,
    )  # fmt: skip
    return shares(**usual | settings)
