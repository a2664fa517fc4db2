"""Reference pages of the documentation's site, of the code itself: a hook of mkdocs (mkdocs.yml).

`reference/COMMAND.md` has every key of the recipe of a command, `commands.md` every command with
its options, `messages.md` what megarl says of bad input. The pages are made when the site is built,
and no files of docs/.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from site_errors import errors_page

from megarl.command_line.settings import Setting, as_yaml, settings
from megarl.command_line.table import COMMANDS, TASKS, Command
from megarl.settings import config as configs
from megarl.settings.schema import FILE, Config, Of


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {name: _recipe_page(name, kind) for name, kind in recipes().items()}
    own = {"commands": _commands_page(), "messages": _messages_page()}
    for name, lines in {**pages, **own}.items():
        content = "\n".join(lines) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def recipes() -> Mapping[str, type[Config]]:
    """{name of a page: configuration class}: of each task, and of `megarl serve-reward`."""
    return configs.TASKS | {"serve-reward": configs.ServeRewardConfig}


def _recipe_page(name: str, kind: type[Config]) -> Iterator[str]:
    """The lines of the page about a kind of recipe."""
    using = [name for name, command in COMMANDS.items() if kind in command.kinds().values()]
    commands = ", ".join(f"[`megarl {one}`](commands.md#megarl-{one})" for one in using)
    title = f"`task: {name}`" if name in TASKS else f"`megarl {name}`"
    yield from (f"# Recipe of {title}", "")
    yield f"Every key with its default, its values and its meaning. For the commands {commands}."
    yield "On the command line a key is an option: `--section.key VALUE`. `NAME` in a key stands"
    yield "for a name that the recipe chooses, `N` for the number of an entry of a list."
    known = list(settings(kind))
    sections = {one.key: one for one in known if one.is_section}
    rows: dict[str, list[Setting]] = {"": [], **{key: [] for key in sections}}
    for one in known:
        if not one.is_section:
            rows[one.key.rpartition(".")[0]].append(one)
    for section, keys in rows.items():
        if section:
            yield from ("", f"## `{section}`", "", _cell(sections[section].meaning))
        if keys:
            yield from ("", "| key | default | values | meaning |", "|---|---|---|---|")
        for one in keys:
            cells = [f"`{one.key}`", f"`{as_yaml(one.default)}`", _values(one), _meaning(one)]
            yield f"| {' | '.join(cells)} |"


def _values(one: Setting) -> str:
    """The cell of a table with the values that a setting may have. A word that is written into a
    recipe is set as code; a description such as "number from 0 to 1" is plain text.
    """
    words, values = {*one.choices, FILE, "null"}, one.values.split(" | ")
    return ", ".join(f"`{value}`" if value in words else _cell(value) for value in values)


def _meaning(one: Setting) -> str:
    """The cell with what a setting does. It ends with the setting on which it depends, if any."""
    section = one.key.rpartition(".")[0]
    said = [_cell(one.meaning)]
    for mark in typing.get_args(one.annotation)[1:]:
        if isinstance(mark, Of):
            other = ".".join(filter(None, (section, mark.key)))
            values = " or ".join(f"`{as_yaml(value)}`" for value in mark.values)
            said.append(f"Only where `{other}` is {values or 'set'}.")
    return " ".join(filter(None, said))


def _cell(text: str) -> str:
    """Text for a cell of a table: outside of code, nothing in it is Markdown or HTML but links to
    the pages that it names.
    """
    parts = text.split("`")
    for at in range(0, len(parts), 2):
        plain = re.sub(r"([\\|*\[])", r"\\\1", parts[at]).replace("<", "&lt;")
        parts[at] = re.sub(r"\bdocs/(\w+\.md)", r"[docs/\1](../\1)", plain)
    return "`".join(parts)


def _commands_page() -> Iterator[str]:
    """The lines of the page about all commands."""
    yield from ("# Commands", "")
    yield "Every command has `--help`. A command that takes a recipe also takes its keys as"
    yield "options; `--help SECTION`, `--help WORD` and `--help all` print keys."
    for name, command in COMMANDS.items():
        yield from ("", f"## megarl {name}", "", *_about(name, command))
        if tasks := command.kinds():
            pages = [f"[{task or 'its'} keys]({task or name}.md)" for task in tasks]
            yield from ("", f"Recipe: {', '.join(pages)}.")
        yield from ("", "| option | meaning |", "|---|---|")
        for option, meaning in command.all_options.items():
            yield f"| `{option}` | {_cell(meaning)} |"


def _about(name: str, command: Command) -> Iterator[str]:
    """The lines about a command without its options."""
    words = [command.first, "[OPTIONS]"]
    yield _cell(f"{command.summary[0].upper()}{command.summary[1:]}. {command.about}".strip())
    yield from ("", "```bash", " ".join(["megarl", name, *filter(None, words)]))
    yield from (f"megarl {name} {command.example}", "```", "")
    yield f"More: [{command.docs}](../../{command.docs})."


def _messages_page() -> Iterator[str]:
    """The lines of the page about messages."""
    for line in errors_page(Path(__file__).resolve().parents[1]):
        yield f"* {_cell(line[2:])}" if line.startswith("* ") else line
