"""`megarl completion bash`, or `zsh`: a script that completes words of `megarl` by the Tab key.

    eval "$(megarl completion bash)"        in ~/.bashrc
    eval "$(megarl completion zsh)"         in ~/.zshrc, below compinit

The script asks `megarl completion words -- WORDS` for the candidates of the last word, so that it
knows each command and setting without a list of its own. Where nothing is answered, the shell
completes files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from megarl import config as configs
from megarl.command_line.pages import ASKS, OTHERS, started_by
from megarl.command_line.settings import Setting, as_yaml, settings
from megarl.command_line.table import COMMANDS
from megarl.errors import UserError

SCRIPTS = {
    "bash": r"""
_megarl() {
  local IFS=$'\n' word=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=($("$1" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  if [ ${#COMPREPLY[@]} = 0 ]; then
    compopt -o filenames
    COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$word"; compgen -d -- "$word"))
  elif [[ ${COMPREPLY[0]} == *. ]]; then
    compopt -o nospace
  fi
}
complete -o default -F _megarl megarl
""",
    "zsh": r"""
_megarl() {
  local -a found typed=("${(@)words[2,CURRENT-1]}" "$PREFIX")
  found=(${(f)"$("$words[1]" completion words -- "$typed[@]" 2>/dev/null)"})
  (( $#found )) || { _files -g '*.y(a|)ml' || _files; return }
  compadd -S '' -- ${(M)found:#*.}
  compadd -- ${found:#*.}
}
compdef _megarl megarl
""",
}


def answer(words: Sequence[str]) -> str:
    """The text that `megarl completion WORDS` prints, without a newline at the end. `words`:
    ["bash"] or ["zsh"] for a script by which that shell completes commands of megarl. The script in
    turn calls `megarl completion words -- TYPED...`: ["words", "--", *typed] gives the candidates
    for the last typed word, one on each line. Raises `UserError` for anything else.
    """
    if words[:1] == ["words"]:
        return "\n".join(candidates(words[2:]))
    if len(words) != 1 or words[0] not in SCRIPTS:
        raise UserError(f"megarl completion needs a shell: megarl completion {'|'.join(SCRIPTS)}")
    return SCRIPTS[words[0]].strip()


def candidates(typed: Sequence[str]) -> list[str]:
    """The words that may stand in place of the last one in `typed`, the words after `megarl` on an
    unfinished command line; the last word is incomplete or "". Empty where the shell should
    complete file names.
    """
    typed = [word for word in typed if word != "="] + [""] * (list(typed[-1:]) == ["="])
    *before, begun = typed or [""]
    if not before:
        return _beginning(begun, [*COMMANDS, *OTHERS])
    name = before[0]
    if name == "completion":
        return _beginning(begun, SCRIPTS)
    trains = [one for one, command in COMMANDS.items() if command.owns_folder]
    inner = next((at for at, word in enumerate(before) if word in trains), 0)
    if name == "torchrun" and inner:
        name, before = before[inner], before[inner:]
    elif name == "launch" and "--" in before:
        name = "train"
    elif name == "torchrun":
        return _beginning(begun, [*COMMANDS[name].option_names, *trains])
    command = COMMANDS.get(name)
    if command is None:
        return []
    config = command.config
    if command.becomes:
        config = COMMANDS["train"].config  # until the recipe is typed, or if it is none
        with contextlib.suppress(UserError):
            config = COMMANDS[started_by(name, "".join(before[1:2]))].config
    known = list(settings(getattr(configs, config))) if config else []
    known = [one for one in known if not {"NAME", "N"} & set(one.key.split("."))]
    keys = [one.key for one in known if not one.is_section]
    if before[-1] in ASKS:
        return _parts(begun, ["all", *keys])
    if before[-1].startswith("--") and not begun.startswith("-"):
        return _beginning(begun, _values(before[-1], known))
    if not begun.startswith("-") and (begun or len(before) == 1):
        return []
    return _parts(begun, [*command.option_names, "--help", *(f"--{key}" for key in keys)])


def _beginning(begun: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(begun)]


def _parts(begun: str, keys: Iterable[str]) -> list[str]:
    """The keys that begin so, each up to the next dot: section by section, as with folders."""
    parts = {}
    for key in _beginning(begun, keys):
        dot = key.find(".", len(begun)) + 1
        parts[key[:dot] if dot else key] = True
    return list(parts)


def _values(option: str, known: Sequence[Setting]) -> list[str]:
    """The values of a setting: its choices, or its default if it is a number."""
    key = option.removeprefix("--").replace("-", "_")
    for one in known:
        if one.key == key and not one.is_section:
            is_number = isinstance(one.default, int | float)
            return one.choices or [as_yaml(one.default)] * is_number
    return []
