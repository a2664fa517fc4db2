"""The pages of `--help`: all commands, one command, settings of its recipe.

    megarl --help                                   the commands
    megarl train --help                             the command: options, sections of the recipe
    megarl train recipe.yaml --help rollout         a section, with the recipe's values
    megarl train --help learning_rate               the settings whose name holds a word
    megarl train --help all                         every setting

Imports nothing heavy, and needs no recipe.
"""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megarl import config as configs
from megarl.command_line.settings import Setting, as_yaml, settings
from megarl.command_line.table import COMMANDS, Command
from megarl.errors import UserError
from megarl.presets import filled_in

ASKS = ("-h", "--help")


def width() -> int:
    """Columns of the page: those of the terminal, within reason; 80 where there is none."""
    return min(100, max(40, shutil.get_terminal_size().columns))


def usage() -> str:
    """The page about all commands."""
    return "\n".join(
        [
            "usage: megarl COMMAND ...",
            "",
            *_columns({name: command.summary for name, command in COMMANDS.items()}),
            "",
            *_columns(
                {
                    "--help": "after a command: its options and settings",
                    "--version": "of megarl, and of what it stands on",
                    "completion": "of words by the Tab key: megarl completion bash, or zsh",
                }
            ),
            "",
            "example: bash launch/quickstart.sh, then README.md",
        ]
    )


def page(name: str, words: Sequence[str]) -> str:
    """The page that `megarl NAME words` asks for, where `--help` is among the words. Raises
    `UserError` for a recipe that cannot be read, and for a topic that is no setting.
    """
    at = next(number for number, word in enumerate(words) if asks(word))
    inner = next((number for number in range(at) if words[number] in COMMANDS), None)
    if name == "torchrun" and inner is not None:
        return page(words[inner], words[inner + 1 :])
    command = COMMANDS[name]
    topics = [word for word in words[at + 1 :] if not word.startswith("-")]
    topics = [*filter(None, [words[at].partition("=")[2]]), *topics]
    recipes = [word for word in (*words[:1], *topics) if word.endswith((".yaml", ".yml"))]
    topics = [word for word in topics if word not in recipes]
    if not command.config:
        return "\n".join(_about(name, command))
    try:
        written = filled_in(configs.written_tree(recipes[0])) if recipes else {}
    except ValueError as error:
        raise UserError(str(error)) from error
    known = list(settings(getattr(configs, command.config)))
    if not topics:
        return "\n".join([*_about(name, command), "", *_overview(name, known)])
    return "\n\n".join(_shown(one, written) for one in _chosen(topics[0], known))


def asks(word: str) -> bool:
    """Whether a word of the command line asks for help."""
    return word.partition("=")[0] in ASKS


def refuse_unknown(name: str, words: Sequence[str]) -> None:
    """Raise `UserError` for an option that command `name` does not have. What may be a setting of
    the recipe, or an option that launch or torchrun refuse, is refused only if it looks like one
    of the command's.
    """
    command = COMMANDS[name]
    options = [*command.option_names, *ASKS]
    others = [at for at, word in enumerate(words) if word == "--" or word in COMMANDS]
    for word in words[: others[0]] if others else words:
        option = word.partition("=")[0]
        if not option.startswith("-") or option.replace("_", "-") in options:
            continue
        close = closest(option, options)
        if close and command.config:
            own = {f"--{one.key}" for one in settings(getattr(configs, command.config))}
            close = "" if option.replace("-", "_").replace("__", "--", 1) in own else close
        if close or not (command.config or name in ("launch", "torchrun")):
            known = f"; known are {', '.join(options[:-2])} and --help"
            raise UserError(f"megarl {name}: unknown option {option!r}{close or known}")


def closest(word: str, known: Sequence[str]) -> str:
    """The sentence "; did you mean ...?" with the closest of the words that are known; empty if
    none is close.
    """
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _about(name: str, command: Command) -> Iterator[str]:
    """The lines about a command."""
    words = ["[OPTIONS]", command.first] if name == "torchrun" else [command.first, "[OPTIONS]"]
    yield f"usage: {' '.join(['megarl', name, *filter(None, words)])}"
    yield ""
    yield from textwrap.wrap(f"{command.summary[0].upper()}{command.summary[1:]}.", width())
    if command.about:
        yield from textwrap.wrap(command.about, width())
    yield ""
    yield from _columns({**command.all_options(), **HELP[bool(command.config)]})
    yield ""
    yield f"example: megarl {name} {command.example}"
    yield f"more:    {command.docs}"


HELP = {
    True: {"--help SECTION|WORD|all": "settings, with the recipe's values where one is named"},
    False: {"--help": "this page"},
}
"""{whether a command has a recipe: what is said of its option --help}"""


def _overview(name: str, known: Sequence[Setting]) -> Iterator[str]:
    """The lines about the recipe as a whole."""
    yield "settings of the recipe:"
    yield ""
    rows: dict[str, str] = {}
    for one in known:
        if "." not in one.key:
            inside = sum(1 for other in known if other.key.startswith(f"{one.key}."))
            first = f"{one.meaning.partition('. ')[0].rstrip('.')}."
            rows[one.key] = f"{first} ({inside} settings)" if one.is_section else first
    yield from _columns(rows)
    yield ""
    yield from textwrap.wrap(
        f"A section: megarl {name} --help rollout, or --help training.optimizer. Settings whose"
        " name holds a word: --help learning_rate. All: --help all.",
        width(),
    )


def _chosen(topic: str, known: Sequence[Setting]) -> list[Setting]:
    """The settings of a topic: those of a section of this name, or those whose name holds it."""
    topic = topic.removeprefix("--").rstrip(".").replace("-", "_").lower()
    keys = [one for one in known if not one.is_section]
    if topic == "all":
        return list(known)
    found = [one for one in known if one.key == topic or one.key.startswith(f"{topic}.")]
    found = found or [one for one in keys if topic in one.key.lower()]
    found = found or [one for one in keys if topic in one.meaning.lower()]
    parts = {part for one in known for part in (one.key, one.key.rpartition(".")[2])}
    if not found:
        raise UserError(f"no setting is about {topic!r}{closest(topic, sorted(parts))}")
    return found


def _shown(one: Setting, written: Any) -> str:
    """A setting with its value, its meaning and its possible values."""
    if one.is_section:
        return _paragraph(f"[{one.key}] {one.meaning}", "")
    value, default = written, as_yaml(one.default)
    for part in one.key.split("."):
        value = value.get(part, value) if isinstance(value, dict) and part in value else None
    said = default if value is None else as_yaml(value)
    note = f"; default {default}" if said != default else ""
    return "\n".join(
        [
            _paragraph(f"{one.key}: {said}", ""),
            *filter(None, [_paragraph(one.meaning, "    ")]),
            _paragraph(f"({one.values}{note})", "    "),
        ]
    )


def _paragraph(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        width(),
        initial_indent=indent,
        subsequent_indent=indent or "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _columns(rows: dict[str, str]) -> Iterator[str]:
    """Lines of two columns; the second one is wrapped, and below the first where that is long."""
    left = min(max(map(len, rows)), width() // 3) + 4
    for name, meaning in rows.items():
        lines = textwrap.wrap(meaning, width() - left, break_on_hyphens=False) or [""]
        head = f"  {name}"
        if len(head) + 2 > left:
            yield head
        else:
            yield f"{head:{left}}{lines.pop(0)}"
        yield from (f"{'':{left}}{line}" for line in lines)
