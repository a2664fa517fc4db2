"""A sandbox for programs that a model wrote: the verifier's end of it.

    Sandbox(CodeConfig) --run(kind, program, tests)--> results of the tests

Each sandbox has one server process, which runs the tests of program after program in fresh
processes (`megarl.apps.verifiers.code.sandbox_child`). The server and all that it has started end
with the process that made the sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.apps.verifiers.code import program_server
from megarl.environments.descendants import end_overseen
from megarl.system.files import remove_folder

if TYPE_CHECKING:
    from megarl.settings.code import CodeConfig

START_WITHIN_S = 30.0
ROOT = Path(__file__).resolve().parents[4]  # where the package megarl lies
CHILD = """import sys
sys.path.append(sys.argv[1])
from megarl.apps.verifiers.code.sandbox_child import main
from megarl.environments.descendants import oversee
oversee(int(sys.argv[2]), main)"""
FOLDER = "megarl-program-"
"""Prefix of the temporary folders of programs."""
PROGRAM = """import builtins, sys
builtins.exit = builtins.quit = sys.exit
del sys.argv[0], builtins
exec(compile(open(sys.argv[0], "rb").read(), sys.argv[0], "exec"))"""
"""Python program that runs the program file in its first argument as `__main__`. Python without
site packages starts in a third of the time, but lacks `exit` and `quit`, which are added."""
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
"""Absolute paths of the system that every program may read."""


class Sandbox:
    """Runs programs that a model wrote on their tests (`run`), in child processes of one server
    process, with the isolation and the limits of a `CodeConfig`. Used by one thread; call `close`
    at the end.
    """

    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, config: CodeConfig) -> None:
        """Start the server process, which takes at most `START_WITHIN_S` seconds. Raises
        `ValueError` if the kernel refuses the protection that `config.sandbox` asks for, or the
        interpreter or a path in the recipe is not found.
        """
        self._config = config
        self.command, self.server = commands(config)
        self._start()

    def _start(self) -> None:
        config = self._config
        self._folder = tempfile.mkdtemp(prefix=FOLDER)
        os.chmod(self._folder, 0o711)  # noqa: S103 - programs of root run as another user
        self._process = subprocess.Popen(
            [_python(), "-I", "-S", "-c", CHILD, str(ROOT), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            cwd="/",
        )
        names = ("sandbox", "memory_mib", "processes", "file_mib", "output_kib", "time_limit_s")
        setup = {
            "folder": os.path.realpath(self._folder),
            "command": self.command,
            "server": self.server,
            "visible": _visible(config, [*self.command, *self.server]),
            **{name: getattr(config, name) for name in names},
        }
        try:
            reply = self._ask(setup, START_WITHIN_S)
        except RuntimeError as error:
            reply = {"refused": str(error)}
        if reply["refused"]:
            self.close()
            raise ValueError(f"environment.code.sandbox is '{config.sandbox}': {reply['refused']}")

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
        """Run `tests` of `program` (text) and block until they are done, at most `total_s` seconds
        and a few more. Outputs are not compared with expected ones. `kind`: "stdin" (a test is the
        input text), "calls" (a dict {"call", "args", "named"}) or "asserts" (the text of Python
        statements). `more`: for asserts, `setup` (statements that run first), `names` (functions
        of the program) and `modules` (of Python's library). `go_on`: whether to go on after a test
        whose status is not "ok".

        Returns for each test that was run, in order, a dict. Its "status" is "ok", "failed", or the
        limit that was exceeded: "time", "output" or "memory". After "ok" its "output" is the
        standard output, or the function's reply as JSON text, {"value"} or {"raised", "text"};
        asserts have none. Raises `RuntimeError`, after which the next call starts a new server
        process.
        """
        if self._process is None:
            self._start()
        job = {"kind": kind, "program": program, "tests": tests, "total_s": total_s, "go_on": go_on}
        # The server keeps the limit itself; one that is 6 s late is killed.
        reply = self._ask({**job, **more}, total_s + 6.0)
        if "results" not in reply:
            raise RuntimeError(f"the sandbox failed: {reply.get('failed', 'no answer')}")
        return reply["results"]

    def _ask(self, message: dict[str, Any], within_s: float) -> dict[str, Any]:
        assert self._process and self._process.stdin and self._process.stdout
        deadline = threading.Timer(within_s, self._process.terminate)
        deadline.start()
        try:
            with contextlib.suppress(OSError, ValueError):  # ValueError: half an answer, or none
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline())
        finally:
            deadline.cancel()
        self.close()
        raise RuntimeError(
            "the sandbox's server process does not answer: it has ended, or took more than"
            f" {within_s:g} s"
        )

    def close(self) -> None:
        """End the server process and with it everything in the sandbox. May be called twice; a
        later `run` starts a new server process.
        """
        process, self._process = self._process, None
        if process is not None:
            end_overseen(process)
            process.communicate()
            remove_folder(self._folder)

    def __del__(self) -> None:
        self.close()


def _python() -> str:
    """Path of the running Python itself, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def commands(config: CodeConfig) -> tuple[list[str], list[str]]:
    """The two commands with which a sandbox starts a program, as lists of words, without a shell:
    (one that runs it; one that loads it and then calls its functions as requests in JSON on
    descriptor 3 ask for it, with replies on descriptor 4). The path of the program is to be added
    to either. Raises `ValueError` if the interpreter, or a path in `config`, is not found.
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
    program = sys.executable if first == "python" else shutil.which(first)
    if program is None:
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
    command = [os.path.abspath(program), *words]
    return command, [*command, "-c", source]


def _visible(config: CodeConfig, words: list[str]) -> list[str]:
    """Paths that programs may read: of the system, the interpreter, and `config.visible`."""
    paths = [*SYSTEM, sys.base_prefix, *config.visible]
    paths += [word for word in words if word.startswith("/") and os.path.exists(word)]
    if config.interpreter and words[0] == os.path.abspath(sys.executable):
        paths.append(sys.prefix)
    visible = dict.fromkeys(os.path.realpath(path) for path in paths if os.path.exists(path))
    return [path for path in visible if path != "/"]
