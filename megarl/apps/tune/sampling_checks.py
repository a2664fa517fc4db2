"""Checks of `megarl sample` before anything heavy starts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.parallel.layout import Layout
from megarl.run.plan import plan_generation
from megarl.settings.config import RunConfig
from megarl.settings.schema import replace, require
from megarl.settings.training import LayoutConfig
from megarl.trainer.context import RunInputs
from megarl.trainer.plan import check_positions, plan_role
from megarl.trainer.role_placement import RolePlace


@dataclass(frozen=True)
class SampleInputs:
    """What `check_sample` has loaded for `megarl sample`. Its only field, `run`, holds the prompts,
    the tokenizer and the model's Hugging Face configuration.
    """

    run: RunInputs

    def __str__(self) -> str:
        return f"{len(self.run.prompts or ())} prompts"


def check_sample(config: RunConfig, ranks: int | None = None) -> SampleInputs:
    """Run all checks of `megarl sample` before anything heavy starts: settings, model, data and
    reward models. `ranks`: number of processes, which must be 1; None for that of the launcher's
    environment variables. Returns the prompts, tokenizer and model configuration that were loaded.
    Raises `ValueError` if a check fails.
    """
    require(
        config.rollout.temperature > 0 or config.sample.samples == 1,
        f"sample.samples is {config.sample.samples}, but rollout.temperature is 0, at which all"
        " responses are the same; raise it",
    )
    require(
        config.sample.samples > 1 or config.sample.keep != "pairs",
        "sample.keep is 'pairs', but sample.samples is 1; raise it",
    )
    require(
        not config.environment.has_sessions,
        "environment.session, tools or agent is set, but the turns of an environment are no"
        " response to learn from; set environment.verifier instead",
    )
    inputs = plan_generation(config, "sample", ranks)
    alone = RolePlace((0,), Layout(1, 1, 1))
    for name, model in config.reward_models.items():
        # Of one process: a recipe of `task: rl` may place them elsewhere.
        here = {**config.reward_models, name: replace(model, ranks=(), layout=LayoutConfig())}
        own = replace(config, reward_models=here)
        plan_role(f"reward_models.{name}", own, inputs.hf, alone)
    if inputs.prompts is not None:
        names = [f"reward_models.{name}" for name in config.reward_models]
        check_positions(config, inputs.hf, names, inputs.prompts.longest)
    return SampleInputs(inputs)
