"""Threads that a recipe leaves open divide the machine's cores among what computes at one time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.settings.config import RunConfig, SftConfig, read
from megarl.system import host_memory, process_env
from megarl.trainer import threads

LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "recipes"
OPEN = (
    *("--rollout.engine.num_threads", "0", "--training.num_threads", "0"),
    *("--algorithm.correction.kind", "tis"),
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16 cores, no limit, no OMP_NUM_THREADS."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(threads, "GIVEN", "")
    monkeypatch.setattr(host_memory, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)


def chosen(*overrides: str) -> tuple[int, int]:
    """Threads of (trainer rank, engine rank) of a recipe with `overrides`."""
    config = read(RunConfig, LAUNCH / "grpo.yaml", (*OPEN, *overrides))
    return threads.trainer_threads(config), threads.engine_threads(config)


def test_trainer_and_engines_take_turns_or_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == (16, 16)
    assert chosen("--rollout.max_staleness", "1") == (8, 8)
    assert chosen("--rollout.num_engines", "3") == (16, 5)
    assert chosen("--rollout.num_engines", "64") == (16, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")  # two hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert chosen("--rollout.num_engines", "4") == (4, 8)
    assert chosen("--rollout.num_engines", "4", "--rollout.max_staleness", "1") == (2, 4)
    config = read(RunConfig, LAUNCH / "grpo.yaml", (*OPEN, "--rollout.max_staleness", "1"))
    assert threads.engine_threads(config, trains=False) == 16, "as in `megarl eval`"
    sft = read(SftConfig, LAUNCH / "quickstart_sft.yaml", ("--training.num_threads", "0"))
    assert threads.process_threads(sft) == 4


def test_what_is_set_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("--training.num_threads", "3") == (3, 16)
    monkeypatch.setattr(threads, "GIVEN", "2")
    assert chosen() == (2, 2)
    assert chosen("--rollout.engine.num_threads", "5") == (2, 5)
    monkeypatch.setattr(threads, "GIVEN", "2,1")  # by level of nesting: torch reads it itself
    assert chosen() == (16, 16)


JOB = {"cgroup": "0::/slurm/job/step\n", "slurm/job/step/cpu.max": "max 100000"}
FIRST = {
    "cgroup": "4:cpu,cpuacct:/job\n3:memory:/\n",
    "cpu/job/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": ""}, 16),
        (JOB | {"slurm/job/cpu.max": "300000 100000"}, 3),
        (FIRST | {"cpu/job/cpu.cfs_quota_us": "-1"}, 16),
        (FIRST | {"cpu/job/cpu.cfs_quota_us": "500000"}, 5),
    ],
)
def test_a_container_or_job_may_use_fewer_cores(
    files: dict[str, str], wanted: int, tmp_path: Path
) -> None:
    """The tightest limit counts, of this process's group and of all above; in both versions of
    control groups.
    """
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert chosen() == (wanted, wanted)


def test_a_number_of_the_recipe_is_the_one_that_libraries_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "OMP_NUM_THREADS": "1"})
    trains = read(RunConfig, LAUNCH / "grpo.yaml", ("--training.num_threads", "8"))
    process_env.prepare_environment(threads.process_threads(trains))
    assert os.environ["OMP_NUM_THREADS"] == "8"
