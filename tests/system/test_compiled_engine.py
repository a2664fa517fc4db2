"""An engine as recipes run it, with torch.compile, CUDA graphs and prompts in parts: after five
versions written in place it computes what a new engine does that has read the fifth from disk.

On the CPU the same with torch.compile alone, since there are no CUDA graphs and no memory to free.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support import own_engines
from support.engine_side import BOUND, Side, gap, mean_gap, opened
from support.tiny import VOCABULARY, write_model

from megarl.settings.rollout import EngineConfig

pytestmark = pytest.mark.slow

VERSIONS, PARTS = 5, 64
"""Versions that are published; most tokens of an engine step, so that long prompts are in parts."""
LENGTHS = (3, 30, 200)
"""Tokens of the prompts."""
AT_MOST = 1e-3
"""Largest difference of a log-prob to the new engine. Both have the same weights, to the bit, and
compute one request at a time."""

Answers = dict[str, Any]


def greedy(side: Side) -> Answers:
    """Tokens and log-probs of greedy answers, one after the other, and of a text."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS]
    turns = [side.sample(prompt, 1, temperature=0.0)[0] for prompt in prompts]
    (scores,) = side.engines.score(prompts[-1], timeout_s=60)
    return {
        "tokens": [turn.arrays.token_ids.tolist() for turn in turns],
        "logprobs": [one for turn in turns for one in turn.arrays.logprobs.tolist()] + scores,
        "own": [one for p, turn in zip(prompts, turns, strict=True) for one in of(side, p, turn)],
    }


def of(side: Side, prompt: list[int], turn: Any) -> list[float]:
    """The trainer's log-probs of an answer."""
    return side.logprobs(prompt + turn.arrays.token_ids.tolist())[len(prompt) - 1 :]


def facts(actor: Any) -> dict[str, Any]:
    """How vLLM runs the model; in the engine's process."""
    config = actor.engine._llm.vllm_config
    compilation, scheduler = config.compilation_config, config.scheduler_config
    return {
        "compile": compilation.mode.name,
        "cuda graphs": compilation.cudagraph_mode.name,
        "prompts in parts": scheduler.enable_chunked_prefill,
        "tokens of a step": scheduler.max_num_batched_tokens,
        "can sleep": config.model_config.enable_sleep_mode,
    }


def check(
    folder: Path,
    open_engine: Callable[..., contextlib.AbstractContextManager[Side]],
    record: Callable[[str, object], None],
    distance: Callable[[list[float], list[float]], float],
    bound: float,
    sleeps: bool,
) -> dict[str, Any]:
    """Publish to an engine, which sleeps before each version if it `sleeps`, and compare it with
    the trainer after each, and with a new engine in the end. Returns how vLLM ran the model.
    """
    tokens = torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(1))
    text, gaps = tokens.tolist(), []
    with open_engine(folder / "model") as side:
        for version in range(VERSIONS):
            before = side.logprobs(text)
            side.shake(version)
            if sleeps:
                side.engines.sleep(timeout_s=60)
                side.engines.wake(timeout_s=60)
            side.publish()
            (scored,) = side.engines.score(text, timeout_s=60)
            gaps.append(distance(scored, side.logprobs(text)))
            assert distance(scored, before) > 2 * bound, "nothing would be proven"
        found = greedy(side)
        (handle,) = side.engines.handles
        told = ray.get(handle.__ray_call__.remote(facts), timeout=60)
        shutil.copytree(folder / "model", folder / "fifth")
        side.model.save_pretrained(folder / "fifth")
    with open_engine(folder / "fifth", load=True) as other:
        wanted = greedy(other)
    lengths = [len(one) for one in found["tokens"]]
    away = {
        "to the trainer, after each version": [round(one, 9) for one in gaps],
        "to a new engine": gap(found["logprobs"], wanted["logprobs"]),
        "answers' tokens": lengths,
    }
    made = [*(folder / "vllm" / "torch_compile_cache").rglob("*.py")]
    assert made, "nothing was compiled: this test would prove nothing"
    record("numbers", json.dumps(told | away))
    print(json.dumps(told | away))
    assert max(gaps) < bound, away
    assert distance(found["logprobs"][: sum(lengths)], found["own"]) < bound
    assert found["tokens"] == wanted["tokens"], away
    assert away["to a new engine"] < AT_MOST, away
    return told


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where vLLM keeps what it compiles: a folder that is empty at first."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    return tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", [False, True], ids=["in place", "asleep between versions"])
def test_five_versions_under_cuda_graphs(cache: Path, sleeps: bool, record_property: Any) -> None:
    config = EngineConfig(
        dtype="bfloat16",
        gpu_memory_utilization=0.3,
        compile=True,
        max_num_sequences=8,
        max_batched_tokens=PARTS,
    )

    def open_engine(folder: Path, load: bool = False) -> Any:
        return opened(folder, config, on_cpu=False, load=load, sleeps=sleeps)

    write_model(cache / "model")
    told = check(cache, open_engine, record_property, mean_gap, 0.05, sleeps)
    assert told["compile"] == "VLLM_COMPILE" and told["cuda graphs"] != "NONE", told
    assert (told["prompts in parts"], told["can sleep"]) == (True, sleeps), told
    assert told["tokens of a step"] < max(LENGTHS), told


@pytest.mark.nightly
def test_five_versions_in_a_compiled_model(cache: Path, record_property: Any) -> None:
    config = EngineConfig(
        kind=f"{own_engines.FILE}:CompiledEngine", max_num_sequences=8, max_batched_tokens=PARTS
    )

    def open_engine(folder: Path, load: bool = False) -> Any:
        return opened(folder, config, load=load)

    write_model(cache / "model")
    told = check(cache, open_engine, record_property, gap, BOUND, sleeps=True)
    assert told["compile"] != "NONE" and told["prompts in parts"], told
    assert told["tokens of a step"] < max(LENGTHS), told
