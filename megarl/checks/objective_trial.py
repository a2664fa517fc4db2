"""Functions of the user's own that a recipe names are called with a small batch before a run
starts: one that gives NaN, a wrong shape or no gradient is told with its file and line.

What each function receives and returns is in docs/reference_extending.md.
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
"""Response tokens of the samples of the small batch, two groups of four."""
REWARDS = (1.0, 0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 0.5)
"""Their rewards; those of the second group are equal, so that it has no standard deviation."""


class Trial:
    """A function of the user's own that a recipe names, to be called with made-up arguments before
    a run starts. Calling the object calls the function. Errors in the function and wrong results
    become `ValueError`, whose message names the setting, the file and the line.

    `setting`: the recipe's key that names the function, such as "algorithm.loss". `name`: the value
    of this setting, FILE.py:FUNCTION. `arguments`: what the function is called with, in words, for
    messages.
    """

    def __init__(self, setting: str, name: str, arguments: str) -> None:
        """Import the function. `setting`: the recipe's key that names it, such as "algorithm.loss".
        `name`: the value of this setting, FILE.py:FUNCTION. `arguments`: what the function is
        called with, in words, for messages. Raises `ValueError` if there is no such function.
        """
        self.setting, self.name, self.arguments = setting, name, arguments
        self.function = function_of(name, {}, setting)

    def __call__(self, *arguments: Any) -> Any:
        """Call the user's function with `arguments` and return its result. An error in it becomes a
        `ValueError`, as in `run`.
        """
        return self.run(lambda: self.function(*arguments))

    def run(self, call: Callable[[], Any]) -> Any:
        """Call `call`, which runs code of the user's, and return its result. Any error in it
        becomes a `ValueError`. Its message names the setting, the user's file, and the line of that
        file at which the error arose; if the error did not pass through that file, the line where
        the function begins.
        """
        try:
            return call()
        except Exception as error:
            said = f"raised {type(error).__name__}: {error}; mend it: it is called with"
            raise ValueError(self._said(f"{said} {self.arguments}", error)) from error

    def require(self, condition: object, said: str) -> None:
        """Raise `ValueError` unless `condition` is true. The message is "SETTING: FILE, line LINE:
        'FUNCTION' SAID (docs/reference_extending.md)".

        SETTING is the recipe's key that names the user's function, such as algorithm.loss. FILE and
        FUNCTION are the two parts of its value, FILE.py:FUNCTION. LINE is the line of the file
        where the function begins. SAID is `said`, which tells what is wrong as a phrase that
        continues the function's name, such as "returned NaN".
        """
        require(condition, self._said(said))

    def tensor(self, found: Any, like: torch.Tensor, shape: str) -> None:
        """Raise `ValueError` unless `found`, a result of the user's function, is a floating-point
        tensor of finite numbers in the shape of `like`. The message is that of `require`. `shape`:
        the shape in words, such as "[N]", for the message.
        """
        is_tensor = isinstance(found, torch.Tensor)
        what = f"{found.dtype} of shape {[*found.shape]}" if is_tensor else type(found).__name__
        self.require(
            is_tensor and found.shape == like.shape and found.is_floating_point(),
            f"returned {what}; return {like.dtype} of shape {shape}, here {[*like.shape]}",
        )
        is_there = found.device == like.device
        self.require(is_there, f"returned a tensor on {found.device}; return it on {like.device}")
        advice = "guard its divisions: equal rewards have the standard deviation 0"
        self.require(bool(found.isfinite().all()), f"returned NaN or infinity; {advice}")

    def _said(self, said: str, error: Exception | None = None) -> str:
        file, _, name = self.name.rpartition(":")
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        lines = [one.lineno for one in frames if one.filename == str(Path(file).resolve())]
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        line = lines[-1] if lines else getattr(code, "co_firstlineno", 1)
        said = " ".join(said.split())
        return f"{self.setting}: {file}, line {line}: '{name}' {said} (docs/reference_extending.md)"


def try_objectives(config: RunConfig, device: torch.device, *, has_empty_ranks: bool) -> None:
    """Call the user's own functions that the section `algorithm` names (advantage, loss,
    correction) with small tensors on `device`; of an own `algorithm.method` only the number of
    parameters is checked. Raises `ValueError` for one that fails, or returns NaN, a wrong shape or
    no gradient. `has_empty_ranks`: whether a rank may be without tokens; then the functions are
    also called with none.
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
    """Call the user's own `algorithm.advantage` with a small batch on `device`; raises `ValueError`
    if it fails or returns a wrong shape or NaN. `lengths`: number of response tokens of each sample
    in the batch; used only if the function gives an advantage to each token. A function that gives
    one to each sample gets a fixed batch of eight samples. `critics`: names of further critics,
    whose values are all 0.
    """
    trial = Trial("algorithm.advantage", algorithm.advantage, "(rewards_N, groups_N, tokens_N)")
    if not is_per_token(trial.function):
        rewards_N = torch.tensor(REWARDS, dtype=torch.float64)
        trial.require(not critics, "is of each sample, without critics; leave critics out")
        found = trial(rewards_N, torch.arange(len(REWARDS)) // 4, torch.tensor(LENGTHS))
        return trial.tensor(found, rewards_N, "[N], of each sample")
    trial.require(algorithm.credit == "response", "is of each token; leave algorithm.credit out")
    # Of each sample a token of its prompt, and its response, the last token of which is rewarded.
    tokens = [(n, at, to) for n, to in enumerate(lengths) for at in range(to + 1)]
    rewards = torch.tensor([REWARDS[n] * (at == to) for n, at, to in tokens], dtype=torch.float64)
    mask = torch.tensor([at > 0 for _, at, _ in tokens], dtype=torch.bool)
    ids = torch.tensor([n for n, _, _ in tokens], dtype=torch.int64)
    rewards, mask, ids = rewards.to(device), mask.to(device), ids.to(device)
    values = {name: torch.zeros_like(rewards) for name in critics}
    step = TokenRewards(rewards, mask, ids, lambda part: part, critics=values)
    return trial.tensor(trial(step, algorithm), rewards, "[T], of each token")


def try_loss(algorithm: AlgorithmConfig, device: torch.device, lengths: Sequence[int]) -> None:
    """Call `algorithm.loss` and `algorithm.correction.kind`, where they are the user's own
    functions, with small tensors on `device`; raises `ValueError` if one fails, returns a wrong
    shape or NaN, or the loss has no finite gradient. `lengths`: number of response tokens of each
    sample that is made up for the call.
    """
    draw = torch.Generator().manual_seed(0)  # that of the run is left alone
    old_T = -0.1 - torch.rand(sum(lengths), generator=draw)
    logp_T = old_T + 0.02 * torch.randn(sum(lengths), generator=draw)
    old_T, logp_T = old_T.to(device), logp_T.to(device).requires_grad_()
    ids_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    members, alone = torch.arange(len(LENGTHS), device=device), Axis("sequence", 1, 0, (0,), None)
    mean = SequenceMean(ids_T.to(device), members, alone)
    if is_own(kind := algorithm.correction.kind):
        words = "(trainer_logp_T, engine_logp_T, sequence_sum, config)"
        trial = Trial("algorithm.correction.kind", kind, words)
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
    """Call `rollout.filter`, if it is the user's own function, with two small groups of rollouts of
    the first prompt. Raises `ValueError` if it fails or does not return True or False.
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
        found = trial(Group(0, prompts.at(0), rollouts))
        what = f"returned {type(found).__name__}; return True for a group to keep, otherwise False"
        trial.require(isinstance(found, bool | np.bool_), what)
