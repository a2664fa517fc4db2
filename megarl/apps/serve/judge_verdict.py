"""What a judge has written becomes a score: the last verdict in its text.

text --VerdictReader.read--> a number     raises NoVerdict where there is none
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import regex

from megarl.schema import require, shortened

SEARCH_LIMIT_S = 1.0
"""Most seconds of one search: a pattern such as `(a+)+b` may need years."""


class NoVerdict(ValueError):
    """Raised for a text that holds no verdict that can be read."""


class VerdictReader:
    """Reads scores out of what a judge has written."""

    def __init__(
        self,
        pattern: str,
        choices: Mapping[str, float],
        lowest: float | None = None,
        highest: float | None = None,
    ) -> None:
        """`pattern`: a regular expression with one group; empty: one of `choices` as a whole word.
        `choices`: {verdict: score}; empty: the group is a number. A number from `lowest` to
        `highest` becomes a score from 0 to 1; with None it is the score. Raises `ValueError` for a
        pattern that is wrong.
        """
        self._scores = {_folded(choice): score for choice, score in choices.items()}
        self._lowest, self._highest = lowest, highest
        if not pattern:
            # The longest first: a text that says "sure not" does not say "sure".
            words = sorted(self._scores, key=len, reverse=True)
            found = "|".join(r"\s+".join(map(regex.escape, word.split())) for word in words)
            self._pattern = regex.compile(rf"(?<!\w)({found})(?!\w)", regex.IGNORECASE)
            return
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(
                f"judge.verdict {shortened(repr(pattern))} is no regular expression ({error});"
                " correct it"
            ) from None
        require(
            self._pattern.groups == 1,
            f"judge.verdict {shortened(repr(pattern))} has {self._pattern.groups} groups; set one"
            " with exactly one group, around the verdict itself, as in 'Score: (\\d+)', and write"
            " (?:...) for others",
        )

    def read(self, text: str) -> float:
        """The score of the last match in `text`, what a judge has generated and nothing that the
        judge was given. Raises `NoVerdict`.
        """
        said = None
        try:
            for match in self._pattern.finditer(text, timeout=SEARCH_LIMIT_S):
                said = match[1]
        except TimeoutError:
            raise NoVerdict(
                f"judge.verdict was not found within {SEARCH_LIMIT_S:g} s in {_end(text)}; set a"
                " simpler pattern"
            ) from None
        if said is None:
            raise NoVerdict(f"the judge wrote no verdict: {_end(text)}")
        if self._scores:
            if (score := self._scores.get(_folded(said))) is None:
                raise NoVerdict(
                    f"the judge's verdict is {shortened(repr(said))}, none of judge.choices"
                )
            return score
        return self._scaled(said)

    def _scaled(self, said: str) -> float:
        try:
            number = float(said)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise NoVerdict(f"the judge's verdict is {shortened(repr(said))}, no finite number")
        if self._lowest is None or self._highest is None:
            return number
        if not self._lowest <= number <= self._highest:
            raise NoVerdict(
                f"the judge's verdict is {number:g}, not from judge.lowest {self._lowest:g} to"
                f" judge.highest {self._highest:g}"
            )
        return (number - self._lowest) / (self._highest - self._lowest)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _end(text: str) -> str:
    """The last characters of a text, on one line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 200 else f"...{line[-197:]}")
