"""The receipts (digests) of the weight versions that a run has sent to its engines, and the check
that each sample was generated with one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.types import Group, Segment
from megarl.weight_sync.weight_receipts import VersionSpan, refuse_unknown_weights


@dataclass
class Receipts:
    """The receipts of the weight versions that the trainer has sent to the engines, and the check
    that rollouts were generated with these weights. A receipt is a digest, as hex text, of all
    weights that an engine's ranks hold; engines add it to each response.
    """

    staleness: int
    """`rollout.max_staleness`: how many versions older than the newest one a sample may be."""
    known: dict[int, Sequence[str]] = field(default_factory=dict)
    """{version: receipts}; empty for a command that sends no weights, which checks nothing."""
    carried: set[int] = field(default_factory=set)
    """Ordinals of the groups that came with the checkpoint, which are not checked: they were when
    it was written, and receipts depend on layouts that may be others by now."""

    def publish(self, version: int, receipts: Sequence[str]) -> bool:
        """Remember the `receipts` (digests of all weights) of `version`: a response of this version
        must carry one of them. Forget the receipts of a version that is too old for any further
        sample. Returns whether `version` is new: False if its receipts are known already, or
        `receipts` is empty.
        """
        if not receipts or version in self.known:
            return False
        self.known[version] = receipts
        self.known.pop(version - self.staleness - 2, None)  # no sample to come is as old
        return True

    def check_answer(self, answer: Segment, where: str) -> None:
        """Raise `RuntimeError` if the tokens of `answer`, what an engine has generated, come from
        other weights than the trainer sent as their version. `where`: whose response, for the
        message. Tokens of a version whose receipts are not known yet pass; `check_groups` checks
        them later.
        """
        self._refuse_unnamed([answer], where)
        refuse_unknown_weights(spans_of([answer]), self.known, where, later=True)

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raise `RuntimeError` if a group (all rollouts of a prompt) has tokens that were generated
        with other weights than the trainer sent as their version. Call it once the receipts
        (digests) of all these versions are known.
        """
        for group in groups:
            if group.ordinal in self.carried:
                continue
            for one in group.members:
                where = f"rollout {one.sample} of group {group.ordinal}"
                self._refuse_unnamed(one.segments, where)
                refuse_unknown_weights(spans_of(one.segments), self.known, where)

    def _refuse_unnamed(self, segments: Sequence[Segment], where: str) -> None:
        """Raise `RuntimeError` if an engine does not say of each token which version it is of."""
        for part in segments:
            named = sum(count for _, count in part.versions)
            if self.known and part.kind == "model" and named != part.num_tokens:
                raise RuntimeError(
                    f"{where} has {part.num_tokens} tokens, but the engine says of {named} which"
                    " weights have generated them; the sample is not trained on, resume the run"
                    " from its newest checkpoint"
                )


def spans_of(segments: Sequence[Segment]) -> list[VersionSpan]:
    """(version, receipt) of the weights that generated `segments`, one for each stretch of tokens
    of one version, as the engines say; the receipt is "" where an engine says none.
    """
    return [
        VersionSpan(version, receipt)
        for part in segments
        for (version, _), receipt in zip(
            part.versions, itertools.chain(part.receipts, itertools.repeat("")), strict=False
        )
    ]
