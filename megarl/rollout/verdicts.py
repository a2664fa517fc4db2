"""Failed verdicts: some are a warning, many end the run, since their rewards say nothing."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.errors import UserError
from megarl.types import Verdict

WARN_SHARE = 0.1
"""Share of failed verdicts from which a warning is given."""


def failure_warning(verdicts: Sequence[Verdict], limit: float, where: str) -> str:
    """A warning with the first failure's message if at least `WARN_SHARE` of the responses that
    were given to the verifier have failed; "" otherwise.

    Raises `UserError` with that message if the share is at least `limit`. `where` names the step or
    evaluation. Responses that no verifier was asked about (cut off) are left out.
    """
    judged = [verdict for verdict in verdicts if verdict.judged]
    failed = [verdict for verdict in judged if verdict.failure]
    if not failed or len(failed) < WARN_SHARE * len(judged):
        return ""
    first = " ".join((failed[0].detail or failed[0].failure).split())
    said = f"{where}: the verifier failed for {len(failed)} of {len(judged)} responses; {first}"
    if len(failed) < limit * len(judged):
        return said
    raise UserError(
        f"{said}; mend the verifier, or set environment.max_failure_share above {limit:g} (1 stops"
        " only where all fail)"
    )
