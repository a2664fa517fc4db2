"""Real reward servers for tests: uvicorn in a thread, on a free loopback port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn

WITHIN_S = 20.0


@dataclass
class Answer:
    """What a scripted server does with one request."""

    status: int = 200
    body: bytes | None = None
    """None: with status 200 a score for each sample, by `Scripted.score`; otherwise nothing."""
    after_s: float = 0.0
    """Seconds until it answers."""
    headers: dict[str, str] = field(default_factory=dict)


class Scripted:
    """An ASGI application that records requests and answers them by a script."""

    def __init__(
        self,
        script: Callable[[int, list[Any]], Answer | None] = lambda number, samples: None,
        score: Callable[[Any], Any] = lambda sample: 1.0,
    ) -> None:
        """`script`: (number of the request from 0, its samples) -> answer; None is status 200 with
        a score for each sample.
        """
        self.script, self.score = script, score
        self.requests: list[list[Any]] = []
        """The samples of each request."""
        self.headers: list[dict[str, str]] = []
        self.under_way, self.most_under_way = 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self._serve(scope, receive, send)
        finally:
            self.under_way -= 1

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        samples = json.loads(body)["samples"]
        self.requests.append(samples)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        answer = self.script(len(self.requests) - 1, samples) or Answer()
        await asyncio.sleep(answer.after_s)
        scores = {"scores": [self.score(sample) for sample in samples]}
        ours = json.dumps(scores).encode() if answer.status == 200 else b""
        said = ours if answer.body is None else answer.body
        head = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": said})


@contextmanager
def serving(
    app: Any, port: int = 0, path: str = "/v1/score", *, lifespan: Literal["on", "off"] = "off"
) -> Iterator[str]:
    """Serve an ASGI application; yields the address of `path`."""
    listener = socket.create_server(("127.0.0.1", port))
    web = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan=lifespan,
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=lambda: web.run(sockets=[listener]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
    finally:
        web.should_exit = True
        thread.join(WITHIN_S)
        listener.close()
        assert not thread.is_alive()


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
