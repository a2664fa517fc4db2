"""MCP servers as a source of tools, through the official client over standard input and output.

    async with ToolServer(name, command) as server: server.tools -> [Tool]

A server that ends is started again for the next call; the rollout that was calling it fails.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.environments.tools.tool import CallError, Schema, ToolUnavailable, read_object

START_WITHIN_S = 60.0
END_WITHIN_S = 5.0
ROOT = Path(__file__).resolve().parents[3]  # where the package megarl lies
# The server ends with this process, even one that is killed.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.die_with_parent import run
run(int(sys.argv[2]), sys.argv[3:])"""


class ToolServer:
    """One MCP server process. All methods belong to one event loop."""

    def __init__(self, name: str, command: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: environment variables that the server has beside those that the client
        passes on (PATH, HOME, USER and the like).
        """
        self.name, self._command, self._variables = name, command, dict(variables or {})
        self.tools: list[ServerTool] = []
        self._task: asyncio.Task[None] | None = None
        self._session: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the server and read its list of tools. Raises `ValueError` if it does not answer
        within `START_WITHIN_S` seconds.
        """
        ready: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        # One task opens and closes the client, as its cancel scopes require.
        self._task = asyncio.create_task(self._serve(ready))
        try:
            async with asyncio.timeout(START_WITHIN_S):
                schemas = await ready
        except asyncio.CancelledError:
            self._task.cancel()  # or the server runs on beside the one that is started next
            raise
        except Exception as error:
            self._task.cancel()
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ValueError(
                f"environment.tools.servers.{self.name}: `{self._command}` gave no list of tools"
                f" within {START_WITHIN_S:g} s ({said}); run the command by hand to see why"
            ) from None
        if not self.tools:
            self.tools = [ServerTool(self, schema) for schema in schemas]

    async def _serve(self, ready: asyncio.Future[list[Schema]]) -> None:
        from mcp import ClientSession
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command = [sys.executable, "-P", "-c", PROGRAM, str(ROOT), str(os.getpid())]
        parameters = StdioServerParameters(
            command=command[0],
            args=[*command[1:], *shlex.split(self._command)],
            env=self._variables,
        )
        try:
            async with (
                stdio_client(parameters) as (reads, writes),
                ClientSession(reads, writes) as session,
            ):
                await session.initialize()
                listed = await session.list_tools()
                self._session = session
                if not ready.done():
                    ready.set_result([_schema(tool) for tool in listed.tools])
                await self._stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(RuntimeError(_said(error)))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._session = None

    async def call(self, name: str, arguments: dict[str, Any], limit_s: float) -> str:
        """Call a tool of the server; see `megarl.environments.tools.tool.Tool`."""
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
                    raise ToolUnavailable(f"the MCP server '{self.name}' ended during a call")
                raise CallError(f"the tool did not answer within {limit_s:g} s")
            found = asked.result()
        except (CallError, ToolUnavailable):
            raise
        except Exception as error:
            if _is_closed(error):
                self._stop.set()
                self._session = None
                said = f"the MCP server '{self.name}' ended during a call"
                raise ToolUnavailable(said) from None
            raise CallError(f"{type(error).__name__}: {error}") from None
        finally:
            asked.cancel()
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in found.content)
        if found.is_error:
            raise CallError(text)
        return text

    async def close(self) -> None:
        """End the server."""
        if self._task is not None:
            self._stop.set()
            await asyncio.wait({self._task}, timeout=END_WITHIN_S)
            self._task.cancel()


class ServerTool:
    """A tool of an MCP server. See `megarl.environments.tools.tool.Tool`."""

    def __init__(self, server: ToolServer, schema: Schema) -> None:
        self.schema, self._server = schema, server

    async def call(self, arguments: str, limit_s: float) -> str:
        """See `megarl.environments.tools.tool.Tool`."""
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
    from anyio import BrokenResourceError, ClosedResourceError

    closed = isinstance(error, BrokenResourceError | ClosedResourceError)
    return closed or "onnection closed" in str(error)


def _said(error: BaseException) -> str:
    """The first error inside a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
