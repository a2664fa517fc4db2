"""Every code block of README, CONTRIBUTING and docs: Python runs, recipes resolve, command lines are read by the
parser of the command, and what cannot run everywhere says what it needs.

A block without a language is output or a picture, and holds no command. What a block needs stands
in a comment inside of it, such as `# needs Slurm`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import setuptools  # noqa: F401 - before pip's parser, after which it cannot be imported
from support.commands import ROOT
from support.documented import PAGES, Block, blocks_of

from megarl import cli
from megarl.command_line.table import COMMANDS
from megarl.command_line.words import parse, refuse_unknown
from megarl.errors import UserError
from megarl.settings import config

EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
LANGUAGES = ("", "bash", "js", "json", "python", "yaml")
USUAL: dict[str, Any] = {
    "folder": "runs/mine",
    "model": {"path": "a/model"},
    "prompts": {"source": "rows.jsonl"},
    "demonstrations": {"source": "rows.jsonl"},
    "preferences": {"source": "rows.jsonl"},
    "teacher": {"model": {"path": "a/teacher"}},
}
"""Sections of recipes, for those that a fragment leaves out."""
UTILITIES = {"cat", "curl", "fold", "grep", "head", "mkdir", "openssl", "sleep", "tail", "tr"}
"""Programs that every Linux has."""
NETWORK, SLURM, GPU = r"((the|no) network|a package index)", "Slurm", ".*GPU"
NEEDS = dict.fromkeys(("apt-get", "git", "hf", "pip", "uv"), NETWORK)
NEEDS |= {"sbatch": SLURM, "srun": SLURM, "podman": "podman"}
NEEDS |= {"apptainer": "Apptainer", "enroot": "enroot"}
"""{program: what it needs}"""
STARTS_NOTHING = {"--check", "--cpu", "--dry-run", "--print-config"}
RECORDER = r"""
command_not_found_handle() { printf '%s\0' "$@" $'\x1e' >>"$RECORDED"; }
cd() { :; }
.() { :; }
kill() { :; }
"""
"""For a shell whose PATH is empty: every program records its words, and nothing is started."""


class Parsed(BaseException):
    """A command's own parser has read its words."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the reader's, on a machine without GPUs."""
    for name in ("launch", "tools", "tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "MEGARL_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def where(block: Block) -> str:
    return f"{block.page}:{block.line} ({block.head or 'output'})"


def resolved(text: str) -> config.Config:
    """A recipe or a part of one, with all checks that need no data and no model. A part without
    `task` is one of the first task that accepts it.
    """
    Path("block.yaml").write_text(text or "{}")
    tree, errors = config.written_tree("block.yaml"), list[ValueError]()
    kinds = [config.task_class(tree, "the block")] if "task" in tree else []
    for kind in kinds or [*config.TASKS.values(), config.ServeRewardConfig]:
        whole = dict(tree)
        for section, usual in USUAL.items():
            given = tree.get(section, {})
            if section in kind.model_fields and "sources" not in given:
                whole[section] = usual | given if isinstance(usual, dict) else given or usual
        try:
            return config.from_tree(kind, whole, where="the block")
        except ValueError as error:
            errors.append(error)
    raise errors[0]


@EACH_PAGE
def test_every_block_is_one_of_these(page: Path) -> None:
    found = blocks_of(page)
    assert 2 * len(found) == len(re.findall(r"^ *(?:```|~~~)", page.read_text(), re.M))
    assert not [where(one) for one in found if one.language not in LANGUAGES]
    command = re.compile(rf"^(bash |python |sbatch |megarl ({'|'.join(COMMANDS)})\b)", re.M)
    hidden = [where(one) for one in found if not one.head and command.search(one.body)]
    assert not hidden, "commands belong into a block of bash, and what they print into another"


@EACH_PAGE
def test_recipes_resolve(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "yaml":
            try:
                resolved(block.body)
            except ValueError as error:
                raise AssertionError(f"{where(block)}: {error}") from None


@cache
def named_blocks() -> set[str]:
    """The heads that tests name, such as "python judge", to run the blocks that have them."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("test_*.py"))
    texts = (one.value for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Constant))
    return {text for text in texts if isinstance(text, str)}


@EACH_PAGE
def test_programs_run(page: Path) -> None:
    """In a test that names their block, or here."""
    for block in blocks_of(page):
        if block.language not in ("python", "js", "json"):
            continue
        if block.head != "python" and block.head in named_blocks():
            continue
        if block.language == "json":
            json.loads(block.body)
            continue
        code = compile(block.body, where(block), "exec", dont_inherit=True)
        if not re.search(r"^# needs \w", block.body, re.M):
            exec(code, {"__name__": "example"})


# Shell


@EACH_PAGE
def test_command_lines_are_read(page: Path, place: Path) -> None:
    """By the parsers of the commands, with a page's own recipe where it shows one."""
    recipe = ""
    for block in blocks_of(page):
        if block.language == "yaml":
            recipe = block.body
        for words in typed_words(block, place):
            try:
                needed = read_words(words, recipe)
            except (ValueError, OSError, SystemExit, UserError) as error:
                raise AssertionError(f"{where(block)}: {' '.join(words)}: {error}") from None
            said = re.search(rf"#.*\bneeds? {needed}", block.body)
            assert not needed or said, f"{where(block)}: {' '.join(words)}: # needs {needed}"


def typed_words(block: Block, place: Path) -> list[list[str]]:
    """The words of every program that a block of bash calls, as a real bash reads them; in a block
    of output, of those behind `$`.
    """
    body = block.body
    if block.language != "bash":
        body = "".join(re.findall(r"^\$ (.*\n)", body, re.M))
    record = place / "recorded"
    record.write_text("")
    done = subprocess.run(
        ["/bin/bash", "-c", RECORDER + body + "\nwait"],
        env={"PATH": "/nowhere", "RECORDED": str(record), "HOME": str(place), "MEGARL": "."},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "syntax error" not in done.stderr, f"{where(block)}: {done.stderr}"
    calls = record.read_text().split("\0\x1e\0")[:-1]
    return [call.split("\0") for call in calls]


def read_words(words: list[str], recipe: str) -> str:
    """Have the words of a program read by its parser; returns a pattern of what it needs, or "".
    A recipe that the repository lacks is the text `recipe`.
    """
    while words[0] in ("sudo", "taskset"):
        words = words[{"sudo": 1, "taskset": 3}[words[0]] :]
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        program, *rest = rest[1:]
    if program == "megarl":
        return read_megarl(rest, recipe)
    if program == "python" and rest[0] == "-c":
        compile(rest[1], "python -c", "exec", dont_inherit=True)
        return ""
    if program in ("bash", "sbatch", "python"):
        own = [one for one in rest if program != "sbatch" or not one.startswith("--nodes=")]
        needed = read_file_of_tools(own, recipe)
        return NEEDS.get(program, needed)
    if program == "pytest":
        assert all(Path(one).exists() for one in rest if one.startswith("tests/"))
        return ""
    if words[:2] == ["python", "-m"]:
        assert find_spec(program), program
    else:
        assert program in UTILITIES | set(NEEDS) | {"mkdocs"}, program
    return NEEDS.get(program, "")


def read_file_of_tools(words: list[str], recipe: str) -> str:
    """As `read_words`, of a script or a tool and its words."""
    file, *rest = words
    file = file.replace("bundle/", "tools/")  # tools/pack_gpu.py puts unpack_gpu.py there
    text = Path(file).read_text()
    if "run_recipe launch/" in text:
        named = re.search(r"run_recipe (launch/\S+)", text)
        assert named
        if rest[:1] == ["--recipe"]:
            return read_megarl(["run", *rest[1:]], recipe)
        return read_megarl(["run", named[1], *rest], recipe)
    if file == "tests/run_gpu.sh":
        if "--python" in rest:
            at = rest.index("--python")
            del rest[at : at + 2]
        read_file_of_tools(["tools/run_gpu.py", *rest], recipe)
        return "" if "--rehearse" in rest else GPU
    if file.endswith(".sh"):
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert all(option in text for option in options), f"{file} has no such option"
        return NETWORK if file == "launch/env.sh" or "smollm2" in rest else ""
    path = [str(Path(file).resolve().parent), *sys.path]
    with parsing(), patch.multiple(sys, argv=words, path=path), pytest.raises(Parsed):
        runpy.run_path(file, run_name="__main__")
    return NETWORK if file == "tools/real_model.py" else ""


@contextmanager
def parsing() -> Iterator[None]:
    """argparse reads words, and then nothing else is done."""
    with ExitStack() as stack:
        for name in ("parse_args", "parse_intermixed_args"):
            usual = getattr(argparse.ArgumentParser, name)

            def read(*words: Any, usual: Any = usual) -> NoReturn:
                usual(*words)
                raise Parsed

            stack.enter_context(patch.object(argparse.ArgumentParser, name, read))
        yield


def read_megarl(words: list[str], recipe: str) -> str:
    """As `read_words`, of `megarl` and its words. Recipes are read with the words' settings."""
    words = [word.replace("*", "x") for word in words]
    for word in words:
        path = Path(word)
        if word.startswith("runs/") and "." not in word:
            path = path / "recipe.yaml"  # as a run folder has it
        if path.suffix == ".yaml" and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(config.dump(resolved(recipe)))
    if cli.help_page(words) is not None:
        return ""
    name, *rest = words
    command = COMMANDS[name]
    if command.kinds():
        refuse_unknown(name, rest)
        options = parse(name, rest)
        if command.arguments:
            cli.load(command.arguments)(options)
        cli.read_recipe(name, options)
        return needed_by(rest[0], words)
    with parsing(), pytest.raises(Parsed):
        cli.plan(words).run()
    return ""


def needed_by(recipe: str, words: list[str]) -> str:
    """What a command needs that starts one of the recipes for GPUs."""
    path = ROOT / recipe
    is_for_gpus = path.is_file() and "gpu_memory_utilization" in path.read_text()
    return GPU if is_for_gpus and not STARTS_NOTHING & set(words) else ""
