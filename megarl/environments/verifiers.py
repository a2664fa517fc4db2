"""Verifiers: is a response right? Each is an async function (prompt, response) -> score, 1.0 right,
0.0 wrong.

    EnvironmentConfig --load_verifier--> verifier

To add one to the house, write a function that makes it from the configuration and name it in
`VERIFIERS`; to use one of your own, write `environment.verifier: path/to/file.py:function`, where
the function takes a `megarl.types.Prompt` and the response's text, may be async, may raise and may
hang: `megarl.environments.pool` bounds it.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.environments.config import EnvironmentConfig
from megarl.schema import require
from megarl.types import Prompt

Verifier = Callable[[Prompt, str], Awaitable[float]]
"""A function (prompt, response text) -> score from 0.0 (wrong) to 1.0 (right). It may raise and may
be slow."""

NUMBER_CHARACTERS = 200  # nothing longer is read as a plain number: reading it could take long
FINAL = "####"  # GSM8K's mark of a final answer
NUMBER = re.compile(
    r"(?:[$\u20ac\u00a3])?([-+]?)(?:[$\u20ac\u00a3])?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?"
)
UNIT = re.compile(r"^(.*\d)\s+([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)$")
# Words that change the number before them, so that it may not be read alone.
NOT_UNITS = re.compile(
    r"\b(?:hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|quarter|third|percent|percentage|pi|sqrt|times|"
    r"plus|minus|over|and|or|to|by|mod)\b",
    re.IGNORECASE,
)


def exact_match(config: EnvironmentConfig) -> Verifier:
    """A verifier that returns 1.0 if the text after the last `answer_after` marker equals the
    reference answer, else 0.0. If the marker is empty, the whole response is compared. Surrounding
    whitespace is ignored.
    """
    marker = config.answer_after

    async def verify(prompt: Prompt, response: str) -> float:
        if marker:
            _, found, response = response.rpartition(marker)
            if not found:
                return 0.0
        return float(response.strip() == prompt.answer.strip())

    return verify


def math(config: EnvironmentConfig) -> Verifier:
    r"""A verifier that returns 1.0 if the final expression of the response is mathematically equal
    to the reference answer, else 0.0.

    The final expression is what follows the last `####` or is inside the last `\boxed{}`, whichever
    comes later; without either, it is what math-verify extracts. Plain numbers are compared
    exactly, everything else by math-verify. The verifier raises if the reference answer is not a
    mathematical expression.
    """
    import math_verify

    del config
    # It says once per process that its time limits are off; ours hold, and its own need signals.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)

    @lru_cache(maxsize=4096)
    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def parse_marked(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}") or parse(text)

    async def verify(prompt: Prompt, response: str) -> float:
        reference = final_expression(prompt.answer) or prompt.answer.strip()
        found = final_expression(response)
        expected, number = plain_number(reference), plain_number(found or "")
        if expected is not None and number is not None:
            return float(expected == number)
        gold = parse_marked(reference if expected is None else _latex(expected))
        if not gold:
            raise ValueError(
                f"the reference answer {reference!r} of row {prompt.index} is not mathematics; "
                "set environment.verifier to 'exact_match' or to a function of your own"
            )
        given = parse(response) if found is None else parse_marked(found)
        return float(bool(given) and math_verify.verify(gold, given, timeout_seconds=None))

    return verify


VERIFIERS: dict[str, Callable[[EnvironmentConfig], Verifier]] = {
    "exact_match": exact_match,
    "math": math,
}


def final_expression(text: str) -> str | None:
    r"""The text after the last `####` or inside the last `\boxed{}`, whichever comes later; None
    without either.
    """
    hashed, boxed = text.rfind(FINAL), text.rfind("\\boxed{")
    if boxed > hashed:
        start, depth = boxed + len("\\boxed{"), 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end].strip()
        return ""  # an open box is not an answer
    if hashed >= 0:
        line = text[hashed + len(FINAL) :].strip().split("\n", 1)[0].strip()
        if len(line) <= 1 or re.search(
            r"[\d\\]", line
        ):  # else it is a heading, as in "#### Conclusion"
            return line
    return None


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is a plain number, otherwise None. A sign, `$`, thousands
    separators, a final full stop and a unit are allowed.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    text = (
        text.replace("\\$", "$")
        .replace("{,}", ",")
        .replace("\\!", "")
        .replace("\u2212", "-")
        .strip()
    )
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = text.removesuffix(".").rstrip()
    unit = UNIT.match(text)
    if unit and not NOT_UNITS.search(unit[2]):
        text = unit[1]
    match = NUMBER.fullmatch(re.sub(r"^([-+]?[$\u20ac\u00a3])\s+", r"\1", text))
    if not match or not (match[2] or match[3]):
        return None
    return Fraction(f"{match[1]}{(match[2] or '0').replace(',', '')}{match[3] or ''}")


def _latex(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def split_name(name: str) -> tuple[Path, str] | None:
    """(file, function) of a verifier named `path/to/file.py:function`; None for a built-in one in
    `VERIFIERS`. Raises `ValueError` for any other name.
    """
    if name in VERIFIERS:
        return None
    return _split(name, "environment.verifier", f"one of {', '.join(VERIFIERS)}, or to ")


def own_file(config: EnvironmentConfig) -> Path | None:
    """Path of the user's verifier or session file; None for a built-in verifier. Raises
    `ValueError` if the file is missing or the name is unknown.
    """
    if config.session:
        return _split(config.session, "environment.session", "")[0]
    own = split_name(config.verifier)
    return own[0] if own is not None else None


def load_verifier(config: EnvironmentConfig) -> Verifier:
    """Load the configured verifier function. Raises `ValueError` if its file or function cannot be
    loaded.
    """
    own = split_name(config.verifier)
    if own is None:
        return VERIFIERS[config.verifier](config)
    found = _load(*own, "environment.verifier", "function", inspect.isfunction)

    async def verify(prompt: Prompt, response: str) -> float:
        score: Any = found(prompt, response)
        return await score if inspect.isawaitable(score) else score

    return verify


def load_session(config: EnvironmentConfig) -> Callable[[], Any]:
    """Load the class `environment.session`, which is instantiated for each rollout (see
    `megarl.environments.session.Session`). Raises `ValueError` if the file or class cannot be
    loaded, or a method is missing.
    """
    setting = "environment.session"
    made = _load(*_split(config.session, setting, ""), setting, "class", inspect.isclass)
    missing = [name for name in ("start", "step") if not callable(getattr(made, name, None))]
    require(
        not missing,
        f"{setting}: {config.session} has no method {' and no method '.join(missing)}; see"
        " megarl.environments.session",
    )
    return made


def _split(name: str, setting: str, others: str) -> tuple[Path, str]:
    """(file, attribute) of `path/to/file.py:attribute`; raises `ValueError` for another form or a
    missing file. `others`: further allowed values, for the error message.
    """
    kind = "function" if setting == "environment.verifier" else "Class"
    file, colon, attribute = name.rpartition(":")
    require(
        bool(colon) and file.endswith(".py") and attribute.isidentifier(),
        f"{setting} is '{name}'; set it to {others}path/to/file.py:{kind}",
    )
    path = Path(file)
    require(
        path.is_file(),
        f"{setting} is '{name}', but there is no file {path}; set the path of one there is",
    )
    return path, attribute


def _load(path: Path, name: str, setting: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Import the Python file at `path` and return its attribute `name`."""
    spec = importlib.util.spec_from_file_location(f"megarl_verifier_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"{setting}: {path} does not import: {type(error).__name__}: {error}; mend the file"
        ) from error
    found = getattr(module, name, None)
    public = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
    listed = ", ".join(public) or "(none)"
    require(
        found is not None,
        f"{setting}: {path} has no {kind} '{name}'; set one of: {listed}",
    )
    require(
        callable(found) if kind == "function" else fits(found),
        f"{setting}: '{name}' of {path} is {type(found).__name__}, not a {kind}; set"
        f" one of: {listed}",
    )
    return found
