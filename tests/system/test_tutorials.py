"""The commands and files of docs/tutorials, as a reader copies them into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, records

BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUNED = "runs/calculator/sft/checkpoints"
SMALLER = {
    "own_reward": {"steps: 40": "steps: 2", "--steps 150": "--steps 3"},
    "tools": {
        "calculator/data\n": "calculator/data --demonstrations 64 --prompts 64 --held-out 4\n",
        "calculator_sft.yaml\n": "calculator_sft.yaml --steps 2\n",
        "calculator.yaml --": f"calculator.yaml --model.path {TUNED}/step_000002/model --",
        "--steps 8": "--steps 2 --rollout.groups_per_step 2 --rollout.dynamic_sampling.enabled false",
    },
}
"""{page: {text: what stands in its place, so that a run takes seconds}}"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SMALLER)
def test_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    text = (ROOT / f"docs/tutorials/{page}.md").read_text()
    for usual, smaller in SMALLER[page].items():
        assert usual in text
        text = text.replace(usual, smaller)
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    (tmp_path / "bin" / "megarl").write_text('#!/bin/sh\nexec python -m megarl "$@"\n')
    (tmp_path / "bin" / "megarl").chmod(0o755)
    changes = {"MEGARL": str(ROOT), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    changes["PATH"] = f"{own.parent}:{os.environ['PATH']}"
    work = tmp_path / "work"
    work.mkdir()
    for name in ("launch", "tools"):
        (work / name).symlink_to(ROOT / name)
    for kind, name, body in BLOCK.findall(text):
        if "." in name:
            (work / name).write_text(body)
        elif (kind, name) == ("bash", ""):
            done = subprocess.run(
                ["bash", "-euc", body],
                env=os.environ | changes,
                cwd=work,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, (body, done.stderr[-3000:])
    (folder,) = {path.parent for path in work.glob("runs/*/ledger.jsonl")}
    assert len(records(folder / "metrics.jsonl")) >= 2
    assert (folder / "report.html").stat().st_size > 0
