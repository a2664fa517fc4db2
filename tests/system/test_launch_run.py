"""`megarl run --cpu`: Ray, engines and ranks of a recipe run to their end on one node, and
nothing is left of them, also after a signal.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import doors
import psutil
import pytest
import yaml
from support.commands import command, finish, megarl, records, start, tiny_run, write_recipe
from support.fork_server import UNFORKED, fork_of
from support.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    write_model(folder / "model")
    return folder


def recipe(place: Path, name: str, **changes: object) -> str:
    tree = tiny_run(place, place / "model", 2) | {"folder": str(place / name)} | changes
    return write_recipe(place / f"{name}.yaml", tree)


def states(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"megarl-{pid}-*"))


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_recipe_runs_to_its_end(place: Path, placement: str) -> None:
    """A colocated engine shares with the policy alone: reference and critic have ranks of their
    own. The other run has two sources of prompts, each with its own verifier.
    """
    apart: dict[str, object] = {
        "algorithm": {"preset": "ppo", "kl": {"coefficient": 0.05, "where": "reward"}},
        "reference": {"ranks": [2]},
        "critic": {"ranks": [1], "zero_stage": 1},
    }
    one = {"source": str(place / "prompts.jsonl"), "weight": 0.5}
    mixed: dict[str, object] = {
        "prompts": {
            "sources": [{**one, "environment": "scored"}, {**one, "environment": "sums"}],
            "max_prompt_tokens": 8,
        },
        "environment": {
            "require_stop": False,
            "mixture": {
                "scored": {"verifier": f"{place}/reward.py:score"},
                "sums": {"verifier": "exact_match"},
            },
        },
        "evaluation": {},
    }
    ranks, changes = ("1", mixed) if placement == "disaggregated" else ("3", apart)
    options = ("--cpu", "--ranks", ranks, "--rollout.placement", placement)
    options += ("--rollout.dynamic_sampling.enabled", "false")  # every prompt is trained on
    process, mark = start(command("run", recipe(place, placement, **changes), *options))
    launcher = fork_of(process.pid)
    done = finish(process, mark, timeout_s=400)
    assert done.code == 0, (done.out[-2000:], done.err[-4000:])
    assert done.survivors == []
    shown = done.err[done.err.index("# memory") :]
    plan = yaml.safe_load(shown[: shown.index("\ncommands")])["placement"]
    ranks_of = {name: row.get("ranks") for name, row in plan.items()}
    others = {"reference": "2", "critic": "1"} if placement == "colocated" else {}
    assert ranks_of == {"policy": "0", **others, "engine 0": None}
    assert [row["gpus"] for row in plan.values()] == [{0: "CPU"}] * len(plan)
    steps = records(place / placement / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    if placement == "disaggregated":
        for row in steps:
            assert row["source/scored/responses"] == row["source/sums/responses"] == 8
            assert row["source/scored/reward/mean"] > row["source/sums/reward/mean"] == 0.0
    assert states(launcher) == []


@pytest.mark.nightly
def test_another_user_finds_all_closed_and_a_signal_ends_everything(place: Path) -> None:
    """The second look, at a private folder that was opened, shows that the first one can fail."""
    path = recipe(place, "endless", steps=10**6)
    lasts = ("--training.max_empty_steps", "1000000")  # although all answers become alike
    words = command("run", path, "--cpu", "--ranks", "1", *lasts)
    # Not forked: at its import, Ray reads whether it listens on loopback only.
    process, mark = start(words, **UNFORKED)
    try:
        metrics = place / "endless" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, finish(process, mark, 10).err[-4000:]
            time.sleep(0.5)
        if os.geteuid() == 0:  # who can become another user
            own, files = psutil.Process(process.pid), Path("/dev/shm").iterdir()
            of_others = {str(one) for one in files if "megarl-" not in one.name}
            found = [own, *own.children(recursive=True)], place / "endless", of_others
            assert doors.look(*found, set()) == []
            (private,) = states(process.pid)
            private.chmod(0o777)
            assert f"makes and removes in {private}" in doors.look(*found, set())
    finally:
        process.send_signal(signal.SIGTERM)
        done = finish(process, mark, timeout_s=90)
    assert done.code == 143, done.err[-4000:]
    assert done.survivors == []
    assert states(process.pid) == []


def test_a_mistake_that_a_rank_finds_is_the_exit_code(place: Path) -> None:
    """A folder that holds a run is refused by the ranks, not by the launcher."""
    path = recipe(place, "twice")
    (place / "twice").mkdir()
    (place / "twice" / "metrics.jsonl").write_text("{}\n")
    done = megarl("run", path, "--cpu", "--ranks", "1", timeout_s=300)
    assert done.code == 2, done.err[-4000:]
    assert "already holds a run" in done.err
