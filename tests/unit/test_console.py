"""Standard output has results only, `run.log` has what libraries and children say, and a signal
ends a loop in order, a second one at once.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import ROOT, python, until

from megarl import cli
from megarl.errors import ProcessLost, UserError
from megarl.run.evaluate import shown
from megarl.system import console, signals

NOISE = """
import os, subprocess, sys
print("printed by a library")
os.write(1, b"written in C\\n")
print("a warning", file=sys.stderr)
subprocess.run([sys.executable, "-c", "print('by a child'); import os; os.write(2, b'its error\\\\n')"])
"""
LINES = ("printed by a library", "written in C", "a warning", "by a child", "its error")


def run(code: str, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    head = "from megarl.system import console, signals\nfrom megarl.errors import UserError\n"
    head += "from pathlib import Path\nimport sys\n"
    return python("-c", head + code, str(folder), **settings)


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.strip().splitlines())


def test_each_stream_has_what_is_its_own(tmp_path: Path) -> None:
    """Of a command that is noisy before and after it has a run folder, and fails in the end."""
    code = f"""
with console.diverted():
{indented(NOISE)}
    console.open_log(Path(sys.argv[1]))
    console.say("a line of ours")
    with console.phase("a phase"):
        pass
    console.result('{{"x": 1}}')
{indented(NOISE)}
    raise RuntimeError("two\\nlines")
"""
    done = run(code, tmp_path)
    assert done.stdout == '{"x": 1}\n'
    ours, phase, error = done.stderr.splitlines()
    assert ours == "a line of ours" and phase.startswith("a phase: 0.0 s  [")
    assert error.startswith("megarl: error: RuntimeError: two lines (the traceback")
    assert str(tmp_path / "run.log") in error
    log, at = (tmp_path / "run.log").read_text(), 0
    for line in [*LINES, "a line of ours", *LINES, "Traceback", "RuntimeError: two"]:
        at = log.index(line, at) + 1
    assert "a phase" in log


def test_an_error_before_there_is_a_log_shows_what_was_kept(tmp_path: Path) -> None:
    done = run("with console.diverted():\n    print('kept')\n    1 / 0\n", tmp_path)
    assert done.stdout == ""
    assert "kept\n" in done.stderr and "megarl: error: ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("OSError(28, 'No space left')", 1, "megarl: error: OSError: [Errno 28] No space left"),
        ("UserError('what to set')", 2, "megarl: error: what to set"),
    ],
)
def test_an_error_is_shown_before_what_surrounds_it_is_closed(
    error: str, code: int, said: str, tmp_path: Path
) -> None:
    script = f"""
with console.diverted():
    console.open_log(Path(sys.argv[1]))
    try:
        with console.first_word():
            raise {error}
    finally:
        console.say("closed")
"""
    done = run(script, tmp_path)
    first, second = done.stderr.splitlines()
    assert first.startswith(said) and second == "closed" and done.returncode == code
    assert (tmp_path / "run.log").read_text().count(said.removeprefix("megarl: error: ")) >= 1


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Where the log cannot be written either."""
    (tmp_path / console.LOG).symlink_to("/dev/full")
    code = "with console.diverted():\n    console.open_log(Path(sys.argv[1]))\n"
    code += "    raise OSError(28, 'No space left on device', 'metrics.jsonl')\n"
    line = run(code, tmp_path).stderr.splitlines()[0]
    said = "OSError: [Errno 28] No space left on device: 'metrics.jsonl'; free some space where"
    said += " the run folder is, and go on with --resume auto (the traceback could not be written"
    assert line == f"megarl: error: {said} to {tmp_path / console.LOG})"


def test_a_console_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    """Standard error goes to a file, as under a scheduler."""
    code = "with console.diverted():\n    console.open_log(Path(sys.argv[1]))\n"
    code += "    console.say('a line')\n    console.result('whole')\n"
    streams = {"capture_output": False, "stdout": subprocess.PIPE}
    with Path("/dev/full").open("w") as full:
        done = run(code, tmp_path, **streams, stderr=full)
    assert (done.returncode, done.stdout) == (0, "whole\n")
    assert "a line" in (tmp_path / "run.log").read_text()


def test_without_a_log_noise_is_dropped(tmp_path: Path) -> None:
    done = run(f"with console.diverted():\n{indented(NOISE)}", tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_run_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    give_back = console.hold(tmp_path)
    with pytest.raises(UserError, match="in use by another run"):
        console.hold(tmp_path)
    give_back()
    console.hold(tmp_path)()


@pytest.fixture
def handlers() -> object:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    # Another test of this process may have left a `signals.guard`, which would end the process.
    wakeup = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_sets_a_flag(handlers: object, capsys: pytest.CaptureFixture) -> None:
    def loop() -> None:
        with signals.graceful() as stop:
            assert not stop
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # the launcher's, at the same time
            assert stop
            stop.end(3, is_main=True)

    with pytest.raises(signals.EndedBySignal) as ended:
        loop()
    assert ended.value.number == signal.SIGINT
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("megarl: Ctrl-C: the run saves a checkpoint")
    assert "step 3 is saved" in last


def test_a_second_signal_ends_at_once(handlers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_WITHIN_S", 0.0)

    def loop() -> None:
        with signals.graceful():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the loop went on")

    with pytest.raises(signals.EndedBySignal):
        loop()


PROGRAM = """
import signal, sys, threading, time
from megarl.system import signals

signals.guard(0.5)
signals.save_within(signals.SAVE_WITHIN_S + float(sys.argv[1]))
with signals.graceful() as stop:
    signal.raise_signal(signal.SIGTERM)
    threading.Event().wait(2.0)
    print("saved", bool(stop), flush=True)
"""


@pytest.mark.parametrize(("more_s", "code", "out"), [(0, 143, ""), (60, 0, "saved True\n")])
def test_a_recipe_may_allow_more_time_to_save(more_s: int, code: int, out: str) -> None:
    """Without it, the guard ends the process by force."""
    done = python("-c", PROGRAM, str(more_s))
    assert (done.returncode, done.stdout) == (code, out), done.stderr


# Its finder stops the command at its first import of a module that begins with WAITS_AT.
WAITS = """
import os, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(os.environ["WAITS_AT"]):
            sys.meta_path.remove(self)
            open(os.environ["MARK"], "w").close()
            time.sleep(100)

sys.meta_path.insert(0, Finder())
"""


def waiting(folder: Path, arguments: Sequence[str], module: str) -> subprocess.Popen[str]:
    """The command line `arguments`, once it has come to import `module`."""
    (folder / "sitecustomize.py").write_text(WAITS)
    mark = folder / "mark"
    settings = {"WAITS_AT": module, "MARK": str(mark), "PYTHONPATH": str(folder)}
    streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(arguments, cwd=ROOT, env=os.environ | settings, text=True, **streams)
    until(lambda: mark.exists() or process.poll() is not None)
    assert mark.exists(), process.communicate()
    return process


RECIPES = {
    "run": "grpo", "eval": "grpo", "sample": "sample", "rollout": "grpo",
    "serve-reward": "serve_reward",
}  # fmt: skip
"""{command: a recipe for it}"""
ENDS = [
    *itertools.product(["run"], signals.SIGNALS),
    *zip(sorted(set(cli.COMMANDS) - {"run"}), itertools.cycle(signals.SIGNALS)),
]


@pytest.mark.parametrize(("command", "number"), ENDS)
def test_a_signal_at_the_start_ends_a_command_with_one_line(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    arguments, module = [command], cli.COMMANDS[command].run.partition(":")[0]
    if command in RECIPES:
        arguments.append(f"launch/recipes/{RECIPES[command]}.yaml")
        module = "megarl.settings.config"
    if command == "replay":
        module = "megarl.apps.runs.command_checks"
    if command in ("replay", "ledger", "report", "status"):
        arguments.append(str(tmp_path))
    process = waiting(tmp_path, [sys.executable, "-m", "megarl", *arguments], module)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    trains = cli.COMMANDS[command].owns_folder
    stage = "while it was starting" if trains else "before it was done"
    assert process.returncode == 128 + number
    assert said == f"megarl: {signals.name_of(number)}: megarl {command} ended {stage}\n"


def test_a_signal_while_the_verifier_loads(tmp_path: Path) -> None:
    """Inside an event loop, with a worker process below."""
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'mark')!r}, 'w').close()\ntime.sleep(100)\n"
        "def score(prompt, response):\n    return 1.0\n"
    )
    (tmp_path / "serve.yaml").write_text(
        f"folder: {tmp_path}/run\nenvironment: {{verifier: '{tmp_path}/slow.py:score'}}\n"
    )
    command = [sys.executable, "-m", "megarl", "serve-reward", str(tmp_path / "serve.yaml")]
    process = waiting(tmp_path, command, "nothing.of.this.name")
    workers = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert said == "megarl: SIGTERM: megarl serve-reward ended before it was done\n"
    assert workers and not psutil.wait_procs(workers, timeout=10)[1]


def test_nohup_keeps_a_run_from_sighup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "megarl", "doctor"]
    process = waiting(tmp_path, command, "megarl.apps.doctor.doctor")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "SIGHUP" not in said


def test_what_is_not_saved_in_time_is_said(
    handlers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, heard = [], threading.Event()
    monkeypatch.setattr(signals, "_save_within_s", 0.0)
    say = lambda text: (said.append(text), len(said) == 2 and heard.set())  # noqa: E731
    monkeypatch.setattr(signals, "say", say)
    with signals.graceful():
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(30)
    assert "no checkpoint of this moment" in said[1]


@pytest.mark.parametrize("activated", [True, False])
def test_operators_are_built_and_found_with_the_same_programs(
    activated: bool, tmp_path: Path
) -> None:
    """Another ninja on PATH would build them again."""
    other = tmp_path / "ninja"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([*([beside] if activated else []), str(tmp_path), os.environ["PATH"]])
    code = """
from megarl.system.process_env import prepare_environment
import os, shutil
os.environ.pop("TORCH_EXTENSIONS_DIR", None)
prepare_environment(1)
print(shutil.which("ninja"), os.environ.get("TORCH_EXTENSIONS_DIR"))
"""
    found = run(code, tmp_path, env=os.environ | {"PATH": path}).stdout.split()
    assert found == [f"{beside}/ninja", str(Path(sys.prefix) / "torch_extensions")]


def test_a_folder_is_taken_by_a_run_that_made_a_step(tmp_path: Path) -> None:
    from megarl.checkpoints.run_folder import check_folder

    for name in ("recipe.yaml", "run.log", "evaluations.jsonl"):
        (tmp_path / name).write_text("{}\n")
    metrics, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    metrics.touch()
    (checkpoints / ".writing_000001").mkdir(parents=True)
    check_folder(str(tmp_path), resume=False)  # ended before its first step
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        check_folder(str(tmp_path), resume=False)
    check_folder(str(tmp_path), resume="auto")
    with pytest.raises(ValueError, match=r"resume is true, .* has no checkpoint; set resume"):
        check_folder(str(tmp_path), resume=True)
    (checkpoints / "step_000001").mkdir()
    with pytest.raises(ValueError, match="already holds a run, at step 1; set resume to true"):
        check_folder(str(tmp_path), resume=False)
    (tmp_path / "recipe.yaml").write_text("steps: 3\n")
    with pytest.raises(ValueError, match=r"holds a run, at step 1 of 3; .*--resume auto"):
        check_folder(str(tmp_path), resume=False)
    (checkpoints / "step_000003").mkdir()
    with pytest.raises(ValueError, match=r"is finished \(step 3 of 3\); .*resume to true and"):
        check_folder(str(tmp_path), resume=False)


COMMANDS = {"run --help all": 0, "run {recipe} --print-config": 0, "report {folder}": 2}


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("where", ["<&- >&- 2>&-", ">/dev/full", "| true"])
def test_a_command_whose_output_goes_nowhere(line: str, where: str, tmp_path: Path) -> None:
    """Closed descriptors and a reader that has gone are no error, a full disk is one in one line."""
    words = line.format(recipe=ROOT / "launch" / "recipes" / "quickstart.yaml", folder=tmp_path)
    script = f"set -o pipefail; {sys.executable} -m megarl {words} {where}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    code = 2 if where == ">/dev/full" else COMMANDS[line]
    assert done.returncode == code, done.stderr
    errors = done.stderr.splitlines()
    if "2>&-" in where:
        assert not errors
    elif code:
        assert len(errors) == 1 and errors[0].startswith("megarl: error: "), done.stderr
        assert where != ">/dev/full" or COMMANDS[line] or "standard output" in errors[0]


@pytest.mark.parametrize("settings", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_output_is_utf8_in_any_locale(settings: dict[str, str], tmp_path: Path) -> None:
    """A recipe that is printed to a file is read again."""
    recipe = tmp_path / "rezept.yaml"
    text = "task: rl\nfolder: läufe\nmodel: {path: modèl}\nprompts: {source: \N{SNOWMAN}.jsonl}\n"
    recipe.write_text(text, encoding="utf-8")
    words = ["-m", "megarl", "run", str(recipe)]
    bytes_in = {"text": False, "env": os.environ | settings}
    done: Any = python(*words, "--print-config", **bytes_in)
    assert done.returncode == 0, done.stderr
    assert "folder: läufe\n" in done.stdout.decode() and "\N{SNOWMAN}.jsonl" in done.stdout.decode()
    done = python(*words, "--check", **bytes_in)
    assert done.returncode == 2 and "modèl" in done.stderr.decode()


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    """Their names, and what is in them: a verifier opens its file without naming an encoding."""
    from support.tiny import write_model

    write_model(tmp_path / "modèl")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "note": "日本"} for n in range(20)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "größen.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "wörter.txt").write_text("é 日本", encoding="utf-8")
    (tmp_path / "prüfer.py").write_text(
        "# größe\nwords = open(__file__.replace('prüfer.py', 'wörter.txt')).read()\n"
        "def score(prompt, response):\n    print(words)\n    return float(words == 'é 日本')\n",
        encoding="utf-8",
    )
    (tmp_path / "rezept.yaml").write_text(
        f"task: rl\nfolder: {tmp_path}/läufe\nmodel: {{path: modèl}}\n"
        "prompts: {source: größen.jsonl}\nenvironment: {verifier: 'prüfer.py:score'}\n"
        "rollout: {max_new_tokens: 8, stop: [日本]}\n",
        encoding="utf-8",
    )
    words = ["-m", "megarl", "run", str(tmp_path / "rezept.yaml"), "--check"]
    settings = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    done: Any = python(*words, text=False, env=settings)
    assert done.returncode == 0, done.stderr.decode()
    assert "größen.jsonl" in done.stderr.decode(), "it is told that files are beside the recipe"


def test_greedy_and_sampled_accuracy_are_told_apart() -> None:
    greedy = {"accuracy": 0.75, "reward/mean": 0.5}
    drawn = {"accuracy": 0.5, "pass@1": 0.5, "pass@4": 0.9, "maj@4": None}
    both = greedy | {"sampled": {"samples": 4, "temperature": 1.0} | drawn}
    assert shown(greedy, 0.0) == "greedy: accuracy 0.75"
    assert shown(greedy, 0.6) == "sampled at 0.6: accuracy 0.75"
    told = "greedy: accuracy 0.75; 4 sampled at 1: accuracy 0.5  pass@1 0.5  pass@4 0.9"
    assert shown(both, 0.0) == told


def test_a_process_that_died_is_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before and after there is a log, which has the traceback."""

    def fails(has_log: bool) -> None:
        with console.diverted(), console.first_word():
            console.open_log(tmp_path) if has_log else None
            raise ProcessLost("the rollout service died (a batch): killed")

    for has_log in (False, True):
        with pytest.raises(SystemExit):
            fails(has_log)
        said = capfd.readouterr().err
        assert said == "megarl: error: the rollout service died (a batch): killed\n"
    assert "Traceback" in (tmp_path / console.LOG).read_text()


STEERING = {
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[2J\x9b2J": r"\x1b[2J\x9b2J",
    "a\rb\x08\x7f": r"a\rb\x08\x7f",
    "\u202egnp.exe\u2066": r"\u202egnp.exe\u2066",
    "two\nlines\t你好 🎉\xa0\u200d": "two\nlines\t你好 🎉\xa0\u200d",
}


@pytest.mark.parametrize("text", STEERING)
def test_what_others_write_steers_no_terminal(
    text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console.say(text)
    console.result(text)

    def fails() -> None:
        with console.diverted():
            console.open_log(tmp_path)
            raise RuntimeError(f"the agent ended with exit code 1: {text}")

    with pytest.raises(SystemExit):
        fails()
    out, err = capfd.readouterr()
    assert out == f"{STEERING[text]}\n" and err.startswith(out)
    shown = err + (tmp_path / console.LOG).read_bytes().decode()
    assert not {one for one in shown if one in text and one not in STEERING[text]}
