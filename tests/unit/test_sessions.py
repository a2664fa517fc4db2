"""Sessions in their worker processes: many at once, each bounded, none lost in silence."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rollouts import segment
from support.tiny import write_tokenizer

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scores import Outcome
from megarl.environments.scoring import Environment
from megarl.environments.user_calls import UserCalls
from megarl.environments.worker import Host
from megarl.environments.workers import Workers
from megarl.rollout.attempts import Attempts
from megarl.rollout.requests import EnginePool
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.rollout import RolloutConfig
from megarl.types import Prompt, Segment, Verdict

CLASSES = """
import asyncio, os, sys, threading, time
from megarl.environments.session import Answer, Observation

class Unsayable(Exception):
    def __str__(self): raise self

class Stays:
    '''Its step catches the cancellation; what is cut off inside is no text.'''
    async def start(self, prompt): return Observation("")
    async def step(self, text, token_ids):
        while True:
            try: await asyncio.sleep(60)
            except asyncio.CancelledError: pass
    def cut_off_inside(self, token_ids): return {1}

class Waits:
    async def start(self, prompt):
        self.turns = 0
        return Observation("")
    async def step(self, text, token_ids):
        self.turns += 1
        await asyncio.sleep(0.2)
        return Observation("a", reward=0.5) if self.turns < 2 else float(self.turns)

class Mixed:
    '''What it does is said by the prompt's answer.'''
    def start(self, prompt):
        self.told, self.turns = prompt.answer, 0
        if self.told == "late start": time.sleep(60)
        return Observation("")
    def step(self, text, token_ids):
        self.turns += 1
        if self.told == "loop":
            while True: pass
        if self.told == "sleep": time.sleep(60)
        if self.told == "fork" and not os.fork(): sys.exit(0)
        if self.told == "exit": sys.exit(3)
        if self.told == "die": os._exit(7)
        if self.told.startswith("/") and not os.path.exists(self.told):
            open(self.told, "w").close()
            os._exit(7)
        if self.told == "raise": raise TimeoutError("a time-out of its own")
        if self.told == "number": return Observation(5)
        if self.told == "nothing": return Observation("")
        if self.told == "nan": return Observation("a", reward=float("nan"))
        if self.told == "wrong": return "a text"
        if self.told == "answer": return Answer("8")
        if self.told == "no answer": return Answer(8)
        if self.told == "unsayable": raise Unsayable
        if self.told == "long": return Observation("a" * 4_000_001)
        return Observation("a") if self.turns < 3 else 1.0

class LimitsItself(Mixed):
    limits_its_calls = True
    async def start(self, prompt):
        await asyncio.sleep(1.0)
        return super().start(prompt)

class Blocks(Mixed):
    async def step(self, text, token_ids):
        return super().step(text, token_ids)

class Forks(Mixed):
    async def start(self, prompt): return super().start(prompt)
    async def step(self, text, token_ids): return super().step(text, token_ids)

class Slow(Waits):
    def step(self, text, token_ids):
        time.sleep(0.3)
        return 1.0

class Meets(Waits):
    met = threading.Barrier(6)
    def step(self, text, token_ids):
        Meets.met.wait(60)
        return 1.0

class LateCloses(Waits):
    async def start(self, prompt):
        self.path = prompt.answer
        await asyncio.sleep(0.3)
        return Observation("")
    async def step(self, text, token_ids):
        await asyncio.sleep(0.3)
        return Observation("a")
    def close(self): open(self.path, "a").write("closed ")

class Closes(Waits):
    def __init__(self): self.path = None
    def start(self, prompt):
        self.path = prompt.answer
        if self.path.endswith("no game"): raise ValueError("no game")
        return Observation("")
    async def step(self, text, token_ids): return Observation("a")
    def close(self): open(self.path, "a").write("closed ")
"""


def prompt(answer: str = "8") -> Prompt:
    return Prompt(0, "3+5=", [6, 13, 8, 14], answer)


@asynccontextmanager
async def workers(folder: Path, name: str, whole: bool = False, **more: Any) -> AsyncIterator[Any]:
    """Started `Workers` for class `name`, or a `whole` environment, which are closed at the end.
    `name` "math": workers of that verifier.
    """
    (folder / "own.py").write_text(CLASSES)
    kind = {"verifier": name} if name == "math" else {"session": f"{folder}/own.py:{name}"}
    config = EnvironmentConfig(**kind | more)
    pool = (Environment if whole else Workers)(config, codec_of(folder))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def codec_of(folder: Path) -> Codec:
    """The codec of a tiny tokenizer, which is written to `folder`."""
    write_tokenizer(folder / "tokenizer")
    return Codec.of(load_tokenizer(str(folder / "tokenizer")))


SAID = np.array([10, 1], dtype=np.int32)


async def test_calls_of_async_sessions_wait_beside_one_another(tmp_path: Path) -> None:
    async with workers(tmp_path, "Waits") as pool:

        async def one(key: str) -> Outcome:
            assert (await pool.begin(key, prompt())).observation == []
            first = await pool.step(key, SAID)
            assert first.reward == 0.5 and len(first.observation or ()) == 1, first
            return await pool.step(key, SAID)

        started = time.monotonic()
        found = await asyncio.gather(*(one(str(number)) for number in range(300)))
        assert time.monotonic() - started < 60, "one after the other it takes 120 s"
    assert {outcome.score for outcome in found} == {2.0}


@pytest.mark.parametrize(
    ("name", "settings", "least_s"),
    # One call may take nearly the whole limit: a call's time begins with the call, not before.
    [("Slow", {"time_limit_s": 1.2}, 6 * 0.3), ("Meets", {"threads": 6, "time_limit_s": 60.0}, 0)],
)
async def test_plain_functions_run_on_as_many_threads_as_set(
    name: str, settings: dict[str, Any], least_s: float, tmp_path: Path
) -> None:
    async with workers(tmp_path, name, **settings) as pool:
        await asyncio.gather(*(pool.begin(str(number), prompt()) for number in range(6)))
        started = time.monotonic()
        found = await asyncio.gather(*(pool.step(str(number), SAID) for number in range(6)))
        assert {outcome.score for outcome in found} == {1.0}
        assert time.monotonic() - started >= least_s


@pytest.mark.parametrize(
    ("told", "failure", "detail"),
    [
        ("loop", "response_limit", "environment.time_limit_s = 0.5 s"),
        ("sleep", "timeout", "environment.time_limit_s = 0.5 s"),
        ("exit", "error", "SystemExit (own.py, line 38): 3"),
        ("raise", "error", "TimeoutError (own.py, line 43): a time-out of its own"),
        ("number", "error", "observation is 5, not a text"),
        ("nothing", "error", "the observation '', which has no tokens"),
        ("nan", "nan", "not a finite number"),
        ("wrong", "nan", "'a text'"),
        ("no answer", "error", "answer is 8, not a text"),
        ("unsayable", "error", "Unsayable"),
        ("long", "error", "4,000,001 characters"),
    ],
)
async def test_a_bad_call_costs_its_own_rollout(
    tmp_path: Path, told: str, failure: str, detail: str
) -> None:
    async with workers(tmp_path, "Mixed", time_limit_s=0.5) as pool:
        await asyncio.gather(pool.begin("good", prompt()), pool.begin("bad", prompt(told)))
        assert (await pool.step("good", SAID)).observation
        outcome = await pool.step("bad", SAID)
        assert (await pool.step("good", SAID)).observation
        assert (await pool.step("good", SAID)).score == 1.0
        again = await pool.step("bad", SAID)
        assert "the session ended with" in again.detail, "a failed session takes no further step"
    assert outcome.failure == failure and detail in outcome.detail, outcome


@pytest.mark.parametrize("name", ["Mixed", "Forks"])
async def test_a_session_may_fork(tmp_path: Path, name: str) -> None:
    """The child ends with the call, and takes no turn of any session."""
    async with workers(tmp_path, name) as pool:
        keys = [str(number) for number in range(8)]
        await asyncio.gather(*(pool.begin(key, prompt("fork")) for key in keys))
        for _ in range(2):
            found = await asyncio.gather(*(pool.step(key, SAID) for key in keys))
            assert all(one.observation for one in found), found
        found = await asyncio.gather(*(pool.step(key, SAID) for key in keys))
    assert [one.score for one in found] == [1.0] * 8


async def test_a_start_that_hangs_costs_its_own_rollout(tmp_path: Path) -> None:
    async with workers(tmp_path, "Mixed", start_limit_s=0.5) as pool:
        begun = (pool.begin("bad", prompt("late start")), pool.begin("good", prompt()))
        bad, good = await asyncio.gather(*begun)
    assert bad.failure == "timeout" and "start_limit_s" in bad.detail
    assert good.observation == [] and not good.failure


async def test_a_session_may_limit_its_start_itself(tmp_path: Path) -> None:
    """As that of an agent does, which may think for long before its first call."""
    async with workers(tmp_path, "LimitsItself", start_limit_s=0.5) as pool:
        assert (await pool.begin("slow", prompt())).observation == []


async def test_a_process_that_ends_costs_its_sessions_and_no_more(tmp_path: Path) -> None:
    async with workers(tmp_path, "Mixed", time_limit_s=2.0, num_workers=2, threads=40) as pool:
        keys = [str(number) for number in range(40)]
        await asyncio.gather(*(pool.begin(key, prompt("sleep")) for key in keys[1:]))
        await pool.begin(keys[0], prompt("die"))
        steps = [asyncio.create_task(pool.step(key, SAID)) for key in keys]
        found = await asyncio.gather(*steps)
        ended = [one for one in found if "ended with exit code 7" in one.detail]
        late = [one for one in found if one.failure == "timeout"]
        assert found[0] in ended and len(ended) > 5 and len(late) > 5, "one of two processes died"
        assert len(ended) + len(late) == len(keys)
        assert (await pool.begin("new", prompt())).observation == []
        assert (await pool.step("new", SAID)).observation


async def test_rollouts_of_a_process_that_ended_begin_again_once(tmp_path: Path) -> None:
    """And count as failures if it ends again."""

    class Says:
        async def generate(self, *_: object, **__: object) -> Segment:
            return segment(SAID)

    async with workers(tmp_path, "Mixed", whole=True) as environment:
        engines: list[Any] = [Says()]
        attempts = Attempts(EnginePool(engines, RolloutConfig()), environment, 0, 20)

        async def play(*told: str) -> list[Verdict]:
            made = [attempts.attempt(prompt(one), one, temperature=1.0) for one in told]
            return [verdict for _, verdict in await asyncio.gather(*made)]

        found = await play("8", f"{tmp_path}/has_died", "9")
        assert [one.reward for one in found] == [1.0] * 3
        warning = "a worker process ended with exit code 7, and is replaced"
        assert sum(warning in one.warning for one in found) == 1
        (died,) = await play("die")
        assert died.failure == "error" and "ended with exit code 7" in died.detail
        assert [one.reward for one in await play("8")] == [1.0]


async def test_a_process_killed_between_two_turns(tmp_path: Path) -> None:
    async with workers(tmp_path, "Mixed") as pool:
        await pool.begin("a", prompt())
        host = pool.places[0]
        assert host is not None
        os.kill(host.process.pid, signal.SIGKILL)
        while not host.lost:
            await asyncio.sleep(0.01)
        outcome = await pool.step("a", SAID)
    assert outcome.failure == "error" and "the session ended by signal SIGKILL" in outcome.detail


@pytest.mark.parametrize("name", ["Mixed", "math"])
async def test_a_process_killed_while_it_decodes(name: str, tmp_path: Path) -> None:
    """Another one decodes the response."""
    async with workers(tmp_path, name) as pool:
        before = await pool.decode(SAID)
        pid = pool.places[0].process.pid
        os.kill(pid, signal.SIGSTOP)  # the request is under way when the process is killed
        asked = asyncio.create_task(pool.decode(SAID))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert before == await asked != ""


async def test_an_async_method_that_computes_without_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.environments.workers.GRACE_S", 0.5)
    async with workers(tmp_path, "Blocks", time_limit_s=1.0) as pool:
        await pool.begin("bad", prompt("loop"))
        outcome = await pool.step("bad", SAID)
        await pool.begin("good", prompt())
        assert (await pool.step("good", SAID)).observation, "another process took its place"
    assert outcome.failure == "timeout" and "must wait, not compute" in outcome.detail


async def test_an_answer_is_scored_by_the_recipes_verifier(tmp_path: Path) -> None:
    async with workers(tmp_path, "Mixed", whole=True, correct=2.0, wrong=-1.0) as environment:
        found = []
        for number, (reference, limit) in enumerate([("answer", "stop"), ("answer", "length")]):
            key = str(number)
            assert await environment.begin(key, prompt(reference)) is None
            said = segment(SAID, finish=limit)
            found.append(await environment.step(key, prompt("8"), said, num_tokens=2))
    assert found[0] == Verdict(reward=2.0, correct=True)
    assert found[1] == Verdict(reward=-1.0, correct=False, judged=False)


async def test_a_session_is_closed_however_it_ends(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with workers(tmp_path, "Closes") as pool:
        await pool.begin("a", prompt(str(marks)))
        await pool.step("a", SAID)
        assert not marks.exists()
        await pool.cut_off("a", SAID)
        assert "no game" in (await pool.begin("b", prompt(f"{marks} no game"))).detail
    assert marks.read_text() == "closed "
    assert (tmp_path / "marks no game").read_text() == "closed "


async def test_a_discarded_session_is_closed_after_its_call(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with workers(tmp_path, "LateCloses") as pool:
        begins = asyncio.create_task(pool.begin("a", prompt(str(marks))))
        await asyncio.sleep(0.1)
        await pool.cut_off("a")
        await begins
        await pool.begin("b", prompt(str(marks)))
        steps = asyncio.create_task(pool.step("b", SAID))
        await asyncio.sleep(0.1)
        steps.cancel()
        await pool.cut_off("b")
        async with asyncio.timeout(20):  # else a session was left open
            while not marks.exists() or marks.read_text() != "closed closed ":
                await asyncio.sleep(0.05)


async def test_a_cut_off_does_not_cancel_the_close_of_a_session() -> None:
    """Of an agent, whose calls a cut-off cancels; here without a worker process."""
    closes, goes, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Fails:
        async def start(self, prompt: Prompt) -> None:
            raise ValueError("no game")

        async def close(self) -> None:
            closes.set()
            await goes.wait()
            closed.set()

    nothing: Any = None
    agent: Any = {"command": ["python", "agent.py"]}
    host = Host(nothing, asyncio.get_running_loop())
    host._config, host._calls = EnvironmentConfig(agent=agent), UserCalls(1)
    host._make = Fails
    begins = asyncio.create_task(host.begin("a", prompt()))
    await closes.wait()
    await host.cut_off("a", None)
    goes.set()
    with pytest.raises(ValueError, match="no game"):
        await begins
    assert closed.is_set()


async def test_code_that_catches_its_cancellation(tmp_path: Path) -> None:
    async with workers(tmp_path, "Stays", time_limit_s=0.3) as pool:
        await asyncio.gather(pool.begin("a", prompt()), pool.begin("b", prompt()))
        late, cut = [await pool.step("a", SAID), await pool.cut_off("b", SAID)]
    assert late.failure == "timeout" and "time_limit_s = 0.3" in late.detail
    assert cut.failure == "error" and "not '' or 'tool_call'" in cut.detail
