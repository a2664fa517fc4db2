"""Ctrl-C and SIGTERM in the middle of a run on two ranks: it ends within seconds, nothing survives,
nothing is half written.

The same run has a SentencePiece tokenizer, fine-tuned first, rollouts one version old, groups that
are used as they finish, and ZeRO 2; it is resumed from the checkpoint before the last.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.commands import (
    Done,
    command,
    finish,
    ledger,
    marked,
    megarl,
    records,
    start,
    until,
    write_recipe,
    write_rows,
)
from support.tiny import write_model

from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.manifest import damage


def sentencepiece_model(folder: Path) -> Path:
    """A SentencePiece tokenizer trained here."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(f"{a} plus {b} is {a + b}" for a in range(30) for b in range(30)))
    names = {"input": str(text), "model_prefix": str(folder / "sp"), "minloglevel": 2}
    settings = {"vocab_size": 40, "hard_vocab_limit": False, "pad_id": 3}
    sentencepiece.SentencePieceTrainer.train(**names, **settings)
    return folder / "sp.model"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model fine-tuned with a SentencePiece tokenizer, and a recipe that goes on from it for
    ever.
    """
    folder = tmp_path_factory.mktemp("signals")
    tokenizer = sentencepiece_model(folder)
    model = write_model(folder / "model", vocab_size=64, eos_token_id=2, pad_token_id=3)
    write_rows(folder / "rows.jsonl", [
        {"prompt": f"{a} plus {b}", "response": f" is {a + b}", "answer": str(a + b)}
        for a in range(9) for b in range(9)
    ])  # fmt: skip
    shared = {"seed": 3, "model": {"path": str(model), "tokenizer": str(tokenizer)}}
    tuned = {
        **shared,
        "folder": str(folder / "sft"),
        "steps": 30,
        "samples_per_step": 32,
        "demonstrations": {"source": str(folder / "rows.jsonl")},
        "training": {
            "optimizer": {"learning_rate": 1e-2},
            "zero_stage": 1,
            "checkpoint": {"every_minutes": 1e-6, "keep": 3},  # each step
        },
    }
    done = megarl("run", write_recipe(folder / "sft.yaml", tuned), ranks=2)
    assert done.code == 0, done.err[-4000:]
    told = json.loads(done.out)
    saved = sorted(path.name for path in (folder / "sft" / "checkpoints").iterdir())
    assert saved == ["step_000028", "step_000029", "step_000030"]
    assert told["steps"] == 30 and told["loss_last"] < told["loss_first"]
    losses = [row["loss"] for row in records(folder / "sft" / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    learned = {
        **shared,
        "folder": str(folder / "run"),
        "steps": 10_000,
        "model": {
            "path": str(folder / "sft/checkpoints/step_000030/model"),
            "tokenizer": str(tokenizer),
        },
        "prompts": {"source": str(folder / "rows.jsonl"), "max_prompt_tokens": 32},
        "environment": {"verifier": "math", "require_stop": False},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 12,
            "max_staleness": 1,
            "dynamic_sampling": {"enabled": False},
        },
        "algorithm": {"correction": {"kind": "tis"}},
        "training": {"zero_stage": 2, "micro_batch_tokens": 128, "checkpoint": {"every": 2}},
    }
    write_recipe(folder / "recipe.yaml", learned)
    return folder


def end_after_steps(
    folder: Path, number: signal.Signals, *arguments: str, steps: int, ranks: int
) -> Done:
    """Start a command that writes to `folder`, send it a signal after some steps, and wait for its
    end.
    """
    process, mark = start(command(*arguments, "--folder", str(folder), ranks=ranks))
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            break
        time.sleep(0.1)
    words = (word for one in marked(mark) for word in one.cmdline() if "/ray/" in word)
    of_ray = {Path(word).name for word in words}
    assert ("log_monitor.py" in of_ray) == ("rollout" in Path(arguments[1]).read_text())
    assert not of_ray & {"monitor.py", "dashboard.py"}, "of Ray only what a run needs"
    process.send_signal(number)  # a scheduler sends it to the launcher
    done = finish(process, mark, 60)
    assert done.survivors == []
    assert done.code != 0
    assert "killing child processes" not in done.err, done.err[-3000:]
    whole = newest_first(folder / "checkpoints")
    last = records(metrics)[-1]["step"]
    assert whole and whole[0].name == f"step_{last:06d}", done.err[-3000:]
    assert all(damage(path) == "" for path in whole)
    assert f"the checkpoint of step {last} is saved" in done.err
    return done


def test_sigterm_ends_two_ranks_cleanly_and_the_run_resumes(place: Path, tmp_path: Path) -> None:
    """Ctrl-C on two ranks is in test_first_hour.py."""
    recipe = ["run", str(place / "recipe.yaml"), "--rollout.dispatch", "windowed"]
    recipe += ["--rollout.max_open_groups", "11"]
    run = tmp_path / "run"
    end_after_steps(run, signal.SIGTERM, *recipe, steps=4, ranks=2)
    rows = records(run / "metrics.jsonl")
    assert all(row["staleness/max"] <= 1 and row["probe/max_abs"] < 1e-4 for row in rows)
    assert any(row["staleness/max"] == 1 for row in rows)
    found = ledger(run)
    assert found["steps"] == len(rows) and found["trained"] == 4 * len(rows)
    # Four groups a step are trained, and up to eleven open: some are too old when they finish.
    stale = sum(row["groups/stale"] for row in rows)
    assert found["rejected"].get("stale", 0) >= stale > 0

    # What a kill by force leaves between two checkpoints: later steps are void.
    newest, before = sorted((run / "checkpoints").iterdir())[-1:-3:-1]
    shutil.rmtree(newest)
    first = json.loads((before / "run.json").read_text())
    more = ["--folder", str(run), "--resume", "True", "--steps", str(first["step"] + 3)]
    if first.get("used"):  # the other policy could not leave these groups out
        refused = megarl(*recipe[:2], *more)
        assert refused.code == 2 and "set rollout.dispatch to 'windowed'" in refused.err
    done = megarl(*recipe, *more)
    assert done.code == 0, done.err[-3000:]
    found = ledger(run)
    assert (found["restores"], found["steps"]) == (1, first["step"] + 3) and found["void"] > 0
    assert found["in_flight"] == [] and found["used_beyond_cursor"] == []
    assert found["trained"] == 4 * found["steps"] and found["age_max"] <= 1
    assert found["cursor"] == found["trained"] + found["rejected"].get("stale", 0)


@pytest.mark.parametrize(("number", "ranks"), [
    pytest.param(signal.SIGINT, 1, marks=pytest.mark.nightly), (signal.SIGHUP, 2),
])  # fmt: skip
def test_signals_end_fine_tuning_cleanly(
    number: signal.Signals, ranks: int, place: Path, tmp_path: Path
) -> None:
    recipe = ["run", str(place / "sft.yaml"), "--steps", "1000000"]
    recipe += ["--training.checkpoint.every_minutes", "0"]
    done = end_after_steps(tmp_path / "sft", number, *recipe, steps=2, ranks=ranks)
    said = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    assert f"megarl: {said[number]}: the run saves" in done.err
    assert done.code == 128 + number or ranks > 1  # torchrun has a code of its own
    assert (tmp_path / "sft" / "report.html").exists()


def test_sigterm_while_engines_start(place: Path, tmp_path: Path) -> None:
    """Inside of a call of Ray, which takes exceptions of signal handlers for its own mistakes."""
    problems = ["--evaluation.prompts.source", str(place / "rows.jsonl")]
    problems += ["--evaluation.prompts.max_prompt_tokens", "32"]
    recipe = ["eval", str(place / "recipe.yaml"), *problems, "--folder", str(tmp_path)]
    process, mark = start(command(*recipe))
    until(lambda: any("EngineActor" in "".join(one.cmdline()) for one in marked(mark)), 120)
    process.send_signal(signal.SIGTERM)
    done = finish(process, mark, 60)
    assert done.survivors == [] and done.code == 143
    assert done.err.endswith("megarl: SIGTERM: megarl eval ended before it was done\n"), done.err
    assert "Error" not in done.err
