"""The words behind a command: its recipe, its options, and settings of the recipe."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from megarl.command_line.table import COMMANDS
from megarl.errors import UserError
from megarl.system.console import Arguments, Options

ASKS = ("-h", "--help")


def parse(name: str, words: Sequence[str]) -> Options:
    """The words behind command `name`, which has a recipe. Raises `UserError` for a missing recipe,
    and for an option with a wrong value.
    """
    command = COMMANDS[name]
    if not words or words[0].startswith("-"):
        first = "a recipe" if command.first == "RECIPE.yaml" else "a run folder"
        raise UserError(
            f"megarl {name} needs {first} first: "
            f"megarl {name} {command.first} [--section.key value ...]"
        )
    parser = Arguments(f"megarl {name}")
    for option in command.all_options:
        flag, _, value = option.partition(" ")
        if flag in command.flags:
            parser.add_argument(flag, dest=command.flags[flag])
        elif value:
            parser.add_argument(flag, type=whole_number)
        else:
            parser.add_argument(flag, action="store_true")
    behind = [word for word in words[1:] if word != "--"]
    options, overrides = parser.parse_known_args(behind, Options())
    for key in command.flags.values():
        if (value := getattr(options, key)) is not None:
            overrides += [f"--{key}", value]
    options.recipe, options.overrides, options.words = words[0], overrides, words
    return options


def whole_number(value: str) -> int:
    """The number that the text `value` of an option is, from 1 to 99999. Raises argparse's error
    for any other text.
    """
    if not re.fullmatch("[1-9][0-9]{0,4}", value):
        raise argparse.ArgumentTypeError(f"is '{value}'; set it to a whole number of at least 1")
    return int(value)


def asks(word: str) -> bool:
    """Whether a word of the command line asks for help: `--help`, `-h` or `--help=TOPIC`."""
    return word.partition("=")[0] in ASKS


def refuse_unknown(name: str, words: Sequence[str]) -> None:
    """Raise `UserError` for an option among `words` that command `name` does not have. Settings of
    its recipe are checked later.
    """
    command = COMMANDS[name]
    options = [*command.option_names, *ASKS]
    settings = {key for cls in command.kinds().values() for key in cls.model_fields}
    for word in words:
        option = word.partition("=")[0]
        is_setting = option[2:].replace("-", "_").partition(".")[0] in settings
        if not option.startswith("-") or option.replace("_", "-") in options or is_setting:
            continue
        close = closest(option, options)
        if close or not settings:
            known = f"; known are {', '.join(options[:-2])} and --help"
            raise UserError(f"megarl {name}: unknown option {option!r}{close or known}")


def closest(word: str, known: Sequence[str]) -> str:
    """The text "; did you mean X?" with the most similar of the words `known`; "" if none is
    similar to `word`.
    """
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
