"""Configuration of what commands do with a recipe beside training: evaluate, sample, replay."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.data.config import PromptsConfig
from megarl.schema import MOST_STEPS, PathText, Range, config


@config
class EvaluationConfig:
    """Held-out problems, scored by the run's own verifier before, during and after training."""

    prompts: PromptsConfig = PromptsConfig(shuffle=False)
    """Source of the problems; empty for no evaluation. All of them are asked, in any order."""
    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    temperature: Annotated[float, Range(0.01, 2.0, or_zero=True)] = 0.0
    """Sampling temperature; 0 is greedy."""
    sampled_too: bool = False
    """Also draw one sample of each problem at the rollout temperature."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Of `megarl eval`: samples of each problem at the rollout temperature, for avg@n, pass@k and
    maj@n; 1 for none, unless `sampled_too` is set."""
    models: tuple[PathText, ...] = ()
    """Of `megarl eval`: model folders or hub names, one after another; empty for `model.path`."""
    sources: tuple[PathText, ...] = ()
    """Of `megarl eval`: further data sets, read as `prompts` is."""


@config
class SampleConfig:
    """Of `megarl sample`: how many responses to each prompt, and which of them are written."""

    samples: Annotated[int, Range(1, 10_000)] = 8
    """Responses to each of `prompts`, at `rollout.temperature`."""
    keep: Literal["best", "all", "pairs"] = "best"
    """`best`: of each prompt the response with the highest reward; `all`: every response, with its
    reward; `pairs`: the best and the worst response, where their rewards differ. Empty responses
    are left out, and so are responses that were cut off at the token limit, but as the worst."""
    min_reward: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Leave out what has less reward than this; of `pairs` the chosen response must have it."""
    shown: Annotated[int, Range(1, 10_000)] = 4
    """Of `megarl rollout`: number of rollouts that are printed, each of another prompt."""


@config
class ReplayConfig:
    """Of `megarl replay`: the run whose batches are trained on again."""

    run: PathText = ""
    """Its run folder; `megarl replay RUN` sets it."""
    steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps to train again, from the first one; 0 for all that the run has finished."""
