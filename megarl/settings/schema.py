"""The basis of every configuration class: pydantic models that are frozen and check themselves.

What a setting may be is declared beside its type, and every instance checks it:

    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    folder: Annotated[str, Needs("set it to where the run may write")] = ""
    sapo_positive: Annotated[float, Range(1e-3, 1e3), Of("loss", "sapo")] = 1.0
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
    """Marks a numeric setting, in `Annotated[int, Range(1, 10)]`: the number, or each number in its
    list or dict, must be from `low` to `high`, both included; None is allowed too.
    """

    low: float
    high: float
    or_zero: bool = False
    """0 is allowed too, where it turns something off."""
    fix: str = ""
    """Advice for the error message; empty names the range."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        """Called by pydantic with the setting's value, a number or a list or dict of numbers.
        Returns the value unchanged if all its numbers are in the range; otherwise raises
        `PydanticCustomError`, whose text is `fix` or names the range.
        """
        numbers = value if isinstance(value, tuple) else (value,)
        for one in value.values() if isinstance(value, dict) else numbers:
            if not (one is None or (self.or_zero and one == 0) or self.low <= one <= self.high):
                zero = "0, or " if self.or_zero else ""
                usual = f"set it to {zero}a number >= {self.low:.10g} and <= {self.high:.10g}"
                raise refused(f"is {shortened(str(one))}; {self.fix or usual}")
        return value


FILE = "path/to/file.py:function"
"""Among the values of `Of`: stands for every name of the user's own code,
`path/to/file.py:function`."""


def is_own(name: object) -> bool:
    """Whether the value of a setting has the form of a name of user code,
    `path/to/file.py:function`: a text with ".py:" in it. The file is not looked at.
    """
    return isinstance(name, str) and ".py:" in name


class Of:
    """Marks a setting of a configuration class, as in `Annotated[float, Of("loss", "sapo")]`, that
    has an effect only while another setting of the class, `key`, has one of `values`, or, if no
    `values` are given, is not empty, 0, false or null. Otherwise the marked setting must have its
    default, or making an object of the class raises `ValueError`.

    `key` is dotted for a setting in a section of the class. `why`: reason in the error message, by
    default that `key` has a value that does not use the marked setting. `fix`: what the message
    advises besides leaving the marked setting out, by default to set `key`; "" for nothing.
    """

    def __init__(self, key: str, *values: object, why: str = "", fix: str | None = None) -> None:
        self.key, self.values, self.why, self.fix = key, values, why, fix

    def check(self, owner: "Config", name: str) -> None:
        """Raise `ValueError` if the setting `name` of `owner`, a configuration object, differs from
        its default although the value of the setting `key` leaves it without effect.
        """
        found = operator.attrgetter(self.key)(owner)
        if owner.is_default(name) or (found in self.values if self.values else found):
            return
        if FILE in self.values and is_own(found):
            return
        other = f"{type(owner).__name__}.{self.key}"
        why = self.why or f"but {other} is {_shown(found)}, which does not use it"
        to = f" to {' or '.join(map(repr, self.values))}" if self.values else ""
        fix = f"set {other}{to}" if self.fix is None else self.fix
        raise ValueError(f"{owner.told(name)}, {why}; leave it out{fix and f', or {fix}'}")


class Excludes:
    """Marks a setting, in `Annotated[str, Excludes("sources")]`: of this setting and the setting
    `key` of its class, only one may differ from its default. `why`: reason for the error message.
    """

    def __init__(self, key: str, why: str = "") -> None:
        self.key, self.why = key, why

    def check(self, owner: "Config", name: str) -> None:
        """Raise `ValueError` if the setting `name` of `owner`, a configuration object, and the
        setting `key` both differ from their defaults.
        """
        other = f"beside {type(owner).__name__}.{self.key}{self.why and f', {self.why}'}"
        is_alone = owner.is_default(name) or owner.is_default(self.key)
        require(is_alone, f"{owner.told(name)} {other}; set one of the two")


class Needs:
    """Marks a text setting that must not be empty, in `Annotated[str, Needs("set it to a file")]`;
    with `key`, marks a section of settings in which the setting `key` must not be empty. `fix`:
    what the error message advises.
    """

    def __init__(self, fix: str, key: str = "") -> None:
        self.fix, self.key = fix, key

    def check(self, owner: "Config", name: str) -> None:
        """Raise `ValueError` if the setting `name` of `owner`, a configuration object, is empty;
        with `key`, if the setting `key` in the section `name` is empty.
        """
        place = f"{name}.{self.key}" if self.key else name
        full = f"{type(owner).__name__}.{place}"
        require(operator.attrgetter(place)(owner), f"{full} is empty; {self.fix}")


class Without:
    """Marks a setting that its class shares with others but cannot use, in `Annotated[...,
    Without(why="...")]`, so that the setting must keep its default; with `keys`, marks a section in
    which the settings `keys` must keep theirs. `why`: reason for the error message.
    """

    def __init__(self, *keys: str, why: str) -> None:
        self.keys, self.why = keys, why

    def check(self, owner: "Config", name: str) -> None:
        """Raise `ValueError`, with the reason, if the setting `name` of `owner`, a configuration
        object, or one of the named settings in it, has another value than its default.
        """
        for place in [f"{name}.{key}" for key in self.keys] or [name]:
            require(owner.is_default(place), f"{owner.told(place)}, {self.why}; leave it out")


Mark = Of | Excludes | Needs | Without


class Config(BaseModel):
    """Base class of all configuration classes: a frozen pydantic model whose fields are settings.
    Objects are made by keyword arguments; unknown keys, wrong types and values that do not fit
    raise `ValueError`. Subclasses may define `check`.
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
        """Raise `ValueError` if settings do not fit each other; called after every construction.
        Subclasses override it. Where a message writes a setting as `ThisConfig.name`, the user is
        shown the setting's dotted key instead.
        """

    def is_default(self, key: str) -> bool:
        """Whether the setting `key`, dotted for one in a section, has its default value. For a
        property: whether its value is false.
        """
        *parents, last = key.split(".")
        section = functools.reduce(getattr, parents, self)
        value, usual = getattr(section, last), defaults(type(section))
        return value == usual[last] if last in usual else not value

    def told(self, key: str) -> str:
        """Text that names the setting `key`, dotted for one in a section, with its value, such as
        "RunConfig.steps is 5", for the messages of `check`.
        """
        value = operator.attrgetter(key)(self)
        what = "has settings" if isinstance(value, Config | dict) else f"is {_shown(value)}"
        return f"{type(self).__name__}.{key} {what}"


def section(kind: type[C], **values: Any) -> C:
    """The default of a field that is a section of settings: an object of configuration class
    `kind`, with `values` in place of its defaults. Used as `name: Kind = section(Kind)`; what is
    returned is a pydantic `Field`, which makes the section whenever none is given.
    """
    return Field(default_factory=functools.partial(kind, **values))


@functools.cache
def defaults(kind: type[Config]) -> dict[str, Any]:
    """{setting: its default} of a configuration class."""
    fields = kind.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields}


@functools.cache
def _marks(kind: type[Config]) -> list[tuple[str, Mark]]:
    """(setting, mark) of a configuration class."""
    fields = kind.model_fields.items()
    return [(name, one) for name, at in fields for one in at.metadata if isinstance(one, Mark)]


def replace(value: T, **changes: Any) -> T:
    """A copy of `value`, a configuration or any dataclass object, with the fields in `changes`
    replaced. All checks of a configuration are made again, which may raise `ValueError`.
    """
    if isinstance(value, Config):
        return type(value)(**(dict(value) | changes))
    return dataclasses.replace(value, **changes)  # pyright: ignore[reportArgumentType]


def leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Iterate over (dotted key, value) of each setting in nested dicts. Each item of a tuple has a
    key of its own, as in `prompts.sources[0].weight`; a list is one value. `prefix`: dotted key of
    `tree` itself.
    """
    if isinstance(tree, dict | tuple) and tree:
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in inner:
            mark = f"[{key}]" if isinstance(tree, tuple) else f".{key}"
            yield from leaves(value, f"{prefix}{mark}".removeprefix("."))
    else:
        yield prefix, tree


CLASS_NAME = re.compile(r"\b[A-Z]\w*Config\.")
"""The name of a configuration class before a setting's, in the message of a check."""
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
    what to set.

    `hint`: called with the path of an unknown key; returns what the text says after "unknown key",
    "" for nothing. `root`: dotted key of the object that was checked, with which all keys begin.
    """
    found = []
    for issue in error.errors(include_url=False):
        kind, said, place = issue["type"], issue["msg"], dotted([root, *issue["loc"]])
        if kind == "value_error":  # of a class, which may be used in several places
            said = str(issue.get("ctx", {})["error"])
            found.append(CLASS_NAME.sub(lambda _, at=place: f"{at}." if at else "", said))
        elif kind == "extra_forbidden":
            found.append(f"{place}: unknown key{hint(issue['loc'])}")
        elif kind == "missing":
            found.append(f"{place} is missing; set it")
        elif kind == "refused":
            found.append(f"{place} {said}")
        else:
            should = SHOULD.get(kind, said.lower().replace("input", "it"))
            found.append(f"{place or 'the recipe'} is {_shown(issue['input'])}; {should}")
    return found


def _shown(value: object) -> str:
    """A value as a recipe writes it, on one line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shortened(repr(value))


def dotted(keys: Sequence[int | str]) -> str:
    """A path of keys as users write it: ["prompts", "sources", 0, "weight"] gives
    "prompts.sources[0].weight".
    """
    named = [key for key in keys if key not in ("", "[key]")]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in named)[1:]


def refused(said: str) -> PydanticCustomError:
    """Pydantic's error for the value of a single setting, to be raised by the caller. The user
    reads the setting's dotted key and then `said`, such as "is 5; set it to ...".
    """
    return PydanticCustomError("refused", "{said}", {"said": said})
