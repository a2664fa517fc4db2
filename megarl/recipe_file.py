"""Recipes as plain trees: nested dicts of texts, numbers, truth values and lists.

    read_tree(recipe.yaml) -> tree          YAML, where every mistake is an error with its line
    override(tree, RunConfig, ["--training.zero_stage", "3"])

`megarl.config` makes a configuration of the tree.
"""

from __future__ import annotations

import difflib
import itertools
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from megarl.errors import shortened
from megarl.peer_names import NAMES
from megarl.schema import Config, dotted

LARGEST_BYTES = 2**20
"""Size limit of a recipe file in bytes; real ones have a few kilobytes."""
MOST_VALUES = 10_000
"""Largest number of values in a recipe, with every alias (`*name`) written out."""
DEEPEST = 20
"""Maximum nesting depth of sections and lists in a recipe."""
RENAMED = {
    "rollout.samples_per_group": "rollout.group_size",
    "training.mini_batches": "training.num_mini_batches",
    "weight_sync.carrier": "weight_sync.transport",
    "publish": "weight_sync",
    "rollout.engines_per_relay": "needless, as no run has relays; leave it out",
}
"""{key of older recipes: its present name}; old keys are refused with the new name."""
TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads the YAML of recipes: texts, numbers, truth values, null, lists and mappings.

    Differs from PyYAML's `SafeLoader`: `1e-4` is a number and `010` is 10, as in YAML 1.2; a date
    is a text; other tags, keys that are no texts, and keys that occur twice are errors.
    """

    num_values = 0

    def value(self, node: yaml.Node, lines: dict[str, int], key: str = "", depth: int = 0) -> Any:
        """The value of a node at the dotted `key`; the lines of settings are added to `lines`."""
        self.num_values += 1
        if depth > DEEPEST:  # also a list that contains itself
            raise _mistake(node, f"nested deeper than {DEEPEST} levels; write it flatter")
        if self.num_values > MOST_VALUES:  # some lines of YAML can stand for gigabytes
            raise _mistake(
                node, f"more than {MOST_VALUES:,} values with its aliases written out; shorten it"
            )
        lines.setdefault(key, _line(node))
        if node.tag == f"{TAG}seq" and isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self.value(one, lines, f"{key}[{n}]", depth + 1) for n, one in items]
        if node.tag != f"{TAG}map" or not isinstance(node, yaml.MappingNode):
            return self.scalar(node)
        first: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            text = str(name.value)
            if text in first and name.tag != f"{TAG}merge":
                raise _mistake(
                    name,
                    f"the key '{text}' is here and in line {_line(first[text])}, which would be"
                    " discarded; join the two",
                )
            first[text] = name
        self.flatten_mapping(node)
        node.value = list({str(name.value): (name, one) for name, one in node.value}.values())
        found = {}
        for name, one in node.value:
            if name.tag != f"{TAG}str":
                raise _mistake(name, "a key is not a text; write the name of a setting")
            inner = f"{key}.{name.value}".removeprefix(".")
            lines[inner] = _line(name)
            found[self.scalar(name)] = self.value(one, lines, inner, depth + 1)
        return found

    def scalar(self, node: yaml.Node) -> Any:
        """A text, number, truth value or null."""
        try:
            return readable(self.construct_object(node))
        except yaml.YAMLError:
            raise
        except Exception as error:  # int("5,000 digits"), !!bool "x", !!float "y"
            raise _mistake(node, f"the value cannot be read: {error}") from None


def readable(value: Any) -> Any:
    """The value of a setting. Raises `ValueError` for a text that UTF-8 or the system has not."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f" {shortened(repr(value))} holds the character NUL; remove it")
    if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        raise ValueError(f" {shortened(ascii(value))} is not Unicode text (half a pair); mend it")
    return value


def _line(node: yaml.Node) -> int:
    """Line of a YAML node, from 1."""
    return node.start_mark.line + 1


def _mistake(node: yaml.Node, said: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, said, node.start_mark)


def _number(loader: _Loader, node: Any) -> int:
    text = node.value.replace("_", "")
    bare = text.lstrip("+-").lower()
    return int(text, {"0x": 16, "0o": 8}.get(bare[:2], 10))


class _Dumper(yaml.SafeDumper):
    """Writes a text in quotes wherever `_Loader` would take the bare text for a number."""


_Loader.yaml_constructors = {
    f"{TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{TAG}{kind}"]
    for kind in ("null", "bool", "float", "str")
} | {None: yaml.SafeLoader.construct_undefined, f"{TAG}int": _number}
_Loader.yaml_implicit_resolvers = {
    first: [one for one in known if one[0].removeprefix(TAG) not in ("timestamp", "int", "float")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
NUMBERS = {
    "int": r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9][0-9_]*)$",
    "float": r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
}
for _kind, _pattern in NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{TAG}{_kind}", re.compile(_pattern), list("-+0123456789."))


def dump_yaml(tree: Any) -> str:
    """The YAML text of a tree, which `parse_yaml` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, lines: dict[str, int] | None = None) -> Any:
    """The value of a YAML text; the line of each setting is added to `lines`, by its dotted key.

    Raises `ValueError`, whose message begins with the line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.value(node, {} if lines is None else lines)
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


def read_tree(path: Path, lines: dict[str, int] | None = None) -> dict[str, Any]:
    """Read a YAML recipe; `lines`: see `parse_yaml`. Raises `ValueError` with file and line."""
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
        tree = parse_yaml(data.decode("utf-8-sig"), lines)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is no text (byte {error.start}: {error.reason}); pass a .yaml file in UTF-8"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(
            f"{where} is not a mapping of settings, as in `folder: runs/mine`; see launch/recipes/"
        )
    return tree or {}


def is_section(kind: Any) -> TypeGuard[type[Config]]:
    """Whether a type is a configuration class."""
    return isinstance(kind, type) and issubclass(kind, Config)


def walk(kind: Any, keys: Sequence[int | str]) -> tuple[Any, int]:
    """(type of the setting, number of keys) at a path of keys in configuration class `kind`, as far
    as there are such settings.
    """
    for depth, key in enumerate(keys):
        inner = typing.get_args(kind)
        if is_section(kind) and key in kind.model_fields:
            kind = kind.model_fields[key].annotation
        elif is_section(kind) or not inner:
            return kind, depth
        else:  # a number in a list of sections, or a name of the user's
            kind = inner[typing.get_origin(kind) is dict]
    return kind, len(keys)


def has_key(kind: Any, key: str) -> bool:
    """Whether configuration class `kind` has a setting or section with the dotted name `key`."""
    return walk(kind, key.split("."))[1] == key.count(".") + 1


def hint(kind: Any, keys: Sequence[int | str]) -> str:
    """What to say of an unknown key at a path of keys in configuration class `kind`: its new name,
    what other trainers mean by it, the closest known key, or all known keys.
    """
    at, depth = walk(kind, keys)
    if new := RENAMED.get(dotted(keys[: depth + 1])):
        return f"; it is now {new}"
    if not is_section(at):
        return f"; {dotted(keys[:depth])} is no section"
    theirs = NAMES.get(str(keys[-1]).lower(), ())
    if ours := [one for one in theirs if has_key(kind, one.split()[0])]:
        return f"; here it is {' or '.join(ours)}"
    known = [*at.model_fields]
    close = difflib.get_close_matches(str(keys[depth]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known)}"


def put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys in nested dicts, of which those that lack are made."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


def override(tree: dict[str, Any], kind: Any, words: Sequence[str]) -> list[str]:
    """Change `tree` by the settings of a command line: `--section.key value`, or
    `--section.key=value`; several values make a list. Returns the dotted keys,
    with those of the sections. Raises `ValueError` for a word that is no setting; keys that
    configuration class `kind` has not are set too.
    """
    changed, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        keys = name.replace("-", "_").split(".")
        if not word.startswith("--") or not name:
            value = value if equals else left[0] if left else "VALUE"
            known = has_key(kind, ".".join(keys))
            fix = f"did you mean --{name} {value}?" if known else "write --section.key value"
            raise ValueError(f"{word!r} is no setting; {fix}")
        values = [value] if equals else [*itertools.takewhile(lambda x: x[:2] != "--", left)]
        del left[: 0 if equals else len(values)]
        at, depth = walk(kind, keys)
        if is_section(at) and depth == len(keys):
            inner = ", ".join(f"--{'.'.join(keys)}.{name}" for name in at.model_fields)
            raise ValueError(f"{word} is a section; set one of {inner}")
        put(tree, keys, _value(at, values, word))
        changed += [".".join(keys[: n + 1]) for n in range(len(keys))]
    return changed


def _value(kind: Any, values: list[str], word: str) -> Any:
    """The value that words of a command line give to a setting of type `kind`."""
    choices = typing.get_args(kind)  # of a Literal, or the types of a union
    is_text = kind is str or (any(isinstance(x, str) for x in choices) and True not in choices)
    try:
        # Python's None is YAML's null.
        found = [readable(x) if is_text else None if x == "None" else parse_yaml(x) for x in values]
    except ValueError as error:
        raise ValueError(f"{word}{error}") from None
    if typing.get_origin(kind) is tuple and not (len(found) == 1 and isinstance(found[0], list)):
        return found
    if len(found) != 1:
        raise ValueError(f"{word} has {len(found)} values; write one: {word} VALUE")
    return found[0]
