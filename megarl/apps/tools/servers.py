"""MCP servers as a source of tools, through the official client.

    async with ToolServer(name, command) as server: server.tools -> [Tool]

A server is a command, whose process is started here, or the address of one that runs. A server
that ends, or forgets the session, is started or asked for a new one with the next call; the rollout
that was calling it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from anyio import BrokenResourceError, ClosedResourceError
from mcp import ClientSession
from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR, PaginatedRequestParams
from pydantic import ValidationError

from megarl.apps.tools.tool import CallError, Schema, ToolUnavailable, read_object
from megarl.apps.tools.transports import FAILED, LOST, LastWords, over_http, over_pipes
from megarl.environments.addresses import is_remote, read_token
from megarl.schema import shortened

START_WITHIN_S = 60.0
END_WITHIN_S = 5.0
ERROR_CHARACTERS = 300
NO_ANSWER = (FAILED, LOST, CONNECTION_CLOSED, PARSE_ERROR, INVALID_REQUEST)
"""Codes of errors over HTTP that are nothing which a model could mend."""


class ToolServer:
    """One MCP server. All methods belong to one event loop."""

    def __init__(
        self,
        name: str,
        command: str,
        variables: Mapping[str, str] | None = None,
        token_variable: str = "",
        limit_s: float = 60.0,
    ) -> None:
        """`command`: a command line, or an address. `variables`: environment variables that a
        process has beside those that the client passes on (PATH, HOME, USER and the like).
        `token_variable`: the one that holds the bearer token for an address; empty: none is sent.
        `limit_s`: longest time limit of a call.
        """
        self.name, self._command, self._variables = name, command, dict(variables or {})
        self._token_variable, self._limit_s = token_variable, limit_s
        self.tools: list[ServerTool] = []
        self._task: asyncio.Task[None] | None = None
        self._session: Any = None
        self._starting = asyncio.Lock()
        self._words: LastWords | None = None
        self._nonsense = ""

    async def start(self) -> None:
        """Start the server and read its list of tools. Raises `ValueError` if it does not answer
        within `START_WITHIN_S` seconds.
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
            what = f" within {START_WITHIN_S:g} s" if timed_out else f" ({error})"
            raise ValueError(
                f"environment.tools.servers.{self.name}: `{self._command}` gave no list of tools"
                f"{what}{await self._last_words()}; {self._advice(str(error))}"
            ) from None
        if not self.tools:
            self.tools = [ServerTool(self, schema) for schema in schemas]

    def _advice(self, said: str) -> str:
        if not is_remote(self._command):
            return "run the command by hand to see why"
        if "HTTP 401" in said or "HTTP 403" in said:
            setting = f"environment.tools.server_tokens.{self.name}"
            return (
                f"export {self._token_variable} ({setting}) with the server's token"
                if self._token_variable
                else f"set {setting} to the name of the environment variable that holds its token"
            )
        return "set the address at which it speaks MCP by streamable HTTP, and see its log"

    async def _last_words(self) -> str:
        """What the server has written that explains a failure, for messages."""
        wrote = await self._words.read() if self._words is not None else ""
        said = f"; on standard output it wrote what is no message: {self._nonsense}"
        return (f"; it wrote: {wrote}" if wrote else "") + (said if self._nonsense else "")

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        if is_remote(self._command):
            setting = f"environment.tools.server_tokens.{self.name}"
            token = read_token(self._token_variable, setting)
            async with over_http(self._command, token, START_WITHIN_S + self._limit_s) as streams:
                yield streams
        else:
            if self._words is not None:
                self._words.close()
            self._words = LastWords(self.name)
            async with over_pipes(self._command, self._variables, self._words) as streams:
                yield streams

    async def _note(self, message: Any) -> None:
        """Handle what the MCP client passes on beside answers: of lines on the server's standard
        output that are no MCP messages, keep the first for errors.
        """
        if isinstance(message, ValidationError) and not self._nonsense:
            self._nonsense = shortened(repr(message.errors()[0]["input"]), ERROR_CHARACTERS)

    async def _serve(self, ready: asyncio.Future[list[Schema]], stop: asyncio.Event) -> None:
        session = None
        try:
            async with (
                self._streams() as streams,
                ClientSession(*streams, message_handler=self._note) as session,
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
                    ready.set_result([_schema(tool) for tool in tools])
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(RuntimeError(_said(error)))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if self._session is session:  # not that of a server started since
                self._session = None

    async def call(self, name: str, arguments: dict[str, Any], limit_s: float) -> str:
        """The text that the server's tool `name` returns for `arguments`; the server is started
        first if it does not run.

        Raises `CallError`, which the model is told, if the tool fails or does not answer within
        `limit_s` seconds, and `ToolUnavailable` if the server cannot be reached or has ended.
        """
        async with self._starting:
            if self._session is None:
                try:
                    await self.start()
                except ValueError as error:
                    raise ToolUnavailable(str(error)) from None
        session, task = self._session, self._task
        assert session is not None and task is not None
        asked = asyncio.ensure_future(session.call_tool(name, arguments))
        try:
            await asyncio.wait({asked, task}, timeout=limit_s, return_when="FIRST_COMPLETED")
            if not asked.done():
                if task.done():
                    raise ToolUnavailable(await self._gone())
                raise CallError(f"the tool did not answer within {limit_s:g} s")
            found = asked.result()
        except (CallError, ToolUnavailable):
            raise
        except Exception as error:
            code = getattr(error, "code", 0)
            if is_remote(self._command) and code in NO_ANSWER:
                if code == LOST:
                    self._end_session()
                said = shortened(str(error), ERROR_CHARACTERS)
                raise ToolUnavailable(
                    f"the MCP server '{self.name}' did not answer a call ({said})"
                ) from None
            if _is_closed(error):
                self._end_session()
                raise ToolUnavailable(await self._gone()) from None
            raise CallError(f"{type(error).__name__}: {error}") from None
        finally:
            asked.cancel()
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in found.content)
        if found.is_error:
            raise CallError(text)
        return text

    def _end_session(self) -> None:
        self._stop.set()
        self._session = None

    async def _gone(self) -> str:
        return f"the MCP server '{self.name}' ended during a call{await self._last_words()}"

    async def close(self) -> None:
        """End the server, or the session with one that was not started here."""
        if self._task is not None:
            self._stop.set()
            await asyncio.wait({self._task}, timeout=END_WITHIN_S)
            self._task.cancel()
        if self._words is not None:
            self._words.close()


class ServerTool:
    """A tool of an MCP server. See `megarl.apps.tools.tool.Tool`."""

    def __init__(self, server: ToolServer, schema: Schema) -> None:
        self.schema, self._server = schema, server

    async def call(self, arguments: str, limit_s: float) -> str:
        """See `megarl.apps.tools.tool.Tool`."""
        name = self.schema["function"]["name"]
        return await self._server.call(name, read_object(arguments), limit_s)


def _schema(tool: Any) -> Schema:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        },
    }


def _is_closed(error: Exception) -> bool:
    """Whether an error of the client says that the server is gone."""
    closed = isinstance(error, BrokenResourceError | ClosedResourceError)
    return closed or "onnection closed" in str(error)


def _said(error: BaseException) -> str:
    """The first error inside a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return shortened(f"{type(error).__name__}: {error}", ERROR_CHARACTERS)
