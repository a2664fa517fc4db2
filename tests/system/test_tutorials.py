"""The commands and files of docs/tutorials, as a reader copies them into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from support.chat_templates import CHATML, tokenizer_of
from support.commands import ROOT, marked, records, write_rows
from support.documented import blocks_of
from support.fork_server import MARK, UNFORKED
from support.tiny import write_model

TUNED = "runs/calculator/sft/checkpoints"
SMALLER = {
    "own_reward": {"steps: 40": "steps: 2", "--steps 150": "--steps 3"},
    "tools": {
        "calculator/data\n": "calculator/data --demonstrations 64 --prompts 64 --held-out 4\n",
        "calculator_sft.yaml\n": "calculator_sft.yaml --steps 2\n",
        "calculator.yaml --": f"calculator.yaml --model.path {TUNED}/step_000002/model --",
        "--steps 8": "--steps 2 --rollout.groups_per_step 2 --rollout.dynamic_sampling.enabled false",
    },
    "agent": {
        "calculator/data\n": "calculator/data --demonstrations 64 --prompts 64 --held-out 4\n",
        "calculator_sft.yaml\n": "calculator_sft.yaml --steps 2\n",
        "agent.yaml": f"agent.yaml --model.path {TUNED}/step_000002/model --steps 2"
        " --rollout.groups_per_step 2 --rollout.dynamic_sampling.enabled false",
    },
    "chat_game": {
        "steps: 60": "steps: 2",
        "guessing.py data": "guessing.py data --demonstrations 9",
    },
    "gsm8k": {"--rollout.group_size 4": "--rollout.group_size 4 --rollout.max_new_tokens 16"},
    "judge": {
        "steps: 4": "steps: 2",
        'choices: {"friendly": 1.0, "rude": 0.0}': 'verdict: "([0-9])"\n  lowest: 0\n  highest: 9',
        "max_new_tokens: 12": "max_new_tokens: 64",  # random text, which is to have a digit
    },
}
"""{page: {text: what stands in its place, so that a run takes seconds}}"""


def prepare(work: Path, home: Path) -> None:
    """What a reader has from the network: GSM8K, or rows in its schema, and models with a chat
    template, which are small here and have random weights.
    """
    for name in ("launch", "tools"):
        (work / name).symlink_to(ROOT / name)
    for folder in (work / "models/qwen", home / ".cache/megarl/smollm2"):
        folder.mkdir(parents=True)
        write_model(folder, vocab_size=320, max_position_embeddings=2048)
        tokenizer_of(CHATML).save_pretrained(folder)
    data = work / "runs/data/gsm8k"
    data.parent.mkdir(parents=True)
    if where := os.environ.get("MEGARL_GSM8K"):
        data.symlink_to(where)
        return
    data.mkdir()
    for part, first in {"train": 1, "test": 40}.items():
        write_rows(data / f"{part}.jsonl", [
            {"question": f"Ann has {n} pears and buys {n}. How many?",
             "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
            for n in range(first, first + 39)
        ])  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SMALLER)
def test_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    (tmp_path / "bin" / "megarl").write_text('#!/bin/sh\nexec python -m megarl "$@"\n')
    (tmp_path / "bin" / "megarl").chmod(0o755)
    work, home, mark = tmp_path / "work", tmp_path / "home", uuid.uuid4().hex
    work.mkdir()
    prepare(work, home)
    changes = {"MEGARL": str(ROOT), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    changes |= {"PATH": f"{own.parent}:{os.environ['PATH']}", "HOME": str(home), MARK: mark}
    if page == "judge":
        changes |= UNFORKED  # vLLM ends with its parent, which a fork's is not
    unused = dict(SMALLER[page])
    try:
        for block in blocks_of(ROOT / f"docs/tutorials/{page}.md"):
            body = block.body
            for usual, smaller in SMALLER[page].items():
                if block.head and usual in body:
                    body = body.replace(usual, smaller)
                    unused.pop(usual, None)
            if re.fullmatch(r"\w+ \w+\.\w+", block.head):
                (work / block.head.partition(" ")[2]).write_text(body)
            elif block.head == "bash":
                run(body, work, changes)
    finally:
        left = psutil.wait_procs(marked(mark), timeout=30)[1]
        for process in left:
            process.kill()
    assert not unused and not left
    (folder,) = {path.parent for path in work.glob("runs/*/ledger.jsonl")}
    assert len(records(folder / "metrics.jsonl")) >= 2
    assert (folder / "report.html").stat().st_size > 0


def run(body: str, work: Path, changes: dict[str, str]) -> None:
    """A block of bash."""
    done = subprocess.run(
        ["bash", "-euc", body],
        env=os.environ | changes,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (body, done.stdout[-1000:], done.stderr[-3000:])
