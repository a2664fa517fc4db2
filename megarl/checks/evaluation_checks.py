"""Checks of `megarl eval` before anything heavy starts: every model and every data set."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.checks.preflight import check_run, ranks_to_check, warn
from megarl.checks.roles import check_positions
from megarl.config import RunConfig
from megarl.data.source import load_prompts
from megarl.lookup import of_app
from megarl.parallel.mesh import local_device
from megarl.schema import replace, require
from megarl.trainer.context import RunInputs
from megarl.types import Prompt


@dataclass(frozen=True)
class EvalCase:
    """A model to evaluate, and the problems."""

    config: RunConfig
    """The recipe with this model as `model.path`."""
    inputs: RunInputs
    sets: dict[str, list[Prompt]]
    """{source: problems}, rendered and tokenised for this model."""


@dataclass(frozen=True)
class EvalInputs:
    """What the checks of `megarl eval` have loaded."""

    cases: list[EvalCase]

    def __str__(self) -> str:
        sets = self.cases[0].sets.items()
        counts = ", ".join(f"{len(prompts)} problems of {source}" for source, prompts in sets)
        return f"{len(self.cases)} models, {counts}"


def check_eval(config: RunConfig, ranks: int | None = None) -> EvalInputs:
    """Run all checks of `megarl eval`, which runs as one rank. Returns what the checks have loaded.
    Raises `ValueError` if a check fails.
    """
    size = ranks_to_check(ranks)
    require(size == 1, f"megarl eval runs as one process, but was started as {size} ranks")
    require(
        config.evaluation.prompts.names_data,
        "evaluation.prompts.source is empty; set it to held-out problems",
    )
    require(
        config.evaluation.samples == 1 or config.rollout.temperature > 0,
        f"evaluation.samples is {config.evaluation.samples}, but rollout.temperature is 0, at which"
        " all samples are the same; raise it",
    )
    return EvalInputs([check_evaluated_model(config, path) for path in models(config)])


def models(config: RunConfig) -> tuple[str, ...]:
    """The models to evaluate."""
    return tuple(dict.fromkeys(config.evaluation.models)) or (config.model.path,)


def check_evaluated_model(config: RunConfig, path: str) -> EvalCase:
    """Check one model and read the data sets with its tokenizer and chat template."""
    own = replace(config, model=replace(config.model, path=path))
    inputs = check_run(own, num_ranks=1, on_cpu=local_device().type == "cpu", new=False)
    assert inputs.held_out is not None
    first = config.evaluation.prompts
    require(
        not (first.sources and config.evaluation.sources),
        "evaluation.sources is set beside evaluation.prompts.sources; evaluation.sources are read"
        " as evaluation.prompts.source is, so set that, or leave evaluation.sources out",
    )
    sets = {first.label: list(inputs.held_out)}
    for source in config.evaluation.sources:
        one = replace(first, source=source)
        rows = load_prompts(
            one,
            inputs.tokenizer,
            seed=config.seed,
            setting="evaluation.prompts",
            tools=inputs.tools,
        )
        warn(rows.warning)
        check_positions(own, inputs.hf, (), rows.longest)
        if config.environment.programs:
            of_app("check_rows")(config.environment, rows, f"evaluation.sources {source}")
        sets[source] = list(rows)
    return EvalCase(own, inputs, sets)
