"""A reward for the form of an answer and for its truth; for smollm2_format.yaml."""

import re


def score(prompt, response):
    r"""0.8 if the last whole number is right, wherever it stands, and 0.2 more if a \boxed{} holds
    it or another number. Were a right number paid in a box only, the model would learn to write
    boxes first, with wrong numbers in them: at the start none of its boxes holds the right one.
    """
    numbers = re.findall(r"-?\d{1,6}", response)
    right = bool(numbers) and int(numbers[-1]) == int(prompt.answer)
    boxed = re.search(r"\\boxed\{-?\d{1,6}\}[^\d]*$", response) is not None
    return {
        "reward": 0.8 * right + 0.2 * boxed,
        "correct": right and boxed,
        "right": float(right),
        "boxed": float(boxed),
    }
