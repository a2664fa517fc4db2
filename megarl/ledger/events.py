"""The events of a run's ledger: what happens to a group of rollouts, in the order in which it
happens.

    Started -> Dispatched -> Finished -> Accepted -> Trained -> ... -> Ended
                                      -> Rejected
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ORDERED = "ordered"
"""`rollout.dispatch` of runs that use groups in the order of their ordinals."""

WINDOWED = "windowed"
"""`rollout.dispatch` of runs whose steps use groups as they finish."""

STALE = "stale"
"""Why a group is rejected that every later step would find too old."""


@dataclass(frozen=True, slots=True)
class Started:
    """Generation starts in a new run."""

    step: int
    """Steps done, which is also the version of the weights."""
    cursor: int
    """Ordinal of the first group that the steps done have not used."""
    max_staleness: int
    """`rollout.max_staleness`: how many versions old a rollout may be that is trained on."""
    groups_per_step: int
    """Groups that the batch of a step has, rejected ones not counted."""
    max_draws: int
    """Groups, rejected ones included, after which a batch is complete with fewer of them."""
    cut_bytes: int = 0
    """Bytes of a torn tail that were cut off the ledger before."""
    dispatch: str = ORDERED
    """`rollout.dispatch`. The fields from here on are written with another policy than `ordered`
    only."""
    used: list[int] = field(default_factory=list)
    """Ordinals above `cursor` that the steps done have used, ascending."""
    max_open: int = 0
    """Groups that may be started and neither trained nor rejected; 0 for no limit of its own."""


@dataclass(frozen=True, slots=True)
class Restored(Started):
    """Generation starts in a run that was resumed from the checkpoint of `step`. Groups that were
    not trained by `step` are void; the run generates them again, from `cursor` on.
    """


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A group's requests are sent to the engines."""

    ordinal: int
    """Position of the group's prompt in the training order of the whole run, from 0."""
    prompt: int
    """Index of the prompt's row in the data set."""
    version: int
    """Version of the trainer's weights, which is the number of steps done."""
    seed: int
    """Sampling seed of the group's first rollout."""


@dataclass(frozen=True, slots=True)
class Carried(Dispatched):
    """A group that an earlier start of the run has sent to the engines and finished is taken from
    the checkpoint. The group comes before those that are dispatched anew, and is finished next.
    """


class RolloutRecord(NamedTuple):
    """What is kept of a rollout."""

    sample: int
    """Index in the group; -1 for a greedy response, which is not trained on."""
    tokens: int
    """Tokens that the model generated."""
    versions: list[tuple[int, int]]
    """Weight versions that generated them, in order: (version, number of consecutive tokens)."""
    failure: str
    """Why the verifier gave no score; empty if it gave one."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All rollouts of a group are generated and scored."""

    ordinal: int
    rollouts: list[RolloutRecord]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group is part of the batch of `step` (from 1)."""

    ordinal: int
    step: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A group was drawn for the batch of `step` (from 1), and is not trained on."""

    ordinal: int
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The batch of `step` (from 1) is trained, and the weights `version` that came of it are on the
    engines; both numbers are the same.
    """

    step: int
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """Weights `version` are on the engines."""

    version: int
    receipts: list[str]
    """Digests of the weights; see `megarl.weight_sync.weight_receipts`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Generation has ended, and no further event comes unless the run is resumed."""

    step: int
    """Steps done."""
    failure: str = ""
    """Why generation failed; empty if it has not."""


Event = Started | Dispatched | Finished | Accepted | Rejected | Trained | Published | Ended

KINDS: dict[str, type[Event]] = {
    "started": Started,
    "restored": Restored,
    "dispatched": Dispatched,
    "carried": Carried,
    "finished": Finished,
    "accepted": Accepted,
    "rejected": Rejected,
    "trained": Trained,
    "published": Published,
    "ended": Ended,
}
"""{name in the file: class}"""

NAMES = {kind: name for name, kind in KINDS.items()}
FIELDS = {kind: tuple(one.name for one in dataclasses.fields(kind)) for kind in NAMES}


NOT_ORDERED = {"dispatch", "used", "max_open"}
"""Fields of `Started` that are left out where groups are used in order: ledgers of such runs are
read by earlier versions of megarl too."""


def to_record(event: Event) -> dict[str, Any]:
    """The event as JSON data."""
    kind = type(event)
    names = FIELDS[kind]
    if isinstance(event, Started) and event.dispatch == ORDERED:
        names = tuple(name for name in names if name not in NOT_ORDERED)
    return {"event": NAMES[kind]} | {name: getattr(event, name) for name in names}


def from_record(record: Mapping[str, Any]) -> Event:
    """The event that `to_record` made `record` of. Raises `ValueError` for any other record."""
    values = dict(record)
    kind = KINDS.get(values.pop("event", ""))
    try:
        if kind is None:
            raise TypeError("no event of this name")
        if kind is Finished:
            values["rollouts"] = [
                RolloutRecord(sample, tokens, [(int(v), int(n)) for v, n in versions], failure)
                for sample, tokens, versions, failure in values["rollouts"]
            ]
        return kind(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{record.get('event')!r} is not an event of a ledger ({error})") from None
