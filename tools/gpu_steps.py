"""What `bash tests/run_gpu.sh` does on one GPU, as data: steps in the order of what they tell for
their minutes, and which of them still fit. Pure: starts nothing.

To add a step, add a line to `STEPS`, with the packages without which the step cannot run. Words of
a command may have {python}, {out} (an empty folder of the step) and {device} (cuda, or cpu in a
rehearsal). The expected seconds are guesses until a GPU has run the step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Command = tuple[str, ...]

PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")

ZERO_TESTS = (
    "tests/distributed/test_zero_stages.py",
    "tests/distributed/test_gradient_sums.py",
)
KERNEL_TESTS = (
    "tests/unit/test_block_flash.py",
    "tests/unit/test_digests.py",
    "tests/unit/test_divergence.py",
    "tests/unit/test_logprobs.py",
    "tests/unit/test_random_states.py",
)
"""Test files that share a step."""

EVERY = ("torch", "numpy", "psutil")
"""Packages without which nothing of megarl is imported."""
TESTS = (*EVERY, "pytest", "hypothesis", "triton")
TRAINING = (*EVERY, "transformers", "safetensors", "deepspeed")
ALL = (*TRAINING, "vllm", "ray")


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
    needs: tuple[str, ...] = ()
    """Packages without which the step is skipped."""
    reads: Literal["tests", "json", "exit"] = "exit"
    """What is read of it beside the exit code: counts of pytest, the JSON object on standard
    output (all of it, or its last line), or nothing."""
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
        needs=ALL,
        reads="json",
        rehearsal=("{python}", "-m", "megarl", "doctor", "--json"),
    ),
    Step(
        "attention of whole rows",
        "torch's and flash-attn's kernels of variable length against float64; float32's memory",
        (*PYTEST, "tests/unit/test_kernels.py", "-m", "gpu"),
        expected_s=30,
        limit_s=120,
        needs=TESTS,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_kernels.py", "-m", "not gpu"),
    ),
    Step(
        "kernels in bfloat16",
        "Triton attention against float64: widths 64 to 256, GQA 1, 5 and 8, one 20K document",
        (*PYTEST, "tests/unit/test_attention_sizes.py", "-m", "gpu"),
        expected_s=120,
        limit_s=300,
        needs=TESTS,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_attention_sizes.py", "-m", "not gpu"),
    ),
    Step(
        "bench: attention",
        "TFLOP/s of the Triton block beside flash and cuDNN; a ring's steps in turn",
        ("{python}", "tools/bench/attention.py", "--device", "cuda", "--json"),
        expected_s=90,
        limit_s=300,
        needs=(*EVERY, "triton"),
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
        needs=(*EVERY, "triton"),
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/logprobs.py", "--json", "--rounds", "1"),
            *("--tokens", "256", "--vocabulary", "4000", "--hidden", "64"),
        ),
    ),
    Step(
        "elementwise kernels",
        "rotary embeddings and gated activations equal float64 and the models' own",
        (*PYTEST, "tests/unit/test_elementwise.py", "-m", "gpu"),
        expected_s=25,
        limit_s=180,
        needs=(*TESTS, "transformers"),
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_elementwise.py", "-m", "not gpu"),
    ),
    Step(
        "bench: elementwise kernels",
        "RMSNorm, rotary embedding and SwiGLU, one kernel each against the models' code",
        ("{python}", "tools/bench/elementwise.py", "--device", "cuda", "--json"),
        expected_s=20,
        limit_s=120,
        needs=(*EVERY, "triton", "transformers"),
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/elementwise.py", "--json", "--rounds", "1"),
            *("--tokens", "256", "--hidden", "64", "--heads", "4", "--width", "128"),
        ),
    ),
    Step(
        "an engine",
        "vLLM on the GPU computes what the trainer does, after each of five versions",
        (*PYTEST, "tests/system/test_engine.py", "-m", "gpu"),
        expected_s=90,
        limit_s=300,
        needs=(*ALL, "pytest"),
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_engine.py", "-k", "five and untied"),
    ),
    Step(
        "ZeRO stages",
        "30 steps under ZeRO 1, 2, 3 and 3 with offload agree; float32 trains what the CPU trains;"
        " offload moves gradients once a step",
        (*PYTEST, *ZERO_TESTS, "-m", "gpu"),
        expected_s=150,
        limit_s=480,
        needs=(*TRAINING, "pytest"),
        reads="tests",
        rehearsal=(*PYTEST, *ZERO_TESTS, "-m", "not gpu"),
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
        expected_s=90,
        limit_s=300,
        needs=TRAINING,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/layouts.py", "--ranks", "1", "--zero", "0,3", "--json"),
            *("--steps", "2", "--tokens", "256", "--hidden", "64", "--layers", "2"),
            *("--vocabulary", "32", "--documents", "4"),
        ),
    ),
    Step(
        "memory of GPUs",
        "cuda_ipc, and shared_memory registered with CUDA, between two processes: all versions"
        " arrive, none is overwritten while read",
        (*PYTEST, "tests/distributed/test_carriers.py", "-m", "gpu"),
        expected_s=30,
        limit_s=180,
        needs=(*EVERY, "pytest", "transformers", "safetensors"),
        reads="tests",
        no_rehearsal="bash tests/run.sh runs the same with the other transports",
    ),
    Step(
        "taking turns",
        "colocated runs: cuda_ipc, shared_memory and disk, under ZeRO 0 to 3 and offload",
        (*PYTEST, "tests/system/test_shared_gpu.py", "-m", "gpu", "-k", "taking_turns"),
        expected_s=300,
        limit_s=600,
        needs=(*ALL, "pytest"),
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_shared_gpu.py", "-m", "not gpu", "-k", "turns"),
    ),
    Step(
        "bench: publishing",
        "seconds until a colocated reader has 7.6 B parameters: cuda_ipc, shared_memory; bar 1.5 s",
        (
            *("{python}", "tools/bench/publish.py", "--device", "cuda", "--shape", "7b"),
            *("--rounds", "3", "--deadline", "200", "--json"),
        ),
        expected_s=35,
        limit_s=240,
        needs=ALL,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/publish.py", "--shape", "tiny", "--rounds", "1"),
            *("--layout", "data 1 tensor 1 zero 0", "--json"),
        ),
    ),
    Step(
        "quick start",
        "a policy learns on the GPU: 500 problems before and after",
        ("bash", "launch/quickstart.sh"),
        expected_s=240,
        limit_s=600,
        needs=ALL,
        reads="json",
        no_rehearsal="it is the same command on a CPU: bash launch/quickstart.sh, six minutes",
    ),
    Step(
        "bench: training, checkpointed",
        "tokens/s and memory of the same model with 32K tokens, activations recomputed",
        (
            *("{python}", "tools/bench/layouts.py", "--ranks", "1", "--zero", "1", "--json"),
            *("--dtype", "bfloat16", "--hidden", "2048", "--layers", "16", "--heads", "16"),
            *("--kv-heads", "8", "--vocabulary", "151936", "--tokens", "32768"),
            *("--documents", "4", "--micro-batch-tokens", "32768", "--gradient-checkpointing"),
        ),
        expected_s=60,
        limit_s=240,
        needs=TRAINING,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/layouts.py", "--ranks", "1", "--zero", "1", "--json"),
            *("--dtype", "bfloat16", "--steps", "2", "--tokens", "256", "--hidden", "64"),
            *("--layers", "2", "--vocabulary", "32", "--documents", "4"),
            "--gradient-checkpointing",
        ),
    ),
    Step(
        "all other kernel tests",
        "flash block, divergences, digests, random states, log-prob backends",
        (*PYTEST, *KERNEL_TESTS, "-m", "gpu"),
        expected_s=90,
        limit_s=300,
        needs=TESTS,
        reads="tests",
        no_rehearsal="each has a twin on the CPU, which bash tests/run.sh runs",
    ),
    Step(
        "a killed engine",
        "a colocated engine dies while it receives weights, and another takes its place",
        (*PYTEST, "tests/system/test_shared_gpu.py", "-m", "gpu", "-k", "dies"),
        expected_s=90,
        limit_s=420,
        needs=(*ALL, "pytest"),
        reads="tests",
        rehearsal=(*PYTEST, "tests/system/test_shared_gpu.py", "-m", "not gpu", "-k", "dies"),
    ),
    Step(
        "bench: shared prefixes",
        "a step with every prompt computed once against one that repeats it, 0.5 B parameters",
        (
            *("{python}", "tools/bench/prefix.py", "--device", "cuda", "--size", "0.5b", "--json"),
            *("--cases", "2048:8x512,512:8x1024", "--groups", "4", "--tokens", "16384"),
        ),
        expected_s=60,
        limit_s=240,
        needs=TRAINING,
        reads="json",
        rehearsal=(
            *("{python}", "tools/bench/prefix.py", "--json", "--rounds", "1", "--steps", "1"),
            *("--cases", "64:4x16", "--groups", "2"),
        ),
    ),
    Step(
        "kernels in every case",
        "Triton attention and log-probs: layouts, odd widths, float32 to bfloat16, equal bits",
        (*PYTEST, "tests/unit/test_triton.py", "-m", "gpu"),
        expected_s=145,
        limit_s=420,
        needs=TESTS,
        reads="tests",
        rehearsal=(*PYTEST, "tests/unit/test_triton.py", "-k", "in_the_interpreter"),
    ),
)


def missing(step: Step) -> list[str]:
    """Packages that a step needs and this Python does not have."""
    return [name for name in step.needs if importlib.util.find_spec(name) is None]


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
