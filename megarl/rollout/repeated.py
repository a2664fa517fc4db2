"""Metrics of several responses to each problem: avg@n, pass@k and maj@n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` responses, drawn without repetition from `num_samples`
    of which `num_correct` are correct, is correct: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374,
    eq. 1).
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer to a problem is correct. Of equally frequent ones the one
    given first counts. None, a response without an answer, has no vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    chosen = votes.most_common(1)[0][0]  # insertion order breaks ties
    return correct[answers.index(chosen)]


def repeated_metrics(
    correct: Sequence[Sequence[bool]], answers: Sequence[Sequence[str | None]] | None
) -> dict[str, float | None]:
    """Means over all problems of avg@n, pass@k for k = 1, 2, 4 ... n, and maj@n.

    Args:
        correct: for each problem, the n verdicts.
        answers: for each problem, the n final answers; None where answers cannot be told apart, and
            maj@n is then None.
    """
    n, count = len(correct[0]), len(correct)
    powers = [2**power for power in range(n.bit_length()) if 2**power < n] + [n]
    found: dict[str, float | None] = {f"avg@{n}": sum(map(sum, correct)) / (n * count)}
    for k in powers:
        found[f"pass@{k}"] = sum(pass_at_k(n, sum(one), k) for one in correct) / count
    found[f"maj@{n}"] = None
    if answers is not None:
        voted = map(majority_is_correct, answers, correct)
        found[f"maj@{n}"] = sum(voted) / count
    return found
