"""A fork server for tests: it imports torch, DeepSpeed, Ray and vLLM once, and forks the Python
processes of a test, which otherwise spend half of a short run on these imports.

    use(True)    start the server, unless it runs, as it does in workers of xdist; from now on
                 `sys.executable`, here and in the server's forks, is a proxy, which has the server
                 fork a process that does what Python would do
    use(False)   `sys.executable` is Python again
    UNFORKED     added to the environment of a command: nothing is forked for it or for what it
                 starts; nor is it where a test replaces the environment, which then lacks ADDRESS
    below(one)   all processes below the `psutil.Process` one, the forks of proxies too

A proxy passes signals on, and ends as its fork ends. If a proxy is killed, the server kills the
fork. A fork differs from a process that Python has started in this: its parent is the server; sets
of strings have the same order in all forks of a server; its packages know the environment variables
that they read when they are imported from the server. A second server forks the last rank of
torchrun alone, whose sets have another order than those of the other ranks, as outside of tests.
Processes of `multiprocessing` are not forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "MEGARL_TEST_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
LAST = "-of-last-ranks"
"""What the path of the second server's socket ends with."""
PLAIN = "MEGARL_TEST_PLAIN"
"""Environment variable of processes whose Python is not forked."""
UNFORKED = {PLAIN: "1"}
"""Environment of a command that is not forked."""
MARK = "MEGARL_TEST_RUN"
"""Environment variable by which the processes of a command are found again."""
UNMARKED = "0" * 32
"""The mark of the server, as long as those of commands, which replace it in forks."""
WORKER = "default_worker.py"
"""What Ray runs in a worker process."""
PYTHON = sys.executable
"""The real one."""
MODULES = ("megarl.trainer.context", "megarl.rollout.ray_cluster", "megarl.engines.core_imports")
MODULES += ("megarl.run.loop", "vllm.v1.engine.async_llm", "ray._private.workers.default_worker")
MODULES += ("megarl.parallel.torchrun", "deepspeed.runtime.zero.muon.muon_optimizer")
PROXY = """#!/bin/sh
case "$1" in -[BEIPS]*) exec {python} "$@";; esac
[ -z "${plain}" ] && [ -n "${address}" ] || exec {python} "$@"
exec {python} -IS {file} "$@"
"""
"""The proxy's program: `sh` for what is not forked, because it starts at once."""


# --------------------------------------------------------------------------------------- the proxy


def ask(words: list[str]) -> None:
    """Have the server fork a process that does what `python WORDS` does; end as the fork ends."""
    import ctypes

    kernel = ctypes.CDLL(None)
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    is_last = is_rank and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_rank or os.path.basename(words[0]) == WORKER:
        kernel.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with what has started it
    files = [file for file in range(256) if is_inherited(file)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        address = os.environ[ADDRESS] + (LAST if is_last else "")
        try:
            line.connect(address)
        except OSError as error:
            sys.exit(f"the fork server of the tests is gone ({error}); see {address}.log")
        job = json.dumps([words, os.getcwd(), dict(os.environ), files])
        socket.send_fds(line, [job.encode()], files)
        pid = int(line.recv(100))
        kernel.prctl(15, f"fork {pid}".encode())  # PR_SET_NAME, for `below`
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        for file in files:
            if file > 2:
                os.close(file)
        status = int(line.recv(100) or signal.SIGKILL)  # nothing, where the server was killed
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:  # whose default cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def is_inherited(file: int) -> bool:
    """Whether a file of this number was open when this process was started."""
    try:
        return os.get_inheritable(file)
    except OSError:
        return False


# -------------------------------------------------------------------------------------- the server


def serve(listener: socket.socket) -> tuple[list[str], str, dict[str, str], dict[int, int]]:
    """Fork a process for every proxy that connects, until the test process ends. Returns only in a
    fork: the words of its command, its folder, its environment, and {number that a file has to
    have: its number here}.
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
                    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
                    os._exit(0)
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    told, files, _, _ = socket.recv_fds(line, 2**20, 250)
                    pid = os.fork()
                    if pid == 0:
                        for end in (listener, ours, woken, line, *lines):
                            end.close()
                        words, folder, environment, numbers = json.loads(told)
                        return words, folder, environment, dict(zip(numbers, files, strict=True))
                    for file in files:
                        os.close(file)
                    tell(line, pid)
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
                    tell(line, status)
                line.close()


def tell(line: socket.socket, number: int) -> None:
    """Send a number to a proxy, which may have been killed a moment ago."""
    with contextlib.suppress(OSError):
        line.send(str(number).encode())


def become(folder: str, environment: dict[str, str], files: dict[int, int]) -> None:
    """Give this fork the working folder, environment variables and open files of its proxy, and a
    session of its own.
    """
    import fcntl
    import random

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    # Beyond all numbers that they have to have.
    high = {to: fcntl.fcntl(file, fcntl.F_DUPFD, max(files) + 1) for to, file in files.items()}
    for file in files.values():
        os.close(file)
    for to, file in high.items():
        os.dup2(file, to)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    mark(environment.get(MARK, UNMARKED))
    os.environ.clear()
    os.environ.update(environment)
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [part for part in path if part and part not in sys.path]
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
    import types

    sys.orig_argv[:] = [sys.executable, *words]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
        words = words[1:]
    if Path(words[0]).name == WORKER:
        fork_core_server()
    if words[0] == "-m":
        sys.argv[:], sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:], sys.path[0] = ["-c", *words[2:]], ""
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv[:], sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def end_as_python(words: list[str]) -> None:
    """Do what `python WORDS` does, and end this process, but for the search for garbage in all that
    the server has imported, which takes seconds.
    """
    import atexit
    import threading

    code: Any = 1
    try:
        run(words)
        code = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 255)


# --------------------------------------------------------------------------------- the test process


def use(forks: bool) -> None:
    """Whether `sys.executable` of this process is the proxy; its servers are started once."""
    if forks and ADDRESS not in os.environ:
        start_servers()
    sys.executable = proxy() if forks else PYTHON
    if ADDRESS in os.environ:  # megarl puts the folder of `sys.executable` on PATH
        path, ours = os.environ["PATH"].split(os.pathsep), os.path.dirname(proxy())
        os.environ["PATH"] = os.pathsep.join(part for part in path if part != ours)


def proxy() -> str:
    """The proxy's file."""
    return str(Path(os.environ[ADDRESS]).with_name("python"))


def below(process: Any) -> Iterator[Any]:
    """All processes below the `psutil.Process` of a command; forks, too, and what is below them."""
    import psutil

    for one in (process, *process.children(recursive=True)):
        if one != process:
            yield one
        if (name := one.name()).startswith("fork "):
            fork = psutil.Process(int(name[5:]))
            yield fork
            yield from below(fork)


def fork_of(pid: int) -> int:
    """The process id of a command's fork, given that of its proxy, which `subprocess` knows."""
    import time

    while not (name := Path(f"/proc/{pid}/comm").read_text()).startswith("fork "):
        time.sleep(0.01)
    return int(name[5:])


def start_servers() -> None:
    """Start the servers of this test process; their first commands wait until they have imported."""
    import atexit
    import subprocess
    import tempfile
    from unittest import mock

    from megarl.engines.vllm_core import preload_openmp

    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    (folder / "python").write_text(
        PROXY.format(python=PYTHON, plain=PLAIN, address=ADDRESS, file=__file__)
    )
    (folder / "python").chmod(0o755)
    os.environ[ADDRESS] = f"{folder}/socket"
    with mock.patch.dict(os.environ):
        preload_openmp()
        environment = {**os.environ, MARK: UNMARKED}
    for path in (os.environ[ADDRESS], os.environ[ADDRESS] + LAST):
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            open(f"{path}.log", "w") as log,
        ):
            listener.bind(path)
            listener.listen(64)
            number = listener.fileno()
            server = subprocess.Popen(
                [PYTHON, __file__, "--serve", str(number)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[number],
            )
        assert server.stdin is not None
        atexit.register(server.wait)
        atexit.register(server.stdin.close)


def main(words: list[str]) -> None:
    """The server, for the words `--serve NUMBER`, its listening socket; otherwise the proxy."""
    if words[:1] != ["--serve"]:
        ask(words)
    import atexit
    import gc
    import importlib
    import multiprocessing

    from megarl.system.process_env import prepare_environment
    from megarl.system.quick_imports import quick_imports

    prepare_environment(1)  # Ray reads its settings when it is imported, these for its workers too
    os.environ |= {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
    with quick_imports():
        for name in MODULES:
            importlib.import_module(name)
    sys.path.append(str(Path(__file__).parents[1]))  # for programs of tests that import `below`
    multiprocessing.set_executable(PYTHON)  # its processes are not forked
    sys.executable = proxy()
    atexit.unregister(gc.unfreeze)
    words, *its = serve(socket.socket(fileno=int(words[1])))
    become(*its)
    end_as_python(words)


if __name__ == "__main__":
    main(sys.argv[1:])
