"""A fork server for tests: it imports torch, DeepSpeed, Ray and vLLM once, and forks the processes of
`megarl` commands and Ray's workers, which otherwise spend half of a short run on these imports.

    use()                      start the server of this test process, unless it runs; from now on
                               workers of a Ray that this process starts are forked by the server
    [*FORKED, "-m", "megarl"]  a command line that does what [python, "-m", "megarl"] does

Such a command is a proxy, which asks the server for a fork, passes signals on, and ends as the fork
ends. If the proxy is killed, the server kills the fork. Ranks of torchrun, nodes of `ray start` and
what they start are not forked: they import their packages themselves, as outside of tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

ADDRESS = "MEGARL_TEST_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
MARK = "MEGARL_TEST_RUN"
"""Environment variable by which the processes of a command are found again."""
UNMARKED = "0" * 32
"""The mark of the server, as long as those of commands, which replace it in forks."""
WORKER = "default_worker.py"
"""What Ray runs in a worker process."""
FORKED = [sys.executable, "-IS", __file__]
"""The command line of the proxy, in place of `python`."""
MODULES = ("megarl.trainer.context", "megarl.cluster.ray_cluster", "megarl.rollout.core_imports")
MODULES += ("megarl.loops.rl", "vllm.v1.engine.async_llm", "ray._private.workers.default_worker")


# --------------------------------------------------------------------------------------- the proxy


def ask(words: list[str]) -> None:
    """Have the server fork a process that does what `python WORDS` does; end as the fork ends."""
    import ctypes

    if os.path.basename(words[0]) == WORKER:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its raylet
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        address = os.environ[ADDRESS]
        try:
            line.connect(address)
        except OSError as error:
            sys.exit(f"the fork server of the tests is gone ({error}); see {address}.log")
        job = json.dumps([words, os.getcwd(), dict(os.environ)])
        socket.send_fds(line, [job.encode()], [0, 1, 2])
        pid = int(line.recv(100))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(line.recv(100) or signal.SIGKILL)  # nothing, where the server was killed
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# -------------------------------------------------------------------------------------- the server


def serve(listener: socket.socket) -> list[str]:
    """Fork a process for every proxy that connects, until the test process ends. Returns only in a
    fork: the words of its command.
    """
    import selectors
    import shutil

    ours, woken = socket.socketpair()
    for end in (ours, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lines: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        for one in (listener, ours, sys.stdin):
            selector.register(one, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:  # the test process has ended
                    for pid in lines.values():
                        os.kill(pid, signal.SIGKILL)
                    shutil.rmtree(Path(listener.getsockname()).parent)
                    os._exit(0)
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    told, files, _, _ = socket.recv_fds(line, 2**20, 3)
                    pid = os.fork()
                    if pid == 0:
                        for end in (listener, ours, woken, line, *lines):
                            end.close()
                        words, folder, environment = json.loads(told)
                        become(folder, environment, files)
                        return words
                    for file in files:
                        os.close(file)
                    line.send(str(pid).encode())
                    lines[line] = pid
                    selector.register(line, selectors.EVENT_READ)
                elif key.fileobj is ours:
                    ours.recv(4096)
                elif key.fileobj in lines:  # its proxy was killed
                    line = key.fileobj
                    assert isinstance(line, socket.socket)
                    os.kill(lines[line], signal.SIGKILL)
                    selector.unregister(line)
            while lines:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                (line,) = [one for one, its in lines.items() if its == pid]
                del lines[line]
                if line in selector.get_map():
                    selector.unregister(line)
                    line.send(str(status).encode())
                line.close()


def become(folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Give this fork the working folder, environment variables and standard streams of its proxy,
    and a session of its own.
    """
    import random

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    mark(environment.get(MARK, UNMARKED))
    os.environ.clear()
    os.environ.update(environment)
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [part for part in path if part and part not in sys.path]
    random.seed()


def mark(value: str) -> None:
    """Write `value` over the mark in the environment that /proc shows of this process, which stays
    that of the server otherwise.
    """
    import ctypes

    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    place = ctypes.string_at(begin, end - begin).find(f"{MARK}=".encode())
    assert place >= 0 and len(value) == len(UNMARKED)
    ctypes.memmove(begin + place + len(MARK) + 1, value.encode(), len(value))


def fork_core_server() -> None:
    """Make a fork of this process the server of its `multiprocessing.forkserver`, from which vLLM's
    engine core is forked. Call it before the process has threads.
    """
    from multiprocessing import connection, forkserver

    server = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")  # pyright: ignore
    listener.bind(address)
    listener.listen()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        forkserver.main(listener.fileno(), reads, [])
        os._exit(0)
    os.close(reads)
    listener.close()
    server._forkserver_address, server._forkserver_alive_fd = address, writes
    server._forkserver_pid = pid


def run(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    import runpy

    if words[0] == "-m":
        sys.argv[:], sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if Path(words[0]).name == WORKER:
        ours = ("--language=", "--serialized-runtime-env-context=")
        words = [word for word in words if not word.startswith(ours)]
        fork_core_server()
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


# --------------------------------------------------------------------------------- the test process


def use() -> None:
    """Start the server, unless it runs, and have it fork the workers of a Ray that this process
    starts.
    """
    if ADDRESS not in os.environ:
        start_server()
    workers_from_server()


def workers_from_server() -> None:
    """Have the server fork the workers of a Ray that this process starts."""
    from ray._private import services

    plain = services.start_raylet
    if getattr(plain, "is_ours", False):
        return

    def start_raylet(*arguments: object, **named: object) -> object:
        words = [__file__ if str(one).endswith("/setup_worker.py") else one for one in arguments]
        return plain(*words, **named)  # pyright: ignore

    start_raylet.is_ours = True  # pyright: ignore[reportFunctionMemberAccess]
    services.start_raylet = start_raylet  # pyright: ignore


def start_server() -> None:
    """Start the server of this test process; the first command waits until it has imported."""
    import atexit
    import subprocess
    import tempfile
    from unittest import mock

    from megarl.rollout.engine_core import preload_openmp

    folder = tempfile.mkdtemp(prefix="fork-server-")
    with mock.patch.dict(os.environ):
        preload_openmp()
        environment = {**os.environ, MARK: UNMARKED}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        open(f"{folder}/socket.log", "w") as log,
    ):
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(number)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[number],
        )
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    os.environ[ADDRESS] = f"{folder}/socket"


def main(words: list[str]) -> None:
    """The server, for the words `--serve NUMBER`, its listening socket; otherwise the proxy."""
    if words[0] != "--serve":
        ask(words)
    import importlib

    from megarl.cluster.process_env import prepare_environment
    from megarl.quick_imports import quick_imports

    prepare_environment(1)  # Ray reads its settings when it is imported, these for its workers too
    os.environ |= {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
    with quick_imports():
        for name in MODULES:
            importlib.import_module(name)
    workers_from_server()
    run(serve(socket.socket(fileno=int(words[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
