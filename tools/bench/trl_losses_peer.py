"""TRL's side of tools/bench/trl_losses.py, in TRL's environment: its own loss functions, called
with the log-probs of batches in a file.

    python trl_losses_peer.py BATCHES.json   writes BATCHES.result, {loss: mean of each batch}
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Rows of different lengths as one float64 tensor, filled up on the right."""
    made = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(made, batch_first=True)


def sums(rows: list[list[float]], *, mean: bool = False) -> torch.Tensor:
    """[P] float64: sum, or mean, of each row."""
    return torch.tensor([sum(row) / (len(row) if mean else 1) for row in rows], dtype=torch.float64)


class Model:
    """Stands for the policy: answers TRL's trainers with given log-probs instead of computing them
    from tokens; TRL's code from there on is its own.
    """

    training = True

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, **_: Any) -> Any:
        zeros = torch.zeros_like(self.logprobs)
        return SimpleNamespace(
            log_probs=self.logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


def bare(kind: Any, **settings: Any) -> Any:
    """A trainer of TRL with the attributes that its loss reads, without data and model."""

    def same(values: Any) -> Any:  # one process gathers nothing
        return values

    trainer, cpu = kind.__new__(kind), torch.device("cpu")
    attributes = {
        "accelerator": SimpleNamespace(device=cpu, gather=same, gather_for_metrics=same),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": {"train": collections.defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        **settings,
    }
    vars(trainer).update(attributes)
    return trainer


def inputs(batch: dict[str, Any], order: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Token ids, masks and reference log-probs of responses, a prompt token before each."""
    rows = [row for side, _ in order for row in batch[side]]
    mask = padded([[0.0] + [1.0] * len(row) for row in rows]).long()
    found = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }
    return found | {name: sums(batch[f"reference_{side}"]) for side, name in order}


def dpo_family(batch: dict[str, Any], loss_type: str) -> float:
    """`DPOTrainer._compute_loss`."""
    from trl import DPOTrainer

    trainer = bare(
        DPOTrainer,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        beta=batch["beta"],
        label_smoothing=batch["smoothing"],
    )
    given = inputs(batch, [("chosen", "ref_chosen_logps"), ("rejected", "ref_rejected_logps")])
    model = Model(padded(batch["chosen"] + batch["rejected"]))
    return float(trainer._compute_loss(model, given, return_outputs=False))


def kto(batch: dict[str, Any]) -> float:
    """`KTOTrainer._compute_loss`: chosen responses are desirable, rejected ones are not."""
    from trl import KTOTrainer

    count = len(batch["chosen"])
    trainer = bare(
        KTOTrainer,
        calculate_KL=True,
        beta=batch["beta"],
        loss_type="kto",
        desirable_weight=batch["weights"][0],
        undesirable_weight=batch["weights"][1],
    )
    trainer._compute_kl_logps = lambda *_: sums(batch["others"])
    given = inputs(batch, [("chosen", "chosen"), ("rejected", "rejected")])
    given["ref_logps"] = torch.cat([given.pop("chosen"), given.pop("rejected")])
    given["ref_KL_logps"] = sums(batch["reference_others"])
    given["label"] = torch.tensor([True] * count + [False] * count)
    model = Model(padded(batch["chosen"] + batch["rejected"]))
    return float(trainer._compute_loss(model, given, return_outputs=False))


def cpo_family(batch: dict[str, Any], loss_type: str, *, mean: bool) -> float:
    """`CPOTrainer.cpo_loss`. With "sigmoid" and log-ratios in place of log-probs it is cDPO."""
    from trl.experimental.cpo import CPOTrainer

    smooths = loss_type == "sigmoid"
    trainer = bare(
        CPOTrainer,
        alpha=0.0,
        loss_type=loss_type,
        beta=batch["beta"],
        simpo_gamma=batch["gamma"],
        label_smoothing=batch["smoothing"] if smooths else 0.0,
    )
    pair = [sums(batch[side], mean=mean) for side in ("chosen", "rejected")]
    if smooths:
        under = (sums(batch[f"reference_{side}"]) for side in ("chosen", "rejected"))
        pair = [one - other for one, other in zip(pair, under, strict=True)]
    return float(trainer.cpo_loss(*pair)[0].mean())


def orpo_odds(batch: dict[str, Any]) -> float:
    """`ORPOTrainer.odds_ratio_loss`: the term without fine-tuning."""
    from trl.experimental.orpo import ORPOTrainer

    trainer = bare(ORPOTrainer, beta=batch["beta"])
    pair = [sums(batch[side], mean=True) for side in ("chosen", "rejected")]
    return -float(trainer.odds_ratio_loss(*pair)[0].mean())


def reward_model(batch: dict[str, Any]) -> float:
    """`RewardTrainer.compute_loss`."""
    from trl import RewardTrainer

    scores = torch.tensor(batch["scores"], dtype=torch.float64).T.reshape(-1, 1)
    args = SimpleNamespace(center_rewards_coefficient=batch["centering"])
    margins = torch.tensor(batch["margins"], dtype=torch.float64)
    trainer, given = bare(RewardTrainer, args=args), {"margin": margins}
    given["attention_mask"] = torch.ones(1, 1)
    return float(trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores), given))


LOSSES = {
    "dpo": lambda batch: dpo_family(batch, "sigmoid"),
    "robust_dpo": lambda batch: dpo_family(batch, "robust"),
    "ipo, length_average": lambda batch: dpo_family(batch, "ipo"),
    "cdpo": lambda batch: cpo_family(batch, "sigmoid", mean=False),
    "simpo": lambda batch: cpo_family(batch, "simpo", mean=True),
    "orpo, odds": orpo_odds,
    "kto": kto,
    "reward model": reward_model,
}


def main(path: Path) -> None:
    """The losses of the batches in `path`."""
    batches = json.loads(path.read_text())
    import trl

    found = {name: [loss(batch) for batch in batches] for name, loss in LOSSES.items()}
    path.with_suffix(".result").write_text(json.dumps({"trl": trl.__version__, "losses": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
