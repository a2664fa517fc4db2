"""MCP servers as a source of tools, through the official client.

    server = ToolServer(name, command); await server.start(); server.tools -> [ServerTool]

A server is a command, whose process is started here, or the address of one that runs. A server
that ends, or forgets the session, is started or asked for a new session with the next call; the
rollout that was calling it fails.
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
from anyio import BrokenResourceError, ClosedResourceError
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    PaginatedRequestParams,
)

from megarl.apps.tools.tool import CallError, Schema, function_schema, read_object
from megarl.settings.addresses import is_remote, read_token
from megarl.settings.schema import shortened

ROOT = Path(__file__).resolve().parents[3]  # where the package megarl lies
# The server ends with this process, even one that is killed.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.system.signals import become
become(int(sys.argv[2]), sys.argv[3:])"""
START_WITHIN_S = 60.0
SOON_S = 5.0
"""Seconds in which a server has to accept a connection, and to end when it is told to."""
ERROR_CHARACTERS = 300
NO_ANSWER = (CONNECTION_CLOSED, PARSE_ERROR, INVALID_REQUEST, INTERNAL_ERROR)
"""Codes of MCP errors over HTTP that the model could do nothing about: the rollout fails."""

# A traceback for each line that is no message, with parts of the line; errors are told here.
for _logger in ("mcp", "client"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)


class ToolServer:
    """One MCP server of the recipe with its tools, as a client: await `start`, use the tools in
    `tools` and await `close` at the end. `start` starts the server's process, or opens a session
    with a server at a URL. All methods belong to one event loop.
    """

    def __init__(
        self,
        name: str,
        command: str,
        variables: Mapping[str, str] | None = None,
        token_variable: str = "",
        limit_s: float = 60.0,
    ) -> None:
        """`name`: the server's name in the recipe. `command`: a command line, or the URL of a
        server that runs. `variables`: environment variables that the server's process gets beside
        PATH, HOME, USER and the like. `token_variable`: name of the environment variable with the
        bearer token for a URL; empty: none is sent. `limit_s`: longest time limit of a call, in
        seconds.
        """
        self.name, self._command, self._variables = name, command, dict(variables or {})
        self._token_variable, self._limit_s = token_variable, limit_s
        self._setting = f"environment.tools.server_tokens.{name}"
        self.tools: list[ServerTool] = []
        self._task: asyncio.Task[None] | None = None
        self._session: Any = None
        self._starting = asyncio.Lock()
        self._status = ""
        """The last HTTP status by which the server has refused a request."""

    async def start(self) -> None:
        """Start the server's process, or open a session with the server at the URL, and read its
        list of tools into `tools`. Raises `ValueError` if the server does not answer within 60
        seconds.
        """
        ready: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        # One task opens and closes the client, as its cancel scopes require.
        self._task = asyncio.create_task(self._serve(ready, self._stop))
        try:
            async with asyncio.timeout(START_WITHIN_S):
                schemas = await ready
        except asyncio.CancelledError:
            self._task.cancel()  # or the server runs on beside the one that is started next
            raise
        except Exception as error:
            self._task.cancel()
            timed_out = isinstance(error, TimeoutError)
            cause = f" within {START_WITHIN_S:g} s" if timed_out else f" ({error})"
            raise ValueError(
                f"environment.tools.servers.{self.name}: `{self._command}` gave no list of tools"
                f"{cause}; {self._advice()}"
            ) from None
        if not self.tools:
            self.tools = [ServerTool(self, schema) for schema in schemas]

    def _advice(self) -> str:
        if not is_remote(self._command):
            return "see what it wrote above, or run the command by hand"
        if self._status in ("HTTP 401", "HTTP 403"):
            if self._token_variable:
                return f"export {self._token_variable} ({self._setting}) with the server's token"
            return f"set {self._setting} to the name of the environment variable with its token"
        return "set the address at which it speaks MCP by streamable HTTP, and see its log"

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        """The (read, write) streams of a session. A process writes its standard error to that of
        this process.
        """
        if not is_remote(self._command):
            words = shlex.split(self._command)
            parameters = StdioServerParameters(
                command=sys.executable,
                args=["-P", "-c", PROGRAM, str(ROOT), str(os.getpid()), *words],
                env=self._variables,
                encoding_error_handler="replace",  # or one such byte would end all reading
            )
            with open(2, "w", closefd=False) as errors:
                async with stdio_client(parameters, errlog=errors) as streams:
                    yield streams
            return
        token = read_token(self._token_variable, self._setting)
        async with (
            httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {token.value}"} if token else {},
                timeout=httpx2.Timeout(SOON_S, read=START_WITHIN_S + self._limit_s),
                event_hooks={"response": [self._note]},
            ) as client,
            streamable_http_client(self._command, http_client=client) as streams,
        ):
            yield streams

    async def _note(self, response: httpx2.Response) -> None:
        """Note an HTTP status that the official client's errors leave out."""
        if response.is_error and response.request.method == "POST":
            self._status = f"HTTP {response.status_code}"
            # Some servers answer 400 instead of 404 for a session that they do not know.
            if response.status_code in (400, 404) and "mcp-session-id" in response.request.headers:
                self._end_session()

    async def _serve(self, ready: asyncio.Future[list[Schema]], stop: asyncio.Event) -> None:
        session = None
        try:
            async with (
                self._streams() as streams,
                ClientSession(*streams) as session,
            ):
                await session.initialize()
                listed = await session.list_tools()
                tools = list(listed.tools)
                while listed.next_cursor:
                    more = PaginatedRequestParams(cursor=listed.next_cursor)
                    listed = await session.list_tools(params=more)
                    tools += listed.tools
                self._session = session
                if not ready.done():
                    ready.set_result(list(map(_schema, tools)))
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(RuntimeError(f"{self._status} {_said(error)}".strip()))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if self._session is session:  # not that of a server started since
                self._session = None

    async def call(self, name: str, arguments: dict[str, Any], limit_s: float) -> str:
        """Call the server's tool `name` with `arguments` and return its result as text; parts that
        are no text become a word such as "[image]". The server is started first if it does not run.

        Raises `CallError`, which the model is told, if the tool fails or does not answer within
        `limit_s` seconds, and `ConnectionError` if the server cannot be reached or has ended.
        """
        async with self._starting:
            if self._session is None:
                try:
                    await self.start()
                except ValueError as error:
                    raise ConnectionError(str(error)) from None
        assert self._session is not None
        try:
            async with asyncio.timeout(limit_s):
                result = await self._session.call_tool(name, arguments)
        except TimeoutError:
            raise CallError(f"the tool did not answer within {limit_s:g} s") from None
        except Exception as error:
            code = getattr(error, "code", 0)
            is_gone = isinstance(error, BrokenResourceError | ClosedResourceError)
            if is_gone or code == CONNECTION_CLOSED:
                self._end_session()
            elif not is_remote(self._command) or code not in NO_ANSWER:
                raise CallError(f"{type(error).__name__}: {error}") from None
            reason = shortened(f"{self._status} {error}".strip(), ERROR_CHARACTERS)
            raise ConnectionError(
                f"the MCP server '{self.name}' did not answer a call, or has ended ({reason})"
            ) from None
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if result.is_error:
            raise CallError(text)
        return text

    def _end_session(self) -> None:
        self._stop.set()
        self._session = None

    async def close(self) -> None:
        """End the server's process, or the session with a server at a URL; waits a few seconds."""
        if self._task is not None:
            self._stop.set()
            await asyncio.wait({self._task}, timeout=SOON_S)
            self._task.cancel()


class ServerTool:
    """One tool of an MCP server that the model may call: `schema` describes the tool as a dict in
    OpenAI's format, and `call` sends the call to the server.
    """

    def __init__(self, server: ToolServer, schema: Schema) -> None:
        self.schema, self._server = schema, server

    async def call(self, arguments: str, limit_s: float) -> str:
        """Call the tool with `arguments`, JSON text of an object, and return its result as text for
        the model. Raises `CallError`, which the model is told, for arguments that are no object, if
        the tool fails or does not answer within `limit_s` seconds, and `ConnectionError` if the
        server cannot be reached or has ended.
        """
        name = self.schema["function"]["name"]
        return await self._server.call(name, read_object(arguments), limit_s)


def _schema(tool: Any) -> Schema:
    return function_schema(tool.name, tool.description, tool.input_schema)


def _said(error: BaseException) -> str:
    """The first error inside a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return shortened(f"{type(error).__name__}: {error}", ERROR_CHARACTERS)
