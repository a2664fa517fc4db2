"""How long the ranks of other roles may wait for a step of reinforcement learning."""

from __future__ import annotations

from megarl.config import RunConfig, patience_s

STEPS_OF = 10
"""By so many times `training.collective_timeout_s` a rank waits for another role's step, which is
made of many collectives."""


def rollout_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds that the rollouts of a step, or the evaluation on the held-out problems, may take."""
    draws = config.rollout.groups_per_step * config.rollout.dynamic_sampling.max_draws
    per_group = config.rollout.group_size + bool(config.greedy_baseline)
    requests = int((1 + config.rollout.max_staleness) * draws * per_group)
    return patience_s(config, max(requests, num_held_out))


def step_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds from one batch to the next, seen from a rank that only scores: rollouts, training, a
    publish with its repetitions, evaluations, and before the first step the engines' start.
    """
    publish_s = (1 + config.weight_sync.replacements) * config.weight_sync.timeout_s
    start_s = (1 + config.weight_sync.replacements) * config.rollout.engine.start_timeout_s
    collectives_s = 2 * config.training.collective_timeout_s
    return 3 * rollout_deadline_s(config, num_held_out) + publish_s + start_s + collectives_s
