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
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from support.commands import ROOT

from megarl.activity.process import start_of
from megarl.apps.launch import launch_run
from megarl.apps.launch.launch import main
from megarl.apps.launch.launch_plan import ProgramCommand
from megarl.apps.launch.launch_processes import Addresses, Process
from megarl.apps.launch.launch_run import Launch, Launcher, RunningProcess
from megarl.config import (
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    ServeRewardConfig,
    SftConfig,
    dump,
    from_tree,
    read,
)
from megarl.errors import UserError
from megarl.private_folder import marked_processes

SCRIPT = ROOT / "launch" / "dapo_14b.sh"
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
GSM8K, APART = (f"launch/recipes/{name}.yaml" for name in ("gsm8k", "dapo_14b_apart"))
ONE_NODE = {"SLURM_JOB_ID": "7"}
ONE_NODE |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS"), "1")
HOST = os.uname().nodename


KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("quickstart_sft", "sft_7b", "calculator_sft", "guessing_sft", "programs_sft", "best_of_n"),
        SftConfig,
    ),
    **dict.fromkeys(("dpo", "smollm2_dpo"), PreferenceConfig),
    **dict.fromkeys(("serve_reward", "judge", "reward_engine"), ServeRewardConfig),
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
}
"""Recipes of other commands than `megarl train`."""


def kind_of(recipe: Path) -> Any:
    return KINDS.get(recipe.stem, RunConfig)


def launch(
    *arguments: str,
    script: Path = SCRIPT,
    cwd: Path = ROOT,
    recipe: str = APART,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The script under plain bash, in an environment without Slurm's or CUDA's variables but for
    those given. `recipe`: for arguments without one; "" for the script's own.
    """
    if recipe and "--recipe" not in arguments:
        arguments = ("--recipe", str(ROOT / recipe), *arguments)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "CUDA_", "RAY_"))
    }
    # Were anything asked of a GPU or of a network, these would show.
    clean |= {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_COLOR": "1"}
    settings = {"env": clean | environment, "cwd": cwd, "timeout": 60}
    return subprocess.run(
        ["bash", str(script), *arguments], **settings, capture_output=True, text=True
    )


def shown(*arguments: str, **environment: Any) -> str:
    """What a dry run that finds nothing wrong prints."""
    result = launch("--dry-run", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def places(stdout: str) -> dict[str, str]:
    """{role or engine: its ranks and GPUs} of the picture of a dry run."""
    lines = stdout.splitlines()
    head = next(line for line in lines if line.startswith("role "))
    begin, end = head.index("ranks"), head.index("weights")
    rows = lines[lines.index(head) + 1 :]
    rows = rows[: rows.index("")]
    name_width = max(len(row.split("  ")[0]) for row in rows)
    return {row[:name_width].strip(): " ".join(row[begin:end].split()) for row in rows}


def refused(*arguments: str, **environment: Any) -> str:
    """What a dry run says that finds a mistake."""
    result = launch("--dry-run", *arguments, **environment)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "placement" not in result.stdout
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


def test_recipes_write_into_folders_of_their_own() -> None:
    folders = [yaml.safe_load(path.read_text())["folder"] for path in RECIPES]
    assert len(set(folders)) == len(folders)
    assert all(folder.startswith("runs/") for folder in folders)


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
    assert (rollout.groups_per_step, rollout.group_size, rollout.temperature) == (512, 16, 1.0)
    assert rollout.groups_per_step * rollout.group_size // training.num_mini_batches == 512
    clips = (rule.clip_low, rule.clip_high, rule.aggregation, rule.kl.coefficient)
    assert clips == (0.2, 0.28, "token", 0.0)
    overlong = config.environment.overlong
    lengths = (overlong.limit_tokens, overlong.buffer_tokens, rollout.max_new_tokens)
    assert lengths == (20480, 4096, 20480)
    assert (config.environment.correct, config.environment.wrong) == (1.0, -1.0)
    assert rollout.dynamic_sampling.enabled
    assert (training.optimizer.learning_rate, training.schedule.kind) == (1e-6, "constant")
    assert training.schedule.warmup_steps == 20 * training.num_mini_batches
    assert training.micro_batch_tokens >= config.prompts.max_prompt_tokens + rollout.max_new_tokens
    # Ranks wait in a collective for rank 0, which waits for the engines.
    waits = (rollout.engine.start_timeout_s, config.weight_sync.timeout_s)
    assert training.collective_timeout_s > max(waits)


# ------------------------------------------------------------------------------------------ dry run


def test_dry_run_shows_every_rank_engine_and_command() -> None:
    out = shown()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert places(out) == {
        "policy": "0-3 0: 0-3",
        "engine 0": "- 0: 4-5",
        "engine 1": "- 0: 6-7",
        "free": "- none",
    }
    assert any("the rollout service" in line for line in lines)
    ray = next(line for line in lines if "--head" in line)
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 " in ray
    assert "--num-gpus=4" in ray
    assert "RAY_AUTH_MODE=token" in ray
    train = next(line for line in lines if "torchrun" in line)
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in train
    assert "--nproc-per-node 4 -m megarl train" in train
    port = re.search(r"--port=(\d+)", ray)
    assert port is not None
    assert f"RAY_ADDRESS=127.0.0.1:{port[1]}" in train
    assert not re.search(r"RAY_AUTH_TOKEN=\S", out), "the token is a secret"
    assert lines[-1] == "the recipe passes; nothing was started"


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    """Every program that would start something leaves a trace here instead."""
    for name in ("setsid", "srun", "nvidia-smi", "torchrun", "ray"):
        fake = tmp_path / name
        fake.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit 1\n")
        fake.chmod(0o755)
    before = set(Path("/tmp").glob("megarl-*"))
    out = shown(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert not (tmp_path / "called").exists()
    state = re.search(r"MEGARL_FOLDER=(\S+)", out)
    assert state is not None
    assert Path(state[1]) not in set(Path("/tmp").glob("megarl-*")) - before


def test_dry_run_from_another_folder_and_with_overrides(tmp_path: Path) -> None:
    out = shown("--port=6400", "--", "--steps", "3", "--model.path", "a folder", cwd=tmp_path)
    assert "--port=6400" in out
    assert "--steps 3 --model.path 'a folder'" in out


def test_visible_gpus_are_used_in_their_order() -> None:
    out = shown("--recipe", GSM8K, CUDA_VISIBLE_DEVICES="5,3,1")
    assert places(out) == {
        "policy": "0 0: 5",
        "engine 0": "- 0: 3",
        "free": "- 0: 1",
    }


def test_spaces_between_visible_gpus() -> None:
    out = shown("--recipe", GSM8K, CUDA_VISIBLE_DEVICES=" 5, 3 ")
    assert places(out)["engine 0"] == "- 0: 3"
    assert "CUDA_VISIBLE_DEVICES=3 " in out


@pytest.mark.parametrize("visible", ["", " "])
def test_an_empty_list_of_visible_gpus_is_no_gpu(visible: str) -> None:
    """As for CUDA; only without the variable are all GPUs of the node visible."""
    result = launch("--dry-run", "--recipe", GSM8K, CUDA_VISIBLE_DEVICES=visible)
    assert result.returncode == 2 and not result.stdout
    assert "need 2 GPUs, but CUDA_VISIBLE_DEVICES is empty, which hides all GPUs" in result.stderr
    # Nodes that the options name are others than this one.
    options = ("--nodes", "1", "--gpus-per-node", "2")
    other = shown("--recipe", GSM8K, *options, CUDA_VISIBLE_DEVICES=visible)
    assert places(other)["engine 0"] == "- 0: 1"
    shown("--cpu", CUDA_VISIBLE_DEVICES=visible)


def test_a_recipe_with_a_teacher_is_distilled() -> None:
    recipe = "launch/recipes/distill.yaml"
    out = shown("--cpu", "--recipe", recipe, "--gpus-train", "1")
    assert "-m megarl distill " in out


def test_gpu_counts_that_match_an_override() -> None:
    overrides = ("--training.layout.data=3", "--rollout.num-engines=4", "--rollout.engine.tensor=1")
    out = shown("--recipe", GSM8K, "--gpus-train", "3", "--gpus-engine=4", "--", *overrides)
    engines = {f"engine {n}": f"- 0: {3 + n}" for n in range(4)}
    assert places(out) == {"policy": "0-2 0: 0-2", "free": "- none"} | engines


def test_a_rehearsal_on_cpu_has_no_gpu() -> None:
    out = shown("--cpu", CUDA_VISIBLE_DEVICES="0")
    assert "GPU" not in out
    assert "--num-gpus=0" in out
    assert "CUDA_VISIBLE_DEVICES= " in out


def test_colocated_engines_use_the_gpus_of_the_ranks() -> None:
    """Ray sees the GPUs but deals none out: each engine follows the ranks it shares with."""
    overrides = ("--rollout.placement", "colocated", "--rollout.max_staleness", "0")
    out = shown("--", *overrides, CUDA_VISIBLE_DEVICES="7,6,5,4")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert places(out) == {
        "policy": "0-3 0: 7,6,5,4 *",
        "engine 0": "- 0: 7,6 *",
        "engine 1": "- 0: 5,4 *",
        "free": "- none",
    }
    assert any(line.startswith("* shared, 0: 7,6: policy + engine 0 = ") for line in lines)
    ray = next(line for line in lines if "--head" in line)
    assert "--num-gpus=0 " in ray
    train = next(line for line in lines if "torchrun" in line)
    assert all("CUDA_VISIBLE_DEVICES=7,6,5,4 " in line for line in (ray, train))


@pytest.mark.parametrize(("arguments", "environment", "says"), [
    (("--", "--training.layot.data", "4"), {},
     "training.layot: unknown key; did you mean 'layout'?"),
    (("--", "--rollout.groups-per-step", "many"), {}, "rollout.groups_per_step"),
    (("--", "--rollout.groups-per-step", "100"), {},
     "not divisible by training.num_mini_batches = 16"),
    (("--gpus-train", "3"), {}, "set --gpus-train to 4, or training.layout.data to 3"),
    (("--gpus-train", "8"), {}, "data 4 x sequence 1 x tensor 1 = 4 ranks"),
    (("--gpus-engine", "3"), {}, "num_engines 2 x rollout.engine.tensor 2 needs 4"),
    (("--gpus-engine", "0"), {}, "--gpus-engine is '0'"),
    (("--gpus-train", "all"), {}, "--gpus-train is 'all'"),
    (("--gpus-train",), {}, "--gpus-train needs a value"),
    (("--", "--training.layout.data", "0"), {}, "set --gpus-train"),
    (("--", "--rollout.placement", "colocated", "--rollout.num_engines", "3"), {},
     "6 engine ranks cannot share the GPUs of the policy's 4 ranks"),
    ((), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "need 8 GPUs, but CUDA_VISIBLE_DEVICES is 0,1,2,3"),
    *((("--recipe", GSM8K), {"CUDA_VISIBLE_DEVICES": visible},
       f"CUDA_VISIBLE_DEVICES is '{visible}', which has {says}")
      for visible, says in (
          ("0,,1", "an empty name"), ("0,1,", "an empty name"), (" , ", "an empty name;"),
          ("1,,1", "an empty name and a GPU twice"), ("0,0", "a GPU twice"),
          ("GPU-ab,1, GPU-ab", "a GPU twice"), ("0,-1,1", "a negative number"),
          ("-1", "a negative number, at which CUDA stops reading"),
          ("NoDevFiles", "NoDevFiles, Slurm's word for a job without GPUs"))),
    (("--gpu-train", "4"), {}, "unknown option '--gpu-train'"),
    (("--steps", "3"), {}, "go after --"),
    (("--recipe", "missing.yaml"), {}, "missing.yaml does not exist"),
    (("--recipe", "launch/recipes/quickstart_sft.yaml"), {}, "quickstart_sft.yaml: "),
])  # fmt: skip
def test_dry_run_refuses(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [one for one in os.environ if one.startswith(("SLURM_", "CUDA_", "RAY_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    recipe, *rest = arguments[1:] if "--recipe" in arguments else (APART, *arguments)
    with pytest.raises(UserError) as refusal:
        main([recipe, "--dry-run", *rest])
    assert says in str(refusal.value)


def test_a_misspelt_key_of_the_recipe_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((ROOT / GSM8K).read_text().replace("groups_per_step", "group_per_step"))
    said = refused("--recipe", str(recipe))
    assert "rollout.group_per_step: unknown key; did you mean 'groups_per_step'" in said
    assert "mine.yaml" in said


# -------------------------------------------------------------------------------------------- Slurm


def test_one_node_of_slurm() -> None:
    out = shown(**ONE_NODE, SLURM_JOB_NODELIST=HOST)
    assert f"host      {HOST}\n" in out
    assert "srun" not in out


def test_a_node_elsewhere_is_reached_by_srun() -> None:
    out = shown("--", "--steps", "3", recipe="", **ONE_NODE, SLURM_JOB_NODELIST="gpu017")
    step = next(line for line in out.splitlines() if "srun" in line)
    assert "--ntasks=1" in step
    assert "--nodelist=gpu017" in step
    recipe = ROOT / "launch/recipes/dapo_14b.yaml"
    assert step.endswith(f"-m megarl launch {recipe} --dry-run -- --steps 3")


def test_two_nodes_of_slurm(tmp_path: Path) -> None:
    """Ray, ranks and engines on both nodes, each process through srun on its node."""
    two = ONE_NODE | {"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    two |= {"SLURM_JOB_NODELIST": "gpu[017-018]", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    overrides = ("--training.layout.data", "8", "--rollout.num_engines", "4")
    said = refused("--", *overrides, **two)
    assert "set it to 'point_to_point'" in said
    overrides += ("--weight_sync.transport", "point_to_point")
    out = shown("--", *overrides, **two)
    assert places(out)["policy"] == "0-7 0: 0-7"
    assert places(out)["engine 3"] == "- 1: 6-7"
    lines = re.findall(r"^  srun .*--nodelist=(\S+) .*-m (\S+) ", out, re.MULTILINE)
    assert [host for host, _ in lines] == ["gpu017", "gpu018", "gpu017", "gpu017"]
    assert "host      gpu017 gpu018\n" in out


def test_a_copy_in_the_spool_finds_the_folder_it_was_submitted_from(tmp_path: Path) -> None:
    """sbatch runs a copy of the script, far from the repository."""
    spool = tmp_path / "job00007" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(SCRIPT, spool)
    submitted = ONE_NODE | {"SLURM_JOB_NODELIST": HOST, "SLURM_SUBMIT_DIR": str(ROOT)}
    out = shown(script=spool, cwd=tmp_path, recipe="", **submitted)
    assert str(ROOT / "launch/recipes/dapo_14b.yaml") in out
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
    """A marked process and one in a session that was started are found, and nothing else."""
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    mark = f"/tmp/megarl-test-{os.getpid()}"

    def sleeper(**settings: Any) -> Any:
        return subprocess.Popen(sleep, stdout=subprocess.PIPE, **settings)

    marked, bystander = (
        sleeper(env=os.environ | {"MEGARL_FOLDER": folder}) for folder in (mark, mark + "0")
    )
    leader = sleeper(start_new_session=True)
    try:
        for process in (marked, leader, bystander):
            assert process.stdout is not None
            process.stdout.readline()
        assert set(marked_processes(mark, {leader.pid})) == {marked.pid, leader.pid}
    finally:
        for process in (marked, leader, bystander):
            process.kill()
            process.communicate()


def running(code: str, kind: Literal["ray", "ranks"] = "ranks") -> tuple[Launcher, RunningProcess]:
    """A Python program below a launcher that runs it as ranks or as Ray; its first line is read."""
    process = Process(kind, 0, ProgramCommand({}, [sys.executable, "-c", code]))
    at = Addresses(state=f"/tmp/megarl-test-{os.getpid()}")
    launcher = Launcher(Launch([process], ["here"], at, Path()), dict(os.environ))
    words = [sys.executable, "-m", "megarl.apps.launch.node_process", kind, *process.command.words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    popen = subprocess.Popen(words, **pipes, start_new_session=True)
    assert popen.stdout is not None
    launcher.running.append(RunningProcess(process, popen, None))
    return launcher, launcher.running[0]


IGNORES = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)"""


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that ignore SIGTERM, and may take 600 s, are killed."""
    monkeypatch.setattr(launch_run, "RANKS_END_WITHIN_S", 600.0)
    launcher, started = running(IGNORES)
    assert started.popen.stdout is not None
    number = int(started.popen.stdout.readline())
    launcher.hurry.set()
    began = time.monotonic()
    launcher.end()
    assert started.poll() == 137 and time.monotonic() - began < 60
    assert not start_of(number)


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
    launcher, started = running(SIGNALLED % (600 if kind == "ranks" else 1), kind)
    out = started.popen.stdout
    assert out is not None and out.readline() == b"up\n"
    os.killpg(started.popen.pid, signal.SIGTERM)
    if kind == "ranks":
        launcher._end([started], b"end\n", 30)
    started.popen.wait(30)
    assert out.read() == heard and started.poll() == 0


ORPHAN = """import os, subprocess, sys, time
orphan = "import os, time; print(os.getpid(), flush=True); os.setsid(); time.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
subprocess.run([sys.executable, "-c", middle], env={})
time.sleep(600)"""


@pytest.mark.parametrize("ends", ["killed", "closed"])
def test_what_the_launcher_starts_ends_with_a_killed_launcher(ends: str) -> None:
    """Also a process whose parent has ended, in a session of its own, without a mark."""
    if ends == "closed":
        _, started = running(ORPHAN)
        popen = started.popen
        assert popen.stdout is not None and popen.stdin is not None
        orphan = int(popen.stdout.readline())
        popen.stdin.close()
        assert popen.wait(60) == 137
    else:
        words = f"[sys.executable, '-m', 'megarl.apps.launch.node_process', 'ray', sys.executable, '-c', {ORPHAN!r}]"
        code = "import os, sys, time; from megarl.apps.launch.launch_run import start\n"
        code += f"start({words}, dict(os.environ)); time.sleep(600)"
        popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert popen.stdout is not None
        orphan = int(popen.stdout.readline())
        popen.kill()
        popen.wait()
    deadline = time.monotonic() + 20
    while start_of(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    popen.stdout.close()


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
    _, started = running(LATE % (str(tmp_path / "starts"), failures), kind)
    assert started.popen.wait(60) == code
    assert len((tmp_path / "starts").read_text()) == starts
    assert started.popen.stdout is not None
    said = started.popen.stdout.read().decode()
    assert said.count("Ray did not start; starting it again") == starts - 1
