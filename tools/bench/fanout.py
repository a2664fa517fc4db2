"""How the time of a publication grows with the number of engines, when engines pass weights on to
engines, and when the trainer's neighbour sends to all.

    python tools/bench/fanout.py [--json] [--engines 1 2 4 8] [--link-mb-s 50] [--rounds 5]

Real: the transport `point_to_point`, a gloo process for the trainer rank and each engine, plan,
buckets and digests. Simulated: the network, since all processes are on one machine whose cores they
share. What a process sends waits until a link of --link-mb-s would have carried it, one message
after the other, without using a core. `tree` is the way of a run; in `star`, engine 0 sends to all
others itself, as the trainer did before engines relayed.

sent        MB and messages of the trainer rank for one version; they are the same for any number of
            engines
hops        links that a bucket crosses until the last engine has it
time        seconds from the trainer's first bucket until every engine has the version and has
            digested it; `bound` is what the links alone take: the busiest process's bytes, and one
            bucket over every further hop
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import Others, command_line, require_positive, run_tool, warn_if_not_quiet
from launch_ranks import launch

from megarl.parallel.mesh import Axis, finalise, initialise
from megarl.parallel.reshard.boxes import scatter
from megarl.parallel.reshard.owned import whole_owned
from megarl.weight_sync.bucket_receiver import BucketReceiver, deadline_watch
from megarl.weight_sync.checksums import carry
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.route import Route, RouteSpec, table_fingerprint
from megarl.weight_sync.transports import forwarding, p2p_group
from megarl.weight_sync.transports.point_to_point import Receiver, Sender

MODEL = {  # 15 million parameters
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
STAR = 2**30
"""Engines that engine 0 sends to in a star."""


def slow_links(bytes_per_s: float) -> list[int]:
    """Let everything that this process sends wait as on a link of this speed. Returns the counts
    (messages, bytes), which grow.
    """
    plain, link, counts = p2p_group.P2PGroup.send, threading.Lock(), [0, 0]

    def send(self: Any, messages: Any, memory: Any, tag: int) -> Any:
        num_bytes = sum(flat.nbytes for flat in messages.values())
        with link:
            time.sleep(num_bytes / bytes_per_s)
            counts[0] += len(messages)
            counts[1] += num_bytes
        return plain(self, messages, memory, tag)

    p2p_group.P2PGroup.send = send
    return counts


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One process of a case: the trainer rank, or an engine of one rank."""
    initialise(timeout_s=task["deadline"])
    forwarding.FANOUT = STAR if task["way"] == "star" else forwarding.FANOUT
    counts, table, rank = (
        slow_links(task["link_mb_s"] * 1e6),
        parameter_table(MODEL),
        dist.get_rank(),
    )
    spec = RouteSpec(
        data=1,
        sequence=1,
        tensor=1,
        zero_stage=0,
        shards={},
        engines=task["engines"],
        engine_tensor=1,
        shared=Sender.SHARED,
        dtype="bfloat16",
        bucket_bytes=int(task["bucket_mib"] * 2**20),
        table=table_fingerprint(table),
    )
    found = trainer(task, spec, table, counts) if rank == 0 else engine(task, spec, table, rank - 1)
    finalise()
    return found


def trainer(task: dict[str, Any], spec: RouteSpec, table: Any, counts: list[int]) -> dict[str, Any]:
    """The process of the trainer rank: send every version to engine 0, and compare the digests of
    all engines with its own. Returns the seconds of each timed version, until the last engine has
    digested it; messages and bytes that this process has sent of the last version; and the hops
    of a bucket. Raises `RuntimeError` if an engine has received something else.
    """
    route = Route.of_source(spec, table, 0)
    sender, watch = Sender(route, Axis("", 1, 0, (0,), None), ""), deadline_watch(task["deadline"])
    shapes = {row.name: row.shape for row in table}
    whole = {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }
    sources = scatter(whole_owned(shapes)[0], whole)
    seconds = []
    for version in range(-2, task["rounds"]):
        sender.begin(version)
        if version == -2:
            dist.broadcast_object_list([sender.init_info()])
        dist.barrier()
        digests, before, started_at = {}, list(counts), time.monotonic()
        for bucket in route.buckets:
            for copy, target in sender.reserve(bucket, watch):
                taken = copy.taken.view(sources[copy.taken.buffer])
                digest = carry(taken, target, copy.taken.box)
                digests[copy.tensor] = digests.get(copy.tensor, 0) + digest
            sender.commit(bucket, watch)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(None, answers)
        if any(digest != sum(digests.values()) for digest in answers[1:]):
            raise RuntimeError("an engine has received something else")
        if version >= 0:
            seconds.append(time.monotonic() - started_at)
            sent = [after - at for after, at in zip(counts, before, strict=True)]
    sender.close()
    return {
        "seconds": seconds,
        "messages": sent[0],
        "bytes": sent[1],
        "hops": hops(spec.engines),
    }


def hops(engines: int) -> int:
    """How many times a bucket is sent, one after the other, until the last of `engines` engines has
    it.
    """
    found, above = 1, forwarding.parent(engines - 1)
    while above is not None:
        above, found = forwarding.parent(above), found + 1
    return found


def engine(task: dict[str, Any], spec: RouteSpec, table: Any, number: int) -> dict[str, Any]:
    """The process of engine `number`, which has one rank: receive every version, digest it, and
    send the sum of the digests to the trainer rank.
    """
    route, info = Route.of_destination(spec, table, 0), [None]
    taker: BucketReceiver | None = None
    for version in range(-2, task["rounds"]):
        if version == -2:
            dist.broadcast_object_list(info)
        taker = taker or BucketReceiver(route, Receiver(route, number, 0, info[0] or {}))
        dist.barrier()
        digests, seconds = [0] * len(route.tensors), {"wait": 0.0, "digest": 0.0}
        for bucket, stored in taker.buckets(version, deadline_watch(task["deadline"]), seconds):
            taker.digest(bucket, stored, digests, seconds)
        dist.gather_object(sum(digests))
    assert taker is not None
    taker.receiver.close()
    return {}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time each number of engines twice: in the product's tree, and in a star, in which engine 0
    sends to all others.
    """
    made = []
    with Others() as others:
        for engines in args.engines:
            for way in ("tree", "star"):
                task = vars(args) | {"engines": engines, "way": way}
                ranks = launch(__file__, task, num_ranks=1 + engines, deadline_s=args.deadline)
                found = ranks[0] | {"engines": engines, "way": way}
                copies = min(forwarding.FANOUT, engines - 1) if way == "tree" else engines - 1
                bucket = min(found["bytes"], args.bucket_mib * 2**20)
                extra = (found["hops"] - 1) * max(1, copies) * bucket
                found["bound_s"] = (found["bytes"] * max(1, copies) + extra) / (
                    args.link_mb_s * 1e6
                )
                made.append(found)
    return {"cases": made, "others": others.share}


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as a table."""
    task = result["task"]
    yield (
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores; links of"
        f" {task['link_mb_s']:g} MB/s; {task['rounds']} rounds; buckets of"
        f" {task['bucket_mib']:g} MiB"
    )
    names = {
        "engines": 8,
        "way": 6,
        "hops": 6,
        "sent by the trainer": 26,
        "time, s": 34,
        "bound": 7,
    }
    yield "".join(f"{name:>{width}}" for name, width in names.items())
    for one in result["cases"]:
        times = one["seconds"]
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        took = f"{statistics.fmean(times):.3f} +- {deviation:.3f}"
        took += f" ({min(times):.3f} to {max(times):.3f})"
        sent = f"{one['bytes'] / 1e6:.1f} MB in {one['messages']}"
        yield (
            f"{one['engines']:>8}{one['way']:>6}{one['hops']:>6}{sent:>26}{took:>34}"
            f"{one['bound_s']:7.3f}"
        )
    yield from warn_if_not_quiet(result["others"])


OPTIONS: dict[str, dict[str, Any]] = {
    "--engines": {"type": int, "nargs": "+", "default": [1, 2, 4, 8], "help": "numbers of engines"},
    "--link-mb-s": {"type": float, "default": 50.0, "help": "speed of each process's link"},
    "--bucket-mib": {"type": float, "default": 0.5, "help": "weight_sync.bucket_mib"},
    "--rounds": {"type": int, "default": 5, "help": "timed rounds"},
    "--deadline": {"type": float, "default": 300.0, "help": "seconds that one case may take"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds"])
    if min(args.engines) < 1 or args.link_mb_s <= 0 or args.bucket_mib <= 0:
        parser.error("--engines, --link-mb-s and --bucket-mib must be above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool("fanout", arguments=arguments, work=work, measure=measure, show=show, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
