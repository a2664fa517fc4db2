"""Checks of a recipe that trains on a fixed data set, before anything heavy starts: `task: sft`,
`task: preference` and `task: reward_model`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from megarl.checks.folder_checks import (
    check_folder,
    check_observe,
    check_time_to_save,
    check_writable,
)
from megarl.checks.layout_checks import check_cut, check_layout
from megarl.checks.model_checks import (
    check_adapters,
    check_export,
    check_model,
    stop_tokens,
    unused_weights,
)
from megarl.checks.preflight import find_checkpoint, ranks_to_check, warn
from megarl.data.chat_template import ends_of_turns
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preferences import load_preferences
from megarl.data.tokenizer import pad_apart
from megarl.parallel import launcher
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
from megarl.trainer.loading import check_weights
from megarl.trainer.model_config import load_model_config


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
    found = check_supervised(config, ranks)
    reference = config.reference.model
    if reference.path:
        require(
            not reference.tokenizer,
            f"reference.model.tokenizer is {reference.tokenizer}, but the tokens are the policy's;"
            " leave it out",
        )
        theirs = load_model_config(reference, setting="reference.model")
        mine, other = found.hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
        require(
            mine == other,
            f"reference.model.path has a vocabulary of {other} tokens and model.path one of {mine};"
            " set a reference that was made from the same model",
        )
        check_cut(config.training, reference, theirs)
        check_weights(reference)
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
    found = check_supervised(config, ranks)
    require(
        type(found.hf) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        f"model type {found.hf.model_type} of model.path {config.model.path!r} has no sequence"
        " classifier in transformers, as which a reward model is saved; choose another model",
    )
    source = config.model.tokenizer or config.model.path
    pad_apart(found.tokenizer, found.hf.get_text_config().vocab_size, source=source)
    return found


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
    layout = check_layout(config.training, ranks_to_check(ranks))
    require(
        config.samples_per_step >= layout.data,
        f"samples_per_step is {config.samples_per_step} for {layout.data} data ranks; raise it",
    )
    check_folder(config.folder, resume=bool(config.resume))
    check_time_to_save(config.training.checkpoint)
    check_observe(config.observe)
    tokenizer, hf = check_model(config.model)
    warn(unused_weights(config.model))
    check_cut(config.training, config.model, hf, head)
    check_export(config.model, tokenizer, hf)
    check_weights(config.model, head)
    warn(check_adapters(config.training.lora, config.model, head))
    rows = held_out = None
    if launcher.rank() == 0:  # rank 0 reads for all, and sends every step's rows to the others
        limit = getattr(hf.get_text_config(), "max_position_embeddings", None)

        def read(source: Any, setting: str) -> DataRows:
            found = load(source, tokenizer, seed=config.seed, setting=setting)
            warn(found.warning)
            require(
                limit is None or found.longest <= limit,
                f"{setting} has a row of {found.longest} tokens, but the model's"
                f" max_position_embeddings is {limit}; set {setting}.max_tokens to that and drop"
                " longer rows",
            )
            return found

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
