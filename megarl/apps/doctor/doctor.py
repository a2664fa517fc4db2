"""`megarl doctor`: what this machine has, and whether that is enough for a run.

Checks run in parallel, each with a deadline. To add one, write a function () -> list[Finding] and
list it in `CHECKS`. Whatever may hang or crash (CUDA, Ray, vLLM, compilers) runs in a process of
its own, which is killed with everything it started when its time is up. Checks change nothing and
touch no process of others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, replace
from pathlib import Path

from megarl.apps.doctor.communication import (
    check_gloo,
    check_hub,
    check_memfd,
    check_port,
    check_ray,
)
from megarl.apps.doctor.findings import Finding, ask_python, core_share, run_program
from megarl.apps.doctor.machine import (
    check_accelerators,
    check_disk,
    check_leftovers,
    check_memory,
    check_shared_memory,
)
from megarl.apps.doctor.software import (
    check_accelerated,
    check_compiler,
    check_packages,
    check_python,
    check_vllm,
)
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.cluster.process_env import prepare_environment
from megarl.console import result
from megarl.environments.code_config import CodeConfig
from megarl.environments.isolation import MOVES_SINCE, landlock_version
from megarl.schema import require


def check_headers() -> list[Finding]:
    """Whether there is a Python.h, with which Triton builds the launcher of every kernel and torch
    its C++ extensions.
    """
    include = sysconfig.get_paths()["include"]
    if (Path(include) / "Python.h").is_file():
        return [Finding("Python headers", "ok", include)]
    version = sysconfig.get_python_version()
    fix = f"install python{version}-dev (Debian) or python{version}-devel (Fedora)"
    # Without a GPU, Triton compiles nothing.
    status = "FAIL" if shutil.which("nvidia-smi") else "warn"
    found = f"no Python.h in {include}: Triton and torch cannot compile kernels"
    return [Finding("Python headers", status, found, fix)]


def check_toolkit() -> list[Finding]:
    """Whether the CUDA toolkit, if there is one, is of torch's CUDA. None is needed: torch, Triton
    and vLLM bring their own compiled kernels and assembler.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home, "bin", "nvcc")
    nvcc = str(beside) if beside.is_file() else shutil.which("nvcc")
    if nvcc is None:
        return [Finding("CUDA toolkit", "ok", "none, and none is needed")]
    told = run_program([nvcc, "-V"], within_s=20)
    found = re.search(r"release (\d+\.\d+)", told.output)
    built = ask_python("import torch; print(torch.version.cuda or '')").output
    if found is None or not built:
        what = f"{nvcc}: {told.last_error}" if found is None else f"{found[1]}; torch is for CPUs"
        return [Finding("CUDA toolkit", "ok", f"{what}; it is not used")]
    return [toolkit_finding(found[1], built, nvcc)]


def toolkit_finding(toolkit: str, cuda: str, nvcc: str) -> Finding:
    """The finding on a toolkit of version `toolkit` beside torch built for version `cuda`."""
    shown = f"{toolkit} at {nvcc}, torch is for CUDA {cuda}"
    if toolkit.split(".")[0] == cuda.split(".")[0]:
        return Finding("CUDA toolkit", "ok", shown)
    fix = (
        f"set CUDA_HOME to a toolkit of CUDA {cuda.split('.')[0]}, or take nvcc off PATH and unset"
        " CUDA_HOME: what vLLM (FlashInfer) compiles at run time would fail or not load"
    )
    return Finding("CUDA toolkit", "warn", shown, fix)


def check_isolation() -> list[Finding]:
    """Whether the process of a user's verifier can be kept from looking into other processes."""
    version = landlock_version()
    if version < MOVES_SINCE:
        found = "no Landlock of version 2 here: verifiers can look into other processes"
        fix = "Linux 5.19 or newer, with landlock in the kernel's parameter lsm="
        return [Finding("isolation of verifiers", "warn", found, fix)]
    return [Finding("isolation of verifiers", "ok", f"Landlock {version}")]


def check_sandbox() -> list[Finding]:
    """Whether the verifier `code` can run programs in namespaces here."""
    try:
        sandbox = Sandbox(CodeConfig())
        try:
            results = sandbox.run("stdin", "print(1)", [""], total_s=10.0)
        finally:
            sandbox.close()
        require(results[0]["status"] == "ok", f"a program ended with {results[0]['status']}")
    except (OSError, RuntimeError, ValueError) as error:
        fix = "only for the verifier code: allow user namespaces, or set environment.code.sandbox"
        return [Finding("sandbox for programs", "warn", str(error)[:200], fix)]
    return [Finding("sandbox for programs", "ok", sandbox.protection)]


ALL_WITHIN_S = 55.0
"""Seconds until all checks have ended; one that has not is reported as late."""
IDLE = 0.85
"""Share of a core that a thread gets at least where no other program takes it."""


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "Python": check_python,
    "packages": check_packages,
    "optional kernels": check_accelerated,
    "accelerators": check_accelerators,
    "memory": check_memory,
    "/dev/shm": check_shared_memory,
    "disk": check_disk,
    "ports": check_port,
    "memfd_create": check_memfd,
    "gloo, two ranks": check_gloo,
    "Ray starts and stops": check_ray,
    "vLLM imports": check_vllm,
    "C++ compiler": check_compiler,
    "Python headers": check_headers,
    "CUDA toolkit": check_toolkit,
    "Hugging Face hub": check_hub,
    "sandbox for programs": check_sandbox,
    "isolation of verifiers": check_isolation,
    "left-over processes": check_leftovers,
}
"""{name: function of a check}, in the order in which the results are printed."""


def run_checks(
    checks: dict[str, Callable[[], list[Finding]]], *, within_s: float = ALL_WITHIN_S
) -> list[Finding]:
    """All findings, in the order of `checks`.

    A check that raises counts as a failure, and so does one that is late, but for a warning where
    other programs keep this machine busy, at the start or in the end.
    """
    share = core_share()
    deadline = time.monotonic() + within_s
    pool = ThreadPoolExecutor(len(checks))
    started_at: dict[str, Future[list[Finding]]] = {
        name: pool.submit(check) for name, check in checks.items()
    }
    findings: list[Finding] = []
    for name, future in started_at.items():
        try:
            findings += future.result(max(0.0, deadline - time.monotonic()))
        except NotInTime:
            findings.append(
                Finding(name, "late", f"no answer within {within_s:g} s", "look for what hangs")
            )
        except Exception as error:  # the other checks still count
            fix = "this is an error of megarl's; please report it"
            findings.append(Finding(name, "FAIL", f"{type(error).__name__}: {error}", fix))
    pool.shutdown(wait=False, cancel_futures=True)
    if not any(finding.status == "late" for finding in findings):
        return findings
    share = min(share, core_share())
    return [_of_load(one, share) if one.status == "late" else one for one in findings]


def _of_load(late: Finding, share: float) -> Finding:
    """What to make of a late check where a thread gets `share` of a core."""
    if share > IDLE:
        return replace(late, status="FAIL")
    found = f"{late.found}; other programs leave a thread {share:.0%} of a core"
    return replace(late, status="warn", found=found, fix="try again when the machine is less busy")


def findings_table(findings: Sequence[Finding]) -> str:
    """The findings as text: a line for each, and a line for the fix where there is one."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.fix}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the findings as a table, or as one JSON object with `--json`.

    Returns the exit code: 0 if nothing failed, 1 if something did, 2 for an unknown argument.
    """
    unknown = [word for word in arguments if word != "--json"]
    if unknown:
        print(
            f"megarl: error: megarl doctor does not know {unknown[0]!r}; it takes --json or"
            " nothing",
            file=sys.stderr,
        )
        return 2
    prepare_environment(1)  # Ray and vLLM run with the settings of a run
    started_at = time.monotonic()
    findings = run_checks(CHECKS)
    failed = [finding for finding in findings if finding.status == "FAIL"]
    warned = [finding for finding in findings if finding.status == "warn"]
    if "--json" in arguments:
        seconds = round(time.monotonic() - started_at, 1)
        result(
            json.dumps(
                {
                    "ok": not failed,
                    "seconds": seconds,
                    "findings": [asdict(finding) for finding in findings],
                }
            )
        )
    else:
        result(findings_table(findings))
        verdict = (
            "this machine can run megarl"
            if not failed
            else f"{len(failed)} to fix before a run can start"
        )
        result(f"\n{verdict}; {len(warned)} warnings; {time.monotonic() - started_at:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
