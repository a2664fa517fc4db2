"""Rewards over HTTP under load: failures and time-outs injected by the server, and one restart.

A server process, which keeps a record of its own of every request, answers batches of responses; a
share of the samples fails, a share of the requests is answered too late. Half-way the server is
killed and started anew. Every response must end with a score or a counted failure, as the server's
record has it.

    python tools/bench/reward_service.py --rate 200 --seconds 60 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import Args, command_line, run_tool

OPTIONS = {
    "--rate": (200, "responses a second"),
    "--seconds": (60, "seconds of load"),
    "--fail": (0.05, "share of samples that fail"),
    "--down": (2.0, "seconds without a server, half-way"),
    "--port": (0, "used by the tool itself: be the server, at this port"),
    "--record": (Path, "the server's record"),
}
TOKEN = "MEGARL_BENCH_TOKEN"  # noqa: S105 - a name
BYTES, LATE = 2048, 0.02
"""Bytes of a response, and the share of requests that are answered too late."""
ATTEMPT_S, LIMIT_S = 1.0, 10.0
"""Limits of a request and of a response, in seconds."""
READY_WITHIN_S, END_WITHIN_S = 60.0, 30.0


# ------------------------------------------------------------------------------------- the server


async def serve(args: Args) -> None:
    """Serve until SIGTERM or SIGKILL. The record is the file `args.record`: a line for each sample
    that was scored, written before the answer is sent.
    """
    import uvicorn

    from megarl.apps.serve.reward_server import Backend, RewardServer
    from megarl.environments.scores import Outcome
    from megarl.settings.addresses import Token
    from megarl.settings.environments import RewardServerConfig
    from megarl.types import Prompt

    draw, record = random.Random(os.getpid()), os.open(args.record, os.O_APPEND | os.O_WRONLY)

    async def score(prompt: Prompt, response: str) -> Outcome:
        late = draw.random() < LATE
        # Which samples fail is a property of the sample: a second attempt gives the same answer.
        failed = random.Random(prompt.index).random() < args.fail
        line = {"n": prompt.index, "failed": failed, "late": late}
        os.write(record, f"{json.dumps(line)}\n".encode())
        if late:
            await asyncio.sleep(2 * ATTEMPT_S)
        return Outcome(failure="error", detail="injected") if failed else Outcome(1.0)

    settings = RewardServerConfig(port=args.port)
    server = RewardServer(Backend(score, 256), settings, Token(os.environ[TOKEN]))
    listener = socket.create_server(("127.0.0.1", args.port))
    config = uvicorn.Config(server, lifespan="off", log_level="critical", access_log=False)
    print("ready", flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


def start_server(args: Args, port: int, record: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, __file__, "--port", str(port), "--record", str(record)]
    words += ["--fail", str(args.fail)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


# ------------------------------------------------------------------------------------- the client


def measure(args: Args) -> dict[str, Any]:
    """Load, restart, and the comparison of the two records."""
    os.environ[TOKEN] = "bench-" + os.urandom(16).hex()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    record = args.work / "record.jsonl"
    record.touch()
    servers = [start_server(args, port, record)]
    try:
        assert servers[0].stdout is not None
        servers[0].stdout.readline()
        found = asyncio.run(load(args, port, record, servers))
    finally:
        for server in servers:
            server.kill()
            server.wait(END_WITHIN_S)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return compare(found, lines)


async def load(
    args: Args, port: int, record: Path, servers: list[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    """Send the responses at their times, restart the server half-way; the outcomes by number."""
    from megarl.environments.reward_client import RewardClient
    from megarl.settings.addresses import read_token
    from megarl.settings.environments import EnvironmentConfig, RemoteConfig
    from megarl.types import Prompt

    url = f"http://127.0.0.1:{port}/v1/score"
    limits: Any = {"batch_size": 1, "connections": 64, "attempt_limit_s": ATTEMPT_S}
    remote = RemoteConfig(token_variable=TOKEN, **limits)
    config = EnvironmentConfig(verifier=url, time_limit_s=LIMIT_S, remote=remote)
    client = RewardClient(url, config, read_token(TOKEN, "token"))
    statuses = await wrong_tokens(url)
    total, text = args.rate * args.seconds, "x" * BYTES
    outcomes: dict[int, Any] = {}
    seconds: list[float] = []

    async def one(number: int) -> None:
        began = time.monotonic()
        outcomes[number] = await client.score(Prompt(number, "", [], ""), text)
        seconds.append(time.monotonic() - began)

    async def restart() -> None:
        await asyncio.sleep(args.seconds / 2)
        servers[0].send_signal(signal.SIGKILL)
        await asyncio.sleep(args.down)
        servers.append(await asyncio.to_thread(start_server, args, port, record))

    began, restarting = time.monotonic(), asyncio.ensure_future(restart())
    tasks = []
    for number in range(total):
        await asyncio.sleep(max(0.0, began + number / args.rate - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(number)))
    await asyncio.wait_for(asyncio.gather(*tasks, restarting), 10 * LIMIT_S)
    took = time.monotonic() - began
    await client.close()
    found = {"outcomes": outcomes, "asked": total, "took_s": took, "statuses": statuses}
    return found | {"seconds": sorted(seconds)}


async def wrong_tokens(url: str) -> list[int]:
    """The statuses of requests with a wrong and without a token."""
    import aiohttp

    found = []
    async with aiohttp.ClientSession() as session:
        for headers in ({"Authorization": "Bearer wrong"}, {}):
            async with session.post(url, json={"samples": []}, headers=headers) as reply:
                found.append(reply.status)
    return found


def compare(found: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The client's counts beside the server's record."""
    outcomes, times = found["outcomes"], found["seconds"]
    kinds = Counter(one.failure or "scored" for one in outcomes.values())
    fails = {line["n"] for line in lines if line["failed"]}
    seen = {line["n"] for line in lines}
    ours = {n for n, one in outcomes.items() if one.failure == "error" and one.detail == "injected"}
    scored = {n for n, one in outcomes.items() if not one.failure}
    ended = {n for n, one in outcomes.items() if one.failure and n not in ours}
    return {
        "asked": found["asked"],
        "lost": found["asked"] - len(outcomes),
        "outcomes": dict(kinds),
        "injected_failures_in_record": len(fails),
        "injected_failures_counted": len(ours),
        "injected_uncounted": len(fails - ours - ended),
        "counted_but_not_injected": len(ours - fails),
        "scored_but_not_in_record": len(scored - seen),
        "other_failures": len(ended),
        "late_samples_in_record": sum(line["late"] for line in lines),
        "breaker_openings": sum(bool(one.warning) for one in outcomes.values()),
        "status_of_wrong_and_missing_token": found["statuses"],
        "took_s": round(found["took_s"], 2),
        "latency_ms": {
            "median": round(1e3 * statistics.median(times), 1),
            "p99": round(1e3 * times[int(0.99 * len(times))], 1),
            "max": round(1e3 * times[-1], 1),
        },
    }


if __name__ == "__main__":
    if "--port" in sys.argv:
        asyncio.run(serve(command_line(__doc__, OPTIONS).parse_args()))
    else:
        run_tool(__doc__, OPTIONS, measure, "")
