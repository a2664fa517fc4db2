"""`--help` of every command, `--version`, and what a misspelt word is answered."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, python

from megarl import cli
from megarl.command_line.settings import settings
from megarl.command_line.table import COMMANDS
from megarl.command_line.words import refuse_unknown
from megarl.errors import UserError
from megarl.settings import config

RECIPE = ROOT / "launch" / "recipes" / "grpo.yaml"


def shell(*words: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """`megarl words`, or a line for bash in which $MEGARL is the command."""
    if not script:
        return python("-m", "megarl", *words)
    command = ["bash", "-c", script.replace("$MEGARL", f"{sys.executable} -m megarl")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name: str) -> None:
    page = cli.help_page([name, "--help"])
    assert (
        page
        == cli.help_page([name, "-h"])
        == cli.help_page(["help", name])
        == cli.help_page(["--help", name])
    )
    command = COMMANDS[name]
    assert page is not None and page.startswith(f"usage: megarl {name}")
    assert command.summary[1:].split()[-1] in page and f"megarl {name} {command.example}" in page
    assert all(option in page for option in command.option_names)
    assert (ROOT / command.docs).is_file()
    for kind in [*command.kinds().values()][:1]:
        assert all(f"\n  {one.key}" in page for one in settings(kind) if "." not in one.key)


def test_help_starts_at_once_and_ends_well() -> None:
    """Before a recipe, and in a process that imports nothing heavy."""
    heavy = "[m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules]"
    code = f"import sys\nfrom megarl import cli\nfor name in {list(COMMANDS)}: cli.help_page([name, '-h'])"
    done = python("-c", f"{code}\nprint({heavy})")
    assert done.stdout == "[]\n", done.stderr
    for words in (["--help"], ["run", "--help"]):
        done = shell(*words)
        assert done.returncode == 0 and done.stdout.startswith("usage: megarl"), done.stderr
    done = shell()
    assert done.returncode == 2 and done.stdout.startswith("usage: megarl COMMAND")


def test_help_about_a_section_or_a_word() -> None:
    section = cli.help_page(["run", "--help", "rollout"])
    keys = re.findall(r"^([a-z_.]+[a-z_]): ", section, re.MULTILINE)
    assert "rollout.group_size" in keys and "rollout.engine.tensor" in keys
    assert all(key.startswith("rollout.") for key in keys)
    word = cli.help_page(["run", "--help", "learning-rate"])
    keys = re.findall(r"^([a-z_.]+[a-z_]): ", word, re.MULTILINE)
    assert keys == ["critic.optimizer.learning_rate", "training.optimizer.learning_rate"]
    meant = cli.help_page(["run", "--help", "hung"])  # a word of an explanation
    assert "rollout.engine.stall_timeout_s: 180" in meant
    assert "critics.NAME.ranks: " in cli.help_page(["run", "--help", "critics.second.ranks"])
    assert "\nloss.method: dpo" in f"\n{cli.help_page(['run', 'dpo', '--help', 'loss'])}"
    with pytest.raises(UserError, match="does not exist"):
        cli.help_page(["run", "none.yaml", "--help", "rollout"])
    with pytest.raises(UserError, match="'learningrate'; did you mean learning_rate"):
        cli.help_page(["run", "--help", "learningrate"])


@pytest.mark.parametrize("words", [[str(RECIPE), "--help"], ["--help", str(RECIPE)]])
def test_help_has_the_values_of_the_recipe(words: list[str], tmp_path: Path) -> None:
    page = cli.help_page(["run", *words, "rollout.max"])
    assert "rollout.max_new_tokens: 48" in page and "; default 256)" in page
    assert "rollout.max_staleness: 0\n" in page
    wrong = tmp_path / "wrong.yaml"  # help is what helps here
    wrong.write_text("rollout: {max_new_token: 4, group_size: [1]}\nreward_models: 3\n")
    assert "rollout.group_size: [1]" in cli.help_page(["run", str(wrong), "--help", "rollout"])
    assert "reward_models.NAME.weight: 1\n" in cli.help_page(["run", str(wrong), "--help", "all"])
    with pytest.raises(UserError, match="does not exist"):
        cli.help_page(["run", str(tmp_path / "none.yaml"), "--help"])


def task_of(kind: Any) -> str:
    return next((task for task, other in config.TASKS.items() if other is kind), "none")


@pytest.mark.parametrize("kind", [*config.TASKS.values(), config.ServeRewardConfig])
def test_every_setting_is_on_the_page(kind: Any, tmp_path: Path) -> None:
    """With its values in words, its default, and the text below its declaration."""
    known = list(settings(kind))
    (tmp_path / "r.yaml").write_text(f"task: {task_of(kind)}\n")
    name = "run" if kind in config.TASKS.values() else "serve-reward"
    page = cli.help_page([name, str(tmp_path / "r.yaml"), "--help", "all"])
    for one in known:
        start = f"[{one.key}]" if one.is_section else f"{one.key}: "
        assert f"\n{start}" in f"\n{page}", one.key
        assert one.is_section or one.values, one
    assert not re.search(r"typing\.|<class|Annotated|object at 0x|PathText", page)
    assert sum(1 for one in known if one.meaning) > 0.8 * len(known)


@pytest.mark.parametrize("columns", [20, 40, 80, 300])
def test_pages_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = min(100, max(40, columns))
    texts = [cli.help_page([]), *(cli.help_page([name, "--help"]) for name in COMMANDS)]
    texts += [cli.help_page(["run", "--help", "all"])]
    lines = [line for text in texts for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith(("usage: ", "example: "))]
    too_long = [line for line in lines if len(line) > wide and " " in line.strip()]
    assert not [line for line in too_long if not re.fullmatch(r"\s*\S+: \S+", line)]


WRONG = {
    "rollot": "unknown command 'rollot'; did you mean rollout?",
    "serve_reward": "unknown command 'serve_reward'; did you mean serve-reward?",
    "frobnicate": "unknown command 'frobnicate'; use init, run, eval, ",
    "run r.yaml --print-confg": "unknown option '--print-confg'; did you mean --print-config?",
    "run r.yaml --dryrun": "unknown option '--dryrun'; did you mean --dry-run?",
    "run r.yaml --rank 2": "megarl run: unknown option '--rank'; did you mean --ranks?",
    "rollout r.yaml --nun 4": "unknown option '--nun'; did you mean --num?",
    "report run --output=x": "unknown option '--output'; did you mean --out?",
    "doctor --all": "unknown option '--all'; known are --json and --help",
    "completion fish": "megarl completion bash|zsh",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_misspelt_word_gets_the_right_one(line: str) -> None:
    with pytest.raises(UserError, match=re.escape(WRONG[line])):
        cli.help_page(line.split()) or cli.plan(line.split())


def test_settings_are_not_refused_as_options() -> None:
    for name, command in COMMANDS.items():
        for kind in command.kinds().values():
            refuse_unknown(name, [f"--{one.key}" for one in settings(kind)])
    refuse_unknown("run", ["r.yaml", "--rollout.min_p", "-0.5", "--resume=auto"])


def test_versions() -> None:
    done = shell("--version")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and re.match(r"megarl \d+\.\d+\.\d+", first)
    assert ("commit" in first) == (ROOT / ".git").exists()
    packages = [line.split()[0] for line in others]
    assert packages[0] == "Python" and {"torch", "ray", "deepspeed"} <= set(packages)


CANDIDATES = {
    "": ["run", "--version", "doctor"],
    "re": ["replay", "report"],
    "run --rollout.engine.ten": ["--rollout.engine.tensor"],
    "run --pr": ["--print-config", "--prompts.source"],
    "run --demonstrations.so": ["--demonstrations.source"],
    "run --dry": ["--dry-run"],
    "status --": ["--json", "--stacks", "--watch", "--help"],
}


def test_words_are_completed() -> None:
    """By bash, with the script that it is given."""
    lines = ['eval "$($MEGARL completion bash)"']
    for words in CANDIDATES:
        typed = ["megarl", *(words.split() or [""])]
        quoted = " ".join(f"'{word}'" for word in typed)
        lines += [
            f"COMP_WORDS=({quoted}) COMP_CWORD={len(typed) - 1}; _megarl; echo ${{COMPREPLY[*]}}"
        ]
    done = shell(script="\n".join(lines))
    assert done.returncode == 0, done.stderr
    for (words, some), line in zip(CANDIDATES.items(), done.stdout.splitlines(), strict=True):
        assert set(some) <= set(line.split()), words
        assert all(word.startswith(words.split(" ")[-1]) for word in line.split())


def test_what_is_no_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("folder: runs/mine\n")
    for name in (name for name, command in COMMANDS.items() if command.first == "RUN"):
        for path, what in (("none", "does not exist"), ("run/recipe.yaml", "is a file")):
            with pytest.raises(UserError, match=f"{path} {what}; name the run folder"):
                cli.plan([name, str(tmp_path / path)])
    with pytest.raises(UserError, match=r"is a folder; .*/run/recipe.yaml --resume true"):
        cli.plan(["run", str(tmp_path / "run")])
    with pytest.raises(UserError, match=r"is a folder; pass a .yaml file$"):
        cli.plan(["eval", str(tmp_path)])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to set; another place may be a folder."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    command = cli.load(COMMANDS["report"].run)
    for target in ("/dev/null/file", "/proc/file"):
        with pytest.raises(UserError, match=f"^{target} cannot be written: .*--out FILE$"):
            command([str(tmp_path), "--out", target])
    for words in ([], [str(tmp_path), "--out"], [str(tmp_path), str(tmp_path)]):
        with pytest.raises(UserError, match=r"needs one run folder: .* \[--out FILE\]"):
            command(words)
    other = tmp_path / "other"
    other.mkdir()
    assert command([f"--out={other}", str(tmp_path)]) == 0
    assert len(list(other.iterdir())) == 1
