"""The pages of `--help`: all commands, one command, settings of its recipe.

    megarl --help                                   the commands
    megarl run --help                               the command: options, sections of the recipe
    megarl run recipe.yaml --help rollout           a section, with the recipe's values
    megarl run --help learning_rate                 the settings whose name holds a word
    megarl run --help all                           every setting, of `task: rl`

Imports nothing heavy, and needs no recipe.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.command_line.settings import Setting, as_yaml, settings
from megarl.command_line.table import COMMANDS, OTHERS, TASKS, Command
from megarl.command_line.words import asks, closest
from megarl.errors import UserError
from megarl.settings import config as configs
from megarl.settings.presets import filled_in
from megarl.system.files import RECIPES


def width() -> int:
    """Characters in a line of help: as many as the terminal has, but 40 to 100; 80 without a
    terminal.
    """
    return min(100, max(40, shutil.get_terminal_size().columns))


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
    command, at = COMMANDS[name], next(n for n, word in enumerate(words) if asks(word))
    topics = [word for word in words[at + 1 :] if not word.startswith("-")]
    topics = [*filter(None, [words[at].partition("=")[2]]), *topics]
    recipes = [word for word in (*words[:1], *topics) if word.endswith((".yaml", ".yml"))]
    recipes += [word for word in words[: min(at, 1)] if os.path.isfile(RECIPES / f"{word}.yaml")]
    topics = [word for word in topics if word not in recipes]
    kinds = command.kinds()
    if not kinds:
        return "\n".join(_about(name, command))
    try:
        written = filled_in(configs.written_tree(recipes[0])) if recipes else {}
    except ValueError as error:
        raise UserError(str(error)) from error
    known = list(settings(kinds.get(str(written.get("task")), next(iter(kinds.values())))))
    if not topics:
        return "\n".join([*_about(name, command), "", *_overview(name, known)])
    return "\n\n".join(_setting_help(setting, written) for setting in _chosen(topics[0], known))


def _about(name: str, command: Command) -> Iterator[str]:
    """The lines about a command."""
    yield f"usage: {' '.join(filter(None, ['megarl', name, command.first, '[OPTIONS]']))}"
    yield ""
    yield from textwrap.wrap(f"{command.summary[0].upper()}{command.summary[1:]}.", width())
    yield from textwrap.wrap(command.about, width())
    yield ""
    if command.run == "":
        yield from textwrap.wrap("The recipe's key `task` says which training it is:", width())
        yield ""
        yield from _columns({task: training.summary for task, training in TASKS.items()})
        yield ""
    settings, own_help = {}, {"--help": "this page"}
    if command.kinds():
        settings = {"--section.key VALUE": "a setting of the recipe; several values make a list"}
        own_help = {"--help SECTION|WORD|all": "settings, with a named recipe's values"}
    yield from _columns(settings | command.all_options | own_help)
    yield ""
    yield f"example: megarl {name} {command.example}"
    yield f"more:    {command.docs}"


def _overview(name: str, known: Sequence[Setting]) -> Iterator[str]:
    """The lines about the recipe as a whole."""
    yield from ("settings of the recipe:", "")
    rows: dict[str, str] = {}
    for setting in known:
        if "." not in setting.key:
            inside = sum(other.key.startswith(f"{setting.key}.") for other in known)
            rows[setting.key] = f"{setting.meaning.partition('. ')[0].rstrip('.')}."
            rows[setting.key] += f" ({inside} settings)" if setting.is_section else ""
    yield from _columns(rows)
    yield ""
    yield from textwrap.wrap(
        f"A section: megarl {name} --help rollout, or --help training.optimizer. Settings whose"
        " name holds a word: --help learning_rate. All: --help all.",
        width(),
    )


def _chosen(topic: str, known: Sequence[Setting]) -> list[Setting]:
    """The settings of a topic: those of a section of this name, or those whose name holds it, or
    else those whose meaning does.
    """
    topic = topic.removeprefix("--").rstrip(".").replace("-", "_").lower()
    if topic == "all":
        return list(known)
    words = topic.split(".")  # NAME stands for a name of the user's

    def is_inside(key: str) -> bool:
        parts = key.split(".")[: len(words)]
        return len(parts) == len(words) and all(
            name in (word, "NAME") for word, name in zip(words, parts, strict=True)
        )

    keys = [setting for setting in known if not setting.is_section]
    chosen = (
        [setting for setting in known if is_inside(setting.key)]
        or [setting for setting in keys if topic in setting.key.lower()]
        or [setting for setting in keys if topic in setting.meaning.lower()]
    )
    if not chosen:
        names = {name for key in keys for name in (key.key, key.key.rpartition(".")[2])}
        raise UserError(f"no setting is about {topic!r}{closest(topic, sorted(names))}")
    return chosen


def _setting_help(setting: Setting, written: Any) -> str:
    """Help on a setting: its value in the recipe `written` (nested dicts), or else its default; its
    meaning and its possible values.
    """
    if setting.is_section:
        return _paragraph(f"[{setting.key}] {setting.meaning}", "")
    value, default = written, as_yaml(setting.default)
    for name in setting.key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    text = default if value is None else as_yaml(value)
    note = f"; default {default}" if text != default else ""
    lines = [_paragraph(f"{setting.key}: {text}", "")]
    lines += [_paragraph(more, "    ") for more in (setting.meaning, f"({setting.values}{note})")]
    return "\n".join(filter(None, lines))


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


SCRIPT = """
_megarl() {
  local word=${COMP_WORDS[COMP_CWORD]} words=
  if [[ $COMP_CWORD == 1 ]]; then
    words='COMMANDS'
  elif [[ $word == -* ]]; then
    case ${COMP_WORDS[1]} in
CASES
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _megarl megarl
"""
BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit"}
"""{shell: what comes before the script, by which zsh understands bash's}"""


def completion(words: Sequence[str]) -> str:
    """The script that `megarl completion SHELL` prints, by which the Tab key completes commands,
    options and names of settings:

        eval "$(megarl completion bash)"        in ~/.bashrc
        eval "$(megarl completion zsh)"         in ~/.zshrc, below compinit

    Raises `UserError` for other words than the
    name of a shell.
    """
    if len(words) != 1 or words[0] not in BEFORE:
        raise UserError(f"megarl completion needs a shell: megarl completion {'|'.join(BEFORE)}")
    cases = []
    for name, command in COMMANDS.items():
        keys = {setting.key for cls in command.kinds().values() for setting in settings(cls)}
        known = [*command.option_names, "--help", *(f"--{key}" for key in sorted(keys))]
        cases.append(f"      {name}) words='{' '.join(known)}' ;;")
    script = SCRIPT.replace("COMMANDS", " ".join([*COMMANDS, *OTHERS]))
    return f"{BEFORE[words[0]]}{script.replace('CASES', chr(10).join(cases))}".strip()
