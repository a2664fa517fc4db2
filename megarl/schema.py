"""The basis of every configuration class: frozen, keyword-only dataclasses that check themselves.

Each package has its `config.py` beside its code; `megarl.config` combines them. None of these
imports torch, ray, vllm or deepspeed, so that reading a recipe takes milliseconds.

A number declares its range beside its type, and every instance checks it:

    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

T = TypeVar("T")

MOST_STEPS = 10**7
"""Upper bound of settings that count training steps."""
MOST_TOKENS = 10**8
"""Upper bound of settings that count tokens of a sequence or of an engine step."""
MOST_RANKS = 2**16
"""Upper bound of settings that count ranks, engines or parallel degrees."""
MOST_SAMPLES = 2**16
"""Upper bound of settings that count prompts or samples of a step."""
LONGEST_WAIT_S = 1e6
"""Upper bound of time limits in seconds: eleven days."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The values that a numeric setting may have: finite numbers from `low` to `high`."""

    low: float
    high: float
    or_zero: bool = False
    """0 is allowed too, where it turns something off."""
    fix: str = ""
    """Advice for the error message; empty names the range."""

    def problem(self, value: float) -> str:
        """What is wrong with `value`, and what to set; empty if it is in range."""
        if (self.or_zero and value == 0) or self.low <= value <= self.high:  # NaN is not
            return ""
        zero = "0, or " if self.or_zero else ""
        advice = self.fix or f"set it to {zero}a number >= {self.low:.10g} and <= {self.high:.10g}"
        return f"is {shortened(str(value))}; {advice}"


@dataclasses.dataclass(frozen=True, slots=True)
class IsPath:
    """Marks a text setting that names a file or folder, whose length systems limit. `~` and
    `$VARIABLE` in it are expanded (`megarl.recipe_paths`).
    """

    use: Literal["read", "write", "code"] = "read"
    """`read`: looked for beside the recipe too. `write`: always in the working folder. `code`: may
    be another name than a file's; as `read` where it ends in .py."""

    def is_looked_for(self, file: str) -> bool:
        """Whether `file` is looked for beside the recipe."""
        return bool(file) and (self.use == "read" or (self.use == "code" and file.endswith(".py")))

    def problem(self, text: str) -> str:
        """What is wrong with the path `text`, and what to set; empty if nothing is."""
        if len(text.encode()) > LONGEST_PATH:
            return f"has {len(text.encode()):,} bytes, too many for a path; set a shorter one"
        longest = max((len(part.encode()) for part in text.split("/")), default=0)
        if longest > LONGEST_NAME:
            return f"holds a name of {longest} bytes, longer than a file's; set a shorter one"
        return ""


PathText = Annotated[str, IsPath()]
"""Type of a setting that names a file or folder that is read; also a hub name."""
OutputText = Annotated[str, IsPath("write")]
"""Type of a setting that names a folder that is written."""
CodeText = Annotated[str, IsPath("code")]
"""Type of a setting that names code: `file.py:function`, an address, or a name of the house."""
LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Limits of Linux in bytes: of a path, and of one name in it."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that checks its numbers against their ranges, and
    then itself (`__post_init__`). Reading it from YAML refuses unknown keys.
    """
    own = getattr(cls, "__post_init__", None)  # its own checks, or those that it inherits

    def check(self: Any) -> None:
        check_ranges(self)
        if own is not None:
            own(self)

    cls.__post_init__ = check  # type: ignore[attr-defined]
    made = dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)
    made.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[attr-defined]
    return made


def check_ranges(value: Any) -> None:
    """Raise `ValueError` unless every number of a configuration object is finite and in the range
    that its class declares, and every text can be written as UTF-8.

    The message names the class and the field, as in `RolloutConfig.group_size`.
    """
    for name, allowed in ranges_of(type(value)).items():
        found = getattr(value, name)
        items = found if isinstance(found, tuple) else (found,)
        if isinstance(found, dict):
            items = (*found, *found.values())
        for item in items:
            problem = ""
            if isinstance(item, str):
                problem = text_problem(item)
                if not problem and isinstance(allowed, IsPath):
                    problem = allowed.problem(item)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                problem = (allowed if isinstance(allowed, Range) else FINITE).problem(item)
            if problem:
                raise ValueError(f"{type(value).__name__}.{name} {problem}")


FINITE = Range(-8e307, 8e307, fix="set it to a finite number")


@functools.cache
def ranges_of(kind: type) -> dict[str, Range | IsPath | None]:
    """The ranges that a configuration class declares with `Annotated`: {field: its `Range` or
    `IsPath`}, None for a field without one.
    """
    found: dict[str, Range | IsPath | None] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        found[name] = next((mark for mark in marks if isinstance(mark, Range | IsPath)), None)
    return found


def text_problem(text: str) -> str:
    """What is wrong with a text of a recipe, and what to set; empty if nothing is."""
    if "\0" in text:
        return f"is {shortened(repr(text))}, which holds the character NUL; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"is {shortened(ascii(text))}, which is not Unicode text (half a pair); mend it"
    return ""


def shortened(text: str, limit: int = 80) -> str:
    """`text` on one line, cut to `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds.

    Messages say what was found and what to set.
    """
    if not condition:
        raise ValueError(message)


def as_plain(value: Any) -> Any:
    """A configuration as nested dicts and lists, in the order of its fields; for YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value
