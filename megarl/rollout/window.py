"""The dispatch rule: which group may start now, and which groups make up which step. Pure
arithmetic.

Groups have ordinals 0, 1, 2, ... and are consumed in that order. A group is *accepted* into a step
or *rejected* by dynamic sampling. A step's batch closes with `per_step` accepted groups, or short
of that once it has looked at `max_draws` groups. Group o may start at trainer version v only if it
is certain to be trained by step v + staleness: then the age of what is trained never exceeds
`staleness`, and nothing is dropped for age.

Without a draw limit this is `o - rejected < (v + 1 + staleness) * per_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Window:
    """State that decides which groups may start and which groups form the batch of a step.

    The open batch is the one of the earliest step whose batch is not complete.
    """

    per_step: int
    max_draws: int
    """Maximum number of groups that a step draws, rejected ones included."""
    staleness: int
    last_step: int
    """Last step of the run; groups that only later steps would use are not started."""
    first: int = 0
    """Ordinal of the first group of the open batch."""
    step: int = 0
    """Step of the open batch."""
    version: int = 0
    """Version of the trainer's weights."""
    next: int = 0
    """Ordinal of the next group to start."""
    known: dict[int, bool] = field(default_factory=dict)
    """{ordinal: accepted} of the finished groups from `first` on."""

    def may_start(self) -> bool:
        """Whether group `next` may start now."""
        return self._latest_step(self.next) <= min(self.version + self.staleness, self.last_step)

    def start(self) -> int:
        """Mark group `next` as started and return its ordinal."""
        assert self.may_start()
        self.next += 1
        return self.next - 1

    def finish(self, ordinal: int, accepted: bool) -> None:
        """Record that group `ordinal` is finished, and whether dynamic sampling accepts it."""
        assert self.first <= ordinal < self.next and ordinal not in self.known
        self.known[ordinal] = accepted

    def close(self) -> list[int] | None:
        """If the open batch is complete, return the ordinals of its accepted groups and open the
        next batch; otherwise return None.
        """
        end, accepted = self._end(self.first, assume=False)
        if end is None:
            return None
        for ordinal in range(self.first, end):
            del self.known[ordinal]
        self.first, self.step = end, self.step + 1
        self.next = max(self.next, end)
        return accepted

    def _end(self, first: int, *, assume: bool) -> tuple[int | None, list[int]]:
        """(ordinal after the batch that begins at `first`, ordinals of its accepted groups).

        With `assume`, unfinished groups count as accepted. Without, the first item is None if a
        group that decides the batch is unfinished.
        """
        accepted: list[int] = []
        for ordinal in range(first, first + self.max_draws):
            outcome = self.known.get(ordinal)
            if outcome is None and not assume:
                return None, accepted
            if outcome is not False:
                accepted.append(ordinal)
            if len(accepted) == self.per_step:
                return ordinal + 1, accepted
        return first + self.max_draws, accepted

    def _latest_step(self, ordinal: int) -> int:
        """The latest step whose batch can contain group `ordinal`.

        That is the step it belongs to if every unfinished group is accepted: a rejection moves
        later groups to earlier steps, never to later ones.
        """
        first, step = self.first, self.step
        while True:
            end, _ = self._end(first, assume=True)
            assert end is not None
            if ordinal < end:
                return step
            first, step = end, step + 1
