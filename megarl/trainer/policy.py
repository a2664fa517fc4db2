"""The policy: a step's samples become advantages, a loss with one normaliser, and one optimizer
step per mini-batch.

    StepBatch (this rank's samples, the whole step's rewards)  ->  StepReport

Every loss term is a sum over tokens of `weight[row] x term`, and the weights come from counts over
the whole mini-batch and all ranks, so neither micro-batching nor the layout can change loss or
gradients.
"""

from __future__ import annotations

from itertools import chain

import torch

from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.config import AlgorithmConfig
from megarl.objectives.corrections import CORRECTIONS, mismatch, summarise
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.losses import AGGREGATIONS, LOSSES
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard, whole_shapes
from megarl.trainer.build import build_network
from megarl.trainer.config import ModelConfig, TrainingConfig
from megarl.trainer.packing import SequenceMean, pack_shared
from megarl.trainer.zero import TrainEngine
from megarl.types import MicroBatch, Samples, StepBatch, StepReport


class Policy:
    """The model that learns, on this rank. `step` is both the steps done and the version of the
    weights.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        mesh: ProcessMesh,
        device: torch.device,
        total_steps: int,
        seed: int,
    ) -> None:
        self.algorithm, self.mesh, self.device, self.temperature = (
            algorithm,
            mesh,
            device,
            temperature,
        )
        network = build_network(model, training, mesh, device, seed=seed)
        self.engine = TrainEngine(
            network, training, mesh, device, total_steps=total_steps * training.num_mini_batches
        )
        self.reference: TrainEngine | None = None
        if algorithm.kl.coefficient > 0:
            frozen = build_network(model, training, mesh, device, seed=seed)
            self.reference = TrainEngine(frozen, training, mesh, device, trains=False)
        self.step = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of all weights, by Hugging Face name."""
        return whole_shapes(self.engine.module.model, self.engine.module.shards)

    @property
    def shards(self) -> dict[str, Shard]:
        """How the tensor axis cuts weights; those not named are whole."""
        return self.engine.module.shards

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage."""
        return self.engine.config.zero_stage

    def owned(self) -> dict[str, torch.Tensor]:
        """This rank's own part of every weight, flat; see `TrainEngine.owned`."""
        return self.engine.owned()

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """Log-probs [M] of the masked tokens of `samples` at temperature 1, on every rank; all must
        call it together.
        """
        return self.token_statistics(samples)[0]

    def token_statistics(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropies [M]) of the masked tokens of `samples` at temperature 1, on
        every rank; all call it.
        """
        micro = self._pack(samples)
        with torch.no_grad():
            mine = self.engine(micro, 1.0)
        if not micro.indices:
            return mine
        # Each rank knows those of its own tokens: put in their places, the sum has them all.
        axis = self.mesh.sequence
        place = micro.indices[axis.rank].to(self.device)[micro.mask]
        found = torch.zeros(
            3, sum(map(len, micro.indices)), dtype=mine[0].dtype, device=self.device
        )
        found[0, place], found[1, place], found[2, place] = *mine, 1.0
        whole = all_reduce(found, axis)
        return whole[0][whole[2] > 0], whole[1][whole[2] > 0]

    def _pack(self, samples: Samples) -> MicroBatch:
        return pack_shared(
            samples, self.device, self.mesh.sequence, self.engine.config.sequence.cut
        )

    def train(self, batch: StepBatch) -> StepReport:
        """One optimizer step per mini-batch; the same report on every rank."""
        packed = [
            [self._pack(samples.select(row)) for row in rows]
            for samples, rows in zip(batch.samples, batch.micro_batches, strict=True)
        ]
        old, reference = self._frozen_logprobs(packed)
        advantages = self._advantages(batch, packed, old, reference)
        sums: dict[str, torch.Tensor] = {}
        peaks: dict[str, torch.Tensor] = {}
        norms, rate = [], self.engine.next_rate()
        for number, micro_batches in enumerate(packed):
            weights = self._token_weights(batch, number)
            for index, micro in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                loss = self._loss(
                    micro,
                    old[number][index],
                    reference[number][index],
                    advantages,
                    weights,
                    sums,
                    peaks,
                    first=number == 0,
                )
                self.engine.backward(loss, last=last)
            norm, rate = self.engine.step()
            norms.append(norm)
        self.step += 1
        metrics = self._reduce(sums, peaks, num_mini_batches=len(packed))
        metrics |= {"grad_norm": sum(norms) / max(1, len(norms)), "learning_rate": rate}
        return StepReport(step=batch.step, metrics=batch.metrics | metrics)

    def _frozen_logprobs(
        self, packed: list[list[MicroBatch]]
    ) -> tuple[list[list[torch.Tensor | None]], list[list[torch.Tensor | None]]]:
        """Per micro-batch, log-probs under the weights at the step's start and under the reference;
        None where not needed.

        The first mini-batch's own forward pass is at the step's start, so it needs no second one.
        """
        kl = self.algorithm.kl
        needs_all = kl.coefficient > 0 and kl.where == "reward"
        old: list[list[torch.Tensor | None]] = []
        reference: list[list[torch.Tensor | None]] = []
        with torch.no_grad():
            for number, micro_batches in enumerate(packed):
                again = needs_all or (number > 0 and self.algorithm.old_logprobs == "trainer")
                old.append(
                    [self.engine(m, self.temperature)[0] if again else None for m in micro_batches]
                )
                reference.append(
                    [
                        self.reference(m, self.temperature)[0]
                        if self.reference is not None
                        else None
                        for m in micro_batches
                    ]
                )
        return old, reference

    def _advantages(
        self,
        batch: StepBatch,
        packed: list[list[MicroBatch]],
        old: list[list[torch.Tensor | None]],
        reference: list[list[torch.Tensor | None]],
    ) -> torch.Tensor:
        """[N] float32 advantage of every sample of the step."""
        kl, number = self.algorithm.kl, len(batch.rewards)
        rewards = torch.from_numpy(batch.rewards).clone()
        if kl.coefficient > 0 and kl.where == "reward":
            charge = torch.zeros(number, dtype=torch.float64, device=self.device)
            for micro, mine, theirs in zip(
                *map(chain.from_iterable, (packed, old, reference)), strict=True
            ):
                per_token = KL_ESTIMATORS[kl.estimator](mine, theirs)
                charge.index_add_(0, micro.sample_ids[micro.mask], per_token.double())
            rewards -= kl.coefficient * all_reduce(charge, self.mesh.gradient).cpu()
        groups, tokens = torch.from_numpy(batch.groups), torch.from_numpy(batch.response_tokens)
        return ADVANTAGES[self.algorithm.advantage](rewards, groups, tokens).float().to(self.device)

    def _token_weights(self, batch: StepBatch, number: int) -> torch.Tensor:
        """[N] float32: what each token of a sample weighs in the loss of mini-batch `number`; 0 in
        the others'.
        """
        mine = torch.from_numpy(batch.mini_batch_of) == number
        weights = torch.zeros(len(batch.rewards), dtype=torch.float64)
        tokens = torch.from_numpy(batch.response_tokens)[mine]
        weights[mine] = AGGREGATIONS[self.algorithm.aggregation](tokens, self.algorithm)
        return weights.float().to(self.device)

    def _loss(
        self,
        micro: MicroBatch,
        old: torch.Tensor | None,
        reference: torch.Tensor | None,
        advantages: torch.Tensor,
        weights: torch.Tensor,
        sums: dict[str, torch.Tensor],
        peaks: dict[str, torch.Tensor],
        *,
        first: bool,
    ) -> torch.Tensor:
        """This micro-batch's part of the mini-batch's loss; adds to `sums` and `peaks`, which are
        reduced once a step.
        """
        algorithm = self.algorithm
        logprobs, entropy = self.engine(micro, self.temperature)
        if logprobs.numel() == 0 and not micro.indices:
            return logprobs.sum() + entropy.sum()
        # A sequence rank without response tokens goes on: others may ask it for its part of a sum.
        rows, engine_logprobs = micro.sample_ids[micro.mask], micro.engine_logprobs[micro.mask]
        weight = weights[rows]
        current = logprobs.detach()
        if algorithm.old_logprobs == "engine":
            behaviour = engine_logprobs
        else:
            behaviour = old if old is not None else current
        mean = SequenceMean(rows, micro.members, self.mesh.sequence)
        terms = LOSSES[algorithm.loss](logprobs, behaviour, advantages[rows], mean, algorithm)
        correction = CORRECTIONS[algorithm.correction.kind](
            behaviour, engine_logprobs, algorithm.correction
        )
        policy_loss = (weight * correction * terms.per_token).sum()
        loss = policy_loss - algorithm.entropy_coefficient * (weight * entropy).sum()
        found = {
            "loss": policy_loss.detach(),
            "entropy": entropy.detach().sum(),
            "clipped": terms.clipped.sum(),
            "tokens": torch.tensor(float(logprobs.numel()), device=self.device),
        }
        if reference is not None:
            divergence = KL_ESTIMATORS[algorithm.kl.estimator](logprobs, reference)
            found["kl"] = divergence.detach().sum()
            if algorithm.kl.where == "loss":
                loss = loss + algorithm.kl.coefficient * (weight * divergence).sum()
        if first:  # weights are still those of the step's start
            gap = mismatch(current, engine_logprobs, torch.ones_like(current, dtype=torch.bool))
            peaks["max_abs"] = torch.maximum(peaks.get("max_abs", gap["max_abs"]), gap["max_abs"])
            found |= {f"mismatch/{name}": value for name, value in gap.items() if name != "max_abs"}
        for name, value in found.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        return loss

    def _reduce(
        self,
        sums: dict[str, torch.Tensor],
        peaks: dict[str, torch.Tensor],
        *,
        num_mini_batches: int,
    ) -> dict[str, float]:
        """Sums and maxima over ranks, as metrics. A rank without tokens adds zeros under the same
        names.
        """
        gaps = ["count", "sum_abs", "sum_k1", "sum_k3", "sum_outside"]
        names = [
            "loss",
            "entropy",
            "clipped",
            "tokens",
            "kl",
            *(f"mismatch/{name}" for name in gaps),
        ]
        assert not set(sums) - set(names), set(sums) - set(names)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = all_reduce(
            torch.stack([sums.get(name, zero) for name in names]), self.mesh.gradient
        )
        peak = all_reduce_max(peaks.get("max_abs", zero).double().reshape(1), self.mesh.gradient)
        value = dict(zip(names, total.tolist(), strict=True))
        tokens = max(value["tokens"], 1.0)
        metrics = {
            "loss": value["loss"] / max(1, num_mini_batches),
            "entropy": value["entropy"] / tokens,
            "clip_share": value["clipped"] / tokens,
            "tokens/trained": value["tokens"],
        }
        if self.reference is not None:
            metrics["kl"] = value["kl"] / tokens
        gap = summarise(
            {name: torch.tensor(value[f"mismatch/{name}"]) for name in gaps} | {"max_abs": peak[0]}
        )
        return metrics | {
            "mismatch/mean_abs": gap["mean_abs"],
            "mismatch/max_abs": gap["max_abs"],
            "mismatch/k1": gap["k1"],
            "mismatch/k3": gap["k3"],
            "mismatch/outside_share": gap["outside"],
        }
