"""Checks of a recipe that trains on a fixed data set, before anything heavy starts: `task: sft`,
`task: preference` and `task: reward_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedTokenizerBase

from megarl.checkpoints.run_folder import check_writable
from megarl.data.chat_template import ends_of_turns
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preferences import load_preferences
from megarl.data.tokenizer import pad_apart
from megarl.parallel import launcher
from megarl.parallel.launcher import warn
from megarl.run.plan import find_checkpoint
from megarl.settings.config import (
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
    with_steps,
)
from megarl.settings.schema import require
from megarl.trainer.context import DataRows, RunInputs
from megarl.trainer.heads import HeadName
from megarl.trainer.plan import (
    check_cut,
    plan_layout,
    plan_model,
    plan_other_model,
    plan_training,
    stop_tokens,
)

Load = Callable[..., DataRows]
"""Function that reads the data which a section of the recipe describes: (section's settings,
tokenizer, seed=, setting=name of the section) to the rows."""


def check_sft(config: SftConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: sft` that can be known before training: settings, model, layout
    and data. `ranks`: the run's number of ranks; None: as the launcher's environment variables have
    it. Returns what was loaded for the run: model configuration, tokenizer and, on rank 0, the
    tokenised demonstrations. Raises `ValueError` if a check fails.
    """
    return check_supervised(config, "demonstrations", load_demonstrations, ranks)


def check_preference(config: PreferenceConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: preference` that can be known before training: settings, model,
    reference model, layout and data. `ranks`: the run's number of ranks; None: as the launcher's
    environment variables have it. Returns what was loaded for the run: model configuration,
    tokenizer and, on rank 0, the tokenised preferences. Raises `ValueError` if a check fails.
    """
    single = config.loss.method == "kto"

    def load(section: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> DataRows:
        return load_preferences(section, tokenizer, single=single, **options)

    found = check_supervised(config, "preferences", load, ranks)
    reference = config.reference.model
    theirs = plan_other_model("reference", reference, config.model, found.hf)
    if reference.path:
        check_cut(config.training, reference, theirs)
    if config.reference.cache:
        check_writable(config.reference.cache, setting="reference.cache")
    return found


def check_reward_model(config: RewardModelConfig, ranks: int | None = None) -> RunInputs:
    """Check everything of a `task: reward_model` that can be known before training: settings,
    model, layout and data. `ranks`: the run's number of ranks; None: as the launcher's environment
    variables have it. Returns what was loaded for the run: model configuration, tokenizer and, on
    rank 0, the tokenised pairs. Sets a padding token that ends no text, since a classifier's score
    is read at the last token that is no padding. Raises `ValueError` if a check fails.
    """
    found = check_supervised(config, "preferences", load_preferences, ranks, head="scalar")
    require(
        type(found.hf) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        f"model type {found.hf.model_type} of model.path {config.model.path!r} has no sequence"
        " classifier in transformers, as which a reward model is saved; choose another model",
    )
    source = config.model.tokenizer or config.model.path
    pad_apart(found.tokenizer, found.hf.get_text_config().vocab_size, source=source)
    return found


def check_supervised(
    config: SupervisedConfig,
    section: str,
    load: Load,
    ranks: int | None,
    head: HeadName = "logprobs",
) -> RunInputs:
    """Run the checks that all runs on a fixed data set share; rank 0 reads the data. `section`:
    name of the section that describes the data, both in the recipe and in its `evaluation`
    (held-out data). `load`: reads a data set, as load(section's settings, tokenizer, seed=,
    setting=name of the section), and returns the tokenised rows. `ranks`: number of ranks to check
    for, None for the launcher's. `head`: the output of the trained model, "logprobs" or "scalar".
    Returns tokenizer, model configuration, and on rank 0 the rows. Raises `ValueError` if a check
    fails.
    """
    layout = plan_layout(config.training, launcher.count_ranks(ranks))
    require(
        config.samples_per_step >= layout.data,
        f"samples_per_step is {config.samples_per_step} for {layout.data} data ranks; raise it",
    )
    tokenizer, hf = plan_model(config.model)
    plan_training(config, tokenizer, hf, head)
    rows = held_out = None
    if launcher.rank() == 0:  # rank 0 reads for all, and sends every step's rows to the others
        rows = load(getattr(config, section), tokenizer, seed=config.seed, setting=section)
        evaluated = getattr(config.evaluation, section)
        if evaluated.source:
            named = f"evaluation.{section}"
            held_out = load(evaluated, tokenizer, seed=config.seed, setting=named)
            require(
                len(held_out) >= layout.data,
                f"{named} has {len(held_out)} rows for {layout.data} data ranks; set a longer"
                " source",
            )
            warn(held_out.warning)
        warn(rows.warning)
        limit = getattr(hf.get_text_config(), "max_position_embeddings", None)
        for named, one in ((section, rows), (f"evaluation.{section}", held_out)):
            require(
                limit is None or one is None or one.longest <= limit,
                f"{named} has a row of {one.longest if one else 0} tokens, but the model's"
                f" max_position_embeddings is {limit}; set {named}.max_tokens to that and drop"
                " longer rows",
            )
    with_steps(config, len(rows or ()))
    data, read = rows.fingerprint if rows is not None else "", getattr(config, section)
    ends = ends_of_turns(tokenizer, read.template, read.template_variables)
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
