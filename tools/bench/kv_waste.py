"""The share of an engine's key-value memory that is allocated but holds no token.

    python tools/bench/kv_waste.py [--lengths 256,1024,4096,16384] [--block-sizes 128,32] [--json]

A real engine of megarl generates `--requests` responses of each length, `--sequences` at a time, in
groups of four of one prompt, with prefix caching. The model is tiny and has no end-of-sequence
token, so that each response has exactly the length that it is given: quantiles of a log-normal
distribution, cut off at twice the mean.

The engine's scheduler is asked at every 13th engine step (kv_scheduler.py): the blocks that its
block pool does not count as free are the allocated memory, since no other request can get them; the
blocks in the running requests' block tables and their tokens with keys and values say what the
allocated blocks hold. vLLM's own metric `vllm:kv_cache_usage_perc` is the same number of blocks
over all blocks, and does not say what they hold. A block of several requests (the prompt of a
group) counts once. Blocks that only the prefix cache keeps are free: vLLM gives them to any
request. Samples are not weighted: the first steps, where sequences are short, count like others.

    paged       the engine's own blocks. Only the last block of a sequence is not full: half a block
                a sequence is expected, and `empty` is what was found, in blocks a sequence.
    16          blocks of 16 tokens, computed from the same tokens at the same steps: vLLM's default
                on NVIDIA GPUs, which its CPU attention does not have (multiples of 32). `off` is
                the largest difference, over all samples, of the engine's number of blocks from the
                same arithmetic for the engine's block size.
    contiguous  each sequence has memory for its prompt and the longest response from the start
    oracle      each sequence has memory for exactly its final length from the start

On the CPU megarl's engines have blocks of 32 tokens; vLLM's default is 128.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import progress, run_tool, table
from kv_slots import Running, Sample, response_lengths, waste
from make_addition import CHARACTERS, write_model

PROMPT_TOKENS = 100
GROUP = 4
CAP = 2
"""Longest response over the mean response."""
GPU_BLOCK = 16
OPTIONS = {
    "--lengths": ([256, 1024, 4096, 16384], "mean response lengths, tokens"),
    "--block-sizes": ([128, 32], "tokens of a block"),
    "--requests": (16, "responses of each length"),
    "--sequences": (8, "responses at a time"),
    "--seed": (0, "of the order of lengths, and of the tokens"),
}


def write_endless_model(folder: Path, longest: int) -> None:
    """A model of one layer for sequences of `longest` tokens that never ends a response."""
    write_model(folder)
    (folder / "generation_config.json").unlink()
    described = json.loads((folder / "config.json").read_text())
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    described |= {"max_position_embeddings": longest, "eos_token_id": None, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(described))


async def start(folder: Path, args: argparse.Namespace, block_size: int) -> Any:
    """An engine that writes its samples to `folder`/samples."""
    from megarl.cluster.process_env import engine_environment
    from megarl.rollout.config import EngineConfig
    from megarl.rollout.engine import Engine

    longest = PROMPT_TOKENS + CAP * max(args.lengths)
    write_endless_model(folder / "model", longest)
    environment = engine_environment(on_cpu=True, num_threads=1, kv_cache_gib=1)
    engine = Engine(
        number=0,
        model=str(folder / "model"),
        config=EngineConfig(max_num_sequences=args.sequences),
        max_tokens=longest,
        stop_token_ids=[],
        trust_remote_code=False,
        seed=args.seed,
        # vLLM's log calls the end of its core an error.
        environment=environment | {"VLLM_LOGGING_LEVEL": "CRITICAL"},
    )
    engine._arguments |= {
        "scheduler_cls": "kv_scheduler.RecordingScheduler",
        "additional_config": {"kv_samples": str(folder / "samples")},
    }
    engine._arguments["block_size"] = block_size
    (folder / "samples").touch()
    await engine.start()
    return engine


async def generate(engine: Any, lengths: list[int], seed: int) -> None:
    """Responses of exactly `lengths` tokens, by groups of one prompt. Raises `RuntimeError` if the
    engine ends one earlier.
    """
    draw = random.Random(f"prompts/{seed}/{lengths}")
    words = range(2, 2 + len(CHARACTERS))  # behind the tokens for padding and the end
    prompts = [draw.choices(words, k=PROMPT_TOKENS) for _ in range(0, len(lengths), GROUP)]
    jobs = (
        engine.generate(prompts[number // GROUP], seed=number, max_tokens=length, temperature=1.0)
        for number, length in enumerate(lengths)
    )
    made = [segment.num_tokens for segment in await asyncio.gather(*jobs)]
    if made != lengths:
        raise RuntimeError(f"responses have {made} tokens instead of {lengths}")


def read_samples(lines: list[str]) -> list[Sample]:
    """The samples that the scheduler has written. Raises `RuntimeError` if a sample's block tables
    have other blocks than the pool has given away.
    """
    found = []
    for line in lines:
        allocated, listed, filled, running = json.loads(line)
        found.append(Sample(allocated, listed, filled, [Running(*one) for one in running]))
        if found[-1].allocated != found[-1].listed:
            raise RuntimeError(f"{found[-1].allocated} blocks are allocated, but see {found[-1]}")
    return found


def described(samples: list[Sample], block_size: int, mean: int, lengths: list[int]) -> Any:
    """A row of the table."""
    shares = [waste(one, block_size, CAP * mean, [GPU_BLOCK]) for one in samples]
    means = ("empty", "contiguous", "oracle")
    return {
        "length": mean,
        "cap": CAP * mean,
        "true_mean": statistics.mean(lengths),
        "block_size": block_size,
        "samples": len(samples),
        "running": statistics.mean(len(one.running) for one in samples),
        "paged": {
            "mean": statistics.mean(one.paged for one in shares),
            "max": max(one.paged for one in shares),
        },
        "computed": statistics.mean(one.computed[GPU_BLOCK] for one in shares),
        "off": max((one.off for one in shares), key=abs),
        **{name: statistics.mean(getattr(one, name) for one in shares) for name in means},
    }


async def rows(args: argparse.Namespace, folder: Path, block_size: int) -> list[Any]:
    """A row for each length, of one engine with this block size."""
    engine, found, read = await start(folder, args, block_size), [], 0
    try:
        size = engine._llm.vllm_config.cache_config.block_size
        for mean in args.lengths:
            lengths = response_lengths(mean, CAP * mean, args.requests, args.seed)
            started_at = time.monotonic()
            await generate(engine, lengths, args.seed)
            lines = (folder / "samples").read_text().splitlines()
            found.append(described(read_samples(lines[read:]), size, mean, lengths))
            found[-1]["seconds"] = time.monotonic() - started_at
            read = len(lines)
            progress(found[-1])
    finally:
        await engine.stop()
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The rows of every block size, with one engine each, one after the other."""
    from megarl.cluster.process_env import prepare_environment

    if any(size % 32 for size in args.block_sizes):
        raise ValueError("--block-sizes has one that is no multiple of 32, which vLLM needs here")
    prepare_environment(1)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, size in enumerate(args.block_sizes):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            found += asyncio.run(rows(args, folder, size))
    return {"rows": found}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    columns = (
        "length d; cap d; true mean=true_mean .0f; block=block_size d; samples d; running .1f;"
        " paged=paged.mean .2%; largest=paged.max .2%; empty .3f; 16=computed .2%; off d;"
        " contiguous .2%; oracle .2%"
    )
    yield from table(result["rows"], columns)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
