"""DeepSpeed's checkpoint files: written by torch, read without running any code that is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megarl.checkpoints.rank_files import RankFiles

ALLOWED = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
"""Classes, besides torch's own, that may be unpickled from DeepSpeed's files."""


def read_state(path: Path, *, mapped: bool = True) -> dict[str, Any]:
    """Load a DeepSpeed state file onto the CPU, memory-mapped if `mapped`. Raises `ValueError` if
    the file is missing, cannot be read, or contains a class that is not allowed.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; name a checkpoint that is whole") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read: {first}; name a checkpoint that is whole"
        ) from None


def write_state(state: dict[str, Any], path: Path, files: RankFiles | None = None) -> None:
    """Save a DeepSpeed state file, as one of `files` if they are given. Raises `OSError` if it
    cannot be written, where torch raises `RuntimeError`.
    """
    file = files.create(path) if files is not None else None
    try:
        torch.save(state, path if file is None else file)  # pyright: ignore[reportArgumentType]
    except (RuntimeError, MemoryError) as error:
        if file is not None and file.problem is not None:
            raise file.problem from None
        raise OSError(f"{path.name}: {str(error) or repr(error)}") from None


class StateFiles(CheckpointEngine):
    """Checkpoint engine for DeepSpeed that loads files without arbitrary unpickling, which
    DeepSpeed's own allows. Records the first write error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "megarl"
        self.begin(None)

    def begin(self, files: RankFiles | None) -> None:
        """Start a checkpoint whose files are added to `files`, or written at once if it is None:
        clear the recorded error.
        """
        self.files = files
        self.problem = ""
        """Message of the first write error, or an empty string."""

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write a file. An error is recorded in `problem` instead of being raised, since other
        ranks wait for this one.
        """
        try:
            write_state(state_dict, Path(path), self.files)
        except OSError as error:
            self.problem = self.problem or str(error)

    def load(self, path: str, map_location: object = None) -> dict[str, Any]:
        """Load a file onto the CPU; DeepSpeed copies the tensors to the device."""
        return read_state(Path(path), mapped=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called by DeepSpeed once all ranks have written; does nothing, since `Checkpoints`
        commits.
        """
        return True
