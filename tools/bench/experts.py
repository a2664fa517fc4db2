"""A layer of experts on CPU, forward and backward in float32: megarl's against transformers' own.

    python tools/bench/experts.py [--json] [--rounds 7]
    python tools/bench/experts.py --tokens 256 --hidden 64 --width 24 --rounds 1     a trial

The experts of a Qwen3-MoE, `--experts` of `--width` columns, of which each token takes `--top-k` at
random. All ways compute the same layer in one process in turns, after a warm-up, so that other
processes slow all of them; only the ratios count. `ratio` is transformers' time over megarl's in
the same round, median (smallest to largest), and `CPU ratio` that of the CPU time of all threads.
On a busy machine take the latter with `--threads 1`: each small operation of two threads waits
until both have got a core. The memory is that of one pass beyond weights, inputs
and their gradients, each way in a process of its own: `allocated` sums what torch's allocator gave,
`resident` is the growth of VmHWM. transformers' batched_mm is left out where the weights that it
copies for every row would fill more than a GiB.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from common import Args, in_turns, ratios, run_tool, spread

OPTIONS = {
    "--tokens": (8192, "tokens"),
    "--experts": (16, "experts"),
    "--top-k": (2, "experts of each token"),
    "--hidden": (1024, "hidden size"),
    "--width": (384, "columns of an expert's gate"),
    "--threads": (2, "CPU threads"),
    "--rounds": (7, "turns of each way"),
}
COLUMNS = (
    "way; seconds .2f; ratio .2f; CPU ratio=cpu_ratio .2f;"
    " allocated MiB=allocated*9.5367431640625e-07 .0f;"
    " resident MiB=resident*9.5367431640625e-07 .0f"
)
OURS = "megarl_experts"


def layer(settings: dict[str, Any]) -> Callable[[str], Any]:
    """(way) -> what a forward and backward pass by it gives: the output."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import megarl.trainer.experts  # registers its way  # noqa: F401

    torch.manual_seed(0)
    torch.set_num_threads(settings["threads"])
    tokens, experts, hidden = (settings[name] for name in ("tokens", "experts", "hidden"))
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=settings["width"], num_experts=experts
    )
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    states, grad = torch.randn(2, tokens, hidden).unbind()
    index = torch.rand(tokens, experts).topk(settings["top_k"], -1).indices
    weights = torch.rand(index.shape).requires_grad_()
    leaves = [*module.parameters(), states.requires_grad_(), weights]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)

    def once(way: str) -> Any:
        config._experts_implementation = way
        out = module(states, index, weights)
        out.backward(grad)
        return out.detach()

    return once


def seconds(once: Callable[[str], Any], way: str) -> tuple[float, float]:
    """(seconds, CPU seconds of all threads)"""
    began, cpu = time.perf_counter(), time.process_time()
    once(way)
    return time.perf_counter() - began, time.process_time() - cpu


def peak(settings: dict[str, Any], way: str) -> dict[str, Any]:
    """Bytes at most during one pass."""
    from peak_memory import peak_of, return_freed_memory

    once = layer(settings)
    once(way)
    return_freed_memory(True)
    most, _ = peak_of(partial(once, way))
    return {"allocated": most.allocated, "resident": most.resident}


def measure(args: Args) -> dict[str, Any]:
    """Seconds, ratios and bytes of each way. Raises `RuntimeError` where the ways differ."""
    settings = {name: getattr(args, name) for name in ("tokens", "experts", "top_k", "hidden")}
    settings |= {"width": args.width, "threads": args.threads}
    copied = 4 * args.tokens * args.top_k * 2 * args.width * args.hidden
    ways = [OURS, "eager", "grouped_mm", *(["batched_mm"] if copied < 2**30 else [])]
    once = layer(settings)
    outputs = [once(way) for way in ways]
    if any((out - outputs[0]).abs().max() > 1e-4 * outputs[0].abs().max() for out in outputs):
        raise RuntimeError("the ways compute different layers")
    del outputs
    rounds = in_turns(args.rounds, {way: partial(seconds, once, way) for way in ways}, skipped=1)
    wall, cpu = ({way: [both[n] for both in rounds[way]] for way in ways} for n in (0, 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        peaks = {way: pool.submit(peak, settings, way).result() for way in ways}
    return {
        "rows": [
            {"way": way, "seconds": spread(wall[way]), "ratio": ratios(wall[way], wall[OURS])}
            | {"cpu_ratio": ratios(cpu[way], cpu[OURS])}
            | peaks[way]
            for way in ways
        ]
    }


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS)
