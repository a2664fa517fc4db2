"""`megarl serve-reward`: verifiers, reward functions, a reward model or a judge as an HTTP server,
which runs until SIGTERM, Ctrl-C or SIGHUP and then answers what is under way.

    requests --RewardServer--> queue --Backend--> verifiers, torch or vLLM (`reward_backends`)
"""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from contextlib import AbstractAsyncContextManager
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
from megarl.apps.serve.reward_server_checks import ServeInputs
from megarl.environments.config import RewardServerConfig
from megarl.environments.wire import ROUTE
from megarl.errors import EngineLost, UserError
from megarl.serve_config import ServeRewardConfig
from megarl.signals import SIGNALS

LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """One connection to a server, which is closed if the head of a request does not arrive in
    time.
    """

    def __init__(self, *args: Any, head_limit_s: float, **settings: Any) -> None:
        """`head_limit_s`: seconds from the opening of the connection, or from the first byte of a
        further request, to the end of the request's headers. The other arguments are uvicorn's.
        """
        super().__init__(*args, **settings)
        self._head_limit_s = head_limit_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._wait_for_head()
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way: what arrives belongs to the head of the next one."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_limit_s, self._close_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()


KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open."""


def main(config: ServeRewardConfig, inputs: ServeInputs) -> int:
    """`megarl serve-reward`: answer requests over HTTP until a signal of `SIGNALS` arrives. It is
    raised as `megarl.signals.EndedBySignal`, of which the command line makes the exit code.
    Raises `UserError` if the server's address cannot be used.
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
    """A socket that listens at `server.host` and `server.port`. Raises `UserError` if this machine
    has no such address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.getaddrinfo(server.host, None)
    except OSError as error:
        raise UserError(
            f"server.host {server.host!r} is no address of this machine ({error.strerror}); set it"
            " to 127.0.0.1, or to 0.0.0.0 for every network"
        ) from None
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"server.host {server.host} port {server.port} cannot be used ({error.strerror}); set"
            " server.port to a free one (0 finds one), or server.host to an address of this machine"
        ) from None


async def _serve(config: ServeRewardConfig, inputs: ServeInputs, listener: socket.socket) -> None:
    """Serve on `listener` until a signal has stopped uvicorn, which then raises it once more."""
    settings = config.server
    async with backend_of(config, inputs) as backend:
        server = RewardServer(backend, settings, inputs.token)
        server.start()
        web = Uvicorn(
            server,
            uvicorn.Config(
                server.app,
                http=functools.partial(BoundedProtocol, head_limit_s=settings.read_limit_s),  # pyright: ignore[reportArgumentType]
                loop="asyncio",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.connections + 1,  # uvicorn refuses the last one
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
            ),
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        needs = "with the token" if inputs.token is not None else "without a token"
        console.say(f"serving {inputs.what} at http://{shown}:{port}{ROUTE}, {needs}")
        try:
            with patch("uvicorn.server.HANDLED_SIGNALS", SIGNALS):
                await web.serve(sockets=[listener])
        finally:
            await server.close()
        if server.lost:
            raise EngineLost(server.lost)


def backend_of(
    config: ServeRewardConfig, inputs: ServeInputs
) -> AbstractAsyncContextManager[Backend]:
    """A context manager that starts what computes the rewards, and ends it: the verifiers, the
    judge's engine or the reward model's engine, whichever the recipe names.
    """
    if inputs.model is None:
        return verifier_backend(config)
    if config.judge.model.path:
        return judge_backend(config, inputs.model)
    made = {"torch": torch_backend, "vllm": engine_backend}[config.reward_model.backend]
    return made(config, inputs.model)


class Uvicorn(uvicorn.Server):
    """A uvicorn server that has its reward server refuse new requests once it is to stop."""

    def __init__(self, server: RewardServer, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._server = server

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to stop."""
        return await super().on_tick(counter) or bool(self._server.lost)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way, for as long as the configuration allows, and end."""
        self._server.stopping = True
        await super().shutdown(sockets)
