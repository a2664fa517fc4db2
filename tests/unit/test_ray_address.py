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

from megarl.checks.preflight import check_run
from megarl.cluster import private_folder, private_ray
from megarl.cluster.ray_address import ray_address
from megarl.cluster.ray_cluster import Cluster
from megarl.config import RunConfig
from megarl.data.config import PromptsConfig
from megarl.errors import UserError
from megarl.parallel.ports import free_port
from megarl.trainer.config import ModelConfig

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
        (lambda: check_run(RECIPE, num_ranks=1, on_cpu=True), ValueError),
    ],
    ids=["start", "check"],
)
def test_a_cluster_that_is_gone(
    use: Callable[[], object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(error, match=r"nothing answers there \(Connection refused\); unset RAY_ADD"):
        use()


def test_ray_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["The current node timed out during startup. GCS overloaded.", ""]
    said, folders = list[str](), list[str]()

    def init(**options: object) -> None:
        folder = str(options.pop("_temp_dir"))
        assert options == {"address": "local", "num_cpus": 4} and Path(folder).parent.is_dir()
        folders.append(str(Path(folder).parent))
        if problem := answers.pop(0):
            raise Exception(problem)  # noqa: TRY002 - what Ray raises

    monkeypatch.setattr(private_ray.ray, "init", init)
    monkeypatch.setattr(private_ray.ray, "shutdown", lambda: said.append("shutdown"))
    folder = private_ray.start_ray(num_cpus=4)
    assert answers == [] and said == ["shutdown"] and folders == [str(folder.path)] * 2
    folder.remove()
    answers += ["timed out during startup"] * 3
    with pytest.raises(Exception, match="timed out"):
        private_ray.start_ray(num_cpus=4)
    answers[:] = ["another problem", ""]
    with pytest.raises(Exception, match="another"):
        private_ray.start_ray(num_cpus=4)
    assert not any(Path(one).exists() for one in folders)


HOLD = """
import sys, time
from pathlib import Path
from megarl.cluster import private_folder
private_folder.PLACE = Path(sys.argv[1])
print(private_folder.PrivateFolder().path, flush=True)
time.sleep(600)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder, "PLACE", tmp_path)
    foreign = tmp_path / "megarl-123-of-the-launcher"
    foreign.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        mine = private_folder.PrivateFolder()
        assert theirs.is_dir() and theirs.stat().st_mode & 0o777 == 0o700
        assert mine.path.is_dir() and mine.path != theirs
        process.kill()
        process.wait(20)
        third = private_folder.PrivateFolder()
    assert not theirs.exists() and mine.path.is_dir() and foreign.is_dir()
    for one in (mine, third):
        one.remove()
        assert not one.path.exists()


def test_ray_that_opens_the_folder_to_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()

    def init(*, _temp_dir: str, **options: object) -> None:
        made.append(Path(_temp_dir).parent)
        made[0].chmod(0o711)

    monkeypatch.setattr(private_ray.ray, "init", init)
    with pytest.raises(UserError, match=r"must be of user \d+ with mode 700, .* with mode 711"):
        private_ray.start_ray()
    assert not made[0].exists()


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


def test_a_folder_that_is_kept_is_not_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder, "PLACE", tmp_path)
    kept = private_folder.PrivateFolder(tmp_path / "megarl-77-0123abcd")
    kept.keep()
    private_folder.PrivateFolder().remove()
    assert kept.path.is_dir()


LAUNCH = """import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from megarl.cluster import private_folder
from megarl.cluster.launch_run import Launcher
private_folder.PLACE = Path(sys.argv[1])
launcher = Launcher(SimpleNamespace(addresses=SimpleNamespace(state=sys.argv[2])))
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
