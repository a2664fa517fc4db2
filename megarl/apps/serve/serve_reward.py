"""`megarl serve-reward`: verifiers, reward functions, a reward model or a judge as an HTTP server,
which runs until SIGTERM, Ctrl-C or SIGHUP and then answers the requests that are under way.

    requests --RewardServer--> queue --Backend--> verifiers, or a model in vLLM (`served_models`)
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import uvicorn

from megarl.apps.serve.reward_server import Backend, RewardServer
from megarl.environments.judging import Judge
from megarl.environments.scores import Outcome
from megarl.environments.scoring import client_token
from megarl.environments.trial import check_verifier
from megarl.environments.verifiers import named
from megarl.environments.wire import ROUTE
from megarl.errors import ProcessLost, UserError
from megarl.parallel import launcher
from megarl.settings.addresses import Token, read_token
from megarl.settings.environments import EnvironmentConfig, RewardServerConfig
from megarl.settings.schema import require
from megarl.settings.serve import ServeRewardConfig
from megarl.system import console
from megarl.system.signals import SIGNALS
from megarl.types import Prompt


@dataclass(frozen=True)
class ServeInputs:
    """What `check_serve_reward` has found for `megarl serve-reward`: what is served, in words
    (`what`), the bearer token that requests need (`token`), and a function that starts the verifier
    or model (`start`).
    """

    what: str
    """What is served, in words, such as "reward model PATH"."""
    token: Token | None
    """The bearer token that requests need; None if they need none."""
    start: Callable[[], AbstractAsyncContextManager[Backend]]
    """Function without arguments that returns an async context manager: it starts the verifier or
    model that computes the rewards, yields it as a `Backend` and ends it with the block."""

    def __str__(self) -> str:
        return f"{self.what}, {'with' if self.token else 'without'} a token"


def check_serve_reward(config: ServeRewardConfig, ranks: int | None = None) -> ServeInputs:
    """Run all checks of `megarl serve-reward` before anything heavy starts: the bearer token
    and the verifier, reward model or judge. `ranks`: number
    of processes that were started, which must be 1; None for that of the launcher's environment
    variables. Returns what is served, in words, the token, and a function that starts the verifier
    or model. Raises `ValueError` if a check fails.
    """
    launcher.refuse_several("serve-reward", ranks)
    token = server_token(config.server)
    reward_model, judge = config.reward_model.model.path, config.judge.model.path
    if reward_model or judge:
        # Torch and transformers, which a server of verifiers does without.
        from megarl.apps.serve import served_models as served

        if reward_model:
            model = served.check_served_reward_model(config.reward_model)
            start = functools.partial(served.model_backend, model)
            return ServeInputs(f"reward model {reward_model}", token, start)
        start = functools.partial(served.judge_backend, served.check_judge(config.judge))
        return ServeInputs(f"judge {judge}", token, start)
    check_verifier(config.environment)
    start = functools.partial(verifier_backend, config.environment)
    return ServeInputs(", ".join(named(config.environment)), token, start)


@asynccontextmanager
async def verifier_backend(config: EnvironmentConfig) -> AsyncIterator[Backend]:
    """Context manager: the recipe's verifier or reward functions, in `config.num_workers` worker
    processes.
    """
    judge = Judge(config, None, client_token(config))

    async def score(prompt: Prompt, response: str) -> Outcome:
        call = asyncio.ensure_future(judge.judge(prompt, response))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})  # a worker goes on with it, and is not free before
            raise

    try:
        with console.phase("verifier"):
            await judge.pool.start()
        # A call that asks another server waits without a process.
        lanes = config.num_workers
        if judge.clients:
            lanes *= config.remote.batch_size
        yield Backend(score, lanes)
    finally:
        await judge.close()


MIN_TOKEN, MIN_DIFFERENT = 20, 6
"""Least number of characters of a token where other machines can reach the server, and how many of
them must differ. 20 random hexadecimal digits have fewer different ones with a probability of
3e-7."""


def server_token(server: RewardServerConfig) -> Token | None:
    """The bearer token that requests to the server need, read from the environment variable
    `server.token_variable`; None if the variable is not set, which is allowed only on a loopback
    address. Raises `ValueError` on other addresses without a token, or with one that could be
    guessed: shorter than 20 characters, or of fewer than 6 different ones.
    """
    name, is_local = server.token_variable, is_loopback(server.host)
    reached = f"server.host is {server.host}, which other machines may reach, but"
    make = f"export {name or 'MEGARL_REWARD_TOKEN'}=$(openssl rand -hex 32)"
    if name and name in os.environ:
        token = read_token(name, "server.token_variable")
        assert token is not None
        require(
            is_local or (len(token.value) >= MIN_TOKEN and len({*token.value}) >= MIN_DIFFERENT),
            f"{reached} the token in {name} could be guessed: it needs {MIN_TOKEN} characters,"
            f" {MIN_DIFFERENT} of them different; {make}, or set server.host to 127.0.0.1",
        )
        return token
    require(
        is_local,
        f"{reached} there is no token; {make}"
        + ("" if name else " and set server.token_variable to its name")
        + ", or set server.host to 127.0.0.1",
    )
    return None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a server on `host`, an IP address or
    "localhost".
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(config: ServeRewardConfig, inputs: ServeInputs) -> int:
    """Run `megarl serve-reward`: answer requests for scores over HTTP until SIGTERM, SIGINT or
    SIGHUP arrives. Requests under way are then answered for up to `server.drain_s` seconds, and the
    signal is raised as `EndedBySignal`, of which the command line makes the exit code. `inputs`:
    what is served, as `check_serve_reward` returns it. Prints the address on standard error and
    writes `run.log` in `config.folder`. Raises `UserError` if the address or the folder cannot be
    used, and `ProcessLost` if vLLM's process dies.
    """
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    release = console.hold(folder)
    try:
        console.open_log(folder)
        with listening(config.server) as listener:
            asyncio.run(_serve(config, inputs, listener))
    finally:
        release()
    return 0


def listening(server: RewardServerConfig) -> socket.socket:
    """A TCP socket that listens at `server.host` and `server.port` (0: a free one); the caller
    closes it. Raises `UserError` if this machine has no such address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"server.host {server.host} port {server.port} cannot be used ({error.strerror}); set"
            " server.port to a free one (0 finds one), or server.host to an address of this"
            " machine: 127.0.0.1, or 0.0.0.0 for every network"
        ) from None


async def _serve(config: ServeRewardConfig, inputs: ServeInputs, listener: socket.socket) -> None:
    """Serve on `listener` until a signal has stopped uvicorn, which then raises it once more."""
    settings = config.server
    async with inputs.start() as backend:
        server = RewardServer(backend, settings, inputs.token)
        web = uvicorn.Server(
            uvicorn.Config(
                server,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.connections + 1,  # uvicorn refuses the last one
                headers=[("Connection", "close")],
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
            ),
        )
        server.on_lost = lambda: setattr(web, "should_exit", True)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        needs = "with the token" if inputs.token is not None else "without a token"
        console.say(f"serving {inputs.what} at http://{shown}:{port}{ROUTE}, {needs}")
        with patch("uvicorn.server.HANDLED_SIGNALS", SIGNALS):
            await web.serve(sockets=[listener])
        if server.lost:
            raise ProcessLost(server.lost)
