"""What every configuration class is made of: a frozen, closed, keyword-only dataclass, and checks
that carry the fix.

Each room keeps its own ``config.py`` beside its code; ``megarl.config`` lays them side by side.
Nothing here or there imports torch, ray, vllm or deepspeed, so reading a recipe costs milliseconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that refuses unknown keys when it is read from
    YAML.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)
    made.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[attr-defined]
    return made


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds; the message says what was found and
    what to set.
    """
    if not condition:
        raise ValueError(message)


def require_range(
    name: str, value: float | None, low: float | None = None, high: float | None = None
) -> None:
    """Raise unless `low <= value <= high`; `None` for a bound means unbounded, `None` for the value
    means unset.
    """
    if value is None:
        return
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = " and ".join(
            part
            for part in (
                f">= {low:g}" if low is not None else "",
                f"<= {high:g}" if high is not None else "",
            )
            if part
        )
        raise ValueError(f"{name} is {value}; set it to a number {bounds}")


def as_plain(value: Any) -> Any:
    """A configuration as nested plain dicts and lists, in the order of its fields: what goes into
    YAML.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value
