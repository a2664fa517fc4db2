"""Checks of a recipe before anything heavy starts; each error says what to set."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from megarl.checkpoints.progress import choose, fingerprint, written_under
from megarl.checks.engine_checks import check_cache_memory, check_placement
from megarl.checks.layout_checks import check_cut, check_layout
from megarl.checks.model_checks import check_model, stop_tokens
from megarl.checks.roles import check_reference, policy_ranks
from megarl.config import RunConfig, SftConfig, longest_request
from megarl.data.demonstrations import load_demonstrations
from megarl.data.source import load_prompts
from megarl.environments.config import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import local_device, num_ranks, rank
from megarl.parallel.tensor import whole_shapes
from megarl.schema import require
from megarl.trainer.context import RolePlace, RunInputs
from megarl.trainer.loading import check_weights, empty_model
from megarl.weight_sync.families import parameter_table, refuse_engine_tensor

MIN_FREE_BYTES = 64 * 2**20
"""Minimum free disk space in bytes; with less, a run does not start."""


def check_train(config: RunConfig) -> RunInputs:
    """Run all checks of `megarl train` on this machine for this run's ranks. Returns what the
    checks have loaded, such as model configuration and prompts. Raises `ValueError` if a check
    fails.
    """
    return check_run(config, num_ranks=num_ranks(), on_cpu=local_device().type == "cpu")


def check_sft(config: SftConfig) -> RunInputs:
    """Run all checks of `megarl sft` for this run's ranks. Returns what the checks have loaded.
    Raises `ValueError` if a check fails.
    """
    return check_sft_run(config, num_ranks=num_ranks())


def check_eval(config: RunConfig) -> RunInputs:
    """Run all checks of `megarl eval`. Returns what the checks have loaded. Raises `ValueError` if
    a check fails.
    """
    require(
        num_ranks() == 1,
        f"megarl eval runs as one process, but was started as {num_ranks()} ranks",
    )
    require(
        bool(config.evaluation.prompts.source),
        "evaluation.prompts.source is empty; set it to held-out problems",
    )
    return check_run(config, num_ranks=1, on_cpu=local_device().type == "cpu", new=False)


def check_run(config: RunConfig, *, num_ranks: int, on_cpu: bool, new: bool = True) -> RunInputs:
    """Run all checks of `megarl train` for `num_ranks` ranks. Raises `ValueError` if one fails.

    With `new` False (evaluation), run folder, engine placement and checkpoints are not checked.
    """
    ranks = policy_ranks(config, num_ranks) if new else tuple(range(num_ranks))
    layout = check_layout(config.training, len(ranks))
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
        check_folder(config.folder, resume=config.resume)
    tokenizer, hf = check_model(config.model)
    check_cut(config.training, config.model, hf)
    reference = None
    if new and config.algorithm.kl.coefficient > 0:
        reference = check_reference(config, hf, RolePlace(ranks, layout), num_ranks)
    check_verifier(config.environment)
    # Rank 0 reads for all: it hands the prompts to the rollout service, the only one to use them.
    reads = rank() == 0
    prompts = load_prompts(config.prompts, tokenizer, seed=config.seed) if reads else None
    held_out = (
        load_prompts(config.evaluation.prompts, tokenizer, seed=config.seed)
        if reads and config.evaluation.prompts.source
        else None
    )
    longest = longest_request(config)
    limit = getattr(hf.get_text_config(), "max_position_embeddings", None)
    require(
        limit is None or longest <= limit,
        "the longest prompt (max_prompt_tokens of prompts and of evaluation.prompts) +"
        f" rollout.max_new_tokens is {longest}, but the model's max_position_embeddings is {limit};"
        " lower one of them",
    )
    if new:
        parameter_table(hf.to_dict())
        refuse_engine_tensor(hf.to_dict(), config.rollout.engine.tensor)
        check_weights(config.model)
        check_placement(config, num_ranks=num_ranks, shares_gpus=not on_cpu)
    if on_cpu:
        check_cache_memory(config, hf, longest)
    data = prompts.fingerprint if prompts is not None else ""
    checkpoint = find_checkpoint(config, layout, data) if new else None
    stops = stop_tokens(tokenizer, config.model)
    return RunInputs(
        layout,
        tokenizer,
        hf,
        stops,
        data,
        prompts,
        held_out,
        resume_from=checkpoint,
        ranks=ranks,
        reference=reference,
    )


def check_sft_run(config: SftConfig, *, num_ranks: int) -> RunInputs:
    """Run all checks of `megarl sft` for `num_ranks` ranks. Raises `ValueError` if one fails."""
    layout = check_layout(config.training, num_ranks)
    require(
        config.samples_per_step >= layout.data,
        f"samples_per_step is {config.samples_per_step} for {layout.data} data ranks; raise it",
    )
    check_folder(config.folder, resume=config.resume)
    tokenizer, hf = check_model(config.model)
    check_cut(config.training, config.model, hf)
    check_weights(config.model)
    # Rank 0 reads for all, and sends every step's samples to the other ranks.
    demonstrations = (
        load_demonstrations(config.demonstrations, tokenizer, seed=config.seed)
        if rank() == 0
        else None
    )
    data = demonstrations.fingerprint if demonstrations is not None else ""
    checkpoint = find_checkpoint(config, layout, data)
    stops = stop_tokens(tokenizer, config.model)
    return RunInputs(
        layout, tokenizer, hf, stops, data, demonstrations=demonstrations, resume_from=checkpoint
    )


def check_folder(folder: str, *, resume: bool) -> None:
    """Raise `ValueError` if the run folder already has a run and `resume` is off, or if its disk
    has too little free space.
    """
    path = Path(folder)
    holds_run = (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
    require(
        resume or not holds_run,
        f"folder {folder} already holds a run; set resume to true to continue it, or folder to a"
        " new one",
    )
    existing = path
    while not existing.exists():
        existing = existing.parent
    require(
        existing.is_dir(),
        f"folder {folder}: {existing} is a file; set folder to a place where a folder can be made",
    )
    free = shutil.disk_usage(existing).free
    require(
        free >= MIN_FREE_BYTES,
        f"the disk of folder {folder} has {free / 2**20:.0f} MiB free; free some or set another"
        " folder",
    )


def check_verifier(config: EnvironmentConfig) -> None:
    """Raise `ValueError` unless the environment's verifier can be loaded in a worker process."""

    async def load_once() -> None:
        environment = Environment(config)
        try:
            await environment.start()
        finally:
            await environment.close()

    asyncio.run(load_once())


def find_checkpoint(config: RunConfig | SftConfig, layout: Layout, data: str) -> Path | None:
    """The checkpoint to resume from, on rank 0; None for a new run and on other ranks."""
    if not config.resume or rank() != 0:
        return None
    return choose(
        Path(config.folder) / "checkpoints",
        layout=written_under(layout, config.training),
        model=fingerprint(whole_shapes(empty_model(config.model), {})),
        seed=config.seed,
        data=data,
    )
