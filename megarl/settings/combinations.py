"""Checks of settings of `task: rl` and `task: distill` that do not fit each other."""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.settings.objectives import COMPARING
from megarl.settings.observe import DISTILLATION_METRICS, EVALUATION_METRICS, STEP_METRICS
from megarl.settings.schema import require
from megarl.system.lookup import AGENTS

if TYPE_CHECKING:
    from megarl.settings.config import RunConfig, SupervisedConfig
    from megarl.settings.data import PromptsConfig
    from megarl.settings.environments import EnvironmentConfig


CODE = (".py", ".sh")
"""Suffixes of files that are no data, where a pattern matches them."""
TELL_S = 60.0
"""Seconds by which rank 0 gives up before the ranks that wait for it, whose error would not name
the engine."""


def check_run_settings(config: RunConfig, longest: int) -> None:
    """Raise `ValueError`, with what to set, if settings do not go together. `longest`: most tokens
    of a prompt and its response together.
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
    check_best(config)
    check_tool_variables(config)
    check_agent_prompts(config)
    check_answers(config)
    check_mixture(config)
    require(
        config.environment.has_sessions or config.algorithm.credit == "response",
        "algorithm.credit is 'turn', but without environment.session, tools or agent a rollout"
        " has one turn; leave credit out",
    )
    if "teacher" not in config.other_roles:  # with which every token has a loss
        check_reward_settings(config)
        check_truncation(config)
        check_algorithm(config)


def check_engines(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` for time limits that end the run before engines can start, receive weights
    or be replaced, or for a step of an engine with fewer tokens than sequences.
    """
    start_s, wait_s = config.rollout.engine.start_timeout_s, config.training.collective_timeout_s
    require(
        wait_s >= start_s + TELL_S,
        f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for engines that may"
        f" take rollout.engine.start_timeout_s = {start_s:g}, and for rank 0 to say so; set the"
        f" one to {start_s + TELL_S:g} or more, or lower the other",
    )
    # Connecting, receiving, settling; or for rank 0 alone: loading adapters, probing with and
    # without them, admission.
    needed_s = 3 * config.weight_sync.timeout_s + 120
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
    """Raise `ValueError` if engines sample from a truncated distribution, whose log-probs the
    trainer does not compute, without `old_logprobs: engine`.
    """
    for name, value in config.rollout.sampling.truncation.items():
        require(
            config.algorithm.old_logprobs == "engine",
            f"rollout.{name} is {value:g}, so that the engines sample from a truncated law, whose"
            " log-probs the trainer does not compute; leave it out, or (with a loss that has a"
            " ratio) set algorithm.old_logprobs to 'engine', which uses the engine's",
        )


def check_tool_variables(config: RunConfig) -> None:
    """Raise `ValueError` if prompts have different template variables beside tools, whose results
    are written with one set.
    """
    if not config.environment.tools.are_used:
        return
    variables = [prompts.template_variables for _, prompts in sources(config) if prompts.names_data]
    other = next((value for value in variables if value != variables[0]), None)
    require(
        other is None,
        f"template_variables of prompts and evaluation.prompts are {variables[0]} and {other}, but"
        " environment.tools writes the results of calls with one set; set the same for all",
    )


def check_agent_prompts(config: RunConfig) -> None:
    """Raise `ValueError` if an agent, which writes its own messages, would get rendered prompts, or
    one that plays environments other prompts than theirs.
    """
    name, model = config.environment.agent.function, config.environment.agent.model
    require(
        name not in AGENTS or model == "policy",
        f"environment.agent.model is '{model}', but the agent '{name}' asks for 'policy'; leave it"
        " out",
    )
    for key, source in sources(config) if name in AGENTS else ():
        require(
            not source.names_data or source.source.startswith(f"{name}:"),
            f"{key}.source is '{source.source}', but the agent '{name}' plays the environment that"
            f" its prompts are of; set {key}.source to {name}:NAME",
        )
    for section, prompts in sources(config) if config.environment.agent.is_used else ():
        require(
            prompts.template == "none" or not prompts.names_data,
            f"{section}.template is '{prompts.template}', but the agent (environment.agent) sends"
            f" its own messages, and the gateway renders them; set {section}.template to 'none'",
        )


def sources(config: RunConfig) -> Iterator[tuple[str, PromptsConfig]]:
    """Iterate over (section, settings) of each source of prompts: "prompts" or
    "prompts.sources[0]", "evaluation.prompts" and so on.
    """
    held_out = config.evaluation.prompts
    for section, prompts in (("prompts", config.prompts), ("evaluation.prompts", held_out)):
        for number, source in enumerate(prompts.parts):
            yield f"{section}.sources[{number}]" if prompts.sources else section, source


def with_hidden(config: RunConfig) -> EnvironmentConfig:
    """The environment in which an agent's program cannot read the run folder, the data and the data
    sets of the hub on this machine.
    """
    if not config.environment.agent.command:
        return config.environment
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    paths = [config.folder, f"{HF_HUB_CACHE}/datasets--*"]
    paths.append(os.environ.get("HF_DATASETS_CACHE") or f"{HF_HOME}/datasets")
    named = [prompts.source for _, prompts in sources(config) if prompts.source]
    for text in [*named, *config.evaluation.sources]:
        if Path(text).exists():
            paths.append(text)
        else:  # a pattern, which may also match programs
            matched = map(Path, glob.glob(text, recursive=True))
            paths += [str(path) for path in matched if path.is_file() and path.suffix not in CODE]
    return config.environment.hiding(paths)


def check_answers(config: RunConfig) -> None:
    """Raise `ValueError` if a verifier compares with answers that no column has, or does not read
    `answer_after`, which is set.
    """
    for name, environment in (config.environment.named_parts or {"": config.environment}).items():
        where = f"environment.mixture.{name}" if name else "environment"
        require(
            not environment.answer_after
            or environment.reads_marker
            or environment.may_score_itself,
            f"{where}.answer_after is for the verifiers 'exact_match', 'numeric' and 'choice', but"
            f" {where}.verifier is '{', '.join(environment.names_used)}', which finds the answer by"
            f" itself; leave {where}.answer_after out (over a recipe that has it:"
            f" --{where}.answer_after=), or set another verifier",
        )
        built_in = " and ".join(environment.compares_answers)
        for section, prompts in () if environment.may_score_itself else sources(config):
            require(
                prompts.answer_column or not built_in or (name and prompts.environment != name),
                f"{section}.answer_column is empty, but the verifier {built_in} compares with the"
                f" answer; set the column of the answers, or {where}.verifier to a function that"
                " needs none",
            )


def check_mixture(config: RunConfig) -> None:
    """Raise `ValueError` if prompts name a verifier that `environment.mixture` lacks, name none of
    it, or leave one unused.
    """
    known = config.environment.mixture
    named: set[str] = set()
    by_column = ""
    for where, prompts in sources(config):
        if not prompts.names_data:
            continue
        name, column = prompts.environment, prompts.environment_column
        by_column, named = by_column or column, named | {name}
        setting = f"environment_column is '{column}'" if column else f"environment is '{name}'"
        require(
            known or not (name or column),
            f"{where}.{setting}, but environment.mixture, which gives each name its verifier,"
            " is empty; set environment.mixture: {NAME: {verifier: ...}}",
        )
        require(
            not name or name in known,
            f"{where}.environment is '{name}', but environment.mixture has {', '.join(known)}; set"
            " one of these names, or add this one",
        )
        require(
            not known or name or column,
            f"{where} names no verifier of environment.mixture ({', '.join(known)}); set"
            f" {where}.environment, or {where}.environment_column",
        )
    never = [name for name in known if name not in named]
    require(
        by_column or not never,
        f"environment.mixture has {', '.join(never)}, which no prompts name; remove it, or set"
        " prompts.sources[N].environment or prompts.environment_column",
    )


def check_early_stop(config: RunConfig) -> None:
    """Raise `ValueError` if `early_stop.metric` is one that the run does not have."""
    metric, algorithm, evaluation = config.early_stop.metric, config.algorithm, config.evaluation
    known = [*STEP_METRICS, *DISTILLATION_METRICS]
    known += [prefix + name for prefix in ("eval/", "eval_sampled/") for name in EVALUATION_METRICS]
    known += [
        name.replace("critic/", f"{section}/")
        for section in config.all_critics
        for name in STEP_METRICS
        if name.startswith("critic/")
    ]
    is_own = re.match("(eval/|eval_sampled/)?(environment|reward_model|source)/", metric)
    close = difflib.get_close_matches(metric, known, n=1)
    advice = f"did you mean {close[0]!r}" if close else f"set one of {', '.join(known)}"
    require(
        not metric or is_own or metric in known,
        f"early_stop.metric is {metric!r}, which no step and no evaluation has; {advice}, or, for a"
        " verifier's own metric, 'environment/<name>'",
    )
    is_evaluated = evaluation.prompts.names_data and evaluation.every > 0
    greedy = f"algorithm.advantage is '{algorithm.advantage}'"
    for metrics, is_there, why in (
        ("kl$", algorithm.kl.coefficient > 0, "algorithm.kl.coefficient is 0"),
        ("kl_coefficient", algorithm.kl.target is not None, "algorithm.kl.target is null"),
        ("correction/", algorithm.correction.kind != "none", "algorithm.correction.kind is 'none'"),
        ("accuracy_greedy|reward/greedy", config.greedy_baseline, greedy),
        ("groups/equal", config.skips_equal_groups, "every group is computed"),
        ("critic/", "critic" in config.other_roles, "algorithm.advantage is not 'gae'"),
        ("|".join(DISTILLATION_METRICS), "teacher" in config.other_roles, "there is no teacher"),
        ("eval_sampled/", evaluation.sampled_too, "evaluation.sampled_too is off"),
        ("eval", is_evaluated, "evaluation.prompts.source or evaluation.every is not set"),
    ):
        require(
            is_there or not re.match(metrics, metric),
            f"early_stop.metric is {metric!r}, which the run does not have while {why}; change"
            " that, or set another metric",
        )


HELD_OUT = {
    "prompts": EVALUATION_METRICS,
    "demonstrations": ("loss", "tokens"),
    "preferences": ("loss", "accuracy", "reward/chosen", "reward/rejected", "reward/margin"),
}
"""{section of held-out data in `evaluation`: its metrics, without "eval/"}"""
LESS_IS_BETTER = ("/loss", "/kl", "/failures", "/truncated_share")


def check_best(config: RunConfig | SupervisedConfig) -> None:
    """Raise `ValueError` if `training.checkpoint.best` is no metric of the run's evaluations, one
    of which less is better without min:, or if no checkpoint but the last is evaluated.
    """
    if not (best := config.training.checkpoint.best):
        return
    evaluation: Any = config.evaluation
    section = next(name for name in HELD_OUT if hasattr(evaluation, name))
    is_rl, held_out = section == "prompts", getattr(evaluation, section)
    kinds = ("eval/", "eval_sampled/") if is_rl and evaluation.sampled_too else ("eval/",)
    known = [prefix + name for prefix in kinds for name in HELD_OUT[section]]
    known += ["eval/kl"] if getattr(getattr(config, "loss", None), "method", "") == "kto" else []
    metric, own = best.removeprefix("min:"), "|".join(kinds)
    close = difflib.get_close_matches(metric, known, n=1)
    require(
        metric in known or (is_rl and re.match(f"({own})(environment|source)/.", metric)),
        f"training.checkpoint.best is {best!r}, which no evaluation of this run has;"
        f" {f'did you mean {close[0]!r}? It' if close else 'it'} may be {', '.join(known)}"
        f"{', eval/environment/<name>' if is_rl else ''}, with min: before it for the lowest",
    )
    require(
        evaluation.every > 0 and (held_out.source or getattr(held_out, "sources", ())),
        f"training.checkpoint.best is {best!r}, but evaluation.every or evaluation.{section}.source"
        " is not set, so that no checkpoint but the last is evaluated; set both, or leave it out",
    )
    require(
        metric != best or not metric.endswith(LESS_IS_BETTER),
        f"training.checkpoint.best is {best!r}, of which less is better; set it to 'min:{best}'",
    )


def check_roles(config: RunConfig) -> None:
    """Raise `ValueError` if two roles have `ranks` in common, or only critics would learn."""
    if config.epochs is None:  # else steps are known once the data are
        check_warmup(config)
    roles = {"reference": config.reference, "critic": config.critic} | config.other_roles
    for (name, role), (other_name, other) in itertools.combinations(roles.items(), 2):
        require(
            not set(role.ranks) & set(other.ranks),
            f"{name}.ranks is {list(role.ranks)} and {other_name}.ranks {list(other.ranks)}: two"
            " roles with ranks of their own share none; set others",
        )


def check_reward_settings(config: RunConfig) -> None:
    """Raise `ValueError` if all rewards are equal, or a reward model or critic has a name that is
    no identifier.
    """
    environment, models = config.environment, config.reward_models
    for section, named in (("reward_models", models), ("critics", config.critics)):
        wrong = [name for name in named if not name.isidentifier() or len(name) > 64]
        require(
            not wrong,
            f"{section} has a model named {wrong}; set a name of at most 64 letters, digits and _",
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
    """Raise `ValueError` if critics alone learn in all steps."""
    for name, critic in config.all_critics.items():
        require(
            critic.warmup_steps == 0 or critic.warmup_steps < config.steps,
            f"{name}.warmup_steps is {critic.warmup_steps} and steps {config.steps}, so that the"
            f" policy would never learn; raise steps or lower {name}.warmup_steps",
        )


def check_algorithm(config: RunConfig) -> None:
    """Raise `ValueError` if an advantage would compare a single rollout, or older rollouts be
    trained on without a correction.
    """
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
        " them; set algorithm.correction.kind to 'tis' or 'icepop', or (with a loss that has a"
        " ratio) algorithm.old_logprobs to 'engine', or on purpose"
        " algorithm.correction.allow_uncorrected to true",
    )
