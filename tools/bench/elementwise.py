"""RMSNorm, rotary embedding and gated activation, forward and backward: the model's own code in
transformers against one kernel each (`training.norms: torch`, `training.elementwise: triton`).

    python tools/bench/elementwise.py --device cuda [--json] [--rounds 5]
    python tools/bench/elementwise.py --tokens 256 --hidden 64 --heads 4 --width 128    on CPU

Both compute the same states of one layer of a Qwen2 in turns: `--tokens` tokens, `--heads` query
heads of width 128 with a fifth as many key heads, bfloat16 on CUDA and float32 on CPU. Time is that
of forward and backward, on CUDA between events after a warm-up; median over rounds (smallest to
largest), and the median of the rounds' ratios. `memory` is what a forward pass keeps for the
backward pass, as torch.cuda.memory_allocated grows over it. Without a GPU only the norms are
measured: the kernels need one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import cell, command_line, require_positive, run_tool, spread

OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {"choices": ["cpu", "cuda"], "default": "cpu"},
    "--tokens": {"type": int, "default": 16384},
    "--hidden": {"type": int, "default": 5120},
    "--heads": {"type": int, "default": 40},
    "--width": {"type": int, "default": 13824, "help": "columns of the MLP's gate"},
    "--rounds": {"type": int, "default": 5},
}
HEAD = 128
"""Width of a head."""


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["tokens", "hidden", "heads", "width", "rounds"])
    return args


def pairs(args: argparse.Namespace, draw: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """{what: (a pass by the model's code, the same by one kernel)}; each returns its result."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

    from megarl.trainer.norms import use_torch_norms

    states = draw(1, args.tokens, args.hidden)
    norms = [Qwen2RMSNorm(args.hidden).to(states) for _ in range(2)]
    use_torch_norms(norms[1])
    made = {"RMSNorm": tuple(lambda norm=norm: norm(states) for norm in norms)}
    if args.device != "cuda":
        return made
    import torch.nn.functional as F

    from megarl.kernels.gated_triton import gated
    from megarl.kernels.rotary_triton import rotary

    q, k = (
        draw(1, args.tokens, heads, HEAD).transpose(1, 2)
        for heads in (args.heads, max(1, args.heads // 5))
    )
    cos, sin = (draw(1, args.tokens, HEAD).detach() for _ in range(2))
    gate, up = draw(1, args.tokens, args.width), draw(1, args.tokens, args.width)
    return made | {
        "rotary embedding": (
            lambda: apply_rotary_pos_emb(q, k, cos, sin),
            lambda: (rotary(q, cos, sin), rotary(k, cos, sin)),
        ),
        "SwiGLU": (lambda: F.silu(gate) * up, lambda: gated(gate, up, "silu")),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times in ms and kept memory in MiB of each way; raises `ValueError` without a GPU."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU; leave --device out to measure the norms on the CPU")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=args.device, dtype=dtype, requires_grad=True)

    found = {}
    for name, ways in pairs(args, draw).items():
        for way in ways:
            once(way, args.device)
        rounds = [[once(way, args.device) for way in ways] for _ in range(args.rounds)]
        found[name] = {
            "model_ms": [one[0][0] for one in rounds],
            "kernel_ms": [one[1][0] for one in rounds],
            "ratio": statistics.median(one[0][0] / one[1][0] for one in rounds),
            "kept_mib": [rounds[0][0][1], rounds[0][1][1]],
        }
    return {"found": found}


def once(way: Callable[[], Any], device: str) -> tuple[float, float]:
    """(ms of forward and backward, MiB that the forward pass keeps, 0 on the CPU)."""
    import torch

    on_gpu = device == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    before, start = torch.cuda.memory_allocated() if on_gpu else 0, now()
    made = way()
    kept = (torch.cuda.memory_allocated() if on_gpu else 0) - before
    outputs = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return 1e3 * (now() - start), kept / 2**20


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of the table."""
    yield "| | model ms | one kernel ms | ratio | kept MiB, model | one kernel |"
    yield "|---|---|---|---|---|---|"
    for name, one in result["found"].items():
        times = [cell(spread(one[key]), ".2f") for key in ("model_ms", "kernel_ms")]
        kept = " | ".join(f"{mib:.0f}" if mib else "" for mib in one["kept_mib"])
        yield f"| {name} | {' | '.join(times)} | {one['ratio']:.2f} | {kept} |"


if __name__ == "__main__":
    sys.exit(run_tool("elementwise", arguments=arguments, measure=measure, show=show))
