"""MCP servers as tools: over standard input and output, and over HTTP; how they fail."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.server import MCPServer
from support.documented import block
from support.environments import opened
from support.reward_servers import free_port, serving

from megarl.apps.tools import servers
from megarl.apps.tools.servers import ToolServer
from megarl.apps.tools.tool import CallError
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.tools import ToolsConfig

SERVER = """
import os, sys
from mcp.server import MCPServer
server = MCPServer("numbers")

@server.tool()
def double(a: int) -> int:
    "Twice a number."
    return 2 * a

@server.tool()
def fails(a: int) -> int:
    raise ValueError("no such number")

@server.tool()
def ends() -> int:
    print("out of disk", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
async def waits() -> int:
    import anyio
    await anyio.sleep(60)
    return 0

@server.tool()
def secrets() -> str:
    return " ".join(sorted(os.environ))

open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
server.run("stdio")
"""


async def test_the_tools_of_an_mcp_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    marks = tmp_path / "pids"
    async with tools_of(ToolServer("numbers", program(tmp_path, SERVER, str(marks)))) as tools:
        about = tools["double"].schema["function"]
        assert about["description"] == "Twice a number."
        assert about["parameters"]["properties"]["a"]["type"] == "integer"
        assert await tools["double"].call('{"a": 21}', 5.0) == "42"
        with pytest.raises(CallError, match="Error executing tool fails"):
            await tools["fails"].call('{"a": 1}', 5.0)
        with pytest.raises(CallError):
            await tools["double"].call('{"a": "one"}', 5.0)
        with pytest.raises(CallError, match="not an object"):
            await tools["double"].call("[1]", 5.0)
        with pytest.raises(CallError, match=r"did not answer within 0.5 s"):
            await tools["waits"].call("{}", 0.5)
        assert "SOME_API_KEY" not in await tools["secrets"].call("{}", 5.0)
        with pytest.raises(ConnectionError, match=r"has ended \(Connection closed"):
            await tools["ends"].call("{}", 5.0)
        assert "out of disk" in capfd.readouterr().err
        assert await tools["double"].call('{"a": 4}', 30.0) == "8", "it is started again"
    pids = [int(line) for line in marks.read_text().split()]
    assert len(pids) == 2
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    assert all(psutil.Process(pid).status() == "zombie" for pid in left), "nothing is left"


@asynccontextmanager
async def tools_of(server: ToolServer) -> AsyncIterator[dict[str, Any]]:
    """The tools {name: tool} of a server, which is started, and closed at the end."""
    try:
        await server.start()
        yield {tool.schema["function"]["name"]: tool for tool in server.tools}
    finally:
        await server.close()


def program(folder: Path, text: str, words: str = "") -> str:
    """The command of a Python program that is written to folder/server.py."""
    (folder / "server.py").write_text(text)
    return f"{sys.executable} {folder}/server.py {words}".strip()


async def refused(command: str, **settings: Any) -> str:
    """What is said of a server that does not start; in one line."""
    with pytest.raises(ValueError) as told:
        async with tools_of(ToolServer("broken", command, **settings)):
            pass
    assert "\n" not in str(told.value) and len(str(told.value)) < 900
    return str(told.value)


DIES = "import sys; sys.exit('no such folder:\\n/data')"
BANNER = "import sys; print('Listening', flush=True); sys.exit('port taken')"
OTHER = """import json, sys; sys.stderr.write('speaking LSP'); sys.stderr.flush()
asked = json.loads(sys.stdin.readline())
print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': {'capabilities': 3}}), flush=True)
sys.stdin.read()"""


@pytest.mark.parametrize(("text", "said", "wrote"), [
    (DIES, "Connection closed", "no such folder:\n/data"),
    (BANNER, "Connection closed", "port taken"),
    (OTHER, "InitializeResult", "speaking LSP"),
], ids=["dies", "banner", "other"])  # fmt: skip
async def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, said: str, wrote: str
) -> None:
    told = await refused(program(tmp_path, text))
    assert re.search(f"servers.broken: `.*` gave no list of tools.*{said}", told), told
    assert wrote in capfd.readouterr().err


BY_HAND = """import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    page = int((asked.get("params") or {}).get("cursor", 0))
    found = {"tools": [{"name": f"tool{page}", "inputSchema": {"type": "object"}}]}
    if page < 2:
        found["nextCursor"] = str(page + 1)
    if asked["method"] == "initialize":
        found = {"protocolVersion": "2025-03-26", "capabilities": {}}
        found["serverInfo"] = {"name": "by hand", "version": "1"}
    if asked["method"] == "tools/call":
        os.write(1, eval(sys.argv[1]))
        found = {"content": [{"type": "text", "text": "fine \u2713"}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)"""


async def test_a_list_of_several_pages_is_read_to_its_end(tmp_path: Path) -> None:
    async with tools_of(ToolServer("pages", program(tmp_path, BY_HAND))) as tools:
        assert list(tools) == ["tool0", "tool1", "tool2"]


@pytest.mark.parametrize(
    "junk",
    [r"b'\xff\xfe\n'", r"b'\xe2\x82\n'", r"b'caf\xe9\n\0\n[]\n'", r"b'x'*10**6+b'\n'"],
    ids=["no text", "half a character", "latin-1, NUL, batch", "long"],
)
async def test_a_line_that_is_no_message_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, junk: str
) -> None:
    async with tools_of(ToolServer("junk", program(tmp_path, BY_HAND, f'"{junk}"'))) as tools:
        for _ in range(2):
            assert await tools["tool0"].call("{}", 10.0) == "fine \u2713"
    assert caplog.text == "", "no traceback for each of them"


async def test_arguments_that_cannot_be_sent_fail_alone(tmp_path: Path) -> None:
    """The client would end the session of all calls."""
    async with tools_of(ToolServer("junk", program(tmp_path, BY_HAND, "'bytes()'"))) as tools:
        for bad in (r'{"a": "\ud800"}', r'{"\udfff": 1}', '{"a": %s}' % ("[" * 300 + "]" * 300)):
            with pytest.raises(CallError, match="the arguments cannot be sent"):
                await tools["tool0"].call(bad, 10.0)
        assert await tools["tool0"].call(r'{"a": "\ud83d\ude00"}', 10.0) == "fine \u2713"


async def test_a_server_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "START_WITHIN_S", 0.5)
    assert "`sleep 60` gave no list of tools within 0.5 s; see what it wrote" in await refused(
        "sleep 60"
    )
    monkeypatch.setattr(servers, "START_WITHIN_S", 60.0)
    assert "broken: `false` gave no list of tools (" in await refused("false")


async def test_the_server_of_the_tutorial(tmp_path: Path) -> None:
    command = program(tmp_path, block("python calculator_server.py"))
    async with tools_of(ToolServer("calculator", command)) as tools:
        assert sorted(tools) == ["add", "multiply"]
        assert await tools["multiply"].call('{"a": 37, "b": 58}', 10.0) == "2146"


# --------------------------------------------------------------------------------------------- HTTP


class Http:
    """An MCP server of the official package over HTTP, with a token; as an ASGI application."""

    def __init__(self, *, json: bool) -> None:
        server = MCPServer("numbers")
        server.add_tool(self.double)
        server.add_tool(self.waits)
        self._app = server.streamable_http_app(json_response=json)
        self.sessions: list[bytes | None] = []
        self.forgotten: bytes | None = None
        """A session that the server is to know no longer."""
        self.fault: tuple[int, str, bytes] | None = None
        """(status, type, body) with which calls are answered."""

    def double(self, a: int) -> int:
        """Twice a number."""
        return 2 * a

    async def waits(self) -> int:
        """Never."""
        await asyncio.sleep(600)
        return 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        heads = dict(scope["headers"])
        session = heads.get(b"mcp-session-id")
        if heads.get(b"authorization") != b"Bearer hush":
            return await answer(send, 401, "text/plain", b"who are you, Bearer wrong?")
        if scope["method"] == "POST":
            self.sessions.append(session)
            if self.fault and session is not None:
                return await answer(send, *self.fault)
        if session is not None and session == self.forgotten:
            heads[b"mcp-session-id"] = b"unknown"
            scope = {**scope, "headers": list(heads.items())}
        await self._app(scope, receive, send)


async def answer(send: Any, status: int, kind: str, body: bytes) -> None:
    """Answer an HTTP request."""
    head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("json", [True, False], ids=["json", "sse"])
async def test_the_tools_of_a_server_over_http(monkeypatch: pytest.MonkeyPatch, json: bool) -> None:
    monkeypatch.setenv("NUMBERS_TOKEN", "hush")
    app = Http(json=json)

    async def use(tools: dict[str, Any]) -> None:
        double = tools["double"]
        assert await double.call('{"a": 21}', 60.0) == "42"
        with pytest.raises(CallError, match="validation error"):
            await double.call('{"a": "one"}', 60.0)
        for fault, said in (
            ((503, "text/plain", b"busy, hush"), "HTTP 503"),
            ((200, "text/html", b"<p>hello"), "Unexpected content type: text/html"),
            ((200, "application/json", b"nonsense"), "Failed to parse JSON"),
            ((200, "text/event-stream", b""), "ended without a response"),
            ((202, "application/json", b""), "answered a request with 202"),
        ):
            app.fault = fault
            with pytest.raises(ConnectionError, match=said):
                await double.call('{"a": 1}', 60.0)
            app.fault = None
        held = asyncio.create_task(tools["waits"].call("{}", 60.0))
        with pytest.raises(CallError, match=r"did not answer within 0.5 s"):
            await tools["waits"].call("{}", 0.5)
        assert await double.call('{"a": 4}', 60.0) == "8"
        assert not held.done(), "the other calls go on"
        app.forgotten = app.sessions[-1]
        with pytest.raises(ConnectionError, match="HTTP 404"):
            await double.call('{"a": 1}', 60.0)
        with pytest.raises(ConnectionError):
            await held
        assert await double.call('{"a": 5}', 60.0) == "10", "in a new session"

    with serving(app, path="/mcp", lifespan="on") as address:
        async with tools_of(ToolServer("numbers", address, {}, "NUMBERS_TOKEN")) as tools:
            await use(tools)
        monkeypatch.setenv("NUMBERS_TOKEN", "wrong")
        told = await refused(address, token_variable="NUMBERS_TOKEN")  # noqa: S106 - a name
        assert "HTTP 401" in told and "wrong" not in told.partition(";")[0]
        assert "export NUMBERS_TOKEN (environment.tools.server_tokens.broken)" in told
        told = await refused(address)
        assert "HTTP 401" in told and "set environment.tools.server_tokens.broken" in told


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """Take a request and never answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Answer each request with a page."""
    await answer(send, 200, "text/html", b"<html>" * 1000)


async def test_an_address_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ConnectError" in await refused(f"http://127.0.0.1:{free_port()}/mcp")
    with serving(page, path="/") as address:
        assert "Unexpected content type: text/html" in await refused(address)
    monkeypatch.setattr(servers, "START_WITHIN_S", 0.5)
    with serving(silent, path="/") as address:
        assert "gave no list of tools within 0.5 s; set the address" in await refused(address)


async def test_a_server_that_goes_away_costs_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBERS_TOKEN", "hush")
    port = free_port()
    first = serving(Http(json=True), port, "/mcp", lifespan="on")
    address = first.__enter__()
    async with tools_of(ToolServer("numbers", address, {}, "NUMBERS_TOKEN")) as tools:
        assert await tools["double"].call('{"a": 1}', 60.0) == "2"
        await asyncio.to_thread(first.__exit__, None, None, None)
        with pytest.raises(ConnectionError, match="did not answer"):
            await tools["double"].call('{"a": 1}', 60.0)
        with serving(Http(json=True), port, "/mcp", lifespan="on"):
            assert await tools["double"].call('{"a": 2}', 60.0) == "4"


async def test_a_worker_process_reaches_a_server_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token's variable is passed on to the worker process, and required before the run."""
    with serving(Http(json=True), path="/mcp", lifespan="on") as address:
        tools = ToolsConfig(servers={"numbers": address}, server_tokens={"numbers": "SOME_TOKEN"})
        monkeypatch.delenv("SOME_TOKEN", raising=False)
        with pytest.raises(ValueError, match=r"tools.server_tokens.numbers names SOME_TOKEN, but"):
            async with opened(EnvironmentConfig(tools=tools)) as environment:
                await environment.start()
        monkeypatch.setenv("SOME_TOKEN", "hush")
        async with opened(EnvironmentConfig(tools=tools)) as environment:
            await environment.start()
            names = [tool["function"]["name"] for tool in environment.tools]
            assert names == ["double", "waits"]


@pytest.mark.parametrize(("servers", "tokens", "said"), [
    ({"a": "http:///mcp"}, {}, r"servers.a is 'http:///mcp', which names no host"),
    ({"a": "https://x/mcp?key=hush"}, {}, r"servers.a holds a user, a query"),
    ({"a": "https://x/mcp"}, {"a": "hush-123"}, r"server_tokens.a is not the name"),
    ({"a": "https://x/mcp"}, {"a": ""}, r"server_tokens.a is not the name"),
    ({"a": "true"}, {"a": "A_TOKEN"}, r"server_tokens.a is set, but .*no address"),
    ({"a": "https://x/mcp"}, {"b": "A_TOKEN"}, r"server_tokens.b is set, but .*no address"),
    ({"a": " "}, {}, r"servers.a is empty; set the command line or the address"),
])  # fmt: skip
def test_wrong_settings_of_servers(
    servers: dict[str, str], tokens: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as told:
        ToolsConfig(servers=servers, server_tokens=tokens)
    assert "hush" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [({}, ""), ({"pass_variables": ("A_KEY",)}, "A_KEY"), ({"isolate": False}, "A_KEY B_KEY")],
)
async def test_tools_get_the_variables_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], seen: str
) -> None:
    """In a worker process as in a run: what a function and a server see is in their descriptions."""
    for name in ("A_KEY", "B_KEY"):
        monkeypatch.setenv(name, "hush")
    sees = (
        'import os\nSEES = "sees: " + " ".join(n for n in ("A_KEY", "B_KEY") if n in os.environ)\n'
    )
    (tmp_path / "own.py").write_text(f"{sees}def own() -> int:\n    return 1\nown.__doc__ = SEES\n")
    (tmp_path / "server.py").write_text(
        f"{sees}from mcp.server import MCPServer\nserver = MCPServer('one')\n"
        "def its() -> int:\n    return 1\n"
        "server.add_tool(its, description=SEES)\nserver.run('stdio')\n"
    )
    tools = ToolsConfig(
        functions=(f"{tmp_path}/own.py:own",),
        servers={"one": f"{sys.executable} {tmp_path}/server.py"},
    )
    config = EnvironmentConfig(tools=tools, **settings)

    async with opened(config) as environment:
        await environment.start()
        told = [tool["function"]["description"].strip() for tool in environment.tools]
    assert told == [f"sees: {seen}".strip()] * 2
