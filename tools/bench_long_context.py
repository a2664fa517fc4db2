"""Context length against the size of the sequence axis: memory and time a rank, of attention and of
a model's step.

    python tools/bench_long_context.py [--json] [--tokens 16384,32768,65536] [--sizes 1,2,4]
    [--schedules ring_lean,ring]
                                       [--what attention|model|both] [--heads 4] [--kv-heads 1]
                                       [--width 32]

attention   forward and backward of one layer's `sequence_attention` over one causal document of
            `tokens`, in float32.
model       forward and backward of a RoleModel: `--layers` of these heads with checkpointed
            activations, and the log-prob head over `--vocabulary` words, with no logits in memory.
            Weights and their gradients are there before.

`size` gloo ranks with one thread each share the row by `--cut`. Memory is that of the rank with the
most:

    beyond      the most that torch's allocated beyond what was there before, which is of attention
                q, k, v and the gradient of the output, and of a model its weights, their gradients
                and the row's ids
    in all      the same, and what was there before
    x size      the memory times the size, over that of size 1: 1.00 falls exactly as 1/size

It is counted from every allocation and release of torch's allocator (tools/peak_memory.py) and
checked against tensors of known size first. The most resident memory is measured beside it by the
kernel's own count, which sees libraries and sockets as well: `resident`. The work lists of a row
are made before, once for all layers; they are small, and in the JSON object.

Time is that of the last rank to end, of one run, in the same run: what is written down are a few
hundred allocations. Where there are more ranks than cores, memory is right and time is not
comparable, and the table marks it with `*`. A run is refused where the sum of outputs or gradients
differs from that of the first size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from launch_ranks import QUIET, Others, launch, numbers, run_tool, spread

SCHEDULES = {
    "ring": ("ring", False),
    "ring_lean": ("ring_lean", False),
    "all_gather": ("all_gather", False),
    "ulysses": ("ring", True),
}
"""Transport, and whether all ranks are one Ulysses group: each then sees the whole row, which is
cut contiguously.
"""
CUTS = ("zigzag", "contiguous", "zigzag_document", "striped")
AGREES = 1e-4
WARM_UP_TOKENS = 256
BAR = 0.15

# ----------------------------------------------------------------------------------------- one rank


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
            plan.work(outer.rank, owner)
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
    """All rows, schedules and subjects for one size, on this rank."""
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


# --------------------------------------------------------------------------------------- comparison


def write_model_config(task: dict[str, Any], folder: Path) -> str:
    """A Qwen2 of the asked size, as a config.json: weights are random."""
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": task["vocabulary"],
        "hidden_size": task["heads"] * task["width"],
        "intermediate_size": 3 * task["heads"] * task["width"],
        "num_hidden_layers": task["layers"],
        "num_attention_heads": task["heads"],
        "num_key_value_heads": task["kv_heads"],
        "max_position_embeddings": max(task["tokens"]),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for every subject, schedule, length and size."""
    task = {
        name: getattr(args, name)
        for name in ("heads", "kv_heads", "width", "layers", "vocabulary", "cut", "tokens")
    }
    task |= {"what": args.what, "deadline": args.deadline}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="long-context-") as folder:
        task["model"] = write_model_config(task, Path(folder))
        for size in args.sizes:
            # On one rank nothing travels: the schedules are the same code.
            schedules = args.schedules if size > 1 else args.schedules[:1]
            with Others() as others:
                ranks = launch(
                    __file__,
                    task | {"size": size, "schedules": schedules},
                    num_ranks=size,
                    deadline_s=args.deadline,
                    environment={"CUDA_VISIBLE_DEVICES": ""},
                )
            for key in ranks[0]:
                what, schedule, tokens = key.split()
                rows.append(
                    row(
                        [rank[key] for rank in ranks],
                        what,
                        schedule,
                        int(tokens),
                        size,
                        others.share,
                    )
                )
            print(f"size {size} done, others {others.share:.0%}", file=sys.stderr, flush=True)
    order = {what: number for number, what in enumerate(WHAT)}
    rows.sort(key=lambda row: (order[row["what"]], row["tokens"], row["size"]))
    for made in rows:
        against(made, rows)
    return rows


def row(
    ranks: list[dict[str, Any]], what: str, schedule: str, tokens: int, size: int, others: float
) -> dict[str, Any]:
    """What the ranks found, as one row: memory of the rank with the most, time of the last to
    end.
    """
    most = max(ranks, key=lambda rank: rank["beyond_bytes"])
    measured = [rank["resident_bytes"] for rank in ranks if rank["resident_bytes"] is not None]
    return {
        "what": what,
        "schedule": schedule if size > 1 else "one rank",
        "tokens": tokens,
        "size": size,
        "beyond_bytes": most["beyond_bytes"],
        "total_bytes": max(rank["beyond_bytes"] + rank["before_bytes"] for rank in ranks),
        "resident_bytes": max(measured) if measured else None,
        "plan_bytes": max(rank["plan_bytes"] for rank in ranks),
        "rank_beyond_bytes": [rank["beyond_bytes"] for rank in ranks],
        "seconds": max(rank["seconds"] for rank in ranks),
        "cpu_s": spread([rank["cpu_s"] for rank in ranks])["max"],
        "others": others,
        "digest": ranks[0]["digest"],
    }


def against(made: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add the ratios to the first size's row, and refuse different results."""
    same = [
        other for other in rows if all(other[name] == made[name] for name in ("what", "tokens"))
    ]
    first = min(same, key=lambda other: other["size"])
    for mine, theirs in zip(made["digest"], first["digest"], strict=True):
        if not abs(mine - theirs) <= AGREES * abs(theirs):
            where = f"{made['what']}, {made['tokens']} tokens, {made['schedule']} of {made['size']}"
            raise RuntimeError(
                f"{where} does not compute what size {first['size']} does: norms {made['digest']},"
                f" {first['digest']}"
            )
    if first["size"] == 1:
        for name in ("beyond", "total"):
            made[f"{name}_x_size"] = made[f"{name}_bytes"] * made["size"] / first[f"{name}_bytes"]
        made["speed_up"] = first["seconds"] / made["seconds"]


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    here, task, rows = result["machine"], result["task"], result["rows"]
    yield f"{here['cpu']}, {here['cores']} cores; torch {here['torch']}; one thread a rank"
    yield (
        f"{task['heads']} query heads, {task['kv_heads']} key heads of width {task['width']},"
        f" float32, {task['cut']} cut; model: {task['layers']} layers, {task['vocabulary']:,} words"
    )
    head = (
        f"{'what':10} {'tokens':>7} {'size':>4}  {'schedule':10} {'beyond MB':>10} {'x size':>6}"
        f" {'in all MB':>10} {'x size':>6}"
    )
    yield f"{head} {'resident MB':>12} {'seconds':>9} {'times as fast':>14} {'others':>6}"
    for made in rows:
        beyond, total = (
            f"{made[name]:.2f}" if name in made else ""
            for name in ("beyond_x_size", "total_x_size")
        )
        mark = "*" if made["size"] > here["cores"] else " "
        resident = (
            "not permitted"
            if made["resident_bytes"] is None
            else f"{made['resident_bytes'] / 1e6:.1f}"
        )
        speed = f"{made['speed_up']:.2f}" if "speed_up" in made else ""
        yield (
            f"{made['what']:10} {made['tokens']:7} {made['size']:4}  {made['schedule']:10}"
            f" {made['beyond_bytes'] / 1e6:10.1f} {beyond:>6} {made['total_bytes'] / 1e6:10.1f}"
            f" {total:>6} {resident:>12} {made['seconds']:8.2f}{mark} {speed:>13}{mark}"
            f" {made['others']:6.0%}"
        )
    if any(made["size"] > here["cores"] for made in rows):
        yield (
            f"* more ranks than the {here['cores']} cores: memory is right, time is not comparable"
        )
    longest = [
        made for made in rows if made["tokens"] == max(task["tokens"]) and "beyond_x_size" in made
    ]
    off = [
        made for made in longest if made["what"] == "attention" and made["beyond_x_size"] > 1 + BAR
    ]
    for made in off:
        yield (
            f"above 1/size by more than {BAR:.0%}: {made['schedule']} of {made['size']} at"
            f" {made['tokens']:,} tokens"
        )
    if max(made["others"] for made in rows) > QUIET:
        yield (
            "NOT QUIET: other processes used the CPU; memory is right, repeat on an idle machine"
            " for the times"
        )


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--tokens",
        type=numbers,
        default="16384,32768,65536",
        help="lengths of the row, separated by commas",
    )
    parser.add_argument(
        "--sizes",
        type=numbers,
        default="1,2,4",
        help="sizes of the sequence axis; ratios need 1 among them",
    )
    parser.add_argument(
        "--schedules",
        default="ring_lean,ring",
        help=f"separated by commas, of: {', '.join(SCHEDULES)}",
    )
    parser.add_argument(
        "--what", choices=(*WHAT, "both"), default="attention", help="what is measured"
    )
    parser.add_argument(
        "--cut", choices=CUTS, default="zigzag", help="which rank holds which tokens"
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=4,
        help="query heads; memory ratios depend on heads : key heads only",
    )
    parser.add_argument(
        "--kv-heads", type=int, default=1, help="key heads; they divide the query heads"
    )
    parser.add_argument(
        "--width", type=int, default=32, help="of a head; the model's hidden size is heads x width"
    )
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=4096, help="words of the model")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="seconds that the ranks of one size may take"
    )
    args = parser.parse_args(argv)
    for name in ("heads", "kv_heads", "width", "layers", "vocabulary", "deadline"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; set it to 1 or more"
            )
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if args.vocabulary < 3:
        parser.error("--vocabulary must be 3 or more")
    args.sizes, args.tokens = sorted(set(args.sizes)), sorted(set(args.tokens))
    if args.tokens[0] < 2 * args.sizes[-1]:
        parser.error(
            f"--tokens {args.tokens[0]} are fewer than two a rank; set {2 * args.sizes[-1]} or more"
        )
    args.what = list(WHAT) if args.what == "both" else [args.what]
    args.schedules = args.schedules.split(",")
    if not set(args.schedules) <= set(SCHEDULES):
        parser.error(
            f"--schedules is {','.join(args.schedules)!r}; choose of {', '.join(SCHEDULES)}"
        )
    for size in args.sizes if "ulysses" in args.schedules else []:
        if args.heads % size or (args.kv_heads % size and size % args.kv_heads):
            parser.error(
                f"--schedules has ulysses, but {size} ranks cannot share {args.heads} heads; set"
                " --heads to a multiple"
            )
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "bench_long_context",
        arguments=arguments,
        work=work,
        measure=lambda args: {"rows": compare(args)},
        show=show,
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
