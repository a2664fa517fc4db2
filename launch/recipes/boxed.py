"""A reward for the form of an answer and for its truth; for smollm2_format.yaml."""

import re


def score(prompt, response):
    r"""1 if the last \boxed{} holds the right whole number, 0.2 to 0.5 for another one, more for a
    nearer one, else 0. Without the part for nearness one number is written everywhere.
    """
    boxes = re.findall(r"\\boxed\{(-?\d{1,6})\}", response)
    distance = abs(int(boxes[-1]) - int(prompt.answer)) if boxes else 0
    return {
        "reward": (0.2 + 0.3 / distance if distance else 1.0) if boxes else 0.0,
        "correct": bool(boxes) and distance == 0,
        "boxed": float(bool(boxes)),
    }
