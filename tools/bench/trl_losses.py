"""Preference losses of megarl against TRL's own functions, called on the same log-probs.

    python tools/bench/trl_losses.py [--json] [--batches 200] [--trl-env FOLDER]

Each batch has 1 to 8 pairs of responses of 1 to 40 tokens, log-probs from -12 to 0 under policy and
reference, and settings of its own (beta, label smoothing, gamma, weights). What is compared is
the mean loss of a batch. TRL's trainers compute it from the log-probs on (`DPOTrainer`,
`KTOTrainer`, `RewardTrainer`, and of `trl.experimental` `CPOTrainer` and `ORPOTrainer`); TRL 1.16
has no PPO trainer, and so no GAE.

Two of megarl's losses are not TRL's, and are compared only in part:

    ipo    the paper (arXiv:2310.12036, eq. 17) has sums of log-probs, TRL means over tokens, which
           its comment says the authors confirmed; `length_average: true` is TRL's
    orpo   the fine-tuning term is a mean over pairs of each pair's mean over tokens (the paper's
           eq. 6, an expectation over pairs), in TRL one mean over all tokens; the odds ratio is the
           same
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from against_trl import TRL_ENV, make_trl_environment
from common import Args, Lines, run_tool, table
from processes import child_environment, run

from megarl.apps.tune.pairwise import Pairs, bradley_terry, kto, pair_loss
from megarl.settings.objectives import PreferenceLossConfig, RewardLossConfig

SIDES = ("chosen", "rejected", "others")
OPTIONS = {
    "--batches": (200, "random batches"),
    "--seed": (1, "of the batches"),
    "--trl-env": (TRL_ENV, "folder of TRL's environment"),
}


def make_batch(draw: random.Random) -> dict[str, Any]:
    """A batch of ragged pairs: log-probs of every token, and settings."""
    count = draw.randint(1, 8)

    def rows(lengths: list[int]) -> list[list[float]]:
        lowest = draw.choice([-12.0, -2.0, -0.05])
        return [[draw.uniform(lowest, -1e-4) for _ in range(length)] for length in lengths]

    batch: dict[str, Any] = {}
    for side in SIDES:
        lengths = [draw.randint(1, 40) for _ in range(2 * count if side == "others" else count)]
        batch |= {side: rows(lengths), f"reference_{side}": rows(lengths)}
    return batch | {
        "beta": draw.choice([0.01, 0.1, 0.5, 2.0]),
        "smoothing": draw.choice([0.05, 0.3]),
        "gamma": draw.choice([0.0, 0.5, 1.6]),
        "weights": [draw.choice([1.0, 1.33]), draw.choice([1.0, 0.5])],
        "scores": [[draw.gauss(0, 3), draw.gauss(0, 3)] for _ in range(count)],
        "margins": [draw.uniform(-1, 2) for _ in range(count)],
        "centering": draw.choice([0.01, 0.5]),
    }


def own_losses(batch: dict[str, Any]) -> dict[str, float]:
    """{loss: megarl's mean over the batch}, with the names of the other side."""

    def sums(prefix: str = "") -> torch.Tensor:
        columns = [[sum(row) for row in batch[prefix + side]] for side in SIDES[:2]]
        return torch.tensor(columns, dtype=torch.float64).T

    lengths = torch.tensor([[len(row) for row in batch[side]] for side in SIDES[:2]]).T
    pairs = Pairs(sums(), sums("reference_"), lengths)
    beta, smoothing = batch["beta"], batch["smoothing"]

    def mean(method: Any, **settings: Any) -> float:
        config = PreferenceLossConfig(method=method, beta=beta, **settings)
        return float(pair_loss(pairs, config).loss.mean())

    ratios = torch.cat([pairs.ratios[:, 0], pairs.ratios[:, 1]])
    good = torch.arange(len(ratios)) < len(lengths)
    over = [sum(row) for row in batch["others"]]
    under = [sum(row) for row in batch["reference_others"]]
    divergence = sum(a - b for a, b in zip(over, under, strict=True)) / len(over)
    weights = dict(zip(("desirable_weight", "undesirable_weight"), batch["weights"], strict=True))
    single = PreferenceLossConfig(method="kto", beta=beta, **weights)
    scores = torch.tensor(batch["scores"], dtype=torch.float64)
    margins = torch.tensor(batch["margins"], dtype=torch.float64)
    judged = bradley_terry(scores, margins, RewardLossConfig(centering=batch["centering"]))
    return {
        "dpo": mean("dpo"),
        "robust_dpo": mean("robust_dpo", label_smoothing=smoothing),
        "ipo, length_average": mean("ipo", length_average=True),
        "cdpo": mean("cdpo", label_smoothing=smoothing),
        "simpo": mean("simpo", target_margin=batch["gamma"]),
        "orpo, odds": mean("orpo") + float(pairs.means[:, 0].mean()),
        "kto": float(kto(ratios, good, divergence, single).mean()),
        "reward model": float(judged.mean()),
    }


def measure(args: Args) -> dict[str, Any]:
    """Compute both sides of every batch; the largest difference of each loss."""
    draw = random.Random(args.seed)
    batches = [make_batch(draw) for _ in range(args.batches)]
    python = make_trl_environment(args.trl_env)
    path = args.work / "batches.json"
    path.write_text(json.dumps(batches))
    command = [python, str(Path(__file__).with_name("trl_losses_peer.py")), str(path)]
    run(command, args.work / "log", 600.0, child_environment(args.work, 1))
    theirs = json.loads(path.with_suffix(".result").read_text())
    ours = [own_losses(batch) for batch in batches]
    rows = []
    for name, values in theirs["losses"].items():
        pairs = zip((one[name] for one in ours), values, strict=True)
        gaps = [abs(mine - value) / max(1.0, abs(value)) for mine, value in pairs]
        rows.append({"loss": name, "largest": max(gaps), "mean_loss": sum(values) / len(values)})
    return {"trl": theirs["trl"], "losses": rows}


def show(result: dict[str, Any]) -> Lines:
    """The table: largest difference of a batch's loss, relative above 1 and absolute below."""
    yield f"TRL {result['trl']}"
    columns = "loss; largest difference=largest .1e; mean loss=mean_loss .4g"
    yield from table(result["losses"], columns)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
