"""A run for tools/chaos.py: a tiny random model, sums of two digits, a verifier and a recipe.

    python tools/make_chaos.py FOLDER      writes FOLDER/recipe.yaml and what it names

The verifier rewards lengths of responses, which differ within nearly every group of a random model.
The learning rate is so low that the policy stays random and most groups are trained: the policy
does not collapse to equal rewards, for which dynamic sampling would reject them. `steps` is more
than any number of faults needs: `--then` ends the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from make_addition import write_model

VERIFIER = '''"""A third of all lengths of a response is worth 0, a half and 1 each."""


def score(prompt, response):
    return (len(response) % 3) / 2
'''


def recipe(folder: Path) -> dict[str, Any]:
    """The recipe: two engines, rollouts that are up to a version old, a checkpoint and an
    evaluation every other step.
    """
    prompts = {"source": str(folder / "prompts.jsonl"), "max_prompt_tokens": 8}
    return {
        "folder": str(folder / "run"),
        "steps": 100_000,
        "seed": 5,
        "model": {"path": str(folder / "model"), "from_scratch": True},
        "prompts": prompts,
        "environment": {"verifier": f"{folder}/reward.py:score", "require_stop": False},
        "algorithm": {"correction": {"kind": "tis"}},
        "rollout": {
            "num_engines": 2,
            "engine": {"stall_timeout_s": 10},
            "groups_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 12,
            "max_staleness": 1,
        },
        "training": {
            "num_mini_batches": 2,
            "micro_batch_tokens": 64,
            "optimizer": {"learning_rate": 1e-6},
            "checkpoint": {"every": 2, "keep": 2},
        },
        "evaluation": {"every": 2, "prompts": prompts | {"limit": 20, "shuffle": False}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True)
    write_model(folder / "model")
    sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sums))
    (folder / "reward.py").write_text(VERIFIER)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder), sort_keys=False))
    print(folder / "recipe.yaml")


if __name__ == "__main__":
    main()
