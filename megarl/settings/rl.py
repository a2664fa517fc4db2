"""The recipe of `task: rl`, on which `task: distill` builds, and its settings that do not fit each
other.
"""

import difflib
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from megarl.settings.data import PromptsConfig
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.limits import MOST_STEPS
from megarl.settings.objectives import (
    COMPARING,
    WITH_GREEDY_BASELINE,
    ZERO_IF_EQUAL,
    AlgorithmConfig,
)
from megarl.settings.observe import (
    DISTILLATION_METRICS,
    EVALUATION_METRICS,
    STEP_METRICS,
    EarlyStopConfig,
    ObserveConfig,
    ReplayConfig,
)
from megarl.settings.recipe_paths import PathText
from megarl.settings.rollout import RolloutConfig
from megarl.settings.schema import FILE, Config, Excludes, Of, Range, is_own, require, section
from megarl.settings.training import (
    AnyRunConfig,
    CriticConfig,
    ModelConfig,
    ReferenceRoleConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TrainedModel,
    TrainingConfig,
)
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.system.lookup import AGENTS


class EvaluationConfig(Config):
    """Evaluation on held-out problems before, during and after training, by the run's verifier."""

    prompts: PromptsConfig = section(PromptsConfig, shuffle=False)
    """Source of the problems, which are all asked, in any order; empty: no evaluation."""
    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    temperature: Annotated[float, Range(0.01, 2.0, or_zero=True)] = 0.0
    """Sampling temperature; 0 is greedy."""
    sampled_too: bool = False
    """Also draw one sample of each problem at the rollout temperature."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Of `megarl eval`: samples of each problem at the rollout temperature, for avg@n, pass@k and
    maj@n; 1: none, unless `sampled_too` is set."""
    models: tuple[PathText, ...] = ()
    """Of `megarl eval`: model folders or hub names, one after another; empty: `model.path`."""
    sources: Annotated[
        tuple[PathText, ...], Excludes("prompts.sources", "but they are read as prompts.source is")
    ] = ()
    """Of `megarl eval`: further data sets, read as `prompts` is."""


class SampleConfig(Config):
    """Settings of `megarl sample`, which writes generated responses to a data file."""

    samples: Annotated[int, Range(1, 10_000)] = 8
    """Responses to each of `prompts`, at `rollout.temperature`."""
    keep: Literal["best", "all", "pairs"] = "best"
    """Of each prompt: `best`, the response with the highest reward; `all`, every response, with its
    reward; `pairs`, the best and the worst, if their rewards differ. Empty responses are left out,
    and cut off ones but as the worst."""
    min_reward: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Leave out responses with less reward; of `pairs` only the chosen one must have it."""
    shown: Annotated[int, Range(1, 10_000)] = 4
    """Of `megarl rollout`: number of printed rollouts, each of another prompt."""


OF_ONE_SOURCE = Excludes("prompts.sources", "with which a run has steps")
OF_KL = Of("algorithm.kl.coefficient")


class RunConfig(AnyRunConfig):
    """The recipe of `task: rl`, also read by `eval` and `sample`: the policy's responses to prompts
    are scored, and it is trained on the rewards.
    """

    task: Literal["rl"] = "rl"
    epochs: Annotated[float | None, Range(1e-6, 1e6), OF_ONE_SOURCE] = None
    """Passes over the prompts, instead of `steps`: epochs x prompts / `rollout.groups_per_step`,
    rounded up; not for `prompts.sources`. Groups that dynamic sampling rejects do not count."""
    model: TrainedModel = section(ModelConfig)
    reference: Annotated[ReferenceRoleConfig, OF_KL] = section(ReferenceRoleConfig)
    """The frozen model of the KL penalty (`algorithm.kl`)."""
    critic: Annotated[CriticConfig, Of("algorithm.advantage", "gae")] = section(CriticConfig)
    """The value model of `algorithm.advantage: gae`."""
    critics: Annotated[dict[str, CriticConfig], Of("algorithm.advantage", FILE)] = {}
    """{name: value model} for an advantage of your own, which gets the values of each."""
    reward_models: dict[str, RewardModelRoleConfig] = {}
    """{name: reward model}; each adds weight x score to the environment's reward. Where the
    environment is only to say what is correct, set `environment.correct` and `wrong` to 0; where
    nothing is, `environment.verifier: none`."""
    prompts: PromptsConfig = section(PromptsConfig)
    environment: EnvironmentConfig = section(EnvironmentConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    training: TrainingConfig = section(TrainingConfig)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    sample: SampleConfig = section(SampleConfig)
    replay: ReplayConfig = section(ReplayConfig)
    early_stop: EarlyStopConfig = section(EarlyStopConfig)
    observe: ObserveConfig = section(ObserveConfig)

    def check(self) -> None:
        check_run_settings(self)

    @property
    def group_filter(self) -> str:
        """Which groups are trained on: `rollout.filter`. By default "differing", those with
        different rewards, if the advantage compares the rollouts of a group; otherwise "all".
        """
        usual = "differing" if self.algorithm.advantage in COMPARING else "all"
        return self.rollout.filter or usual

    @property
    def skips_equal_groups(self) -> bool:
        """Whether groups of equal rewards are not even computed, as the gradient is the same
        without them.
        """
        algorithm = self.algorithm
        return (
            algorithm.advantage in ZERO_IF_EQUAL
            and algorithm.credit == "response"
            and algorithm.kl.coefficient == 0
            and algorithm.entropy_coefficient == 0
            and not is_own(algorithm.loss)  # which may have a gradient there
            and not is_own(algorithm.method)
            and not self.reward_models  # which change the rewards afterwards
        )

    @property
    def greedy_baseline(self) -> bool:
        """Whether each prompt also gets a greedy response, as a baseline (ReMax)."""
        return self.algorithm.advantage in WITH_GREEDY_BASELINE

    @property
    def all_critics(self) -> dict[str, CriticConfig]:
        """{section, "critic" or "critics.NAME": settings} of the critics that the run uses."""
        critics = {"critic": self.critic} if self.algorithm.advantage == "gae" else {}
        return critics | {f"critics.{name}": critic for name, critic in self.critics.items()}

    @property
    def other_roles(self) -> dict[str, RoleConfig]:
        """{section, such as "reference": settings} of the models beside the policy that the run
        uses.
        """
        roles: dict[str, RoleConfig] = {}
        if self.algorithm.kl.coefficient > 0:
            roles["reference"] = self.reference
        roles |= self.all_critics
        return roles | {f"reward_models.{name}": role for name, role in self.reward_models.items()}

    @property
    def warmup_steps(self) -> int:
        """Steps at the start of the run that train the critics and leave the policy as it is: the
        most that a critic's `warmup_steps` asks for.
        """
        return max((critic.warmup_steps for critic in self.all_critics.values()), default=0)


def longest_request(config: RunConfig) -> int:
    """Most tokens of a prompt, held-out ones included, and its response together."""
    held_out = config.evaluation.prompts
    prompt = max(
        config.prompts.max_prompt_tokens, held_out.max_prompt_tokens if held_out.names_data else 0
    )
    return prompt + config.rollout.max_new_tokens


CODE = (".py", ".sh")
"""Suffixes of files that are no data, where a pattern matches them."""


def check_run_settings(config: RunConfig) -> None:
    """Raise `ValueError`, with what to set, if settings do not go together."""
    require(config.prompts.names_data, "prompts.source is empty; set it to a data file or hub name")
    check_engines(config)
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


def check_engines(config: RunConfig) -> None:
    """Raise `ValueError` for time limits that end the run before engines can start, receive weights
    or be replaced, or for a step of an engine with fewer tokens than sequences.
    """
    start_s, wait_s = config.rollout.engine.start_timeout_s, config.training.collective_timeout_s
    # Rank 0 gives up before the ranks that wait for it, whose error would not name the engine.
    least_s = start_s + 60.0
    require(
        wait_s >= least_s,
        f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for engines that may"
        f" take rollout.engine.start_timeout_s = {start_s:g}, and for rank 0 to say so; set the"
        f" one to {least_s:g} or more, or lower the other",
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
    step_tokens = max(engine.max_batched_tokens, longest_request(config))
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
    for prefix, prompts in sources(config) if config.environment.agent.is_used else ():
        require(
            prompts.template == "none" or not prompts.names_data,
            f"{prefix}.template is '{prompts.template}', but the agent (environment.agent) sends"
            f" its own messages, and the gateway renders them; set {prefix}.template to 'none'",
        )


def sources(config: RunConfig) -> Iterator[tuple[str, PromptsConfig]]:
    """Iterate over (section, settings) of each source of prompts: "prompts" or
    "prompts.sources[0]", "evaluation.prompts" and so on.
    """
    held_out = config.evaluation.prompts
    for place, prompts in (("prompts", config.prompts), ("evaluation.prompts", held_out)):
        for number, source in enumerate(prompts.parts):
            yield f"{place}.sources[{number}]" if prompts.sources else place, source


def with_hidden(config: RunConfig) -> EnvironmentConfig:
    """`config.environment` with the run folder, the data and this machine's hub data sets hidden
    from an agent's program, which must not read reference answers.
    """
    if not config.environment.agent.command:
        return config.environment
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    paths = [config.folder, f"{HF_HUB_CACHE}/datasets--*"]
    paths.append(os.environ.get("HF_DATASETS_CACHE") or f"{HF_HOME}/datasets")
    trained = [prompts.source for _, prompts in sources(config) if prompts.source]
    for source in [*trained, *config.evaluation.sources]:
        if Path(source).exists():
            paths.append(source)
        else:  # a pattern, which may also match programs
            matched = map(Path, glob.glob(source, recursive=True))
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
        for key, prompts in () if environment.may_score_itself else sources(config):
            require(
                prompts.answer_column or not built_in or (name and prompts.environment != name),
                f"{key}.answer_column is empty, but the verifier {built_in} compares with the"
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
        name.replace("critic/", f"{critic}/")
        for critic in config.all_critics
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


def check_best(config: Any) -> None:
    """Raise `ValueError` if `training.checkpoint.best` is no metric of the run's evaluations, one
    of which less is better without min:, or if no checkpoint but the last is evaluated.
    """
    if not (best := config.training.checkpoint.best):
        return
    evaluation = config.evaluation
    key = next(name for name in HELD_OUT if hasattr(evaluation, name))
    is_rl, held_out = key == "prompts", getattr(evaluation, key)
    kinds = ("eval/", "eval_sampled/") if is_rl and evaluation.sampled_too else ("eval/",)
    known = [prefix + name for prefix in kinds for name in HELD_OUT[key]]
    known += ["eval/kl"] if getattr(getattr(config, "loss", None), "method", "") == "kto" else []
    metric, prefixes = best.removeprefix("min:"), "|".join(kinds)
    close = difflib.get_close_matches(metric, known, n=1)
    require(
        metric in known or (is_rl and re.match(f"({prefixes})(environment|source)/.", metric)),
        f"training.checkpoint.best is {best!r}, which no evaluation of this run has;"
        f" {f'did you mean {close[0]!r}? It' if close else 'it'} may be {', '.join(known)}"
        f"{', eval/environment/<name>' if is_rl else ''}, with min: before it for the lowest",
    )
    require(
        evaluation.every > 0 and (held_out.source or getattr(held_out, "sources", ())),
        f"training.checkpoint.best is {best!r}, but evaluation.every or evaluation.{key}.source"
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
    for key, named in (("reward_models", models), ("critics", config.critics)):
        wrong = [name for name in named if not name.isidentifier() or len(name) > 64]
        require(
            not wrong,
            f"{key} has a model named {wrong}; set a name of at most 64 letters, digits and _",
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
