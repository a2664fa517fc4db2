"""Context length against the size of the sequence axis: memory and time a rank, of attention and of
a model's step.

    python tools/bench/long_context.py [--json] [--tokens 16384,32768,65536] [--sizes 1,2,4]
    [--schedules ring_lean,ring] [--what attention,model] [--heads 4] [--kv-heads 1]

attention   forward and backward of one layer's `sequence_attention` over one causal document of
            `tokens`, in float32.
model       forward and backward of a RoleModel: two layers of these heads with checkpointed
            activations, and the log-prob head over a vocab of `--vocabulary`, without logits in
            memory. Weights and their gradients are there before.

`size` gloo ranks with one thread each share the sequence in the zigzag cut. Memory is that of the
rank with the most:

    beyond      the most that torch's allocated beyond what was there before, which is of attention
                q, k, v and the gradient of the output, and of a model its weights, their gradients
                and the sequence's ids
    in all      the same, and what was there before
    x size      the memory times the size, over that of size 1: 1.00 falls exactly as 1/size

It is counted from every allocation and release of torch's allocator (tools/bench/peak_memory.py)
and checked against tensors of known size first. The work lists of a sequence are made before, once
for all layers; they are small.

Time is that of the last rank to end, of one run, in the same run: what is written down are a few
hundred allocations. Where there are more ranks than cores, memory is right and time is not
comparable, and the table marks it with `*`. A run is refused where the sum of outputs or gradients
differs from that of the first size.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from common import Args, progress, qwen2, run_tool, table, write_config
from launch_ranks import launch, ready

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
AGREES = 1e-4
BAR = 0.15
"""A warning is printed if a rank's attention memory at the longest length is more than this
fraction above (memory with one rank) / (number of sequence-parallel ranks)."""
OPTIONS = {
    "--tokens": ([16384, 32768, 65536], "lengths of the sequence"),
    "--sizes": ([1, 2, 4], "sizes of the sequence axis; ratios need 1 among them"),
    "--schedules": (["ring_lean", "ring"], "how keys and values travel", tuple(SCHEDULES)),
    "--what": (["attention"], "what is measured", ("attention", "model")),
    "--heads": (4, "query heads; memory ratios depend on heads : KV heads only"),
    "--kv-heads": (1, "KV heads; they divide the query heads"),
    "--width": (32, "of a head; the model's hidden size is heads x width"),
    "--vocabulary": (4096, "vocab size of the model"),
}

# ---------------------------------------------------------------------------------------- on a rank


def timed(body: Callable[[], Any], axis: Any, before_bytes: int) -> tuple[dict[str, Any], Any]:
    """Memory and time of `body`, which all ranks begin together; and what it returned."""
    import peak_memory

    from megarl.parallel.collectives import barrier

    def run() -> tuple[float, Any]:
        started_at = time.perf_counter()
        result = body()
        return time.perf_counter() - started_at, result

    barrier(axis)
    peak, (seconds, result) = peak_memory.peak_of(run)
    return {
        "seconds": seconds,
        "beyond_bytes": peak.allocated,
        "total_bytes": peak.allocated + before_bytes,
    }, result


def attention(task: dict[str, Any], mesh: Any, transport: str, tokens: int) -> dict[str, Any]:
    """Time and memory of forward and backward pass of one layer's attention over one document of
    `tokens` tokens; `digest` has the norms of output and gradients, the same for every size.
    """
    from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
    from megarl.parallel.collectives import all_reduce
    from megarl.parallel.exchange import RingExchange
    from megarl.parallel.sequence import cut

    starts = torch.tensor([0, tokens])
    indices = cut(starts, mesh.sequence.size, task["cut"])
    inner, outer = RingExchange(mesh.ulysses), RingExchange(mesh.ring, mesh.ring_back)
    plan = AttentionPlan.of(indices, starts, torch.device("cpu"), ulysses=inner.size)
    for owner in [None] if transport == "all_gather" else range(outer.size):
        plan.works(outer.rank, owner)
    heads, kv_heads, width = task["heads"], task["kv_heads"], task["width"]

    def tensor(seed: int, count: int) -> torch.Tensor:
        """This rank's tokens of a row that is the same for every size."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, count, width, generator=draw)[indices[mesh.sequence.rank]]

    counts = (heads, kv_heads, kv_heads, heads)
    *inputs, upstream = (tensor(seed, count) for seed, count in enumerate(counts))
    q, k, v = (x.requires_grad_() for x in inputs)

    def step() -> list[torch.Tensor]:
        out = sequence_attention(q, k, v, plan, inner, outer, width**-0.5, transport)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    owned = sum(x.nbytes for x in (q, k, v, upstream))
    found, results = timed(step, mesh.sequence, owned)
    squares = torch.stack([x.detach().double().square().sum() for x in results])
    return found | {"digest": all_reduce(squares, mesh.sequence).sqrt().tolist()}


def model(task: dict[str, Any], mesh: Any, transport: str, tokens: int) -> dict[str, Any]:
    """Time and memory of forward and backward pass of a two-layer policy of random weights, over
    one sample of `tokens` tokens; `digest` is its loss and gradient norm, the same for every size.
    """
    from megarl.parallel.collectives import all_reduce
    from megarl.settings.training import ModelConfig, SequenceConfig, TrainingConfig
    from megarl.trainer.loading import load_model
    from megarl.trainer.model import RoleModel
    from megarl.trainer.packing import pack_shared
    from megarl.types import Samples

    source = ModelConfig(path=task["model"], from_scratch=True)
    network = load_model(source, dtype=torch.float32, seed=0)
    settings = SequenceConfig(transport=transport, ulysses=mesh.ulysses.size, cut=task["cut"])  # type: ignore[arg-type]
    policy = RoleModel(network, mesh, TrainingConfig(sequence=settings))
    network.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()

    def batch(length: int) -> Any:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(2, task["vocabulary"], (length,), generator=draw).tolist()
        return pack_shared(Samples.one(0, ids), torch.device("cpu"), mesh.sequence, task["cut"])

    def step(micro: Any) -> torch.Tensor:
        logprobs, _ = policy(micro, 1.0)
        loss = -logprobs.sum() / micro.starts[-1]
        loss.backward()
        return loss.detach()

    step(batch(min(WARM_UP_TOKENS, tokens)))
    grads = [x.grad for x in policy.parameters() if x.grad is not None]
    for grad in grads:
        grad.zero_()
    micro = batch(tokens)
    inputs = [getattr(micro, field.name) for field in fields(micro)]
    tensors = [*policy.parameters(), *grads, *inputs]
    owned = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
    found, loss = timed(lambda: step(micro), mesh.sequence, owned)
    for total in [loss, *grads]:
        all_reduce(total, mesh.sequence)
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in grads))
    return found | {"digest": [float(loss), norm]}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Measure on this rank every schedule, with attention alone and with a whole model, for each
    length of the sequence, with the number of ranks that this launch has.
    """
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh

    found, layout = [], Layout(sequence=task["size"])
    runs = {"attention": attention, "model": model}
    with ready(task["deadline"], checks_memory=True):
        for name, what in itertools.product(task["schedules"], task["what"]):
            transport, is_ulysses = SCHEDULES[name]
            ulysses = task["size"] if is_ulysses else 1
            settings = task | {"cut": "contiguous" if is_ulysses else "zigzag"}
            with ProcessMesh(layout, ulysses=ulysses, timeout_s=task["deadline"]) as mesh:
                same = settings, mesh, transport
                runs[what](*same, min(WARM_UP_TOKENS, *task["tokens"]))  # opens connections
                for tokens in task["tokens"]:
                    row = {"what": what, "schedule": name, "tokens": tokens, "size": task["size"]}
                    found.append(row | runs[what](*same, tokens))
    return {"rows": found}


# ----------------------------------------------------------------------------------------- the tool


def measure(args: Args) -> dict[str, Any]:
    """A row of the table for every subject, schedule, length and size."""
    args.sizes, args.tokens = sorted(set(args.sizes)), sorted(set(args.tokens))
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if args.tokens[0] < 2 * args.sizes[-1]:
        raise ValueError(f"--tokens {args.tokens[0]} are fewer than two a rank")
    for size in args.sizes if "ulysses" in args.schedules else []:
        if args.heads % size or (args.kv_heads % size and size % args.kv_heads):
            raise ValueError(
                f"--schedules has ulysses, but {size} ranks cannot share {args.heads} heads; set"
                " --heads to a multiple"
            )
    rows: list[dict[str, Any]] = []
    hidden = args.heads * args.width
    sizes = args.vocabulary, hidden, 3 * hidden, 2, args.heads, args.kv_heads
    path = write_config(args.work, qwen2(*sizes, max_position_embeddings=max(args.tokens)))
    for size in args.sizes:
        # On one rank nothing travels: the schedules are the same code.
        schedules = args.schedules if size > 1 else args.schedules[:1]
        task = vars(args) | {"size": size, "schedules": schedules, "model": path}
        ranks = launch(__file__, task, size, CUDA_VISIBLE_DEVICES="")
        rows += map(one_row, zip(*(rank["rows"] for rank in ranks), strict=True))
        progress(f"size {size} done")
    rows.sort(key=lambda row: (row["what"], row["tokens"], row["size"]))
    for row in rows:
        compare(row, next(one for one in rows if all(one[k] == row[k] for k in ("what", "tokens"))))
    return {"rows": rows}


def one_row(ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """What the ranks found, as one row: memory of the rank with the most, time of the last to
    end.
    """
    names = ("beyond_bytes", "total_bytes", "seconds")
    most = {name: max(rank[name] for rank in ranks) for name in names}
    beyond = [rank["beyond_bytes"] for rank in ranks]
    alone = {} if len(ranks) > 1 else {"schedule": "one rank"}
    return ranks[0] | most | alone | {"rank_beyond_bytes": beyond}


def compare(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Add the ratios to the first size's row, and refuse different results."""
    for mine, theirs in zip(row["digest"], first["digest"], strict=True):
        if not abs(mine - theirs) <= AGREES * abs(theirs):
            raise RuntimeError(
                f"{row['what']}, {row['tokens']} tokens, {row['schedule']} of {row['size']} does"
                f" not compute what size {first['size']} does: norms {row['digest']},"
                f" {first['digest']}"
            )
    if first["size"] == 1:
        for name in ("beyond", "total"):
            row[f"{name}_x_size"] = row[f"{name}_bytes"] * row["size"] / first[f"{name}_bytes"]


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    cores, longest = result["machine"]["cores"], max(result["task"]["tokens"])
    columns = (
        "what; tokens ,d; size d; schedule; beyond MB=beyond_bytes*1e-6 .1f;"
        " x size=beyond_x_size .2f; in all MB=total_bytes*1e-6 .1f;"
        " x size of all=total_x_size .2f; seconds .2f; =mark"
    )
    rows = [row | {"mark": "*" * (row["size"] > cores)} for row in result["rows"]]
    yield from table(rows, columns)
    if any(row["mark"] for row in rows):
        yield f"* more ranks than the {cores} cores: memory is right, time is not comparable"
    for row in rows:
        is_longest = row["what"] == "attention" and row["tokens"] == longest
        if is_longest and row.get("beyond_x_size", 0) > 1 + BAR:
            yield f"above 1/size by more than {BAR:.0%}: {row['schedule']} of {row['size']}"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)
