"""The pages of `--help`: all commands, one command, settings of its recipe.

    megarl --help                                   the commands
    megarl train --help                             the command: options, sections of the recipe
    megarl train recipe.yaml --help rollout         a section, with the recipe's values
    megarl run recipe.yaml --help rollout           the same for any command that trains
    megarl train --help learning_rate               the settings whose name holds a word
    megarl train --help all                         every setting

Imports nothing heavy, and needs no recipe.
"""

from __future__ import annotations

import difflib
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megarl import config as configs
from megarl.command_line.settings import Setting, as_yaml, settings
from megarl.command_line.table import COMMANDS, Command
from megarl.errors import UserError
from megarl.files import RECIPES
from megarl.lookup import load
from megarl.presets import filled_in

ASKS = ("-h", "--help")


def width() -> int:
    """Width of a page of help in characters: that of the terminal, from 40 to 100; 80 where there
    is no terminal.
    """
    return min(100, max(40, shutil.get_terminal_size().columns))


OTHERS = {
    "--help": "after a command: its options and settings",
    "--version": "of megarl, and of what it stands on",
    "completion": "of words by the Tab key: megarl completion bash, or zsh",
}
"""{first word of a command line that is not in the table of commands: meaning}"""


def usage() -> str:
    """The text of `megarl --help`, which lists all commands."""
    commands = _columns({name: command.summary for name, command in COMMANDS.items()})
    example = "example: bash launch/quickstart.sh, then README.md"
    lines = ["usage: megarl COMMAND ...", "", *commands, "", *_columns(OTHERS), "", example]
    return "\n".join(lines)


def page(name: str, words: Sequence[str]) -> str:
    """The text of `megarl NAME WORDS...` where `--help` is among the words: about the command, or
    about the settings that the words after `--help` name. A recipe (.yaml) among the words, or the
    name of one of megarl as the first word, gives the values. Raises `UserError` for a recipe that
    cannot be read, and for a topic that is no setting.
    """
    at = next(number for number, word in enumerate(words) if asks(word))
    inner = next((number for number in range(at) if words[number] in COMMANDS), None)
    if name == "torchrun" and inner is not None:
        return page(words[inner], words[inner + 1 :])
    command = COMMANDS[name]
    topics = [word for word in words[at + 1 :] if not word.startswith("-")]
    topics = [*filter(None, [words[at].partition("=")[2]]), *topics]
    recipes = [word for word in (*words[:1], *topics) if word.endswith((".yaml", ".yml"))]
    recipes += [word for word in words[: min(at, 1)] if os.path.isfile(RECIPES / f"{word}.yaml")]
    topics = [word for word in topics if word not in recipes]
    if command.becomes and topics:
        return page(started_by(name, recipes[0] if recipes else ""), words)
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


def started_by(name: str, recipe: str) -> str:
    """The command that command `name`, which is "run", starts for the recipe at path `recipe`:
    "train" where no recipe is named. Raises `UserError` for a file that is no recipe.
    """
    try:
        return load(COMMANDS[name].becomes)([recipe, "--print-config"])[0] if recipe else "train"
    except ValueError as error:
        raise UserError(str(error)) from error


def asks(word: str) -> bool:
    """Whether a word of the command line asks for help: `--help`, `-h` or `--help=TOPIC`."""
    return word.partition("=")[0] in ASKS


def refuse_unknown(name: str, words: Sequence[str]) -> None:
    """Raise `UserError` for an option among `words` that command `name` does not have. Commands
    with a recipe, `run`, `launch` and `torchrun` have further options, which are checked later:
    there only misspelled options of the command's own are refused.
    """
    command = COMMANDS[name]
    options = [*command.option_names, *ASKS]
    ends = ["--", *(COMMANDS if name == "torchrun" else ())]
    others = [at for at, word in enumerate(words) if word in ends]
    for word in words[: others[0]] if others else words:
        option = word.partition("=")[0]
        if not option.startswith("-") or option.replace("_", "-") in options:
            continue
        close = closest(option, options)
        kinds = [one.config for one in COMMANDS.values() if one.owns_folder and command.becomes]
        for kind in filter(None, [command.config, *kinds] if close else ()):
            own = {f"--{one.key}" for one in settings(getattr(configs, kind))}
            close = "" if option.replace("-", "_").replace("__", "--", 1) in own else close
        if close or not (command.config or name in ("launch", "run", "torchrun")):
            known = f"; known are {', '.join(options[:-2])} and --help"
            raise UserError(f"megarl {name}: unknown option {option!r}{close or known}")


def closest(word: str, known: Sequence[str]) -> str:
    """The text "; did you mean X?" with the most similar of the words `known`; "" if none is
    similar to `word`.
    """
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _about(name: str, command: Command) -> Iterator[str]:
    """The lines about a command."""
    words = ["[OPTIONS]", command.first] if name == "torchrun" else [command.first, "[OPTIONS]"]
    yield f"usage: {' '.join(['megarl', name, *filter(None, words)])}"
    yield ""
    yield from textwrap.wrap(f"{command.summary[0].upper()}{command.summary[1:]}.", width())
    yield from textwrap.wrap(command.about, width())
    yield ""
    topics = {"--help SECTION|WORD|all": "settings, with the recipe's values where one is named"}
    own_help = topics if command.config or command.becomes else {"--help": "this page"}
    yield from _columns(command.all_options | own_help)
    yield ""
    yield f"example: megarl {name} {command.example}"
    yield f"more:    {command.docs}"


def _overview(name: str, known: Sequence[Setting]) -> Iterator[str]:
    """The lines about the recipe as a whole."""
    yield from ("settings of the recipe:", "")
    rows: dict[str, str] = {}
    for one in known:
        if "." not in one.key:
            inside = sum(other.key.startswith(f"{one.key}.") for other in known)
            rows[one.key] = f"{one.meaning.partition('. ')[0].rstrip('.')}."
            rows[one.key] += f" ({inside} settings)" if one.is_section else ""
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
    words = topic.split(".")  # NAME stands for a name of the user's
    found = [
        one
        for one in known
        if len(parts := one.key.split(".")) >= len(words)
        and all(part in (word, "NAME") for word, part in zip(words, parts, strict=False))
    ]
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
    parts = [_paragraph(f"{one.key}: {said}", "")]
    parts += [_paragraph(text, "    ") for text in (one.meaning, f"({one.values}{note})")]
    return "\n".join(filter(None, parts))


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
