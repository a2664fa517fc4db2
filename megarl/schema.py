"""The basis of every configuration class: frozen, keyword-only dataclasses that check themselves.

Each package has its `config.py` beside its code; `megarl.config` combines them. None of these
imports torch, ray, vllm or deepspeed, so that reading a recipe takes milliseconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass; reading it from YAML refuses unknown keys."""
    made = dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)
    made.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[attr-defined]
    return made


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds.

    Messages say what was found and what to set.
    """
    if not condition:
        raise ValueError(message)


def require_range(
    name: str, value: float | None, low: float | None = None, high: float | None = None
) -> None:
    """Raise `ValueError` unless `low <= value <= high`.

    A bound of None is no bound, a value of None valid.
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
