"""Policy-gradient training: a step's samples and the results of other models become advantages, a
loss, and an optimizer step per mini-batch.

    StepBatch (this rank's samples, the whole step's rewards) + columns of other models
        --prepare--> {"logprobs", "advantages", "returns"}  --train--> StepReport

Other models fill the columns `reference_logprobs` for a KL penalty and `values` for GAE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.environments.user_code import function_of
from megarl.objectives.corrections import (
    CORRECTIONS,
    WEIGHT_SUMS,
    summarise_weights,
    truncated,
    weight_sums,
)
from megarl.objectives.kl import KL_ESTIMATORS, KLControl
from megarl.objectives.losses import LOSSES, LossTerms
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.schema import is_own
from megarl.trainer.finite import StepGuard
from megarl.trainer.packing import SequenceMean
from megarl.trainer.role import Column, Role
from megarl.trainer.step import (
    GAPS,
    EmptySteps,
    MicroBatchLoss,
    StepMetrics,
    add_mismatch,
    computed_tokens,
    mismatch_metrics,
    token_weights,
    train_mini_batches,
    unreported_tokens,
)
from megarl.trainer.step_advantages import step_advantages
from megarl.types import MicroBatch, StepBatch, StepReport


class PolicyGradient:
    """Trains the policy with the configured algorithm (PPO, GRPO and others). Its methods are
    collective over the policy's ranks.
    """

    def __init__(self, policy: Role, algorithm: AlgorithmConfig, *, temperature: float) -> None:
        """`temperature`: the engines' divisor of the logits; the trainer divides by it too."""
        self.policy, self.algorithm, self.temperature = policy, algorithm, temperature
        policy.replays_experts = algorithm.router_replay == "rollout"
        self.kl = KLControl(algorithm.kl)
        self.guard = StepGuard(policy, allowed=policy.training.max_skipped_steps)
        self.empty_steps = EmptySteps(self.guard, policy.training.max_empty_steps)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` needs the column "reference_logprobs"."""
        return self.algorithm.kl.coefficient > 0

    @property
    def corrects(self) -> bool:
        """Whether each token's loss has a weight that corrects for the mismatch between trainer and
        engines.
        """
        return self.algorithm.correction.kind != "none"

    def prepare(
        self,
        batch: StepBatch,
        packed: Sequence[Sequence[MicroBatch]],
        columns: Mapping[str, Column],
    ) -> dict[str, Column]:
        """The columns to train `batch` with: `columns`, the policy's own "logprobs" where needed,
        "advantages", and with critics "returns". {} if a log-prob or value is not finite: the batch
        is then skipped. `packed`: what `Role.pack_step` returned. Raises `UserError` if
        `training.max_skipped_steps` allows no further skipped step.
        """
        columns = dict(columns)
        if (first := self._first_scored()) < len(packed):
            columns["logprobs"] = self.policy.score(
                *(batch, packed),
                temperature=self.temperature,
                skip=first,
                keeps_experts=self.algorithm.router_replay == "trainer",
            )
        if problem := self._input_problem(batch, columns):
            self.guard.skip(problem)
            return {}
        return columns | step_advantages(
            *(batch, columns, self.algorithm),
            kl_coefficient=self.kl.coefficient,
            data=self.policy.mesh.data,
            device=self.policy.device,
        )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: an adaptive KL coefficient."""
        return {"kl_coefficient": self.kl.coefficient} if self.kl.is_adaptive else {}

    def restore(self, state: Mapping[str, float]) -> None:
        self.kl.restore(state.get("kl_coefficient", self.kl.coefficient))

    def train(
        self,
        batch: StepBatch,
        packed: Sequence[Sequence[MicroBatch]],
        columns: Mapping[str, Column],
    ) -> StepReport:
        """Train on one step's samples, with an optimizer step for each mini-batch and epoch; every
        rank gets the same report. `columns`: what `prepare` returned; {} trains nothing. Raises
        `UserError` as `train_mini_batches`.
        """
        packed = packed if columns else ()
        first = self._first_scored()
        kl = ("kl",) if self.needs_reference else ()
        weights = [f"correction/{name}" for name in WEIGHT_SUMS] if self.corrects else []
        gaps = [f"mismatch/{name}" for name in GAPS]
        sums = ("loss", "entropy", "clipped", "tokens", *kl, *weights, *gaps)
        metrics = StepMetrics(self.policy.device, sums, ("max_abs",))

        def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
            weights = token_weights(
                batch, number, self.algorithm.aggregation, self.policy.device, self.algorithm
            )
            row = {name: column[number] for name, column in columns.items()}
            if number < first:
                row.pop("logprobs", None)
            return lambda micro: self._loss(micro, row, weights, metrics, at_start=at_start)

        num_steps, rates = train_mini_batches(
            *(self.policy, packed, loss_of, self.guard, metrics),
            num_mini_batches=len(batch.samples),
        )
        report = self._report(metrics, num_mini_batches=num_steps)
        report |= rates | computed_tokens(packed, self.policy)
        if self.policy.replays_experts:
            report |= unreported_tokens(batch.samples, self.policy)
        return StepReport(step=batch.step, metrics=batch.metrics | report)

    def _input_problem(self, batch: StepBatch, columns: Mapping[str, Column]) -> str:
        """Which log-probs of the batch are not finite on some rank, or "". Checked before
        advantages, in which they would spread.
        """
        for samples in batch.samples:
            self.guard.watch("engines' log-probs", torch.from_numpy(samples.engine_logprobs))
        names = {
            "reference_logprobs": "reference model's log-probs",
            "logprobs": "policy's log-probs",
        }
        for name, column in columns.items():
            for values in column:
                self.guard.watch(names.get(name, "critic's values"), values)
        return self.guard.problem()

    def _first_scored(self) -> int:
        """The first mini-batch whose log-probs need a forward pass before the step's first update.

        The first mini-batch's training pass gives its own, unless advantages depend on them (KL in
        the reward), or it is trained again.
        """
        kl = self.algorithm.kl
        if self.policy.training.epochs_per_step > 1 and self.algorithm.old_logprobs == "trainer":
            return 0
        if kl.coefficient > 0 and kl.where == "reward":
            return 0
        return 1 if self.algorithm.old_logprobs == "trainer" else 2**31

    def _loss(
        self,
        micro: MicroBatch,
        columns: Mapping[str, torch.Tensor],
        weights: torch.Tensor,
        metrics: StepMetrics,
        *,
        at_start: bool,
    ) -> torch.Tensor:
        """This micro-batch's term of the mini-batch's loss; adds to `metrics`. `at_start`: the step
        has made no update yet.
        """
        algorithm = self.algorithm
        logprobs, entropy = self.policy.engine(micro, self.temperature)
        self.guard.watch("policy's log-probs", logprobs)
        if logprobs.numel() == 0 and not micro.indices:
            return logprobs.sum() + entropy.sum()
        # A sequence rank without response tokens goes on: others may ask it for its part of a sum.
        samples, engine_logprobs = micro.sample_ids[micro.mask], micro.engine_logprobs[micro.mask]
        places, weight, current = micro.places[micro.mask], weights[samples], logprobs.detach()
        if algorithm.old_logprobs == "engine":
            behaviour = engine_logprobs
        else:
            behaviour = columns["logprobs"][places] if "logprobs" in columns else current
        mean = SequenceMean(samples, micro.members, self.policy.mesh.sequence)
        advantages = columns["advantages"][places]
        loss_of = function_of(algorithm.loss, LOSSES, "algorithm.loss")
        terms = loss_of(logprobs, behaviour, advantages, mean, algorithm)
        if isinstance(terms, tuple):  # of a loss that reports
            terms, reported = terms
            metrics.add_own(reported)
        if isinstance(terms, torch.Tensor):  # of a loss that clips nothing
            terms = LossTerms(terms, torch.zeros_like(terms).bool(), terms.detach())
        correct = function_of(algorithm.correction.kind, CORRECTIONS, "algorithm.correction.kind")
        correction = correct(behaviour, engine_logprobs, mean.sum, algorithm.correction)
        policy_loss = (weight * correction * terms.per_token).sum()
        loss = policy_loss - algorithm.entropy_coefficient * (weight * entropy).sum()
        metrics.add(
            loss=policy_loss.detach().double(),
            entropy=entropy.detach().sum().double(),
            clipped=terms.clipped.sum().double(),
            tokens=float(logprobs.numel()),
        )
        if self.corrects:
            sums = weight_sums(
                correction, truncated(behaviour, engine_logprobs, algorithm.correction)
            )
            metrics.add(**{f"correction/{name}": sums[name] for name in WEIGHT_SUMS})
        if self.needs_reference:
            reference = columns["reference_logprobs"][places]
            divergence = KL_ESTIMATORS[algorithm.kl.estimator](logprobs, reference)
            metrics.add(kl=divergence.detach().sum().double())
            if algorithm.kl.where == "loss":
                loss = loss + self.kl.coefficient * (weight * divergence).sum()
        if at_start:
            add_mismatch(metrics, current, engine_logprobs)
        return loss

    def _report(self, metrics: StepMetrics, *, num_mini_batches: int) -> dict[str, float]:
        """A step's metrics over all ranks, as for metrics.jsonl. Also adapts an adaptive KL
        coefficient.
        """
        if is_own(self.algorithm.loss):
            metrics.agree(self.policy.mesh.gradient)
        value = metrics.reduce(self.policy.mesh.gradient)
        tokens = max(value["tokens"], 1.0)
        report = {
            "loss": value["loss"] / max(1, num_mini_batches),
            "entropy": value["entropy"] / tokens,
            "clip_share": value["clipped"] / tokens,
            "tokens/trained": value["tokens"],
        }
        report |= {name: value[name] / tokens for name in value if name.startswith("own/")}
        if self.needs_reference:
            report["kl"] = value["kl"] / tokens
        if self.corrects:
            sums = {name: value[f"correction/{name}"] for name in WEIGHT_SUMS}
            shares = summarise_weights(sums, value["tokens"])
            report |= {f"correction/{name}": share for name, share in shares.items()}
        if self.kl.is_adaptive:
            report["kl_coefficient"] = self.kl.coefficient
            if value["tokens"]:
                self.kl.update(report["kl"])
        return report | mismatch_metrics(value)
