"""A run for tools/chaos.py: a tiny random model, sums of two digits, a verifier and a recipe.

    python tools/make_chaos.py FOLDER      writes FOLDER/recipe.yaml and what it names

The verifier rewards lengths of responses, which differ within nearly every group of a random model.
The learning rate is so low that the policy stays random and most groups are trained: the policy
does not collapse to equal rewards, for which dynamic sampling would reject them. `steps` is more
than any number of faults needs: `--then` ends the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from make_addition import write_model, write_rows

VERIFIER = '''"""A third of all lengths of a response is worth 0, a half and 1 each."""


def score(prompt, response):
    return (len(response) % 3) / 2
'''


RECIPE = """\
# Two engines, rollouts up to a version old, a checkpoint and an evaluation every other step.
task: rl
folder: {folder}/run
steps: 100000
seed: 5
model: {{path: "{folder}/model", from_scratch: true}}
prompts: {{source: "{folder}/prompts.jsonl", max_prompt_tokens: 8}}
environment: {{verifier: "{folder}/reward.py:score", require_stop: false}}
algorithm: {{correction: {{kind: tis}}}}
rollout: {{num_engines: 2, engine: {{stall_timeout_s: 10}}, groups_per_step: 4, group_size: 4,
  max_new_tokens: 12, max_staleness: 1}}
training: {{num_mini_batches: 2, micro_batch_tokens: 64, optimizer: {{learning_rate: 1.0e-6}},
  checkpoint: {{every: 2, keep: 2}}}}
evaluation: {{every: 2, prompts: {{source: "{folder}/prompts.jsonl", max_prompt_tokens: 8,
  limit: 20, shuffle: false}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True)
    write_model(folder / "model")
    sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100))
    write_rows(folder / "prompts.jsonl", sums)
    (folder / "reward.py").write_text(VERIFIER)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    print(folder / "recipe.yaml")


if __name__ == "__main__":
    main()
