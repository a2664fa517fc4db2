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

WHOLE = ("deepspeed", "ray", "tyro", "vllm")
"""Packages that a step with engines, ranks or megarl's command line needs beside those of kernels,
which are torch, triton, numpy, pytest, hypothesis, psutil and xxhash."""

PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")

TESTED = (
    "tests/unit/test_attention_sizes.py",
    "tests/unit/test_kernels.py",
    "tests/unit/test_triton.py",
    "tests/distributed/test_zero_stages.py",
    "tests/system/test_engine.py",
    "tests/system/test_shared_gpu.py",
)
"""Test files with steps of their own."""

OTHER_KERNELS = (
    "tests/unit/test_block_cuda.py",
    "tests/unit/test_divergence.py",
    "tests/unit/test_digests.py",
    "tests/unit/test_logprobs.py",
)
"""Test files of one step, which need the packages of kernels only."""


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
    needs: tuple[str, ...] = ()
    """Packages without which the step cannot run, as `WHOLE`."""


STEPS = (
    Step(
        "environment",
        "driver, CUDA, packages and free memory are enough",
        ("{python}", "-m", "megarl", "doctor", "--json"),
        expected_s=40,
        limit_s=90,
        reads="json",
        rehearsal=("{python}", "-m", "megarl", "doctor", "--json"),
        needs=WHOLE,
    ),
    Step(
        "attention of whole rows",
        "torch's and flash-attn's kernels of variable length against float64; float32's memory",
        (*PYTEST, "tests/unit/test_kernels.py", "-m", "gpu"),
        expected_s=30,
        limit_s=120,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_kernels.py", "-m", "not gpu"),
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
        "bench: attention",
        "TFLOP/s of the Triton block beside flash and cuDNN; a ring's steps in turn",
        ("{python}", "tools/bench/attention.py", "--device", "cuda", "--json"),
        expected_s=90,
        limit_s=300,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/attention.py", "--json", "--rounds", "1"),
            *("--tokens", "512", "--documents", "4", "--packed", "8"),
        ),
    ),
    Step(
        "bench: log-probs",
        "time and memory of the log-prob head, 32K x 152K x 4096",
        ("{python}", "tools/bench/logprobs.py", "--device", "cuda", "--json"),
        expected_s=90,
        limit_s=300,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/logprobs.py", "--json", "--rounds", "1"),
            *("--tokens", "256", "--vocabulary", "4000", "--hidden", "64"),
        ),
    ),
    Step(
        "an engine",
        "vLLM on the GPU computes what the trainer does, after each of five versions",
        (*PYTEST, "tests/system/test_engine.py", "-m", "gpu"),
        expected_s=90,
        limit_s=300,
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_engine.py", "-k", "five and untied"),
        needs=WHOLE,
    ),
    Step(
        "ZeRO stages",
        "30 steps under ZeRO 1, 2, 3 and 3 with offload agree; float32 trains what the CPU trains",
        (*PYTEST, "tests/distributed/test_zero_stages.py", "-m", "gpu"),
        expected_s=120,
        limit_s=420,
        reads="tests",
        rehearsal=(*PYTEST, "tests/distributed/test_zero_stages.py", "-m", "not gpu"),
        needs=WHOLE,
    ),
    Step(
        "taking turns",
        "colocated runs: cuda_ipc, shared_memory and disk, under ZeRO 0 to 3 and offload",
        (*PYTEST, "tests/system/test_shared_gpu.py", "-m", "gpu", "-k", "taking_turns"),
        expected_s=300,
        limit_s=600,
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_shared_gpu.py", "-m", "not gpu", "-k", "turns"),
        needs=WHOLE,
    ),
    Step(
        "quick start",
        "a policy learns on the GPU: 500 problems before and after",
        ("bash", "launch/quickstart.sh"),
        expected_s=240,
        limit_s=600,
        reads="json",
        no_rehearsal="it is the same command on a CPU: bash launch/quickstart.sh, six minutes",
        needs=WHOLE,
    ),
    Step(
        "a killed engine",
        "a colocated engine dies while it receives weights, and another takes its place",
        (*PYTEST, "tests/system/test_shared_gpu.py", "-m", "gpu", "-k", "dies"),
        expected_s=90,
        limit_s=420,
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_shared_gpu.py", "-m", "not gpu", "-k", "dies"),
        needs=WHOLE,
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
    Step(
        "other kernels",
        "flash and cuDNN blocks, divergences, digests, log-prob backends",
        (*PYTEST, *OTHER_KERNELS, "-m", "gpu"),
        expected_s=90,
        limit_s=300,
        reads="tests",
        no_rehearsal="each has a twin on the CPU, which bash tests/run.sh runs",
    ),
    Step(
        "bench: training",
        "tokens/s and memory of a model of 1 B parameters under ZeRO 1, 2 and 3",
        (
            *("{python}", "tools/bench/layouts.py", "--ranks", "1", "--zero", "1,2,3", "--json"),
            *("--dtype", "bfloat16", "--hidden", "2048", "--layers", "16", "--heads", "16"),
            *("--kv-heads", "8", "--vocabulary", "151936", "--tokens", "16384"),
            *("--documents", "8", "--micro-batch-tokens", "8192"),
        ),
        expected_s=120,
        limit_s=300,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/layouts.py", "--ranks", "1", "--zero", "0,3", "--json"),
            *("--steps", "2", "--tokens", "256", "--hidden", "64", "--layers", "2"),
            *("--vocabulary", "32", "--documents", "4"),
        ),
        needs=WHOLE,
    ),
    Step(
        "all other GPU tests",
        "norms, random states, carriers",
        (*PYTEST, "tests", "-m", "gpu", *(f"--ignore={name}" for name in TESTED + OTHER_KERNELS)),
        expected_s=90,
        limit_s=420,
        reads="tests",
        no_rehearsal="each has a twin on the CPU, which bash tests/run.sh runs",
        needs=WHOLE,
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
