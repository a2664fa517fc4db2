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
    """State of the rule. `first` is the cursor: the oldest group that is not part of a closed
    batch.
    """

    per_step: int
    max_draws: int
    """Groups a step may look at."""
    staleness: int
    last_step: int
    """Groups that only later steps would train are not started."""
    first: int = 0
    """First ordinal of the open batch."""
    step: int = 0
    """The open batch's step."""
    version: int = 0
    """The trainer's version."""
    next: int = 0
    """Ordinal of the next group to start."""
    known: dict[int, bool] = field(default_factory=dict)
    """Accepted or not, of finished groups from `first` on."""

    def may_start(self) -> bool:
        """Whether group `next` may start now."""
        return self._latest_step(self.next) <= min(self.version + self.staleness, self.last_step)

    def start(self) -> int:
        """Take the next ordinal."""
        assert self.may_start()
        self.next += 1
        return self.next - 1

    def finish(self, ordinal: int, accepted: bool) -> None:
        """Group `ordinal` is done."""
        assert self.first <= ordinal < self.next and ordinal not in self.known
        self.known[ordinal] = accepted

    def close(self) -> list[int] | None:
        """The accepted ordinals of the open batch once it is complete, else None. Closing it opens
        the next.
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
        """(first ordinal after the batch that begins at `first`, its accepted ordinals).

        `assume`: groups not yet finished count as accepted; otherwise meeting one gives None.
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
        """The latest step that can train `ordinal`.

        That is where it lands if every unfinished group is accepted: a rejection can only pull
        later groups forward.
        """
        first, step = self.first, self.step
        while True:
            end, _ = self._end(first, assume=True)
            assert end is not None
            if ordinal < end:
                return step
            first, step = end, step + 1
