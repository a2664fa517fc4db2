"""Publishing weights, beside a copy of memory and beside sending one whole parameter at a time:
seconds, bytes, memory.

    python tools/bench/publish.py [--json] [--rounds 5] [--bucket-mib 4,16,64,256]
    python tools/bench/publish.py --layout "data 2 tensor 1 zero 3" --engines 1 [--with-engine]
    python tools/bench/publish.py --device cuda --shape 0.6b,7b [--with-engine]     # on one GPU

With --device cuda a trainer rank and a reader, or with --with-engine a vLLM engine in its place,
share one GPU, as a colocated engine does, and weights take `cuda_ipc`, to readers `shared_memory`
too; no run on a GPU yet.

Without --layout, four cases. Each is one launch: trainer ranks under gloo and a process for each
engine rank, all with one thread, which publish through `Publisher`, shared memory, digests and
their comparison as a run does. Not as in a run: weights are flat buffers of random bits, not a
DeepSpeed engine's, and engine ranks are readers, not vLLM. All ways take turns, `--rounds` times.
Two rounds before are not timed: in the first, from nothing and back, memory is measured, and
readers must hold the same whichever way it came; the second makes and touches what is kept from
then on.

memcpy           torch's copy_ of as many bytes as one engine's weights, by one trainer rank, and by
                 all, each its share; on a GPU between two places of 2 GiB
publish          until every engine rank has its shard in its image and digested, and digests were
                 compared
publish + copy   the same, and readers copy each bucket to buffers of their own, as engines do that
need not repack
per parameter    trainer ranks gather each parameter whole (gloo); rank 0 sends it to every reader,
                 who copies its share to its own buffers and acknowledges it; then the next. No
                 digests; buffers are made once. Through `gloo` it is a broadcast, as in systems
                 with NCCL; with `shared memory` rank 0 gathers straight into memory that readers
                 see
engine           with --with-engine, in a launch of its own: `publish` to real vLLM engines;
                 `install` is their repacking

GB/s is bytes of one engine's weights over the mean time, from when the first trainer rank begins to
when the last is done. `received` is what an engine rank receives, the most of any. `beyond` is the
most memory beyond weights and readers' own buffers: of tensors (exact), and resident, with pages of
shared memory, which count in every process that sees them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import torch
from common import QWEN3, Args, Lines, cell, progress, qwen2, run_tool, spread, table, write_config
from launch_ranks import launch
from publish_ranks import THROUGH, work
from reshard_plan import parse_degrees

from megarl.weights.recorded_table import recorded_table

CASES = [
    ("data 1 tensor 1 zero 0", 1, 1),
    ("data 2 tensor 1 zero 3", 1, 1),
    ("data 1 tensor 2 zero 0", 1, 2),
    ("data 1 tensor 1 zero 0", 2, 1),
]
"""(training layout, engines, tensor ranks of each) that are measured by default."""
SHAPES = {
    "0.5b": qwen2(151936, 1024, 4096, 24, 16, 8, tie_word_embeddings=True),
    "0.6b": QWEN3["0.6b"],
    "7b": qwen2(152064, 3584, 18944, 28, 28, 4),  # that of Qwen2.5-7B
    "tiny": qwen2(8192, 128, 256, 2, 16, 8, tie_word_embeddings=True),
}


OPTIONS = {
    "--rounds": (5, "timed rounds"),
    "--shape": (["0.5b"], "of random weights: 533 M, 596 M, 7.6 B, few", tuple(SHAPES)),
    "--device": ("cpu", "cuda: one trainer rank and one reader on one GPU", ("cpu", "cuda")),
    "--layout": (str, 'the trainer\'s, as "data 2 tensor 1 zero 3"; default: four cases'),
    "--engines": (1, "with --layout"),
    "--engine-tensor": (1, "tensor ranks of an engine, with --layout"),
    "--bucket-mib": ([0], "weight_sync.bucket_mib; default: 8, with --device cuda 64"),
    "--with-engine": (False, "vLLM engines as well, for the time of their repacking"),
}


def turns_of(args: Args, trainers: int, *, with_engine: bool) -> list[dict[str, Any]]:
    """What is done in each round of a case, in this order."""
    on_gpu = args.device == "cuda"
    ways = [
        {"transport": transport, "bucket_mib": mib or (64 if on_gpu else 8)}
        for transport in ("shared_memory", *["cuda_ipc"] * on_gpu)
        for mib in args.bucket_mib
    ]
    made: list[Any] = [{"way": "memcpy", "processes": count} for count in sorted({1, trainers})]
    if with_engine:
        return [*made, {"way": "engine"} | ways[-1]]
    made += [{"way": way} | one for way in ("publish", "publish + copy") for one in ways]
    if on_gpu:  # where nothing but small objects goes through gloo
        return made
    return made + [{"way": "per parameter", "through": name} for name in THROUGH]


def measure(args: Args) -> dict[str, Any]:
    """Every case, a launch each."""
    if args.device == "cuda":
        args.layout = args.layout or CASES[0][0]
        size = parse_degrees(args.layout).layout.size
        if max(size, args.engines, args.engine_tensor) > 1:
            raise ValueError("--device cuda has one trainer rank and one reader or engine")
        if not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, and torch sees none")
    if not args.layout and (args.engines, args.engine_tensor) != (1, 1):
        raise ValueError("--engines and --engine-tensor need --layout")
    on_cpu = args.device == "cpu"
    made, no_gpu = [], {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    kinds = (False, True) if args.with_engine and on_cpu else (args.with_engine,)
    asked = [(args.layout, args.engines, args.engine_tensor)] if args.layout else CASES
    for shape, one, with_engine in itertools.product(args.shape, asked, kinds):
        text, engines, tensor = one
        model = write_config(args.work, SHAPES[shape])
        layout, stage = parse_degrees(text)
        degrees = {"zero": stage, **{name: getattr(layout, name) for name in layout.AXES}}
        case = {"engines": engines, "engine_tensor": tensor, "with_engine": with_engine}
        turns = turns_of(args, layout.size, with_engine=with_engine)
        num_ranks = layout.size + engines * (1 if with_engine else tensor)
        own = vars(args) | {"model": model, "turns": turns} | degrees | case
        # Here, so that each rank finds it in the cache.
        recorded_table(model, SHAPES[shape], tensor, on_cpu=on_cpu)
        ranks = launch(__file__, own, num_ranks, **no_gpu)
        sizes = {name: ranks[0][name] for name in ("parameters", "engine_bytes")}
        rows = rows_of(turns, ranks)
        made.append(
            {"layout": text, "shape": shape, **case, **sizes, "ranks": num_ranks, "rows": rows}
        )
        progress(made[-1])  # a run that is cut off leaves it in its log
    return {"cases": made}


def rows_of(turns: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each turn. Raises `RuntimeError` where a reader did not hold the same each way."""
    made = []
    for place, turn in enumerate(turns):
        trainers = [rank["turns"][place] for rank in ranks if rank["is_trainer"]]
        readers = [rank["turns"][place] for rank in ranks if not rank["is_trainer"]]
        rounds = zip(*(trainer["spans"] for trainer in trainers), strict=True)
        seconds = [max(end for _, end in each) - min(at for at, _ in each) for each in rounds]
        row: dict[str, Any] = turn | {"seconds": spread(seconds)}
        row["gb_per_s"] = ranks[0]["engine_bytes"] / 1e9 / row["seconds"]["mean"]
        row["received_bytes"] = [reader["first"].get("received") for reader in readers]
        for who, them in (("trainer", trainers), ("reader", readers)):
            for how in ("allocated", "resident"):
                row[f"{who}_{how}_bytes"] = [one[how] for one in them]
        if "bucket_mib" in turn:
            first, told = trainers[0]["first"], trainers[0]["told"]
            row |= {"planned_bytes": first["planned"], "buckets": first["buckets"]}
            row["written_bytes"] = sum(trainer["first"]["written"] for trainer in trainers)
            for part in ("wait", "digest", "install"):
                row[f"{part}_s"] = statistics.fmean(one[f"publish/{part}_s"] for one in told)
        made.append(row)
    for number, reader in enumerate(one for one in ranks if not one["is_trainer"]):
        contents = [turn["first"].get("content") for turn in reader["turns"]]
        if len({str(content) for content in contents if content is not None}) > 1:
            raise RuntimeError(f"reader {number} has other weights after one way than another")
    copies = [row["gb_per_s"] for row in made if row["way"] == "memcpy"]
    ours = [row["seconds"]["mean"] for row in made if row["way"] == "publish + copy"]
    for row in made:
        row["of_memcpy"], row["of_memcpy_ranks"] = (row["gb_per_s"] / copies[n] for n in (0, -1))
        if row["way"] == "per parameter":
            row["times_ours"] = row["seconds"]["mean"] / (ours or [math.nan])[0]
    return made


def show(result: dict[str, Any]) -> Lines:
    """The result as lines of tables."""
    columns = (
        "way=what; seconds .4f; GB/s=gb_per_s .2f; of memcpy=of_memcpy .0%;"
        " by all ranks=of_memcpy_ranks .0%; received MB=received*1e-6 ,.1f;"
        " beyond, MB: trainer=trainer; reader; wait s=wait_s .4f; digest s=digest_s .4f;"
        " install s=install_s .4f; x publish + copy=times_ours .2f"
    )
    for case in result["cases"]:
        yield (
            f"{case['layout']} -> {case['engines']} {'vLLM ' * case['with_engine']}engine(s) of"
            f" tensor {case['engine_tensor']}: {case['parameters'] / 1e6:,.1f} M parameters,"
            f" {case['engine_bytes'] / 1e6:,.1f} MB; {case['ranks']} processes"
        )
        for row in case["rows"]:
            names = ("way", "transport", "bucket_mib", "buckets", "processes", "through")
            row["what"] = ", ".join(str(row[name]) for name in names if name in row)
            row["received"] = max((count for count in row["received_bytes"] if count), default=0)
            for who in ("trainer", "reader"):
                both = (row[f"{who}_{how}_bytes"] for how in ("allocated", "resident"))
                most = (None if None in each else max(each) / 1e6 for each in both)
                row[who] = " / ".join(cell(one, ",.1f") or "?" for one in most)
        yield from table(case["rows"], columns, middle="mean")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)
