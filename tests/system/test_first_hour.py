"""A newcomer's first hour, by README and docs alone: data of their own in every format, a reward of
their own in every shape, two ranks, Ctrl-C and resume, evaluation, report, Python, a notebook. What
is wrong is answered in one line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml
from support.commands import (
    ROOT,
    Done,
    command,
    finish,
    marked,
    megarl,
    python,
    records,
    start,
    tiny_run,
    write_recipe,
    write_rows,
)
from support.documented import block, blocks
from support.fork_server import MARK
from support.tiny import write_model

STEPS = 10_000
"""More than a test waits for: Ctrl-C ends the first run."""
ROWS = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
"""A locale in which Python takes files for ASCII."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

REWARDS = {
    "plain": "def score(prompt, response):\n    return 1.0\n",
    "async": (
        "async def score(prompt, response):\n"
        "    return {'reward': len(response) % 3 - 1.0, 'characters': len(response)}\n"
    ),
}


def write_data(folder: Path) -> None:
    """The same problems as JSON lines, as CSV, and as parquet with chat messages."""
    import pyarrow
    import pyarrow.parquet

    write_rows(folder / "own.jsonl", ({"prompt": one, "answer": answer} for one, answer in ROWS))
    lines = [f"{prompt},{answer}\n" for prompt, answer in ROWS]
    (folder / "own.csv").write_text("".join(["question,solution\n", *lines]))
    turns = [[{"role": "user", "content": prompt}] for prompt, _ in ROWS]
    chats = [{"messages": t, "answer": a} for t, (_, a) in zip(turns, ROWS, strict=True)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), folder / "chat.parquet")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data in every format, rewards in every shape, and recipe.yaml."""
    folder = tmp_path_factory.mktemp("größe_日")
    model = write_model(folder / "model")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    write_data(folder)
    for name, text in REWARDS.items():
        (folder / f"{name.replace(' ', '_')}.py").write_text(text)
    tree = tiny_run(folder, model, 3)
    tree["prompts"] = {
        "source": str(folder / "chat.parquet"),
        "prompt_column": "messages",
        "template": "chat",
        "max_prompt_tokens": 8,
    }
    tree["environment"] |= {"verifier": f"{folder}/plain.py:score", "time_limit_s": 5.0}
    tree["evaluation"]["prompts"] = {"source": str(folder / "own.jsonl"), "max_prompt_tokens": 8}
    write_recipe(folder / "recipe.yaml", tree)
    return folder


@pytest.fixture(scope="module")
def interrupted(place: Path) -> Done:
    """A run on two ranks, from a CSV file with columns of its own and an asynchronous reward, that
    Ctrl-C ends after some steps. It asks for no checkpoints.
    """
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    tree |= {"folder": str(place / "stopped"), "steps": STEPS, "resume": "auto"}
    tree["environment"]["verifier"] = f"{place}/async.py:score"
    tree["prompts"] = {
        "source": str(place / "own.csv"),
        "prompt_column": "question",
        "answer_column": "solution",
        "max_prompt_tokens": 8,
    }
    tree["training"] |= {"zero_stage": 1, "checkpoint": {"every": 0}}
    write_recipe(place / "stopped.yaml", tree)
    process, mark = start(command("run", str(place / "stopped.yaml"), ranks=2))
    metrics, deadline = place / "stopped" / "metrics.jsonl", time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the command
    return finish(process, mark, 60)


def newest(folder: Path) -> int:
    return max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def test_ctrl_c_saves_the_last_finished_step(place: Path, interrupted: Done) -> None:
    folder = place / "stopped"
    assert interrupted.survivors == [] and interrupted.code != 0
    assert interrupted.err.count("Ctrl-C: the run saves a checkpoint") == 1
    rows = records(folder / "metrics.jsonl")
    done = rows[-1]["step"]
    assert newest(folder) == done, interrupted.err[-3000:]
    assert all(row["environment/characters"] > 0 for row in rows), "the reward's own metric"
    assert f"the checkpoint of step {done} is saved" in interrupted.err
    assert (folder / "report.html").stat().st_size > 0  # written as the run goes


def test_the_run_goes_on_with_one_rank(place: Path, interrupted: Done) -> None:
    """`resume: auto`, from the checkpoint of two ranks under ZeRO 1."""
    folder = place / "stopped"
    done = newest(folder)
    more = ["--steps", str(done + 1), "--training.zero_stage", "0"]
    again = megarl("run", str(place / "stopped.yaml"), *more)
    assert again.code == 0, again.err[-4000:]
    assert "was written under" in again.err
    assert [row["step"] for row in records(folder / "metrics.jsonl")] == list(range(1, done + 2))
    assert json.loads(again.out)["steps"] == done + 1 == newest(folder)
    finished = megarl("run", str(place / "stopped.yaml"), *more)
    assert finished.code == 0 and "the run is finished" in finished.err
    (folder / "report.html").unlink()
    report = megarl("report", str(folder), **ASCII)
    assert report.code == 0 and report.out.strip() == str(folder / "report.html")
    assert (folder / "report.html").stat().st_size > 0


@pytest.mark.nightly
def test_the_run_goes_on_under_another_locale(place: Path, interrupted: Done) -> None:
    done = newest(place / "stopped")
    more = ["--steps", str(done + 1), "--training.zero_stage", "0"]
    again = megarl("run", str(place / "stopped.yaml"), *more, **ASCII)
    assert again.code == 0, again.err[-4000:]
    assert json.loads(again.out)["steps"] == done + 1 == newest(place / "stopped")


@pytest.fixture(scope="module")
def from_python(place: Path) -> subprocess.CompletedProcess[str]:
    """The example of docs/api.md: chat data, a reward by value, training and evaluation."""
    return run_python(block("python example"), place)


def run_python(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run code as `__main__` of a new process; nothing that it has started may be left."""
    mark = uuid.uuid4().hex
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", MARK: mark}
    done = python("-c", code, cwd=place, env=os.environ | environment, timeout=400)
    assert psutil.wait_procs(marked(mark), timeout=3)[1] == []
    return done


def test_the_python_example_runs(
    place: Path, from_python: subprocess.CompletedProcess[str]
) -> None:
    assert from_python.returncode == 0, from_python.stderr[-4000:]
    *steps, scores = from_python.stdout.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2", "3"]
    greedy, passed = map(float, scores.split())
    assert 0 <= greedy <= 1 and 0 <= passed <= 1
    rows = records(place / "run" / "eval" / "000001" / "generations.jsonl")
    assert len(rows) == 5 * len(ROWS)  # one greedy response and four samples to each problem


def test_every_prompt_was_rendered_and_every_reward_counted(
    place: Path, from_python: subprocess.CompletedProcess[str]
) -> None:
    groups = records(place / "run" / "transcripts.jsonl")
    assert {group["prompt"] for group in groups} <= {prompt for prompt, _ in ROWS}
    judged = [one for group in groups for one in group["rollouts"]]
    assert all(one["reward"] == len(one["response"]) % 3 / 2 for one in judged)


@pytest.mark.nightly
def test_the_cells_of_the_notebook_run(place: Path) -> None:
    """docs/tutorials/notebook.md with fewer steps: the functions are those of `__main__`."""
    code = "\n".join(blocks("python cell"))
    smaller = {'"steps": 40': '"steps": 4', "step[40]": "step[4]", '"] == 10': '"] == 1'}
    smaller["steps=10"] = "steps=1"
    for usual, less in (smaller | {'"data/model"': repr(str(place / "model"))}).items():
        assert code.count(usual) == 1
        code = code.replace(usual, less)
    done = run_python(code, place)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the checkpoint of step" in done.stderr and "goes on from there" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "1" and lines[1].split()[0] == "4"
    assert [line.split()[0] for line in lines[2:12]] == [f"{digit}=" for digit in range(10)]
    assert lines[12] == "1 runs/notebook runs/exact"
    engines = [place / "runs" / name / "activity/engine0.json" for name in ("notebook", "exact")]
    pids = [set(re.findall(r'"host":"[^"]*","pid":(\d+)', path.read_text())) for path in engines]
    assert pids[0] == pids[1] and len(pids[0]) == 1, "three runs have had one engine"
    folder = place / "runs" / "notebook"
    assert [row["step"] for row in records(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    judged = [one for group in records(folder / "transcripts.jsonl") for one in group["rollouts"]]
    assert not any(one["failure"] for one in judged)
