"""RMSNorm, rotary embedding and gated activation, forward and backward: the model's own code in
transformers against one kernel each (`training.norms: torch`, `training.elementwise: triton`).

    python tools/bench/elementwise.py --device cuda [--json] [--rounds 5]
    python tools/bench/elementwise.py --tokens 256 --hidden 64 --heads 4 --width 128    on CPU

Both compute the same states of one layer of a Qwen2 in turns: `--tokens` tokens, `--heads` query
heads of width 128 with a fifth as many key heads, bfloat16 on CUDA and float32 on CPU. Time is that
of forward and backward, after a warm-up; median over rounds (smallest to largest), and of the
rounds' ratios. `kept` is what a forward pass keeps for the backward pass, as
torch.cuda.memory_allocated grows over it. Without a GPU only the norms are measured: the kernels
need one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Args, in_turns, ratios, run_tool, spread

OPTIONS = {
    "--device": ("cpu", "where to measure", ("cpu", "cuda")),
    "--tokens": (16384, "tokens of the states"),
    "--hidden": (5120, "hidden size"),
    "--heads": (40, "query heads"),
    "--width": (13824, "columns of the MLP's gate"),
    "--rounds": (5, "turns of each way"),
}
HEAD = 128
"""Width of a head."""
COLUMNS = (
    "what; model ms=model_ms .2f; one kernel ms=kernel_ms .2f; ratio .2f;"
    " kept MiB, model=model_kept_mib .0f; one kernel=kernel_kept_mib .0f"
)


def pairs(args: Args, draw: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """{what: (a pass by the model's code, the same by one kernel)}; each returns its result."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

    from megarl.trainer.norms import use_torch_norms

    states = draw(1, args.tokens, args.hidden)
    norms = [Qwen2RMSNorm(args.hidden).to(states) for _ in range(2)]
    use_torch_norms(norms[1])
    made = {"RMSNorm": tuple(partial(norm, states) for norm in norms)}
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


def measure(args: Args) -> dict[str, Any]:
    """Times in ms and kept memory in MiB of each way; raises `ValueError` without a GPU."""
    import torch

    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU; leave --device out to measure the norms on the CPU")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    draw = partial(torch.randn, device=args.device, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)

    def once(way: Callable[[], Any]) -> tuple[float, float]:
        """(ms of forward and backward, MiB that the forward pass keeps, 0 on the CPU)."""
        sync = torch.cuda.synchronize if on_gpu else lambda: None
        sync()
        before, started_at = torch.cuda.memory_allocated(), time.perf_counter()
        made = way()
        kept = torch.cuda.memory_allocated() - before
        outputs = made if isinstance(made, tuple) else (made,)
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        sync()
        return 1e3 * (time.perf_counter() - started_at), kept / 2**20

    found = []
    for name, ways in pairs(args, draw).items():
        calls = {
            key: partial(once, way) for key, way in zip(("model", "kernel"), ways, strict=True)
        }
        rounds = in_turns(args.rounds, calls, skipped=1)
        times = {key: [ms for ms, _ in each] for key, each in rounds.items()}
        row = {f"{key}_ms": spread(each) for key, each in times.items()}
        row |= {f"{key}_kept_mib": each[0][1] for key, each in rounds.items()}
        found.append({"what": name, **row, "ratio": ratios(times["model"], times["kernel"])})
    return {"rows": found}


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS)
