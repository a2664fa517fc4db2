"""`megarl serve-reward` with real vLLM servers: a reward model whose scores are those of
transformers, as the trainer's are, and judges whose verdicts are those of its generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.commands import Done, command, dies_with_us, finish, start, until, write_recipe
from support.fork_server import UNFORKED, below
from support.tiny import write_classifier, write_model

from megarl.data.tokenizer import load_tokenizer

START_WITHIN_S, END_WITHIN_S = 240.0, 60.0
BOUND = 1e-5
"""Largest difference of scores between vLLM and transformers in float32."""
MOST_TOKENS = 200
SCORED = [("3+4=", text) for text in ("7", "", "12=3,", "a b c#4", "0" * 150, "zzz")]
"""(prompt, response) to score; `z` is unknown to the tokenizer."""
CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}a:"
"""Chat template of the judge's tokenizer."""


class Server:
    """A `megarl serve-reward` that is served."""

    def __init__(self, folder: Path, tree: dict[str, Any]) -> None:
        self.folder = folder
        self.tree = {"folder": str(folder), "server": {"port": 0}} | tree
        recipe = write_recipe(folder.parent / f"{folder.name}.yaml", self.tree)
        words = [*dies_with_us(), *command("serve-reward", recipe)]
        self.process, self.mark = start(words, **UNFORKED)  # vLLM's parent is the server
        self.started: list[psutil.Process] = []
        """Processes that must have ended with it."""

    def wait(self) -> None:
        """Until it serves; `url` is its address then."""
        deadline, log = time.monotonic() + START_WITHIN_S, self.folder / "run.log"
        while time.monotonic() < deadline and self.process.poll() is None:
            text = log.read_text() if log.exists() else ""
            if found := re.search(r"serving .* at (http://\S+),", text):
                self.url = found[1]
                return
            time.sleep(0.1)
        raise AssertionError(self.end(signal.SIGKILL).err[-3000:])

    def ask(self, samples: list[tuple[Any, str]]) -> list[dict[str, Any]]:
        """The scores of (prompt: its text or an object, response)."""
        body = [
            {"prompt": prompt if isinstance(prompt, dict) else {"text": prompt}, "response": reply}
            for prompt, reply in samples
        ]
        answer = requests.post(self.url, json={"samples": body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["scores"]

    def below(self) -> list[psutil.Process]:
        """The processes that it has started, and theirs."""
        return list(below(psutil.Process(self.process.pid)))

    def has_started_vllm(self) -> bool:
        """Whether vLLM's server has started its core."""
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            return len(self.below()) >= 3
        return False

    def end(self, number: int) -> Done:
        """Signal it, unless that was done, and wait."""
        if number and self.process.poll() is None:
            self.started = self.below()
            self.process.send_signal(number)
        return self.ended()

    def ended(self) -> Done:
        """Wait for its end. Survivors are those of `started` that are still there, too."""
        done = finish(self.process, self.mark, END_WITHIN_S)
        for left in psutil.wait_procs(self.started, timeout=3)[1]:
            if left.status() != psutil.STATUS_ZOMBIE:
                done.survivors.append(f"{left.pid} {left.name()}")
                left.kill()
        return done


@contextmanager
def served(folder: Path, tree: dict[str, Any]) -> Iterator[Server]:
    """A server for the block; its end is a test of its own if the block ends it itself."""
    server = Server(folder, tree)
    try:
        server.wait()
        yield server
    finally:
        if server.process.returncode is None:
            server.end(signal.SIGKILL)


# A reward model


def by_vllm(folder: Path) -> dict[str, Any]:
    """Settings of a server of the reward model in `folder`."""
    return {"reward_model": {"model": {"path": str(folder)}}}


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("pooled")
    folder = write_classifier(place / "model", biases=True)
    tree = by_vllm(folder)
    tree["reward_model"] |= {"max_tokens": MOST_TOKENS, "engine": {"max_num_sequences": 16}}
    with served(place / "serve", tree) as server:
        yield server


def test_scores_are_those_of_transformers(pooled: Server) -> None:
    import torch
    import transformers

    folder = pooled.tree["reward_model"]["model"]["path"]
    tokenizer = load_tokenizer(folder)
    texts = [
        [*tokenizer(prompt).input_ids, *tokenizer(text).input_ids, tokenizer.eos_token_id]
        for prompt, text in SCORED
    ]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        expected = [plain(torch.tensor([ids])).logits.item() for ids in texts]
    scores = [score["reward"] for score in pooled.ask(SCORED)]
    assert scores == pytest.approx(expected, abs=BOUND)
    assert max(expected) > 1 or min(expected) < 0, "a sigmoid would not show"


def test_a_text_that_is_too_long_is_a_failure_of_its_own(pooled: Server) -> None:
    """The model has 256 positions and the recipe allows for 200: neither cut nor scored."""
    fits = "0" * (MOST_TOKENS - len("3+4=") - 1)
    whole, longer = pooled.ask([("3+4=", fits), ("3+4=", fits + "0")])
    assert "reward" in whole
    assert longer["failure"] == "error" and "maximum context length is 200" in longer["detail"]


def test_many_requests_are_answered_each_with_its_own_score(pooled: Server) -> None:
    """In one engine at the same time."""
    (seven,), (eight,) = pooled.ask([("3+4=", "7")]), pooled.ask([("3+4=", "8")])
    with ThreadPoolExecutor(8) as threads:
        texts = ["7", "8"] * 20
        found = list(threads.map(lambda text: pooled.ask([("3+4=", text)])[0], texts))
    for text, score in zip(texts, found, strict=True):
        expected = seven if text == "7" else eight
        assert score["reward"] == pytest.approx(expected["reward"], abs=BOUND)
    assert seven["reward"] != pytest.approx(eight["reward"], abs=1e-3)


def test_ctrl_c_lets_the_engine_answer_what_is_under_way(pooled: Server) -> None:
    """A terminal sends Ctrl-C to all processes of the command; vLLM's must not end by it."""
    samples: list[tuple[Any, str]] = [("3+4=", "0123456789" * 15)] * 400
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(pooled.ask, samples)
        time.sleep(0.3)
        pooled.started = pooled.below()
        assert len(pooled.started) > 1
        os.killpg(pooled.process.pid, signal.SIGINT)
        found = under_way.result(60)
    assert all("reward" in score for score in found)
    done = pooled.ended()
    assert (done.code, done.survivors) == (130, []), done.err[-2000:]


# A judge


def greedy(folder: str, ids: list[int], most: int) -> str:
    """What transformers generates after `ids`, without special tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        (out,) = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False)
    return load_tokenizer(folder).decode(out[len(ids) :], skip_special_tokens=True)


@pytest.mark.nightly
def test_a_judge_scores_by_what_it_writes_and_nothing_else(tmp_path: Path) -> None:
    """The server ends with its engine, and leaves nothing."""
    folder = str(write_model(tmp_path / "model", biases=True, seed=3))
    judge = {"model": {"path": folder}, "chat": False, "require_stop": False}
    judge |= {"template": "{prompt}#{answer}#{response}=", "verdict": "([0-9])"}
    judge |= {"lowest": 0.0, "highest": 9.0, "max_new_tokens": 3, "max_tokens": 100}
    asked = [
        ({"text": f"{a}+{b}=", "answer": f"{a + b}"}, reply)
        for a, b in ((1, 2), (3, 4), (9, 9), (0, 5))
        for reply in ("7", "a b", "{answer}", "9 9 9 9", "k" * 20)
    ]
    with served(tmp_path / "serve", {"judge": judge}) as server:
        with ThreadPoolExecutor(4) as threads:
            parts = list(threads.map(server.ask, [asked[n::4] for n in range(4)]))
        found = [parts[n % 4][n // 4] for n in range(len(asked))]
        (long, missing) = server.ask([(asked[0][0], "7" * 100), ("no answer", "7")])
        metrics = requests.get(server.url.replace("/v1/score", "/metrics"), timeout=10).text
        server.started = server.below()
        (core,) = [
            process for process in server.started if process.name().startswith("VLLM::EngineCor")
        ]
        core.kill()
        asked_again = {"samples": [{"prompt": asked[0][0], "response": "7"}]}
        answer = requests.post(server.url, json=asked_again, timeout=60)
        assert answer.status_code == 503
        done = server.ended()
    assert (done.code, done.survivors) == (1, []) and "vLLM's process has died" in done.err
    tokenizer, kinds = load_tokenizer(folder), set[str]()
    for (prompt, reply), score in zip(asked, found, strict=True):
        text = f"{prompt['text']}#{prompt['answer']}#{reply}="
        digits = re.findall("[0-9]", greedy(folder, tokenizer(text).input_ids, 3))
        kinds.add("scored" if digits else "none")
        if digits:
            assert score == {"reward": int(digits[-1]) / 9, "correct": None}
        else:
            assert score["failure"] == "error" and "wrote no verdict" in score["detail"]
    assert kinds == {"scored", "none"}, "this test would prove nothing"
    assert "maximum context length is 100" in long["detail"]
    assert "the prompt has no reference answer" in missing["detail"]
    failures = sum("failure" in score for score in found) + 2
    assert f'megarl_reward_samples_total{{outcome="error"}} {failures:.1f}' in metrics


@pytest.mark.nightly
def test_several_verdicts_and_a_server_that_is_killed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", biases=True, seed=3)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT}))
    judge = {"model": {"path": str(folder)}, "template": "{prompt}{response}", "samples": 8}
    judge |= {"choices": {"0": 0.0, "1": 1.0, "2": 2.0}, "temperature": 1.0}
    judge |= {"max_new_tokens": 24, "require_stop": False}
    asked: list[tuple[Any, str]] = [("3+4=", "7"), ("3+4=", "<eos>a:1"), ("1+1=", "b c")]
    with served(tmp_path / "serve", {"judge": judge}) as server:
        scored = [score for score in server.ask(asked * 30) if "reward" in score]
        assert scored and any(0 < one["unread"] < 1 for one in scored)
        for one in scored:
            verdicts = round(8 * (1 - one["unread"]))
            total = one["reward"] * verdicts
            assert 0 <= one["reward"] <= 2 and total == pytest.approx(round(total))
        server.started = server.below()
        assert len(server.started) > 1
        server.process.kill()
        psutil.wait_procs(server.started, timeout=30)  # the fork server takes seconds to exit
        done = server.ended()
    assert (done.code, done.survivors) == (-signal.SIGKILL, []), done.err[-2000:]


@pytest.mark.nightly
def test_a_signal_while_the_engine_starts_leaves_no_process(tmp_path: Path) -> None:
    server = Server(tmp_path / "serve", by_vllm(write_classifier(tmp_path / "model")))
    until(server.has_started_vllm, START_WITHIN_S)
    done = server.end(signal.SIGTERM)
    assert (done.code, done.survivors) == (143, []), done.err[-2000:]


@pytest.mark.nightly
def test_an_engine_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    """Weights of other shapes than config.json has are vLLM's to find."""
    folder = write_classifier(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 128}))
    server = Server(tmp_path / "serve", by_vllm(folder))
    done = finish(server.process, server.mark, START_WITHIN_S)
    assert (done.code, done.survivors) == (2, []), done.err[-2000:]
    assert done.err.count("megarl: error: vLLM does not start reward model") == 1
