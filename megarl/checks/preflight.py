"""Checks of a recipe before anything heavy starts; each error says what to set."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl import console
from megarl.chat_template import end_of_turn
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.checkpoints.progress import (
    choose,
    newest_first,
    read_progress,
    shapes_fingerprint,
    written_under,
)
from megarl.checks.adapter_checks import check_published_adapters
from megarl.checks.engine_checks import (
    check_cache_memory,
    check_engine_model,
    check_gpu_share,
    check_placement,
)
from megarl.checks.folder_checks import (
    check_folder,
    check_observe,
    check_time_to_save,
    check_writable,
)
from megarl.checks.layout_checks import check_cut, check_layout
from megarl.checks.model_checks import check_export, check_model, stop_tokens, unused_weights
from megarl.checks.objective_trial import try_filter, try_objectives
from megarl.checks.roles import check_positions, check_role, refuse_rejection
from megarl.checks.run_files import check_run_files
from megarl.checks.verifier_trial import check_verifier, try_verifier
from megarl.cluster.ray_address import ray_address
from megarl.config import AnyConfig, RunConfig, with_steps
from megarl.data.source import PromptList, load_prompts
from megarl.lookup import of_app
from megarl.objectives.config import AlgorithmConfig
from megarl.parallel import launcher
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import local_device
from megarl.parallel.tensor import whole_shapes
from megarl.rollout.dispatch.policy_table import refusal
from megarl.schema import is_own, require
from megarl.trainer.context import RunInputs, trained_roles
from megarl.trainer.heads import SCORING, HeadName, use_score_head
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.model_config import longest_sequence
from megarl.trainer.places import RolePlace, policy_ranks, reference_adapter
from megarl.trainer.precision import has_bfloat16
from megarl.trainer.weights import base_digest
from megarl.weight_sync.families import parameter_table, refuse_engine_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_train(config: RunConfig, ranks: int | None = None) -> RunInputs:
    """Run all checks of `megarl train` on this machine for this run's ranks, or for a run of
    `ranks` ranks on one host, of which this process plays rank 0. Returns what the checks have
    loaded, such as model configuration and prompts. Raises `ValueError` if a check fails.
    """
    size = ranks_to_check(ranks)
    on_cpu = local_device().type == "cpu"
    return check_run(config, num_ranks=size, on_cpu=on_cpu, started=ranks is None)


def ranks_to_check(ranks: int | None) -> int:
    """Number of ranks to check for: `ranks`, or what the launcher says, which must be sound."""
    if ranks is not None:
        return ranks
    launcher.refuse_wrong()
    return launcher.num_ranks()


def warn(message: str) -> None:
    """Print a warning of one line on standard error."""
    if message and launcher.rank() == 0:
        console.say(f"megarl: warning: {message}")


def check_run(
    config: RunConfig, *, num_ranks: int, on_cpu: bool, new: bool = True, started: bool = True
) -> RunInputs:
    """Run all checks of `megarl train` for `num_ranks` ranks. Raises `ValueError` if one fails.

    With `new` False (evaluation), engine placement, checkpoints and whether the folder holds
    another run are not checked.
    With `started` False, the ranks were not started, and are all on this host.
    """
    if launcher.rank() == 0:  # the others are told where Ray is
        ray_address()
    ranks = policy_ranks(config, num_ranks) if new else tuple(range(num_ranks))
    layout = check_layout(config.training, len(ranks))
    if not on_cpu:
        check_gpus(config)
    samples = (
        config.rollout.groups_per_step
        * config.rollout.group_size
        // config.training.num_mini_batches
    )
    require(
        samples >= layout.data,
        f"a mini-batch has {samples} samples for {layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    if new:
        device = torch.device("cpu") if on_cpu else local_device()
        try_objectives(config, device, has_empty_ranks=layout.size > 1)
        check_places(config)
    else:
        check_writable(config.folder, setting="folder")
    tokenizer, hf = check_model(config.model)
    warn(unused_weights(config.model))
    check_engine_model(hf)
    check_cut(config.training, config.model, hf)
    policy = RolePlace(ranks, layout)
    names = config.other_roles if new else ()
    roles = {name: check_role(name, config, hf, policy, num_ranks) for name in names}
    warn(algorithm_warning(config.algorithm, config.training.optimizer_steps))
    warn(_of_equal_rewards(config))
    prompts, held_out, tools = read_prompts(config, tokenizer)
    # Ranks without the data leave its lengths to rank 0.
    longest = max((one.longest for one in (prompts, held_out) if one is not None), default=0)
    _check_shared_prompts(config, prompts.longest if prompts is not None else 0)
    check_positions(config, hf, roles, longest)
    if new:
        check_export(config.model, tokenizer, hf)
        table = parameter_table(hf.to_dict())
        if not on_cpu:
            gpu = torch.cuda.get_device_properties(local_device())
            check_gpu_share(config, table, layout, gpu.total_memory)
        refuse_engine_tensor(hf.to_dict(), config.rollout.engine.tensor)
        check_placement(config, layout.size, num_ranks, shares_gpus=not on_cpu, started=started)
    check_weights(config.model)
    warn(check_published_adapters(config))
    if on_cpu:
        check_cache_memory(config, hf, longest_sequence(config, hf))
    if prompts is not None:
        with_steps(config, len(prompts))
        variables = config.prompts.parts[0].template_variables
        try_verifier(config.environment, prompts, tokenizer, variables)
        try_filter(config, prompts)
    data = prompts.fingerprint if prompts is not None else ""
    found = find_checkpoint(config, layout, data, trained_roles(config, roles)) if new else None
    return RunInputs(
        layout,
        tokenizer,
        hf,
        stop_tokens(tokenizer, config.model, hf, _ends(config, tokenizer)),
        data,
        prompts,
        held_out,
        resume_from=found,
        ranks=ranks,
        roles=roles,
        tools=tools,
    )


def _of_equal_rewards(config: RunConfig) -> str:
    """What to know of an advantage of one's own, "" without one."""
    if not is_own(config.algorithm.advantage) or config.rollout.filter:
        return ""
    return (
        "algorithm.advantage is a function of your own: groups of equal rewards are trained on;"
        " set rollout.filter to 'differing' if it gives them 0, otherwise to 'all'"
    )


def _ends(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a turn, as the prompts of training and evaluation are written."""
    return [
        end_of_turn(tokenizer, part.template, part.template_variables)
        for data in (config.prompts, config.evaluation.prompts)
        if data.names_data
        for part in data.parts
    ]


def _check_shared_prompts(config: RunConfig, longest: int) -> None:
    """Raise `ValueError` if prompts are always to be shared, but one fills a packed sequence: its
    responses would be computed one by one, each with the whole prompt. `longest`: tokens of the
    longest prompt.
    """
    budget = config.training.micro_batch_tokens * config.training.layout.sequence
    require(
        config.training.share_prefix != "on" or longest < budget,
        f"training.share_prefix is 'on', but a prompt has {longest} tokens"
        f" and a packed sequence has {budget}"
        " (training.micro_batch_tokens x layout.sequence), which leaves no room for responses;"
        " raise training.micro_batch_tokens, or set training.share_prefix to 'auto'",
    )
    response = config.rollout.max_new_tokens
    if config.training.share_prefix == "on" and longest + 2 * response > budget:
        console.say(
            f"megarl: warning: training.share_prefix is 'on', but a prompt of {longest} tokens"
            f" and two responses of {response}"
            f" (rollout.max_new_tokens) exceed a packed sequence of {budget}"
            " (training.micro_batch_tokens x layout.sequence): such a group shares nothing"
        )


def read_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptList | None, PromptList | None, list[dict[str, Any]]]:
    """(prompts, held-out prompts, tools that they show), after loading the verifier, the session or
    the tools once. Prompts are None except on rank 0, which reads for all: it hands them to the
    rollout service, the only one to use them. Held-out ones are None too where there are none.
    """
    tools = check_verifier(config.environment)
    if launcher.rank() != 0:
        return None, None, tools
    read = functools.partial(load_prompts, tokenizer=tokenizer, seed=config.seed, tools=tools)
    prompts, held_out = read(config.prompts), None
    if config.evaluation.prompts.names_data:
        held_out = read(config.evaluation.prompts, setting="evaluation.prompts")
    check_environments(config, prompts, held_out)
    for setting, one in (("prompts", prompts), ("evaluation.prompts", held_out)):
        if one is not None:
            warn(one.warning)
            if config.environment.programs:
                of_app("check_rows")(config.environment, one, setting)
    return prompts, held_out, tools


def check_places(config: RunConfig) -> None:
    """Raise `ValueError` if a folder of the run cannot be written or holds another run, if a
    package is missing that its metrics need, or if dynamic sampling and reward models are used
    together.
    """
    refuse_rejection(config)
    check_folder(config.folder, resume=bool(config.resume))
    check_time_to_save(config.training.checkpoint)
    if config.weight_sync.folder:
        check_writable(config.weight_sync.folder, setting="weight_sync.folder")
    check_observe(config.observe)


def find_checkpoint(
    config: AnyConfig,
    layout: Layout,
    data: str,
    roles: Mapping[str, str] | None = None,
    head: HeadName = "logprobs",
) -> Path | None:
    """On rank 0: the folder of the checkpoint to resume from, None for a run that begins with
    step 1. On other ranks always None.

    Args:
        layout: of the policy, or of the model that is trained.
        data: fingerprint of the prompts or demonstrations.
        roles: {name: layout} of the other roles that are trained, such as the critic.
        head: output of the trained model: log-probs, values or scores.

    Raises:
        ValueError: `resume` is true and there is no checkpoint; there are some, but none can be
            resumed; or a file of the run folder is damaged.
    """
    if launcher.rank() != 0:
        return None
    chosen = _chosen(config, layout, data, roles, head) if config.resume else None
    check_run_files(Path(config.folder), chosen)
    return chosen


def _chosen(
    config: AnyConfig, layout: Layout, data: str, roles: Mapping[str, str] | None, head: HeadName
) -> Path | None:
    """What `find_checkpoint` finds for a run that resumes."""
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
    chosen = choose(
        folder,
        layout=written_under(layout, config.training),
        model=shapes_fingerprint(whole_shapes(model, {})),
        seed=config.seed,
        data=data,
        roles=roles,
        base=base_digest(config.model.path) if config.training.lora.is_on else "",
        reference=None if started is None else adapter_digest(started),
    )
    if chosen is not None and isinstance(config, RunConfig):
        why = refusal(config.rollout.dispatch, read_progress(chosen).cursor)
        require(not why, f"checkpoint {chosen} cannot be resumed: {why}")
    if chosen is None:
        console.say(f"resume is auto, and {folder} has no checkpoint: the run begins with step 1")
    return chosen


WIDEST_SEQUENCE_CLIP = 0.05
"""Clip width above which the ratio of a whole sequence, a mean over tokens, is hardly ever
clipped. The paper's widths are 3e-4 and 4e-4."""


def algorithm_warning(algorithm: AlgorithmConfig, num_updates: int) -> str:
    """What the user should know about the algorithm's settings; empty if nothing. `num_updates`:
    optimizer steps for each step's batch.
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
    """Raise `ValueError` if engines or ranks need what the GPUs of this machine do not have. All
    GPUs are taken to be of one kind.
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
    """Raise `ValueError` where rows of the data name a verifier that is not in
    `environment.mixture`, or no row names one that is there.
    """
    known = config.environment.mixture
    read = [prompts for prompts in lists if prompts is not None]
    if not known or not read:
        return
    named: set[str] = set()
    for prompts in read:
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
