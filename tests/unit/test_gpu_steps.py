"""tools/gpu_steps.toml and tools/run_gpu.py: which steps fit and which can run with this Python, what
is read of a step, that a failure stops nothing, and that several runs add up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import gpu_steps
import psutil
import pytest
import run_gpu
from gpu_results import KEPT_BYTES, earlier
from gpu_steps import STEPS, Step, fits, plan
from support.commands import ROOT, python, until


def step(name: str, expected_s: float = 1.0, code: str = "", **settings: object) -> Step:
    """A step that runs `code` in Python."""
    command = ("{python}", "-c", code)
    made = Step(name, "something", command, expected_s, limit_s=30.0, rehearsal=command)
    return replace(made, **settings)  # pyright: ignore[reportArgumentType]


def lives(pid: int) -> bool:
    """Where nobody reaps orphans, those that ended stay as zombies."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_does_not_fit_is_passed_over_and_what_is_shorter_still_runs() -> None:
    steps = [step("a", 50), step("b", 40), step("c", 9), step("d", 2)]
    chosen, rest = plan(steps, minutes=1)
    assert [one.name for one in chosen] == ["a", "c"] and [one.name for one in rest] == ["b", "d"]
    assert fits(steps, 45.0) is steps[1] and fits(steps, 1.9) is None
    assert plan(steps, minutes=10) == (steps, [])


def test_a_step_without_its_file_is_skipped(tmp_path: Path) -> None:
    assert gpu_steps.lacking(step("a", path=str(tmp_path)), 1) == ""
    assert gpu_steps.lacking(step("a", path="~/no/such"), 1) == "there is no ~/no/such"


def test_the_steps_are_whole() -> None:
    assert len({one.name for one in STEPS}) == len(STEPS)
    for one in STEPS:
        assert 0 < one.expected_s <= one.limit_s, one.name
        assert bool(one.rehearsal) != bool(one.no_rehearsal), one.name
        for command in filter(None, (one.command, one.rehearsal)):
            words = gpu_steps.words(command, python="python")
            for word in words:  # files of tests and tools are where the step says
                path = word.split("::")[0]
                if path.startswith(("tests/", "tools/", "launch/")):
                    assert (ROOT / path).exists(), (one.name, path)


def test_every_test_of_a_gpu_belongs_to_a_step() -> None:
    named = {word.split("::")[0] for one in STEPS for word in one.command}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.gpu" in path.read_text() and path != Path(__file__):
            assert str(path.relative_to(ROOT)) in named, path


@pytest.mark.nightly
def test_each_step_of_tests_selects_some() -> None:
    commands = [command for one in STEPS for command in (one.command, one.rehearsal)]
    options = [command[3:] for command in commands if "pytest" in command[:3]]
    assert len(options) >= 20
    code = (
        f"import pytest\nfor options in {options!r}:\n"
        "    code = pytest.main([*options, '-q', '-p', 'no:cacheprovider', '--collect-only'])\n"
        "    assert code == 0, options"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.nightly
def test_steps_of_kernels_need_neither_engines_nor_deepspeed() -> None:
    """Their tests are collected, and their benches imported, where these packages are missing."""
    absent = ("deepspeed", "vllm", "ray", "flash_attn")
    kernels = [one for one in STEPS if one.needs and not set(one.needs) & set(absent)]
    assert len(kernels) >= 6
    words = {word for one in kernels for word in one.command}
    tests = sorted(word for word in words if word.startswith("tests/"))
    benches = sorted(Path(word).stem for word in words if word.startswith("tools/bench/"))
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"sys.path[:0] = ['.', 'tools/bench']\n"
        f"import importlib, pytest\n"
        f"for name in {[*benches, 'attention_cuda']!r}:\n"
        "    importlib.import_module(name)\n"
        "options = ['-q', '-p', 'no:cacheprovider', '--collect-only', '-m', 'gpu']\n"
        f"sys.exit(pytest.main([*options, *{tests!r}]))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for path in tests:
        assert f"{path}::" in done.stdout, path


def test_a_signal_ends_the_step_too(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)"
    command = ("{python}", "-c", code)
    program = (
        "import sys; sys.path.insert(0, 'tools'); import run_gpu; from gpu_steps import Step;"
        f"run_gpu.STEPS = [Step('a', '', {command!r}, 1.0, 60.0, rehearsal={command!r})];"
        f"sys.exit(run_gpu.main(['--rehearse', '--out', {str(tmp_path / 'out')!r}]))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL, text=True
    )
    until(lambda: told.exists() and told.read_text().endswith("."))
    step_pid = int(told.read_text()[:-1])
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) != 0
    assert not lives(step_pid)


def test_short_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "import sys; sys.stderr.write('x' * 3_000_000); print('{\"value\": 1}')"
    steps = [
        step("first", code=long, reads="json"),
        step("second", expected_s=50, code="raise SystemExit(3)"),
        step("third", expected_s=500, code="print('{\"value\": 3}')", reads="json"),
    ]
    monkeypatch.setattr(run_gpu, "STEPS", steps)
    options = ["--rehearse", "--out", str(tmp_path)]

    def statuses() -> dict[str, str]:
        found = json.loads((tmp_path / "results.json").read_text())["results"]
        return {one["step"]: one["status"] for one in found}

    assert run_gpu.main([*options, "--minutes", "0.2"]) == 0
    assert statuses() == {"first": "ok", "second": "no time", "third": "no time"}
    assert run_gpu.main([*options, "--minutes", "2"]) == 1
    assert statuses() == {"first": "ok", "second": "failed", "third": "no time"}
    assert run_gpu.main([*options, "--minutes", "10"]) == 1  # the failed one is not run again
    assert statuses() == {"first": "ok", "second": "failed", "third": "ok"}
    assert run_gpu.main([*options, "--minutes", "10", "--only", "first"]) == 1
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["01-first", "02-second", "03-third", "04-first"]
    found = earlier(tmp_path, rehearsal=True, order=["third", "first", "second"])
    assert [one.step for one in found] == ["third", "first", "second"]
    assert all("torch" in one.made_with for one in found)
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        sizes = {one.name: one.size for one in tar.getmembers()}
    assert {"results/results.json", "results/results.md"} <= set(sizes)
    assert "results/02-second/output.txt" in sizes
    assert sizes["results/01-first/output.txt"] == KEPT_BYTES
    with pytest.raises(ValueError, match="rehearsal on the CPU"):
        earlier(tmp_path, rehearsal=False, order=[])


def test_the_script_takes_another_python_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "started: $*"\n')
    other.chmod(0o755)
    script = ["bash", str(ROOT / "tests" / "run_gpu.sh"), "--rehearse", "--minutes", "9"]
    for words, more in (
        ([*script, "--python", str(other)], {}),
        (script, {"MEGARL_PYTHON": str(other)}),
    ):
        # An environment cannot be made with this PYTHON.
        settings = {**os.environ, **more, "PYTHON": "/nowhere/python"}
        done = subprocess.run(words, env=settings, capture_output=True, text=True)
        assert done.stdout == "started: tools/run_gpu.py --rehearse --minutes 9\n", done.stderr
    done = subprocess.run([*script, "--python", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and "there is no Python /nowhere" in done.stderr


def test_a_failure_a_hang_and_a_child_left_behind_stop_nothing(tmp_path: Path) -> None:
    orphan = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(300)'], start_new_session=True,"
        " stdout=subprocess.DEVNULL).pid)"
    )
    shell = 'echo "{\\"python\\": \\"$MEGARL_PYTHON\\"}"'
    steps = [
        step("fails", code="raise SystemExit(3)"),
        step("hangs", code="import time; time.sleep(300)", limit_s=1.0),
        step("leaves", code=orphan, reads="json"),
        step("says", code="print('a warning'); print('{\"value\": 7}')", reads="json"),
        step("says nothing", code="print('seven')", reads="json"),
        # `launch/quickstart.sh` takes MEGARL_PYTHON instead of preparing an environment.
        step("script", rehearsal=("bash", "-c", shell), reads="json", needs=("json",)),
        step("lacks", code="raise SystemExit(1)", needs=("json", "no_such_a", "no_such_b")),
        step("long", 10**6),
        step("only there", rehearsal=(), no_rehearsal="needs two GPUs"),
        step("where", rehearsal=("echo", '"{out}"'), reads="json"),
    ]
    report = run_gpu.go(steps, tmp_path, minutes=2, rehearsal=True)
    found = {one.step: one for one in report.results}
    statuses = {"only there": "not rehearsed", "fails": "failed", "hangs": "timed out"}
    statuses |= {"leaves": "ok", "says": "ok", "says nothing": "failed", "long": "no time"}
    statuses |= {"script": "ok", "lacks": "skipped", "where": "ok"}
    assert {name: one.status for name, one in found.items()} == statuses
    assert found["fails"].note == "exit code 3" and found["says"].found == {"value": 7}
    assert found["lacks"].note == "not installed here: no_such_a, no_such_b"
    assert found["script"].found == {"python": sys.executable}
    assert Path(found["where"].found).name == "07-where"
    assert "1 processes left behind" in found["leaves"].note
    assert not lives(found["leaves"].found)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [one["step"] for one in written["results"]] == list(found)
    table = (tmp_path / "results.md").read_text()
    assert table.count("\n| ") == len(steps) + 1 and "rehearsal on CPU" in table


def test_what_needs_more_gpus_than_there_are_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_gpu, "machine", lambda: {"gpu": "some", "gpus": 2})
    steps = [replace(step(str(gpus)), gpus=gpus) for gpus in (1, 2, 3)]
    found = run_gpu.go(steps, tmp_path / "gpus", minutes=2, rehearsal=False).results
    assert {one.step: one.status for one in found} == {"1": "ok", "2": "ok", "3": "skipped"}
    assert next(one.note for one in found if one.step == "3") == "needs 3 GPUs; here: 2"
    rehearsed = run_gpu.go(steps, tmp_path / "cpu", minutes=2, rehearsal=True).results
    assert [one.status for one in rehearsed] == ["ok"] * 3


def test_tests_that_all_skip_themselves_have_shown_nothing(tmp_path: Path) -> None:
    steps = []
    for name, body in [
        ("skip", "import pytest\ndef test_a(): pytest.skip('no GPU')"),
        ("pass", "def test_a(record_property): record_property('numbers', '[1.5]')"),
        ("fail", "def test_a(): pass\ndef test_b(): assert 0"),
    ]:
        file = tmp_path / f"test_{name}.py"
        file.write_text(body + "\n")
        steps.append(step(name, reads="tests", rehearsal=(*gpu_steps.PYTEST, str(file))))
    results = run_gpu.go(steps, tmp_path / "out", minutes=2, rehearsal=True).results
    assert [(one.status, one.note) for one in results] == [
        *(("failed", "1 skipped"), ("ok", "1 passed"), ("failed", "1 passed, 1 failed"))
    ]
    assert [one.found for one in results] == [None, {"test_a": [1.5]}, None]


def test_without_a_gpu_the_script_says_so_in_one_line() -> None:
    programs = {"PATH": "/usr/bin:/bin"}  # has no nvidia-smi, or one that lists no GPU
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True) if _has_smi() else None
    if told is not None and b"GPU" in told.stdout:
        pytest.skip("there is a GPU here")
    script = ["bash", str(ROOT / "tests" / "run_gpu.sh"), "--minutes", "1"]
    done = subprocess.run(
        script, env={**os.environ, **programs}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no NVIDIA GPU" in done.stderr


def _has_smi() -> bool:
    return any((Path(folder) / "nvidia-smi").exists() for folder in ("/usr/bin", "/bin"))


def test_an_unknown_step_is_refused_and_the_list_starts_nothing(tmp_path: Path) -> None:
    command = ["tools/run_gpu.py", "--out", str(tmp_path / "out")]
    done = python(*command, "--only", "nothing")
    assert done.returncode == 2 and "names no step" in done.stderr
    done = python(*command, "--list")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(STEPS) + 1
    assert "does not fit" not in done.stdout, "all fit into the minutes given by default"
    assert not (tmp_path / "out").exists()
