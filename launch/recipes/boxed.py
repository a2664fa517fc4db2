"""The form of an answer as a reward; for smollm2_format.yaml."""

import re


def form(prompt, response):
    r"""1 if a whole number stands in the last \boxed{}, whether or not it is right; otherwise 0."""
    return float(re.search(r"\\boxed\{-?\d+\}[^{}]*$", response) is not None)
