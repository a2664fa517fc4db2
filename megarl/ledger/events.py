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
    """Ledger event (the ledger is the run's list of what became of every group, all rollouts of one
    prompt): generation of rollouts starts in a new run. The fields are the settings that decide
    which groups a step trains on: staleness limit, groups in a step and so on.
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
    engines. `ordinal` is the group's position in the training order, `prompt` the row in the data
    set, `version` that of the weights, `seed` that of the first rollout.
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
    """Ledger event: a resumed run takes over, from its checkpoint, a group (all rollouts of one
    prompt) that was generated and scored before, in place of generating it again. The fields have
    the values of the time when the group was first sent to the engines. Such events come before any
    other `Dispatched`; the group's `Finished` follows.
    """


class RolloutRecord(NamedTuple):
    """What the run's ledger keeps of one rollout of a prompt: its index among the prompt's
    rollouts, its length in tokens, which versions of the weights generated which tokens, and
    whether the verifier failed.
    """

    sample: int
    """Index in the group, from 0; -1 for a greedy response, which is not trained on."""
    tokens: int
    """Number of tokens that the model generated."""
    versions: list[tuple[int, int]]
    """Weight versions that generated the tokens, in order: (version, number of consecutive
    tokens)."""
    failure: str
    """Why the verifier gave no score, such as "error" or "abstained"; "" if it gave one."""


@dataclass(frozen=True)
class Finished:
    """Ledger event: all rollouts of the prompt at position `ordinal` of the training order (from 0)
    are generated and scored. `rollouts`: index, tokens, weight versions and failure of each.
    """

    ordinal: int
    rollouts: list[RolloutRecord]
    left_out: list[RolloutRecord] = field(default_factory=list)
    """Those of which there is no verdict, and which are not trained on; only written if there are
    any."""


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
    """Ledger event: training step `step`, from 1, is complete: its new weights, of version
    `version` (the same number), are on the engines. One event for each step.
    """

    step: int
    version: int


@dataclass(frozen=True)
class Published:
    """Ledger event: the weights of version `version`, the number of steps done, have reached the
    engines, which now generate with them. `receipts` identify these weights. Follows the step's
    `Trained`; also written for the weights with which a run starts.
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
    if isinstance(event, Finished) and not event.left_out:
        values = {name: value for name, value in values.items() if name != "left_out"}
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
        for name in ("rollouts", "left_out") if kind is Finished else ():
            values[name] = [
                RolloutRecord(sample, tokens, [(int(v), int(n)) for v, n in versions], failure)
                for sample, tokens, versions, failure in values.get(name, ())
            ]
        return kind(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{record.get('event')!r} is not an event of a ledger ({error})") from None
