"""The client of reward servers, against real servers on loopback: every response ends with an
outcome, whatever the server does.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.environments import PROMPT
from support.reward_servers import Answer, Scripted, free_port, serving

from megarl.environments.reward_client import RewardClient
from megarl.environments.scores import Outcome
from megarl.settings.addresses import Token
from megarl.settings.environments import EnvironmentConfig, RemoteConfig

QUICK = {"backoff_s": 0.01, "longest_backoff_s": 0.05, "breaker_pause_s": 0.05, "linger_ms": 20.0}


@asynccontextmanager
async def client_of(
    url: str, *, token: Token | None = None, limit_s: float = 5.0, **remote: Any
) -> AsyncIterator[RewardClient]:
    """A client of the server at `url`, which is closed twice."""
    settings = RemoteConfig(**QUICK | remote)
    config = EnvironmentConfig(verifier=url, time_limit_s=limit_s, remote=settings)
    client = RewardClient(url, config, token)
    try:
        yield client
    finally:
        await client.close()
        await client.close()


def ask(url: str, *texts: str, **settings: Any) -> list[Outcome]:
    """The outcome of each response, all asked for at the same time."""

    async def whole() -> list[Outcome]:
        async with client_of(url, **settings) as client:
            return await asyncio.gather(*(client.score(PROMPT, text) for text in texts))

    return asyncio.run(asyncio.wait_for(whole(), 30))


def by_length(sample: Any) -> float:
    return float(len(sample["response"]))


# Batches and connections


def test_responses_travel_in_batches_and_each_gets_its_own_score() -> None:
    app = Scripted(score=by_length)
    texts = ["x" * n for n in range(100)]
    with serving(app) as url:
        found = ask(url, *texts, batch_size=16, connections=3)
    assert [one.score for one in found] == [float(n) for n in range(100)]
    assert sorted(map(len, app.requests)) == [4, *[16] * 6]
    assert app.most_under_way <= 3


async def test_an_answer_that_nobody_asked_for_is_no_verdict() -> None:
    """A second answer to a request, which came later, was the verdict on the next response."""
    port, again = free_port(), list[asyncio.StreamWriter]()

    def answer(score: int) -> bytes:
        body = b'{"scores":[%d]}' % score
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return head % len(body) + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            body = await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
            writer.write(answer(len(json.loads(body)["samples"][0]["response"])))
            again.append(writer)

    async with client_of(f"http://127.0.0.1:{port}/v1/score") as client:
        found = []
        async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
            for text in ("x", "xx", "xxx"):
                found.append(await client.score(PROMPT, text))
                again.pop().write(answer(9))
                await asyncio.sleep(0.05)  # the loop reads what has come
            await client.close()
            server.close()
    assert [one.score for one in found] == [1.0, 2.0, 3.0]


def test_what_a_server_is_sent() -> None:
    app = Scripted()
    with serving(app) as url:
        ask(url, "a", token=Token("hush"))
        ask(url, "b")
    prompt = {"index": 0, "text": "3+4=", "answer": "7", "token_ids": [1], "fields": {}}
    assert app.requests[0] == [{"prompt": prompt, "response": "a"}]
    assert app.headers[0]["authorization"] == "Bearer hush"
    assert "authorization" not in app.headers[1]


def test_a_request_too_large_is_split() -> None:
    def script(number: int, samples: list[Any]) -> Answer | None:
        return Answer(413, b"too large") if len(samples) > 2 else None

    app = Scripted(script, by_length)
    with serving(app) as url:
        found = ask(url, *["x" * n for n in range(7)], connections=1)
        assert [one.score for one in found] == [float(n) for n in range(7)]
        app.script = lambda number, samples: Answer(413, b"too large")
        (alone,) = ask(url, "x")
    assert alone.failure == "error" and "answered 413: too large; have it take" in alone.detail


# Failures that pass


FIRST = {
    "500": Answer(500, b'{"error": "oops"}'),
    "503": Answer(503),
    "429": Answer(429, b"later", headers={"retry-after": "0"}),
    "late": Answer(after_s=0.5),
}


@pytest.mark.parametrize("case", FIRST)
def test_a_failure_that_passes_is_tried_again(case: str) -> None:
    app = Scripted(lambda number, samples: FIRST[case] if number < 2 else None)
    with serving(app) as url:
        (found,) = ask(url, "x", attempt_limit_s=0.2)
    assert (found.score, found.failure, len(app.requests)) == (1.0, "", 3)


def test_retry_after_is_heeded() -> None:
    app = Scripted(
        lambda number, samples: Answer(429, headers={"retry-after": "1"}) if number == 0 else None
    )
    with serving(app) as url:
        began = time.monotonic()
        (found,) = ask(url, "x")
    assert found.score == 1.0 and time.monotonic() - began >= 1.0


def test_used_up_attempts_give_the_servers_own_words() -> None:
    app = Scripted(lambda number, samples: Answer(500, b'{"error": "the judge is asleep"}'))
    with serving(app) as url:
        (found,) = ask(url, "x", attempts=3)
    assert found.failure == "error" and len(app.requests) == 3
    assert found.detail.endswith("answered 500: the judge is asleep (3 attempts)")
    assert url in found.detail


def test_a_server_that_never_answers_costs_the_time_limit() -> None:
    app = Scripted(lambda number, samples: Answer(after_s=120.0))
    with serving(app) as url:
        began = time.monotonic()
        found = ask(url, "x", "y", limit_s=0.5)
        assert 0.5 <= time.monotonic() - began < 60
    assert [one.failure for one in found] == ["timeout"] * 2
    assert found[0].detail.startswith("no score within environment.time_limit_s = 0.5 s from http")
    assert ": it did not answer within 0.2" in found[0].detail


def test_waiting_for_a_connection_is_not_counted() -> None:
    app = Scripted(lambda number, samples: Answer(after_s=0.3))
    with serving(app) as url:
        found = ask(url, *"abcdef", limit_s=0.8, batch_size=1, connections=1)
    assert [one.failure for one in found] == [""] * 6


# The circuit breaker


async def test_a_restarted_server_loses_nothing() -> None:
    """Two of the three seconds without a server are more than all attempts together would last."""
    port, app = free_port(), Scripted(score=by_length)

    remote = {"attempts": 10, "breaker_failures": 3, "batch_size": 4}
    async with client_of(f"http://127.0.0.1:{port}/v1/score", **remote) as client:
        with serving(app, port):
            found = await asyncio.gather(*(client.score(PROMPT, "x" * n) for n in range(10)))
        waiting = [asyncio.ensure_future(client.score(PROMPT, "x" * n)) for n in range(10)]
        await asyncio.sleep(2.0)
        with serving(app, port):
            found += await asyncio.gather(*waiting)
    assert [one.score for one in found] == [float(n) for n in range(10)] * 2
    (warning,) = [one.warning for one in found if one.warning]
    assert "failed 3 times in a row: it cannot be reached" in warning


def test_while_the_breaker_is_open_responses_fail_within_their_limit() -> None:
    """Also those that wait for a connection, which then all fail together."""
    url = f"http://127.0.0.1:{free_port()}/v1/score"

    remote = {"connections": 2, "batch_size": 1, "breaker_failures": 2}
    began = time.monotonic()
    found = ask(url, *map(str, range(40)), limit_s=0.6, **remote)
    assert time.monotonic() - began < 60
    assert {one.failure for one in found} == {"timeout"}
    says = "whose circuit breaker is open: it cannot be reached"
    assert all(says in one.detail for one in found)


def test_an_open_breaker_sends_probes_only() -> None:
    app = Scripted(lambda number, samples: Answer(500))
    with serving(app) as url:
        ask(url, *map(str, range(30)), limit_s=1.0, connections=10, batch_size=1,
            breaker_failures=10, breaker_pause_s=0.3, attempts=1000)  # fmt: skip
    assert 10 < len(app.requests) <= 10 + 9 + 4


async def test_a_pause_longer_than_the_limit_ends_all_the_same() -> None:
    """It counts from the failure, not from when each response is asked for."""
    app = Scripted(lambda number, samples: Answer(500) if number == 0 else None)
    remote = {"attempts": 1, "breaker_failures": 1, "breaker_pause_s": 1.0}
    with serving(app) as url:
        async with client_of(url, limit_s=0.4, **remote) as client:
            failures = [(await client.score(PROMPT, text)).failure for text in "abcdef"]
    assert failures[0] == "error" and failures[1:3] == ["timeout"] * 2 and failures[-1] == ""


# Failures that do not pass


FINAL: dict[str, tuple[Answer, str]] = {
    "400": (Answer(400, b"what?"), "answered 400: what?; have it read the requests"),
    "401": (Answer(401, b"no"), "answered 401: no; set environment.remote.token_variable to the"),
    "403": (Answer(403), "answered 403; set environment.remote.token_variable"),
    "404": (Answer(404), "answered 404; set the address of its scoring route"),
    "422": (Answer(422, b'{"error": "no prompt"}'), "answered 422: no prompt; have it read"),
    "redirect": (Answer(307, headers={"location": "http://127.0.0.1:9/"}), "answered 307; set the"),
    "no json": (Answer(body=b"<html>\n hi"), "gave an answer that is not JSON (Expecting value)"),
    "deep": (Answer(body=b"[" * 100_000), "gave an answer that is not JSON"),
    "no scores": (Answer(body=b'{"score": 1}'), 'and has no "scores" of type list'),
    "few": (Answer(body=b'{"scores": []}'), "gave an answer that has 0 scores for 1 responses"),
    "many": (Answer(body=b'{"scores": [1, 2]}'), "has 2 scores for 1 responses"),
    "endless": (Answer(body=b"x" * 2_000_000), "answered more than 1,114,112 bytes"),
    "no score": (Answer(body=b'{"scores": ["1"]}'), "the reward server answered '1', not a finite"),
    "object": (Answer(body=b'{"scores": [{"correct": true}]}'), "without 'reward'; add that key"),
    "failure": (Answer(body=b'{"scores": [{"failure": "x", "detail": "my words"}]}'), "my words"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Scripted, str]]:
    """A server whose script each test sets."""
    app = Scripted()
    with serving(app) as url:
        yield app, url


@pytest.mark.parametrize("case", FINAL)
def test_a_failure_that_does_not_pass_is_not_tried_again(
    case: str, shared: tuple[Scripted, str]
) -> None:
    answer, says = FINAL[case]
    app, url = shared
    app.script = lambda number, samples: answer
    app.requests.clear()
    (found,) = ask(url, "x")
    assert len(app.requests) == 1 and found.score is None
    assert says in found.detail and "\n" not in found.detail
    assert found.failure == ("nan" if case == "no score" else "error")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e999", '"1"', "[]", "1" * 400])
def test_a_score_that_is_no_finite_number_fails_alone(
    value: str, shared: tuple[Scripted, str]
) -> None:
    app, url = shared
    app.script = lambda number, samples: Answer(body=f'{{"scores": [{value}, 2]}}'.encode())
    bad, good = ask(url, "x", "y")
    assert (bad.failure, good.score) == ("nan", 2.0)


def test_a_kind_of_failure_is_taken_over() -> None:
    scores = [{"failure": kind, "detail": "d"} for kind in ("timeout", "nan", "error")]
    body = json.dumps({"scores": scores}).encode()
    with serving(Scripted(lambda number, samples: Answer(body=body))) as url:
        assert [one.failure for one in ask(url, *"abc")] == ["timeout", "nan", "error"]


def test_a_token_that_a_server_repeats_is_not_shown(shared: tuple[Scripted, str]) -> None:
    app, url = shared
    echoes = [
        Answer(500, b"got Bearer hush-hush"),
        Answer(401, b'{"error": "not hush-hush"}'),
        Answer(body=b"you said hush-hush"),
        Answer(body=b'{"scores": [{"failure": "error", "detail": "hush-hush"}]}'),
        # where texts are cut
        *(Answer(body=b"x" * pad + b" hush-hush") for pad in (180, 185, 190, 195)),
        Answer(500, b"x" * 290 + b" hush-hush"),
    ]
    for echo in echoes:
        app.script = lambda number, samples, echo=echo: echo
        (found,) = ask(url, "x", token=Token("hush-hush"), attempts=1)
        assert found.failure and "hush" not in f"{found}"
        if len(echo.body or b"") < 100:
            assert "(token)" in found.detail
    assert "hush" not in repr(Token("hush-hush"))


async def test_a_token_in_a_broken_answer_is_not_shown() -> None:
    """What is no HTTP is repeated by the library's own error, and then in the breaker's warning."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 Authorization: Bearer hush-hush\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/score"
    few: dict[str, Any] = {"limit_s": 1.0, "breaker_failures": 1, "attempts": 2}
    async with client_of(url, token=Token("hush-hush"), **few) as client:
        found = await client.score(PROMPT, "x")
    server.close()
    assert found.failure and found.warning
    assert "hush" not in f"{found}" and "(token)" in found.warning


async def test_a_row_that_is_no_json_is_said() -> None:
    app = Scripted()
    with serving(app) as url:
        async with client_of(url) as client:
            rows = [{"image": b"raw"}, {"nothing": float("nan")}]
            prompts = [replace(PROMPT, index=3, fields=row) for row in rows]
            bad, good = [await client.score(prompt, "\ud800") for prompt in prompts]
    assert bad.failure == "error" and "row 3 of the data cannot be sent" in bad.detail
    assert good.score == 1.0
    assert app.requests[0][0]["prompt"]["fields"] == {"nothing": None}


# Cancellation and the end


async def test_a_cancelled_response_is_not_sent() -> None:
    app = Scripted(lambda number, samples: Answer(after_s=0.4))
    with serving(app) as url:
        async with client_of(url, batch_size=1, connections=1) as client:
            calls = [asyncio.ensure_future(client.score(PROMPT, text)) for text in "abc"]
            await asyncio.sleep(0.2)
            calls[1].cancel()
            await calls[0]
            with pytest.raises(asyncio.CancelledError):
                await calls[1]
            found = await calls[2]
        assert found.score == 1.0
    assert [[one["response"] for one in samples] for samples in app.requests] == [["a"], ["c"]]


async def test_closing_leaves_nobody_waiting() -> None:
    app = Scripted(lambda number, samples: Answer(after_s=120.0))
    before = threading.active_count()
    with serving(app) as url:
        async with client_of(url, batch_size=1, connections=1, limit_s=20.0) as client:
            calls = [asyncio.ensure_future(client.score(PROMPT, text)) for text in "abc"]
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await client.close()
            assert time.monotonic() - began < 60
            with pytest.raises(RuntimeError, match="closed"):
                await client.score(PROMPT, "x")
            found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError] * 3
    assert threading.active_count() == before
