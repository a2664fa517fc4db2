"""The process in which vLLM computes ends with its owner, even one that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

OWNER = """
import sys, time
sys.path.insert(0, {folder!r})
import core_target
from megarl.rollout.engine_core import {context}

if __name__ == "__main__":
    process = {context}().Process(target=core_target.wait, name="EngineCore", kwargs={{"told": "x"}})
    process.start()
    time.sleep(600)
"""
TARGET = """
import os, time

def wait(told):
    print(os.getpid(), told, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("context", ["CoreContext", "SpawnedCoreContext"])
def test_a_core_ends_with_its_killed_owner(context: str, tmp_path: Path) -> None:
    (tmp_path / "core_target.py").write_text(TARGET)
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(folder=str(tmp_path), context=context))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        number, told = owner.stdout.readline().split()
        core = psutil.Process(int(number))
        assert told == "x" and core.is_running()
        owner.kill()
        _, left = psutil.wait_procs([core], timeout=20)
        for one in left:
            one.kill()
        assert left == []
