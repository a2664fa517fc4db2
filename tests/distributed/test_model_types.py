"""Model types, each as docs/reference_models.md has it: trained as transformers computes it, or
refused with one line that is true.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ("gpt_neox", "gpt_bigcode", "llama", "gpt2", "qwen3_5_text", "qwen3_moe", "glm4_moe")
REFUSED = {
    "gemma4_text": "layers of different sizes",
    "qwen2_moe": "sliding_window is 0",
    "afmoe": "mixture of experts with AfmoeTokenChoiceRouter",
    "jetmoe": "mixture of experts with experts without transformers' hook",
    "bamba": "state-space layers",
    "mamba": "state-space layers",
    "rwkv": "num_attention_heads is None",
    "falcon": "cannot take the place of its attention",
    "hrm_text": "joins with other tensors or splits",
    "stablelm": "takes the attention of 0 of its 2 layers",
    "nemotron": "takes the attention of 0 of its 2 layers",
}


def rows() -> dict[str, tuple[str, ...]]:
    """What becomes of each type, and the lines of the page that say so."""
    sys.path.insert(0, str(ROOT / "tools"))
    import model_types

    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh, initialise

    initialise()
    with ProcessMesh(Layout()) as ranks:
        found = {kind: model_types.row(kind, ranks) for kind in (*TRAINED, *REFUSED)}
    return found | {
        f"{kind} on the page": (model_types.reason(kind, found[kind][0]),) for kind in REFUSED
    }


def test_types_train_or_are_refused() -> None:
    found, page = run_ranks(1, __file__, "rows")[0], (ROOT / "docs/reference_models.md").read_text()
    trained = page.partition("| refused |")[0]
    for kind in TRAINED:
        _, tensor, export = found[kind]
        lines = [text.strip("| ").split(" | ") for text in trained.splitlines()]
        (row,) = (line for line in lines if kind in line[0].split(", "))
        assert (row[1], row[3]) == (tensor, export)
        assert export == "yes"
    for kind, why in REFUSED.items():
        assert why in found[kind][0] and "fetch" not in found[kind][0], found[kind]
        said = found[f"{kind} on the page"][0]
        line = next(line for line in page.splitlines() if line.endswith(f"| {said} |"))
        assert kind in line.split("|")[1].replace(",", " ").split()
