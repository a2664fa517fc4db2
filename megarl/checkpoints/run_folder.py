"""The run folder at the start of a run: who owns it, and whether what it holds suits the recipe.
Looked at before torch is imported.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.checkpoints import lease
from megarl.checkpoints.listing import newest_first, step_of
from megarl.observe.observer import METRICS
from megarl.observe.sinks import check_viewers
from megarl.parallel import launcher
from megarl.settings.config import AnyConfig
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import require
from megarl.settings.serve import ServeRewardConfig
from megarl.settings.training import CheckpointConfig
from megarl.system import signals

RECIPE = "recipe.yaml"
"""The file in the run folder with every setting of its run."""

MIN_FREE_BYTES = 64 * 2**20
"""With less free disk space, a run does not start."""


@contextlib.contextmanager
def plan_folder(
    config: AnyConfig | ServeRewardConfig, *, owns: bool = True, starts: bool = True
) -> Iterator[lease.Lease | None]:
    """A context in which this run owns its folder; gives the `Lease` on rank 0. Raises `ValueError`
    if another run owns it, nothing can be written there, or what it holds does not suit `resume`.
    With `starts` False the folder is looked at and not taken; a command that does not own its
    folder (`owns`) only writes there.
    """
    if launcher.rank() != 0:
        yield None
        return
    check_writable(config.folder, setting="folder")
    with contextlib.ExitStack() as stack:
        owner = None
        if owns and isinstance(config, AnyConfig):
            if starts:
                patience_s = config.training.checkpoint.owner_timeout_s
                try:
                    owner = lease.take(Path(config.folder), patience_s=patience_s)
                except OSError as error:
                    raise ValueError(
                        f"folder is {config.folder}, but no file can be made there ({error}); set"
                        " folder to a folder of your own"
                    ) from None
                stack.callback(owner.release)
            else:
                lease.refuse_living(Path(config.folder))
            check_folder(config.folder, resume=config.resume)
            check_time_to_save(config.training.checkpoint)
            check_viewers(config.observe)
        yield owner


def check_writable(folder: str, *, setting: str) -> None:
    """Raise `ValueError` unless files can be written into `folder`, or into one made there, with 64
    MiB free and no file or folder in the way of a run's. `setting`: for messages. Leaves nothing
    behind.
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


def check_folder(folder: str, *, resume: bool | str) -> None:
    """Raise `ValueError` if the run folder holds a run and `resume` is False, or has no checkpoint
    and it is True. A run that ended before its first step does not count.
    """
    path, holds_run, checkpoints = Path(folder), False, []
    with contextlib.suppress(OSError):  # said by check_writable
        metrics = path / METRICS
        holds_run = metrics.is_file() and metrics.stat().st_size > 0
        checkpoints = newest_first(path / "checkpoints")
    if checkpoints and not resume:
        done, steps = step_of(checkpoints[0])[0], planned_steps(path)
        where = f"step {done}" + (f" of {steps}" if steps else "")
        raise ValueError(
            f"folder {folder} already holds a run, which is finished ({where}); set folder to a new"
            " one, or resume to true and steps to more to train it further"
            if steps and done >= steps
            else f"folder {folder} already holds a run, at {where}; set resume to true to continue"
            " it (--resume auto), or folder to a new one"
        )
    require(
        resume or not holds_run,
        f"folder {folder} already holds a run that has no checkpoint to resume from; set folder to"
        " a new one, or remove it",
    )
    require(
        resume is not True or checkpoints,
        f"resume is true, but {path / 'checkpoints'} has no checkpoint; set resume to auto to begin"
        " a new run where there is none, or to false",
    )


def planned_steps(run: Path) -> int | None:
    """The `steps` of the recipe.yaml of the run folder, if it can be read and has some."""
    with contextlib.suppress(ValueError):
        steps = read_tree(run / RECIPE).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def check_time_to_save(checkpoint: CheckpointConfig) -> None:
    """Raise `ValueError` if torchrun kills its ranks sooner after a signal than they need to
    save.
    """
    waits_s = launcher.number(signals.SHUTDOWN, signals.SHUTDOWN_S)
    needs_s = math.ceil(checkpoint.save_within_s) + 5  # until the ranks have ended
    require(
        "TORCHELASTIC_RUN_ID" not in os.environ or waits_s >= needs_s,
        f"training.checkpoint.save_within_s is {checkpoint.save_within_s:g}, but torchrun kills its"
        f" ranks {waits_s} s after a signal; give it --shutdown-timeout {needs_s}",
    )
