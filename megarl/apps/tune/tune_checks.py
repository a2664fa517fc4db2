"""Checks before anything heavy starts: of a recipe that trains on a fixed data set (`task: sft`,
`preference` and `reward_model`), and of `megarl sample`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from megarl.checkpoints.run_folder import check_writable
from megarl.data.chat_template import ends_of_turns
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preferences import load_preferences
from megarl.data.tokenizer import pad_apart
from megarl.parallel import launcher
from megarl.parallel.launcher import warn
from megarl.parallel.layout import Layout
from megarl.run.plan import find_checkpoint, plan_generation
from megarl.settings.config import (
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
    SupervisedConfig,
    with_steps,
)
from megarl.settings.schema import replace, require
from megarl.settings.training import LayoutConfig
from megarl.trainer.context import DataRows, RunInputs
from megarl.trainer.heads import HeadName
from megarl.trainer.plan import (
    check_positions,
    check_trainable,
    plan_model,
    plan_other_model,
    plan_role,
    plan_training,
    stop_tokens,
)
from megarl.trainer.role_placement import RolePlace, plan_ranks


def check_sft(config: SftConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: sft` that can be known before training: settings, model, layout
    and data. `ranks`: the run's number of ranks; None: as the launcher's environment variables have
    it. Returns what was loaded for the run: model configuration, tokenizer and, on rank 0, the
    tokenised demonstrations. Raises `ValueError` if a check fails.
    """
    return check_supervised(config, ranks)


def check_preference(config: PreferenceConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: preference` that can be known before training: settings, model,
    reference model, layout and data. `ranks`: the run's number of ranks; None: as the launcher's
    environment variables have it. Returns what was loaded for the run: model configuration,
    tokenizer and, on rank 0, the tokenised preferences. Raises `ValueError` if a check fails.
    """
    inputs = check_supervised(config, ranks)
    reference = config.reference.model
    theirs = plan_other_model("reference", reference, config.model, inputs.hf)
    if reference.path:
        check_trainable(config.training, reference, theirs)
    if config.reference.cache:
        check_writable(config.reference.cache, setting="reference.cache")
    return inputs


def check_reward_model(config: RewardModelConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: reward_model` that can be known before training: settings,
    model, layout and data. `ranks`: the run's number of ranks; None: as the launcher's environment
    variables have it. Returns what was loaded for the run: model configuration, tokenizer and, on
    rank 0, the tokenised pairs. Sets a padding token that ends no text, since a classifier's score
    is read at the last token that is no padding. Raises `ValueError` if a check fails.
    """
    inputs = check_supervised(config, ranks)
    require(
        type(inputs.hf) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        f"model type {inputs.hf.model_type} of model.path {config.model.path!r} has no sequence"
        " classifier in transformers, as which a reward model is saved; choose another model",
    )
    source = config.model.tokenizer or config.model.path
    pad_apart(inputs.tokenizer, inputs.hf.get_text_config().vocab_size, source=source)
    return inputs


def check_supervised(config: SupervisedConfig, ranks: int | None) -> RunInputs:
    """Run the checks that all runs on a fixed data set share; rank 0 reads the data. `ranks`:
    number of ranks to check for, None for the launcher's. Returns tokenizer, model configuration,
    and on rank 0 the rows. Raises `ValueError` if a check fails.
    """
    head: HeadName = "scalar" if isinstance(config, RewardModelConfig) else "logprobs"
    section, load = "preferences", cast("Any", load_preferences)
    if isinstance(config, SftConfig):
        section, load = "demonstrations", load_demonstrations
    elif isinstance(config, PreferenceConfig):
        load = partial(load_preferences, single=config.loss.method == "kto")
    layout = plan_ranks(config, launcher.count_ranks(ranks)).layout
    require(
        config.samples_per_step >= layout.data,
        f"samples_per_step is {config.samples_per_step} for {layout.data} data ranks; raise it",
    )
    tokenizer, hf = plan_model(config.model)
    plan_training(config, tokenizer, hf, head)
    rows = held_out = None
    if launcher.rank() == 0:  # rank 0 reads for all, and sends every step's rows to the others
        limit = getattr(hf.get_text_config(), "max_position_embeddings", None)

        def read(source: Any, setting: str) -> DataRows:
            rows = load(source, tokenizer, seed=config.seed, setting=setting)
            warn(rows.warning)
            require(
                limit is None or rows.longest <= limit,
                f"{setting} has a row of {rows.longest} tokens, but the model's"
                f" max_position_embeddings is {limit}; set {setting}.max_tokens to that and drop"
                " longer rows",
            )
            return rows

        rows = read(getattr(config, section), section)
        evaluated = getattr(config.evaluation, section)
        if evaluated.source:
            held_out = read(evaluated, f"evaluation.{section}")
            require(
                len(held_out) >= layout.data,
                f"evaluation.{section} has {len(held_out)} rows for {layout.data} data ranks; set a"
                " longer source",
            )
    with_steps(config, len(rows or ()))
    data, source = rows.fingerprint if rows is not None else "", getattr(config, section)
    ends = ends_of_turns(tokenizer, source.template, source.template_variables)
    return RunInputs(
        layout,
        tokenizer,
        hf,
        stop_tokens(tokenizer, config.model, hf, ends),
        data,
        rows=rows,
        held_out_rows=held_out,
        resume_from=find_checkpoint(config, layout, data, head=head),
    )


def check_sample(config: RunConfig, ranks: int | None = None) -> RunInputs:
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
        models = {**config.reward_models, name: replace(model, ranks=(), layout=LayoutConfig())}
        one_rank = replace(config, reward_models=models)
        plan_role(f"reward_models.{name}", one_rank, inputs.hf, alone)
    if inputs.prompts is not None:
        names = [f"reward_models.{name}" for name in config.reward_models]
        check_positions(config, inputs.hf, names, inputs.prompts.longest)
    return inputs
