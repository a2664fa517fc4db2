"""A whole run whose advantage, loss, correction, filter and method are the examples of
docs/howto, in files of the user's: no file of the repository changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.commands import megarl, records, tiny_run, write_recipe
from support.documented import block
from support.tiny import write_model

KEYS = {
    "loss": ("my_loss.py", "bounded"),
    "advantage": ("my_advantage.py", "above_median"),
    "correction": ("my_correction.py", "soft"),
    "filter": ("my_filter.py", "far_apart"),
    "method": ("my_method.py", "imitate"),
}
"""{example on the page: (file, function)}"""


def test_every_part_of_an_algorithm_is_of_a_file(tmp_path: Path) -> None:
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), 3)
    (tmp_path / "best_only.py").write_text(block("python own_training"))
    # The second step is trained by the method with a loss of its own.
    both = "return (best_only if batch.step == 1 else imitate)(parts, batch)"
    (tmp_path / "both.py").write_text(
        "from best_only import best_only\nfrom my_method import imitate\n\n\n"
        f"def both(parts, batch):\n    {both}\n"
    )
    for name, (file, function) in KEYS.items():
        # Each leaves a word where its body begins, in whichever process it runs.
        said = f"    open({str(tmp_path / 'called')!r}, 'a').write('{name} ')\n"
        head = re.search(rf"def {function}\(.*\):\n", block(f"python own_{name}"))
        assert head is not None
        (tmp_path / file).write_text(block(f"python own_{name}").replace(head[0], head[0] + said))
    named = {name: ":".join(place) for name, place in KEYS.items()}
    tree["rollout"]["filter"] = named.pop("filter")
    correction = {"kind": named.pop("correction")}
    named |= {"method": "both.py:both"}
    tree["algorithm"] = named | {"clip_high": 0.4, "correction": correction}
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree))
    assert done.code == 0, done.err[-4000:]
    called = (tmp_path / "called").read_text().split()
    # Each was tried once at least, and was called in two steps; the trial does not call a method.
    for name in KEYS:
        assert called.count(name) >= (2 if name == "method" else 3), (name, called.count(name))
    steps = records(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("imitated") for row in steps] == [1.0, None, 1.0]
    assert all(row["grad_norm"] > 0 for row in steps)
    own = steps.pop(1)
    assert own["loss"] > 0 and own["tokens/trained"] > 0 and own["length/mean"] > 0
    assert all(row["clip_share"] == 0 for row in steps)
    assert all(row["correction/mean"] == pytest.approx(1.0, abs=1e-3) for row in steps)
    found = json.loads(megarl("ledger", str(tmp_path / "run"), "--json").out)
    assert set(found["rejected"]) == {"rollout.filter"} and found["rejected"]["rollout.filter"] > 0
