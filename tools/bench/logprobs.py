"""Log-probs and entropies with gradients, eager against fused: peak memory and time.

    python tools/bench/logprobs.py [--json] [--tokens 4096] [--vocabulary 151936] [--hidden 256]
    python tools/bench/logprobs.py --device cuda        32,768 tokens, vocab 151,936, hidden 4,096,
                                                        bfloat16

    eager          the whole logits: torch's matmul, log_softmax, gather, entropy, autograd's
                   backward
    eager oneDNN   the same with megarl's matrix product, on CPU only: what fusing alone is worth
    fused          megarl.kernels.logprobs.linear_logprobs
    liger          the same with backend "liger", on CUDA where liger-kernel imports

One step is forward and backward, with an upstream gradient for each token's log-prob and entropy,
to both hidden states and weight. Every measurement is a process of its own; systems take turns, and
the table has medians over rounds.

Memory is the most that a step used beyond its inputs and the two gradients that are its result: on
CPU the resident memory (tools/bench/peak_memory.py, which checks itself against tensors of known
size first), on CUDA max_memory_allocated. A step of a few tokens goes before, so that libraries are
loaded. At the peak of eager the gradients need not be there yet: subtracting them makes its figure
smaller, not ours.

Time is measured with the malloc that everybody has. On CPU it is one step a process, after one of a
few tokens: memory of this size goes back to the system when freed, so a second step would find
nothing warmer. On CUDA the median of --repeats. TFLOP/s-equivalent counts the products a step
cannot do without, 2 T H V forward and 6 T H V in all; fused makes one more, as it computes the
logits again. `CPU s` is the CPU time of a step, which other processes disturb least. Runs are
refused where results differ.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch
from common import Args, in_turns, progress, ratios, run_tool, spread, table
from launch_ranks import launch

DEFAULTS = {
    "cpu": {"tokens": 4096, "hidden": 256, "dtype": "float32", "repeats": 1},
    "cuda": {"tokens": 32768, "hidden": 4096, "dtype": "bfloat16", "repeats": 10},
}
EAGER_COPIES = 6
"""Copies of the float32 logits that eager needs at most, to check the memory before; it used 4 to 5
when this was written.
"""
AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
"""By how much results of two systems may differ, relative to their size."""
RESULTS = ("log-probs", "entropies", "grad of hidden", "grad of weight")
TIMES = ("forward_s", "step_s", "cpu_s")
WARM_UP_TOKENS = 128
EAGER, ONEDNN, FUSED, LIGER = SYSTEMS = ("eager", "eager oneDNN", "fused", "liger")
OPTIONS = {
    "--device": ("cpu", "where the steps run", tuple(DEFAULTS)),
    "--tokens": (0, "tokens of a step; default: 4096, on a GPU 32768"),
    "--vocabulary": (151936, "vocab size"),
    "--hidden": (0, "hidden size; default: 256, on a GPU 4096"),
    "--dtype": ("", "default: float32, on a GPU bfloat16", ("", *AGREE)),
    "--systems": ([""], "default: all that this machine has", ("", *SYSTEMS)),
    "--rounds": (3, "turns that each system gets"),
    "--repeats": (0, "steps of a process that measures time; default: 1, on a GPU 10"),
    "--threads": (1, "torch's, in every process"),
}


def function_of(system: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A function of (hidden states, weight, targets) that returns log-probs and entropies."""
    from megarl.kernels.linear import linear
    from megarl.kernels.logprobs import linear_logprobs

    if system in (FUSED, LIGER):
        return partial(linear_logprobs, backend="chunked" if system == FUSED else "liger")
    product = linear if system == ONEDNN else torch.nn.functional.linear

    def eager(hidden: Any, weight: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # No name holds the logits: they may go as soon as autograd lets them.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_p = torch.log_softmax(product(hidden, weight), dim=-1, dtype=dtype)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    return eager


def work(given: dict[str, Any]) -> dict[str, Any]:
    """Memory or time of one system, in a fresh process."""
    import peak_memory

    from megarl.kernels.logprobs import token_chunks

    torch.set_num_threads(given["threads"])
    on_gpu, wants_memory = given["device"] == "cuda", given["measure"] == "memory"
    if wants_memory and not on_gpu:
        peak_memory.return_freed_memory(True)
        peak_memory.check()
    function = function_of(given["system"])
    tokens, words, width = (given[name] for name in ("tokens", "vocabulary", "hidden"))
    torch.manual_seed(0)
    settings: Any = {"dtype": getattr(torch, given["dtype"]), "device": given["device"]}
    hidden = torch.randn(tokens, width, **settings).requires_grad_()
    weight = torch.randn(words, width, **settings).mul_(2 / math.sqrt(width)).requires_grad_()
    targets = torch.randint(0, words, (tokens,), device=given["device"])
    upstream = torch.randn(2, tokens, device=given["device"])

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(count: int | None = None) -> tuple[dict[str, float], list[Any]]:
        piece, started_at, used = slice(0, count), now(), time.process_time()
        outputs = function(hidden[piece], weight, targets[piece])
        middle, above = now(), [x[piece].to(outputs[0].dtype) for x in upstream]
        grads = torch.autograd.grad(outputs, (hidden, weight), above)
        times = (middle - started_at, now() - started_at, time.process_time() - used)
        return dict(zip(TIMES, times, strict=True)), [*outputs, *grads]

    step(min(WARM_UP_TOKENS, tokens))
    try:
        if not wants_memory:
            found = [step()[0] for _ in range(given["repeats"])]
            return {name: statistics.median(one[name] for one in found) for name in TIMES}
        peak, (_, outputs) = peak_memory.peak_of(step, torch.device(given["device"]))
    except torch.cuda.OutOfMemoryError:
        return {"does_not_fit": True}
    if peak.resident is None:
        raise RuntimeError("this system does not permit a process to reset its VmHWM")
    found = {
        "peak_bytes": peak.resident - sum(grad.nbytes for grad in outputs[2:]),
        "digest": [float(x.detach().double().norm()) for x in outputs],
    }
    if given["system"] == FUSED:  # logits of its largest chunk of tokens
        found["room_bytes"] = token_chunks(hidden, weight, None)[1].nbytes
    return found


def measure(args: Args) -> dict[str, Any]:
    """{"systems": {system: row of the table}}. Measures the peak memory of every system, then the
    times of those that fit into memory, in turns. Raises `RuntimeError` if their results differ.
    """
    on_gpu = args.device == "cuda"
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    if args.systems == [""]:
        has_liger = bool(importlib.util.find_spec("liger_kernel"))
        args.systems = [EAGER, *([] if on_gpu else [ONEDNN]), FUSED, *[LIGER] * on_gpu * has_liger]
    available = psutil.virtual_memory().available
    needed = EAGER_COPIES * 4 * args.tokens * args.vocabulary
    if not on_gpu and {EAGER, ONEDNN} & set(args.systems) and available < needed:
        raise ValueError(
            f"eager needs about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are"
            f" available; set --tokens to {int(args.tokens * available / needed)} or less, or"
            " --systems fused"
        )

    def one(system: str, what: str) -> dict[str, Any]:
        task = vars(args) | {"system": system, "measure": what}
        (found,) = launch(__file__, task, 1, OMP_NUM_THREADS=str(args.threads))
        progress(f"{system:13} {what:7}", found)
        return found

    rows: dict[str, dict[str, Any]] = {system: one(system, "memory") for system in args.systems}
    fitting = [system for system in args.systems if "does_not_fit" not in rows[system]]
    for system in fitting[1:]:
        digests = rows[system]["digest"], rows[fitting[0]]["digest"]
        for name, mine, first in zip(RESULTS, *digests, strict=True):
            if not abs(mine - first) <= AGREE[args.dtype] * abs(first):
                raise RuntimeError(f"{name} differ: norm {mine} of {system}, {first} of eager")
    runs = in_turns(args.rounds, {system: partial(one, system, "time") for system in fitting})
    products = args.tokens * args.vocabulary * args.hidden / 1e12
    for system, each in runs.items():
        row = rows[system]
        row |= {name: spread([run[name] for run in each]) for name in TIMES}
        row["forward_tflops"] = 2 * products / row["forward_s"]["median"]
        row["step_tflops"] = 6 * products / row["step_s"]["median"]
        if EAGER in fitting:
            row["memory_of_eager"] = row["peak_bytes"] / rows[EAGER]["peak_bytes"]
            eager, mine = ([run["step_s"] for run in runs[name]] for name in (EAGER, system))
            row["times_as_fast"] = ratios(eager, mine)
    return {"systems": rows}


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    columns = (
        "system; peak MB=peak_bytes*1e-6 ,.0f; of eager=memory_of_eager .2%;"
        " forward s=forward_s .3f; step s=step_s .3f; CPU s=cpu_s .2f;"
        " times as fast=times_as_fast .2f; TFLOP/s forward=forward_tflops .3g;"
        " TFLOP/s step=step_tflops .3g"
    )
    rows = result["systems"]
    yield from table(({"system": name, **row} for name, row in rows.items()), columns)
    yield from (f"{name} does not fit" for name, row in rows.items() if "does_not_fit" in row)
    if room := rows.get(FUSED, {}).get("room_bytes"):
        yield f"largest chunk of logits of fused: {room / 1e6:,.0f} MB"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)
