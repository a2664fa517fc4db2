"""The tools of launch/recipes/calculator.yaml: typed functions, shown to the model by their names,
signatures and docstrings.
"""


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b
