"""`sbatch launch/dapo_14b.sh` on a real Slurm cluster of two nodes: Ray and a rank on both, an engine on the
second. A job is cancelled; the next one is preempted, loses a node, and then trains to its end.

Set MEGARL_SLURM_QUICKSTART to the folder of a finished quick start (runs/quickstart) to train its second stage
on the two nodes too, preempted half-way; that takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import megarl, records, tiny_run, write_recipe
from support.slurm import Cluster, missing
from support.tiny import write_model

from megarl.system.trace_files import read_traces

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]
LAST = 10**6
"""Steps of a run that something else ends."""
ROOT = Path(__file__).resolve().parents[2]
STARTED_WITHIN_S = 300.0
ENDED_WITHIN_S = 150.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster.start(tmp_path_factory.mktemp("slurm"), 2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    model = write_model(folder / "model")
    tree: dict[str, Any] = tiny_run(folder, model, LAST)
    tree["resume"] = "auto"
    tree["evaluation"] = {}
    tree["rollout"] |= {"num_engines": 1, "dynamic_sampling": {"enabled": False}}
    tree["training"] |= {"layout": {"data": 2}, "checkpoint": {"every": 1000, "keep": 3}}
    tree["weight_sync"] = {"transport": "point_to_point"}
    write_recipe(folder / "recipe.yaml", tree)
    return folder


def submit(cluster: Cluster, place: Path, name: str, *overrides: str) -> int:
    """Submit the launch script as a user does, for two nodes; returns the job's number."""
    words = ["sbatch", "--parsable", "--nodes=2", f"--output={place}/{name}.log"]
    words += ["launch/dapo_14b.sh", "--recipe", str(place / "recipe.yaml"), "--cpu", "--requeue"]
    return int(cluster.run(*words, "--", *overrides))


def wait_for(
    condition: Callable[[], bool], what: str, log: Path, timeout_s: float = STARTED_WITHIN_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        said = log.read_text()[-5000:] if log.exists() else "nothing"
        assert time.monotonic() < deadline, (
            f"no {what} within {timeout_s:g} s; the job said:\n{said}"
        )
        time.sleep(0.5)


def steps(place: Path) -> list[int]:
    path = place / "run" / "metrics.jsonl"
    return [row["step"] for row in records(path)] if path.exists() else []


def saved(place: Path) -> int:
    """Steps of the newest checkpoint."""
    found = sorted((place / "run" / "checkpoints").glob("step_*"))
    return int(found[-1].name.removeprefix("step_")) if found else 0


def wait_for_steps(cluster: Cluster, place: Path, log: Path, job: int, more: int) -> None:
    """Wait until the job has trained `more` steps beyond those of the newest checkpoint."""
    before = saved(place)

    def trained() -> bool:
        assert cluster.job(job)["JobState"] not in OVER, log.read_text()[-5000:]
        return (steps(place) or [0])[-1] >= before + more and saved(place) == before

    wait_for(trained, f"{more} steps", log)


def preempt(cluster: Cluster, place: Path, log: Path, job: int) -> int:
    """Submit an urgent job, whose number is returned, and wait until `job` is requeued."""
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    other = int(cluster.run(*urgent, f"--output={place}/urgent.log", "--wrap=hostname"))
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "requeue", log, ENDED_WITHIN_S)
    return other


def nothing_is_left(cluster: Cluster, log: Path, *nodes: str) -> None:
    def found() -> list[str]:
        return [line for node in nodes for line in cluster.processes(node)]

    wait_for(lambda: found() == [], f"end of all processes of {nodes}", log, ENDED_WITHIN_S)


def test_a_cancelled_job_saves_a_checkpoint(cluster: Cluster, place: Path) -> None:
    """`scancel` sends SIGTERM to every process of the job: ranks, launcher, Ray and engines."""
    log = place / "cancelled.log"
    job = submit(cluster, place, "cancelled")
    wait_for_steps(cluster, place, log, job, 2)
    cluster.run("scancel", str(job))
    wait_for(lambda: cluster.job(job)["JobState"] == "CANCELLED", "end", log, ENDED_WITHIN_S)
    nothing_is_left(cluster, log, "node0", "node1")
    assert saved(place) == steps(place)[-1] >= 2, log.read_text()[-5000:]
    assert "the checkpoint of step" in log.read_text()


def test_a_job_survives_preemption_and_a_dead_node(cluster: Cluster, place: Path) -> None:
    log = place / "job.log"
    before = saved(place)
    job = submit(cluster, place, "job")
    wait_for_steps(cluster, place, log, job, 2)
    assert engine_hosts(place) == ["node1"], "rank 0 is on node0"

    # Preempted: Slurm's --signal=B:TERM goes to the launcher, which has GraceTime to end. A job that
    # ends by itself then is not requeued by Slurm.
    other = preempt(cluster, place, log, job)
    wait_for(lambda: cluster.job(other)["JobState"] == "COMPLETED", "urgent job", log)
    assert saved(place) == steps(place)[-1] >= before + 2, log.read_text()[-5000:]
    assert "SIGTERM: the run saves a checkpoint" in log.read_text()

    # It goes on from there, and a node dies without a word, of which Slurm learns minutes later.
    wait_for_steps(cluster, place, log, job, 1)
    kept = saved(place)
    cluster.kill_node("node1")
    wait_for(lambda: cluster.job(job)["Restarts"] == "2", "requeue", log, ENDED_WITHIN_S)
    assert "node1 did not end in time" in log.read_text()
    assert "Ray's logs are in" in log.read_text()
    assert list((place / "run" / "logs" / f"{job}-1" / "ray").glob("raylet*"))
    assert saved(place) == kept
    last = kept + 3
    recipe = place / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"steps: {LAST}", f"steps: {last}"))
    cluster.start_node("node1")

    wait_for(lambda: cluster.job(job)["JobState"] in OVER, "end", log)
    assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()[-5000:]
    assert cluster.job(job)["ExitCode"] == "0:0"
    nothing_is_left(cluster, log, "node0", "node1")
    assert steps(place) == list(range(1, last + 1)) and saved(place) == last
    assert json.loads(log.read_text().splitlines()[-1])["steps"] == last
    audit = megarl("ledger", str(place / "run"), "--json")
    assert audit.code == 0 and json.loads(audit.out)["restores"] == 2 + (before > 0), (
        audit.out,
        audit.err,
    )
    logs = {path.name for path in (place / "run" / "logs" / f"{job}-2").iterdir()}
    assert logs == {"node0-ray.log", "node1-ray.log", "node1-ranks.log"}


@pytest.mark.skipif(
    "MEGARL_SLURM_QUICKSTART" not in os.environ, reason="takes minutes; see the top"
)
def test_the_quick_start_learns_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The quick start's second stage, with a rank on each node and a preemption half-way."""
    made = Path(os.environ["MEGARL_SLURM_QUICKSTART"]).resolve()
    tree = yaml.safe_load((ROOT / "launch" / "recipes" / "quickstart.yaml").read_text())
    tree |= {"folder": str(tmp_path / "run"), "resume": "auto"}
    tree["model"]["path"] = str(made / "sft" / "checkpoints" / "step_000800" / "model")
    tree["prompts"]["source"] = str(made / "data" / "train.jsonl")
    tree["evaluation"]["prompts"]["source"] = str(made / "data" / "held_out.jsonl")
    tree["training"]["layout"] = {"data": 2}
    tree["weight_sync"] = {"transport": "point_to_point"}
    write_recipe(tmp_path / "recipe.yaml", tree)
    log = tmp_path / "job.log"
    job = submit(cluster, tmp_path, "job")
    wait_for_steps(cluster, tmp_path, log, job, tree["steps"] // 2)
    preempt(cluster, tmp_path, log, job)
    wait_for(lambda: cluster.job(job)["JobState"] in OVER, "end", log, timeout_s=900)
    assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()[-5000:]
    nothing_is_left(cluster, log, "node0", "node1")
    found = records(tmp_path / "run" / "evaluations.jsonl")
    accuracy = [one["eval/accuracy"] for one in found if "eval/accuracy" in one]
    print(f"greedy accuracy {accuracy[0]} before, {accuracy[-1]} after; {log.read_text()[-600:]}")
    assert accuracy[0] < 0.5 and accuracy[-1] > 0.95
    assert steps(tmp_path) == list(range(1, tree["steps"] + 1))
    assert megarl("ledger", str(tmp_path / "run")).code == 0


def engine_hosts(place: Path) -> list[str]:
    """The hosts on which the engines of the run have been, from their activity records."""
    traces = read_traces(place / "run" / "activity")
    return [trace.host for trace in traces if re.fullmatch(r"engine\d", trace.name)]


def test_slurm_tells_the_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.apps.launch import slurm

    monkeypatch.setattr(slurm, "_scontrol", partial(cluster.run, "scontrol"))
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu[08-10],login"}
    assert slurm.allocated_hosts(job, "own") == ["gpu08", "gpu09", "gpu10", "login"]
