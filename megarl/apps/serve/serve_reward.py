"""`megarl serve-reward`: verifiers, reward functions, a reward model or a judge as an HTTP server,
which runs until SIGTERM, Ctrl-C or SIGHUP and then answers the requests that are under way.

    requests --RewardServer--> queue --Backend--> verifiers, torch or vLLM (`reward_backends`)
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megarl import console
from megarl.apps.serve.reward_backends import (
    engine_backend,
    judge_backend,
    torch_backend,
    verifier_backend,
)
from megarl.apps.serve.reward_server import Backend, RewardServer
from megarl.checks.folder_checks import check_writable
from megarl.checks.verifier_trial import check_verifier
from megarl.environments.addresses import Token, read_token
from megarl.environments.config import RewardServerConfig
from megarl.environments.verifiers import named
from megarl.environments.wire import ROUTE
from megarl.errors import EngineLost, UserError
from megarl.parallel import launcher
from megarl.schema import require
from megarl.serve_config import ServeRewardConfig
from megarl.signals import SIGNALS


@dataclass(frozen=True)
class ServeInputs:
    """What `check_serve_reward` has found for `megarl serve-reward`: what is served, in words
    (`what`), the bearer token that requests need (`token`), and a function that starts the verifier
    or model (`start`).
    """

    what: str
    """What is served, in words, such as "reward model PATH by vllm"."""
    token: Token | None
    """The bearer token that requests need; None if they need none."""
    start: Callable[[], AbstractAsyncContextManager[Backend]]
    """Function without arguments that returns an async context manager: it starts the verifier or
    model that computes the rewards, yields it as a `Backend` and ends it with the block."""

    def __str__(self) -> str:
        return f"{self.what}, {'with' if self.token else 'without'} a token"


def check_serve_reward(config: ServeRewardConfig, ranks: int | None = None) -> ServeInputs:
    """Run all checks of `megarl serve-reward` before anything heavy starts: the bearer token,
    whether `config.folder` can be written, and the verifier, reward model or judge. `ranks`: number
    of processes that were started, which must be 1; None for that of the launcher's environment
    variables. Returns what is served, in words, the token, and a function that starts the verifier
    or model. Raises `ValueError` if a check fails.
    """
    if ranks is None:
        launcher.refuse_wrong()
    size = launcher.num_ranks() if ranks is None else ranks
    require(size == 1, f"megarl serve-reward runs as one process, but was started as {size} ranks")
    token = server_token(config.server)
    check_writable(config.folder, setting="folder")
    if path := config.reward_model.model.path:
        # Torch and transformers, which a server of verifiers does without.
        from megarl.apps.serve.served_models import check_served_reward_model

        backend = config.reward_model.backend
        start = {"torch": torch_backend, "vllm": engine_backend}[backend]
        model = check_served_reward_model(config.reward_model)
        what = f"reward model {path} by {backend}"
        return ServeInputs(what, token, functools.partial(start, model, config.server))
    if path := config.judge.model.path:
        from megarl.apps.serve.served_models import check_judge

        judge = check_judge(config.judge)
        start = functools.partial(judge_backend, config.judge, judge)
        return ServeInputs(f"judge {path}", token, start)
    check_verifier(config.environment)
    start = functools.partial(verifier_backend, config.environment)
    return ServeInputs(", ".join(named(config.environment)), token, start)


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


LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol (`H11Protocol`) of one connection to the server, with a time limit: the
    connection is closed with the status 408 if the head of its first request does not arrive within
    `head_limit_s` seconds.
    """

    def __init__(self, *args: Any, head_limit_s: float, **settings: Any) -> None:
        """`head_limit_s`: seconds from the opening of the connection to the end of the request's
        headers. The other arguments are uvicorn's.
        """
        super().__init__(*args, **settings)
        self.loop.call_later(head_limit_s, self._close_late)

    def _close_late(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()


def main(config: ServeRewardConfig, inputs: ServeInputs) -> int:
    """Run `megarl serve-reward`: answer requests for scores over HTTP until SIGTERM, SIGINT or
    SIGHUP arrives. Requests under way are then answered for up to `server.drain_s` seconds, and the
    signal is raised as `EndedBySignal`, of which the command line makes the exit code. `inputs`:
    what is served, as `check_serve_reward` returns it. Prints the address on standard error and
    writes `run.log` in `config.folder`. Raises `UserError` if the address or the folder cannot be
    used, and `EngineLost` if vLLM's process dies.
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
                http=functools.partial(BoundedProtocol, head_limit_s=settings.read_limit_s),  # pyright: ignore[reportArgumentType]
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
            raise EngineLost(server.lost)
