"""The basis of every configuration class: frozen pydantic models that check themselves.

    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    folder: Annotated[str, Needs("set it to where the run may write")] = ""
    sapo_positive: Annotated[float, Range(1e-3, 1e3), Of("loss", "sapo")] = 1.0

What a setting may be is declared beside its type.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from megarl.errors import require, shortened

T = TypeVar("T")
C = TypeVar("C", bound="Config")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Marks a setting whose number, or each number in its list or dict, must be from `low` to
    `high`, both included; None is allowed too.
    """

    low: float
    high: float
    or_zero: bool = False
    """0 is allowed too."""
    fix: str = ""
    """Advice for the error message; empty: the range."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        for n in value.values() if isinstance(value, dict) else numbers:
            if not (n is None or (self.or_zero and n == 0) or self.low <= n <= self.high):
                zero = "0, or " if self.or_zero else ""
                usual = f"set it to {zero}a number >= {self.low:.10g} and <= {self.high:.10g}"
                raise refused(f"is {shortened(str(n))}; {self.fix or usual}")
        return value


FILE = "path/to/file.py:function"
"""Among the values of `Of`: every name of the user's own code."""


def is_own(name: object) -> bool:
    """Whether a setting's value names code of the user's own, `path/to/file.py:function`."""
    return isinstance(name, str) and ".py:" in name


class Of:
    """Marks a setting that must have its default unless the setting `key` of its class (dotted for
    one in a section) has one of `values`, or without `values` is set at all. `why` and `fix`:
    reason and advice in the message instead of its own; "" for no advice.
    """

    def __init__(self, key: str, *values: object, why: str = "", fix: str | None = None) -> None:
        self.key, self.values, self.why, self.fix = key, values, why, fix

    def check(self, owner: "Config", name: str) -> None:
        value = operator.attrgetter(self.key)(owner)
        if owner.is_default(name) or (value in self.values if self.values else value):
            return
        if FILE in self.values and is_own(value):
            return
        other = f"{type(owner).__name__}.{self.key}"
        why = self.why or f"but {other} is {_shown(value)}, which does not use it"
        to = f" to {' or '.join(map(repr, self.values))}" if self.values else ""
        fix = f"set {other}{to}" if self.fix is None else self.fix
        raise ValueError(f"{owner.told(name)}, {why}; leave it out{fix and f', or {fix}'}")


class Excludes:
    """Marks a setting, as in `Annotated[str, Excludes("sources")]`, that may not be set beside
    `key`. `why`: reason in the message.
    """

    def __init__(self, key: str, why: str = "") -> None:
        self.key, self.why = key, why

    def check(self, owner: "Config", name: str) -> None:
        other = f"beside {type(owner).__name__}.{self.key}{self.why and f', {self.why}'}"
        is_alone = owner.is_default(name) or owner.is_default(self.key)
        require(is_alone, f"{owner.told(name)} {other}; set one of the two")


class Needs:
    """Marks a text setting that must not be empty, or with `key` a section in which `key` must not.
    `fix`: advice in the message.
    """

    def __init__(self, fix: str, key: str = "") -> None:
        self.fix, self.key = fix, key

    def check(self, owner: "Config", name: str) -> None:
        key = f"{name}.{self.key}" if self.key else name
        full = f"{type(owner).__name__}.{key}"
        require(operator.attrgetter(key)(owner), f"{full} is empty; {self.fix}")


class Without:
    """Marks a setting that its class cannot use and that must keep its default, or with `keys` a
    section in which these settings must. `why`: reason in the message.
    """

    def __init__(self, *keys: str, why: str) -> None:
        self.keys, self.why = keys, why

    def check(self, owner: "Config", name: str) -> None:
        for path in [f"{name}.{key}" for key in self.keys] or [name]:
            require(owner.is_default(path), f"{owner.told(path)}, {self.why}; leave it out")


Mark = Of | Excludes | Needs | Without


class Config(BaseModel):
    """Base of all configuration classes: a frozen pydantic model, made by keyword arguments.
    Unknown keys, wrong types and values that do not fit raise `ValueError`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("; ".join(problems(error, root=type(self).__name__))) from None

    # Sections inside of a configuration are made without `__init__`, as by BaseModel's own.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {k: tuple(value) if isinstance(value, list) else value for k, value in tree.items()}

    @model_validator(mode="after")
    def _checked(self) -> Self:
        for name, mark in _marks(type(self)):
            mark.check(self, name)
        self.check()
        return self

    def check(self) -> None:
        """Raise `ValueError` if settings do not fit each other; for subclasses to override.
        `ThisConfig.name` in a message is shown as the setting's dotted key.
        """

    def is_default(self, key: str) -> bool:
        """Whether a setting, dotted for one in a section, has its default value, or a property is
        false.
        """
        *parents, last = key.split(".")
        section = functools.reduce(getattr, parents, self)
        value, usual = getattr(section, last), defaults(type(section))
        return value == usual[last] if last in usual else not value

    def told(self, key: str) -> str:
        """A setting, which may be dotted, with its value, as in "RunConfig.steps is 5"."""
        value = operator.attrgetter(key)(self)
        problem = "has settings" if isinstance(value, Config | dict) else f"is {_shown(value)}"
        return f"{type(self).__name__}.{key} {problem}"


def section(kind: type[C], **values: Any) -> C:
    """The default of a field that is a section, as in `name: Kind = section(Kind)`: an object of
    `kind` with `values` in place of its defaults.
    """
    return Field(default_factory=functools.partial(kind, **values))


@functools.cache
def defaults(kind: type[Config]) -> dict[str, Any]:
    """{setting: default} of a configuration class."""
    fields = kind.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields}


@functools.cache
def _marks(kind: type[Config]) -> list[tuple[str, Mark]]:
    """(setting, mark) of a configuration class."""
    fields = kind.model_fields.items()
    return [(name, mark) for name, at in fields for mark in at.metadata if isinstance(mark, Mark)]


def replace(value: T, **changes: Any) -> T:
    """A copy of a configuration or dataclass object with fields replaced. A configuration is
    checked again, which may raise `ValueError`.
    """
    if isinstance(value, Config):
        return type(value)(**(dict(value) | changes))
    return dataclasses.replace(value, **changes)  # pyright: ignore[reportArgumentType]


def leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Iterate over (dotted key, value) in nested dicts below the key `prefix`. Items of tuples have
    keys of their own, as in `prompts.sources[0].weight`; a list is one value.
    """
    if isinstance(tree, dict | tuple) and tree:
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in inner:
            mark = f"[{key}]" if isinstance(tree, tuple) else f".{key}"
            yield from leaves(value, f"{prefix}{mark}".removeprefix("."))
    else:
        yield prefix, tree


CLASS_NAME = re.compile(r"\b[A-Z]\w*Config\.")
"""A configuration class before its setting, in the message of a check."""
SHOULD = {
    "model_type": "it should be a section of settings",
    "tuple_type": "it should be a list",
    "dict_type": "it should be a section of names with values",
}
"""{type of pydantic's error: our words}"""


def problems(
    error: ValidationError,
    hint: Callable[[tuple[int | str, ...]], str] = lambda keys: "",
    root: str = "",
) -> list[str]:
    """The mistakes in pydantic's error, each as one text with the dotted key, what was found and
    what to set. `hint` gives what the text says after "unknown key"; `root` is the checked object's
    key.
    """
    texts = []
    for issue in error.errors(include_url=False):
        code, text, key = issue["type"], issue["msg"], dotted([root, *issue["loc"]])
        if code == "value_error":  # of a class, which may be used in several places
            text = str(issue.get("ctx", {})["error"])
            texts.append(CLASS_NAME.sub(lambda _, at=key: f"{at}." if at else "", text))
        elif code == "extra_forbidden":
            texts.append(f"{key}: unknown key{hint(issue['loc'])}")
        elif code == "missing":
            texts.append(f"{key} is missing; set it")
        elif code == "refused":
            texts.append(f"{key} {text}")
        else:
            should = SHOULD.get(code, text.lower().replace("input", "it"))
            texts.append(f"{key or 'the recipe'} is {_shown(issue['input'])}; {should}")
    return texts


def _shown(value: object) -> str:
    """A value as a recipe writes it, on one line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shortened(repr(value))


def dotted(keys: Sequence[int | str]) -> str:
    """["prompts", "sources", 0, "weight"] as users write it: "prompts.sources[0].weight"."""
    named = [key for key in keys if key not in ("", "[key]")]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in named)[1:]


def refused(said: str) -> PydanticCustomError:
    """Pydantic's error for one setting, for the caller to raise; the user reads the dotted key and
    then `said`, such as "is 5; set it to ...".
    """
    return PydanticCustomError("refused", "{said}", {"said": said})
