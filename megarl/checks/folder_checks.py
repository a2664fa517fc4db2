"""Checks that a run can write where its recipe says, and has the packages that it asks for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from megarl.checkpoints.progress import newest_first
from megarl.observe.config import ObserveConfig
from megarl.schema import require

MIN_FREE_BYTES = 64 * 2**20
"""Minimum free disk space in bytes; with less, a run does not start."""


def check_writable(folder: str, *, setting: str) -> None:
    """Raise `ValueError` unless `folder` is a folder, or can be made, with files written into it
    and some free space on its disk.
    """
    existing = Path(folder).absolute()
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        require(
            existing.exists(),
            f"{setting} is {folder}, but {existing} is a symbolic link to nothing; remove the link,"
            f" or set {setting} to another folder",
        )
        require(
            existing.is_dir(),
            f"{setting} is {folder}, but {existing} is a file; set {setting} to a place where a"
            " folder can be made",
        )
        # Only the file system knows: permissions, read-only mounts, quotas, folders of the kernel.
        os.rmdir(tempfile.mkdtemp(dir=existing, prefix=".megarl"))
        free = shutil.disk_usage(existing).free
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError to pathlib
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{setting} is {folder}, but nothing can be written in {existing} ({why}); set"
            f" {setting} to a folder of your own"
        ) from None
    require(
        free >= MIN_FREE_BYTES,
        f"the disk of {setting} {folder} has {free / 2**20:.0f} MiB free; free some or set another"
        f" {setting}",
    )


def check_folder(folder: str, *, resume: bool) -> None:
    """Raise `ValueError` if the run folder already has a run and `resume` is off, or if nothing can
    be written there. A run that ended before its first step left nothing to keep.
    """
    path, holds_run, checkpoints = Path(folder), False, []
    with contextlib.suppress(OSError):  # said by check_writable
        metrics = path / "metrics.jsonl"
        holds_run = metrics.is_file() and metrics.stat().st_size > 0
        checkpoints = newest_first(path / "checkpoints")
    require(
        resume or not checkpoints,
        f"folder {folder} already holds a run; set resume to true to continue it, or folder to a"
        " new one",
    )
    require(
        resume or not holds_run,
        f"folder {folder} already holds a run that has no checkpoint to resume from; set folder to"
        " a new one, or remove it",
    )
    check_writable(folder, setting="folder")


def check_observe(config: ObserveConfig) -> None:
    """Raise `ValueError` if a package is missing that the recipe's metrics need."""
    for wanted, package, setting, off in (
        (config.tensorboard, "tensorboard", "observe.tensorboard", "false"),
        (bool(config.wandb_project), "wandb", "observe.wandb_project", '""'),
    ):
        require(
            not wanted or importlib.util.find_spec(package) is not None,
            f"{setting} asks for the package {package}, which is not installed; `pip install"
            f" {package}`, or set {setting} to {off}",
        )
