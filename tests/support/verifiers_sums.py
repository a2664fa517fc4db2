"""An environment of verifiers, sums with three rewards, for tests that have the package: in this
Python, or in that which the environment variable VERIFIERS_PYTHON names.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.apps.adapters.verifiers_env import VERSION

PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
SUMS = """
import os
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        print("not an answer")
        if trace.last_reply == "ends":
            os._exit(3)
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def answers(self, trace: vf.Trace) -> float:
        return 0.25 * (trace.last_reply or "").isdigit()

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

class SumConfig(vf.TasksetConfig):
    more: int = 3
    system: str = "Add."

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        print("no row")
        for a in range(5):
            answer = str(a + self.config.more)
            yield SumTask(
                SumData(
                    name=f"s{a}", prompt=f"{a}+{self.config.more}=", answer=answer,
                    system_prompt=self.config.system,
                ),
                self.config.task,
            )

__all__ = ["SumTaskset"]
"""


def is_installed() -> bool:
    """Whether `PYTHON` has verifiers in the version that the adapter needs."""
    code = "import importlib.metadata as m; print(m.version('verifiers'))"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return said.stdout.strip() == VERSION


NEEDS = pytest.mark.skipif(not is_installed(), reason=f"verifiers {VERSION} is not installed")
