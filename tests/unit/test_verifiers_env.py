"""Environments of `verifiers` as programs of an agent, against a small server of the chat
completions API. Most of it needs the package, and is skipped without.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT

from megarl.apps.adapters import verifiers_env

PROGRAM = ROOT / "megarl" / "apps" / "adapters" / "verifiers_env.py"
SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def answers(self, trace: vf.Trace) -> float:
        return 0.25 * (trace.last_reply or "").isdigit()

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

class SumConfig(vf.TasksetConfig):
    more: int = 3

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(5):
            answer = str(a + self.config.more)
            data = SumData(name=f"s{a}", prompt=f"{a}+{self.config.more}=", answer=answer)
            yield SumTask(data, self.config.task)

__all__ = ["SumTaskset"]
"""


def is_installed() -> bool:
    """Whether verifiers is there in the version that the adapter needs."""
    try:
        return importlib.metadata.version("verifiers") == verifiers_env.VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


NEEDS = pytest.mark.skipif(
    not is_installed(), reason=f"verifiers {verifiers_env.VERSION} is not installed"
)


class Answers(BaseHTTPRequestHandler):
    """Answers every call with the text of the server's `says`."""

    def do_POST(self) -> None:
        server: Any = self.server
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.calls.append((self.path, self.headers["authorization"], asked))
        assert asked["stream"], "a chat loop of verifiers streams"
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        head = {"id": "c", "created": 1, "model": asked["model"], "object": "chat.completion.chunk"}
        said = {"role": "assistant", "content": server.says}
        parts = [
            head | {"choices": [{"index": 0, "delta": said, "finish_reason": None}]},
            head
            | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage},
        ]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for part in [*map(json.dumps, parts), "[DONE]"]:
            self.wfile.write(f"data: {part}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        found: Any = made
        found.calls, found.says = [], ""
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield found
        made.shutdown()


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The adapter's program, beside a taskset of sums."""
    (folder / "sums.py").write_text(SUMS)
    environ = os.environ | {"PYTHONPATH": str(folder)} | variables
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


def test_another_version_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifiers_env, "VERSION", "9.0")
    with pytest.raises(
        SystemExit, match=r"^verifiers 9.0 is needed, and .* is installed for .*; ins"
    ):
        verifiers_env.environment("sums", {})


@NEEDS
def test_a_rollout_has_the_rewards_of_its_environment(tmp_path: Path, server: Any) -> None:
    made = run(tmp_path, "sums", "3", '{"more": 4}')
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["0+4=", "1+4=", "2+4="], made.stderr
    (tmp_path / "prompt.json").write_text(json.dumps(rows[2]))
    named = {
        "MEGARL_PROMPT": str(tmp_path / "prompt.json"),
        "MEGARL_RESULT": str(tmp_path / "result.json"),
        "MEGARL_MODEL": "ours",
        "OPENAI_API_KEY": "secret",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
    }
    for says, want in {
        "6": {"right": 1.0, "answers": 0.25, "letters": 1.0, "reward": 0.75},
        "12": {"right": 0.0, "answers": 0.25, "letters": 2.0, "reward": 0.25},
        "six": {"right": 0.0, "answers": 0.0, "letters": 3.0, "reward": 0.0},
    }.items():
        server.says = says
        done = run(tmp_path, **named)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "result.json").read_text()) == want
    path, key, asked = server.calls[0]
    assert (path, key, asked["model"]) == ("/v1/chat/completions", "Bearer secret", "ours")
    assert asked["messages"] == [{"role": "user", "content": "2+4="}]
    server.shutdown()
    server.server_close()
    failed = run(tmp_path, **named)
    assert failed.returncode != 0 and "sums, task 2: " in failed.stderr.splitlines()[-1]
