"""What the test fork server forks behaves as a process that Python has started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import fork_server
from support.commands import marked, start

from megarl.system.process_env import prepare_environment

SAYS = """import os, signal, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["SAID"], sys.stdin.read(), "torch" in sys.modules)
if sys.argv[1] != "ends":
    os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("word", "code"), [("ends", 7), ("15", -signal.SIGTERM), ("9", -signal.SIGKILL)]
)
def test_it_has_the_arguments_and_ends_as_it_should(tmp_path: Path, word: str, code: int) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    done = subprocess.run(
        [sys.executable, f"{tmp_path}/says.py", word],
        input="in",
        cwd=tmp_path,
        env=os.environ | {"SAID": "all"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    if word == "ends":  # what was not yet written is lost with a process that is killed
        assert done.stdout == f"__main__ ['ends'] {tmp_path} all in True\n"


def test_it_ends_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
    )
    process, mark = start([sys.executable, f"{tmp_path}/waits.py"])
    with process:
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        assert {process.pid, fork.pid} == {one.pid for one in marked(mark)}
        process.kill()
    psutil.wait_procs([fork], timeout=10)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE


def test_no_later_test_finds_the_proxy() -> None:
    prepare_environment(1)
    assert shutil.which("python") == sys.executable == fork_server.proxy()
    fork_server.use(False)
    assert shutil.which("python") != fork_server.proxy() != sys.executable


def test_a_number_for_a_killed_proxy_is_dropped() -> None:
    """It ended the server, and with it all later runs."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.close()
    fork_server.tell(ours, 7)
    ours.close()
