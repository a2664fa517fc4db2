"""Pretrained models that people know: every layout scores real text as transformers does."""

from __future__ import annotations

import pytest
from support.policy import joined, make_role
from support.ranks import run_ranks
from support.real import by_transformers, documents, real_folder

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.types import Samples

BOUND = 1e-4
"""Largest difference of a log-prob, in float32."""

LAYOUTS: dict[tuple[str, int], list[tuple[tuple[int, int, int], int]]] = {
    ("smollm2", 3): [((1, 1, 3), 0)],
    ("smollm2", 4): [((1, 4, 1), 0), ((2, 2, 1), 3)],
    ("gemma3", 4): [((1, 4, 1), 3), ((1, 2, 2), 0)],
}
"""{(model, ranks): [((data, sequence, tensor), ZeRO stage)]}. SmolLM2 has 9 heads and 3 key heads,
Gemma 4 and 1, and windows of 512 tokens.
"""


def scores(
    folder: str, texts: list[list[int]], cases: list[tuple[tuple[int, int, int], int]]
) -> list[list[float]]:
    """Per case the log-probs of all texts. Runs on every rank."""
    found = []
    samples = Samples.concatenate([Samples.one(number, ids) for number, ids in enumerate(texts)])
    with joined() as device:
        for layout, stage in cases:
            with ProcessMesh(Layout(*layout), timeout_s=60) as mesh:
                role = make_role(folder, mesh, device, name="reference", zero_stage=stage)
                found.append(role.token_statistics(samples)[0].tolist())
                role.engine.destroy()
    return found


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [
    pytest.param(*one, marks=pytest.mark.nightly if one != ("smollm2", 4) else ())
    for one in LAYOUTS
])  # fmt: skip
def test_every_layout_scores_real_text_as_transformers_does(name: str, size: int) -> None:
    folder = real_folder(name)
    texts = documents(folder)
    wanted = [one for text in by_transformers(folder, texts) for one in text]
    # A word drawn at random has -10.8 and -12.5; Gemma without its first token is at -5.5.
    assert sum(wanted) / len(wanted) > -5.0, "the model reads this text as noise"
    found = run_ranks(
        size, __file__, "scores", str(folder), texts, LAYOUTS[name, size], timeout_s=300
    )
    for of_rank in found:
        for case, mine in zip(LAYOUTS[name, size], of_rank, strict=True):
            worst = max(abs(a - b) for a, b in zip(mine, wanted, strict=True))
            assert worst < BOUND, (case, worst)
