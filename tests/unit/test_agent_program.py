"""The process of an agent: what it gets, what it may reach, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.apps.gateway.agent_program import (
    NETWORK_SINCE,
    SET_CHILD_SUBREAPER,
    AgentFailed,
    adopt_orphans,
    check_command,
    run_agent_program,
)
from megarl.environments.isolation import call_libc, landlock_version
from megarl.environments.session import Answer
from megarl.types import Prompt

PROMPT = Prompt(3, "1+2", [], "3", {"answer": "3", "topic": "sums"})


def run(tmp_path: Path, program: str, *words: str, port: str = "none", **more: Any) -> Any:
    """What an agent answers whose program is the text `program`."""
    script = tmp_path / "agent.py"
    script.write_text(textwrap.dedent(program))
    command = check_command(["python", str(script), *words], network="open", isolate=port != "none")
    settings: dict[str, Any] = {"columns": ["topic"], "variables": {}} | more
    return asyncio.run(run_agent_program(command, PROMPT, port=port, **settings))


def test_what_an_agent_gets_and_gives(tmp_path: Path) -> None:
    told = """
        import json, os, sys
        row = json.load(open(os.environ["MEGARL_PROMPT"]))
        print("noise")
        print(json.dumps([sys.argv[1:], row, os.listdir("."), os.environ["KEY"], os.getcwd()]))
    """
    said = run(tmp_path, told, "sum {prompt}", variables={"KEY": "k"})
    assert isinstance(said, Answer)
    noise, last = said.text.splitlines()
    words, row, files, key, folder = json.loads(last)
    assert (noise, words, key, files) == ("noise", ["sum 1+2"], "k", [])
    assert row == {"prompt": "1+2", "topic": "sums"}  # and not the answer
    assert not Path(folder).exists()

    scored = """
        import os
        open(os.environ["MEGARL_RESULT"], "w").write('{"reward": 0.5, "steps": 2}')
    """
    assert run(tmp_path, scored) == {"reward": 0.5, "steps": 2}
    assert len(run(tmp_path, "print('x' * 3_000_000, end='')").text) == 2**20


def test_agents_that_fail(tmp_path: Path) -> None:
    with pytest.raises(AgentFailed, match="exit code 1: KeyError: 'of its own'"):
        run(tmp_path, "raise KeyError('of its own')")
    with pytest.raises(AgentFailed, match="signal SIGKILL"):
        run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    pipe = "import os; os.mkfifo(os.environ['MEGARL_RESULT'])"
    with pytest.raises(AgentFailed, match="it is no file"):
        run(tmp_path, pipe)
    link = "import os; os.symlink('/dev/zero', os.environ['MEGARL_RESULT'])"
    with pytest.raises(AgentFailed, match="MEGARL_RESULT is no JSON"):
        run(tmp_path, link)
    assert (
        run(tmp_path, "import os; print('MEGARL_RESULT' in os.environ)", scores=False).text
        == "False"
    )
    finds = "import os; open(os.path.dirname(os.environ['MEGARL_PROMPT']) + '/result.json', 'w')"
    assert run(tmp_path, f"{finds}.write('1'); print('3')", scores=False).text == "3"
    broken = "import os; open(os.environ['MEGARL_RESULT'], 'w').write('{')"
    with pytest.raises(AgentFailed, match="MEGARL_RESULT is no JSON"):
        run(tmp_path, broken)


@pytest.fixture
def adopts() -> Iterator[None]:
    """This process is the parent of what its descendants leave behind, for one test."""
    adopt_orphans()
    yield
    call_libc("prctl", SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("adopts")
def test_nothing_is_left(tmp_path: Path) -> None:
    """Of an agent that is cut off, and of one that ends before what it has started, also in a
    session of its own.
    """
    before = psutil.Process().children()
    starts = f"""
        import subprocess, sys, time
        children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                     start_new_session=apart) for apart in (False, True)]
        open({str(tmp_path / "ids")!r}, "w").write(" ".join(str(one.pid) for one in children))
    """

    brief = (
        "import os\nif not os.fork():\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n"
    )
    assert run(tmp_path, f"{brief}else:\n    import time; time.sleep(0.5)").text == ""
    assert psutil.Process().children() == before, "one that has ended by itself is reaped"

    def ids() -> list[int]:
        return [int(one) for one in (tmp_path / "ids").read_text().split()]

    assert run(tmp_path, starts.rstrip() + "\n        print('said')\n").text == "said"
    first = ids()
    (tmp_path / "ids").unlink()

    async def cut_off() -> None:
        script = tmp_path / "agent.py"
        script.write_text(textwrap.dedent(starts) + "time.sleep(600)")
        running = asyncio.ensure_future(
            run_agent_program([sys.executable, str(script)], PROMPT, [], {}, "none")
        )
        while not ((tmp_path / "ids").exists() and len(ids()) == 2):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(cut_off())
    until = time.monotonic() + 10
    while any(psutil.pid_exists(one) and is_running(one) for one in [*first, *ids()]):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(
    landlock_version() < NETWORK_SINCE, reason="the kernel has no Landlock rules of networks"
)
def test_an_agent_reaches_the_gateway_only(tmp_path: Path) -> None:
    """Not another server, nor the memory and environment of the process that has started it."""
    ours, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    ports = [one.getsockname()[1] for one in (ours, other)]
    tries = f"""
        import json, os, socket
        found = []
        for port in {ports}:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                found.append(True)
            except OSError:
                found.append(False)
        for path in ("environ", "mem"):
            try:
                open("/proc/{os.getpid()}/" + path, "rb").read(1)
                found.append(True)
            except OSError:
                found.append(False)
        print(json.dumps(found))
    """
    with ours, other:
        assert json.loads(run(tmp_path, tries, port=str(ports[0])).text) == [True, *[False] * 3]
        assert json.loads(run(tmp_path, tries, port="0").text)[:2] == [True, True]


def test_commands_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="begins with 'no_such_agent', and there is no such"):
        check_command(["no_such_agent"], network="open", isolate=True)
    with pytest.raises(ValueError, match=r"names none\.py, but there is no such file"):
        check_command(["python", "none.py"], network="open", isolate=True)
    where = "megarl.apps.gateway.agent_program.landlock_version"
    monkeypatch.setattr(where, lambda: NETWORK_SINCE - 1)
    with pytest.raises(ValueError, match=r"set environment\.agent\.network to 'open'"):
        check_command(["python"], network="gateway", isolate=True)
    check_command(["python"], network="gateway", isolate=False)
