"""Settings of `megarl train` that are right by themselves but do not fit each other."""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING

from megarl.objectives.config import COMPARING
from megarl.observe.config import DISTILLATION_METRICS, EVALUATION_METRICS, STEP_METRICS
from megarl.schema import require

if TYPE_CHECKING:
    from megarl.config import RunConfig
    from megarl.environments.config import EnvironmentConfig


TELL_S = 60.0
"""Seconds by which rank 0 gives up before the ranks that wait for it: otherwise these would end the
run, with an error that does not name the engine."""


def check_run(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` for settings of a run on rollouts that do not fit each other. `longest`:
    tokens of the longest request.
    """
    require(config.prompts.names_data, "prompts.source is empty; set it to a data file or hub name")
    check_engines(config, longest)
    groups, parts = config.rollout.groups_per_step, config.training.num_mini_batches
    require(
        groups % parts == 0,
        f"rollout.groups_per_step is {groups}, not divisible by training.num_mini_batches ="
        f" {parts}; change one of them",
    )
    limit, longest = config.environment.overlong.limit_tokens, config.rollout.max_new_tokens
    require(
        limit <= longest,
        f"environment.overlong.limit_tokens is {limit}, beyond rollout.max_new_tokens = {longest};"
        " lower it",
    )
    check_roles(config)
    check_early_stop(config)
    check_stops(config)
    check_tool_variables(config)
    check_answers(config)
    check_mixture(config)


def check_learning(config: RunConfig) -> None:
    """Raise `ValueError` where nothing can be learned from rewards."""
    check_rewards(config)
    check_truncation(config)
    check_algorithm(config)


def check_engines(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` unless the ranks wait as long as the engines may take, and an engine's
    step has a token for each of its sequences. `longest`: tokens of the longest request.
    """
    start_s, wait_s = config.rollout.engine.start_timeout_s, config.training.collective_timeout_s
    require(
        wait_s >= start_s + TELL_S,
        f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for engines that may"
        f" take rollout.engine.start_timeout_s = {start_s:g}, and for rank 0 to say so; set the"
        f" one to {start_s + TELL_S:g} or more, or lower the other",
    )
    needed_s = 2 * config.weight_sync.timeout_s + 30  # connecting, receiving, settling
    require(
        wait_s >= needed_s,
        f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for publishes that"
        f" may take {needed_s:g} s; raise it to that, or lower weight_sync.timeout_s",
    )
    engine = config.rollout.engine
    require(
        config.rollout.request_timeout_s > engine.stall_timeout_s,
        f"rollout.request_timeout_s is {config.rollout.request_timeout_s:g}, which ends the run"
        f" before a hung engine is replaced, after rollout.engine.stall_timeout_s ="
        f" {engine.stall_timeout_s:g}; raise the one or lower the other",
    )
    # vLLM's own condition; an engine's step is made to hold the longest request.
    step_tokens = max(engine.max_batched_tokens, longest)
    require(
        engine.max_num_sequences <= step_tokens,
        f"rollout.engine.max_batched_tokens is {engine.max_batched_tokens}, below"
        f" rollout.engine.max_num_sequences = {engine.max_num_sequences}, which would each"
        " decode a token in a step; raise the one or lower the other",
    )


def check_truncation(config: RunConfig) -> None:
    """Raise `ValueError` where the engines sample from another law than the trainer computes."""
    for name, value in config.rollout.sampling.truncation.items():
        require(
            config.algorithm.old_logprobs == "engine",
            f"rollout.{name} is {value:g}, so that the engines sample from a truncated law, whose"
            " log-probs the trainer does not compute; leave it out"
            + (
                ""
                if config.algorithm.loss == "reinforce"
                else ", or set algorithm.old_logprobs to 'engine', which uses the engine's"
            ),
        )


def check_stops(config: RunConfig) -> None:
    """Raise `ValueError` where the engines cannot find the texts that end a response."""
    require(
        not (config.rollout.stop and config.model.tokenizer.endswith(".model")),
        f"rollout.stop needs a tokenizer that vLLM can load, but model.tokenizer is"
        f" {config.model.tokenizer}; load it, save_pretrained to a folder, and set that folder",
    )


def check_tool_variables(config: RunConfig) -> None:
    """Raise `ValueError` where tools are shown with several variables of the chat template: the
    results of their calls are written with one set.
    """
    if not config.environment.tools.are_used:
        return
    data = [one for one in (config.prompts, config.evaluation.prompts) if one.names_data]
    found = [part.template_variables for one in data for part in one.parts]
    require(
        all(one == found[0] for one in found),
        f"template_variables of prompts and evaluation.prompts are {found[0]} and"
        f" {next((one for one in found if one != found[0]), None)}, but environment.tools writes"
        " the results of calls with one set; set the same for all",
    )


def check_answers(config: RunConfig) -> None:
    """Raise `ValueError` where a built-in verifier gets no answers to compare with, or a setting
    for another one.
    """
    if config.environment.mixture:
        for name, part in config.environment.named_parts.items():
            _check_answers(config, part, name)
    else:
        _check_answers(config, config.environment, "")


def _check_answers(config: RunConfig, environment: EnvironmentConfig, name: str) -> None:
    """The check of one verifier. `name`: its name in a mixture, otherwise empty."""
    where = f"environment.mixture.{name}" if name else "environment"
    require(
        not environment.answer_after or environment.reads_marker or bool(environment.session),
        f"{where}.answer_after is for the verifiers 'exact_match', 'numeric' and 'choice', but"
        f" {where}.verifier is '{', '.join(environment.names_used)}', which finds the answer by"
        f" itself; leave {where}.answer_after out (over a recipe that has it:"
        f" --{where}.answer_after=), or set another verifier",
    )
    require(
        config.environment.has_sessions or config.algorithm.credit == "response",
        "algorithm.credit is 'turn', but without environment.session or environment.tools a rollout"
        " has one turn; leave credit out",
    )
    if environment.session:  # which may score by itself
        return
    built_in = " and ".join(environment.compares_answers)
    for section, prompts in (
        ("prompts", config.prompts),
        ("evaluation.prompts", config.evaluation.prompts),
    ):
        for number, part in enumerate(prompts.parts):
            if name and part.environment != name:
                continue
            shown = f"{section}.sources[{number}]" if prompts.sources else section
            require(
                bool(part.answer_column) or not built_in,
                f"{shown}.answer_column is empty, but the verifier {built_in} compares with the"
                f" answer; set the column of the answers, or {where}.verifier to a function that"
                " needs none",
            )


def check_mixture(config: RunConfig) -> None:
    """Raise `ValueError` where prompts name a verifier that is not in `environment.mixture`, name
    none though there is a mixture, or where an entry of the mixture is never named.
    """
    known = config.environment.mixture
    sections = {"prompts": config.prompts, "evaluation.prompts": config.evaluation.prompts}
    by_column = False
    named: set[str] = set()
    for section, prompts in sections.items():
        if not prompts.names_data:
            continue
        for number, part in enumerate(prompts.parts):
            where = f"{section}.sources[{number}]" if prompts.sources else section
            name, column = part.environment, part.environment_column
            by_column |= bool(column)
            named |= {name} if name else set()
            setting = f"environment_column is '{column}'" if column else f"environment is '{name}'"
            require(
                bool(known) or not (name or column),
                f"{where}.{setting}, but environment.mixture, which gives each name its verifier,"
                " is empty; set environment.mixture: {NAME: {verifier: ...}}",
            )
            require(
                not name or name in known,
                f"{where}.environment is '{name}', but environment.mixture has"
                f" {', '.join(known)}; set one of these names, or add this one",
            )
            require(
                not known or bool(name or column),
                f"{where} names no verifier of environment.mixture ({', '.join(known)}); set"
                f" {where}.environment, or {where}.environment_column",
            )
    never = [name for name in known if name not in named]
    require(
        by_column or not never,
        f"environment.mixture has {', '.join(never)}, which no prompts name; remove it, or set"
        " prompts.sources[N].environment or prompts.environment_column",
    )
    require(
        config.epochs is None or not config.prompts.sources,
        "epochs is set, but the sources of prompts.sources each have epochs of their own; set"
        " steps, or leave epochs out",
    )


def check_early_stop(config: RunConfig) -> None:
    """Raise `ValueError` where the run could not stop early."""
    metric = config.early_stop.metric
    kinds = ("eval/", "eval_sampled/")
    known = [*STEP_METRICS, *DISTILLATION_METRICS]
    known += [kind + name for kind in kinds for name in EVALUATION_METRICS]
    bare = metric.removeprefix(kinds[0]).removeprefix(kinds[1])
    is_own = bare.startswith(("environment/", "reward_model/", "source/"))
    close = difflib.get_close_matches(metric, known, n=1)
    advice = f"did you mean {close[0]!r}" if close else f"set one of {', '.join(known)}"
    require(
        not metric or is_own or metric in known,
        f"early_stop.metric is {metric!r}, which no step and no evaluation has; {advice}, or, for a"
        " verifier's own metric, 'environment/<name>'",
    )
    algorithm = config.algorithm
    for name, setting, is_there in (
        ("kl", "kl.coefficient is 0", algorithm.kl.coefficient > 0),
        ("kl_coefficient", "kl.target is null", algorithm.kl.target is not None),
        ("correction/", "correction.kind is 'none'", algorithm.correction.kind != "none"),
        ("accuracy_greedy", f"advantage is '{algorithm.advantage}'", bool(config.greedy_baseline)),
        ("reward/greedy", f"advantage is '{algorithm.advantage}'", bool(config.greedy_baseline)),
    ):
        require(
            is_there or not (metric == name or (name != "kl" and metric.startswith(name))),
            f"early_stop.metric is {metric!r}, which steps do not have while algorithm.{setting};"
            " change that, or set another metric",
        )
    require(
        not metric.startswith("critic/") or "critic" in config.other_roles,
        f"early_stop.metric is {metric!r}, but algorithm.advantage is not 'gae', so that there is"
        " no critic; set another metric",
    )
    require(
        metric not in DISTILLATION_METRICS or "teacher" in config.other_roles,
        f"early_stop.metric is {metric!r}, which only megarl distill has; set another metric",
    )
    require(
        not metric.startswith(kinds[1]) or config.evaluation.sampled_too,
        f"early_stop.metric is {metric!r}, but evaluation.sampled_too is off; turn it on, or set"
        " a metric of 'eval/'",
    )
    require(
        not metric.startswith("eval")
        or (config.evaluation.prompts.names_data and config.evaluation.every > 0),
        f"early_stop.metric is {metric!r}, but no evaluation takes place between the steps; set"
        " evaluation.prompts.source and evaluation.every",
    )


def check_roles(config: RunConfig) -> None:
    """Raise `ValueError` where two models beside the policy have a rank in common."""
    if config.epochs is None:  # else steps are known once the data are
        check_warmup(config)
    roles = {"reference": config.reference, "critic": config.critic} | config.other_roles
    for (name, role), (other_name, other) in itertools.combinations(roles.items(), 2):
        require(
            not set(role.ranks) & set(other.ranks),
            f"{name}.ranks is {list(role.ranks)} and {other_name}.ranks {list(other.ranks)}: two"
            " roles with ranks of their own share none; set others",
        )


def check_rewards(config: RunConfig) -> None:
    """Raise `ValueError` where nothing can be learned from the rewards, or reward models do not fit
    the other settings.
    """
    environment, models = config.environment, config.reward_models
    for name, model in models.items():
        require(
            name.isidentifier(),
            f"reward_models has a model named {name!r}; set a name of letters, digits and _",
        )
        require(
            bool(model.model.path),
            f"reward_models.{name}.model.path is empty; set it to a sequence classifier, such as"
            " megarl reward-model trains",
        )
    if models:
        require(
            any(model.weight for model in models.values()),
            "reward_models all have weight 0, so that they would do nothing; set a weight",
        )
        return
    require(
        environment.correct != environment.wrong
        or environment.overlong.limit_tokens > 0
        or bool(environment.rewards),
        f"environment.correct and environment.wrong are both {environment.correct:g}, so that all"
        " rewards are equal and nothing can be learned; set them to different numbers",
    )
    require(
        environment.verifier != "none" or environment.overlong.limit_tokens > 0,
        "environment.verifier is 'none', so that all rewards are equal and nothing can be learned;"
        " set a verifier, or reward_models",
    )


def check_warmup(config: RunConfig) -> None:
    """Raise `ValueError` if the critic would learn alone in all of the run's steps."""
    require(
        config.critic.warmup_steps == 0 or config.critic.warmup_steps < config.steps,
        f"critic.warmup_steps is {config.critic.warmup_steps} and steps {config.steps}, so that the"
        " policy would never learn; raise steps or lower critic.warmup_steps",
    )


def check_algorithm(config: RunConfig) -> None:
    """Raise `ValueError` where the algorithm does not fit the rollouts."""
    require(
        config.algorithm.advantage not in COMPARING or config.rollout.group_size > 1,
        f"algorithm.advantage '{config.algorithm.advantage}' compares the samples of a group, but"
        " rollout.group_size is 1; raise it or use 'reinforce_plus_plus'",
    )
    algorithm = config.algorithm
    require(
        config.rollout.max_staleness > 0 or not algorithm.correction.allow_uncorrected,
        "algorithm.correction.allow_uncorrected is true, but rollout.max_staleness is 0, so that it"
        " would allow nothing; leave it out, or raise max_staleness",
    )
    require(
        config.rollout.max_staleness == 0
        or algorithm.correction.kind != "none"
        or algorithm.old_logprobs == "engine"
        or algorithm.correction.allow_uncorrected,
        f"rollout.max_staleness is {config.rollout.max_staleness}, but no correction is set:"
        " rollouts of older weights would be trained on as if the present ones had sampled"
        " them; set algorithm.correction.kind to 'tis' or 'icepop', or"
        + (
            ""
            if algorithm.loss == "reinforce"  # without a ratio there is no denominator
            else " algorithm.old_logprobs to 'engine', or"
        )
        + " on purpose algorithm.correction.allow_uncorrected to true",
    )
