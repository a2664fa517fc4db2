"""How an MCP server is reached: a process's standard input and output, or streamable HTTP.

    async with over_pipes(command, variables, words) as streams: ClientSession(*streams)
    async with over_http(address, token, limit_s) as streams: ClientSession(*streams)

The transports are those of the official client. What is added is what its errors leave out: the
last words of a process, and the status with which an HTTP server refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from megarl.environments.addresses import Token
from megarl.schema import shortened

ROOT = Path(__file__).resolve().parents[3]  # where the package megarl lies
# The server ends with this process, even one that is killed.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.die_with_parent import run
run(int(sys.argv[2]), sys.argv[3:])"""
WORDS = 600
"""Most characters of a server's own words in a message."""
PASSED_ON = 2**18
"""Most bytes of a server's standard error that are passed on after each start."""
WORDS_WITHIN_S = 1.0
CONNECT_WITHIN_S = 10.0
ANSWER_BYTES = 16 * 2**20
OF_THE_ENCODING = ("content-encoding", "content-length", "transfer-encoding")
FAILED, LOST = -40_001, -40_002
"""Codes of the errors that stand for an HTTP request without an answer of MCP: the session goes on,
or the server no longer knows it."""

# A traceback for each line that is no message, with parts of the line; errors are told here.
for _logger in ("mcp", "client"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)


class LastWords:
    """What a server writes to its standard error: the first `PASSED_ON` bytes are passed on to that
    of this process, and the end is kept for messages. Belongs to one event loop.
    """

    def __init__(self, server: str) -> None:
        """`server`: its name in the recipe."""
        self._server, self._left = server, PASSED_ON
        self._reads, writes = os.pipe()
        self.file = os.fdopen(writes, "w")
        """For the server's process; to be closed here once the process has it."""
        self._kept, self._ended = b"", asyncio.Event()
        asyncio.get_running_loop().add_reader(self._reads, self._read)

    def _read(self) -> None:
        chunk = os.read(self._reads, 2**16)
        self._kept = (self._kept + chunk)[-4 * WORDS :]
        passed = chunk[: max(self._left, 0)]
        if 0 <= self._left < len(chunk):
            passed += (
                f"\nenvironment.tools.servers.{self._server}: the rest of what it writes to"
                " standard error is left out; errors have its last words\n"
            ).encode()
        self._left -= len(chunk)
        with contextlib.suppress(OSError):
            os.write(2, passed)
        if not chunk:
            self.close()

    def close(self) -> None:
        """Stop reading."""
        if not self._ended.is_set():
            self._ended.set()
            asyncio.get_running_loop().remove_reader(self._reads)
            os.close(self._reads)

    async def read(self) -> str:
        """The last words in one line, of at most `WORDS` characters; of a server that has ended,
        all that it wrote, unless a process that it has left behind keeps the pipe open.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), WORDS_WITHIN_S)
        return " ".join(self._kept.decode(errors="replace").split())[-WORDS:]


@contextlib.asynccontextmanager
async def over_pipes(
    command: str, variables: Mapping[str, str], words: LastWords
) -> AsyncIterator[Any]:
    """Start a server and yield the streams to it; it ends with the context."""
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-c", PROGRAM, str(ROOT), str(os.getpid()), *shlex.split(command)],
        env=dict(variables),
        encoding_error_handler="replace",  # or one such byte would end all reading, unnoticed
    )
    with words.file:
        async with stdio_client(parameters, errlog=words.file) as streams:
            words.file.close()
            yield streams


@contextlib.asynccontextmanager
async def over_http(address: str, token: Token | None, limit_s: float) -> AsyncIterator[Any]:
    """Yield the streams to the server at `address`. `limit_s`: seconds after which a request that
    nobody waits for any longer is given up.
    """
    async with (
        httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {token.value}"} if token else {},
            timeout=httpx2.Timeout(CONNECT_WITHIN_S, read=limit_s),
            transport=_AnswersAll(token),
        ) as client,
        streamable_http_client(address, http_client=client) as streams,
    ):
        yield streams


class _AnswersAll(httpx2.AsyncHTTPTransport):
    """Answers a request that failed with an error of MCP. The official client would end the session
    of all calls where one connection fails, and names no status.
    """

    def __init__(self, token: Token | None) -> None:
        super().__init__()
        self._token = token

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
            kind = response.headers.get("content-type", "")
            is_stream = kind.lower().startswith("text/event-stream")
            if request.method != "POST" or (is_stream and response.is_success):
                return response
            response = await _whole(response)
        except httpx2.TransportError as error:
            return _error(FAILED, f"{type(error).__name__}: {error}")
        is_json = kind.lower().startswith("application/json")
        if response.is_redirect or (response.is_success and (is_json or not response.content)):
            return response
        said = f"HTTP {response.status_code} {response.reason_phrase}: {response.text}"
        if self._token is not None:
            said = said.replace(self._token.value, "***")
        # Some servers answer 400 instead of 404 for a session that they do not know.
        is_lost = response.status_code in (400, 404) and "mcp-session-id" in request.headers
        return _error(LOST if is_lost else FAILED, said)


async def _whole(response: httpx2.Response) -> httpx2.Response:
    """The response with its content. Raises `TransportError` for more than `ANSWER_BYTES`."""
    content = b""
    try:
        async for part in response.aiter_bytes():
            content += part
            if len(content) > ANSWER_BYTES:
                raise httpx2.TransportError(f"the answer is longer than {ANSWER_BYTES >> 20} MiB")
    finally:
        await response.aclose()
    kept = {name: one for name, one in response.headers.items() if name not in OF_THE_ENCODING}
    return httpx2.Response(response.status_code, headers=kept, content=content)


def _error(code: int, message: str) -> httpx2.Response:
    error = {"code": code, "message": shortened(message, WORDS)}
    return httpx2.Response(502, json={"jsonrpc": "2.0", "id": None, "error": error})
