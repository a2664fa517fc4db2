"""Every verdict belongs to its response, whatever the user's code does to its process: it forks,
starts threads, writes to the channel, closes it, or ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.environments import opened, together, verdicts

from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt, Verdict

OWN = r"""
import _thread, asyncio, ctypes, json, os, random, signal, socket, sys, threading, time

def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found

def forged(number):
    reply = {"score": -1.0, "correct": None, "metrics": {}}
    return json.dumps([number, reply]).encode() + b"\n"

def act(what):
    if what == "fork" and not os.fork():
        sys.exit(0)
    if what == "fork returns" and not os.fork():
        return -1.0
    if what == "fork raises" and not os.fork():
        raise ValueError("in the child")
    if what == "fork writes" and not os.fork():
        for number in sockets():
            try:
                os.write(number, forged(1))
            except OSError:
                pass
        os._exit(0)
    if what == "fork reads" and not os.fork():
        for number in sockets():
            try:
                socket.socket(fileno=number).recv(100, socket.MSG_DONTWAIT)
            except OSError:
                pass
        os._exit(0)
    if what == "threads":
        for _ in range(3):
            threading.Thread(target=lambda: os.fork() or sys.exit(0)).start()
    if what == "dies":
        if not ctypes.CDLL(None).fork():  # which Python does not notice: it keeps every descriptor
            time.sleep(1000)
            os._exit(0)
        os._exit(3)
    if what == "garbage":
        for number in sockets():
            os.write(number, b"\xff" * 300)
    if what == "forges":
        for number in sockets():
            os.write(number, forged(7))
    if what == "closes":
        os.closerange(3, 1000)
    if what == "takes":
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in sockets():
            os.dup2(nothing, number)

def too_slow(*_):
    raise TimeoutError("the timer of another call")

def leave(what):
    # something that acts after the call, while the next one is under way
    if what == "alarm":
        signal.alarm(1)
    if what == "timer":
        signal.signal(signal.SIGALRM, too_slow)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    if what == "processor timer":
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
    act = {"exit": lambda: os._exit(3), "interrupt": _thread.interrupt_main}
    act["write"] = lambda: [os.write(number, b"x" * 20) for number in sockets()]
    if what in act:
        threading.Timer(0.2, act[what]).start()

def log(response):
    with open(__file__ + ".calls", "a") as file:
        file.write(response + "\n")

def leaves(prompt, response):
    log(response)
    name, _, what = response.partition(" ")
    if name == "leave":
        leave(what)
        return 0.25
    if name == "hang":
        time.sleep(60)
    if name == "exit":
        os._exit(3)
    if name == "interrupt":
        raise KeyboardInterrupt("by hand")
    end = time.monotonic() + float(what)
    while time.monotonic() < end:
        time.sleep(0.01) if name == "sleep" else None
    return 0.75

def nothing(prompt, response):
    return 0.0

under_way = 0

async def together(prompt, response):
    # ends once 8 calls are under way; one that says `never` does not end
    global under_way
    under_way += 1
    while under_way < 8 or response == "never":
        await asyncio.sleep(0.01)
    return len(response)

def score(prompt, response):
    number, _, what = response.partition(" ")
    return float(number) if (found := act(what)) is None else found

async def score_later(prompt, response):
    number, _, what = response.partition(" ")
    await asyncio.sleep(random.random() * 0.02)
    if (found := act(what)) is not None:
        return found
    await asyncio.sleep(random.random() * 0.02)
    return float(number)
"""
HARMLESS = ["fork", "fork returns", "fork raises", "fork writes", "fork reads", "threads"]
"""What leaves the verdict of the response as it is."""
HARMFUL = ["dies", "garbage", "forges", "closes", "takes"]
"""What costs the response its verdict."""
PROMPT = Prompt(index=0, text="", token_ids=[1], answer="")
COUNT = int(os.environ.get("MEGARL_TEST_RESPONSES", "120"))
"""Responses of a test. With 10000, the tests take some minutes."""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def responses(seed: int) -> list[str]:
    """Responses that name their number, a tenth with each kind of mischief."""
    made, random_state = [], random.Random(seed)
    for number in range(COUNT):
        what = HARMFUL if number % 10 == 5 else HARMLESS if number % 3 == 0 else [""]
        made.append(f"{number} {random_state.choice(what)}")
    return made


def check(texts: Sequence[str], found: Sequence[Verdict]) -> None:
    """Each verdict is the number of its response, or the failure of a response that did harm."""
    wrong = []
    for text, verdict in zip(texts, found, strict=True):
        number, _, what = text.partition(" ")
        told = (verdict.reward, verdict.failure)
        if told != ((0.0, "error") if what in HARMFUL else (float(number), "")):
            wrong.append((text, told, verdict.detail))
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[:5]}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(120 + COUNT)
@pytest.mark.parametrize("function", ["score", "score_later"])
async def test_every_verdict_belongs_to_its_response(own: str, function: str) -> None:
    texts = responses(COUNT)
    config = EnvironmentConfig(verifier=f"{own}:{function}", num_workers=2)
    async with opened(config) as environment:
        asked = [environment.score(PROMPT, text, 1, False) for text in texts]
        found = await asyncio.gather(*asked)
    check(texts, found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_plain_call_leaves_behind_fails_no_other(own: str) -> None:
    pairs = ["leave alarm", "sleep 1.1", "leave timer", "sleep 0.3", "leave exit", "sleep 0.3"]
    pairs += ["leave processor timer", "compute 0.2", "leave write", "sleep 0.3"]
    pairs += ["leave interrupt", "sleep 0.3"]
    config = EnvironmentConfig(rewards={f"{own}:leaves": 1.0, f"{own}:nothing": 1.0})
    found = verdicts(config, *pairs)
    told = [(one.reward, one.failure, one.detail) for one in found]
    assert told == [(0.25, "", ""), (0.75, "", "")] * (len(pairs) // 2)


def test_a_plain_call_is_made_again_once_and_a_hang_never(own: str) -> None:
    config = EnvironmentConfig(verifier=f"{own}:leaves", time_limit_s=0.5)
    found = verdicts(config, "exit", "hang", "interrupt", "sleep 0")
    assert [(one.failure, one.detail) for one in found] == [
        ("error", "the verifier's process ended with exit code 3"),
        (
            "timeout",
            "no verdict within environment.time_limit_s = 0.5 s: the verifier's process gave no"
            " reply and was ended",
        ),
        ("error", "KeyboardInterrupt (own.py, line 92): by hand"),
        ("", ""),
    ]
    calls = Path(own + ".calls").read_text().split("\n")
    assert calls == ["exit", "exit", "hang", "interrupt", "interrupt", "sleep 0", ""]


def test_calls_of_an_async_function_wait_beside_one_another(own: str) -> None:
    """Each has a time limit of its own."""
    texts = [*("x" * size for size in range(7)), "never"]

    eight = EnvironmentConfig(verifier=f"{own}:together", concurrency=8, time_limit_s=3.0)
    *found, never = together(eight, *texts)
    assert [one.reward for one in found] == list(range(7))
    assert (never.failure, never.detail) == (
        "timeout",
        "no verdict within environment.time_limit_s = 3 s",
    )
    too_few = EnvironmentConfig(verifier=f"{own}:together", concurrency=7, time_limit_s=1.0)
    assert "timeout" in [one.failure for one in together(too_few, *texts)]
