"""Rollouts of many turns on a real vLLM engine: are they exact, and does the engine stay busy?

    python tools/bench/turns.py exact RECIPE.yaml [--rollouts 500]
    python tools/bench/turns.py agents MODEL [--sessions 2000] [--turns 8] [--tokens 16]
                                             [--minutes 0]

`exact` generates rollouts of a recipe with a session, tools or an agent, each from another prompt.
It compares each turn of the model, with what it had read, token by token with what the engine
itself recorded of each request; the rows that would be trained on with the turns; and the engine's
log-probs with those of the model in float32 through transformers.

`agents` opens many sessions at once in one worker process with the gateway; another process makes
their calls by HTTP. Reported are the share of the time in which the engine's process computed (its
CPU time over wall time, from the first request to the last), the CPU time that the worker needs for
a call, and the memory of this process, which holds what the rollout service holds. With `--minutes`
the sessions are opened again and again for so long.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
from common import Args, engine_arguments, listed, run_tool, table
from launch_ranks import share_of

from megarl.apps.runs.command_checks import check_rollout
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.vllm_engine import Engine
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.rollout.attempts import Attempts, path
from megarl.rollout.requests import EnginePool
from megarl.settings.config import RunConfig, read
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.rl import longest_request
from megarl.settings.rollout import EngineConfig, RolloutConfig
from megarl.system.process_env import prepare_environment
from megarl.types import Group, Prompt, Rollout, Samples, Segment

AGENT = """
import asyncio, json

async def calls(prompt, client):
    reader, writer = await asyncio.open_connection("127.0.0.1", {port})
    writer.write(json.dumps([client.base_url.port, client.api_key]).encode() + b"\\n")
    done = await reader.readline()
    writer.close()
    return float(done == b"done\\n")
"""

CALLER = """
import asyncio, json, sys

async def ask(reader, writer, key, chat):
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    head = "\\r\\n".join([*lines, f"content-length: {len(body)}", "", ""])
    writer.write(head.encode() + body)
    said = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
    length = int(said.split("content-length:")[1].split("\\r\\n")[0])
    return json.loads(await reader.readexactly(length))["choices"][0]["message"]

async def serve(asked, answer):
    port, key = json.loads(await asked.readline())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chat = [{"role": "user", "content": "1+2"}]
    for _ in range(int(sys.argv[1])):
        chat += [await ask(reader, writer, key, chat), {"role": "user", "content": "3"}]
    writer.close()
    answer.write(b"done\\n")
    answer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


OPTIONS = {
    "kind": (str, "what is measured", ("exact", "agents")),
    "source": (str, "a recipe for exact, a model's folder for agents"),
    "--rollouts": (500, "exact: rollouts"),
    "--sessions": (2000, "agents: sessions at once"),
    "--turns": (8, "agents: turns of a session"),
    "--tokens": (16, "agents: tokens of a turn"),
    "--minutes": (0.0, "agents: for so long again and again"),
}


class RecordedEngine(Engine):
    """An engine that keeps vLLM's own account of each request: (prompt tokens, generated tokens,
    their log-probs).
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.record: list[tuple[list[int], list[int], list[float]]] = []
        self.keeps = True

    async def _run(self, prompt: dict[str, Any], sampling: Any, kind: str) -> Any:
        final = await super()._run(prompt, sampling, kind)
        if self.keeps and kind == "sample":
            out, given = final.outputs[0], list(final.prompt_token_ids or ())
            self.record.append((given, list(out.token_ids), list(out.logprobs.logprobs)))
        return final


class Here:
    """An engine of this process, as the rollout service sees it. `tokens`: of each turn, whatever
    the rollout has left; 0 for as many as it is asked for.
    """

    def __init__(self, engine: RecordedEngine, tokens: int = 0) -> None:
        self._engine, self._tokens = engine, tokens

    async def generate(
        self, prompt_ids: np.ndarray, segments: Sequence[Segment], **asked: Any
    ) -> Segment:
        asked["max_tokens"] = self._tokens or asked["max_tokens"]
        earlier = [part.arrays.token_ids for part in segments]
        token_ids = np.concatenate([prompt_ids, *earlier]).tolist()
        made = await self._engine.generate(token_ids, **asked)
        return replace(made, finish="stop") if self._tokens else made

    async def paused_s(self, last_s: float) -> float:
        return await self._engine.paused_s(last_s)


# ------------------------------------------------------------------------------------------- exact


async def exact(config: RunConfig, inputs: Any, count: int) -> dict[str, Any]:
    """Generate `count` rollouts and compare them with the engine's record."""
    arguments = engine_arguments(
        model=config.model.path,
        config=config.rollout.engine,
        max_tokens=longest_request(config),
        stop_token_ids=inputs.stop_token_ids,
        seed=config.seed,
        sampling=config.rollout.sampling,
        tokenizer=config.model.tokenizer or config.model.path,
    )
    engine = RecordedEngine(load=True, **arguments)
    codec = Codec.of(inputs.tokenizer, whole=config.environment.needs_template)
    settings = config.environment.within(config.rollout.max_new_tokens, 2**20)
    environment = Environment(settings, codec)
    await asyncio.gather(engine.start(), environment.start())
    try:
        pool = EnginePool([Here(engine)], config.rollout)
        limits = config.rollout.max_new_tokens, config.environment.max_turns, 2**20
        attempts = Attempts(pool, environment, config.seed, *limits)
        prompts = [inputs.prompts.at(ordinal) for ordinal in range(count)]
        found = await asyncio.gather(
            *(attempts.attempt(one, n, 0, temperature=1.0) for n, one in enumerate(prompts))
        )
    finally:
        await environment.close()
        await engine.stop()
    groups = [
        Group(n, prompt, [Rollout(0, 0, *one, 0)])
        for n, (prompt, one) in enumerate(zip(prompts, found, strict=True))
    ]
    (rows,) = share_of(groups, 2**20).samples  # that one rank would train on
    asked = [
        turns_of(group.prompt, segments) for group, (segments, _) in zip(groups, found, strict=True)
    ]
    worst = max(differences(config.model.path, asked))
    return {
        "rollouts": count,
        "requests": len(engine.record),
        "turns_mean": float(np.mean([sum(p.kind == "model" for p in s) for s, _ in found])),
        "with_tools_or_observations": sum(len(s) > 1 for s, _ in found),
        "failures": sum(bool(verdict.failure) for _, verdict in found),
        "rollouts_that_branch": sum(any(p.follows is not None for p in s[1:]) for s, _ in found),
        "rows_that_differ": wrong_rows(rows, groups),
        "turns_that_differ": wrong_turns(asked, engine.record),
        "largest_logprob_difference": worst,
    }


Turn = tuple[list[int], list[int], np.ndarray]
"""A turn of the model: what it had read [P], and what it sampled [T], with the log-probs [T]."""


def turns_of(prompt: Prompt, segments: Sequence[Segment]) -> list[Turn]:
    """The model's turns in a rollout, each with all that it continues."""
    found = []
    for number, part in enumerate(segments):
        if part.kind == "model":
            *earlier, _ = path(segments[: number + 1])
            begins_anew = bool(earlier) and earlier[0].follows == -1
            given = [] if begins_anew else list(prompt.token_ids)
            for one in earlier:
                given += one.arrays.token_ids.tolist()
            found.append((given, part.arrays.token_ids.tolist(), part.arrays.logprobs))
    return found


def wrong_turns(
    rollouts: Sequence[Sequence[Turn]], record: list[tuple[list[int], list[int], list[float]]]
) -> int:
    """Number of turns that are not what the engine recorded: each must be one request, with the
    same prompt, tokens and log-probs. A request is used once, and all are used.
    """
    asked = Counter(
        (tuple(given), tuple(made), np.float32(logprobs).tobytes())
        for given, made, logprobs in record
    )
    wrong = 0
    for given, made, logprobs in (turn for turns in rollouts for turn in turns):
        key = tuple(given), tuple(made), np.float32(logprobs).tobytes()
        wrong += asked[key] == 0
        asked[key] -= asked[key] > 0
    return wrong + asked.total()


def wrong_rows(rows: Samples, groups: Sequence[Group]) -> int:
    """Number of rows that do not have each token of their rollout once, in the order of time, with
    those of the model, and no others, to be trained on.
    """
    wrong = 0
    for n, group in enumerate(groups):
        (rollout,) = group.rollouts
        begins_anew = rollout.segments[0].follows == -1
        tokens = [] if begins_anew else list(group.prompt.token_ids)
        mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
        for part in rollout.segments:
            tokens += part.arrays.token_ids.tolist()
            mask += [part.kind == "model"] * part.num_tokens
            logprobs += part.arrays.logprobs.tolist()
        row = slice(rows.offsets[n], rows.offsets[n + 1])
        wrong += not (
            rows.token_ids[row].tolist() == tokens
            and rows.mask[row].tolist() == mask
            and rows.engine_logprobs[row].tolist() == logprobs
        )
    return wrong


def differences(model: str, rollouts: Sequence[Sequence[Turn]]) -> list[float]:
    """For each turn, the largest difference between the engine's log-probs and the model's."""
    import torch
    import transformers

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for given, made, logprobs in (turn for turns in rollouts for turn in turns):
        tokens = torch.tensor([*given, *made])
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, len(given) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, tokens[len(given) :, None])[:, 0]
        found.append(float((own - torch.from_numpy(logprobs)).abs().max()))
    return found


# ------------------------------------------------------------------------------------------ agents


@contextmanager
def caller(turns: int) -> Iterator[int]:
    """A process that makes the calls of agents; its port."""
    words = [sys.executable, "-c", CALLER, str(turns)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def under_load(args: Args, port: int) -> dict[str, Any]:
    """Many agents at once. `port`: of the process that makes their calls."""
    code, longest = args.work / "own.py", 32 + args.turns * (args.tokens + 8)
    code.write_text(AGENT.format(port=port))
    config = EngineConfig(dtype="float32", kv_cache_gib=1, num_threads=1)
    arguments = engine_arguments(model=args.source, config=config, max_tokens=longest)
    engine = RecordedEngine(load=True, **arguments)
    engine.keeps = False
    agent: Any = {"function": f"{code}:calls", "time_limit_s": 600.0, "context_tokens": longest}
    config = EnvironmentConfig(agent=agent, require_stop=False, start_limit_s=300.0)
    environment = Environment(config, Codec.of(load_tokenizer(args.source), whole=True))
    own = set(psutil.Process().children())
    await engine.start()
    of_engine = [
        one
        for child in set(psutil.Process().children()) - own
        for one in [child, *child.children(recursive=True)]
    ]
    own = set(psutil.Process().children())
    await environment.start()
    workers = [*set(psutil.Process().children()) - own]
    pool = EnginePool([Here(engine, args.tokens)], RolloutConfig(request_timeout_s=600.0))
    attempts = Attempts(pool, environment, 1, longest)
    rounds = []
    until = time.monotonic() + 60 * args.minutes
    try:
        while not rounds or time.monotonic() < until:
            begun, before = time.monotonic(), [sum(one.cpu_times()[:2]) for one in of_engine]
            worker_before = sum(sum(one.cpu_times()[:2]) for one in workers)
            prompts = (Prompt(n, "", [2 + n % 9, 3, 4], "") for n in range(args.sessions))
            jobs = (
                attempts.attempt(one, len(rounds), n, temperature=1.0)
                for n, one in enumerate(prompts)
            )
            done = await asyncio.gather(*jobs)
            seconds = time.monotonic() - begun
            after = [sum(one.cpu_times()[:2]) for one in of_engine]
            computed = max(late - early for early, late in zip(before, after, strict=True))
            assert all(not verdict.failure and verdict.reward == 1.0 for _, verdict in done)
            row = {"seconds": seconds, "engine_busy": computed / seconds}
            row["turns_per_s"] = args.sessions * args.turns / seconds
            used = sum(sum(one.cpu_times()[:2]) for one in workers) - worker_before
            row["worker_ms_per_turn"] = 1000 * used / (args.sessions * args.turns)
            row["worker_mib"] = sum(one.memory_info().rss for one in workers) / 2**20
            rounds.append(row | {"memory_mib": psutil.Process().memory_info().rss / 2**20})
            del done
    finally:
        await environment.close()
        await engine.stop()
    return {"rounds": rounds}


def measure(args: Args) -> dict[str, Any]:
    """What is asked for."""
    prepare_environment(1)
    if args.kind == "exact":
        config = read(RunConfig, args.source, [])
        return asyncio.run(exact(config, check_rollout(config), args.rollouts))
    with caller(args.turns) as port:
        return asyncio.run(under_load(args, port))


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines."""
    if "rounds" in result:
        columns = "seconds .1f; turns/s=turns_per_s ,.0f"
        columns += "; engine computes=engine_busy .2f; memory MiB=memory_mib .1f"
        columns += "; worker's ms/turn=worker_ms_per_turn .2f; worker's MiB=worker_mib .1f"
        yield from table(result["rounds"], columns)
    else:
        yield from listed(result)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
