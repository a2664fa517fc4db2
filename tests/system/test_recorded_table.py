"""A whole run of a model type that has no parameter table: vLLM's own loader tells where weights
go.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import megarl, records, tiny_run, write_recipe
from support.tiny import write_model

from megarl import cli
from megarl.errors import UserError


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_type_without_a_table_trains(tmp_path: Path) -> None:
    """The engine scores text as the trainer does after every update."""
    model = write_model(tmp_path / "model", kind="olmo2", tied=True, biases=True)
    tree = tiny_run(tmp_path, model, 2)
    tree["training"] |= {"zero_stage": 3}
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree), ranks=2)
    assert done.code == 0, done.err[-4000:]
    steps = [row for row in records(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(steps) == 2
    assert all(row["grad_norm"] > 0 and row["probe/max_abs"] < 1e-4 for row in steps)


def test_a_model_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    tree = tiny_run(tmp_path, write_model(tmp_path / "model", kind="phi"), 2)
    says = "output head other than a linear layer without bias; choose another model"
    with pytest.raises(UserError, match=says):
        cli.plan(["run", write_recipe(tmp_path / "recipe.yaml", tree), "--check"]).run()
