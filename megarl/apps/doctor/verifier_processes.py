"""Whether this machine can keep a verifier, and the programs that one runs, apart from other
processes.
"""

from __future__ import annotations

from megarl.apps.doctor.findings import Finding
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.environments.code_config import CodeConfig
from megarl.environments.isolation import MOVES_SINCE, landlock_version
from megarl.schema import require


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
