"""Recipes as plain trees: nested dicts of texts, numbers, truth values and lists.

    read_tree(recipe.yaml) -> tree          YAML, where every mistake is an error with its line
    override(tree, RunConfig, ["--training.zero_stage", "3"])

`megarl.settings.config` makes a configuration of the tree.
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

from megarl.errors import require, shortened
from megarl.settings.peer_names import NAMES
from megarl.settings.schema import Config, dotted
from megarl.system.files import RECIPES

LARGEST_BYTES = 2**20
"""Largest recipe; real ones have a few kilobytes."""
MOST_VALUES = 10_000
"""Most values in a recipe, with every alias (`*name`) written out."""
DEEPEST = 20
"""Deepest nesting of sections and lists."""
RENAMED = {
    "rollout.samples_per_group": "rollout.group_size",
    "training.mini_batches": "training.num_mini_batches",
    "weight_sync.carrier": "weight_sync.transport",
    "publish": "weight_sync",
    "weight_sync.folder": "needless, as no transport uses files; set weight_sync.transport to"
    " shared_memory on one host, to point_to_point on several",
    "rollout.engines_per_relay": "needless, as no run has relays; leave it out",
    "server.batch_size": "needless, as vLLM forms batches; leave it out",
    "server.linger_ms": "needless, as vLLM forms batches; leave it out",
    "judge.seed": "needless, as verdicts have no seeds; leave it out",
    "reward_model.backend": "needless, as vLLM runs reward models; leave it out",
    "reward_model.precision": "reward_model.engine.dtype",
    "reward_model.micro_batch_tokens": "reward_model.engine.max_batched_tokens",
}
"""{key of older recipes: its present name, for the message that refuses it}"""
TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads the YAML of recipes. Unlike PyYAML's `SafeLoader`, `1e-4` is a number and `010` is 10
    (YAML 1.2), a date is a text, and other tags, keys that are no texts or occur twice are errors.
    """

    num_values = 0

    def value(self, node: yaml.Node, lines: dict[str, int], key: str = "", depth: int = 0) -> Any:
        """The value of a node; adds {dotted key: line, from 1} of it and all in it to `lines`.
        Raises `yaml.YAMLError` for what a recipe must not have.
        """
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
            return [self.value(item, lines, f"{key}[{n}]", depth + 1) for n, item in items]
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
        node.value = list({str(name.value): (name, item) for name, item in node.value}.values())
        tree = {}
        for name, item in node.value:
            if name.tag != f"{TAG}str":
                raise _mistake(name, "a key is not a text; write the name of a setting")
            inner = f"{key}.{name.value}".removeprefix(".")
            lines[inner] = _line(name)
            tree[self.scalar(name)] = self.value(item, lines, inner, depth + 1)
        return tree

    def scalar(self, node: yaml.Node) -> Any:
        """The value of a scalar node. Raises `yaml.YAMLError` if it cannot be read."""
        try:
            return readable(self.construct_object(node))
        except yaml.YAMLError:
            raise
        except Exception as error:  # int("5,000 digits"), !!bool "x", !!float "y"
            raise _mistake(node, f"the value cannot be read: {error}") from None


def readable(value: Any) -> Any:
    """The value unchanged. Raises `ValueError` for a text with NUL or half a surrogate pair, which
    no file name or UTF-8 text can have.
    """
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f" {shortened(repr(value))} holds the character NUL; remove it")
    if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        raise ValueError(f" {shortened(ascii(value))} is not Unicode text (half a pair); mend it")
    return value


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _mistake(node: yaml.Node, said: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, said, node.start_mark)


def _number(loader: _Loader, node: Any) -> int:
    text = node.value.replace("_", "")
    bare = text.lstrip("+-").lower()
    return int(text, {"0x": 16, "0o": 8}.get(bare[:2], 10))


class _Dumper(yaml.SafeDumper):
    """Writes a text in quotes where `_Loader` would take it for a number."""


_Loader.yaml_constructors = {
    f"{TAG}{name}": yaml.SafeLoader.yaml_constructors[f"{TAG}{name}"]
    for name in ("null", "bool", "float", "str")
} | {None: yaml.SafeLoader.construct_undefined, f"{TAG}int": _number}
_Loader.yaml_implicit_resolvers = {
    first: [row for row in rows if row[0].removeprefix(TAG) not in ("timestamp", "int", "float")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
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
    """The YAML text of plain data, which `parse_yaml` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, lines: dict[str, int] | None = None) -> Any:
    """The value of a YAML text, None for an empty one; adds {dotted key: line, from 1} to `lines`.
    Raises `ValueError`, which continues the text's name, as in ", line 3: the key ...".
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
        problem = " ".join(f"{error.problem or error.context}".split())
        reason = "" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML"
        raise ValueError(f"{line}{reason}: {problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f" is not YAML: {' '.join(str(error).split())}") from None


def read_tree(path: Path, lines: dict[str, int] | None = None) -> dict[str, Any]:
    """Read a YAML recipe as nested dicts; adds {dotted key: line, from 1} to `lines`. Raises
    `ValueError` with file and line.
    """
    inside = path / "recipe.yaml"
    try:
        more = f", {inside} --resume true" if inside.is_file() else ""
        require(not path.is_dir(), f" is a folder; pass a .yaml file{more}")
        example = f"pass the path of a .yaml file, or the name of a recipe in {RECIPES}"
        if not path.is_file():
            names = [file.stem for file in RECIPES.glob("*.yaml")]
            close = difflib.get_close_matches(str(path).removesuffix(".yaml"), names)
            meant = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f" does not exist{meant}; {example}")
        size = path.stat().st_size
        require(size <= LARGEST_BYTES, f" has {size:,} bytes, too many for a recipe; {example}")
        tree = parse_yaml(path.read_bytes().decode("utf-8-sig"), lines)
        require(
            tree is None or isinstance(tree, dict),
            f" is not a mapping of settings, as in `folder: runs/mine`; see {RECIPES}",
        )
        return tree or {}
    except OSError as error:
        problem = f" cannot be read: {error.strerror}; pass another path"
    except UnicodeDecodeError as error:
        problem = f" is no text (byte {error.start}: {error.reason}); pass a .yaml file in UTF-8"
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"recipe {path}{problem}")


def is_section(kind: Any) -> TypeGuard[type[Config]]:
    """Whether a type is a configuration class."""
    return isinstance(kind, type) and issubclass(kind, Config)


def walk(kind: Any, keys: Sequence[int | str]) -> tuple[Any, int]:
    """Follow a path of keys through the settings of class `kind`. Returns (type of the setting
    reached, number of known keys). A list's items have their index as key; all names in a dict are
    known.
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
    """Whether class `kind` has the setting or section `key`, such as "training.optimizer"."""
    return walk(kind, key.split("."))[1] == key.count(".") + 1


def hint(kind: Any, keys: Sequence[int | str]) -> str:
    """Advice about an unknown key, beginning with "; ": its new name, what another library's name
    is called here, the most similar key, or all keys.
    """
    at, depth = walk(kind, keys)
    if new := RENAMED.get(dotted(keys[: depth + 1])):
        return f"; it is now {new}"
    if not is_section(at):
        return f"; {dotted(keys[:depth])} is no section"
    theirs = NAMES.get(str(keys[-1]).lower(), ())
    if ours := [name for name in theirs if has_key(kind, name.split()[0])]:
        return f"; here it is {' or '.join(ours)}"
    known = [*at.model_fields]
    close = difflib.get_close_matches(str(keys[depth]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known)}"


def put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set `value` at a path of keys in `tree`, in place; dicts are made where the path has none."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


def override(tree: dict[str, Any], kind: Any, words: Sequence[str]) -> list[str]:
    """Change `tree` in place by a command line's words, `--section.key value` or
    `--section.key=value`; several values make a list. Unknown keys are set too. Returns the dotted
    keys that were set, with those of their sections. Raises `ValueError` for a word that is no
    setting.
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
    """The value that words give to a setting of type `kind`."""
    choices = typing.get_args(kind)  # of a Literal, or the types of a union
    is_text = kind is str or (any(isinstance(x, str) for x in choices) and True not in choices)
    try:
        # Python's None is YAML's null.
        items = [readable(x) if is_text else None if x == "None" else parse_yaml(x) for x in values]
    except ValueError as error:
        raise ValueError(f"{word}{error}") from None
    if typing.get_origin(kind) is tuple and not (len(items) == 1 and isinstance(items[0], list)):
        return items
    if len(items) != 1:
        example = next(
            (choice for choice in choices if choice and isinstance(choice, str)), "VALUE"
        )
        raise ValueError(f"{word} has {len(items)} values; write one: {word} {example}")
    return items[0]
