"""Log-probs of a frozen reference model for every response of a data set, computed once and kept in
a file.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import torch
import xxhash

from megarl import console
from megarl.apps.tune.pairs import pack_pairs, take_all_pairs, totals
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.config import PreferenceConfig
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import all_reduce, broadcast_object
from megarl.schema import replace
from megarl.trainer.config import LoraConfig, ModelConfig
from megarl.trainer.context import RunContext
from megarl.trainer.model_config import load_model_config
from megarl.trainer.places import reference_adapter
from megarl.trainer.role import Role
from megarl.trainer.weights import weight_files

READ_BYTES = 2**24
"""Number of bytes of a weight file that are read at once for its digest."""


def reference_scores(context: RunContext, *data: PreferenceList | None) -> list[np.ndarray | None]:
    """Log-probs of each data set in `data`, which rank 0 alone has, under the reference model, as
    an array [N, 2] float64: summed over the tokens of the first and the second response of its N
    rows. They come from numpy files in the folder `reference.cache`, or are computed now and
    written there. None on other ranks, and for a data set that is None. All ranks call it together.
    """
    config = context.config
    assert isinstance(config, PreferenceConfig)
    model = config.reference.model if config.reference.model.path else config.model
    adapter = reference_adapter(config) or ""
    training = config.training
    if not adapter:
        training = replace(training, lora=LoraConfig())
    cache = Path(config.reference.cache or context.folder / "reference")
    files: list[Path | None] = [None for _ in data]
    if context.is_main:
        weights = weights_digest(model, config.seed)
        if adapter:
            weights += f" {adapter_digest(adapter)} {training.lora.alpha}"
        precision = config.training.precision
        files = [
            cache / f"{digest_of(rows.digest, weights, precision)}.npy" if rows else None
            for rows in data
        ]
    found = [
        read_scores(file, len(rows)) if file is not None and rows is not None else None
        for file, rows in zip(files, data, strict=True)
    ]
    missing = broadcast_object(
        [file is not None and one is None for file, one in zip(files, found, strict=True)],
        context.mesh.world,
    )
    if not any(missing):
        return found
    role = Role(
        "reference",
        model=model,
        training=training,
        mesh=context.mesh,
        device=context.device,
        seed=config.seed,
    )
    try:
        for number, rows in enumerate(data):
            if missing[number]:
                scores = response_logprobs(role, rows, config.samples_per_step)
                if (file := files[number]) is not None:
                    write_scores(file, scores)
                    found[number] = scores
    finally:
        role.destroy()
    return found


@torch.no_grad()
def response_logprobs(role: Role, rows: PreferenceList | None, at_once: int) -> np.ndarray:
    """[N, 2] float64 sums of the log-probs of each response's tokens under the model `role`, in the
    order of the data set, on every rank. `rows`: N tokenised preferences, which rank 0 alone has.
    `at_once`: about how many rows are computed together. All ranks call it together.
    """
    parts = [np.zeros((0, 2))]
    for batch in take_all_pairs(rows, role.mesh, at_once):
        found = torch.zeros(2 * len(batch), dtype=torch.float64, device=role.device)
        for micro in pack_pairs(batch.samples, role, together=2):
            logprobs, _ = role.engine(micro, 1.0)
            sums, ids = totals(logprobs, micro.sample_ids[micro.mask], micro)
            found[ids] = sums
        # Each data rank has its own samples, and each sequence rank its part of their sums.
        parts.append(all_reduce(found, role.mesh.gradient).cpu().numpy().reshape(-1, 2))
    return np.concatenate(parts)


def weights_digest(model: ModelConfig, seed: int) -> str:
    """xxh3-128 digest, in hexadecimal, of a model: of its configuration and of its weight files,
    which are read whole, or of `seed` if its weights are random.
    """
    hasher = xxhash.xxh3_128(load_model_config(model).to_json_string(use_diff=False).encode())
    if model.from_scratch:
        hasher.update(str(seed).encode())
        return hasher.hexdigest()
    for path in weight_files(model.path):
        hasher.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                hasher.update(part)
    return hasher.hexdigest()


def digest_of(*parts: str) -> str:
    """xxh3-128 digest, in hexadecimal, of the texts `parts` in their order, for the name of a file
    in the cache of reference log-probs. Where one text ends and the next begins makes a difference.
    """
    return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()


def read_scores(path: Path, num_rows: int) -> np.ndarray | None:
    """Read log-probs [num_rows, 2], float64, from the file `path` of numpy's format (.npy); None if
    the file is missing, damaged, of another shape or not finite.
    """
    layout = np.lib.format
    head = io.BytesIO()
    layout.write_array_header_1_0(head, layout.header_data_from_array_1_0(np.empty((num_rows, 2))))
    size = len(head.getvalue())
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError:
        return None
    # Not np.load: what a damaged head promises, it makes room for, and other formats it reads too.
    if content[:size] != head.getvalue() or len(content) != size + 16 * num_rows:
        return None
    found = np.frombuffer(content, np.float64, offset=size).reshape(num_rows, 2)
    return found if np.isfinite(found).all() else None


def write_scores(path: Path, scores: np.ndarray) -> None:
    """Write the log-probs [N, 2] to the file `path` in numpy's format, under a hidden name and then
    renamed, so that no reader meets a part of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        np.save(file, scores)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)
    console.say(f"the reference's log-probs of {len(scores)} preferences are in {path}")
