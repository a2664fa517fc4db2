"""Optimizer steps whose values are NaN or infinite: decided on all ranks, told to the user.

    guard = StepGuard(role, allowed=config.max_skipped_steps)
    guard.begin("step 3")
    guard.watch("log-probs", logprobs)       # no collective, no synchronisation with the device
    problem = guard.problem()                # collective: the same answer on every rank

Such a step is not taken. Such a weight ends the run, neither saved nor published.
"""

from __future__ import annotations

import torch

from megarl.errors import UserError
from megarl.parallel.collectives import all_reduce_max
from megarl.system.console import say
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
"""{watched quantity: what to do if it is not finite}, in the order of computation."""


class StepGuard:
    """Decides, alike on all ranks of a model, whether an optimizer step is taken."""

    def __init__(self, role: Role, *, allowed: int, section: str = "training") -> None:
        """`allowed`: steps that may be skipped. `section`: the recipe's with the optimizer."""
        self.role, self.allowed, self.section, self.skipped = role, allowed, section, 0
        self.has_updated = False
        """Whether a step was taken, also in the run that this one continues."""
        self._where = ""
        self._broken = torch.zeros(len(WATCHED), dtype=torch.float32, device=role.device)

    def begin(self, where: str) -> None:
        """Let messages begin with `where`, such as "step 3"."""
        self._where = where

    def watch(self, name: str, values: torch.Tensor) -> None:
        """Note whether `values` are finite, without communication. `name`: a key of `WATCHED`."""
        self._broken[list(WATCHED).index(name)] += (~torch.isfinite(values.detach())).any()

    def problem(self) -> str:
        """ "the loss is not finite" or the like, of the first such quantity since the last call, or
        "". Collective.
        """
        counts = all_reduce_max(self._broken, self.role.mesh.world).tolist()
        self._broken.zero_()
        name = next((name for name, count in zip(WATCHED, counts, strict=True) if count), "")
        return f"the {name} {'is' if name == 'loss' else 'are'} not finite" if name else ""

    def skip(self, problem: str) -> None:
        """Count and report a skipped step. Raises `UserError` on every rank if a weight is not
        finite, or `allowed` steps were skipped before. Collective.
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
        """Raise `UserError` on every rank if a weight is not finite on some rank. Collective."""
        name = self.role.engine.broken_weight()
        if name:
            raise UserError(
                f"{self._where}: the weight {name} of the {self.role.name} is not finite; it is"
                f" neither saved nor published: {LOWER_RATE.format(section=self.section)} and go"
                " on from the newest checkpoint, or begin with another model"
            )
