"""tools/bench/overhead.py: its arithmetic, its model without an end, and what it refuses. The
benchmark itself runs in tests/system/test_tools.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.types import Samples, StepBatch

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


PARTS = {"generation": [2.0, 4.0], "training": [1.0, 3.0]}
"""Means 3 and 2 seconds."""


def test_a_step_is_compared_with_the_sum_of_its_parts_or_with_the_longer_one() -> None:
    from overhead import compared

    found = compared([5.0, 6.0], PARTS, 0)
    assert (found["bound_s"], found["overhead_s"], found["ratio"]) == (5.0, 0.5, 1.1)
    found = compared([3.0, 4.0], PARTS, 1)
    assert (found["bound_s"], found["ratio"]) == (3.0, 3.5 / 3)


def test_causes_add_up_to_the_overhead() -> None:
    from overhead import causes, compared

    row = compared([6.0], PARTS, 0)
    times = {"wait": 3.2, "train": 2.1, "publish": 0.3, "rollout": 3.1, "step": 5.75}
    found = causes(row, {f"time/{name}_s": value for name, value in times.items()})
    assert found["rollouts beyond generation"] == pytest.approx(0.2)
    assert found["metrics, between steps"] == pytest.approx(0.25)
    assert sum(found.values()) == pytest.approx(row["overhead_s"])


def test_prompts_by_group() -> None:
    from overhead_part import prompts_of

    rows = [(0, [5, 6, 7]), (1, [8, 9, 9]), (2, [5, 6, 1])]
    samples = Samples.concatenate(
        [Samples.one(name, ids, mask=[False, name == 1, True]) for name, ids in rows]
    )
    batch = StepBatch(
        step=0,
        samples=[samples.select([2, 1]), samples.select([0])],
        micro_batches=[[[0, 1]], [[0]]],
        rewards=np.zeros(3),
        groups=np.array([0, 1, 0]),
        response_tokens=np.array([1, 2, 1]),
        mini_batch_of=np.array([1, 0, 0]),
        metrics={},
    )
    assert prompts_of(batch) == [[[5, 6], [5, 6]], [[8]]]


def test_the_model_never_ends_a_response(tmp_path: Path) -> None:
    import torch
    from overhead import EOS_ID, write_endless_task
    from transformers import AutoModelForCausalLM

    write_endless_task(tmp_path, 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(64).repeat(4)[None]).logits[0]
    others = torch.cat([logits[:, :EOS_ID], logits[:, EOS_ID + 1 :]], dim=1)
    assert logits[:, EOS_ID].max() < others.max(dim=1).values.min() - 40
    assert others.std(dim=1).max() < 1, "the others stay random"


def test_other_training_is_refused() -> None:
    from overhead import refuse_other_training

    pairs = ((0.25, 2.0), (0.5, 1.0))
    records = [{"step": n, "loss": a, "grad_norm": b} for n, (a, b) in enumerate(pairs, 1)]
    refuse_other_training([[0.25, 2.0], [0.5, 1.0005]], records)
    with pytest.raises(RuntimeError, match=r"grad_norm of step 2 is 1\.01"):
        refuse_other_training([[0.25, 2.0], [0.5, 1.01]], records)


def test_each_limit_needs_its_number_of_prompts() -> None:
    from common import command_line
    from overhead import OPTIONS, measure

    parser = command_line("", OPTIONS)
    for words in (["--limits", "8"], ["--limits", "8,5000", "--groups", "1,1"]):
        with pytest.raises(ValueError, match=r"--(groups needs one number|limits has 5000)"):
            measure(parser.parse_args(words))
