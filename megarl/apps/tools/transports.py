"""How an MCP server is reached: a process's standard input and output, or streamable HTTP.

    async with over_pipes(command, variables, words) as streams: ClientSession(*streams)
    async with over_http(address, token, limit_s) as streams: ClientSession(*streams)

The transports are those of the official client. This module adds what the client's errors leave
out: the last lines that a process wrote, and the status with which an HTTP server refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from megarl.settings.addresses import Token

ROOT = Path(__file__).resolve().parents[3]  # where the package megarl lies
# The server ends with this process, even one that is killed.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.system.signals import become
become(int(sys.argv[2]), sys.argv[3:])"""
WORDS = 600
"""Most characters of a server's standard error that are quoted in an error message."""
PASSED_ON = 2**18
"""Most bytes of a server's standard error that are passed on to that of this process after each
start."""
SOON_S = 5.0
"""Seconds in which a server has to accept a connection, and to end or close its pipe when it is
told to."""
ANSWER_BYTES = 16 * 2**20
OF_THE_ENCODING = ("content-encoding", "content-length", "transfer-encoding")
FAILED, LOST = -40_001, -40_002
"""Codes of the MCP errors that stand for an HTTP request without an answer in MCP. `FAILED`: the
session goes on; `LOST`: the server no longer knows the session."""

# A traceback for each line that is no message, with parts of the line; errors are told here.
for _logger in ("mcp", "client"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)


class LastWords:
    """Reads what a server's process writes to its standard error: up to 256 KiB are passed on to
    the standard error of this process, and the end is kept for error messages (`read`). Made and
    used in one event loop.
    """

    def __init__(self, server: str) -> None:
        """`server`: the server's name in the recipe."""
        self._server, self._left = server, PASSED_ON
        self._reads, writes = os.pipe()
        self.file = os.fdopen(writes, "w")
        """Pipe to give to the server's process as its standard error; the caller closes it here
        once the process has it."""
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
        """Stop reading the server's standard error; what was read so far is kept for `read`."""
        if not self._ended.is_set():
            self._ended.set()
            asyncio.get_running_loop().remove_reader(self._reads)
            os.close(self._reads)

    async def read(self) -> str:
        """The end of what the server wrote to standard error, as one line of at most 600
        characters. Waits up to 5 seconds until the server has closed it, so that nothing it wrote
        is missing.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), SOON_S)
        return " ".join(self._kept.decode(errors="replace").split())[-WORDS:]


@contextlib.asynccontextmanager
async def over_pipes(
    command: str, variables: Mapping[str, str], words: LastWords
) -> AsyncIterator[Any]:
    """Context manager: start the command line `command` as an MCP server, with the environment
    variables `variables` beside the MCP client's own defaults, and yield the (read, write) streams
    for a `ClientSession` of the package `mcp`. The process ends with the block, or with this
    process. `words` gets its standard error.
    """
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
    """Context manager: yield the (read, write) streams for a `ClientSession` of the package `mcp`
    to the MCP server at the URL `address`. `token`: bearer token, or None. `limit_s`: seconds
    without data after which a request is given up.
    """
    async with (
        httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {token.value}"} if token else {},
            timeout=httpx2.Timeout(SOON_S, read=limit_s),
            transport=_AnswersAll(),
        ) as client,
        streamable_http_client(address, http_client=client) as (read, write),
    ):
        yield _WithoutToken(read, token), write


class _WithoutToken:
    """The messages of a server that is reached over HTTP, with `***` for the token it was sent.
    Errors of the transport are messages too, so nothing else of the server is told.
    """

    def __init__(self, stream: Any, token: Token | None) -> None:
        # As JSON or an address may write each character, for bodies that are told as they are.
        signs = (
            rf"(?:\\{{0,2}}{re.escape(sign)}|(?i:\\{{1,2}}u{ord(sign):04x}|%{ord(sign):02x}))"
            for sign in (token.value if token else "")
        )
        self._stream, self._token = stream, re.compile("".join(signs)) if token else None

    async def __aenter__(self) -> _WithoutToken:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for found in self._stream:
            if not isinstance(found, SessionMessage):
                continue  # an event outside of any call that is no message
            message = found.message
            if self._token is not None:
                if isinstance(message, JSONRPCError) and message.error.code == PARSE_ERROR:
                    # Pydantic quotes the input with a cut, in which half a token would stay.
                    message.error.message = message.error.message.split("input_value=")[0]
                cleaned = self._clean(message.model_dump(exclude_unset=True))
                message = type(message).model_validate(cleaned)
            yield SessionMessage(message, found.metadata)

    def _clean(self, found: Any) -> Any:
        assert self._token is not None
        if isinstance(found, str):
            return self._token.sub("***", found)
        if isinstance(found, list):
            return [self._clean(one) for one in found]
        if isinstance(found, dict):
            return {self._clean(name): self._clean(one) for name, one in found.items()}
        return found


class _AnswersAll(httpx2.AsyncHTTPTransport):
    """Answers a request that failed with an error of MCP. The official client would end the session
    of all calls where one connection fails, and names no status.
    """

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
        is_json = kind.lower().startswith("application/json") and _is_message(response.content)
        if response.is_redirect or (response.is_success and (is_json or not response.content)):
            return response
        said = f"HTTP {response.status_code} {response.reason_phrase}: {response.text}"
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


def _is_message(content: bytes) -> bool:
    """Whether the body of an HTTP answer is a message of MCP (JSON-RPC)."""
    try:
        jsonrpc_message_adapter.validate_json(content, by_name=False)
    except ValidationError:
        return False
    return True


def _error(code: int, message: str) -> httpx2.Response:
    error = {"code": code, "message": message}
    return httpx2.Response(502, json={"jsonrpc": "2.0", "id": None, "error": error})
