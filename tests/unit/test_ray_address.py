"""RAY_ADDRESS is looked at before Ray is, which would wait for minutes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from megarl.errors import UserError
from megarl.parallel.launcher import free_port
from megarl.rollout import ray_cluster
from megarl.rollout.ray_cluster import Cluster
from megarl.run.plan import plan_run
from megarl.settings.config import RunConfig
from megarl.settings.data import PromptsConfig
from megarl.settings.training import ModelConfig
from megarl.system import private_folder
from megarl.system.private_folder import marked_processes
from megarl.system.ray_address import ray_address

RECIPE = RunConfig(
    folder="run", model=ModelConfig(path="model"), prompts=PromptsConfig(source="prompts.jsonl")
)


@pytest.mark.parametrize("text", ["", "auto", "127.0.0.1", "[::ffff:127.0.0.1]"])
def test_a_cluster_that_answers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f":{server.getsockname()[1]}" if "1" in text else ""
        monkeypatch.setenv("RAY_ADDRESS", text + port)
        assert ray_address() == text + port


@pytest.mark.parametrize("text", ["ray://127.0.0.1:10001", "local", "head", "head:0", ":1"])
def test_an_address_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", text)
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS is {text}, which is not the host:port"):
        ray_address()


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: Cluster(namespace="test", token="t"), UserError),
        (lambda: plan_run(RECIPE), ValueError),
    ],
    ids=["start", "check"],
)
def test_a_cluster_that_is_gone(
    use: Callable[[], object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(error, match=r"nothing answers there \(Connection refused\); unset RAY_ADD"):
        use()


def test_ray_that_starts_too_slowly_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["The current node timed out during startup. GCS overloaded.", ""]
    said = list[str]()

    def init(**options: object) -> None:
        assert options == {"address": "local", "num_cpus": 4, "_temp_dir": f"{tmp_path}/ray"}
        if problem := answers.pop(0):
            raise Exception(problem)  # noqa: TRY002 - what Ray raises

    tmp_path.chmod(0o700)
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: said.append("shutdown"))
    ray_cluster.start_ray(tmp_path, num_cpus=4)
    assert answers == [] and said == ["shutdown"]
    answers += ["timed out during startup"] * 3
    with pytest.raises(Exception, match="timed out"):
        ray_cluster.start_ray(tmp_path, num_cpus=4)
    answers[:] = ["another problem", ""]
    with pytest.raises(Exception, match="another"):
        ray_cluster.start_ray(tmp_path, num_cpus=4)


def test_ray_that_opens_the_folder_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: tmp_path.chmod(0o711))
    with pytest.raises(UserError, match=r"must be of user \d+ with mode 700, .* with mode 711"):
        ray_cluster.start_ray(tmp_path)


HOLD = """
import subprocess, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from megarl.system import private_folder
private_folder.PLACE = Path(sys.argv[1])
with private_folder.run_folder() as folder:
    memory = shared_memory.SharedMemory(private_folder.shared_name(), True, 8).name
    resource_tracker.unregister(f"/{memory}", "shared_memory")  # as if it were killed too
    orphan = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & echo $!"], stdout=subprocess.PIPE)
    pid = orphan.stdout.readline().decode().strip()
    print(folder, memory, pid, tempfile.mkdtemp(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["killed", "well"])
def test_what_a_run_leaves_is_removed(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, shared memory and a process without parent: by the run, or by the next one."""
    monkeypatch.setattr(private_folder, "PLACE", tmp_path)
    long = tmp_path / ("x" * 117)
    long.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    settings = os.environ | {"TMPDIR": str(long)}
    with subprocess.Popen(command, -1, None, -1, -1, text=True, env=settings) as process:
        assert process.stdout is not None and process.stdin is not None
        folder, memory, orphan, file = process.stdout.readline().split()
        theirs, shared = Path(folder), Path("/dev/shm", memory)
        mine = private_folder.PrivateFolder()
        assert theirs.stat().st_mode & 0o777 == 0o700 and mine.path != theirs
        assert Path(file).parent == theirs / "tmp", "not TMPDIR, whose path may be too long"
        assert shared.exists() and int(orphan) in marked_processes(folder)
        if ends == "killed":
            process.kill()
            process.wait(20)
            assert theirs.exists() and shared.exists()
            private_folder.PrivateFolder().remove()
        process.stdin.close()
        process.wait(60)
    assert not theirs.exists() and not shared.exists() and marked_processes(folder) == []
    assert mine.path.is_dir()
    mine.remove()
    assert not mine.path.exists()


def test_only_folders_that_are_surely_of_a_killed_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a living one in which files were replaced, nor one that others could write to, nor what
    a link names, nor another user's.
    """
    monkeypatch.setattr(private_folder, "PLACE", tmp_path)
    living = private_folder.PrivateFolder()
    for entry in living.path.iterdir():
        entry.unlink()
    (living.path / "lock").touch()
    mine, opened, linked, foreign = (tmp_path / f"megarl-7-0123456{n}" for n in "789a")
    victim = tmp_path / "victim"
    for folder in (mine, opened, victim, foreign):
        folder.mkdir(mode=0o700)
        (folder / "lock").touch()
    opened.chmod(0o777)
    linked.symlink_to(victim)
    (mine / "link").symlink_to(victim)
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
    else:
        foreign.chmod(0o770)
    private_folder.PrivateFolder().remove()
    assert not mine.exists()
    assert all((one / "lock").exists() for one in (living.path, opened, linked, victim, foreign))
    living.remove()


LAUNCH = """import os, signal, sys
from pathlib import Path
from megarl.system import private_folder
from megarl.apps.launch.launch_plan import Addresses
from megarl.apps.launch.launch_run import Launcher
private_folder.PLACE = Path(sys.argv[1])
launcher = Launcher([], [], Addresses(state=sys.argv[2]), Path())
launcher._run = lambda: os.kill(os.getpid(), signal.SIGKILL)
launcher.run()
"""


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder, "PLACE", tmp_path)
    state = tmp_path / "megarl-123-0123abcd"
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), str(state)]
    assert subprocess.run(command, timeout=120).returncode == -9 and state.is_dir()
    private_folder.PrivateFolder().remove()
    assert not state.exists()


def test_a_call_without_a_cluster_starts_none() -> None:
    """Threads may outlive the run's Ray, and a Ray that nobody owns is ended by nobody."""
    with pytest.raises(ray.exceptions.RaySystemError, match="Ray has not been started yet"):
        ray.put(1)
    assert not ray.is_initialized()
