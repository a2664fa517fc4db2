"""A case of the fuzz: one good run, something changed in it, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROWS = [
    {"prompt": f"{n}+1=", "answer": answer, "response": answer, "chosen": answer,
     "rejected": str(n + 2)} for n in range(20) for answer in [str(n + 1)]
]  # fmt: skip

Expect = Literal["refuse", "pass", "either"]
"""What the check must do: refuse with one line, pass, or one of the two."""


SECTIONS = {"sft": "demonstrations"} | dict.fromkeys(("preference", "reward_model"), "preferences")
"""{task: the section of its recipe with the data}; others have `prompts`."""


@dataclass
class Case:
    """Changes of a good recipe, its files and its environment."""

    what: str = ""
    """The change in a few words."""
    expect: Expect = "either"
    task: str = "rl"
    """`task` of the recipe; "eval" for an `rl` recipe of `megarl eval`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """{dotted key: value} in the recipe; `{folder}` in a text is the case's folder."""
    text: bytes | None = None
    """The recipe file itself, instead of `settings`."""
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    spoil: Callable[[Path], Any] | None = None
    """Changes files in the case's folder: `model/`, `data.jsonl`."""
    own_model: bool = False
    """Whether `spoil` needs a copy of the model in the case's folder."""
    verifier: bool = False
    """Whether the check must start the verifier's process, which takes a tenth of a second."""

    def set(self, key: str, value: Any, expect: Expect) -> Case:
        """Change a setting; returns the case."""
        self.settings[key] = value
        self.expect = expect
        shown = repr(value)
        self.what += f"{key} = {shown if len(shown) < 60 else shown[:57] + '...'}"
        return self

    def spoiled(self, what: str, spoil: Callable[[Path], Any], expect: Expect = "either") -> Case:
        """Change files; returns the case."""
        self.what, self.spoil, self.expect = what, spoil, expect
        return self


def good_tree(case: Case, folder: Path, model: Path) -> dict[str, Any]:
    """The recipe of `case` as nested dicts."""
    task = "rl" if case.task == "eval" else case.task
    tree: dict[str, Any] = {"task": task, "folder": str(folder / "run")}
    tree["model"] = {"path": str(model)}
    source = str(folder / "data.jsonl")
    if case.task in SECTIONS:
        tree[SECTIONS[case.task]] = {"source": source}
    else:
        prompts = {"source": source, "max_prompt_tokens": 8}
        tree |= {
            "prompts": dict(prompts),
            "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 8},
        }
        if case.task == "distill":
            tree["teacher"] = {"model": {"path": str(model)}}
        if case.task == "eval":
            tree["evaluation"] = {"prompts": dict(prompts)}
    for key, value in case.settings.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            inner = place.get(parent)
            place[parent] = inner if isinstance(inner, dict) else {}
            place = place[parent]
        place[last] = value.replace("{folder}", str(folder)) if isinstance(value, str) else value
    return tree


def write_rows(folder: Path) -> None:
    """The good data file."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
