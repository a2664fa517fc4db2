"""Three DAPO steps on GSM8K's schema with a small untrained model: the real path, with honest
rewards.

With MEGARL_GSM8K set to a folder that holds GSM8K's train.jsonl, on the real problems; else on a
few made in its schema.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.chat_templates import CHATML, tokenizer_of
from support.commands import ROOT, megarl, records
from support.tiny import write_model


def test_three_steps_on_gsm8k_finish_with_honest_rewards(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=320, max_position_embeddings=2048)
    tokenizer_of(CHATML).save_pretrained(model)
    where = os.environ.get("MEGARL_GSM8K", "")
    source = Path(where) / "train.jsonl"
    if not where:
        source = tmp_path / "train.jsonl"
        rows = [
            {
                "question": f"Ann has {n} pears and buys {n} more. How many?",
                "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}",
            }
            for n in range(1, 40)
        ]
        source.write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    overrides = [f"--folder={run}", f"--model.path={model}", f"--prompts.source={source}"]
    recipe = str(ROOT / "launch/recipes/gsm8k_tiny_cpu.yaml")
    done = megarl("train", recipe, *overrides, "--model.from_scratch=true")
    assert done.code == 0, done.err[-4000:]
    rows = records(run / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert row["accuracy"] <= 0.05, "the verifier is wrong: the model is untrained"
        assert row["verifier/errors"] == row["verifier/timeouts"] == row["verifier/nans"] == 0
        assert row["probe/max_abs"] < 1e-4
