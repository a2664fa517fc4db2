"""The benchmarks run, at tiny sizes, and what they say has the relations that it must have. Nothing
is timed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fork_server import UNFORKED

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tools" / "bench"


def command(line: str) -> list[str]:
    """The words of a command line that begins with the name of a tool."""
    tool, *arguments = line.split()
    return [sys.executable, str(BENCH / f"{tool}.py"), *arguments]


def finished(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(line), cwd=ROOT, capture_output=True, text=True, timeout=240)


def run(line: str) -> Any:
    """The JSON object that a tool prints, alone on standard output."""
    done = finished(f"{line} --json")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def refused(line: str) -> str:
    """What a tool says when it refuses its arguments."""
    done = finished(line)
    assert done.returncode != 0 and not done.stdout and "Traceback" not in done.stderr, done.stderr
    return done.stderr


LAYERS, HIDDEN, TOKENS, WORDS = 2, 64, 256, 32


@pytest.fixture(scope="module")
def layouts() -> dict[tuple[str, int], Any]:
    sizes = f"--layers {LAYERS} --hidden {HIDDEN} --vocabulary {WORDS} --tokens {TOKENS}"
    found = run(f"layouts --ranks 2 --zero 0,3 --steps 2 --documents 4 {sizes}")
    assert found["skipped"] == {} and found["task"]["tokens"] == TOKENS
    return {(row["layout"], row["zero"]): row for row in found["rows"]}


def test_layouts_are_all_there_and_agree(layouts: dict[tuple[str, int], Any]) -> None:
    assert list(layouts) == [
        (layout, stage) for stage in (0, 3) for layout in ("2x1x1", "1x2x1", "1x1x2")
    ]
    for row in layouts.values():
        assert len(row["losses"]) == 5 and row["losses"][-1] < row["losses"][0]
        assert row["loss_difference"] < 1e-5
        assert len(row["tokens_per_s"]["all"]) == 2 and row["tokens_per_s"]["min"] > 0
        assert row["peak_bytes"] is None or row["peak_bytes"] > 4 * WORDS * HIDDEN
        assert math.isclose(sum(row["sent_bytes"].values()), row["sent_total_bytes"])


def parameters() -> int:
    """Of the model that layouts.py makes: 4 heads and 2 KV heads, biases of queries, keys and
    values, untied words.
    """
    wide, key = 8 * HIDDEN // 3 // 16 * 16, HIDDEN // 2
    attention = 2 * HIDDEN * HIDDEN + HIDDEN + 2 * (HIDDEN * key + key)
    return 2 * WORDS * HIDDEN + LAYERS * (attention + 3 * HIDDEN * wide + 2 * HIDDEN) + HIDDEN


def test_bytes_are_those_of_the_arithmetic(layouts: dict[tuple[str, int], Any]) -> None:
    weights, slack = 4 * parameters(), 2048  # bytes; losses, norms and flags are small
    data, sequence, tensor = (
        layouts[layout, 0]["sent_bytes"] for layout in ("2x1x1", "1x2x1", "1x1x2")
    )
    # Data ranks sum gradients, and send nothing else: over 2 ranks a ring's all-reduce is the
    # tensor once.
    assert 0 <= data["all_reduce"] - weights < slack
    assert data["send"] == data["all_to_all"] == 0
    assert data["all_gather"] + data["reduce_scatter"] < slack
    # Sequence ranks have the same weights, so sum the same gradients; keys go round twice, their
    # gradients once, or home as well.
    assert abs(sequence["all_reduce"] - data["all_reduce"]) < slack
    keys = 4 * (TOKENS // 2) * 2 * (HIDDEN // 2)
    assert sequence["send"] / (keys * LAYERS) in (3, 4)
    # Tensor ranks hold half of the gradients each and sum activations: two a layer each way, and
    # the embedding's.
    activations = 4 * TOKENS * HIDDEN
    assert tensor["send"] == 0 and tensor["all_reduce"] >= activations * (4 * LAYERS + 1)
    # ZeRO 3 gathers weights forward and backward, and scatters gradients.
    sharded = layouts["2x1x1", 3]["sent_bytes"]
    assert sharded["all_gather"] >= weights / 2 - slack
    assert abs(sharded["reduce_scatter"] - weights / 2) < slack
    assert sharded["send"] == 0 and sharded["all_reduce"] < slack
    # What is alike under both stages: the ring's messages.
    assert layouts["1x2x1", 3]["sent_bytes"]["send"] == sequence["send"]


def test_layouts_says_what_it_cannot_do() -> None:
    assert "not a layout of --ranks 2" in refused("layouts --ranks 2 --layouts 1x1x4")
    assert "--zero" in refused("layouts --dtype bfloat16")
    said = refused("layouts --ranks 2 --layouts 1x1x2 --heads 3 --kv-heads 1 --hidden 48")
    assert "training.layout.tensor is 2" in said and "num_attention_heads = 3" in said


@pytest.mark.nightly
def test_ranks_end_with_the_tool() -> None:
    """Killed without a chance to clean up, it leaves no process."""
    line = command("attention --tokens 262144")
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(line, cwd=ROOT, **streams, env=os.environ | UNFORKED) as tool:
        try:
            ranks = waited(psutil.Process(tool.pid).children, lambda found: len(found) == 2)
            # They ask Linux to be ended with it as soon as they have started.
            waited(lambda: [one.num_threads() for one in ranks], lambda found: min(found) > 1)
        finally:
            tool.send_signal(signal.SIGKILL)
    waited(lambda: [rank for rank in ranks if is_alive(rank)], lambda left: not left)


def waited(look: Any, wanted: Any) -> Any:
    """What `look` finds as soon as it is what is wanted."""
    end = time.monotonic() + 60
    while not wanted(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_memory_measurement_finds_known_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(BENCH)
    peak_memory = importlib.import_module("peak_memory")

    def body() -> torch.Tensor:
        first = torch.zeros(2**20)
        del first
        return torch.zeros(2**19)

    peak, kept = peak_memory.peak_of(body)
    assert peak.allocated == 4 * 2**20 and kept.nbytes == 2 * 2**20


def test_bench_logprobs() -> None:
    found = run("logprobs --tokens 512 --vocabulary 8192 --hidden 32 --rounds 1")
    eager, fused = found["systems"]["eager"], found["systems"]["fused"]
    assert fused["peak_bytes"] < eager["peak_bytes"] and fused["memory_of_eager"] < 1
    assert eager["peak_bytes"] > 2 * 4 * 512 * 8192
    assert "choose of" in refused("logprobs --systems nothing")


def test_bench_attention() -> None:
    sizes = "--tokens 512 --heads 2 --kv-heads 2 --width 16 --group 64:3x32"
    found = run(f"attention --rounds 1 {sizes}")
    assert found["tokens"] == {"one rank": 3 * (64 + 3 * 32), "one rank, repeated": 9 * (64 + 32)}
    shared, repeated = 64 * 65 // 2 + 3 * (32 * 64 + 32 * 33 // 2), 3 * (96 * 97 // 2)
    assert found["pairs"] == {"one rank": 3 * shared, "one rank, repeated": 3 * repeated}
    rings = ["contiguous ring", "zigzag ring", "zigzag lean ring"]
    schedules = ["one rank", "one rank, repeated", *rings, "all-gather, zigzag", "Ulysses"]
    assert list(found["schedules"]) == schedules
    rows = found["schedules"]
    assert all(row["seconds"]["min"] > 0 for row in rows.values())
    # No less than the output and the gradients of q, k and v.
    alone, results = rows["one rank"]["bytes"], 4 * 4 * 16 * 2 * found["tokens"]["one rank"]
    assert alone >= results and rows["one rank"]["x_ranks"] == 1
    # all_gather holds everybody's keys, the lean ring two blocks at a time.
    gathered, lean = rows["all-gather, zigzag"], rows["zigzag lean ring"]
    assert gathered["bytes"] > lean["bytes"] >= results // 2
    assert lean["x_ranks"] == pytest.approx(2 * lean["bytes"] / alone)
    assert "does not divide" in refused("attention --heads 3 --kv-heads 2")
    assert "must not exceed" in refused("attention --tokens 64 --group 64:3x32")


@pytest.mark.parametrize("tool", ["e2e", "e2e_real"])  # which run for long
def test_a_benchmark_says_its_options_from_anywhere(tool: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # megarl itself, as if it were installed
    kept: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command(f"{tool} --help"), timeout=240, **kept)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"python tools/bench/{tool}.py" in done.stdout and "--json" in done.stdout


def test_the_reward_service_loses_nothing() -> None:
    """Injected failures are counted one by one, on both ends, across a restart."""
    found = run("reward_service --rate 40 --seconds 3 --down 0.3 --fail 0.2")
    assert found["asked"] == 120 and found["lost"] == 0
    assert sum(found["outcomes"].values()) == 120
    assert found["injected_failures_counted"] > 5
    names = ("injected_uncounted", "counted_but_not_injected", "scored_but_not_in_record")
    assert [found[name] for name in names] == [0, 0, 0]
    assert found["status_of_wrong_and_missing_token"] == [401, 401]


@pytest.mark.nightly
def test_bench_overhead() -> None:
    """A run in which engine and trainer overlap, and its parts on its batches."""
    found = run("overhead --limits 6 --groups 2 --rounds 1 --steps 1 --kinds overlapped")
    (row,) = found["rows"]
    (one,) = row["rounds"]
    assert (row["samples"], len(found["rows"])) == (16, 1)
    names = ("step_s", "generation_s", "training_s")
    assert all(one[name] > 0 for name in names)
    assert one["bound_s"] == max(one["generation_s"], one["training_s"])


@pytest.mark.nightly
def test_bench_trainer() -> None:
    found = run(
        "trainer --size tiny --tokens 128 --steps 1 --cases rl:64,rl:256,sft:64:kept,lora:64"
    )
    rows = {row["case"]: row for row in found["rows"]}
    assert list(rows) == ["rl:64:model", "rl:256:model", "sft:64:kept", "lora:64:model"]
    # Tied words of 64 channels; 4 query heads and 2 key heads of 32; two layers.
    weights = 512 * 64 + 64 + 2 * (64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64 + 2 * 32)
    for name, row in rows.items():
        tokens, kind = int(name.split(":")[1]), 4 if name.startswith("lora") else 6
        flop = kind * weights + 6 * 2 * 4 * 32 * tokens
        assert row["parameters"] == weights and len(row["longest"]) == 12
        assert row["mfu"] == pytest.approx(row["tokens_per_s"]["median"] * flop / 989e12)
    assert "--cases" in refused("trainer --cases rl:16:nothing")


@pytest.mark.nightly
def test_bench_grpo_step() -> None:
    found = run("grpo_step --size tiny --prompts 2 --samples 2 --response 8 --steps 1")
    parts = {name: row["median"] for name, row in found["parts"].items()}
    assert parts.pop("step") == pytest.approx(sum(parts.values()))
    assert min(parts.pop("rest"), *parts.values()) > 0 and len(parts) == 6
    assert [row["tokens/trained"] for row in found["metrics"]] == [32.0]
