"""Environments of `verifiers` (PyPI, prime-rl's), in a Python in whose environment it is installed.
That need not be megarl's, whose packages have other versions: nothing of megarl is imported here.
`verifiers_agent` starts this file.

    PYTHON verifiers_env.py rows NAME SIZE SETTINGS     the first tasks, as rows of prompts
    PYTHON verifiers_env.py play                        plays episodes: see `serve_episodes`

Each rollout is one episode: a chat loop, or the agent that the environment brings, calls the model;
the reward is the sum of the environment's own weighted rewards.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

VERSION = "0.4.0"
"""Version of verifiers that this is written for."""
MOST_BYTES = 2**22
"""Longest line that is read."""
ERROR_CHARACTERS = 2000


def check_version() -> None:
    """Exit with one line if verifiers is missing or has another version."""
    try:
        installed = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if installed != VERSION:
        sys.exit(
            f"verifiers {installed or 'is not installed'}{installed and ' is installed'} for"
            f" {sys.executable}, and {VERSION} is needed; set prompts.arguments.python to a Python"
            f" that has it, such as that of: python -m venv ~/verifiers && ~/verifiers/bin/pip"
            f" install verifiers=={VERSION} uv"
        )


def environment(name: str, settings: dict[str, Any]) -> Any:
    """Load the environment of the taskset `name` (the id of an installed one, as `vf-eval` takes
    it) with the `settings` of that taskset. Raises what verifiers raises.
    """
    from verifiers.v1 import AgentConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    kind = loaders.env_config_type(name)
    brings_its_own = loaders.default_harness_id(name) == name
    agents: dict[str, Any] = {}
    for role, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            # On this machine; the default is a sandbox of a service.
            agents[role] = {"runtime": {"type": "subprocess"}}
            if field.default.harness is None and not brings_its_own:
                agents[role]["harness"] = {"id": "null"}
    return loaders.load_environment(kind(taskset={"id": name} | settings, **agents))


@functools.lru_cache(16)
def _tasks(name: str, settings: str) -> tuple[Iterator[Any], list[Any]]:
    """(the tasks of an environment that are not yet read, those that are)"""
    return iter(environment(name, json.loads(settings)).taskset), []


def task_of(name: str, settings: dict[str, Any], number: int) -> Any:
    """Task `number`, from 0, of an environment, whose data is read once; None behind the last."""
    unread, tasks = _tasks(name, json.dumps(settings))
    while len(tasks) <= number:
        task = next(unread, None)
        if task is None:
            return None
        tasks.append(task)
    return tasks[number]


def task_rows(name: str, size: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first `size` tasks of an environment as rows {prompt: text, answer, verifiers: what
    `episode` needs}. The prompt is shown only: the episode sends the task's own messages.
    """
    for number in range(size):
        task = task_of(name, settings, number)
        if task is None:
            return
        title, prompt = task.data.name or f"task {number}", task.data.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        fields = {"name": name, "number": number, "settings": settings}
        yield {"prompt": text if prompt else title, "answer": title, "verifiers": fields}


def call_here() -> None:
    """Replace the `null` harness's program by a call from this process where there are no tools: it
    makes one call a turn, and to start it takes more than a second.
    """
    from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
    from verifiers.v1 import ProgramResult  # pyright: ignore[reportMissingImports]
    from verifiers.v1.dialects.chat import (  # pyright: ignore[reportMissingImports]
        message_to_wire,
    )
    from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]
    from verifiers.v1.harnesses.utils.compaction import (  # pyright: ignore[reportMissingImports]
        is_context_overflow,
    )

    launch_program = NullHarness.launch
    # Shared by all episodes: a new client takes tens of milliseconds.
    http = DefaultAsyncHttpxClient(timeout=None, trust_env=False)

    async def launch(
        self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: Any, tool_interception_url: str | None = None,
    ) -> Any:  # fmt: skip
        """`NullHarness.launch` without a process: send the task's messages once to the model at
        `endpoint`, which records the answer. With tools (`mcp_urls`) as before.
        """
        if mcp_urls:
            return await launch_program(
                self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url
            )
        system, prompt = self.resolve_prompt(data)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        chat: Any = [turn if isinstance(turn, dict) else message_to_wire(turn) for turn in turns]
        chat = [{"role": "system", "content": system}, *chat] if system else chat
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http)
        try:
            await client.chat.completions.create(model=ctx.model, messages=chat)
        except APIStatusError as error:  # as in the harness's program, a full context ends it
            if not is_context_overflow(error):
                raise
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def setup(self: Any, runtime: Any) -> None:
        """Nothing: `launch_program` prepares itself."""

    NullHarness.launch, NullHarness.setup = launch, setup


async def episode(request: dict[str, Any]) -> dict[str, float]:
    """Play one rollout. `request`: `verifiers` of a row of `task_rows`, with the address `url` of
    the server of the model, the `key` of the rollout's calls, and the `model`'s name. Returns
    {reward: sum of the weighted rewards of all agents, and each reward and metric by its name}.
    Raises `RuntimeError` with the environment's error if the rollout failed.
    """
    from verifiers.v1.clients import (  # pyright: ignore[reportMissingImports]
        EvalClientConfig,
        ModelContext,
    )
    from verifiers.v1.env import RunSlot  # pyright: ignore[reportMissingImports]

    name, number, settings = request["name"], request["number"], request["settings"]
    # Of its own, since its servers keep a client for each key.
    loaded, task = environment(name, settings), task_of(name, settings, number)
    client = EvalClientConfig(
        base_url=request["url"], api_key_var="NONE", headers={"x-api-key": request["key"]}
    )
    async with loaded.serving():
        context = ModelContext(model=request["model"], client=client)
        done = await loaded.run_slot(RunSlot(task), context)
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    if not done.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was given"
        raise RuntimeError(f"{name}, task {number}: {reason}")
    named: dict[str, float] = {}
    for trace in done.traces:
        named |= {name: item.score for name, item in trace.rewards.items() if item is not None}
        named |= {name: item for name, item in trace.metrics.items() if item is not None}
    return named | {"reward": sum(trace.reward for trace in done.traces)}


async def serve_episodes(answers: TextIO) -> None:
    """Play the episodes that the lines of standard input ask for, all at once, to its end. A line
    is a JSON object, `request` of `episode` with an `id`, which is answered with a line {id,
    result} or {id, error} on `answers`; or {cancel: an id}, which is not answered.
    """
    call_here()
    under_way: dict[int, asyncio.Task[None]] = {}

    async def play(request: dict[str, Any]) -> None:
        try:
            reply: dict[str, Any] = {"result": await episode(request)}
        except Exception as error:
            reply = {
                "error": " ".join(f"{error or type(error).__name__}".split())[:ERROR_CHARACTERS]
            }
        answers.write(json.dumps({"id": request["id"]} | reply) + "\n")

    loop = asyncio.get_running_loop()
    asked = asyncio.StreamReader(MOST_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
    while line := await asked.readline():
        request = json.loads(line)
        if "cancel" in request:
            if task := under_way.get(request["cancel"]):
                task.cancel()
            continue
        number = request["id"]
        under_way[number] = loop.create_task(play(request))
        under_way[number].add_done_callback(lambda _, number=number: under_way.pop(number))
    for task in under_way.values():
        task.cancel()
    await asyncio.gather(*under_way.values(), return_exceptions=True)


def main(words: list[str]) -> None:
    """Do what the command line `words` asks for, without the program's name."""
    check_version()
    adapters = os.path.dirname(os.path.abspath(__file__))
    # Modules beside this file have names of packages that an environment may import.
    sys.path = [folder for folder in sys.path if os.path.abspath(folder) != adapters]
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # where uv is
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an environment prints is no answer
    if words[0] == "play":
        asyncio.run(serve_episodes(answers))
        return
    name, size, settings = words[1], int(words[2]), json.loads(words[3])
    try:
        for row in task_rows(name, size, settings):
            answers.write(f"{json.dumps(row)}\n")
    except Exception as error:
        cause = " ".join(f"{error or type(error).__name__}".split()).rstrip(".")
        sys.exit(
            f"verifiers:{name} cannot be loaded with {words[3]}: {cause}; correct prompts.source or"
            f" prompts.arguments, or install what it needs for {sys.executable}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
