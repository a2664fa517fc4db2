"""The plan of processes of a launch, line by line: on one node, on two, and with four roles apart
on twelve; and what a Slurm allocation says of its nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.apps.launch.launch_plan import (
    Addresses,
    deal_cpu,
    deal_gpus,
    make_launch_plan,
    processes,
    shown_commands,
)
from megarl.apps.launch.slurm import allocated_hosts, srun
from megarl.settings.config import RunConfig, from_tree, read, task_class, written_tree
from megarl.system.console import Options
from megarl.system.process_env import RAY_SETTINGS
from megarl.system.signals import SHUTDOWN

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "launch" / "recipes"
GPUS = [[str(gpu) for gpu in range(8)]] * 12
AT = Addresses("node0", 6000, 6001, 6002, "/tmp/m", "python")
RAY = (
    "--disable-usage-stats --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0"
)
HEAD = f"--head --port=6000 {RAY} --include-dashboard=false --ray-client-server-port=6002"
START = "python -m ray.scripts.scripts start --block"
TORCHRUN = "python -m megarl.parallel.torchrun"
PATIENCE = f"{SHUTDOWN}=264"
ENV = f"env MEGARL_FOLDER=/tmp/m {PATIENCE}"
ALL = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"
NO_GPU = f"{ENV} CUDA_VISIBLE_DEVICES= {START} --num-gpus=0"
EIGHT = f"{ENV} {ALL} {START} --num-gpus=8 --address=node0:6000 {RAY}"
RANKS = f"{ENV} RAY_ADDRESS=node0:6000 {ALL} {TORCHRUN}"
MASTER = "--nproc-per-node 8 --master-addr node0 --master-port 6001 -m megarl run RECIPES"
"""For a checkpoint within 240 s of a signal."""


def plan_of(recipe: str, num_nodes: int, at: Addresses = AT) -> list[str]:
    """The processes of a recipe on nodes of eight GPUs: "KIND NODE: COMMAND", without the settings
    that all of Ray's processes have.
    """
    path = RECIPES / recipe
    options = Options(recipe=str(path))
    kind = task_class(written_tree(path), recipe)
    plan = make_launch_plan(read(kind, path), options)
    gpus = deal_gpus(plan, GPUS[:num_nodes], "")
    return [
        f"{one.kind} {one.node}: {short(str(one.command))}"
        for one in processes(plan, gpus, options, at)
    ]


def short(command: str) -> str:
    for name, value in RAY_SETTINGS.items():
        command = command.replace(f" {name}={value}", "")
    return command.replace(str(RECIPES), "RECIPES")


def test_four_roles_apart() -> None:
    """The policy's four nodes join Ray; critic, reference and reward model have only ranks, and the
    last two nodes only engines.
    """
    found = plan_of("ppo_70b_apart.yaml", 12)
    joins = f"{NO_GPU} --address=node0:6000 {RAY}"
    rays = [f"ray {node}: {joins} --temp-dir=/tmp/m/{node}" for node in (1, 2, 3)]
    engines = [f"ray {node}: {EIGHT} --temp-dir=/tmp/m/{node}" for node in (10, 11)]
    ranks = [
        f"ranks {node}: {RANKS} --nnodes 10 --node-rank {node} {MASTER}/ppo_70b_apart.yaml"
        for node in range(10)
    ]
    assert found == [f"ray 0: {NO_GPU} {HEAD} --temp-dir=/tmp/m/0", *rays, *engines, *ranks]


def test_a_run_without_engines_has_no_ray() -> None:
    command = f"{TORCHRUN} --nproc-per-node 8 -m megarl run RECIPES/sft_7b.yaml"
    assert plan_of("sft_7b.yaml", 1) == [f"ranks 0: {ENV} {ALL} {command}"]


def test_by_hand_it_is_said_for_each_node() -> None:
    """Without Slurm nothing is marked, and Ray goes on in the background."""
    options = Options(recipe=str(RECIPES / "long_context_64k.yaml"))
    plan = make_launch_plan(read(RunConfig, options.recipe), options)
    at = Addresses(python="python")
    found = processes(plan, deal_gpus(plan, GPUS[:2], ""), options, at)
    start = "python -m ray.scripts.scripts start"
    assert [short(line) for line in shown_commands(found, [])] == [
        "# node 0",
        f"env {PATIENCE} CUDA_VISIBLE_DEVICES= {start} --num-gpus=0"
        f" --head --port=6379 {RAY} --include-dashboard=false",
        f"env {PATIENCE} RAY_ADDRESS=NODE0:6379 {ALL} {TORCHRUN} --nnodes 1 --node-rank 0"
        " --nproc-per-node 8 --master-addr NODE0 --master-port 29500 -m megarl run"
        " RECIPES/long_context_64k.yaml",
        "# node 1",
        f"env {PATIENCE} {ALL} {start} --num-gpus=8 --address=NODE0:6379 {RAY}",
    ]


def test_places_on_the_cpu() -> None:
    """Ranks on as many nodes as divide them; engines from the last node on."""
    tree = {"folder": "run", "model": {"path": "m"}, "prompts": {"source": "p.jsonl"}}
    tree |= {"rollout": {"num_engines": 2, "engine": {"tensor": 2}}}
    tree |= {"training": {"layout": {"data": 4}}}
    plan = make_launch_plan(from_tree(RunConfig, tree, where="test"), Options(recipe="r.yaml"))
    gpus = deal_cpu(plan, 3)
    assert [gpu.node for gpu in gpus.ranks] == [0, 0, 1, 1]
    assert [[gpu.node for gpu in one] for one in gpus.engines] == [[2, 2], [1, 1]]
    started = processes(plan, gpus, Options(recipe="r.yaml"), AT)
    kinds = [(one.kind, one.node) for one in started]
    assert kinds == [("ray", 0), ("ray", 1), ("ray", 2), ("ranks", 0), ("ranks", 1)]
    dealt = [one.command.words for one in started if one.kind == "ray"]
    for count, words in zip((0, 2, 2), dealt, strict=True):
        assert f'--resources={{"megarl_engine_ranks": {count}}}' in words


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    made = tmp_path / "scontrol"
    made.write_text("#!/bin/sh\necho n1\necho n2\n")
    made.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return made


def test_an_allocation(scontrol: Path) -> None:
    """With a scontrol that answers as the real one in tests/system/test_slurm.py does."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    assert allocated_hosts({}, "own") == ["own"]
    assert allocated_hosts(job, "own") == ["n1", "n2"]
    started_twice = job | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(ValueError, match="srun started this command 2 times"):
        allocated_hosts(started_twice, "own")
    scontrol.unlink()
    assert allocated_hosts(job | {"SLURM_JOB_NODELIST": "n1"}, "own") == ["n1"]
    with pytest.raises(ValueError, match="put Slurm's programs on PATH"):
        allocated_hosts(job, "own")
    words = srun("n2", ["python"])
    assert "--nodelist=n2" in words and "--overlap" in words and words[-1] == "python"
