"""Checks of `megarl rollout` before anything heavy starts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.checks.preflight import check_run, ranks_to_check
from megarl.config import RunConfig
from megarl.parallel.mesh import local_device
from megarl.schema import require
from megarl.trainer.context import RunInputs


@dataclass(frozen=True)
class RolloutInputs:
    """What the checks of `megarl rollout` have loaded."""

    run: RunInputs

    def __str__(self) -> str:
        return f"{len(self.run.prompts or ())} prompts"


def check_rollout(config: RunConfig, ranks: int | None = None) -> RolloutInputs:
    """Run all checks of `megarl rollout`, which runs as one rank. Returns what the checks have
    loaded. Raises `ValueError` if a check fails.
    """
    size = ranks_to_check(ranks)
    require(size == 1, f"megarl rollout runs as one process, but was started as {size} ranks")
    on_cpu = local_device().type == "cpu"
    return RolloutInputs(check_run(config, num_ranks=1, on_cpu=on_cpu, new=False))
