"""Values that are NaN or infinite: found on any rank, decided on all ranks, named to the user.

    guard = StepGuard(role, allowed=config.max_skipped_steps)
    guard.begin("step 3")
    guard.watch("log-probs", logprobs)       # no collective, no synchronisation with the device
    problem = guard.problem()                # collective: the same answer on every rank

An optimizer step with such a value is not taken. A weight with such a value ends the run, and is
neither saved nor published.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from megarl.errors import UserError
from megarl.parallel.collectives import all_reduce_max
from megarl.parallel.mesh import Axis
from megarl.system.console import say

if TYPE_CHECKING:
    from megarl.trainer.role import Role

LOWER_RATE = "lower {section}.optimizer.learning_rate"

WATCHED = {
    "engines' log-probs": "look at the engines' output, or set rollout.engine.dtype to 'float32'",
    "reference model's log-probs": "set reference.model.path to another model",
    "teacher's log-probs": "set teacher.model.path to another model",
    "policy's log-probs": f"{LOWER_RATE} (at the first step: choose another model)",
    "reward model's scores": f"{LOWER_RATE} (at the first step: choose another model)",
    "critic's values": "lower optimizer.learning_rate of its section, critic or critics.NAME",
    "loss": LOWER_RATE,
}
"""{quantity of an optimizer step: what to do if it is not finite}. If several are not finite, the
first is reported: it comes before the others in the computation."""


def first_broken(
    parts: Iterable[tuple[str, torch.Tensor | None]], axis: Axis, device: torch.device, *, norm: int
) -> str:
    """Name of the first tensor that is NaN or infinite on any rank of `axis`; "" if there is none.
    All ranks of `axis` call it together and get the same name.

    Args:
        parts: (name, this rank's part of the tensor or None), with the same names in the same order
            on every rank.
        device: where the result is reduced over the ranks.
        norm: 0 to look at the values. 2 to look at the Euclidean norm in float32, which overflows
            for values above 1.8e19, as DeepSpeed computes it.
    """
    names, found, places = [], [], []
    for place, (name, part) in enumerate(parts):
        names.append(name)
        if part is not None and part.numel():
            if norm == 2:
                size = torch.linalg.vector_norm(part, dtype=torch.float32)
            else:
                size = torch.stack(torch.aminmax(part)).float().abs().max()  # NaN stays NaN
            found.append(size.to(device))
            places.append(place)
    first = len(names)
    if found:
        broken = (~torch.isfinite(torch.stack(found))).nonzero()
        first = places[int(broken[0])] if len(broken) else first
    first = -int(all_reduce_max(torch.tensor([-first], device=device), axis))
    return names[first] if first < len(names) else ""


class StepGuard:
    """Decides whether an optimizer step of a model is taken: not if a loss, log-prob or gradient is
    NaN or infinite on any rank. All ranks of the model decide alike. `watch` notes values,
    `problem` asks all ranks, `skip` counts a step that is not taken and ends the run by `UserError`
    after `allowed` of them.
    """

    def __init__(self, role: Role, *, allowed: int, section: str = "training") -> None:
        """`allowed`: number of times that a step may be skipped; one more ends the run. `section`:
        section of the recipe with the role's optimizer, for messages.
        """
        self.role, self.allowed, self.section, self.skipped = role, allowed, section, 0
        self.has_updated = False
        """Whether an optimizer step of the model was taken, in this run or in the one that it
        continues."""
        self._where = ""
        self._broken = torch.zeros(len(WATCHED), dtype=torch.float32, device=role.device)

    def begin(self, where: str) -> None:
        """Set the text with which messages begin from now on: `where` names the step, such as "step
        3".
        """
        self._where = where

    def watch(self, name: str, values: torch.Tensor) -> None:
        """Note whether `values`, a tensor of any shape, are all finite. `name`: which quantity they
        are, one of "engines' log-probs", "reference model's log-probs", "teacher's log-probs",
        "policy's log-probs", "reward model's scores", "critic's values" and "loss". Does not
        communicate and does not wait for the device.
        """
        self._broken[list(WATCHED).index(name)] += (~torch.isfinite(values.detach())).any()

    def problem(self) -> str:
        """A sentence such as "the loss is not finite" about the first quantity that `watch` found
        to be NaN or infinite on any rank since the last call; "" if all were finite. All ranks of
        the model call it together and get the same text.
        """
        found = all_reduce_max(self._broken, self.role.mesh.world).tolist()
        self._broken.zero_()
        name = next((name for name, count in zip(WATCHED, found, strict=True) if count), "")
        return f"the {name} {'is' if name == 'loss' else 'are'} not finite" if name else ""

    def gradient_problem(self) -> str:
        """A sentence such as "the gradient of NAME is not finite" about the first parameter whose
        gradient is NaN or infinite on any rank; "" if all gradients are finite. All ranks of the
        model call it together, between the last backward pass and the optimizer step.
        """
        name = self.role.engine.broken_gradient()
        return f"the gradient of {name} is not finite" if name else ""

    def skip(self, problem: str) -> None:
        """Count an optimizer step that is not taken, and warn of it on standard error. `problem`:
        the reason, as `problem` or `gradient_problem` returned it. Raises `UserError` on every rank
        if a weight is not finite, or if `allowed` steps were skipped before. All ranks of the model
        call it together.
        """
        self.check_weights()
        if self.skipped == self.allowed:
            fix = next((fix for name, fix in WATCHED.items() if name in problem), LOWER_RATE)
            if self.role.training.dtype == "float16":
                fix += ", set training.precision to 'bfloat16' or 'float32'"
            raise UserError(
                f"{self._where}: {problem}, so that the optimizer step is not taken;"
                f" {fix.format(section=self.section)}, or set"
                f" training.max_skipped_steps above {self.allowed} to go on without such steps"
            )
        self.skipped += 1
        if self.role.mesh.world.rank == 0:
            say(
                f"megarl: warning: {self._where}: {problem}; the optimizer step is skipped"
                f" ({self.skipped} of {self.allowed} that training.max_skipped_steps allows)"
            )

    def check_weights(self) -> None:
        """Raise `UserError` on every rank if a weight of the model is NaN or infinite on any rank.
        All ranks of the model call it together.
        """
        name = self.role.engine.broken_weight()
        if name:
            raise UserError(
                f"{self._where}: the weight {name} of the {self.role.name} is not finite; it is"
                f" neither saved nor published: {LOWER_RATE.format(section=self.section)} and go"
                " on from the newest checkpoint, or begin with another model"
            )
