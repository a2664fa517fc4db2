"""Environments of `verifiers`, prime-rl's, as a source of prompts and an agent:

    prompts: {source: "verifiers:NAME", arguments: {size: 100, python: ~/verifiers/bin/python}}
    environment: {agent: {function: verifiers}}

verifiers is installed in an environment of its own, since it needs other versions of megarl's
packages. A worker process starts one program there (`verifiers_env`), which plays all its episodes:
to import verifiers takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl.settings.schema import require
from megarl.types import Prompt

PROGRAM = Path(__file__).with_name("verifiers_env.py")
SIZE = 100
"""Number of tasks where the recipe has none."""
ROWS_WITHIN_S = 600.0
"""Seconds in which an environment must have made its tasks."""
MODEL = "policy"
"""Name of the model in the calls."""
MOST_BYTES = 2**22
"""Longest answer of the program."""


def verifiers_rows(name: str, arguments: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """A row for each of the first `limit` tasks, or all (None), of the environment `name`.
    `arguments`: `size` (default 100), `python`, that in which verifiers is installed (default:
    this), and settings of the taskset. Raises `ValueError` if verifiers is missing there, or the
    environment cannot be loaded.
    """
    settings = dict(arguments)
    size, python = settings.pop("size", SIZE), settings.pop("python", sys.executable)
    require(
        type(size) is int and size >= 0,
        f"prompts.arguments.size is {size!r}; set it to a whole number from 0",
    )
    if "/" in (python := str(python)):
        python = str(Path(python).expanduser().absolute())  # not resolved: links are environments
    size = size if limit is None else min(size, limit)
    words = [python, str(PROGRAM), "rows", name, str(size), json.dumps(settings)]
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=ROWS_WITHIN_S)
    except OSError as error:
        raise ValueError(
            f"prompts.arguments.python is '{python}', which cannot be run: {error.strerror}; set"
            " the path of a Python that has verifiers"
        ) from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"verifiers:{name} did not make {size} tasks within {ROWS_WITHIN_S:g} s; lower"
            " prompts.arguments.size"
        ) from None
    lines = run.stderr.strip().splitlines()[-1:] or [f"{python} ended with {run.returncode}"]
    require(run.returncode == 0, lines[0])
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    for row in rows:
        row["verifiers"]["python"] = python
    return rows


class Episodes:
    """Starts `verifiers_env.py play` in one Python, and has it play episodes."""

    def __init__(self, python: str) -> None:
        self._python, self._numbers = python, itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Play one rollout; `request` is the argument of `verifiers_env.episode`. Returns
        {"reward", and each reward and metric}. Raises `RuntimeError` if it fails or the program
        ends. Ends the episode when cancelled.
        """
        async with self._lock:
            if self._process is None:
                pipe = subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *(self._python, str(PROGRAM), "play"),
                    stdin=pipe,
                    stdout=pipe,
                    limit=MOST_BYTES,
                )
                self._reading = asyncio.create_task(self._read(self._process))
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(request | {"id": number})
            reply = await answer
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def _write(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand on the program's answers, to its end."""
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                reply = json.loads(line)
                answer = self._waiting.get(reply["id"])
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        finally:
            # The next episode starts another program, for which none of these wait.
            self._process, left = None, list(self._waiting.values())
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for answer in left:
                if not answer.done():
                    answer.set_result({"error": "the program of verifiers ended; see its output"})
            await process.wait()


_programs: dict[str, Episodes] = {}
"""{path of a Python: its program}"""


async def play_episode(prompt: Prompt, client: Any) -> dict[str, float]:
    """The agent `verifiers`: play the task of a prompt. `client`: an `openai.AsyncOpenAI`, whose
    address and key the environment calls the model with. Returns {reward, and each reward and
    metric by its name}. Raises `RuntimeError` with the environment's error if it fails.
    """
    request: Any = prompt.fields.get("verifiers")
    require(
        isinstance(request, dict),
        f"row {prompt.index} is of no environment of verifiers; set prompts.source to"
        " verifiers:NAME, or environment.agent.function to another",
    )
    program = _programs.setdefault(request["python"], Episodes(request["python"]))
    address = {"url": str(client.base_url), "key": client.api_key, "model": MODEL}
    return await program.play(request | address)
