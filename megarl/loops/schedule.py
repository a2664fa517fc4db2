"""When a loop saves and evaluates."""

from __future__ import annotations


def due(done: int, every: int, last: int) -> bool:
    """Whether an action is due after `done` of `last` steps: after each `every` steps (0: never),
    and after the last step.
    """
    return done == last or (every > 0 and done % every == 0)
