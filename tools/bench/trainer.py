"""The trainer alone, on one rank with random weights: tokens a second, memory, MFU.

    python tools/bench/trainer.py [--json] [--cases rl:16384,rl:65536,sft:8192,sft:16384,lora:16384]
    python tools/bench/trainer.py --size tiny --cases rl:64,sft:64:kept --tokens 128        on CPU

A case is LOSS:TOKENS or LOSS:TOKENS:WAY. Rows have one document of so many tokens, all of which are
trained on, and a step has as many rows as fit into `--tokens`, each a micro-batch: forward and
backward passes and one AdamW step in bfloat16 under ZeRO 1. The first steps do not count.

    rl, lora   DAPO's loss; with LoRA of rank 16 on all linear layers
    sft        the mean of -log-prob

    model      the layers as transformers computes them, recomputed in the backward pass
    kernels    RMSNorm, rotary embedding and SwiGLU by one kernel each, as the recipes for GPUs do;
               the usual way on a GPU
    compiled   RMSNorm and SwiGLU by torch.compile
    flash      `kernels` with torch's attention instead of the one that `auto` chooses
    kept       `kernels` where there is a GPU, without recomputation

MFU counts 6 FLOP for each parameter and token, with LoRA 4, and 6 for each layer, channel of
queries and token for the attention of a row to half of itself; nothing for recomputation. Memory is
the most that tensors took beyond what was there before, and that torch has reserved in all, on GPUs
only. `longest` are the longest kernels (operators on a CPU) of one more step, by torch.profiler.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import QWEN3, Args, Lines, progress, run_tool, spread, table, write_config
from launch_ranks import make_role, ready
from prefix import Trainer, groups_of

KERNELS = {"norms": "torch", "elementwise": "triton"}
WAYS: dict[str, dict[str, Any]] = {
    "model": {},
    "kernels": KERNELS,
    "compiled": {},
    "flash": KERNELS | {"attention": "torch"},
    "kept": KERNELS | {"gradient_checkpointing": False},
}
"""{way: settings of `training`}"""
COMPILED = ("Norm", "MLP")
"""Ends of the names of module classes."""
SHOWN = 12
"""Kernels that are named."""


def cases(text: str) -> list[tuple[str, int, str]]:
    """Loss, tokens of a row and way ("" for the usual one). Raises `ValueError`."""
    found = [(*one.split(":"), "")[:3] for one in text.split(",")]
    for loss, _, way in found:
        if loss not in ("rl", "sft", "lora") or way not in ("", *WAYS):
            raise ValueError(text)
    return [(loss, int(tokens), way) for loss, tokens, way in found]


OPTIONS = {
    "--cases": ("rl:16384,rl:65536,sft:8192,sft:16384,lora:16384", "LOSS:TOKENS[:WAY]", cases),
    "--size": ("0.6b", "of a Qwen3", tuple(QWEN3)),
    "--tokens": (32768, "tokens of a step; a longer row is a step"),
    "--steps": (2, "counted steps"),
    "--peak": (989, "TFLOP/s of the GPU in bfloat16, of which MFU is the share; H100 and H200"),
    "--threads": (1, "torch threads, on the CPU"),
    "--block": ("auto", "training.sequence.block, such as path/to/file.py:Class"),
}


def flop_per_token(config: dict[str, Any], parameters: int, loss: str, length: int) -> float:
    """FLOP of a trained token, without recomputation."""
    channels = config["num_attention_heads"] * config["head_dim"]
    attention = 6 * config["num_hidden_layers"] * channels * length
    return (4 if loss == "lora" else 6) * parameters + attention


def step_of(loss: str, role: Any, length: int, rows: int, vocabulary: int) -> Callable[[], Any]:
    """A function that trains a step."""
    import numpy as np

    from megarl.apps.tune.sft import sft_step
    from megarl.trainer.finite import StepGuard
    from megarl.types import Samples

    if loss == "sft":
        draw, guard = np.random.default_rng(0), StepGuard(role, allowed=0)
        rows_of_ids = [draw.integers(2, vocabulary, length) for _ in range(rows)]
        samples = Samples.concatenate([Samples.one(n, ids) for n, ids in enumerate(rows_of_ids)])
        return partial(sft_step, role, samples, 0, guard)
    return partial(Trainer(role).step, groups_of((1, rows, length - 1), 1, 0, vocabulary))


def longest(step: Callable[[], Any], on_gpu: bool) -> dict[str, float]:
    """{name: seconds} of the longest kernels or operators of a step."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as recorded:
        step()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {one.key[:80]: getattr(one, name) / 1e6 for one in recorded.key_averages()}
    return dict(sorted(times.items(), key=lambda one: -one[1])[:SHOWN])


def run_case(
    case: tuple[str, int, str], args: Args, mesh: Any, device: Any, model: str
) -> dict[str, Any]:
    """One row of the table."""
    import torch

    from megarl.settings.training import LoraConfig, SequenceConfig

    loss, length, way = case
    on_gpu, config = device.type == "cuda", QWEN3[args.size]
    way, rows = way or ("kernels" if on_gpu else "model"), max(1, args.tokens // length)
    settings = {"gradient_checkpointing": True} | WAYS[way]
    if not on_gpu:  # where these kernels do not run
        settings = {name: one for name, one in settings.items() if name not in KERNELS}
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    before = torch.cuda.memory_allocated() if on_gpu else 0
    role = make_role(
        *(model, mesh, device),
        precision="bfloat16",
        zero_stage=1,
        share_prefix="off",
        micro_batch_tokens=length,
        sequence=SequenceConfig(block=args.block),
        lora=LoraConfig(rank=16 if loss == "lora" else 0),
        **settings,
    )
    network = role.engine.module.model
    for module in network.modules() if way == "compiled" else ():
        if type(module).__name__.endswith(COMPILED):
            module.compile()
    step = step_of(loss, role, length, rows, config["vocab_size"])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def timed() -> float:
        began = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - began

    seconds = [timed() for _ in range(1 + args.steps)][1:]
    rates = spread([rows * length / one for one in seconds])
    weights = sum(p.numel() for n, p in network.named_parameters() if "lora_" not in n)
    flop = flop_per_token(config, weights, loss, length)
    row = {
        "case": f"{loss}:{length}:{way}",
        "tokens_per_s": rates,
        "mfu": rates["median"] * flop / (1e12 * args.peak),
        "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "parameters": weights,
        "longest": longest(step, on_gpu),
    }
    role.destroy()
    progress(row)  # a run that is cut off leaves it in its log
    return row


def measure(args: Args) -> dict[str, Any]:
    """Each case in turn."""
    import torch

    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh

    rows, model = [], write_config(args.work, QWEN3[args.size])
    with ready(600, threads=args.threads) as device, ProcessMesh(Layout(), timeout_s=600) as mesh:
        for case in args.cases:
            rows.append(run_case(case, args, mesh, device, model))
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without a GPU
    return {"rows": rows}


def show(result: dict[str, Any]) -> Lines:
    """A table, and the longest kernels of each case."""
    columns = "case; tokens/s=tokens_per_s ,.0f; MFU=mfu .1%; "
    columns += f"peak GiB=peak_bytes*{2**-30} .1f; reserved GiB=reserved_bytes*{2**-30} .1f"
    yield from table(result["rows"], columns)
    for row in result["rows"]:
        named = (f"{name} {seconds:.4f} s" for name, seconds in row["longest"].items())
        yield f"{row['case']}: {'; '.join(named)}"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
