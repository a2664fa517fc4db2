"""tools/gpu_steps.py and tools/run_gpu.py: which steps fit, what is read of a step, and that a
failure stops nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_steps
import psutil
import pytest
import run_gpu
from gpu_steps import STEPS, Step, fits, plan

ROOT = Path(__file__).resolve().parents[2]


def step(name: str, expected_s: float = 1.0, code: str = "", **settings: object) -> Step:
    """A step that runs `code` in Python."""
    command = ("{python}", "-c", code)
    made = Step(name, "something", command, expected_s, limit_s=30.0, rehearsal=command)
    return replace(made, **settings)  # pyright: ignore[reportArgumentType]


def lives(pid: int) -> bool:
    """Where nobody reaps orphans, those that ended stay as zombies."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_does_not_fit_is_passed_over_and_what_is_shorter_still_runs() -> None:
    steps = [step("a", 50), step("b", 40), step("c", 9), step("d", 2)]
    chosen, rest = plan(steps, minutes=1)
    assert [one.name for one in chosen] == ["a", "c"] and [one.name for one in rest] == ["b", "d"]
    assert fits(steps, 45.0) is steps[1] and fits(steps, 1.9) is None
    assert plan(steps, minutes=10) == (steps, [])


def test_the_steps_are_whole() -> None:
    assert len({one.name for one in STEPS}) == len(STEPS)
    for one in STEPS:
        assert 0 < one.expected_s <= one.limit_s, one.name
        assert bool(one.rehearsal) != bool(one.no_rehearsal), one.name
        for command in filter(None, (one.command, one.rehearsal)):
            words = gpu_steps.words(command, python="python", out="/out", device="cpu")
            for word in words:  # files of tests and tools are where the step says
                path = word.split("::")[0]
                if path.startswith(("tests/", "tools/", "launch/")):
                    assert (ROOT / path).exists(), (one.name, path)


def test_a_failure_a_hang_and_a_child_left_behind_stop_nothing(tmp_path: Path) -> None:
    orphan = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(300)'], start_new_session=True,"
        " stdout=subprocess.DEVNULL).pid)"
    )
    steps = [
        step("fails", code="raise SystemExit(3)"),
        step("hangs", code="import time; time.sleep(300)", limit_s=1.0),
        step("leaves", code=orphan, reads="json"),
        step("says", code="print('{\"value\": 7}')", reads="json"),
        step("says nothing", code="print('seven')", reads="json"),
        step("long", 10**6),
        step("only there", rehearsal=(), no_rehearsal="needs two GPUs"),
    ]
    report = run_gpu.go(steps, tmp_path, minutes=2, rehearsal=True)
    found = {one.step: one for one in report.results}
    assert {name: one.status for name, one in found.items()} == {
        "only there": "not rehearsed",
        "fails": "failed",
        "hangs": "timed out",
        "leaves": "ok",
        "says": "ok",
        "says nothing": "failed",
        "long": "no time",
    }
    assert found["fails"].note == "exit code 3" and found["says"].found == {"value": 7}
    assert "1 processes left behind" in found["leaves"].note
    assert not lives(found["leaves"].found)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [one["step"] for one in written["results"]] == list(found)
    table = (tmp_path / "results.md").read_text()
    assert table.count("\n| ") == len(steps) + 1 and "rehearsal on CPU" in table


def test_tests_that_all_skip_themselves_have_shown_nothing(tmp_path: Path) -> None:
    cases = tmp_path / "test_cases.py"
    steps = []
    for name, body in [
        ("skip", "import pytest\ndef test_a(): pytest.skip('no GPU')"),
        ("pass", "def test_a(): pass"),
        ("fail", "def test_a(): pass\ndef test_b(): assert 0"),
    ]:
        file = cases.with_name(f"test_{name}.py")
        file.write_text(body + "\n")
        command = (*gpu_steps.PYTEST, str(file))
        steps.append(step(name, reads="tests", rehearsal=command))
    results = run_gpu.go(steps, tmp_path / "out", minutes=2, rehearsal=True).results
    assert [(one.status, one.note) for one in results] == [
        ("failed", "1 skipped"),
        ("ok", "1 passed"),
        ("failed", "1 passed, 1 failed"),
    ]


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
    command = [sys.executable, str(ROOT / "tools" / "run_gpu.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--only", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and "names no step" in done.stderr
    done = subprocess.run([*command, "--list"], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(STEPS)
    assert not (tmp_path / "out").exists()


def test_a_step_without_its_packages_is_left_out(tmp_path: Path) -> None:
    steps = [step("a", code="", needs=("megarl", "no_such_package")), step("b", needs=("megarl",))]
    report = run_gpu.go(steps, tmp_path, 1.0, rehearsal=True)
    found = {one.step: (one.status, one.note) for one in report.results}
    assert found == {"a": ("left out", "no no_such_package"), "b": ("ok", "")}


BARE = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in WHOLE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_steps_of_kernels_need_no_engine_and_no_ranks() -> None:
    """What they import is there where neither DeepSpeed nor Ray, tyro or vLLM is installed."""
    files = {
        word for one in STEPS if not one.needs for word in one.command if word.startswith("tests/")
    }
    assert len(files) >= 6
    program = f"WHOLE = {gpu_steps.WHOLE!r}\n{BARE}"
    words = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *sorted(files)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " tests collected" in done.stdout
    benches = "import sys; sys.path.insert(0, 'tools/bench'); import attention_cuda, logprobs_step"
    program = program.partition("import pytest")[0] + benches
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
