"""Environments of `verifiers` (PyPI) as programs of an agent. Runs with the Python in whose
environment `verifiers` is installed, which need not be that of megarl: nothing of megarl is
imported.

    PYTHON verifiers_env.py NAME SIZE > prompts.jsonl       the tasks, as rows of prompts
    PYTHON verifiers_env.py                                 one rollout: see `main`

Each rollout is one episode of the environment: its harness, a chat loop of verifiers, calls the
model; the reward is the sum of the environment's own weighted rewards.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import pwd
import sys
from typing import Any

VERSION = "0.4.0"
"""Version of verifiers that this is written for."""
URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""Environment variables with the address of the OpenAI-compatible server and its key."""


def environment(name: str, settings: dict[str, Any]) -> Any:
    """Load the environment of the taskset `name` (the id of an installed one, as `vf-eval` takes
    it) with the `settings` of that taskset. Exits with one line if verifiers is missing or has
    another version.
    """
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        sys.exit(
            f"verifiers {VERSION} is needed, and {found} is installed for {sys.executable}; install"
            f" it: pip install verifiers=={VERSION} uv"
        )
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    # A chat loop on this machine; the default runs code in a sandbox of a service.
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    kind = loaders.env_config_type(name)
    return loaders.load_environment(kind(taskset={"id": name} | settings, agent=agent))


def task_rows(name: str, size: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The first `size` tasks of an environment as rows {prompt: text, answer, verifiers: what
    `episode` needs}. The prompt is shown only: the harness sends the task's own messages.
    """
    found = []
    for number, task in enumerate(environment(name, settings).taskset.take(size)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        told = {"name": name, "number": number, "settings": settings}
        found.append({"prompt": text, "answer": task.data.name or f"{number}", "verifiers": told})
    return found


async def episode(told: dict[str, Any], model: str) -> dict[str, Any]:
    """Run one rollout of the task of a row of `task_rows` against the server at `URL`. Returns
    {reward: sum of the weighted rewards of all traces, and each reward and metric by its name}.
    Raises `RuntimeError` with the environment's error if the rollout failed.
    """
    from verifiers.v1.clients import (  # pyright: ignore[reportMissingImports]
        EvalClientConfig,
        ModelContext,
    )
    from verifiers.v1.env import RunSlot  # pyright: ignore[reportMissingImports]

    loaded = environment(told["name"], told["settings"])
    number = told["number"]
    (task,) = loaded.taskset.skip(number).take(1)
    client = EvalClientConfig(base_url=os.environ[URL], api_key_var=KEY)
    async with loaded.serving():
        done = await loaded.run_slot(RunSlot(task), ModelContext(model=model, client=client))
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    if not done.ok:
        said = errors[-1].message if errors else "no error was given"
        raise RuntimeError(f"{told['name']}, task {number}: {said}")
    named: dict[str, float] = {}
    for trace in done.traces:
        named |= {name: one.score for name, one in trace.rewards.items() if one is not None}
        named |= {name: one for name, one in trace.metrics.items() if one is not None}
    return named | {"reward": sum(trace.reward for trace in done.traces)}


def main(words: list[str]) -> None:
    """Do what the command line asks for. With the arguments `words` = [name of an environment,
    number of its tasks, and maybe its settings as a JSON object], print a row of prompts for each
    task, as JSON lines. Without arguments, run one rollout of the task in the JSON file that the
    environment variable MEGARL_PROMPT names, and write the reward to the file that MEGARL_RESULT
    names. MEGARL_MODEL holds the model's name, "policy" if it is not set.
    """
    # An agent's home folder is a new one; the programs that uv prepares are kept in the user's.
    os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # where uv is
    if words:
        settings = json.loads(words[2]) if len(words) > 2 else {}
        for row in task_rows(words[0], int(words[1]), settings):
            print(json.dumps(row))
        return
    with open(os.environ["MEGARL_PROMPT"]) as file:
        told = json.load(file)["verifiers"]
    found = asyncio.run(episode(told, os.environ.get("MEGARL_MODEL", "policy")))
    with open(os.environ["MEGARL_RESULT"], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
