"""The process of an agent: started for one rollout in an empty folder, kept from writing elsewhere
and from all servers but the gateway, ended with all that it has started.

    await run_agent_program(...) -> its answer, or a score
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megarl.environments.descendants import end_overseen
from megarl.environments.isolation import has_filters, landlock_version
from megarl.environments.session import Answer
from megarl.settings.schema import require
from megarl.system.files import in_thread, remove_folder
from megarl.system.private_folder import MARK
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[3]  # where the package megarl lies
MOST_OUTPUT = 2**20
"""Bytes of an agent's output that are kept: of its standard output the last, which hold the
answer."""
ERROR_BYTES = 2000
NETWORK_SINCE = 4
"""First version of Landlock that can restrict TCP connections (Linux 6.7)."""
STARTER = """import json, os, resource, sys
sys.path.insert(0, sys.argv[1])
from megarl.environments.descendants import oversee
from megarl.environments.isolation import cover, enter_own_domain, filter_calls, has_filters
parent, port, folder, *command = sys.argv[2:]
def begin():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]  # a lower one is kept
    most = min(hard if hard >= 0 else 2**30, 2**30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if port == "0":
        enter_own_domain()
    elif port != "none":
        with open(folder + "/hidden.json") as file:
            hidden = json.load(file)
        os.remove(file.name)
        cover(hidden, folder)
        os.chdir(folder + "/work")
        enter_own_domain(connects=int(port), folder=folder, hidden=hidden)
    if port != "none" and has_filters():
        filter_calls(alone=port != "0")
    os.execvp(command[0], command)
oversee(int(parent), begin)"""
"""Program that starts the agent and stays its parent, out of its reach. Files of the agent have at
most 1 GiB each. Arguments: the folder of megarl's package, the id of the parent process, the only
port that the agent may connect to (0: no rules of networks and files; "none": no domain), the
agent's folder, in which hidden.json lists what it cannot read, and the agent's command."""
FOLDER = "megarl_agent_"
"""How the names of the agents' folders begin."""


def _absolute(word: str) -> str:
    """The absolute path of a file that is there; any other word as it is. Links are kept: the
    Python of a virtual environment is one.
    """
    try:
        path = Path(word).expanduser()
        return str(path.absolute()) if path.exists() else word
    except (OSError, RuntimeError):  # it is too long for a name, or there is no such user
        return word


def check_command(command: Sequence[str], *, network: str, isolate: bool) -> list[str]:
    """The command of `environment.agent`, ready to be run in another folder: `python` is this
    Python, and words that name files are absolute. Raises `ValueError` if there is no such program,
    or the kernel cannot keep it from the network.
    """
    words = [
        word if before in ("-m", "-c") else _absolute(word)
        for before, word in zip(["", *command], command, strict=False)
    ]
    if command[0] in ("python", "python3"):
        words[0] = sys.executable
    require(
        shutil.which(words[0]) is not None,
        f"environment.agent.command begins with '{command[0]}', and there is no such program; set"
        " one that is on the PATH, or its path",
    )
    scripts = [word for word in command[1:2] if word.endswith((".py", ".sh"))]
    require(
        all(Path(word).expanduser().exists() for word in scripts),
        f"environment.agent.command names {', '.join(scripts)}, but there is no such file; set the"
        " path of one there is",
    )
    require(
        network == "open" or not isolate or (landlock_version() >= NETWORK_SINCE and has_filters()),
        "environment.agent.network is 'gateway', but this kernel cannot keep a program from other"
        " connections (Linux 6.7 or newer, with Landlock and seccomp); set"
        " environment.agent.network to 'open'",
    )
    return words


async def run_agent_program(
    command: Sequence[str],
    prompt: Prompt,
    columns: Sequence[str],
    variables: Mapping[str, str],
    port: str,
    *,
    scores: bool = True,
    hidden: Sequence[str] = (),
) -> Any:
    """Run an agent's program once and return what it answers: an `Answer` with its standard output
    or, if it wrote JSON to the file that MEGARL_RESULT names, that value, a score. Ends the program
    when cancelled. Raises `RuntimeError` if it ends with an error.

    `command`: as `check_command` returns it. `columns`: of the data row that it may see.
    `variables`: further environment variables. `port`: see `STARTER`. `scores`: whether it may
    score itself; otherwise no such file is named, or read. `hidden`: paths that it cannot read
    where `port` is a port, besides the folders of other rollouts.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER)).resolve()
    try:
        work, temporary = folder / "work", folder / "tmp"
        work.mkdir()
        temporary.mkdir()
        fields = {"prompt": prompt.text} | {name: prompt.fields.get(name) for name in columns}
        (folder / "prompt.json").write_text(json.dumps(fields, default=str))
        environment = {
            "MEGARL_PROMPT": str(folder / "prompt.json"),
            "HOME": str(work),
            "PWD": str(work),  # opencode 1.18 works in the folder that this names
            "TMPDIR": str(temporary),
        }
        if scores:
            environment["MEGARL_RESULT"] = str(folder / "result.json")
        words = [word.replace("{prompt}", prompt.text) for word in command]
        unseen = [f"{folder.parent / FOLDER}*", *map(os.path.realpath, hidden)]
        if MARK in os.environ:  # folders of later rollouts, and sockets of the run
            unseen.append(str(folder.parent))
        if port not in ("0", "none"):  # a file, since the words of a command are limited
            (folder / "hidden.json").write_text(json.dumps(unseen))
        starter = [sys.executable, "-PS", "-c", STARTER, str(ROOT), str(os.getpid()), port]
        with (folder / "stdout").open("w+b") as output, (folder / "stderr").open("w+b") as errors:
            process = subprocess.Popen(
                [*starter, str(folder), *words],
                cwd=work,
                env=dict(os.environ) | environment | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                await _ended(process)
            finally:
                await asyncio.to_thread(end_overseen, process)
            if code := process.returncode:
                last = _last(errors, ERROR_BYTES).splitlines()[-1:]
                how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
                raise RuntimeError(
                    f"the agent ended with {how}{''.join(f': {line}' for line in last)}"
                )
            return _answer(folder / "result.json" if scores else None, _last(output, MOST_OUTPUT))
    finally:
        # Of millions of files the rest is removed while the rollout goes on.
        removed = in_thread("removal", functools.partial(remove_folder, folder))
        await asyncio.wait([asyncio.wrap_future(removed)], timeout=1.0)


def _answer(result: Path | None, text: str) -> Any:
    """What an agent that has ended without an error answers: the score in the file `result`, if it
    may have one and has written it, otherwise what it printed.
    """
    answer = Answer(text)
    if result is None:
        return answer
    try:
        # The agent may have put anything there: a pipe, a link to a device, an endless file.
        descriptor = os.open(result, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no file")
            return json.loads(file.read(MOST_OUTPUT))
    except FileNotFoundError:
        return answer
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"the agent's file MEGARL_RESULT is no JSON: {error}") from None


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, without reaping it. asyncio's own wait, up to Python 3.12,
    also waits for the end of its output, which a process that it has left behind may hold open.
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _last(file: BinaryIO, most: int) -> str:
    """The last `most` bytes of a file, as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read(most).decode(errors="replace").strip()
