"""The plan of a run: what each part finds it needs, in the order of the parts, before anything
heavy starts. `--check` prints it, and a start builds it; the first mistake is a `ValueError` that
says what to set. `named_files` and `checkpoints.run_folder` come before, without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoints import progress
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.checkpoints.run_files import check_run_files
from megarl.data.chat_template import ends_of_turns
from megarl.data.source import PromptList, load_prompts
from megarl.engines.plan import check_cache, check_engine_kind, plan_engines
from megarl.engines.vllm_engine import Engine
from megarl.environments.trial import check_verifier, try_verifier
from megarl.environments.user_code import function_of
from megarl.parallel import launcher
from megarl.parallel.launcher import warn
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import local_device
from megarl.rollout.dispatch.policy_table import refusal
from megarl.settings.config import AnyConfig, RunConfig, with_steps
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.rl import sources, with_hidden
from megarl.settings.schema import is_own, replace, require
from megarl.system import console
from megarl.system.lookup import of_app
from megarl.system.ray_address import ray_address
from megarl.trainer.context import RunInputs, trained_roles
from megarl.trainer.heads import SCORING, HeadName, use_score_head
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.memory import sized_parameters
from megarl.trainer.model_config import longest_sequence
from megarl.trainer.own_functions import try_filter, try_objectives
from megarl.trainer.plan import (
    check_positions,
    plan_model,
    plan_role,
    plan_training,
    stop_tokens,
)
from megarl.trainer.precision import check_gpus
from megarl.trainer.role_placement import RolePlace, plan_ranks, reference_adapter
from megarl.trainer.weights import base_digest
from megarl.trainer.working_memory import check_gpu_share
from megarl.types import Prompt
from megarl.weights.parameters import ParameterSpec, plain_table
from megarl.weights.published import whole_published
from megarl.weights.recorded_table import recorded_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def plan_run(config: RunConfig, ranks: int | None = None) -> RunInputs:
    """Plan `task: rl` or `distill` for the ranks that a launcher has started; with `ranks`, for so
    many on this host, of which none has been started. Raises `ValueError`.
    """
    num_ranks, is_started = launcher.count_ranks(ranks), ranks is None
    policy, rollout, training = plan_ranks(config, num_ranks), config.rollout, config.training
    members, layout = policy.ranks, policy.layout
    require(
        not config.reward_models
        or not rollout.dynamic_sampling.enabled
        or config.group_filter != "differing",
        "rollout.dynamic_sampling.enabled is true, but groups are rejected before reward_models"
        " score them; set it to false",
    )
    try_objectives(config, local_device(), has_empty_ranks=layout.size > 1)
    warn(algorithm_warning(config.algorithm, training.optimizer_steps))
    warn(EQUAL_REWARDS if is_own(config.algorithm.advantage) and not rollout.filter else "")
    tokenizer, hf = plan_policy(config)
    plan_training(config, tokenizer, hf)
    plan_engines(config, hf, layout.size, num_ranks, is_started=is_started)
    if local_device().type == "cuda":
        gpu = torch.cuda.get_device_properties(local_device())
        parameters = sized_parameters(config.model, layout.tensor, layout.expert)
        check_gpu_share(config, parameters, layout, gpu.total_memory)
    roles = {name: plan_role(name, config, hf, policy) for name in config.other_roles}
    inputs = plan_rollouts(config, tokenizer, hf, roles)
    if inputs.prompts is not None:
        with_steps(config, len(inputs.prompts))
        check_shared_prompts(config, inputs.prompts.longest)
        try_filter(config, inputs.prompts)
    records = not is_started or launcher.rank() == members[0]  # which tells the others
    return with_fields(
        inputs,
        layout=layout,
        resume_from=find_checkpoint(config, layout, inputs.data, trained_roles(config, roles)),
        ranks=members,
        roles=roles,
        table=engine_table(config, hf) if records else None,
    )


def plan_generation(config: RunConfig, command: str, ranks: int | None = None) -> RunInputs:
    """Plan a `command` that generates with the weights of `model.path` and trains nothing, in one
    process. Raises `ValueError`.
    """
    launcher.refuse_several(command, ranks)
    tokenizer, hf = plan_policy(config)
    check_weights(config.model)
    return plan_rollouts(config, tokenizer, hf)


def plan_policy(config: RunConfig) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """(tokenizer, config.json) of a model that this machine's engines can run. Raises
    `ValueError`.
    """
    if launcher.rank() == 0:  # the others are told where Ray is
        ray_address()
    if local_device().type == "cuda":
        check_gpus(config)
    tokenizer, hf = plan_model(config.model)
    check_engine_kind(config.rollout.engine.kind, hf, config.algorithm.router_replay)
    return tokenizer, hf


def plan_rollouts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    hf: PretrainedConfig,
    roles: Mapping[str, RolePlace] | None = None,
) -> RunInputs:
    """Load verifier, session or tools, and the data, and try the one on the other; rank 0 does it
    for all. Raises `ValueError` for data, a verifier, or engines' caches that cannot be used.
    `roles`: models beside the policy that read the prompts.
    """
    prompts, held_out, tools = None, None, list[dict[str, Any]]()
    if launcher.rank() == 0:
        tools = check_verifier(with_hidden(config))
        is_read = not config.environment.agent.is_used
        read = functools.partial(
            load_prompts, tokenizer=tokenizer, seed=config.seed, tools=tools, are_read=is_read
        )
        prompts = read(config.prompts)
        if config.evaluation.prompts.names_data:
            held_out = read(config.evaluation.prompts, setting="evaluation.prompts")
        check_environments(config, prompts, held_out)
        check_problems(config, prompts, "prompts")
        check_problems(config, held_out, "evaluation.prompts")
    longest = max((rows.longest for rows in (prompts, held_out) if rows is not None), default=0)
    check_positions(config, hf, roles or (), longest)
    if local_device().type == "cpu":
        check_cache(
            config.rollout.engine,
            hf,
            longest_sequence(config, hf),
            engines=config.rollout.num_engines,
            section="rollout.engine",
            shorter="rollout.max_new_tokens",
            fewer="rollout.num_engines",
        )
    if prompts is not None:
        first = config.prompts.parts[0]
        chats, variables = first.template == "chat", first.template_variables
        try_verifier(with_hidden(config), prompts, tokenizer, variables, chats=chats)
    parts = [data for _, data in sources(config) if data.names_data]
    ends = (ends_of_turns(tokenizer, data.template, data.template_variables) for data in parts)
    turns = [end for some in ends for end in some]
    return RunInputs(
        Layout(),
        tokenizer,
        hf,
        stop_tokens(tokenizer, config.model, hf, turns),
        prompts.fingerprint if prompts is not None else "",
        prompts,
        held_out,
        tools=tools,
    )


def engine_table(config: RunConfig, hf: PretrainedConfig) -> list[ParameterSpec] | None:
    """How the recipe's engines store each tensor of the policy; None where only adapters are sent.
    The user's own engine stores tensors as the checkpoint does. Raises `ValueError` if vLLM's
    engines cannot take the weights.
    """
    lora, engine = config.training.lora, config.rollout.engine
    if lora.is_on and lora.publish == "adapter":
        return None
    if is_own(engine.kind):
        engine_class = function_of(engine.kind, {}, "rollout.engine.kind")
        if not issubclass(engine_class, Engine):  # pyright: ignore[reportArgumentType]
            return plain_table(whole_published(empty_model(config.model)), engine.tensor)
    on_cpu = local_device().type == "cpu"
    return recorded_table(config.model.path, hf.to_dict(), engine.tensor, on_cpu=on_cpu)


def check_shared_prompts(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` if `training.share_prefix` is "on" and a prompt of `longest` tokens fills
    a packed sequence, so that no response shares it; warn if only one response fits beside it.
    """
    budget = config.training.micro_batch_tokens * config.training.layout.sequence
    response, is_on = config.rollout.max_new_tokens, config.training.share_prefix == "on"
    packed = f"a packed sequence of {budget} (training.micro_batch_tokens x layout.sequence)"
    begun = f"training.share_prefix is 'on', but a prompt of {longest} tokens"
    require(
        not is_on or longest < budget,
        f"{begun} fills {packed}, which leaves no room for responses; raise"
        " training.micro_batch_tokens, or set training.share_prefix to 'auto'",
    )
    if is_on and longest + 2 * response > budget:
        warn(
            f"{begun} and two responses of {response} (rollout.max_new_tokens) exceed {packed}:"
            " such a group shares nothing"
        )


def check_problems(config: RunConfig, prompts: PromptList | None, setting: str) -> None:
    """Warn about prompts. Raises `ValueError` for rows that a verifier which runs programs cannot
    use.
    """
    if prompts is not None:
        warn(prompts.warning)
        if config.environment.programs:
            of_app("check_rows")(config.environment, prompts, setting)


def check_environments(config: RunConfig, *lists: PromptList | None) -> None:
    """Raise `ValueError` unless the verifiers that rows name are those of `environment.mixture`, if
    that is set. `lists`: training and held-out prompts.
    """
    known, named = config.environment.mixture, set[str]()
    for prompts in filter(None, lists if known else ()):
        for index, name in enumerate(prompts.environments or ()):
            require(
                name in known,
                f"row {index} of the data (from 0, over all sources) names the verifier"
                f" '{name:.80}', but environment.mixture has {', '.join(known)}; add this name, or"
                " mend the row",
            )
            named.add(name)
    never = [name for name in known if name not in named]
    require(
        not never,
        f"environment.mixture has {', '.join(never)}, which no row of the data names; remove it",
    )


def find_checkpoint(
    config: AnyConfig,
    layout: Layout,
    data: str,
    roles: Mapping[str, str] | None = None,
    head: HeadName = "logprobs",
) -> Path | None:
    """On rank 0: the folder of the checkpoint to resume from, None for a new run. Raises
    `ValueError` if none of them fits, or a file of the run folder is damaged.

    `layout` and `head`: of the trained model. `data`: digest of the data and their order. `roles`:
    see `trained_roles`.
    """
    if launcher.rank() != 0:
        return None
    folder, chosen = Path(config.folder), None
    if config.resume:
        model = empty_model(config.model)
        if head in SCORING:
            use_score_head(model)
        started = reference_adapter(config)
        chosen = progress.choose(
            folder / "checkpoints",
            layout=progress.written_under(layout, config.training),
            model=progress.shapes_fingerprint(whole_published(model)),
            seed=config.seed,
            data=data,
            roles=roles,
            base=base_digest(config.model.path) if config.training.lora.is_on else "",
            reference=None if started is None else adapter_digest(started),
        )
        if chosen is None:
            where = f"{folder / 'checkpoints'} has no checkpoint"
            console.say(f"resume is auto, and {where}: the run begins with step 1")
        elif isinstance(config, RunConfig):
            why = refusal(config.rollout.dispatch, progress.read_progress(chosen).cursor)
            require(not why, f"checkpoint {chosen} cannot be resumed: {why}")
    check_run_files(folder, chosen)
    return chosen


EQUAL_REWARDS = (
    "algorithm.advantage is a function of your own: groups of equal rewards are trained on; set"
    " rollout.filter to 'differing' if it gives them 0, otherwise to 'all'"
)
WIDEST_SEQUENCE_CLIP = 0.05
"""Clip width above which the ratio of a whole sequence, a mean over tokens, is hardly ever clipped.
The paper's widths are 3e-4 and 4e-4."""


def algorithm_warning(algorithm: AlgorithmConfig, num_updates: int) -> str:
    """A warning of one line about settings that hardly make sense together, or "". `num_updates`:
    optimizer steps per training step.
    """
    if algorithm.loss == "reinforce" and num_updates > 1:
        return (
            f"algorithm.loss is 'reinforce', which has no ratio and no clipping, with {num_updates}"
            " updates in a step (training.num_mini_batches x epochs_per_step): all but the first"
            " train on samples of an older policy as if they were the present one's"
        )
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.loss == "gspo" and widest > WIDEST_SEQUENCE_CLIP:
        return (
            f"algorithm.loss is 'gspo' with algorithm.clip_low {algorithm.clip_low:g} and clip_high"
            f" {algorithm.clip_high:g}, the widths for a token's ratio: the ratio of a sequence is"
            " a mean over its tokens, and such widths hardly ever clip it; the paper has 3e-4 and"
            " 4e-4"
        )
    return ""


@dataclass(frozen=True)
class EvalCase:
    """A model that `megarl eval` is to evaluate."""

    config: RunConfig
    """The recipe with this model as `model.path`."""
    inputs: RunInputs
    sets: dict[str, list[Prompt]]
    """{source: problems}, tokenised for this model."""


@dataclass(frozen=True)
class EvalInputs:
    """What `megarl eval` evaluates."""

    cases: list[EvalCase]

    def __str__(self) -> str:
        sets = self.cases[0].sets.items()
        counts = ", ".join(f"{len(prompts)} problems of {source}" for source, prompts in sets)
        return f"{len(self.cases)} models, {counts}"


def check_eval(config: RunConfig, ranks: int | None = None) -> EvalInputs:
    """Plan `megarl eval` for each model of `evaluation.models`, or else `model.path`. Raises
    `ValueError`.
    """
    evaluation = config.evaluation
    require(
        evaluation.prompts.names_data,
        "evaluation.prompts.source is empty; set it to held-out problems",
    )
    require(
        evaluation.samples == 1 or config.rollout.temperature > 0,
        f"evaluation.samples is {evaluation.samples}, but rollout.temperature is 0, at which"
        " all samples are the same; raise it",
    )
    cases = []
    for path in dict.fromkeys(evaluation.models) or [config.model.path]:
        answering = replace(config, model=replace(config.model, path=path))
        inputs = plan_generation(answering, "eval", ranks)
        assert inputs.held_out is not None
        sets = {evaluation.prompts.label: list(inputs.held_out)}
        options: dict[str, Any] = {"seed": config.seed, "setting": "evaluation.prompts"}
        options["tools"] = inputs.tools
        for source in evaluation.sources:
            section = replace(evaluation.prompts, source=source)
            rows = load_prompts(section, inputs.tokenizer, **options)
            check_positions(answering, inputs.hf, (), rows.longest)
            check_problems(config, rows, f"evaluation.sources {source}")
            sets[source] = list(rows)
        cases.append(EvalCase(answering, inputs, sets))
    return EvalInputs(cases)
