"""The reward server behind real HTTP, alone, with an environment as its client, and as a command."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import command, dies_with_us, finish, start, write_recipe
from support.documented import block
from support.environments import PROMPT, together, verdicts
from support.reward_servers import Answer, Scripted, free_port, serving
from support.tiny import write_tokenizer

from megarl.apps.serve.reward_server import Backend, RewardServer
from megarl.apps.serve.serve_reward import server_token
from megarl.data.source import PromptList
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.judging import Judge
from megarl.environments.scores import Outcome
from megarl.environments.scoring import Environment
from megarl.environments.trial import try_verifier
from megarl.environments.wire import (
    answer_body,
    read_answer,
    read_request,
)
from megarl.settings.addresses import Token
from megarl.settings.environments import EnvironmentConfig, RemoteConfig, RewardServerConfig
from megarl.settings.schema import replace
from megarl.settings.serve import ServeRewardConfig
from megarl.types import Prompt

# The wire format


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for read in (read_request, lambda body: read_answer(body.decode(errors="replace"), 1)):
        try:
            read(body)
        except ValueError as error:
            if type(error) is not ValueError:  # one of Python's own
                raise


BAD_REQUESTS: dict[str, tuple[Any, str]] = {
    "list": ([], 'the request has no "samples" of type list'),
    "no list": ({"samples": 3}, 'the request has no "samples" of type list'),
    "no response": ({"samples": [{"prompt": {}}]}, 'sample 0 of the request has no "response" of type str'),
    "no prompt": ({"samples": [{"response": ""}]}, 'sample 0 of the request has no "prompt" of type dict'),
    "type": (
        {"samples": [{"response": "", "prompt": {"answer": 7}}]},
        'the prompt of sample 0 of the request has no "answer" of type str',
    ),
}  # fmt: skip


# The server alone


async def by_answer(prompt: Prompt, text: str) -> Outcome:
    """1 for a response that is the answer; "slow" takes a second, "raise" raises."""
    if text == "slow":
        await asyncio.sleep(1.0)
    if text == "raise":
        raise KeyError("gold")
    return Outcome(float(prompt.answer == text))


def made(token: str = "", **settings: Any) -> RewardServer:
    given = Token(token) if token else None
    return RewardServer(Backend(by_answer, 1), RewardServerConfig(**settings), given)


def post(url: str, *texts: str, **more: Any) -> requests.Response:
    body = {"samples": [{"prompt": {"answer": "7"}, "response": text} for text in texts]}
    return requests.post(url, **{"json": body, "timeout": 10} | more)


def test_requests_and_what_is_refused() -> None:
    with serving(made(queue_samples=3, max_request_mib=1, read_limit_s=0.5)) as url:
        good = post(url, "7", "8")
        assert good.status_code == 200
        assert [one["reward"] for one in good.json()["scores"]] == [1.0, 0.0]
        assert post(url).json() == {"scores": []}
        failed = post(url, "raise").json()["scores"]
        assert failed == [{"failure": "error", "detail": "KeyError: 'gold'"}]
        assert post(url, "7").status_code == 200, "the lane goes on"
        for case, (tree, says) in BAD_REQUESTS.items():
            refused = post(url, json=tree)
            assert refused.status_code == 422 and says in refused.json()["error"], case
        assert post(url, json=None, data=b"{").json()["error"].startswith("the request is not JSON")
        many = post(url, *"abcd")
        assert many.status_code == 413 and "at most 3 may wait" in many.json()["error"]
        with ThreadPoolExecutor(1) as thread:
            full = thread.submit(post, url, "slow", *"ab")
            time.sleep(0.5)
            beyond = post(url, *"cd")
            assert beyond.status_code == 429 and beyond.headers["retry-after"] == "1"
            assert full.result().status_code == 200
        assert post(url, "x" * 2**20).status_code == 413

        def endless() -> Any:
            for _ in range(20):
                yield b"x" * 2**17

        assert post(url, json=None, data=endless()).status_code == 413

        def late() -> Any:
            yield b"{"
            time.sleep(1.0)

        assert post(url, json=None, data=late()).status_code == 408
        assert requests.get(url, timeout=5).status_code == 405
        assert requests.get(url + "/no", timeout=5).status_code == 404
        shown = requests.get(url.replace("/v1/score", "/metrics"), timeout=5).text
        assert 'megarl_reward_samples_total{outcome="scored"} 6.0' in shown
        assert 'megarl_reward_samples_total{outcome="error"} 1.0' in shown
        assert 'megarl_reward_requests_total{status="422"} 6.0' in shown
        assert "megarl_reward_queue_samples 0.0" in shown


def test_without_the_token_a_server_says_nothing() -> None:
    right = {"Authorization": "Bearer a-long-token"}
    with serving(made(token="a-long-token"), path="") as base:  # noqa: S106
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "a-long-token"},
                        {"Authorization": "Bearer a-long-token "[:-2]}):  # fmt: skip
            for path in ("/v1/score", "/metrics", "/no/such", "/", "/health/"):
                for method in ("GET", "POST"):
                    found = requests.request(method, base + path, headers=headers, timeout=5)
                    assert (found.status_code, found.json()) == (401, {"error": "unauthorized"})
                    assert found.headers["www-authenticate"] == "Bearer"
            assert requests.post(base + "/health", timeout=5).status_code == 401
        assert requests.get(base + "/health", timeout=5).json() == {"status": "ok"}
        assert post(base + "/v1/score", "7", headers=right).status_code == 200
        assert requests.get(base + "/metrics", headers=right, timeout=5).status_code == 200
        assert requests.get(base + "/no", headers=right, timeout=5).status_code == 404


def test_a_slow_response_does_not_hold_up_the_others() -> None:
    """The client says how long it waits. What is not scored by then is asked again, alone, and in
    the end fails alone; a response that took long once gets its score.
    """
    asked: list[str] = []

    async def score(prompt: Prompt, text: str) -> Outcome:
        asked.append(text)
        if text == "never" or (text == "once" and asked.count("once") == 1):
            await asyncio.sleep(60)
        return Outcome(1.0)

    server = RewardServer(Backend(score, 8), RewardServerConfig(), None)
    with serving(server) as url:
        remote = RemoteConfig(attempt_limit_s=0.5, backoff_s=0.01, attempts=40)
        config = EnvironmentConfig(verifier=url, time_limit_s=4.0, remote=remote)
        found = together(config, "a", "once", "b", "never", "c")
    assert [one.failure for one in found] == ["", "", "", "timeout", ""]
    # The server's words, or the client's where they do not arrive in time.
    assert re.search(r"had not scored it|did not answer within 0\.5 s", found[3].detail)
    assert asked.count("once") >= 2 and asked.count("never") >= 3


def test_what_a_gone_client_waited_for_is_not_scored() -> None:
    seen: list[str] = []

    async def slow(prompt: Prompt, text: str) -> Outcome:
        seen.append(text)
        await asyncio.sleep(0.6)
        return Outcome(1.0)

    with serving(RewardServer(Backend(slow, 1), RewardServerConfig(), None)) as url:
        with pytest.raises(requests.Timeout):
            post(url, "a", "b", "c", timeout=0.2)
        assert post(url, "d").status_code == 200
    assert seen == ["a", "d"]


# With an environment as the client


OWN = """
import os

def score(prompt, response):
    if response == "raise":
        raise KeyError("gold")
    if response == "hang":
        while True: pass
    found = [name for name, value in os.environ.items() if "hush" in value]
    return {"reward": float(response == prompt.answer), "words": len(response.split()), "seen": len(found)}

def length(prompt, response):
    return len(response)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_remote_and_local_rewards_add_up(own: str) -> None:
    """The first function says what is correct, wherever it runs."""
    app = Scripted(score=lambda sample: {"reward": 3.0, "correct": False, "depth": 2})
    with serving(app) as url:
        weights = {url: 0.5, "exact_match": 1.0, f"{own}:length": 0.1}
        (found,) = verdicts(EnvironmentConfig(rewards=weights), "7")
        assert (found.reward, found.correct, found.failure) == (0.5 * 3 + 1.0 + 0.1, False, "")
        assert found.metrics == {
            "reward/127.0.0.1": 3.0,
            "127.0.0.1/depth": 2.0,
            "reward/exact_match": 1.0,
            "reward/length": 1.0,
        }
        weights = {"exact_match": 1.0, url: 0.5}
        assert verdicts(EnvironmentConfig(rewards=weights), "7")[0].correct
        app.script = lambda number, samples: Answer(500, b"oops")
        config = EnvironmentConfig(rewards=weights, remote=RemoteConfig(attempts=1), unscored=-2.0)
        (failed,) = verdicts(config, "7")
        assert (failed.reward, failed.failure) == (-2.0, "error")
        assert failed.detail.startswith("127.0.0.1: the reward server http://127.0.0.1:")
        assert failed.detail.endswith("answered 500: oops")


def test_scores_of_a_server_are_mapped_as_a_verifiers() -> None:
    app = Scripted(score=lambda sample: float(sample["response"]))
    with serving(app) as url:
        config = EnvironmentConfig(verifier=url, correct=2.0, wrong=-1.0)
        half, right, three = verdicts(config, "0.5", "1", "3")
    assert (half.reward, right.reward, right.correct) == (0.5, 2.0, True)
    assert (three.reward, three.failure) == (-1.0, "error")
    assert "the reward server answered 3, but environment.correct and" in three.detail


def test_the_trial_before_a_run_says_what_to_set(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rows = PromptListOf([replace(PROMPT, index=number) for number in range(5)])
    with serving(Scripted(lambda number, samples: Answer(401, b"who?"))) as url:
        config = EnvironmentConfig(rewards={"exact_match": 1.0, url: 1.0})
        with pytest.raises(ValueError, match=r"environment\.rewards 'exact_match, http") as told:
            try_verifier(config, rows, load_tokenizer(str(tmp_path)))
    assert "answered 401: who?; set environment.remote.token_variable" in str(told.value)
    assert "failed for 5 of 5 rows" in str(told.value)


class PromptListOf(PromptList):
    """Prompts that are there already."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts

    def at(self, ordinal: int) -> Prompt:
        return self.prompts[ordinal % len(self.prompts)]


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no host": ({"verifier": "http:///v1"}, "names no host; set it to http://host:port/v1/score"),
    "port": ({"verifier": "http://a:b/v1"}, "environment.verifier is no address"),
    "user": ({"rewards": {"http://me:hush@a/": 1.0}}, "environment.rewards holds a user, a query"),
    "query": ({"verifier": "http://a/?key=hush"}, "holds a user, a query or a fragment"),
    "idle": (
        {"remote": RemoteConfig(batch_size=3)},
        "remote has settings, but no verifier is a server",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_addresses_that_are_refused(case: str) -> None:
    settings, says = SETTINGS[case]
    with pytest.raises(ValueError, match=says) as told:
        EnvironmentConfig(**settings)
    assert "hush" not in str(told.value)


@pytest.mark.parametrize("name", ["abc-123-hush", "hush_token", "PATH", "HUSH"])
def test_a_token_in_place_of_its_variable_is_refused_and_not_shown(name: str) -> None:
    for kind in (RemoteConfig, RewardServerConfig):
        with pytest.raises(ValueError, match="is not the name of a variable for a secret") as told:
            kind(token_variable=name)
        assert name not in str(told.value)


def test_tokens_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteConfig(token_variable="THE_TOKEN")  # noqa: S106
    config = EnvironmentConfig(verifier="http://127.0.0.1:9/", remote=remote)
    monkeypatch.delenv("THE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="THE_TOKEN, but that environment variable is not set"):
        Environment(config)
    monkeypatch.setenv("THE_TOKEN", "with space")
    with pytest.raises(ValueError, match="holds a space, a line break") as told:
        Environment(config)
    assert "with space" not in str(told.value)
    named = RewardServerConfig(token_variable="THE_TOKEN")  # noqa: S106
    with pytest.raises(ValueError, match=r"THE_TOKEN \(server.token_variable\) holds a space"):
        server_token(named)
    for guessed in ("x", "hush" * 8, "x" * 64, "0123456789abcdef012"):
        monkeypatch.setenv("THE_TOKEN", guessed)
        assert server_token(named) == Token(guessed)
        with pytest.raises(ValueError, match=r"could be guessed.*openssl rand -hex 32") as told:
            server_token(replace(named, host="my-host"))
        assert len(guessed) == 1 or guessed not in str(told.value)
    monkeypatch.setenv("THE_TOKEN", "0123456789abcdef0123")
    assert server_token(replace(named, host="my-host")) == Token("0123456789abcdef0123")
    monkeypatch.delenv("THE_TOKEN")
    for host in ("127.0.0.1", "::1", "localhost"):
        assert server_token(replace(named, host=host)) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "my-host"):  # noqa: S104
        with pytest.raises(ValueError, match="there is no token; export THE_TOKEN"):
            server_token(replace(named, host=host))
    monkeypatch.setenv("THE_TOKEN", "")
    with pytest.raises(ValueError, match=r"THE_TOKEN, but that .* is not set, or empty"):
        server_token(named)


@pytest.mark.parametrize(("settings", "says"), [
    ({"environment": EnvironmentConfig(correct=2.0)},
     "environment.correct is 2.0, which is for the recipe of the training run"),
    ({"environment": EnvironmentConfig(session="a.py:B")},
     "environment.session is .*, but a reward server scores single responses"),
    ({"folder": ""}, "folder is empty"),
    ({"environment": EnvironmentConfig(verifier="none")}, "every score would be 0"),
])  # fmt: skip
def test_recipes_of_a_server_that_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServeRewardConfig(**{"folder": "x"} | settings)


# The page


def test_the_example_of_the_page(own: str) -> None:
    """The request and the answer are those of a server of the page's own function."""
    Path(own).write_text(block("python ends_right"))
    judge = Judge(EnvironmentConfig(verifier=f"{own}:score"), None, None)

    async def whole() -> list[Outcome]:
        samples = read_request(block("json request").encode())
        try:
            return [await judge.judge(*sample) for sample in samples]
        finally:
            await judge.close()

    answer = json.loads(answer_body(asyncio.run(whole())))
    assert answer == json.loads(block("json answer"))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_server_in_another_language(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "server.mjs").write_text(block("js").replace("8000", str(port)))
    process = subprocess.Popen(["node", str(tmp_path / "server.mjs")])
    try:
        url = f"http://127.0.0.1:{port}/v1/score"
        remote = RemoteConfig(attempts=50)  # until it listens
        found = verdicts(EnvironmentConfig(verifier=url, remote=remote), "is 7", "is 8")
    finally:
        process.kill()
        process.wait(10)
    assert [(one.reward, one.failure) for one in found] == [(1.0, ""), (0.0, "")]


# The command


def served(
    folder: Path, tree: dict[str, Any], **environment: str
) -> tuple[subprocess.Popen[str], str]:
    """`megarl serve-reward` with a recipe in `folder`: its process and the mark of all below it."""
    recipe = write_recipe(folder / "serve.yaml", tree)
    return start([*dies_with_us(), *command("serve-reward", recipe)], **environment)


def address(folder: Path, process: subprocess.Popen[str]) -> str:
    """The address that the command says it serves at."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        log = folder / "run.log"
        found = re.search(r"serving .* at (http://\S+),", log.read_text()) if log.exists() else None
        if found:
            return found[1]
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[1][-3000:])


def test_the_command_serves_until_sigterm(own: str, tmp_path: Path) -> None:
    """What is under way is answered; verifiers see no token; a second server finds the port taken."""
    tree: dict[str, Any] = {
        "folder": str(tmp_path / "serve"),
        "environment": {"verifier": f"{own}:score", "time_limit_s": 1.0},
        "server": {"port": 0},
    }
    process, mark = served(tmp_path, tree, MEGARL_REWARD_TOKEN="hush")  # noqa: S106
    try:
        url = address(tmp_path / "serve", process)
        assert post(url, "7").status_code == 401
        hold = {"headers": {"Authorization": "Bearer hush"}}
        scores = post(url, "7", "raise", "a b", **hold).json()["scores"]
        assert scores[0] == {"reward": 1.0, "correct": None, "words": 1.0, "seen": 0.0}
        assert scores[1] == {"failure": "error", "detail": "KeyError (own.py, line 6): 'gold'"}
        assert scores[2]["words"] == 2.0
        large = {"headers": hold["headers"] | {"X-Long": "x" * 2**17}}
        with suppress(requests.RequestException):  # closed before all of it was read
            assert post(url, "7", **large).status_code == 400
        assert post(url, "7", **hold).status_code == 200
        port = url.split(":")[2].split("/")[0]
        other = tree | {"folder": str(tmp_path / "other"), "server": {"port": int(port)}}
        done = finish(*served(tmp_path, other), 60)
        assert done.code == 2 and f"127.0.0.1 port {port} cannot be used" in done.err
        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(post, url, "hang", **hold)
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            (late,) = under_way.result(20).json()["scores"]
        assert late["failure"] == "response_limit" and "time_limit_s = 1 s" in late["detail"]
    except BaseException:
        process.kill()
        raise
    finally:
        done = finish(process, mark, 30)
    assert (done.code, done.survivors) == (143, []), done.err[-2000:]
    with pytest.raises(requests.ConnectionError):
        post(url, "7")
