"""Checks of a recipe before anything heavy starts; each error says what to set."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoints import progress
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.checkpoints.listing import newest_first
from megarl.checks import engine_checks, folder_checks, layout_checks, model_checks
from megarl.checks.objective_trial import try_filter, try_objectives
from megarl.checks.run_files import check_run_files
from megarl.checks.verifier_trial import check_verifier, try_verifier
from megarl.data.chat_template import ends_of_turns
from megarl.data.source import PromptList, load_prompts
from megarl.engines.vllm_engine import Engine
from megarl.environments.user_code import function_of
from megarl.parallel import launcher
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import local_device
from megarl.parallel.tensor import whole_shapes
from megarl.rollout.dispatch.policy_table import refusal
from megarl.settings.combinations import sources, with_hidden
from megarl.settings.config import AnyConfig, RunConfig, with_steps
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.schema import is_own, replace, require
from megarl.system import console
from megarl.system.lookup import AGENTS, of_app
from megarl.system.ray_address import ray_address
from megarl.trainer.context import RunInputs, trained_roles
from megarl.trainer.heads import SCORING, HeadName, use_score_head
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.memory import sized_parameters
from megarl.trainer.model_config import longest_sequence
from megarl.trainer.precision import has_bfloat16
from megarl.trainer.role_placement import RolePlace, policy_ranks, reference_adapter
from megarl.trainer.weights import base_digest
from megarl.types import Prompt
from megarl.weights.parameters import ParameterSpec, plain_table
from megarl.weights.recorded_table import recorded_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_train(config: RunConfig, ranks: int | None = None) -> RunInputs:
    """Run all checks of `task: rl` on this machine, for the run's ranks, or for `ranks` on one
    host, to check a recipe alone. Raises `ValueError` if one fails.
    """
    return check_run(config, num_ranks=ranks_to_check(ranks), started=ranks is None)


def ranks_to_check(ranks: int | None) -> int:
    """`ranks`, or else the launcher's number. Raises `ValueError` if its variables contradict each
    other.
    """
    if ranks is not None:
        return ranks
    launcher.refuse_wrong()
    return launcher.num_ranks()


def warn(message: str) -> None:
    """Print a warning on standard error, on rank 0, if there is a `message`."""
    if message and launcher.rank() == 0:
        console.say(f"megarl: warning: {message}")


def check_run(
    config: RunConfig, *, num_ranks: int, new: bool = True, started: bool = True
) -> RunInputs:
    """Run all checks of `task: rl` for `num_ranks` ranks, and return what they have loaded. Raises
    `ValueError` if one fails. With `new` False (evaluation), engine placement, checkpoints and the
    folder's run are not checked. With `started` False, no launcher has started the ranks, which are
    all on this host.
    """
    if launcher.rank() == 0:  # the others are told where Ray is
        ray_address()
    ranks = policy_ranks(config, num_ranks) if new else tuple(range(num_ranks))
    layout = layout_checks.check_layout(config.training, len(ranks))
    if local_device().type == "cuda":
        check_gpus(config)
    rollout, training = config.rollout, config.training
    samples = rollout.groups_per_step * rollout.group_size // training.num_mini_batches
    require(
        samples >= layout.data,
        f"a mini-batch has {samples} samples for {layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    if new:
        try_objectives(config, local_device(), has_empty_ranks=layout.size > 1)
        check_places(config)
    else:
        folder_checks.check_writable(config.folder, setting="folder")
    tokenizer, hf = model_checks.check_model(config.model)
    warn(model_checks.unused_weights(config.model))
    model_checks.check_router_replay(config.algorithm, hf)
    engine_checks.check_engine_kind(rollout.engine.kind, hf, config.algorithm.router_replay)
    layout_checks.check_cut(config.training, config.model, hf)
    policy, names = RolePlace(ranks, layout), config.other_roles if new else ()
    roles = {name: layout_checks.check_role(name, config, hf, policy, num_ranks) for name in names}
    warn(algorithm_warning(config.algorithm, training.optimizer_steps))
    warn(EQUAL_REWARDS if is_own(config.algorithm.advantage) and not rollout.filter else "")
    prompts, held_out, tools = read_prompts(config, tokenizer)
    # Ranks without the data leave its lengths to rank 0.
    longest = max((rows.longest for rows in (prompts, held_out) if rows is not None), default=0)
    _check_shared_prompts(config, prompts.longest if prompts is not None else 0)
    layout_checks.check_positions(config, hf, roles, longest)
    if new:
        model_checks.check_export(config.model, tokenizer, hf)
        _check_engines(config, hf, layout, num_ranks, started=started)
    check_weights(config.model)
    warn(model_checks.check_published_adapters(config))
    if local_device().type == "cpu":
        engine_checks.check_cache(
            rollout.engine,
            hf,
            longest_sequence(config, hf),
            engines=rollout.num_engines,
            section="rollout.engine",
            shorter="rollout.max_new_tokens",
            fewer="rollout.num_engines",
        )
    if prompts is not None:
        with_steps(config, len(prompts))
        first = config.prompts.parts[0]
        chats, variables = first.template == "chat", first.template_variables
        try_verifier(with_hidden(config), prompts, tokenizer, variables, chats=chats)
        try_filter(config, prompts)
    ends = _ends_of_turns(config, tokenizer)
    data = prompts.fingerprint if prompts is not None else ""
    chosen = find_checkpoint(config, layout, data, trained_roles(config, roles)) if new else None
    records = new and (not started or launcher.rank() == ranks[0])  # which tells the others
    return RunInputs(
        layout,
        tokenizer,
        hf,
        model_checks.stop_tokens(tokenizer, config.model, hf, ends),
        data,
        prompts,
        held_out,
        resume_from=chosen,
        ranks=ranks,
        roles=roles,
        tools=tools,
        table=engine_table(config, hf) if records else None,
    )


def _ends_of_turns(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that end the model's turns in the data."""
    parts = [data for _, data in sources(config) if data.names_data]
    ends = (ends_of_turns(tokenizer, data.template, data.template_variables) for data in parts)
    return [end for some in ends for end in some]


def _check_engines(
    config: RunConfig,
    hf: PretrainedConfig,
    layout: Layout,
    num_ranks: int,
    *,
    started: bool,
) -> None:
    """Raise `ValueError` unless the engines fit the model, the policy's layout and the devices."""
    on_gpus, engine = local_device().type == "cuda", config.rollout.engine
    if not is_own(engine.kind):
        engine_checks.check_engine_tensor(hf, engine.tensor)
    if on_gpus:
        gpu = torch.cuda.get_device_properties(local_device())
        parameters = sized_parameters(config.model, layout.tensor)
        engine_checks.check_gpu_share(config, parameters, layout, gpu.total_memory)
    engine_checks.check_placement(
        config, layout.size, num_ranks, shares_gpus=on_gpus, started=started
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
        own = function_of(engine.kind, {}, "rollout.engine.kind", is_class=True)
        if not issubclass(own, Engine):  # pyright: ignore[reportArgumentType]
            parameters = sized_parameters(config.model, 1)
            return plain_table(
                {parameter.name: parameter.shape for parameter in parameters}, engine.tensor
            )
    on_cpu = local_device().type == "cpu"
    return recorded_table(config.model.path, hf.to_dict(), engine.tensor, on_cpu=on_cpu)


def _check_shared_prompts(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` if `training.share_prefix` is "on" and a prompt fills a packed sequence:
    each response would be computed with the whole prompt.
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


def read_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptList | None, PromptList | None, list[dict[str, Any]]]:
    """Load the recipe's verifier, session or tools, and its data. Returns (training prompts,
    held-out prompts, tools in OpenAI's format); rank 0 reads the prompts for all. Raises
    `ValueError` for data or a verifier that cannot be used.
    """
    tools = check_verifier(with_hidden(config))
    name = config.environment.agent.function
    if name in AGENTS:
        require(
            config.environment.agent.model == "policy",
            f"environment.agent.model is '{config.environment.agent.model}', but the agent '{name}'"
            " asks for 'policy'; leave it out",
        )
    for key, source in sources(config) if name in AGENTS else ():
        require(
            not source.names_data or source.source.startswith(f"{name}:"),
            f"{key}.source is '{source.source}', but the agent '{name}' plays the environment that"
            f" its prompts are of; set {key}.source to {name}:NAME",
        )
    if launcher.rank() != 0:
        return None, None, tools
    are_read = not config.environment.agent.is_used
    read = functools.partial(
        load_prompts, tokenizer=tokenizer, seed=config.seed, tools=tools, are_read=are_read
    )
    prompts, held_out = read(config.prompts), None
    if config.evaluation.prompts.names_data:
        held_out = read(config.evaluation.prompts, setting="evaluation.prompts")
    check_environments(config, prompts, held_out)
    _check_problems(config, prompts, "prompts")
    _check_problems(config, held_out, "evaluation.prompts")
    return prompts, held_out, tools


def _check_problems(config: RunConfig, prompts: PromptList | None, setting: str) -> None:
    """Warn about prompts. Raises `ValueError` for rows that a verifier which runs programs cannot
    use.
    """
    if prompts is not None:
        warn(prompts.warning)
        if config.environment.programs:
            of_app("check_rows")(config.environment, prompts, setting)


def check_places(config: RunConfig) -> None:
    """Raise `ValueError` if the run cannot use its folder, lacks a package for its metrics or time
    to save, or combines dynamic sampling with reward models.
    """
    require(
        not config.reward_models
        or not config.rollout.dynamic_sampling.enabled
        or config.group_filter != "differing",
        "rollout.dynamic_sampling.enabled is true, but groups are rejected before reward_models"
        " score them; set it to false",
    )
    folder_checks.check_folder(config.folder, resume=bool(config.resume))
    folder_checks.check_time_to_save(config.training.checkpoint)
    folder_checks.check_observe(config.observe)


def find_checkpoint(
    config: AnyConfig,
    layout: Layout,
    data: str,
    roles: Mapping[str, str] | None = None,
    head: HeadName = "logprobs",
) -> Path | None:
    """On rank 0: the folder of the checkpoint to resume from, None for a new run. Raises
    `ValueError` if `resume` is true without a checkpoint, if none of them fits, or if a file of the
    run folder is damaged.

    `layout` and `head`: of the trained model. `data`: digest of the data and their order. `roles`:
    see `trained_roles`.
    """
    if launcher.rank() != 0:
        return None
    chosen = _chosen(config, layout, data, roles, head) if config.resume else None
    check_run_files(Path(config.folder), chosen)
    return chosen


def _chosen(
    config: AnyConfig, layout: Layout, data: str, roles: Mapping[str, str] | None, head: HeadName
) -> Path | None:
    """What `find_checkpoint` returns for a run that resumes."""
    folder = Path(config.folder) / "checkpoints"
    require(
        config.resume == "auto" or bool(newest_first(folder)),
        f"resume is true, but {folder} has no checkpoint; set resume to auto to begin a new run"
        " where there is none, or to false",
    )
    model = empty_model(config.model)
    if head in SCORING:
        use_score_head(model)
    started = reference_adapter(config)
    chosen = progress.choose(
        folder,
        layout=progress.written_under(layout, config.training),
        model=progress.shapes_fingerprint(whole_shapes(model, {})),
        seed=config.seed,
        data=data,
        roles=roles,
        base=base_digest(config.model.path) if config.training.lora.is_on else "",
        reference=None if started is None else adapter_digest(started),
    )
    if chosen is not None and isinstance(config, RunConfig):
        why = refusal(config.rollout.dispatch, progress.read_progress(chosen).cursor)
        require(not why, f"checkpoint {chosen} cannot be resumed: {why}")
    if chosen is None:
        console.say(f"resume is auto, and {folder} has no checkpoint: the run begins with step 1")
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


def check_gpus(config: RunConfig) -> None:
    """Raise `ValueError` if the recipe asks engines for bfloat16 on GPUs older than Ampere, or for
    several ranks on a MIG slice. Needs a GPU.
    """
    name, engine = torch.cuda.get_device_name(0), config.rollout.engine
    require(
        engine.dtype != "bfloat16" or has_bfloat16(),
        f"rollout.engine.dtype is 'bfloat16', which {name} does not compute in; set it to"
        " 'float16', or use GPUs of the Ampere generation or newer",
    )
    is_cut, ranks = "MIG" in name, launcher.ranks_per_host()
    require(
        not is_cut or (ranks == 1 and engine.tensor == 1),
        f"this GPU is a slice ({name}), of which a process sees one and between which NCCL sends"
        f" nothing, but the run has {ranks} ranks here and rollout.engine.tensor {engine.tensor};"
        " start one rank with rollout.engine.tensor 1, or turn MIG off (nvidia-smi -mig 0)",
    )


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
    """Run all checks of `megarl eval` for each model of `evaluation.models`, or else `model.path`.
    Raises `ValueError` if one fails.
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
    models = [*dict.fromkeys(config.evaluation.models)] or [config.model.path]
    return EvalInputs([check_evaluated_model(config, path) for path in models])


def check_evaluated_model(config: RunConfig, path: str) -> EvalCase:
    """Check the recipe with the model at `path`, a folder or hub name, and read its data sets.
    Raises `ValueError` if a check fails.
    """
    own = replace(config, model=replace(config.model, path=path))
    inputs = check_run(own, num_ranks=1, new=False)
    assert inputs.held_out is not None
    first = config.evaluation.prompts
    require(
        not (first.sources and config.evaluation.sources),
        "evaluation.sources is set beside evaluation.prompts.sources; evaluation.sources are read"
        " as evaluation.prompts.source is, so set that, or leave evaluation.sources out",
    )
    sets = {first.label: list(inputs.held_out)}
    options: dict[str, Any] = {"seed": config.seed, "setting": "evaluation.prompts"}
    options["tools"] = inputs.tools
    for source in config.evaluation.sources:
        rows = load_prompts(replace(first, source=source), inputs.tokenizer, **options)
        layout_checks.check_positions(own, inputs.hf, (), rows.longest)
        _check_problems(config, rows, f"evaluation.sources {source}")
        sets[source] = list(rows)
    return EvalCase(own, inputs, sets)
