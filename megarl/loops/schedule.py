"""When a loop saves and evaluates."""

from __future__ import annotations


def due(done: int, every: int, last: int) -> bool:
    """Whether a periodic action is to run after step number `done` of `last`: every `every` steps
    (0: never), and after the last step.
    """
    return done == last or (every > 0 and done % every == 0)
