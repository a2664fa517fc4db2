"""The events of a run's ledger: what happens to a group, in this order.

    Started -> Dispatched -> Finished -> Accepted -> Trained -> ... -> Ended
                                      -> Rejected

An `ordinal` is the position of a prompt in the training order, from 0; steps count from 1, and a
version of the weights is the number of steps done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

ORDERED = "ordered"
"""Train on groups in the order of their prompts."""

WINDOWED = "windowed"
"""Train on groups in the order in which these finish."""

STALE = "stale"
"""Why an unfinished group is rejected."""


@dataclass(frozen=True)
class Started:
    """Generation starts in a new run."""

    step: int
    """Steps done."""
    cursor: int
    """First ordinal that the steps have not used."""
    max_staleness: int
    groups_per_step: int
    max_draws: int
    """Groups, rejected ones too, after which a batch is complete."""
    cut_bytes: int = 0
    dispatch: str = ORDERED
    used: list[int] = field(default_factory=list)
    """Ordinals above `cursor` that the steps have used, ascending."""
    max_open: int = 0
    """Most groups neither trained nor rejected; 0 for no limit."""


@dataclass(frozen=True)
class Restored(Started):
    """Generation starts in a run resumed from step `step`; groups not trained by then are void."""


@dataclass(frozen=True)
class Dispatched:
    ordinal: int
    prompt: int
    """Row in the data set."""
    version: int
    seed: int


@dataclass(frozen=True)
class Carried(Dispatched):
    """A resumed run takes over a group from its checkpoint, before any other `Dispatched`."""


class RolloutRecord(NamedTuple):
    sample: int
    """Index in the group, from 0; -1 for a greedy response."""
    tokens: int
    versions: list[tuple[int, int]]
    """[(version, number of consecutive tokens)]"""
    failure: str
    """Why the verifier gave no score; "" if it gave one."""


@dataclass(frozen=True)
class Finished:
    ordinal: int
    rollouts: list[RolloutRecord]
    left_out: list[RolloutRecord] = field(default_factory=list)
    """Without verdict, and not trained on."""


@dataclass(frozen=True)
class Accepted:
    ordinal: int
    step: int


@dataclass(frozen=True)
class Rejected:
    """The group is not trained on, such as for "equal rewards"."""

    ordinal: int
    step: int
    why: str


@dataclass(frozen=True)
class Trained:
    step: int
    version: int


@dataclass(frozen=True)
class Published:
    """Weights have reached the engines, after `Trained` or at the start of a run."""

    version: int
    receipts: list[str]
    """Hexadecimal digests of what engines compute with."""


@dataclass(frozen=True)
class Ended:
    """No further event follows unless the run is resumed."""

    step: int
    failure: str = ""
    """Empty if generation has not failed."""


Event = Started | Dispatched | Finished | Accepted | Rejected | Trained | Published | Ended

KINDS: dict[str, type[Event]] = {
    cls.__name__.lower(): cls for cls in (*get_args(Event), Restored, Carried)
}
"""{name in the file: class}"""


def to_record(event: Event) -> dict[str, Any]:
    """{"event": name of its class in lower case, each field}"""
    return {"event": type(event).__name__.lower()} | vars(event)


def from_record(record: Mapping[str, Any]) -> Event:
    values = dict(record)
    cls = KINDS.get(values.pop("event", ""))
    try:
        if cls is None:
            raise TypeError("no event of this name")
        for name in ("rollouts", "left_out") if cls is Finished else ():
            values[name] = [
                RolloutRecord(sample, tokens, [(int(v), int(n)) for v, n in versions], failure)
                for sample, tokens, versions, failure in values.get(name, ())
            ]
        return cls(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{record.get('event')!r} is not an event of a ledger ({error})") from None
