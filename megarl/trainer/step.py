"""One optimizer step of a model, its metrics, and steps without a token to train on (`EmptySteps`).

A micro-batch's loss is a sum over its tokens of `weight x term`. The weights come from counts over
the whole mini-batch and all ranks, so neither micro-batches nor layout change loss or gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megarl.errors import UserError
from megarl.objectives.corrections import mismatch, summarise
from megarl.objectives.losses import AGGREGATIONS
from megarl.parallel.collectives import all_reduce, all_reduce_max, gather_objects
from megarl.parallel.mesh import Axis
from megarl.settings.objectives import AggregationName, AlgorithmConfig
from megarl.system.spans import Kind, Span, activity
from megarl.trainer.branches import next_tokens
from megarl.trainer.finite import StepGuard
from megarl.trainer.prefixes import saved_tokens
from megarl.trainer.role import Role
from megarl.types import MicroBatch, Samples, StepBatch, unreported_experts

GAPS = ("count", "sum_abs", "sum_k1", "sum_k3", "sum_outside")
"""Sums of `mismatch` that are reported as metrics."""

MicroBatchLoss = Callable[[MicroBatch], torch.Tensor]
"""Micro-batch -> scalar, this rank's part of a sum over micro-batches and ranks. It may add to the
step's metrics."""


def train_mini_batches(
    role: Role,
    packed: Sequence[Sequence[MicroBatch]],
    loss_of: Callable[[int, bool], MicroBatchLoss],
    guard: StepGuard,
    metrics: StepMetrics,
    *,
    num_mini_batches: int,
) -> tuple[int, dict[str, float]]:
    """Take an optimizer step for each mini-batch and epoch. Returns (their number, {"grad_norm":
    mean before clipping, "learning_rate", "skipped_steps"; of experts and the loss scale}).
    Collective.

    `packed`: for each mini-batch, this rank's packed sequences; empty where the step is skipped.
    `loss_of(mini-batch, is first optimizer step)` returns the loss. Raises `UserError` if `guard`
    allows no further skipped step, or a weight is not finite afterwards.
    """
    norms, rate = [], role.engine.next_rate()
    epochs = role.training.epochs_per_step
    for epoch, (number, micro_batches) in itertools.product(range(epochs), enumerate(packed)):
        loss = loss_of(number, epoch == number == 0)
        result = optimizer_step(role, micro_batches, loss, guard, metrics)
        if result is not None:
            norms.append(result[0])
            rate = result[1]
    guard.check_weights()
    scale = role.engine.loss_scale
    more = role.engine.module.routers.load.take_metrics() | (scale.metrics() if scale else {})
    return len(norms), more | {
        "grad_norm": sum(norms) / max(1, len(norms)),
        "learning_rate": rate,
        "skipped_steps": float(epochs * num_mini_batches - len(norms)),
    }


def optimizer_step(
    role: Role,
    micro_batches: Sequence[MicroBatch],
    loss: MicroBatchLoss,
    guard: StepGuard,
    metrics: StepMetrics,
) -> tuple[float, float] | None:
    """Take an optimizer step on all micro-batches, as many on every rank. Returns (gradient norm
    before clipping, learning rate). Collective.

    If loss, gradients or a watched value is not finite, weights, optimizer state and `metrics`
    stay; it returns None, or raises `UserError` if `guard` allows no further skipped step. In
    float16 the step is first computed again with smaller loss scales.
    """
    before, scale = metrics.mark(), role.engine.loss_scale
    begun_at = scale.value if scale else 1.0
    load = role.engine.module.routers.load
    load.begin(micro_batches, role.mesh.gradient)
    if load.needs_counts:
        _count_experts(role, micro_batches)
    while True:
        problem = _accumulate(role, micro_batches, loss, guard)
        broken = "" if problem else role.engine.broken_gradient()
        overflow = broken and f"the gradient of {broken} is not finite"
        if not (problem or overflow):
            break
        role.engine.discard()
        metrics.rewind(before)
        if overflow and scale and scale.lower():
            continue
        if scale:
            overflow = overflow and f"{overflow} at the smallest loss scale"
            scale.value = begun_at  # smaller scales did not help
        guard.skip(problem or overflow)
        return None
    with _part("optimizer step", role, "optimizer"):
        norm, rate = role.engine.step()
    if math.isfinite(norm):
        guard.has_updated = True
        load.finish(role.mesh.gradient)
        return norm, rate
    metrics.rewind(before)
    guard.skip("the gradient norm is not finite")
    return None


def _accumulate(
    role: Role, micro_batches: Sequence[MicroBatch], loss: MicroBatchLoss, guard: StepGuard
) -> str:
    """Add up the gradients of all micro-batches. Returns what is not finite, or ""."""
    problem, last = "", len(micro_batches) - 1
    load = role.engine.module.routers.load
    load.clear()
    for index, micro in enumerate(micro_batches):
        with load.of(micro):
            with _part("forward pass", role, "train"):
                value = loss(micro) + load.take_losses()
            guard.watch("loss", value)
            if index == last and (problem := guard.problem()):
                # Under ZeRO, DeepSpeed skips a step by its gradients: they must not be finite
                # either.
                value = value * math.nan
            with _part("backward pass", role, "train"):
                role.engine.backward(value, last=index == last)
    return problem


@torch.no_grad()
def _count_experts(role: Role, micro_batches: Sequence[MicroBatch]) -> None:
    """Count the tokens of each expert by a forward pass of the mini-batch. Collective."""
    load = role.engine.module.routers.load
    for micro in micro_batches:
        with load.of(micro), _part("forward pass", role, "train"):
            role.engine(micro, 1.0)
    load.count(role.mesh.gradient)


def _part(what: str, role: Role, kind: Kind) -> Span:
    """A span, with the deadline of DeepSpeed's collectives inside."""
    axis = role.mesh.gradient
    deadline_s = axis.timeout_s if axis.size > 1 else 0.0
    of = axis.ranks if axis.size > 1 else ()
    name = f"{what} of the {role.name}"
    return activity(name, kind=kind, of=of, deadline_s=deadline_s, quiet=kind == "train")


class StepMetrics:
    """Sums and maxima over a step's micro-batches, in float64, which start at 0. Every rank must
    give the same names, also one without tokens.
    """

    def __init__(
        self, device: torch.device, sums: Sequence[str], maxima: Sequence[str] = ()
    ) -> None:
        self._sums = dict.fromkeys(sums, torch.zeros((), dtype=torch.float64, device=device))
        self._maxima = dict.fromkeys(maxima, torch.zeros((), dtype=torch.float64, device=device))

    def add(self, **values: torch.Tensor | float) -> None:
        """Add to sums: numbers, or scalar tensors without gradient."""
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value

    def add_own(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add what a user's loss reports, {name: [T]}, to new sums "own/NAME"."""
        for name, value in values.items():
            so_far = self._sums.get(f"own/{name}", 0.0)
            self._sums[f"own/{name}"] = value.detach().double().sum() + so_far

    def agree(self, axis: Axis) -> None:
        """Give all ranks of `axis` the sums that some lack, from `add_own`. Collective."""
        names = sorted({name for sums in gather_objects([*self._sums], axis) for name in sums})
        zero = torch.zeros_like(next(iter(self._sums.values())))
        self._sums = {name: self._sums.get(name, zero) for name in names}

    def maximum(self, name: str, value: torch.Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value.double())

    def mark(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The present values, for `rewind`."""
        return dict(self._sums), dict(self._maxima)

    def rewind(self, mark: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
        self._sums, self._maxima = dict(mark[0]), dict(mark[1])

    def reduce(self, axis: Axis) -> dict[str, float]:
        """{name: sum or maximum over the ranks of `axis`}. Collective."""
        reduced = {}
        for values, over_ranks in ((self._sums, all_reduce), (self._maxima, all_reduce_max)):
            if values:
                totals = over_ranks(torch.stack(list(values.values())), axis)
                reduced |= dict(zip(values, totals.tolist(), strict=True))
        return reduced


def computed_tokens(packed: Iterable[Iterable[MicroBatch]], role: Role) -> dict[str, float]:
    """{"tokens/computed": with padding, "tokens/shared_saved": by common prefixes} of a step, over
    all ranks and epochs. `packed`: for each mini-batch, this rank's packed sequences. Collective.
    """
    metrics = StepMetrics(role.device, ("computed", "saved"))
    for micro in itertools.chain(*packed):
        metrics.add(computed=len(micro.token_ids))
        # Every rank of the sequence axis knows the documents of the whole packed sequence.
        if micro.parents and role.mesh.sequence.rank == 0:
            metrics.add(saved=saved_tokens(micro.starts.tolist(), micro.parents, micro.begins))
    value, epochs = metrics.reduce(role.mesh.gradient), role.training.epochs_per_step
    return {
        "tokens/computed": epochs * value["computed"],
        "tokens/shared_saved": epochs * value["saved"],
    }


def unreported_tokens(parts: Sequence[Samples], role: Role) -> dict[str, float]:
    """{"router_replay/unreported": tokens of a step's samples, over all ranks, whose experts no
    engine reports}, without the last ones, on which nothing depends. Collective.
    """
    metrics = StepMetrics(role.device, ("unreported",))
    for samples in parts if role.mesh.sequence.rank == 0 else ():
        is_missing, experts = next_tokens(samples)[0] >= 0, samples.experts
        if experts is not None:
            is_missing &= experts[:, 0, 0] == unreported_experts(experts.dtype)
        metrics.add(unreported=int(is_missing.sum()))
    return {"router_replay/unreported": metrics.reduce(role.mesh.gradient)["unreported"]}


def token_weights(
    batch: StepBatch,
    number: int,
    aggregation: AggregationName,
    device: torch.device,
    algorithm: AlgorithmConfig | None = None,
) -> torch.Tensor:
    """[N] float32: for each sample of a step, over all ranks, the factor of its tokens' terms in
    the loss of mini-batch `number`; 0 for samples of others.
    """
    is_member = torch.tensor(batch.mini_batch_of) == number
    weights = torch.zeros(len(batch.rewards), dtype=torch.float64)
    tokens = torch.tensor(batch.response_tokens)[is_member]
    weights[is_member] = AGGREGATIONS[aggregation](tokens, algorithm or AlgorithmConfig())
    return weights.float().to(device)


def add_mismatch(metrics: StepMetrics, logprobs: torch.Tensor, engines: torch.Tensor) -> None:
    """Add the differences between trainer's and engines' log-probs, [M] each and without
    gradient.
    """
    gap = mismatch(logprobs, engines)
    metrics.maximum("max_abs", gap["max_abs"])
    metrics.add(**{f"mismatch/{name}": gap[name] for name in GAPS})


def mismatch_metrics(value: Mapping[str, float]) -> dict[str, float]:
    """How far the engines' log-probs are from the trainer's: "mismatch/mean_abs" and
    "mismatch/max_abs" in nats; "mismatch/k1" and "mismatch/k3", estimates of KL(engine || trainer)
    per token; and "mismatch/outside_share" of tokens whose probability ratio is not in [0.8, 1.25].
    `value`: what `add_mismatch` has collected, over all ranks.
    """
    sums = {name: torch.tensor(value[f"mismatch/{name}"]) for name in GAPS}
    gap = summarise(sums | {"max_abs": torch.tensor(value["max_abs"])})
    return {f"mismatch/{name}": number for name, number in gap.items()}


class EmptySteps:
    """Ends a run after `allowed` steps in a row without samples, because every group was rejected,
    usually for equal rewards; or if its weights have never changed. Every rank decides alike.
    """

    def __init__(self, guard: StepGuard, allowed: int) -> None:
        self.guard, self.allowed, self.in_a_row = guard, allowed, 0

    def count(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Count a step before it is trained. `num_samples`: over all ranks. `metrics`: of its
        rollouts. Raises `UserError` at the `allowed`-th empty step in a row; after an update, an
        accuracy of 0.5 or more sets the count to 0.
        """
        # A policy that has learnt to be right has nothing left to learn, which is no failure.
        may_be_done = self.guard.has_updated and metrics.get("accuracy", 0.0) >= 0.5
        self.in_a_row = 0 if num_samples or may_be_done else self.in_a_row + 1
        if self.in_a_row >= self.allowed:
            raise UserError(
                f"step {step + 1}: {self.in_a_row} steps in a row trained on no token,"
                f" {_equal_rewards(metrics)}, or raise training.max_empty_steps"
            )

    def end(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Raise `UserError` if no step has changed the weights. Call it before the last step's
        checkpoint, with that step's arguments of `count`.
        """
        if self.guard.has_updated:
            return
        if num_samples:
            raise UserError(
                f"step {step + 1}: the run ends with the weights that it began with, since every"
                " optimizer step was skipped; see the warnings of the steps, or raise steps"
            )
        raise UserError(
            f"step {step + 1}: the run ends with the weights that it began with, since no step"
            f" trained on any token, {_equal_rewards(metrics)}, or raise steps"
        )


def _equal_rewards(metrics: Mapping[str, float]) -> str:
    if metrics.get("reward/responses") == 0:
        return "since no response of this step has a verdict; mend the verifier"
    values = {"groups/drawn": 0, "accuracy": 0, "length/truncated_share": 0} | dict(metrics)
    return (
        f"since the rewards of every group were equal (in this step {values['groups/drawn']:.0f}"
        f" groups, accuracy {values['accuracy']:.4g}, {values['length/truncated_share']:.0%} cut"
        " off); set prompts that are neither too hard nor too easy, a verifier that tells responses"
        " apart, a larger rollout.group_size or rollout.max_new_tokens, or a rollout.filter that"
        " keeps groups"
    )
