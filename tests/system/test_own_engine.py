"""A whole run whose inference engine is not vLLM but a class in a file: only the file is new."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
from support.commands import ROOT, megarl, records, tiny_run, write_recipe
from support.tiny import write_model

from megarl.engines.plan import check_engine_kind


def test_a_run_on_an_engine_of_a_file(tmp_path: Path) -> None:
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), 2)
    shutil.copy(ROOT / "tests" / "support" / "transformers_engine.py", tmp_path / "mine.py")
    tree["rollout"] |= {"engine": {"kind": f"{tmp_path}/mine.py:TransformersEngine"}}
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree))
    assert done.code == 0, done.err[-4000:]
    steps = records(tmp_path / "run" / "metrics.jsonl")
    # Transformers' log-probs are the trainer's, of the weights of this very step.
    assert [row["mismatch/max_abs"] < 1e-4 for row in steps if "loss" in row] == [True] * 2
    assert all(row["grad_norm"] > 0 for row in steps if "loss" in row)
    assert "AsyncLLM" not in (tmp_path / "run" / "run.log").read_text()


def test_an_engine_without_a_method_is_refused(tmp_path: Path) -> None:
    file, config = tmp_path / "half.py", transformers.Qwen2Config()
    file.write_text("class Half:\n    async def start(self):\n        pass\n")
    with pytest.raises(ValueError, match=r"half.py:Half lacks the async methods generate, "):
        check_engine_kind(f"{file}:Half", config)
    with pytest.raises(ValueError, match=r"rollout.engine.kind"):
        check_engine_kind(f"{file}:Whole", config)
    check_engine_kind("vllm", config)
