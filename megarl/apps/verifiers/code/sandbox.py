"""A sandbox for programs that a model wrote: the verifier's end of it.

    Sandbox(CodeConfig) --run(job)--> results of tests

One server process for each sandbox builds the protection once and runs job after job in fresh
processes; `megarl.apps.verifiers.code.sandbox_child` says how. It ends with this process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.apps.verifiers.code import program_server

if TYPE_CHECKING:
    from megarl.environments.code_config import CodeConfig

LENGTH = struct.Struct("!Q")
START_WITHIN_S = 30.0
LATE_S = 6.0
"""Seconds beyond a job's own limit until the server is given up; it keeps the limit itself."""
ROOT = Path(__file__).resolve().parents[4]  # where the package megarl lies
CHILD = """import sys
sys.path.append(sys.argv[1])
from megarl.apps.verifiers.code.sandbox_child import main
main(int(sys.argv[2]))"""
PROGRAM = """import builtins, sys
builtins.exit = builtins.quit = sys.exit
del sys.argv[0], builtins
exec(compile(open(sys.argv[0], "rb").read(), sys.argv[0], "exec"))"""
"""Runs a program file as `__main__`. Python without site packages starts in a third of the time,
but lacks `exit` and `quit`."""
SYSTEM = (
    *("/bin", "/sbin", "/usr", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
"""What every program may read."""


class SandboxError(RuntimeError):
    """Raised if a job could not be run, through no fault of the program."""


class Sandbox:
    """Runs programs under the protection of a `CodeConfig`."""

    protection: str
    """The protection that holds, such as `namespaces`."""

    def __init__(self, config: CodeConfig) -> None:
        """Start the server process. Raises `ValueError` if the kernel refuses the protection that
        `config.sandbox` asks for, or a word of the interpreter is not found.
        """
        self._config = config
        self.command, self.server = commands(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._start()

    def _start(self) -> None:
        config = self._config
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [_python(), "-I", "-S", "-c", CHILD, str(ROOT), str(os.getpid())],
                stdin=theirs.fileno(),
                env={},
                cwd="/",
            )
        names = ("memory_mib", "processes", "file_mib", "output_kib")
        setup = {
            "sandbox": "namespaces" if config.sandbox == "auto" else config.sandbox,
            "command": self.command,
            "visible": _visible(config, [*self.command, *self.server]),
            "limits": {name: getattr(config, name) for name in names},
        }
        try:
            said = self._ask(setup, START_WITHIN_S)
        except SandboxError as error:
            said = {"refused": str(error)}
        if "refused" in said:
            self.close()
            raise ValueError(f"environment.code.sandbox is '{config.sandbox}': {said['refused']}")
        self.protection = said["protection"]

    def run(
        self,
        kind: str,
        program: str,
        tests: list[Any],
        *,
        total_s: float,
        go_on: bool = True,
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Run tests of a program within `total_s` seconds. Returns what
        `megarl.apps.verifiers.code.sandbox_jobs.run_job` does, whose arguments these are. Raises
        `SandboxError`.
        """
        if self._process is None:
            self._start()
        job = {
            "kind": kind,
            "program": program,
            "tests": tests,
            "command": self.command,
            "server": self.server,
            "limit_s": self._config.time_limit_s,
            "total_s": total_s,
            "go_on": go_on,
            **more,
        }
        said = self._ask(job, total_s + LATE_S)
        if "results" not in said:
            raise SandboxError(f"the sandbox failed: {said.get('failed', 'no answer')}")
        return said["results"]

    def _ask(self, message: dict[str, Any], within_s: float) -> dict[str, Any]:
        assert self._channel is not None
        body = json.dumps(message).encode()
        deadline = time.monotonic() + within_s
        try:
            self._channel.settimeout(within_s)
            self._channel.sendall(LENGTH.pack(len(body)) + body)
            return json.loads(self._exactly(LENGTH.unpack(self._exactly(8, deadline))[0], deadline))
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox's server process does not answer: {error}") from None

    def _exactly(self, size: int, deadline: float) -> bytes:
        assert self._channel is not None
        parts = bytearray()
        while len(parts) < size:
            self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._channel.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError("it has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Kill the server process and with it everything in the sandbox. May be called twice."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()

    def __del__(self) -> None:
        if hasattr(self, "_channel"):  # the interpreter's command may have been refused
            self.close()


def _python() -> str:
    """Path of the running Python itself, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def commands(config: CodeConfig) -> tuple[list[str], list[str]]:
    """(command that runs a program, command that serves its functions); the program's path is to be
    added to either. Raises `ValueError` if the interpreter is not found.
    """
    gone = [path for path in config.visible if not os.path.exists(path)]
    if gone:
        raise ValueError(
            f"environment.code.visible names {gone[0]}, which does not exist; set it to a folder or"
            " file, or leave it out"
        )
    source = Path(program_server.__file__).read_text()
    if not config.interpreter:
        python = [_python(), "-I", "-S", "-c"]
        return [*python, PROGRAM], [*python, source]
    first, *rest = config.interpreter
    found = sys.executable if first == "python" else shutil.which(first)
    if found is None:
        raise ValueError(
            f"environment.code.interpreter begins with '{first}', which is no program on this"
            " machine; set it to a command that is"
        )
    missing = [word for word in rest if word.endswith(".py") and not Path(word).exists()]
    if missing:
        raise ValueError(
            f"environment.code.interpreter names the file {missing[0]}, which does not exist; set"
            " it to the path of a file"
        )
    words = [str(Path(word).resolve()) if Path(word).exists() else word for word in rest]
    command = [os.path.abspath(found), *words]
    return command, [*command, "-c", source]


def _visible(config: CodeConfig, words: list[str]) -> list[str]:
    """Paths that programs may read: of the system, the interpreter, and `config.visible`."""
    paths = [*SYSTEM, sys.base_prefix, *config.visible]
    paths += [word for word in words if word.startswith("/") and os.path.exists(word)]
    if config.interpreter and words[0] == os.path.abspath(sys.executable):
        paths.append(sys.prefix)
    found: dict[str, None] = {}
    for path in paths:
        path = os.path.abspath(path)
        for _ in range(40):  # each link on the way to the file, and the file
            found[path] = None
            found[os.path.join(os.path.realpath(os.path.dirname(path)), Path(path).name)] = None
            if not os.path.islink(path):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return [path for path in found if path != "/" and os.path.lexists(path)]
