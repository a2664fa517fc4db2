"""DeepSpeed's checkpoint files: written by torch, read without running any code that is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

ALLOWED = [LossScaler, ZeroStageEnum, fragment_address]
"""Classes, besides torch's own, whose objects DeepSpeed's files may hold."""


def read_state(path: Path, *, mapped: bool = True) -> dict[str, Any]:
    """A file of DeepSpeed's on the CPU, `mapped` from disk or in memory. Raises `ValueError` where
    it is missing, cannot be read, or would run code.
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


def write_state(state: dict[str, Any], path: Path) -> None:
    """A file of DeepSpeed's; raises `OSError` where it cannot be written, which torch calls a
    `RuntimeError`.
    """
    try:
        torch.save(state, path)
    except RuntimeError as error:
        raise OSError(f"{path.name}: {error}") from None


class StateFiles(CheckpointEngine):
    """Reads and writes the checkpoint files of DeepSpeed's engine, in place of DeepSpeed's class,
    which unpickles whatever a file holds. Keeps which files were written, and why one was not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "megarl"
        self.begin()

    def begin(self) -> None:
        """Start a checkpoint: forget what was written before."""
        self.written: list[Path] = []
        self.problem = ""
        """Why a file could not be written: the first failure, or an empty string."""

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write a file; a failure is kept in `problem`, since other ranks wait for this one."""
        try:
            write_state(state_dict, Path(path))
            self.written.append(Path(path))
        except OSError as error:
            self.problem = self.problem or str(error)

    def load(self, path: str, map_location: object = None) -> dict[str, Any]:
        """Read a file onto the CPU, from where DeepSpeed copies it."""
        return read_state(Path(path), mapped=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """DeepSpeed's sign that all ranks have written; the caller's own commit follows."""
        return True
