"""Checks of `megarl rollout` and `megarl replay` before anything heavy starts, and the command line
of `megarl replay`, which has a run folder where other commands have a recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.observe.observer import METRICS
from megarl.observe.sinks import read_records
from megarl.settings.config import RunConfig
from megarl.settings.schema import require

if TYPE_CHECKING:
    from megarl.system.console import Options
    from megarl.trainer.context import RunInputs


def check_rollout(config: RunConfig, ranks: int | None = None) -> RunInputs:
    """Run all checks of `megarl rollout` before anything heavy starts: settings, model and data.
    `ranks`: number of processes that were started, which must be 1; None for that of the launcher's
    environment variables. Returns the tokenizer, model configuration and prompts that were loaded.
    Raises `ValueError` if a check fails.
    """
    from megarl.run.plan import plan_generation

    require(
        not config.model.from_scratch,
        "model.from_scratch is true, but megarl rollout generates with the weights of model.path;"
        " set model.from_scratch to false and model.path to a trained model, such as"
        " RUN/checkpoints/step_000010/model",
    )
    return plan_generation(config, "rollout", ranks)


def arguments(options: Options) -> None:
    """Change the words after `megarl replay`, RUN [--setting=value ...], to those of a command with
    a recipe: RUN/recipe.yaml, with settings of the replay. Raises `ValueError` if RUN has none.
    """
    run = Path(options.recipe)
    recipe = run / "recipe.yaml"
    require(
        recipe.is_file(),
        f"{run} has no recipe.yaml; name the folder of a run, as in megarl replay runs/my-run",
    )
    settings = {"folder": str(run / "replay"), "resume": "false", "epochs": "null"}
    words = [word for word in options.overrides if word.startswith("--")]
    typed = {word.removeprefix("--").partition("=")[0] for word in words}
    filled = [f"--{key}={value}" for key, value in settings.items() if key not in typed]
    options.recipe = str(recipe)
    options.overrides = [f"--replay.run={run}", *filled, *options.overrides]


def steps_to_replay(config: RunConfig) -> int:
    """Number of steps that `megarl replay` trains again: `replay.steps` or, if that is 0, all that
    the run `replay.run` has finished. Raises `ValueError` if the run has finished none, or fewer
    than `replay.steps`.
    """
    metrics = Path(config.replay.run) / METRICS
    done = max((record["step"] for record in read_records(metrics)), default=0)
    require(done > 0, f"{metrics} has no finished step; replay a run that has trained")
    steps = config.replay.steps or done
    require(
        steps <= done,
        f"replay.steps is {steps}, but {config.replay.run} has finished {done} steps; set it to at"
        f" most {done}",
    )
    return min(done, steps)


def check_replay(config: RunConfig, ranks: int | None = None) -> RunInputs:
    """Run all checks of `megarl replay`, which trains again on recorded batches, before anything
    heavy starts: settings, model, parallel layout and the batches; prompts, verifiers and engines
    are not needed. `ranks`: number of processes to check for, None for that of the launcher's
    environment variables. Returns the tokenizer, model configuration and layout (degrees of data,
    sequence and tensor parallelism). Raises `ValueError` if a check fails.
    """
    from megarl.parallel.launcher import count_ranks
    from megarl.rollout.batch_files import refuse_gaps
    from megarl.run.plan import find_checkpoint
    from megarl.trainer import plan
    from megarl.trainer.context import RunInputs, trained_roles
    from megarl.trainer.role_placement import plan_ranks

    run = Path(config.replay.run)
    require(
        Path(config.folder).absolute() != run.absolute(),
        f"folder is {config.folder}, the run that is replayed; set another one, or none",
    )
    num_ranks = count_ranks(ranks)
    policy = plan_ranks(config, num_ranks)
    members, layout = policy.ranks, policy.layout
    data_ranks = refuse_gaps(run, steps_to_replay(config))
    require(
        layout.data == data_ranks,
        f"the batches of {run} are those of {data_ranks} data ranks, and this is {layout}; start"
        f" the replay with as many ranks as the run, as in megarl replay {run} --ranks"
        f" {data_ranks * layout.size // layout.data}",
    )
    tokenizer, hf = plan.plan_model(config.model)
    plan.plan_training(config, tokenizer, hf)
    roles = {name: plan.plan_role(name, config, hf, policy) for name in config.other_roles}
    checkpoint = find_checkpoint(config, layout, "", trained_roles(config, roles))
    stops = plan.stop_tokens(tokenizer, config.model, hf)
    return RunInputs(
        layout, tokenizer, hf, stops, "", resume_from=checkpoint, ranks=members, roles=roles
    )
