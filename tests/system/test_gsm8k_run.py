"""Three DAPO steps on GSM8K's schema with a small untrained model: the real path, with honest
rewards.

With MEGARL_GSM8K set to a folder that holds GSM8K's train.jsonl, on the real problems; else on a
few made in its schema.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.commands import ROOT, megarl, records
from support.tiny import write_model


def byte_level_tokenizer(folder: Path) -> None:
    """256 bytes and two signs: reads any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=template
    )
    fast.save_pretrained(str(folder))


def test_three_steps_on_gsm8k_finish_with_honest_rewards(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=320, max_position_embeddings=2048)
    byte_level_tokenizer(model)
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
    overrides = [
        "--folder",
        str(run),
        "--model.path",
        str(model),
        "--prompts.source",
        str(source),
        "--model.from_scratch",
        "True",
    ]
    done = megarl("train", str(ROOT / "launch/recipes/gsm8k_tiny_cpu.yaml"), *overrides)
    assert done.code == 0, done.err[-4000:]
    rows = records(run / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert row["accuracy"] <= 0.05, (
            "an untrained model cannot solve these: the verifier must be wrong"
        )
        assert row["verifier/errors"] == row["verifier/timeouts"] == row["verifier/nans"] == 0
        assert row["probe/max_abs"] < 1e-4
