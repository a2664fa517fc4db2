"""Functions of the user's own are called with a small batch before a run starts: NaN, a wrong shape
or no gradient is reported with file and line. What each function receives and returns is in
docs/api.md.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.data.source import PromptList
from megarl.environments.user_code import function_of
from megarl.objectives.losses import LossTerms
from megarl.objectives.token_advantages import TokenRewards, is_per_token
from megarl.parallel.mesh import Axis
from megarl.settings.config import RunConfig
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.schema import is_own, require
from megarl.trainer.packing import SequenceMean
from megarl.types import Group, Rollout, Segment, Verdict

LENGTHS = (3, 1, 2, 4, 2, 3, 1, 2)
"""Response tokens of the small batch's samples, two groups of four."""
REWARDS = (1.0, 0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 0.5)
"""Their rewards, equal in the second group, whose standard deviation is 0."""


class Trial:
    """A function of the user's own that is tried with made-up arguments. Its errors and wrong
    results become `ValueError`, which names setting, file and line.
    """

    def __init__(self, setting: str, name: str, arguments: str) -> None:
        """Import the function. `setting`: the key that names it. `name`: FILE.py:FUNCTION.
        `arguments`: what it is called with, for messages.
        """
        self.setting, self.name, self.arguments = setting, name, arguments
        self.function = function_of(name, {}, setting)

    def __call__(self, *arguments: Any) -> Any:
        return self.run(lambda: self.function(*arguments))

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what `call`, which runs the user's code, returns. An error names the line of the
        user's file where it arose, or where the function begins.
        """
        try:
            return call()
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}; mend it: it is called with"
            raise ValueError(self._message(f"{problem} {self.arguments}", error)) from error

    def require(self, condition: object, problem: str) -> None:
        """Raise `ValueError` unless `condition` is true. `problem` continues the function's name,
        such as "returned NaN".
        """
        require(condition, self._message(problem))

    def tensor(self, result: Any, like: torch.Tensor, shape: str) -> None:
        """Raise `ValueError` unless `result` is a finite floating-point tensor in the shape of
        `like`; `shape`: in words.
        """
        is_tensor = isinstance(result, torch.Tensor)
        problem = (
            f"{result.dtype} of shape {[*result.shape]}" if is_tensor else type(result).__name__
        )
        self.require(
            is_tensor and result.shape == like.shape and result.is_floating_point(),
            f"returned {problem}; return {like.dtype} of shape {shape}, here {[*like.shape]}",
        )
        is_there = result.device == like.device
        self.require(is_there, f"returned a tensor on {result.device}; return it on {like.device}")
        advice = "guard its divisions: equal rewards have the standard deviation 0"
        self.require(bool(result.isfinite().all()), f"returned NaN or infinity; {advice}")

    def _message(self, problem: str, error: Exception | None = None) -> str:
        file, _, name = self.name.rpartition(":")
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        lines = [frame.lineno for frame in frames if frame.filename == str(Path(file).resolve())]
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        line = lines[-1] if lines else getattr(code, "co_firstlineno", 1)
        text = " ".join(problem.split())
        return f"{self.setting}: {file}, line {line}: '{name}' {text} (docs/api.md)"


def try_objectives(config: RunConfig, device: torch.device, *, has_empty_ranks: bool) -> None:
    """Try the user's own functions of the section `algorithm` on `device`; of an own `method` only
    its parameters. `has_empty_ranks`: also with no tokens. Raises `ValueError` for one that fails,
    or returns NaN, a wrong shape or no gradient.
    """
    algorithm = config.algorithm
    if is_own(algorithm.method):
        trial = Trial("algorithm.method", algorithm.method, "(parts, batch)")
        trial.run(lambda: inspect.signature(trial.function).bind("parts", "batch"))
    for lengths in (LENGTHS, ()) if has_empty_ranks else (LENGTHS,):
        if is_own(algorithm.advantage):
            try_advantage(algorithm, device, lengths, critics=config.critics)
        try_loss(algorithm, device, lengths)


def try_advantage(
    algorithm: AlgorithmConfig,
    device: torch.device,
    lengths: Sequence[int],
    *,
    critics: Iterable[str] = (),
) -> None:
    """Try an own `algorithm.advantage`. `lengths`: response tokens of each sample, for a function
    of tokens; one of samples gets a fixed batch. `critics`: names of further critics, with values
    of 0.
    """
    trial = Trial("algorithm.advantage", algorithm.advantage, "(rewards_N, groups_N, tokens_N)")
    if not is_per_token(trial.function):
        rewards_N = torch.tensor(REWARDS, dtype=torch.float64)
        trial.require(not critics, "is of each sample, without critics; leave critics out")
        result = trial(rewards_N, torch.arange(len(REWARDS)) // 4, torch.tensor(LENGTHS))
        return trial.tensor(result, rewards_N, "[N], of each sample")
    trial.require(algorithm.credit == "response", "is of each token; leave algorithm.credit out")
    # Of each sample a token of its prompt, and its response, the last token of which is rewarded.
    tokens = [(n, at, to) for n, to in enumerate(lengths) for at in range(to + 1)]
    rewards = torch.tensor([REWARDS[n] * (at == to) for n, at, to in tokens], dtype=torch.float64)
    mask = torch.tensor([at > 0 for _, at, _ in tokens], dtype=torch.bool)
    ids = torch.tensor([n for n, _, _ in tokens], dtype=torch.int64)
    rewards, mask, ids = rewards.to(device), mask.to(device), ids.to(device)
    values = {name: torch.zeros_like(rewards) for name in critics}
    step = TokenRewards(rewards, mask, ids, lambda tensor: tensor, critics=values)
    return trial.tensor(trial(step, algorithm), rewards, "[T], of each token")


def try_loss(algorithm: AlgorithmConfig, device: torch.device, lengths: Sequence[int]) -> None:
    """Try an own `algorithm.loss` and `algorithm.correction.kind`, with samples of `lengths`
    response tokens.
    """
    draw = torch.Generator().manual_seed(0)  # that of the run is left alone
    old_T = -0.1 - torch.rand(sum(lengths), generator=draw)
    logp_T = old_T + 0.02 * torch.randn(sum(lengths), generator=draw)
    old_T, logp_T = old_T.to(device), logp_T.to(device).requires_grad_()
    ids_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    members, alone = torch.arange(len(LENGTHS), device=device), Axis("sequence", 1, 0, (0,), None)
    mean = SequenceMean(ids_T.to(device), members, alone)
    if is_own(correction := algorithm.correction.kind):
        words = "(trainer_logp_T, engine_logp_T, sequence_sum, config)"
        trial = Trial("algorithm.correction.kind", correction, words)
        found_T = trial(logp_T.detach(), old_T, mean.sum, algorithm.correction)
        trial.tensor(found_T, logp_T, "[T], the weight of each token")
    if not is_own(algorithm.loss):
        return
    words = "(logp_T, old_T, advantages_T, sequence_mean, config)"
    trial = Trial("algorithm.loss", algorithm.loss, words)
    advantages_T = (torch.arange(len(old_T), device=device) % 3 - 1).float()
    found_T = trial(logp_T, old_T, advantages_T, mean, algorithm)
    if isinstance(found_T, tuple):
        is_pair = len(found_T) == 2 and isinstance(found_T[1], Mapping)
        trial.require(is_pair, "returned a tuple; return (loss_T, {name: [T]})")
        for name, values_T in found_T[1].items():
            trial.tensor(values_T, logp_T, f"[T] as metric '{name}'")
        found_T = found_T[0]
    found_T = found_T.per_token if isinstance(found_T, LossTerms) else found_T
    trial.tensor(found_T, logp_T, "[T], of each token")
    slopes_T = torch.zeros_like(logp_T)
    if found_T.requires_grad:
        (slopes_T,) = trial.run(
            lambda: torch.autograd.grad(found_T.sum(), [logp_T], materialize_grads=True)
        )
    trial.require(
        bool(slopes_T.any()) or not lengths,
        "has no gradient; compute it from logp_T, without detach() and torch.no_grad()",
    )
    trial.require(bool(slopes_T.isfinite().all()), "has a gradient of NaN or infinity; mend it")


def try_filter(config: RunConfig, prompts: PromptList) -> None:
    """Try an own `rollout.filter` with two groups of the first prompt. Raises `ValueError` if it
    fails or does not return True or False.
    """
    if not is_own(config.rollout.filter):
        return
    trial = Trial("rollout.filter", config.rollout.filter, "(group)")
    for rewards in (REWARDS[:4], REWARDS[4:]):
        verdicts = [Verdict(reward, correct=reward == 1.0) for reward in rewards]
        rollouts = [
            Rollout(n, n, [Segment("model", to, None, [(0, to)], "stop")], verdict, 0)
            for n, (to, verdict) in enumerate(zip(LENGTHS[:4], verdicts, strict=True))
        ]
        result = trial(Group(0, prompts.at(0), rollouts))
        problem = (
            f"returned {type(result).__name__}; return True for a group to keep, otherwise False"
        )
        trial.require(isinstance(result, bool | np.bool_), problem)
