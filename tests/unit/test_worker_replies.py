"""Every verdict belongs to its response, whatever the user's code does to its process: it forks,
writes to the channel, closes it, or ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.environments import opened, together

from megarl.environments.config import EnvironmentConfig
from megarl.types import Prompt

OWN = r"""
import asyncio, ctypes, json, os, random, socket, sys, time

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
            os.write(number, forged(1))
        os._exit(0)
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
    act(what)
    await asyncio.sleep(random.random() * 0.02)
    return float(number)
"""
HARMLESS = ["fork", "fork returns", "fork raises", "fork writes"]
"""What leaves the verdict of the response as it is."""
HARMFUL = ["dies", "garbage", "forges", "closes"]
"""What costs the response its verdict, and `async` calls under way beside it theirs."""
PROMPT = Prompt(index=0, text="", token_ids=[1], answer="")
COUNT = int(os.environ.get("MEGARL_TEST_RESPONSES", "60"))
"""Responses of a test. With 10000, the tests take some minutes."""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def responses(seed: int, harmless: Sequence[str]) -> list[str]:
    """Responses that name their number, a tenth with each kind of mischief."""
    made, random_state = [], random.Random(seed)
    for number in range(COUNT):
        what = HARMFUL if number % 10 == 5 else harmless if number % 3 == 0 else [""]
        made.append(f"{number} {random_state.choice(what)}")
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(120 + COUNT)
@pytest.mark.parametrize("function", ["score", "score_later"])
async def test_every_verdict_belongs_to_its_response(own: str, function: str) -> None:
    is_plain = function == "score"
    texts = responses(COUNT, HARMLESS if is_plain else [""])
    config = EnvironmentConfig(
        verifier=f"{own}:{function}", num_workers=2, concurrency=4, time_limit_s=2.0
    )
    async with opened(config) as environment:
        asked = [environment.score(PROMPT, text, 1, False) for text in texts]
        found = await asyncio.gather(*asked)
    for text, verdict in zip(texts, found, strict=True):
        number, _, what = text.partition(" ")
        if what in HARMFUL:
            assert verdict.failure in ("error", "timeout"), text
        elif is_plain or not verdict.failure:
            assert (verdict.reward, verdict.failure) == (float(number), ""), (text, verdict)
    assert sum(not verdict.failure for verdict in found) > COUNT / 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_dead_process_is_noticed_while_its_child_lives(own: str) -> None:
    """The child holds the channel open."""
    config = EnvironmentConfig(verifier=f"{own}:score", time_limit_s=20.0)
    async with opened(config) as environment:
        found = await environment.score(PROMPT, "1 dies", 1, False)
    assert (found.failure, found.detail) == (
        "error",
        "the verifier's process ended with exit code 3",
    )


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
