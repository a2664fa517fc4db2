"""`--help` of every command, `--version`, and what a misspelt word is answered."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, python

from megarl import cli, config
from megarl.command_line import pages
from megarl.command_line.completion import candidates
from megarl.command_line.settings import settings
from megarl.command_line.table import COMMANDS
from megarl.errors import UserError

RECIPE = ROOT / "launch" / "recipes" / "grpo.yaml"


def shell(*words: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """`megarl words`, or a line for bash in which $MEGARL is the command."""
    if not script:
        return python("-m", "megarl", *words)
    command = ["bash", "-c", script.replace("$MEGARL", f"{sys.executable} -m megarl")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name: str) -> None:
    page = cli.told([name, "--help"])
    assert page == cli.told([name, "-h"]) == cli.told(["help", name]) == cli.told(["--help", name])
    command = COMMANDS[name]
    assert page.startswith(f"usage: megarl {name}")
    assert command.summary[1:].split()[-1] in page and f"megarl {name} {command.example}" in page
    assert all(option in page for option in command.option_names)
    assert (ROOT / command.docs).is_file()
    if command.config:
        kind = getattr(config, command.config)
        assert all(f"\n  {one.key}" in page for one in settings(kind) if "." not in one.key)


def test_help_starts_at_once_and_ends_well() -> None:
    """Before a recipe, and in a process that imports nothing heavy."""
    heavy = "[m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules]"
    code = (
        f"import sys\nfrom megarl import cli\nfor name in {list(COMMANDS)}: cli.told([name, '-h'])"
    )
    done = python("-c", f"{code}\nprint({heavy})")
    assert done.stdout == "[]\n", done.stderr
    for words in (["--help"], ["train", "--help"], ["torchrun", "--nproc-per-node", "2", "-h"]):
        done = shell(*words)
        assert done.returncode == 0 and done.stdout.startswith("usage: megarl"), done.stderr
    done = shell()
    assert done.returncode == 2 and done.stdout.startswith("usage: megarl COMMAND")


def test_help_about_a_section_or_a_word() -> None:
    section = cli.told(["train", "--help", "rollout"])
    keys = re.findall(r"^([a-z_.]+[a-z_]): ", section, re.MULTILINE)
    assert "rollout.group_size" in keys and "rollout.engine.tensor" in keys
    assert all(key.startswith("rollout.") for key in keys)
    word = cli.told(["train", "--help", "learning-rate"])
    keys = re.findall(r"^([a-z_.]+[a-z_]): ", word, re.MULTILINE)
    assert keys == ["critic.optimizer.learning_rate", "training.optimizer.learning_rate"]
    meant = cli.told(["train", "--help", "hung"])  # a word of an explanation
    assert "rollout.engine.stall_timeout_s: 180" in meant
    assert "critics.NAME.ranks: " in cli.told(["train", "--help", "critics.second.ranks"])
    told = cli.told(["train", str(RECIPE), "--help", "rollout"])
    ranks = ["torchrun", "--nproc-per-node", "2", "train", str(RECIPE), "--help=rollout"]
    assert cli.told(ranks) == told == cli.told(["run", str(RECIPE), "--help", "rollout"])
    tuned = [str(RECIPE.with_name("dpo.yaml")), "--ranks", "2", "--help", "loss"]
    assert cli.told(["run", *tuned]) == cli.told(["preference", *tuned])
    assert cli.told(["run", "--help", "rollout"]) == cli.told(["train", "--help", "rollout"])
    with pytest.raises(UserError, match="does not exist"):
        cli.told(["run", "none.yaml", "--help", "rollout"])
    with pytest.raises(UserError, match="'learningrate'; did you mean learning_rate"):
        cli.told(["train", "--help", "learningrate"])


@pytest.mark.parametrize("words", [[str(RECIPE), "--help"], ["--help", str(RECIPE)]])
def test_help_has_the_values_of_the_recipe(words: list[str], tmp_path: Path) -> None:
    page = cli.told(["train", *words, "rollout.max"])
    assert "rollout.max_new_tokens: 48" in page and "; default 256)" in page
    assert "rollout.max_staleness: 0\n" in page
    wrong = tmp_path / "wrong.yaml"  # help is what helps here
    wrong.write_text("rollout: {max_new_token: 4, group_size: [1]}\nreward_models: 3\n")
    assert "rollout.group_size: [1]" in cli.told(["train", str(wrong), "--help", "rollout"])
    assert "reward_models.NAME.weight: 1\n" in cli.told(["train", str(wrong), "--help", "all"])
    with pytest.raises(UserError, match="does not exist"):
        cli.told(["train", str(tmp_path / "none.yaml"), "--help"])


@pytest.mark.parametrize("kind", sorted({one.config for one in COMMANDS.values() if one.config}))
def test_every_setting_is_on_the_page(kind: str) -> None:
    """With its values in words, its default, and the text below its declaration."""
    known = list(settings(getattr(config, kind)))
    name = next(name for name, one in COMMANDS.items() if one.config == kind)
    page = cli.told([name, "--help", "all"])
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
    texts = [cli.told([]), *(cli.told([name, "--help"]) for name in COMMANDS)]
    texts += [cli.told(["train", "--help", "all"])]
    lines = [line for text in texts for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith(("usage: ", "example: "))]
    too_long = [line for line in lines if len(line) > wide and " " in line.strip()]
    assert not [line for line in too_long if not re.fullmatch(r"\s*\S+: \S+", line)]


WRONG = {
    "trian": "unknown command 'trian'; did you mean train?",
    "reward_model": "unknown command 'reward_model'; did you mean reward-model?",
    "frobnicate": "unknown command 'frobnicate'; use init, run, train, ",
    "train r.yaml --print-confg": "unknown option '--print-confg'; did you mean --print-config?",
    "train r.yaml --ranks 2": "--ranks is for --check",
    "run r.yaml --dryrun": "unknown option '--dryrun'; did you mean --dry-run?",
    "run r.yaml --rank 2": "megarl run: unknown option '--rank'; did you mean --ranks?",
    "rollout r.yaml --nun 4": "unknown option '--nun'; did you mean --num?",
    "report run --output=x": "unknown option '--output'; did you mean --out?",
    "doctor --all": "unknown option '--all'; known are --json and --help",
    "launch r.yaml --dryrun": "unknown option '--dryrun'; did you mean --dry-run?",
    "torchrun --nproc-per-nod 2 train r.yaml": "did you mean --nproc-per-node?",
    "completion fish": "megarl completion bash|zsh",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_misspelt_word_gets_the_right_one(line: str) -> None:
    def answer(name: str, *rest: str) -> object:
        return cli.told([name, *rest]) or cli.dispatch(name, list(rest))

    with pytest.raises(UserError, match=re.escape(WRONG[line])):
        answer(*cli.words_of_command(line.split()))


def test_words_that_are_right_are_not_refused() -> None:
    """Torchrun's own options, settings of a recipe, and what stands after another command."""
    from torch.distributed.run import get_args_parser

    theirs = [word for one in get_args_parser()._actions for word in one.option_strings]
    assert "--nproc_per_node" in theirs
    pages.refuse_unknown("torchrun", [*theirs, "train", "r.yaml", "--json"])
    for command in (one for one in COMMANDS if COMMANDS[one].config):
        known = settings(getattr(config, COMMANDS[command].config))
        words = [f"--{one.key}" for one in known]
        pages.refuse_unknown(command, words)
        pages.refuse_unknown("run", words if COMMANDS[command].owns_folder else [])
    pages.refuse_unknown("launch", ["r.yaml", "--cpu", "--", "--steps", "3"])
    pages.refuse_unknown("train", ["r.yaml", "--rollout.min_p", "-0.5", "--resume=auto"])


def test_versions() -> None:
    done = shell("--version")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and re.match(r"megarl \d+\.\d+\.\d+", first)
    assert ("commit" in first) == (ROOT / ".git").exists()
    packages = [line.split()[0] for line in others]
    assert packages[0] == "Python" and {"torch", "ray", "deepspeed"} <= set(packages)


CANDIDATES = {
    ("",): ["train", "--version", "doctor"],
    ("re",): ["reward-model", "replay", "report"],
    ("train", "r.yaml", "--roll"): ["--rollout."],
    ("train", "r.yaml", "--rollout.e"): ["--rollout.engine."],
    ("train", "r.yaml", "--pr"): ["--print-config", "--prompts."],
    ("train", "r.yaml", "--resume", ""): ["true", "false", "auto"],
    ("train", "r.yaml", "--resume", "=", "a"): ["auto"],
    ("eval", "r.yaml", "--algorithm.loss", "ppo"): ["ppo_clip"],
    ("train", "r.yaml", "--algorithm.credit", "tu"): ["turn"],
    ("distill", "r.yaml", "--teacher.mo"): ["--teacher.model."],
    ("torchrun", "--nproc-per-node", "2", "sf"): ["sft"],
    ("torchrun", "--nproc-per-node", "2", "sft", "r.yaml", "--demo"): ["--demonstrations."],
    ("launch", "r.yaml", "--dry"): ["--dry-run"],
    ("run", "r.yaml", "--ra"): ["--ranks"],
    ("run", "r.yaml", "--dry"): ["--dry-run"],
    ("run", "r.yaml", "--", "--roll"): ["--rollout."],
    ("run", "launch/recipes/dpo.yaml", "--loss.me"): ["--loss.method"],
    ("run", "launch/recipes/dpo.yaml", "--loss.method", "si"): ["simpo"],
    ("run", "lau"): [],
    ("launch", "r.yaml", "--", "--step"): ["--steps"],
    ("train", "--help", "weight"): ["weight_sync."],
    ("status", "run", "--"): ["--json", "--stacks", "--watch", "--help"],
    ("completion", "b"): ["bash"],
    ("train", "lau"): [],
    ("train", "r.yaml", "--folder", ""): [],
    ("trian", ""): [],
}


@pytest.mark.parametrize("typed", CANDIDATES)
def test_the_tab_key_knows_commands_settings_and_values(typed: tuple[str, ...]) -> None:
    found, wanted = candidates(typed), CANDIDATES[typed]
    assert set(wanted) <= set(found) and (typed[-1] == "" or found == wanted), found


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """As its Tab key does: commands, settings, and a file where nothing else is known."""
    (tmp_path / "my recipe.yaml").touch()
    (tmp_path / "my notes.txt").touch()
    script = f"""
    eval "$($MEGARL completion bash)"
    export PYTHONPATH={ROOT}; cd {tmp_path}
    compopt() {{ :; }}
    megarl() {{ $MEGARL "$@"; }}
    tab() {{
      COMP_WORDS=(megarl "$@"); COMP_CWORD=$#; _megarl megarl
      printf "[%s]" "${{COMPREPLY[@]}}"
    }}
    tab repl; tab eval r.yaml --algorithm.los; tab train my
    """
    done = shell(script=script)
    assert done.stdout == "[replay][--algorithm.loss][my recipe.yaml]", done.stderr


def test_what_is_no_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("folder: runs/mine\n")
    runs = [name for name, command in COMMANDS.items() if command.first == "RUN"]
    assert len(runs) == 4
    for name in runs:
        for path, what in (("none", "does not exist"), ("run/recipe.yaml", "is a file")):
            with pytest.raises(UserError, match=f"{path} {what}; name the run folder"):
                cli.dispatch(name, [str(tmp_path / path)])
    with pytest.raises(UserError, match=r"is a folder; .*/run/recipe.yaml --resume true"):
        cli.dispatch("train", [str(tmp_path / "run")])
    with pytest.raises(UserError, match=r"is a folder; pass a .yaml file$"):
        cli.dispatch("eval", [str(tmp_path)])


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
