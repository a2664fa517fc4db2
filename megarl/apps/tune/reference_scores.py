"""Log-probs of a frozen reference model for every response of a data set, computed once and kept in
a file.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from megarl.apps.tune.pairs import pair_batch, sums_of_responses
from megarl.apps.tune.supervised import all_batches
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import all_reduce, broadcast_object
from megarl.settings.config import PreferenceConfig
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig
from megarl.system import console
from megarl.system.files import new_file
from megarl.trainer.context import DataRows, RunContext
from megarl.trainer.model_config import load_model_config
from megarl.trainer.role import Role
from megarl.trainer.role_placement import reference_adapter
from megarl.trainer.weights import base_digest


def reference_scores(context: RunContext, *rows_read: DataRows | None) -> list[np.ndarray | None]:
    """Log-probs of preferences under the reference model: for each data set in `rows_read`, on rank
    0, an array [N, 2] float64, summed over the tokens of the first and the second response of its N
    rows. Other ranks pass None for each data set and get None. A data set that is None on rank 0
    gives None too. The arrays are read from numpy files in the folder `reference.cache`; missing
    ones are computed and written there. `context`: recipe, folder and ranks of the run. All ranks
    call it together.
    """
    config = cast("PreferenceConfig", context.config)
    data = cast("tuple[PreferenceList | None, ...]", rows_read)
    model = config.reference.model if config.reference.model.path else config.model
    adapter = reference_adapter(config) or ""
    training = config.training
    if not adapter:
        training = replace(training, lora=LoraConfig())
    cache = Path(config.reference.cache or context.folder / "reference")
    files: list[Path] = []
    by_rows: list[np.ndarray | None] = [None] * len(data)
    if context.is_main:
        weights = str(config.seed) if model.from_scratch else base_digest(model.path)
        weights += load_model_config(model).to_json_string(use_diff=False)
        if adapter:
            weights += f" {adapter_digest(adapter)} {training.lora.alpha}"
        for number, rows in enumerate(data):
            name = digest_of(rows.digest, weights, training.precision) if rows else "none"
            files.append(cache / f"{name}.npy")
            by_rows[number] = read_scores(files[number], len(rows)) if rows else None
    unknown = [number for number, rows in enumerate(data) if rows and by_rows[number] is None]
    missing = broadcast_object(unknown, context.mesh.world)
    if not missing:
        return by_rows
    role = Role(
        "reference",
        model=model,
        training=training,
        mesh=context.mesh,
        device=context.device,
        seed=config.seed,
    )
    try:
        for number in missing:
            scores = response_logprobs(role, data[number], config.samples_per_step)
            if context.is_main:
                write_scores(files[number], scores)
                by_rows[number] = scores
    finally:
        role.destroy()
    return by_rows


def response_logprobs(role: Role, rows: PreferenceList | None, at_once: int) -> np.ndarray:
    """[N, 2] float64 sums of the log-probs of each response's tokens under the model `role`, in the
    order of the data set, on every rank. `rows`: N tokenised preferences, which rank 0 alone has.
    `at_once`: about how many rows are computed together. All ranks call it together.
    """
    parts, make = [np.zeros((0, 2))], partial(pair_batch, reference=None)
    for batch in all_batches(rows, PreferenceList.row, at_once, role.mesh, make):
        sums = sums_of_responses(role, batch.samples, together=2)
        # Each data rank has its own samples, and each sequence rank its part of their sums.
        parts.append(all_reduce(sums, role.mesh.gradient).cpu().numpy().reshape(-1, 2))
    return np.concatenate(parts)


def digest_of(*parts: str) -> str:
    """xxh3-128 digest, in hexadecimal, of the texts `parts` in their order, for the name of a file
    in the cache of reference log-probs. Where one text ends and the next begins makes a difference.
    """
    return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()


def read_scores(path: Path, num_rows: int) -> np.ndarray | None:
    """Read log-probs [num_rows, 2], float64, from the file `path` of numpy's format (.npy); None if
    the file is missing, damaged, of another shape or not finite.
    """
    try:
        scores = np.load(path, allow_pickle=False) if path.is_file() else None
    except Exception:  # numpy raises much, also `MemoryError`, for what a damaged head promises
        return None
    if not isinstance(scores, np.ndarray) or (scores.shape, scores.dtype) != ((num_rows, 2), "<f8"):
        return None
    return scores if np.isfinite(scores).all() else None


def write_scores(path: Path, scores: np.ndarray) -> None:
    """Write the log-probs [N, 2] atomically to the file `path` in numpy's format (.npy); its folder
    is created if missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        np.save(file, scores)
    console.say(f"the reference's log-probs of {len(scores)} preferences are in {path}")
