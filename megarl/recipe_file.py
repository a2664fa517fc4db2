"""Recipes as plain trees: nested dicts of texts, numbers, truth values and lists.

    read_tree(recipe.yaml) -> tree          YAML, where every mistake is an error with its line
    override(tree, RunConfig, ["--training.zero_stage", "3"]) -> tree

`megarl.config` makes a configuration of the tree.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from megarl.peer_names import NAMES
from megarl.schema import text_problem

LARGEST_BYTES = 2**20
"""Size limit of a recipe file in bytes; real ones have a few kilobytes."""
MOST_VALUES = 10_000
"""Largest number of values in a recipe, with every alias (`*name`) written out."""
DEEPEST = 20
"""Maximum nesting depth of sections and lists in a recipe."""


class _Loader(yaml.SafeLoader):
    """Reads the YAML of recipes: texts, numbers, truth values, null, lists and mappings.

    Differs from PyYAML's `SafeLoader`: `1e-4` is a number and `010` is 10, as in YAML 1.2; a date
    is a text; other tags, keys that are no texts, and keys that occur twice are errors.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # int("5,000 digits"), !!bool "x", !!float "y"
            raise _mistake(node, f"the value cannot be read: {error}") from None
        problem = text_problem(value) if isinstance(value, str) else ""
        if problem:
            raise _mistake(node, f"a text {problem}")
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise _mistake(key, "a key is not a text; write the name of a setting")
            if key.value in first:
                raise _mistake(
                    key,
                    f"the key '{key.value}' is here and in line {_line(first[key.value])}, which"
                    " would be discarded; join the two",
                )
            first[key.value] = key
        return super().construct_mapping(node, deep)


def _line(node: yaml.Node) -> int:
    """Line of a YAML node, from 1."""
    return node.start_mark.line + 1


def _mistake(node: yaml.Node, said: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, said, node.start_mark)


def _number(loader: _Loader, node: Any) -> int:
    text = node.value.replace("_", "")
    bare = text.lstrip("+-").lower()
    base = 16 if bare.startswith("0x") else 8 if bare.startswith("0o") else 10
    return int(text, base)


KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
    for kind in KINDS
} | {None: yaml.SafeLoader.construct_undefined, "tag:yaml.org,2002:int": _number}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in ("timestamp", "int", "float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes a text in quotes wherever `_Loader` would take the bare text for a number."""


NUMBERS = {
    "int": r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9][0-9_]*)$",
    "float": r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
}
for _kind, _pattern in NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list("-+0123456789.")
        )


def dump(tree: Any) -> str:
    """The YAML text of a tree, which `parse` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML recipe. Raises `ValueError` that names file and line."""
    where = f"recipe {path}"
    try:
        if path.is_dir():
            inside = "/recipe.yaml --resume true" if (path / "recipe.yaml").is_file() else ""
            raise ValueError(
                f"{where} is a folder; pass a .yaml file{inside and f', {path}{inside}'}"
            )
        if not path.is_file():
            raise ValueError(
                f"{where} does not exist; pass the path of a .yaml file (see launch/recipes/)"
            )
        size = path.stat().st_size
        data = path.read_bytes() if size <= LARGEST_BYTES else b""
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}; pass another path") from None
    if size > LARGEST_BYTES:
        raise ValueError(f"{where} has {size:,} bytes, too many for a recipe; pass a .yaml file")
    try:
        tree = parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is no text (byte {error.start}: {error.reason}); pass a .yaml file in UTF-8"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(
            f"{where} is not a mapping of settings, as in `folder: runs/mine`; see launch/recipes/"
        )
    return tree


def parse(text: str) -> Any:
    """The value of a YAML text. Raises `ValueError`, whose message begins with the line."""
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except RecursionError:
        raise ValueError(f" is nested deeper than {DEEPEST} levels; write it flatter") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        said = " ".join(f"{error.problem or error.context}".split())
        kind = "" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML"
        raise ValueError(f"{line}{kind}: {said}") from None
    except yaml.YAMLError as error:
        raise ValueError(f" is not YAML: {' '.join(str(error).split())}") from None
    _refuse_huge(tree)
    return tree


def _refuse_huge(tree: Any) -> None:
    """Raise `ValueError` for a tree that is nested too deeply, contains itself, or has too many
    values once its aliases are written out: some lines of YAML can stand for gigabytes.
    """
    sizes: dict[int, int] = {}

    def size(node: Any, depth: int) -> int:
        if depth > DEEPEST:  # also a list that contains itself
            raise ValueError(f" is nested deeper than {DEEPEST} levels; write it flatter")
        if not isinstance(node, dict | list):
            return 1
        if id(node) not in sizes:
            inner = node.values() if isinstance(node, dict) else node
            sizes[id(node)] = 1 + sum(size(item, depth + 1) for item in inner)
        return sizes[id(node)]

    found = size(tree, 0)
    if found > MOST_VALUES:
        raise ValueError(
            f" has {found:,} values with its aliases written out, more than {MOST_VALUES:,};"
            " shorten it"
        )


@functools.cache
def fields_of(kind: Any) -> dict[str, Any]:
    """{setting: its type} of a configuration class; empty for any other type."""
    return typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def has_key(kind: Any, key: str) -> bool:
    """Whether configuration class `kind` has a setting or section with the dotted name `key`."""
    for part in key.split("."):
        kind = fields_of(kind).get(part)
        if kind is None:
            return False
    return True


def peers_mean(kind: Any, name: str) -> str:
    """What other trainers mean by the setting `name`, in words of configuration class `kind`; empty
    if nothing is known.
    """
    ours = [one for one in NAMES.get(name.lower(), ()) if has_key(kind, one.split()[0])]
    return f"here it is {' or '.join(ours)}" if ours else ""


def suggestion(kind: Any, keys: typing.Sequence[int | str]) -> str:
    """Hint for the unknown key at path `keys` of configuration class `kind`: what other trainers
    mean by it, the closest known key, or all known keys.
    """
    if ours := peers_mean(kind, str(keys[-1])):
        return f"; {ours}"
    for part in keys[:-1]:
        if typing.get_origin(kind) is dict:  # a key of the user's
            kind = typing.get_args(kind)[1]
            continue
        if typing.get_origin(kind) is tuple:  # a number in a list of sections
            kind = typing.get_args(kind)[0]
            continue
        kind = typing.get_type_hints(kind)[str(part)]
    known = [field.name for field in dataclasses.fields(kind)]
    close = difflib.get_close_matches(str(keys[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known)}"


def override(tree: dict[str, Any], kind: Any, words: list[str]) -> dict[str, Any]:
    """A copy of `tree` with the settings of a command line: `--section.key value`, or
    `--section.key=value`; several values make a list. Raises `ValueError` for a word that is no
    setting of configuration class `kind`.
    """
    tree = copy.deepcopy(tree)
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            key, equals, value = word.lstrip("-").partition("=")
            fix = "write --section.key value"
            if has_key(kind, key.replace("-", "_")):
                value = value if equals else words[0] if words else "VALUE"
                fix = f"did you mean --{key} {value}?"
            raise ValueError(f"{word!r} is no setting; {fix}")
        name, equals, value = word[2:].partition("=")
        keys = name.replace("-", "_").split(".")
        values = [value] if equals else []
        while words and not equals and not words[0].startswith("--"):
            values.append(words.pop(0))
        place: Any = tree
        for key in keys[:-1]:
            inner = place.get(key)
            place[key] = inner if isinstance(inner, dict) else {}
            place = place[key]
        place[keys[-1]] = _value(_type(kind, keys, word), values, word)
    return tree


def _type(kind: Any, keys: list[str], word: str) -> Any:
    """The type of the setting at path `keys` of configuration class `kind`."""
    root = kind
    for depth, key in enumerate(keys):
        hints = fields_of(kind)
        if key not in hints:
            if ours := peers_mean(root, keys[-1]):
                raise ValueError(f"{word}: unknown key; {ours}")
            close = difflib.get_close_matches(key, hints, n=1)
            meant = ".".join([*keys[:depth], *close, *keys[depth + 1 :]])
            hint = f"did you mean '--{meant}'?" if close else f"known keys: {', '.join(hints)}"
            if not hints:
                hint = f"{'.'.join(keys[:depth])} is no section"
            raise ValueError(f"{word}: {'.'.join(keys[: depth + 1])}: unknown key; {hint}")
        kind = hints[key]
    if dataclasses.is_dataclass(kind):
        inner = ", ".join(f"--{'.'.join(keys)}.{field.name}" for field in dataclasses.fields(kind))
        raise ValueError(f"{word} is a section; set one of {inner}")
    return kind


def _value(kind: Any, values: list[str], word: str) -> Any:
    """The value that words of a command line give to a setting of type `kind`."""
    if typing.get_origin(kind) is tuple:
        found = [_parsed(value, word) for value in values]
        return found[0] if len(found) == 1 and isinstance(found[0], list) else found
    if len(values) != 1:
        raise ValueError(f"{word} has {len(values)} values; write one: {word} VALUE")
    choices = typing.get_args(kind)  # of a Literal, or the types of a union
    if (kind is bool or True in choices) and values[0].lower() in ("true", "false"):
        return values[0].lower() == "true"
    takes_text = kind is str or any(isinstance(one, str) for one in choices)
    if takes_text:
        problem = text_problem(values[0])
        if problem:
            raise ValueError(f"{word} {problem}")
        return values[0]
    # Python's None is YAML's null.
    return None if values[0] == "None" else _parsed(values[0], word)


def _parsed(text: str, word: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{word} {text[:80]!r}{error}") from None
