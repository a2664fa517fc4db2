"""Environments of `verifiers` as a source of prompts and an agent, against a small server of the
chat completions API. Most of it needs the package, and is skipped without (`support`).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.verifiers_sums import NEEDS, PYTHON, SUMS

from megarl.apps.adapters import verifiers_agent
from megarl.apps.adapters.verifiers_agent import play_episode, verifiers_rows
from megarl.types import Prompt

ASKS_TWICE = """
import verifiers.v1 as vf
from sums import SumTaskset

class TwiceConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class TwiceEnv(vf.Env[TwiceConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Sure?")

class TwiceTaskset(SumTaskset):
    pass

__all__ = ["TwiceEnv", "TwiceTaskset"]
"""


class Answers(BaseHTTPRequestHandler):
    """Answers every call with the text of the server's `says`, once `open` is set."""

    def do_POST(self) -> None:
        server: Any = self.server
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.calls.append((self.path, self.headers["x-api-key"], asked))
        server.open.wait()
        message = {"role": "assistant", "content": server.says}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        made = {"id": "c", "created": 1, "model": asked["model"], "object": "chat.completion"}
        body = json.dumps(made | {"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of a model, and the tasksets `sums` and `twice` that can be imported."""
    sums = f"import openenv_is_not_shadowed\n{SUMS}"
    for name, text in {"sums": sums, "twice": ASKS_TWICE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "openenv_is_not_shadowed.py").write_text(
        "import importlib.util as util\n"
        "assert 'adapters' not in str(getattr(util.find_spec('openenv'), 'origin', ''))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verifiers_agent, "_programs", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        found: Any = made
        found.calls, found.says, found.open = [], "", threading.Event()
        found.open.set()
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield found
        made.shutdown()


def play(server: Any, row: dict[str, Any], key: str = "secret") -> Coroutine[Any, Any, Any]:
    """One episode of a row, as the gateway has an agent play it."""
    client = SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}/v1/", api_key=key)
    return play_episode(
        Prompt(index=0, text=row["prompt"], token_ids=[], answer="", fields=row), client
    )


@pytest.mark.parametrize("version", ["9.0", ""])
def test_another_version_or_none_is_one_line_that_says_what_to_set(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "verifiers is not installed"
    if version:
        said = f"verifiers {version} is installed"
        (tmp_path / "verifiers-9.0.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
        (tmp_path / "verifiers-9.0.dist-info" / "METADATA").write_text(about)
    elif find_spec("verifiers"):
        pytest.skip("verifiers is installed")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=rf"^{re.escape(f'{said} for {sys.executable}')}, and 0.4.0 is needed; set"
    ):
        verifiers_rows("sums", {}, None)


def test_other_mistakes_are_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^prompts.arguments.python is '/no/python', which cannot"
    ):
        verifiers_rows("sums", {"python": "/no/python"}, None)
    with pytest.raises(ValueError, match=r"^prompts.arguments.size is -1; set it to"):
        verifiers_rows("sums", {"size": -1}, None)
    with pytest.raises(
        ValueError, match=r"^row 0 is of no environment of verifiers; set prompts.s"
    ):
        asyncio.run(play(SimpleNamespace(server_port=1), {"prompt": "a"}))


@NEEDS
@pytest.mark.usefixtures("server")
def test_an_environment_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^verifiers:nosuch cannot be loaded with {}: .* not found"
    ):
        verifiers_rows("nosuch", {"python": PYTHON}, None)
    with pytest.raises(
        ValueError, match=r"^verifiers:sums cannot .*{\"moar\": 4}: .*taskset.moar "
    ):
        verifiers_rows("sums", {"python": PYTHON, "moar": 4}, None)


@NEEDS
def test_rollouts_have_the_rewards_of_their_environment(server: Any) -> None:
    rows = verifiers_rows("sums", {"python": PYTHON, "size": 9, "more": 4}, None)
    assert [row["prompt"] for row in rows] == ["0+4=", "1+4=", "2+4=", "3+4=", "4+4="]
    assert verifiers_rows("sums", {"python": PYTHON, "more": 4}, 2) == rows[:2]
    (asks_twice,) = verifiers_rows("twice", {"python": PYTHON, "size": 1}, None)

    async def run() -> None:
        for says, want in {
            "6": {"right": 1.0, "answers": 0.25, "letters": 1.0, "reward": 0.75},
            "12": {"right": 0.0, "answers": 0.25, "letters": 2.0, "reward": 0.25},
            "six": {"right": 0.0, "answers": 0.0, "letters": 3.0, "reward": 0.0},
        }.items():
            server.says = says
            found = await asyncio.gather(*(play(server, rows[2], f"key {n}") for n in range(3)))
            assert found == [want] * 3
        path, _, asked = server.calls[0]
        assert (path, asked["model"]) == ("/v1/chat/completions", "policy")
        assert sorted(key for _, key, _ in server.calls[:3]) == ["key 0", "key 1", "key 2"]
        first = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "2+4="},
        ]
        assert asked["messages"] == first

        server.calls.clear()
        server.says = "3"
        assert (await play(server, asks_twice))["reward"] == 0.75
        (_, _, one), (_, _, two) = server.calls
        said = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
        assert two["messages"] == [*one["messages"], *said]

        # A rollout that is cut off, and one whose environment ends the program, end alone.
        server.open.clear()
        cut_off = asyncio.create_task(play(server, rows[0]))
        while len(server.calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cut_off.cancel()
        await asyncio.wait([cut_off])
        assert cut_off.cancelled()
        server.open.set()
        server.says = "ends"
        with pytest.raises(RuntimeError, match="the program of verifiers ended; see"):
            await play(server, rows[0])
        server.says = "4"
        assert (await play(server, rows[0]))["reward"] == 0.75
        server.shutdown()
        server.server_close()
        with pytest.raises(RuntimeError, match=r"^sums, task 2: "):
            await play(server, rows[2])
        (program,) = verifiers_agent._programs.values()
        process: Any = program._process
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 20)

    asyncio.run(run())
