"""Ctrl-C and SIGTERM in the middle of a run on two ranks: it ends within seconds, nothing survives,
nothing is half written.

The same run has a SentencePiece tokenizer, fine-tuned first, rollouts one version old and ZeRO 2.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.commands import command, finish, megarl, records, start, write_recipe
from support.tiny import write_model

END_WITHIN_S = 10.0


def sentencepiece_model(folder: Path) -> Path:
    """A SentencePiece tokenizer trained here."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(f"{a} plus {b} is {a + b}" for a in range(30) for b in range(30)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "sp"),
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    return folder / "sp.model"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model fine-tuned with a SentencePiece tokenizer, and a recipe that goes on from it for
    ever.
    """
    folder = tmp_path_factory.mktemp("signals")
    tokenizer = sentencepiece_model(folder)
    model = write_model(folder / "model", vocab_size=64, eos_token_id=2, pad_token_id=3)
    rows = [
        {"prompt": f"{a} plus {b}", "response": f" is {a + b}", "answer": str(a + b)}
        for a in range(9)
        for b in range(9)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {"seed": 3, "model": {"path": str(model), "tokenizer": str(tokenizer)}}
    tuned = {
        **shared,
        "folder": str(folder / "sft"),
        "steps": 30,
        "samples_per_step": 32,
        "demonstrations": {"source": str(folder / "rows.jsonl")},
        "training": {"optimizer": {"learning_rate": 1e-2}, "zero_stage": 1},
    }
    done = megarl("sft", write_recipe(folder / "sft.yaml", tuned), ranks=2)
    assert done.code == 0, done.err[-4000:]
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
        },
        "training": {"zero_stage": 2, "micro_batch_tokens": 128, "checkpoint": {"every": 2}},
    }
    write_recipe(folder / "recipe.yaml", learned)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_everything_cleanly(
    place: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process, mark = start(
        command("train", str(place / "recipe.yaml"), "--folder", str(run), ranks=2)
    )
    deadline = time.monotonic() + 180
    while (
        not list((run / "checkpoints").glob("step_000004"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to every process in the foreground
    else:
        process.send_signal(number)  # a scheduler sends it to the launcher
    started_at = time.monotonic()
    done = finish(process, mark, 60)
    took = time.monotonic() - started_at - 3 * bool(done.survivors)
    assert (run / "checkpoints").is_dir(), done.err[-4000:]
    assert done.survivors == []
    assert done.code != 0
    assert took < END_WITHIN_S, f"{took:.1f} s\n{done.err[-3000:]}"

    from megarl.checkpoints.manifest import damage
    from megarl.checkpoints.progress import newest_first

    whole = newest_first(run / "checkpoints")
    assert whole and all(damage(path) == "" for path in whole)
    rows = records(run / "metrics.jsonl")
    assert all(row["staleness/max"] <= 1 and row["probe/max_abs"] < 1e-4 for row in rows)
    assert any(row["staleness/max"] == 1 for row in rows)
