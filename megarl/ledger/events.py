"""The events of a run's ledger: what happens to a group (all rollouts of one prompt), in the order
in which it happens.

    Started -> Dispatched -> Finished -> Accepted -> Trained -> ... -> Ended
                                      -> Rejected
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

ORDERED = "ordered"
"""Value of `rollout.dispatch` in runs that train on groups in the order of their prompts in the
data."""

WINDOWED = "windowed"
"""Value of `rollout.dispatch` in runs whose steps train on groups in the order in which these
finish."""

STALE = "stale"
"""Reason why an unfinished group is rejected: its weights would be too old for every later step."""


@dataclass(frozen=True)
class Started:
    """Ledger event (the ledger is the run's list of what became of every group): generation of
    rollouts starts in a new run, with these settings.
    """

    step: int
    """Number of steps that are done, which is also the version of the weights."""
    cursor: int
    """Position in the training order, from 0, of the first group (prompt) that the steps done have
    not used."""
    max_staleness: int
    """`rollout.max_staleness`: how many versions old the weights of a rollout may be that is
    trained on."""
    groups_per_step: int
    """Number of groups in the batch of a step, rejected ones not counted."""
    max_draws: int
    """Number of groups, rejected ones included, after which a batch is complete even with fewer of
    them."""
    cut_bytes: int = 0
    """Bytes of an incomplete last line that were cut off the ledger before."""
    dispatch: str = ORDERED
    """`rollout.dispatch`. The fields from here on are written with another policy than `ordered`
    only."""
    used: list[int] = field(default_factory=list)
    """Positions above `cursor` of groups that the steps done have used, ascending."""
    max_open: int = 0
    """Largest number of groups that may be started and neither trained nor rejected; 0 for no such
    limit."""


@dataclass(frozen=True)
class Restored(Started):
    """Ledger event: generation starts in a run that was resumed from the checkpoint of step `step`.
    Groups (all rollouts of one prompt) that were not trained by that step are void; the run
    generates them again, from position `cursor` of the training order on.
    """


@dataclass(frozen=True)
class Dispatched:
    """Ledger event: the generation requests of a group (all rollouts of one prompt) are sent to the
    engines.
    """

    ordinal: int
    """Position of the group's prompt in the training order of the whole run, from 0."""
    prompt: int
    """Index of the prompt's row in the data set."""
    version: int
    """Version of the trainer's weights, which is the number of steps done."""
    seed: int
    """Sampling seed of the group's first rollout."""


@dataclass(frozen=True)
class Carried(Dispatched):
    """Ledger event: the resumed run takes a group (all rollouts of one prompt) that an earlier
    process has generated and scored from the checkpoint, and does not generate it again. Such
    events come before those of groups that are sent to the engines; the group's `Finished` follows.
    The fields are those of the time when the group was sent to the engines.
    """


class RolloutRecord(NamedTuple):
    """What the run's ledger keeps of one rollout of a prompt: its number, its length in tokens, the
    weight versions that generated it, and whether the verifier failed.
    """

    sample: int
    """Index in the group, from 0; -1 for a greedy response, which is not trained on."""
    tokens: int
    """Number of tokens that the model generated."""
    versions: list[tuple[int, int]]
    """Weight versions that generated the tokens, in order: (version, number of consecutive
    tokens)."""
    failure: str
    """Why the verifier gave no score, "error", "timeout" or "nan"; "" if it gave one."""


@dataclass(frozen=True)
class Finished:
    """Ledger event: all rollouts of one prompt, that at position `ordinal` of the training order
    (from 0), are generated and scored. `rollouts`: number, tokens, weight versions and failure of
    each.
    """

    ordinal: int
    rollouts: list[RolloutRecord]


@dataclass(frozen=True)
class Accepted:
    """Ledger event: the group (all rollouts of one prompt) at position `ordinal` of the training
    order, from 0, is part of the batch of step `step`, from 1.
    """

    ordinal: int
    step: int


@dataclass(frozen=True)
class Rejected:
    """Ledger event: the group (all rollouts of one prompt) at position `ordinal` of the training
    order, from 0, was looked at for the batch of step `step`, from 1, and is not trained on, for
    the reason `why`, such as "equal rewards".
    """

    ordinal: int
    step: int
    why: str


@dataclass(frozen=True)
class Trained:
    """Ledger event: step `step`, from 1, is trained, and its new weights, of version `version`, are
    on the engines; both numbers are the same.
    """

    step: int
    version: int


@dataclass(frozen=True)
class Published:
    """Ledger event: the weights of version `version`, which is the number of steps trained, have
    been sent to the engines, which now generate with them.
    """

    version: int
    receipts: list[str]
    """Digests of these weights, in hexadecimal; an engine that computes with other weights reports
    another digest."""


@dataclass(frozen=True)
class Ended:
    """Ledger event: generation of rollouts has ended, after `step` steps. No further event follows
    unless the run is resumed.
    """

    step: int
    """Steps done."""
    failure: str = ""
    """Why generation failed; empty if it has not."""


Event = Started | Dispatched | Finished | Accepted | Rejected | Trained | Published | Ended

KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (*get_args(Event), Restored, Carried)
}
"""{name in the file: class}"""

NOT_ORDERED = {"dispatch", "used", "max_open"}
"""Fields of `Started` that are left out where groups are used in the order of their prompts:
earlier versions of megarl, which lack these fields, can then read the ledger too."""


def to_record(event: Event) -> dict[str, Any]:
    """The ledger event as a dict of JSON data: {"event": name of its class in lower case, each
    field by its name}.
    """
    values = vars(event)
    if isinstance(event, Started) and event.dispatch == ORDERED:
        values = {name: value for name, value in values.items() if name not in NOT_ORDERED}
    return {"event": type(event).__name__.lower()} | values


def from_record(record: Mapping[str, Any]) -> Event:
    """The ledger event, such as `Dispatched(...)`, that `to_record` made the dict `record` of.
    Raises `ValueError` for any other dict.
    """
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
