"""`megarl doctor`: what this machine has, and whether that is enough for a run.

Checks run in parallel threads, within one deadline. To add one, write a function without arguments
that yields a `Finding` (status, what was found, what to do about it) for each line of the table,
and list the function in `CHECKS`. Whatever may hang or crash (CUDA, Ray, vLLM, compilers) runs in a
process of its own, which is killed with everything it started when its time is up. Checks change no
settings of the machine and touch no process that they have not started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial

from megarl.apps.doctor import machine, software
from megarl.apps.doctor.communication import TRIALS, try_program
from megarl.apps.doctor.findings import Finding
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.environments.isolation import MOVES_SINCE, landlock_version
from megarl.settings.code import CodeConfig
from megarl.settings.schema import require
from megarl.system.console import Arguments, result
from megarl.system.process_env import prepare_environment


def check_isolation() -> Iterator[Finding]:
    """`ok` if Linux (Landlock) can keep the process of a user's verifier from looking into other
    processes, else `warn`.
    """
    version = landlock_version()
    if version < MOVES_SINCE:
        text = "no Landlock of version 2 here: verifiers can look into other processes"
        fix = "Linux 5.19 or newer, with landlock in the kernel's parameter lsm="
        yield Finding("warn", text, fix)
    else:
        yield Finding("ok", f"Landlock {version}")


def check_sandbox() -> Iterator[Finding]:
    """`ok` if the verifier `code` can run programs of a model in its sandbox here, else `warn`."""
    try:
        sandbox = Sandbox(CodeConfig())
        try:
            results = sandbox.run("stdin", "print(1)", [""], total_s=10.0)
        finally:
            sandbox.close()
        require(results[0]["status"] == "ok", f"a program ended with {results[0]['status']}")
    except (OSError, RuntimeError, ValueError) as error:
        fix = "only for the verifier code: a newer kernel, or set environment.code.sandbox"
        yield Finding("warn", str(error)[:200], fix)
    else:
        yield Finding("ok", "Landlock and seccomp")


ALL_WITHIN_S = 100.0
"""Seconds until all checks have ended."""
CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "packages": software.check_packages,
    "optional kernels": software.check_accelerated,
    "accelerators": machine.check_accelerators,
    "memory": machine.check_memory,
    "/dev/shm": machine.check_shared_memory,
    "disk": machine.check_disk,
    **{name: partial(try_program, name) for name in TRIALS},
    "C++ compiler": software.check_compiler,
    "Python headers": software.check_headers,
    "sandbox for programs": check_sandbox,
    "isolation of verifiers": check_isolation,
}
"""{name of a check: function that makes it}, in the order in which the results are printed."""


def run_checks(
    checks: dict[str, Callable[[], Iterator[Finding]]], *, within_s: float = ALL_WITHIN_S
) -> list[Finding]:
    """Run `checks`, {name: function that yields findings}, in parallel threads, and return all
    findings in the order of `checks`. Blocks for about `within_s` seconds at most. A check that
    raises or is late gives a finding with the status `FAIL`.
    """
    deadline = time.monotonic() + within_s
    pool = ThreadPoolExecutor(len(checks))
    futures = {name: pool.submit(lambda check=check: [*check()]) for name, check in checks.items()}
    findings: list[Finding] = []
    for name, future in futures.items():
        try:
            results = future.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # the other checks still count
            fix = "look for what hangs, or report this as an error of megarl's"
            results = [Finding("FAIL", repr(error), fix)]
        findings += [replace(finding, check=finding.check or name) for finding in results]
    pool.shutdown(wait=False, cancel_futures=True)
    return findings


def findings_table(findings: Sequence[Finding]) -> str:
    """The findings as text of aligned columns, joined by newlines: a line with status, name of the
    check and what was found for each finding, and a line with the advice where there is one.
    `findings`: at least one.
    """
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.fix}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Run all checks and print the findings on standard output: a table with a verdict or, with
    `--json`, one JSON object with the keys `ok`, `seconds` and `findings`. `arguments`: the words
    after `megarl doctor`.

    Returns the exit code: 0 if nothing failed, 1 if something did. Raises `UserError` for a word
    other than `--json`.
    """
    parser = Arguments("megarl doctor")
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(arguments).json
    prepare_environment(1)  # Ray and vLLM run with the settings of a run
    started_at = time.monotonic()
    findings = run_checks(CHECKS)
    failed = sum(finding.status == "FAIL" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    seconds = round(time.monotonic() - started_at, 1)
    if as_json:
        summary = {"ok": not failed, "seconds": seconds, "findings": [*map(asdict, findings)]}
        result(json.dumps(summary))
    else:
        result(findings_table(findings))
        verdict = f"{failed} to fix before a run can start"
        verdict = verdict if failed else "this machine can run megarl"
        warnings = f"{warned} warning{'' if warned == 1 else 's'}"
        result(f"\n{verdict}; {warnings}; {seconds:.0f} s")
    return 1 if failed else 0
