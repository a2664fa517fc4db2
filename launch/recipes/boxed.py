"""A reward for the form of an answer and for its truth; for smollm2_format.yaml."""

import re


def score(prompt, response):
    r"""0.8 if the last whole number of the response is right, in a \boxed{} or not, and 0.2 if the
    response ends with a \boxed{} that holds a whole number, right or wrong.

    A right number is paid without a box too: at the start none of the model's boxes holds the right
    number, and a reward for boxes alone teaches boxes with wrong numbers.
    """
    numbers = re.findall(r"(?<!\d)-?\d{1,6}(?!\d)", response)
    right = bool(numbers) and int(numbers[-1]) == int(prompt.answer)
    boxed = re.search(r"\\boxed\{-?\d{1,6}\}\D*$", response) is not None
    return {
        "reward": 0.8 * right + 0.2 * boxed,
        "correct": right and boxed,
        "right": float(right),
        "boxed": float(boxed),
    }
