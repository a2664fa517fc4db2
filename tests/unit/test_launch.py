"""launch/: every recipe reads, and the launcher's dry run says what would start and refuses what
cannot work.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from support.commands import ROOT, started, until

from megarl import cli
from megarl.apps.launch import launch_run, run_words
from megarl.apps.launch.launch_plan import Addresses, Process, ProgramCommand
from megarl.apps.launch.launch_run import Launcher, RunningProcess
from megarl.errors import UserError
from megarl.settings.config import (
    RunConfig,
    ServeRewardConfig,
    dump,
    from_tree,
    read,
    task_class,
    written_tree,
)
from megarl.system.private_folder import marked_processes
from megarl.system.process_state import start_of

SCRIPT = ROOT / "launch" / "dapo_14b.sh"
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
GSM8K, APART = (f"launch/recipes/{name}.yaml" for name in ("gsm8k", "dapo_14b_apart"))
ONE_NODE = {"SLURM_JOB_ID": "7"}
ONE_NODE |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS"), "1")
HOST = os.uname().nodename


def kind_of(recipe: Path) -> Any:
    tree = written_tree(recipe)
    return task_class(tree, recipe.name) if "task" in tree else ServeRewardConfig


def clean(**changes: str) -> dict[str, str]:
    """An environment without Slurm's, CUDA's or Ray's variables but for `changes`. Were anything
    asked of a GPU or of a network, it would show.
    """
    prefixes = ("SLURM_", "CUDA_", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_COLOR": "1"} | changes


def script(
    *arguments: str, script: Path = SCRIPT, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A dry run of launch/dapo_14b.sh under plain bash."""
    settings: dict[str, Any] = {"env": clean(**environment), "cwd": cwd, "timeout": 60}
    command = ["bash", str(script), "--dry-run", *arguments]
    return subprocess.run(command, **settings, capture_output=True, text=True)


Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a dry run that finds nothing wrong prints."""
    monkeypatch.chdir(ROOT)

    def show(*arguments: str, recipe: str = APART, **environment: str) -> str:
        wanted = clean(**environment)
        with pytest.MonkeyPatch.context() as patch:
            for name in set(os.environ) - set(wanted):
                patch.delenv(name)
            for name, value in wanted.items():
                patch.setenv(name, value)
            patch.setattr(run_words, "_has_gpus", lambda: True)
            assert cli.plan(["run", recipe, "--dry-run", *arguments]).run() == 0
        return capsys.readouterr().out

    return show


def places(stdout: str) -> dict[str, str]:
    """{role or engine: its ranks and GPUs} of the plan of a dry run."""
    rows = yaml.safe_load(stdout)["placement"]
    rows.pop("fullest", None)
    free = {"free": {"gpus": rows.pop("free")}} if "free" in rows else {}
    return {
        name: f"{row.get('ranks', '-')} "
        + ("; ".join(f"{node}: {gpus}" for node, gpus in row["gpus"].items()) or "none")
        for name, row in (rows | free).items()
    }


def refused(*arguments: str, **environment: Any) -> str:
    """What a dry run of the script says that finds a mistake."""
    result = script(*arguments, **environment)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert result.stdout == ""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


# ------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_reads_and_its_resolved_form_reads_back(recipe: Path) -> None:
    kind = kind_of(recipe)
    config = read(kind, recipe)
    assert from_tree(kind, yaml.safe_load(dump(config)), where="again") == config
    misspelt = yaml.safe_load(recipe.read_text()) | {"foldr": ""}
    with pytest.raises(ValueError, match="foldr: unknown key; did you mean 'folder'"):
        from_tree(kind, misspelt, where=recipe.name)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_has_one_kernel_where_the_model_has_several(recipe: Path) -> None:
    training = yaml.safe_load(recipe.read_text()).get("training", {})
    kernels = training.get("norms"), training.get("elementwise")
    assert kernels == (
        ("torch", "triton") if training.get("precision") == "bfloat16" else (None,) * 2
    )


def test_dapo_is_as_published() -> None:
    config = read(RunConfig, ROOT / "launch/recipes/dapo_14b.yaml")
    rollout, rule, training = config.rollout, config.algorithm, config.training
    overlong, samples = config.environment.overlong, rollout.groups_per_step * rollout.group_size
    assert (samples, samples // training.num_mini_batches) == (512 * 16, 512)
    assert (rule.clip_low, rule.clip_high, rule.aggregation) == (0.2, 0.28, "token")
    assert (overlong.limit_tokens, rollout.max_new_tokens) == (20480, 20480)
    assert training.schedule.warmup_steps == 20 * training.num_mini_batches
    assert training.micro_batch_tokens >= config.prompts.max_prompt_tokens + rollout.max_new_tokens
    # Ranks wait in a collective for rank 0, which waits for the engines.
    waits = (rollout.engine.start_timeout_s, config.weight_sync.timeout_s)
    assert training.collective_timeout_s > max(waits)


# ------------------------------------------------------------------------------------------ dry run


def test_dry_run_shows_every_rank_engine_and_command(shown: Shown) -> None:
    out = shown()
    engines = {"engine 0": "- 0: 4-5", "engine 1": "- 0: 6-7"}
    assert places(out) == {"policy": "0-3 0: 0-3", "free": "- none"} | engines
    port = re.search(r"--head --port=(\d+) ", out)
    assert port is not None
    assert f"RAY_ADDRESS=127.0.0.1:{port[1]}" in out and "RAY_AUTH_MODE=token" in out
    assert not re.search(r"RAY_AUTH_TOKEN=\S", out), "the token is a secret"
    assert out.splitlines()[-1] == "# the recipe passes; nothing was started"


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    """Every program that would start something leaves a trace here instead."""
    for name in ("setsid", "srun", "nvidia-smi", "torchrun", "ray"):
        fake = tmp_path / name
        fake.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit 1\n")
        fake.chmod(0o755)
    before = set(Path("/tmp").glob("megarl-*"))
    found = script(
        "--recipe", APART, "--gpus-per-node", "8", PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert found.returncode == 0 and not (tmp_path / "called").exists()
    state = re.search(r"MEGARL_FOLDER=(\S+)", found.stdout)
    assert state is not None
    assert Path(state[1]) not in set(Path("/tmp").glob("megarl-*")) - before


def test_dry_run_from_another_folder_and_with_overrides(tmp_path: Path) -> None:
    overrides = ("--steps", "3", "--model.path", "a folder")
    found = script("--recipe", str(ROOT / APART), "--port=6400", *overrides, cwd=tmp_path)
    assert "--port=6400" in found.stdout
    assert "--steps 3 --model.path 'a folder'" in found.stdout


def test_visible_gpus_are_used_in_their_order(shown: Shown) -> None:
    out = shown(recipe=GSM8K, CUDA_VISIBLE_DEVICES=" 5, 3 ,1")
    assert places(out) == {"policy": "0 0: 5", "engine 0": "- 0: 3", "free": "- 0: 1"}
    assert "CUDA_VISIBLE_DEVICES=3 " in out


@pytest.mark.parametrize("visible", ["", " "])
def test_an_empty_list_of_visible_gpus_is_no_gpu(visible: str, shown: Shown) -> None:
    """As for CUDA; only without the variable are all GPUs of the node visible."""
    said = "need 2 GPUs, but CUDA_VISIBLE_DEVICES or MEGARL_DEVICE hides all GPUs"
    with pytest.raises(UserError, match=said):
        shown(recipe=GSM8K, CUDA_VISIBLE_DEVICES=visible)
    # Nodes that the options name are others than this one.
    options = ("--nodes", "1", "--gpus-per-node", "2")
    other = shown(*options, recipe=GSM8K, CUDA_VISIBLE_DEVICES=visible)
    assert places(other)["engine 0"] == "- 0: 1"
    distilled = "launch/recipes/distill.yaml"
    rehearsal = shown("--cpu", "--ranks", "1", recipe=distilled, CUDA_VISIBLE_DEVICES="0")
    assert "CUDA_VISIBLE_DEVICES= " in rehearsal
    assert "--num-gpus=0" in rehearsal and "-m megarl run " in rehearsal


def test_preferences_and_reward_models_have_ranks_alone(shown: Shown) -> None:
    for name in ("dpo", "reward_model"):
        recipe = f"launch/recipes/{name}.yaml"
        out = shown("--ranks", "2", recipe=recipe, CUDA_VISIBLE_DEVICES="0,1")
        assert places(out) == {"policy": "0-1 0: 0-1", "free": "- none"}
        assert "--nproc-per-node 2 -m megarl run " in out and "ray" not in out


@pytest.mark.parametrize(("arguments", "environment", "says"), [
    (("--training.layot.data", "4"), {},
     "training.layot: unknown key; did you mean 'layout'?"),
    (("--rollout.groups-per-step", "many"), {}, "rollout.groups_per_step"),
    (("--rollout.groups-per-step", "100"), {},
     "not divisible by training.num_mini_batches = 16"),
    (("--ranks", "8"), {}, "= 4 ranks, but this run has 8; set training.layout.data to 8"),
    (("--ranks", "all"), {}, "megarl run: --ranks is 'all'; set it"),
    (("--ranks",), {}, "megarl run: --ranks expected one argument"),
    (("--rollout.placement", "colocated", "--rollout.num_engines", "3"), {},
     "are 6 engine ranks, but the policy has 4 ranks to share with"),
    ((), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
     "need 8 GPUs, but CUDA_VISIBLE_DEVICES is 0,1,2,3; set rollout.placement to colocated"),
    (("--recipe", "launch/recipes/sft_7b.yaml"), {"CUDA_VISIBLE_DEVICES": "0"},
     "need 8 GPUs, but CUDA_VISIBLE_DEVICES is 0; change the recipe's training.layout"),
    *((("--recipe", GSM8K), {"CUDA_VISIBLE_DEVICES": visible}, "set it to each GPU once")
      for visible in ("0,,1", "0,0", "GPU-ab,1, GPU-ab")),
    (("--recipe", GSM8K), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "hides all GPUs: unset it"),
    (("--recipe", "missing.yaml"), {}, "missing.yaml does not exist"),
])  # fmt: skip
def test_dry_run_refuses(
    arguments: tuple[str, ...], environment: dict[str, str], says: str, shown: Shown
) -> None:
    recipe, *rest = arguments[1:] if "--recipe" in arguments else (APART, *arguments)
    with pytest.raises(UserError) as refusal:
        shown(*rest, recipe=recipe, **environment)
    assert says in str(refusal.value)


# -------------------------------------------------------------------------------------------- Slurm


def test_a_node_elsewhere_is_reached_by_srun() -> None:
    found = script("--steps", "3", **ONE_NODE, SLURM_JOB_NODELIST="gpu017")
    step = yaml.safe_load(found.stdout)["started from"]
    assert "--ntasks=1" in step
    assert "--nodelist=gpu017" in step
    recipe = ROOT / "launch/recipes/dapo_14b.yaml"
    assert step.endswith(f"-m megarl run {recipe} --dry-run --steps 3")


def test_two_nodes_of_slurm(tmp_path: Path, shown: Shown) -> None:
    """Ray, ranks and engines on both nodes, each process through srun on its node."""
    two = ONE_NODE | {"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    two |= {"SLURM_JOB_NODELIST": "gpu[017-018]", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    overrides = ("--training.layout.data", "8", "--rollout.num_engines", "4")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho gpu017\necho gpu018\n")
    scontrol.chmod(0o755)
    two |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.raises(UserError, match="set it to 'point_to_point'"):
        shown(*overrides, **two)
    overrides += ("--weight_sync.transport", "point_to_point")
    out = shown(*overrides, **two)
    assert places(out)["policy"] == "0-7 0: 0-7"
    assert places(out)["engine 3"] == "- 1: 6-7"
    lines = re.findall(r"^  srun .*--nodelist=(\S+) .*-m (\S+) ", out, re.MULTILINE)
    assert [host for host, _ in lines] == ["gpu017", "gpu018", "gpu017"]
    assert "host: gpu017 gpu018\n" in out


def test_a_copy_in_the_spool_finds_the_folder_it_was_submitted_from(tmp_path: Path) -> None:
    """sbatch runs a copy of the script, far from the repository."""
    spool = tmp_path / "job00007" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(SCRIPT, spool)
    submitted = ONE_NODE | {"SLURM_JOB_NODELIST": HOST, "SLURM_SUBMIT_DIR": str(ROOT)}
    found = script(script=spool, cwd=tmp_path, **submitted)
    assert str(ROOT / "launch/recipes/dapo_14b.yaml") in found.stdout
    assert f"host: {HOST}\n" in found.stdout and "srun" not in found.stdout
    submitted["SLURM_SUBMIT_DIR"] = str(tmp_path)
    said = refused(script=spool, cwd=tmp_path, **submitted)
    assert "submit this script from the folder" in said


def test_slurm_reads_the_header() -> None:
    """sbatch stops reading at the first line that is neither empty nor a comment."""
    header = SCRIPT.read_text().split("\nset -")[0].splitlines()
    assert header[0] == "#!/usr/bin/env bash"
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in header
        if line.startswith("#SBATCH --") and "=" in line
    )
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("1", "1", "8")
    # Bash must hear of the time limit to take everything down.
    assert asked["signal"].startswith("B:TERM@")
    config = read(RunConfig, ROOT / "launch/recipes/dapo_14b.yaml")
    assert config.rollout.placement == "colocated"
    for used in (config.training.layout.data, config.rollout.num_engines * 2):
        assert used == int(asked["gpus-per-node"])


# ------------------------------------------------------------------------------------------- script


@pytest.mark.parametrize(
    "script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda path: path.name
)
def test_bash_parses_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_only_marked_processes_are_ended() -> None:
    """A marked process is found, and nothing else."""
    sleep = "import time; print(flush=True); time.sleep(60)"
    mark = f"/tmp/megarl-test-{os.getpid()}"
    marks = [os.environ | {"MEGARL_FOLDER": folder} for folder in (mark, mark + "0")]
    with (
        started(sleep, env=marks[0]) as (marked, _),
        started(sleep, env=marks[1]),
    ):
        assert marked_processes(mark) == [marked.pid]


def test_what_takes_no_orders_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun`, which has no mark, where a node is dead."""
    monkeypatch.setattr(launch_run, "MARGIN_S", 0.2)
    sleep = "import time; print(flush=True); time.sleep(60)"
    pipes: Any = {"stdin": subprocess.PIPE, "text": False}
    with started(sleep, start_new_session=True, **pipes) as (popen, _):
        launcher = Launcher([], ["dead"], Addresses(state="/tmp/megarl-none"), Path())
        process: Any = RunningProcess(
            Process("ranks", 0, ProgramCommand({}, [])), "dead", popen, None
        )
        launcher.running.append(process)
        launcher.end(is_signalled=False)
        assert popen.wait(10) == -9 and launcher.silent == ["dead"]


def test_what_hangs_is_killed_with_its_unmarked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that takes no orders, and one below it that it gave no environment."""
    monkeypatch.setattr(launch_run, "MARGIN_S", 0.2)
    mark = f"/tmp/megarl-test-{os.getpid()}-hangs"
    hangs = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '60'], env={}).pid, flush=True); time.sleep(60)"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "text": False}
    environment = os.environ | {"MEGARL_FOLDER": mark}
    with started(hangs, env=environment, start_new_session=True, **pipes) as (popen, line):
        launcher = Launcher([], ["here"], Addresses(state=mark), Path())
        ranks: Any = Process("ranks", 0, ProgramCommand({}, []))
        launcher.running.append(RunningProcess(ranks, "here", popen, None))
        launcher.end(is_signalled=False)
        assert popen.wait(10) == -9 and not start_of(int(line))


def running(code: str, kind: Literal["ray", "ranks"] = "ranks") -> tuple[Launcher, RunningProcess]:
    """A Python program below a launcher that runs it as ranks or as Ray; its first line is read."""
    process = Process(kind, 0, ProgramCommand({}, [sys.executable, "-c", code]))
    at = Addresses(state=f"/tmp/megarl-test-{os.getpid()}")
    launcher = Launcher([process], ["here"], at, Path())
    words = [sys.executable, "-m", "megarl.apps.launch.node_process", kind, *process.command.words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    popen = subprocess.Popen(words, **pipes, start_new_session=True)
    assert popen.stdout is not None
    launcher.running.append(RunningProcess(process, "here", popen, None))
    return launcher, launcher.running[0]


SIGNALLED = """import signal, sys, time
def hear(number, frame):
    print("heard", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, hear)
print("up", flush=True)
time.sleep(%s)"""


@pytest.mark.parametrize(("kind", "heard"), [("ranks", b"heard\n"), ("ray", b"")])
def test_a_signal_to_the_whole_job_reaches_ranks_and_not_ray(
    kind: Literal["ray", "ranks"], heard: bytes
) -> None:
    """Slurm's scancel signals every process. The launcher's own order then comes second."""
    launcher, below = running(SIGNALLED % (600 if kind == "ranks" else 1), kind)
    out = below.popen.stdout
    assert out is not None and out.readline() == b"up\n"
    os.killpg(below.popen.pid, signal.SIGTERM)
    if kind == "ranks":
        launcher.order([below], b"end\n")
    below.popen.wait(30)
    assert out.read() == heard and below.code == 0


ORPHAN = """import os, subprocess, sys, time
orphan = "import os, time; print(os.getpid(), flush=True); os.setsid(); time.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
subprocess.run([sys.executable, "-c", middle], env={})
time.sleep(600)"""


STARTS = """import sys, time
from pathlib import Path
from megarl.apps.launch.launch_plan import ProgramCommand
from megarl.apps.launch.launch_plan import Addresses, Process
from megarl.apps.launch.launch_run import Launcher
process = Process("ranks", 0, ProgramCommand({}, [sys.executable, "-c", sys.argv[1]]))
Launcher([process], ["here"], Addresses(state="/nowhere"), Path()).start(process)
time.sleep(600)"""


@pytest.mark.parametrize("ends", ["killed", "closed"])
def test_what_the_launcher_starts_ends_with_a_killed_launcher(ends: str) -> None:
    """Also a process whose parent has ended, in a session of its own, without a mark."""
    if ends == "closed":
        _, below = running(ORPHAN)
        with below.popen as popen:
            assert popen.stdout is not None and popen.stdin is not None
            orphan = int(popen.stdout.readline())
            popen.stdin.close()
            assert popen.wait(60) == 137
    else:
        with started(STARTS, ORPHAN) as (_, said):
            orphan = int(said)
    until(lambda: not start_of(orphan))


LATE = """import os, sys
path = %r
count = len(open(path).read()) if os.path.exists(path) else 0
open(path, "a").write("x")
sys.exit(1 if count < %d else 0)"""


@pytest.mark.parametrize(
    ("kind", "failures", "starts", "code"),
    [("ray", 2, 3, 0), ("ray", 9, 3, 1), ("ranks", 9, 1, 1)],
)
def test_ray_that_does_not_start_is_started_again(
    kind: Literal["ray", "ranks"], failures: int, starts: int, code: int, tmp_path: Path
) -> None:
    """Ray gives its processes 30 s to start, which a busy machine exceeds. Ranks start once."""
    _, below = running(LATE % (str(tmp_path / "starts"), failures), kind)
    assert below.popen.wait(60) == code
    assert len((tmp_path / "starts").read_text()) == starts
    assert below.popen.stdout is not None
    said = below.popen.stdout.read().decode()
    assert said.count("Ray did not start; starting it again") == starts - 1
