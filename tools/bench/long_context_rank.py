"""One rank of tools/bench/long_context.py: time and memory of attention and of a model's step."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import Any

SCHEDULES = {
    "ring": ("ring", False),
    "ring_lean": ("ring_lean", False),
    "all_gather": ("all_gather", False),
    "ulysses": ("ring", True),
}
"""Transport, and whether all ranks are one Ulysses group: each then sees the whole sequence, which
is cut contiguously.
"""
WARM_UP_TOKENS = 256


def digest(tensors: list[Any], axis: Any) -> list[float]:
    """Norm of each tensor over all ranks of the axis."""
    import torch

    from megarl.parallel.collectives import all_reduce

    squares = torch.tensor(
        [float(x.detach().double().square().sum()) for x in tensors], dtype=torch.float64
    )
    return all_reduce(squares, axis).sqrt().tolist()


def timed(body: Any, axis: Any) -> tuple[dict[str, Any], Any]:
    """Memory and time of `body`, which all ranks begin together; and what it returned."""
    import peak_memory

    from megarl.parallel.collectives import barrier

    def run() -> tuple[float, Any]:
        started_at = time.perf_counter()
        result = body()
        return time.perf_counter() - started_at, result

    barrier(axis)
    used = time.process_time()
    peak, (seconds, result) = peak_memory.peak_of(run)
    cpu_s = time.process_time() - used
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "beyond_bytes": peak.allocated,
        "resident_bytes": peak.resident,
    }, result


def attention(task: dict[str, Any], mesh: Any, transport: str, tokens: int) -> dict[str, Any]:
    """One layer's attention over one document."""
    import peak_memory
    import torch

    from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
    from megarl.parallel.exchange import RingExchange
    from megarl.parallel.sequence import cut

    starts, size = torch.tensor([0, tokens]), mesh.sequence.size
    indices = cut(starts, size, task["cut"])
    inner, outer = RingExchange(mesh.ulysses), RingExchange(mesh.ring, mesh.ring_back)

    def prepare() -> AttentionPlan:
        plan = AttentionPlan.of(indices, starts, torch.device("cpu"), ulysses=inner.size)
        owners = [None] if transport == "all_gather" else range(outer.size)
        for owner in owners:
            plan.works(outer.rank, owner)
        return plan

    lists, plan = peak_memory.peak_of(prepare)
    mine = indices[mesh.sequence.rank]
    heads, kv_heads, width = task["heads"], task["kv_heads"], task["width"]

    def tensor(seed: int, count: int) -> torch.Tensor:
        """This rank's tokens of a row that is the same for every size."""
        return torch.randn(tokens, count, width, generator=torch.Generator().manual_seed(seed))[
            mine
        ]

    q, k, v = (
        tensor(seed, count).requires_grad_()
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    upstream = tensor(3, heads)

    def step() -> list[torch.Tensor]:
        out = sequence_attention(q, k, v, plan, inner, outer, width**-0.5, transport)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    found, results = timed(step, mesh.sequence)
    found["before_bytes"] = sum(x.nbytes for x in (q, k, v, upstream))
    return found | {"plan_bytes": lists.allocated, "digest": digest(results, mesh.sequence)}


def model(task: dict[str, Any], mesh: Any, transport: str, tokens: int) -> dict[str, Any]:
    """A small policy's forward and backward over one sample."""
    import torch

    from megarl.parallel.collectives import all_reduce
    from megarl.trainer.config import ModelConfig, SequenceConfig, TrainingConfig
    from megarl.trainer.loading import load_model
    from megarl.trainer.model import RoleModel
    from megarl.trainer.packing import pack_shared
    from megarl.types import Samples

    network = load_model(
        ModelConfig(path=task["model"], from_scratch=True), dtype=torch.float32, seed=0
    )
    settings = SequenceConfig(transport=transport, ulysses=mesh.ulysses.size, cut=task["cut"])  # type: ignore[arg-type]
    policy = RoleModel(network, mesh, TrainingConfig(sequence=settings))
    network.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()

    def batch(length: int) -> Any:
        ids = torch.randint(
            2, task["vocabulary"], (length,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        sample = Samples.one(0, ids)
        return pack_shared(sample, torch.device("cpu"), mesh.sequence, task["cut"])

    def step(micro: Any) -> torch.Tensor:
        logprobs, _ = policy(micro, 1.0)
        loss = -logprobs.sum() / micro.starts[-1]
        loss.backward()
        return loss.detach()

    step(batch(min(WARM_UP_TOKENS, tokens)))
    for parameter in policy.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    micro = batch(tokens)
    found, loss = timed(lambda: step(micro), mesh.sequence)
    weights = list(policy.parameters())
    owned = sum(x.nbytes + x.grad.nbytes for x in weights if x.grad is not None)
    owned += sum(
        x.nbytes
        for x in (getattr(micro, f.name) for f in fields(micro))
        if isinstance(x, torch.Tensor)
    )
    grads = [x.grad for x in weights]
    for total in [loss, *grads]:
        all_reduce(total, mesh.sequence)
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in grads if x is not None))
    return found | {"before_bytes": owned, "plan_bytes": 0, "digest": [float(loss), norm]}


WHAT = {"attention": attention, "model": model}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Measure on this rank every schedule, with attention alone and with a whole model, for each
    length of the sequence, with the number of ranks that this launch has.
    """
    import peak_memory
    import torch

    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh, finalise, initialise

    torch.set_num_threads(1)
    peak_memory.return_freed_memory(True)
    peak_memory.check()
    initialise(timeout_s=task["deadline"])
    found: dict[str, Any] = {}
    for name in task["schedules"]:
        transport, is_ulysses = SCHEDULES[name]
        layout = Layout(sequence=task["size"])
        ulysses = task["size"] if is_ulysses else 1
        settings = task | {"cut": "contiguous"} if is_ulysses else task
        with ProcessMesh(layout, ulysses=ulysses, timeout_s=task["deadline"]) as mesh:
            for what in task["what"]:
                WHAT[what](
                    settings, mesh, transport, min(WARM_UP_TOKENS, *task["tokens"])
                )  # loads libraries, opens connections
                for tokens in task["tokens"]:
                    found[f"{what} {name} {tokens}"] = WHAT[what](settings, mesh, transport, tokens)
    finalise()
    return found
