"""The steps that need GPUs, of gpu_steps.toml (one GPU) and cluster_steps.toml (several), and which
of those on one GPU still fit. Pure: starts nothing.
"""

from __future__ import annotations

import importlib.util
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Command = tuple[str, ...]
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """One thing to find out, by one command with a time limit; gpu_steps.toml says what is what."""

    name: str
    tells: str
    command: Command
    expected_s: float
    limit_s: float
    needs: tuple[str, ...] = ()
    path: str = ""
    gpus: int = 1
    reads: Literal["tests", "json", "exit"] = "exit"
    rehearsal: Command = ()
    no_rehearsal: str = ""


@dataclass(frozen=True)
class ClusterStep:
    """One command for several GPUs; cluster_steps.toml says what is what."""

    name: str
    where: str
    command: str
    shows: str
    look: str
    healthy: str
    dry_run: str = ""


def load(name: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def steps_of(file: dict[str, Any]) -> Iterator[Step]:
    """The steps of gpu_steps.toml, as it was read. {pytest}, {bench} and names of groups of
    packages are replaced by what they stand for.
    """
    for step in file["step"]:
        for name in ("command", "rehearsal"):
            text = step.get(name, "").replace("{pytest}", " ".join(PYTEST))
            step[name] = tuple(shlex.split(text.replace("{bench}", "{python} tools/bench")))
        packages = (file["packages"].get(name, [name]) for name in step["needs"])
        yield Step(**step | {"needs": tuple(one for some in packages for one in some)})


FILE = load("gpu_steps.toml")
EVERY = FILE["packages"]["every"]
"""Packages without which nothing of megarl is imported."""
STEPS = tuple(steps_of(FILE))
CLUSTER = tuple(ClusterStep(**step) for step in load("cluster_steps.toml")["step"])


def listed(steps: Iterable[ClusterStep]) -> Iterator[str]:
    """Lines of text: each command with what it shows, what to look at, and what is healthy."""
    for number, step in enumerate(steps, 1):
        yield f"{number}. {step.name} ({step.where})"
        yield f"   {step.command}"
        yield f"   shows    {step.shows}"
        yield f"   look at  {step.look}"
        yield f"   healthy  {step.healthy}"
        if step.dry_run and step.dry_run != step.command:
            yield f"   planned  {step.dry_run}"
        yield ""


def missing(step: Step) -> list[str]:
    """Packages that a step needs and this Python does not have."""
    return [name for name in step.needs if importlib.util.find_spec(name) is None]


def lacking(step: Step, num_gpus: int) -> str:
    """Why a step cannot run here: a missing package, file or GPU. "" if it can."""
    if absent := missing(step):
        return f"not installed here: {', '.join(absent)}"
    if step.path and not Path(step.path).expanduser().exists():
        return f"there is no {step.path}"
    return f"needs {step.gpus} GPUs; here: {num_gpus}" if step.gpus > num_gpus else ""


def fits(pending: Iterable[Step], left_s: float) -> Step | None:
    """The first step that is expected to end in the seconds that are left; None if none is."""
    return next((step for step in pending if step.expected_s <= left_s), None)


def plan(steps: Sequence[Step], minutes: float) -> tuple[list[Step], list[Step]]:
    """(steps that fit in `minutes`, in the order in which they run; the others), by their expected
    seconds.
    """
    pending, chosen, left_s = list(steps), [], 60.0 * minutes
    while (step := fits(pending, left_s)) is not None:
        pending.remove(step)
        chosen.append(step)
        left_s -= step.expected_s
    return chosen, pending


def planned(steps: Sequence[Step], minutes: float, num_gpus: int) -> Iterator[str]:
    """The plan as lines of text: for each step its expected seconds, what it tells and, in
    brackets, why it will not run; then the sum of seconds.
    """
    absent = {step.name: lacking(step, num_gpus) for step in steps}
    chosen, left = plan([step for step in steps if not absent[step.name]], minutes)
    absent |= {step.name: f"does not fit in {minutes:g} minutes" for step in left}
    for step in steps:
        note = f"  [{absent[step.name]}]" if absent[step.name] else ""
        yield f"{step.expected_s:5.0f} s  {step.name}: {step.tells}{note}"
    total_s = sum(step.expected_s for step in chosen)
    yield f"{total_s:5.0f} s  expected for {len(chosen)} steps, of {60 * minutes:.0f} s"


def words(command: Command, python: str, out: str = "") -> list[str]:
    """A command with {python} and {out} replaced; other braces stay."""
    return [word.replace("{python}", python).replace("{out}", out) for word in command]
