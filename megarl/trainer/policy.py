"""Policy-gradient training: a step's samples and the per-token results of other models become
advantages, a loss, and one optimizer step per mini-batch.

    StepBatch (this rank's samples, the whole step's rewards) + columns of other models
        --prepare--> {"logprobs", "advantages", "returns"}  --train--> StepReport

A column is one number for each token of this rank's samples. Columns that the algorithm needs are
filled by other models before: `reference_logprobs` for a KL penalty, `values` for GAE.
"""

from __future__ import annotations

import itertools
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
    scale_metrics,
    token_weights,
    train_mini_batches,
)
from megarl.trainer.step_advantages import step_advantages
from megarl.types import MicroBatch, StepBatch, StepReport


class PolicyGradient:
    """Trains the policy with the configured algorithm (PPO, GRPO and others): `prepare` computes
    the advantages of one step's samples, `train` makes the optimizer steps. All ranks of the policy
    create it and call these methods together. `temperature`: divisor of the logits with which the
    engines sampled.
    """

    def __init__(self, policy: Role, algorithm: AlgorithmConfig, *, temperature: float) -> None:
        """`policy`: the role that is trained. `temperature`: divisor of the logits when the engines
        sampled the rollouts; the trainer divides by it before it computes log-probs.
        """
        self.policy, self.algorithm, self.temperature = policy, algorithm, temperature
        self.kl = KLControl(algorithm.kl)
        self.guard = StepGuard(policy, allowed=policy.training.max_skipped_steps)
        self.empty_steps = EmptySteps(self.guard, policy.training.max_empty_steps)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's log-probs must be given to `prepare` as the column
        "reference_logprobs", because the KL coefficient is above 0.
        """
        return self.algorithm.kl.coefficient > 0

    @property
    def corrects(self) -> bool:
        """Whether the loss of each token has a weight that corrects for the mismatch between the
        trainer's probability of the token and the inference engine's, such as an importance ratio
        (`algorithm.correction`).
        """
        return self.algorithm.correction.kind != "none"

    def prepare(
        self,
        batch: StepBatch,
        packed: Sequence[Sequence[MicroBatch]],
        columns: Mapping[str, Column],
    ) -> dict[str, Column]:
        """The per-token inputs of training on `batch`, as a new dict {name: for each mini-batch a
        float32 tensor [T] over the tokens of this rank's samples}: those in `columns`, the policy's
        own "logprobs" where they are needed, "advantages", and with critics "returns". An empty
        dict if a log-prob or a value is not finite: the batch is then skipped. All ranks of the
        policy call it together.

        `packed`: for each mini-batch, this rank's packed sequences, as `Role.pack_step` returns
        them. `columns`: results of other models in the same form, such as "reference_logprobs" and
        "values".

        Raises `UserError` if more optimizer steps without finite values occur than
        `training.max_skipped_steps` allows.
        """
        columns = dict(columns)
        if (first := self._first_scored()) < len(packed):
            columns["logprobs"] = self.policy.score(
                batch, packed, temperature=self.temperature, skip=first
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
        """What a checkpoint keeps of the algorithm, {name: number}: the KL coefficient if it is
        adaptive, else nothing. `restore` takes it.
        """
        return {"kl_coefficient": self.kl.coefficient} if self.kl.is_adaptive else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the KL coefficient to "kl_coefficient" of `state`, a dict that `PolicyGradient.state`
        returned; where `state` has no such key, the coefficient stays as it is.
        """
        self.kl.restore(state.get("kl_coefficient", self.kl.coefficient))

    def train(
        self,
        batch: StepBatch,
        packed: Sequence[Sequence[MicroBatch]],
        columns: Mapping[str, Column],
    ) -> StepReport:
        """Train the policy on one step's samples, with one optimizer step for each mini-batch and
        epoch. All ranks of the policy call it together and get the same report, whose `metrics` are
        {name: number}, such as "loss" and "entropy".

        `packed`: for each mini-batch, this rank's packed sequences, as `Role.pack_step` returns
        them. `columns`: the dict that `prepare` has returned for `batch`; an empty one means that
        nothing is trained.

        Raises `UserError` if more optimizer steps without finite values occur than
        `training.max_skipped_steps` allows, or if a weight is not finite afterwards.
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
            mine = {name: column[number] for name, column in columns.items()}
            if number < first:
                mine.pop("logprobs", None)
            return lambda micro: self._loss(micro, mine, weights, metrics, at_start=at_start)

        taken, rates = train_mini_batches(
            *(self.policy, packed, loss_of, self.guard, metrics),
            num_mini_batches=len(batch.samples),
        )
        found = self._report(metrics, num_mini_batches=taken)
        epochs = self.policy.training.epochs_per_step
        found |= computed_tokens(itertools.chain(*packed), self.policy, epochs)
        found |= rates | scale_metrics(self.policy)
        return StepReport(step=batch.step, metrics=batch.metrics | found)

    def _input_problem(self, batch: StepBatch, columns: Mapping[str, Column]) -> str:
        """Says which log-probs of the batch are not finite on any rank; "" if all are. Looked at
        before advantages, in which they would spread over the whole step.
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
        """Index of the first mini-batch whose log-probs need a forward pass before the step's first
        update.

        The first mini-batch is trained with the weights that the step starts with, so its training
        pass gives these log-probs. It needs a separate pass only if advantages depend on log-probs
        (KL in the reward), or if it is trained again.
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
        """This micro-batch's term of the mini-batch's loss; adds its values to `metrics`.
        `at_start`: no update of this step has been made yet.
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
        """{name: value} of a step for metrics.jsonl, such as loss, entropy and KL: the values in
        `metrics`, added up over all ranks. `num_mini_batches`: optimizer steps taken. Also adapts
        the coefficient of an adaptive KL penalty.
        """
        if is_own(self.algorithm.loss):
            metrics.agree(self.policy.mesh.gradient)
        value = metrics.reduce(self.policy.mesh.gradient)
        tokens = max(value["tokens"], 1.0)
        found = {
            "loss": value["loss"] / max(1, num_mini_batches),
            "entropy": value["entropy"] / tokens,
            "clip_share": value["clipped"] / tokens,
            "tokens/trained": value["tokens"],
        }
        found |= {name: value[name] / tokens for name in value if name.startswith("own/")}
        if self.needs_reference:
            found["kl"] = value["kl"] / tokens
        if self.corrects:
            sums = {name: value[f"correction/{name}"] for name in WEIGHT_SUMS}
            shares = summarise_weights(sums, value["tokens"])
            found |= {f"correction/{name}": share for name, share in shares.items()}
        if self.kl.is_adaptive:
            found["kl_coefficient"] = self.kl.coefficient
            if value["tokens"]:
                self.kl.update(found["kl"])
        return found | mismatch_metrics(value)
