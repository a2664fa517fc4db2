"""What `bash tests/run_gpu.sh` does on one GPU, as data: steps in the order of what they tell for
their minutes, and which of them still fit. Pure: starts nothing.

To add a step, add a line to `STEPS`. Words of a command may have {python}, {out} (an empty folder
of the step) and {device} (cuda, or cpu in a rehearsal). The expected seconds are guesses until a
GPU has run the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Command = tuple[str, ...]

PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """One thing to find out, by one command with a time limit."""

    name: str
    tells: str
    """What is known after it, in a few words."""
    command: Command
    expected_s: float
    """A guess of its seconds on one GPU; a step that does not fit is left out."""
    limit_s: float
    """Seconds after which it is ended."""
    reads: Literal["tests", "json", "exit"] = "exit"
    """What is read of it beside the exit code: counts of pytest, the JSON object on standard
    output, or nothing."""
    rehearsal: Command = ()
    """The command on a CPU; empty where there is none."""
    no_rehearsal: str = ""
    """Why there is none."""


STEPS = (
    Step(
        "environment",
        "driver, CUDA, packages and free memory are enough",
        ("{python}", "-m", "megarl", "doctor", "--json"),
        expected_s=40,
        limit_s=90,
        reads="json",
        rehearsal=("{python}", "-m", "megarl", "doctor", "--json"),
    ),
    Step(
        "kernels in bfloat16",
        "Triton attention against float64: widths 64 to 256, GQA 1, 5 and 8, one 20K document",
        (*PYTEST, "tests/unit/test_attention_sizes.py", "-m", "gpu"),
        expected_s=120,
        limit_s=300,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_attention_sizes.py", "-m", "not gpu"),
    ),
    Step(
        "kernels in every case",
        "Triton attention and log-probs: layouts, odd widths, float32 to bfloat16, equal bits",
        (*PYTEST, "tests/unit/test_triton.py", "-m", "gpu"),
        expected_s=180,
        limit_s=420,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_triton.py", "-k", "in_the_interpreter"),
    ),
)


def fits(pending: Iterable[Step], left_s: float) -> Step | None:
    """The first step that is expected to end in the seconds that are left; None if none is."""
    return next((step for step in pending if step.expected_s <= left_s), None)


def plan(steps: Sequence[Step], minutes: float) -> tuple[list[Step], list[Step]]:
    """(steps that fit in so many minutes if each takes what is expected, in order; those that do
    not)."""
    pending, chosen, left_s = list(steps), [], 60.0 * minutes
    while (step := fits(pending, left_s)) is not None:
        pending.remove(step)
        chosen.append(step)
        left_s -= step.expected_s
    return chosen, pending


def words(command: Command, **values: str) -> list[str]:
    """A command with its {names} replaced; other braces stay."""
    found = list(command)
    for name, value in values.items():
        found = [word.replace(f"{{{name}}}", value) for word in found]
    return found
