"""Publishing weights, beside a copy of memory and beside sending one whole parameter at a time:
seconds, bytes, memory.

    python tools/bench/publish.py [--json] [--rounds 5] [--config FILE] [--bucket-mib 4 16 64 256]
    python tools/bench/publish.py --layout "data 2 tensor 1 zero 3" --engines 1 [--with-engine]
    python tools/bench/publish.py --device cuda --shape 7b            # colocated, on one GPU

With --device cuda a trainer rank and a reader share one GPU, as a colocated engine does, and
weights take `cuda_ipc` and `shared_memory`; no run on a GPU yet.

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

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Others, command_line, run_tool, spread, warn_if_not_quiet
from launch_ranks import launch
from naive_publish import THROUGH
from publish_case import DIGESTS
from publish_reader import work

CASES = [
    ("data 1 tensor 1 zero 0", 1, 1),
    ("data 2 tensor 1 zero 3", 1, 1),
    ("data 1 tensor 2 zero 0", 1, 2),
    ("data 1 tensor 1 zero 0", 2, 1),
]
"""(training layout, engines, tensor ranks of each) that are measured by default."""
MODEL = {  # 533 million parameters
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
SEVEN = {  # that of Qwen2.5-7B, 7.6 billion
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TINY = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPES = {"0.5b": MODEL, "7b": MODEL | SEVEN, "tiny": MODEL | TINY}
ALONE = "data 1 tensor 1 zero 0"
"""The layout of one trainer rank, which --device cuda has."""


# --------------------------------------------------------------------------------------- comparison


def turns_of(args: argparse.Namespace, trainers: int, *, with_engine: bool) -> list[dict[str, Any]]:
    """What is done in each round of a case, in this order."""
    made: list[dict[str, Any]] = [
        {"way": "memcpy", "processes": count, "digest": "on"} for count in sorted({1, trainers})
    ]
    if with_engine:
        last = {"way": "engine", "transport": args.transport[0], "bucket_mib": args.bucket_mib[0]}
        return [*made, last | {"digest": "on"}]
    for way in ("publish", "publish + copy"):
        made += [
            {"way": way, "transport": transport, "bucket_mib": mib, "digest": digest}
            for transport in args.transport
            for digest in args.digest
            for mib in args.bucket_mib
        ]
    if args.device == "cuda":  # where nothing but small objects goes through gloo
        return made
    return made + [{"way": "per parameter", "through": name, "digest": "on"} for name in THROUGH]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every case, a launch each."""
    cases, made = [(args.layout, args.engines, args.engine_tensor)] if args.layout else CASES, []
    with tempfile.TemporaryDirectory(prefix="publish-") as folder, Others() as others:
        config = json.loads(Path(args.config).read_text()) if args.config else SHAPES[args.shape]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for layout, engines, tensor in cases:
            degrees = parse_layout(layout)
            trainers = degrees["data"] * degrees["sequence"] * degrees["tensor"]
            for with_engine in (False, True) if args.with_engine else (False,):
                task = degrees | {
                    "engines": engines,
                    "engine_tensor": tensor,
                    "with_engine": with_engine,
                    "model": folder,
                    "device": args.device,
                }
                task |= {"rounds": args.rounds, "deadline": args.deadline}
                task["turns"] = turns_of(args, trainers, with_engine=with_engine)
                num_ranks = trainers + engines * (1 if with_engine else tensor)
                ranks = launch(
                    __file__,
                    task,
                    num_ranks=num_ranks,
                    deadline_s=args.deadline,
                    environment={"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {},
                )
                made.append(
                    {
                        "layout": layout,
                        "engines": engines,
                        "engine_tensor": tensor,
                        "with_engine": with_engine,
                    }
                )
                made[-1] |= {
                    name: ranks[0][name] for name in ("parameters", "engine_bytes", "rank_bytes")
                }
                made[-1] |= {"ranks": num_ranks, "rows": rows_of(task["turns"], ranks)}
    return {"cases": made, "others": others.share}


def rows_of(turns: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each turn. Raises `RuntimeError` where a reader did not hold the same each way."""
    made = []
    for place, turn in enumerate(turns):
        trainers = [rank["turns"][place] for rank in ranks if rank["is_trainer"]]
        readers = [rank["turns"][place] for rank in ranks if not rank["is_trainer"]]
        rounds = zip(*(trainer["spans"] for trainer in trainers), strict=True)
        seconds = [
            max(end for _, end in spans) - min(started_at for started_at, _ in spans)
            for spans in rounds
        ]
        row: dict[str, Any] = turn | {"seconds": with_mean(seconds)}
        row["gb_per_s"] = ranks[0]["engine_bytes"] / 1e9 / row["seconds"]["mean"]
        row["received_bytes"] = [reader["first"].get("received") for reader in readers]
        for way in ("allocated", "resident"):
            row[f"trainer_{way}_bytes"], row[f"reader_{way}_bytes"] = (
                [one[way] for one in them] for them in (trainers, readers)
            )
        if "bucket_mib" in turn:
            row["written_bytes"] = sum(trainer["first"]["written"] for trainer in trainers)
            row |= {
                "planned_bytes": trainers[0]["first"]["planned"],
                "buckets": trainers[0]["first"]["buckets"],
            }
            for part in ("wait", "digest", "install"):
                row[f"{part}_s"] = statistics.fmean(
                    told[f"publish/{part}_s"] for told in trainers[0]["told"]
                )
        made.append(row)
    for number, reader in enumerate(one for one in ranks if not one["is_trainer"]):
        contents = [
            turn["first"]["content"] for turn in reader["turns"] if "content" in turn["first"]
        ]
        if any(content != contents[0] for content in contents):
            raise RuntimeError(
                f"reader {number} holds other weights after one way than after another"
            )
    alone, together = (
        [row for row in made if row["way"] == "memcpy"][place]["gb_per_s"] for place in (0, -1)
    )
    ours = next(
        (row["seconds"]["mean"] for row in made if row["way"] == "publish + copy"), math.nan
    )
    for row in made:
        row |= {"of_memcpy": row["gb_per_s"] / alone, "of_memcpy_ranks": row["gb_per_s"] / together}
        if row["way"] == "per parameter":
            row["times_ours"] = row["seconds"]["mean"] / ours
    return made


def with_mean(values: list[float]) -> dict[str, Any]:
    return spread(values) | {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def line_of(row: dict[str, Any]) -> str:
    """One way of a case as a line of its table."""
    how = (
        [f"{row['transport']}, {row['bucket_mib']} MiB x {row['buckets']}, digest {row['digest']}"]
        if "bucket_mib" in row
        else []
    )
    how += [str(row[name]) for name in ("processes", "through") if name in row]
    seconds = "{mean:.4f} +- {deviation:.4f} ({min:.4f} to {max:.4f})".format(**row["seconds"])
    taken = max((count for count in row["received_bytes"] if count), default=0) / 1e6
    memory = []
    for who in ("trainer", "reader"):
        found = [row[f"{who}_{way}_bytes"] for way in ("allocated", "resident")]
        memory.append(
            " / ".join("?" if None in each else f"{max(each) / 1e6:,.1f}" for each in found)
        )
    parts = (
        " / ".join(f"{row[f'{part}_s']:.4f}" for part in ("wait", "digest", "install"))
        if "wait_s" in row
        else ""
    )
    faster = (
        f"{row['times_ours']:.2f} x the time of the first publish + copy"
        if "times_ours" in row
        else ""
    )
    speed = f"{row['gb_per_s']:6.2f} {row['of_memcpy']:4.0%} {row['of_memcpy_ranks']:5.0%}"
    what = f"{row['way']}, {', '.join(how)}"
    return (
        f"{what:44} {seconds:>31} {speed} {taken:9,.1f}  {memory[0]:>20} {memory[1]:>15} "
        f" {parts}{faster}"
    )


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    here, task = result["machine"], result["task"]
    yield (
        f"{here['cpu']}, {here['cores']} cores; torch {here['torch']}; {task['rounds']} rounds;"
        " bfloat16"
    )
    for case in result["cases"]:
        yield ""
        yield (
            f"{case['layout']} -> {case['engines']} {'vLLM ' * case['with_engine']}engine(s) of"
            f" tensor {case['engine_tensor']}: {case['parameters'] / 1e6:,.1f} M parameters,"
            f" {case['engine_bytes'] / 1e6:,.1f} MB; {case['ranks']} processes"
        )
        yield (
            f"{'':44} {'seconds':>31} {'GB/s':>6} {'of memcpy':>10} {'received':>9} "
            f" {'beyond, MB: trainer':>20} {'reader':>15}  wait / digest / install s"
        )
        for row in case["rows"]:
            yield line_of(row)
        if case["ranks"] > here["cores"]:
            yield (
                f"{case['ranks']} processes on {here['cores']} cores: they wait for each other's"
                " time"
            )
    yield from warn_if_not_quiet(result["others"])


def parse_layout(text: str) -> dict[str, int]:
    """The degrees of a training layout by name: "data 2 zero 3" is {"data": 2, "sequence": 1,
    "tensor": 1, "zero": 3}. A degree that is not named is 1, and the ZeRO stage 0. Raises
    `ValueError` if `text` has other words.
    """
    found = {name: int(value) for name, value in re.findall(r"([a-z]+) (\d+)", text)}
    if (
        re.sub(r"(data|sequence|tensor|zero) \d+", "", text).strip(" x,")
        or min(found.values(), default=-1) < 0
    ):
        raise ValueError(text)
    return {"data": 1, "sequence": 1, "tensor": 1, "zero": 0} | found


def layout(text: str) -> str:
    """`text`, if it is a training layout such as "data 2 tensor 1 zero 3"; the type of an option of
    the command line. Raises `ValueError` if it is not.
    """
    parse_layout(text)
    return text


OPTIONS: dict[str, dict[str, Any]] = {
    "--rounds": {"type": int, "default": 5, "help": "timed rounds"},
    "--shape": {
        "choices": tuple(SHAPES),
        "default": "0.5b",
        "help": "of a Qwen2 with random weights; default: 533 M parameters",
    },
    "--config": {"default": "", "help": "a config.json, in the place of --shape"},
    "--device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "cuda: one trainer rank and one reader on one GPU",
    },
    "--transport": {
        "choices": ("shared_memory", "cuda_ipc"),
        "nargs": "+",
        "help": "weight_sync.transport; default: shared_memory, with --device cuda both",
    },
    "--layout": {
        "type": layout,
        "help": 'the trainer\'s, as "data 2 tensor 1 zero 3"; default: four cases',
    },
    "--engines": {"type": int, "default": 1, "help": "with --layout"},
    "--engine-tensor": {
        "type": int,
        "default": 1,
        "help": "tensor ranks of an engine, with --layout",
    },
    "--bucket-mib": {
        "type": int,
        "nargs": "+",
        "help": "weight_sync.bucket_mib; several are compared; default: 8, with --device cuda 64",
    },
    "--digest": {
        "choices": tuple(DIGESTS),
        "nargs": "+",
        "default": ["on"],
        "help": "both show what digests cost",
    },
    "--with-engine": {
        "action": "store_true",
        "help": "vLLM engines as well, for the time of their repacking",
    },
    "--deadline": {"type": float, "default": 1800.0, "help": "seconds that one case may take"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    args.transport = args.transport or ["shared_memory", *(["cuda_ipc"] if on_gpu else [])]
    args.bucket_mib = args.bucket_mib or [64 if on_gpu else 8]
    if on_gpu:
        args.layout = args.layout or ALONE
        alone = math.prod(
            parse_layout(args.layout)[name] for name in ("data", "sequence", "tensor")
        )
        if (
            max(alone, args.engines, args.engine_tensor) > 1
            or args.with_engine
            or (args.digest != ["on"])
        ):
            parser.error("--device cuda has one trainer rank and one reader, and digests")
        if not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU, and torch sees none")
    elif "cuda_ipc" in args.transport:
        parser.error("--transport cuda_ipc needs --device cuda")
    if min(args.rounds, args.engines, args.engine_tensor, *args.bucket_mib) < 1:
        parser.error("--rounds, --engines, --engine-tensor and --bucket-mib must be 1 or more")
    if not args.layout and (args.engines, args.engine_tensor) != (1, 1):
        parser.error("--engines and --engine-tensor need --layout")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "publish", arguments=arguments, work=work, measure=compare, show=show, argv=argv
    )


if __name__ == "__main__":
    sys.exit(main())
