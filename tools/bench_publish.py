"""Publishing weights, beside a copy of memory and beside sending one whole parameter at a time: seconds, bytes, memory.

    python tools/bench_publish.py [--json] [--rounds 5] [--config FILE] [--bucket-mib 4 16 64 256] [--digest on off]
    python tools/bench_publish.py --layout "data 2 tensor 1 zero 3" --engines 1 --engine-tensor 1 [--with-engine]

Without --layout, four cases. Each is one launch: trainer ranks under gloo and a process for each engine rank, all with one
thread, which publish through `Publisher`, shared memory, digests and their comparison as a run does. Not as in a run: weights are
flat buffers of random bits, not a DeepSpeed engine's, and engine ranks are readers, not vLLM. All ways take turns, `--rounds`
times. Two rounds before are not timed: in the first, from nothing and back, memory is measured, and readers must hold the same
whichever way it came; the second makes and touches what is kept from then on.

memcpy           torch's copy_ of as many bytes as one engine's weights, by one trainer rank, and by all, each its share
publish          until every engine rank has its shard in its image and digested, and digests were compared
publish + copy   the same, and readers copy each bucket to buffers of their own, as engines do that need not repack
per parameter    trainer ranks gather each parameter whole (gloo); rank 0 sends it to every reader, who copies its share to its
                 own buffers and acknowledges it; then the next. No digests; buffers are made once. Through `gloo` it is a
                 broadcast, as in systems with NCCL; with `shared memory` rank 0 gathers straight into memory that readers see
engine           with --with-engine, in a launch of its own: `publish` to real vLLM engines; `install` is their repacking

GB/s is bytes of one engine's weights over the mean time, from when the first trainer rank begins to when the last is done.
`taken in` is what an engine rank receives, the most of any. `beyond` is the most memory beyond weights and readers' own buffers:
of tensors (exact), and resident, with pages of shared memory, which count in every process that sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peak_memory
import torch
import torch.distributed as dist
from launch_ranks import QUIET, Others, answer, end_on_sigterm, launch, machine, rank_task, spread

from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, finalise, initialise, rank
from megarl.parallel.reshard.pieces import ZEROS, empty_buffers, matrix
from megarl.parallel.reshard.table import engine_held, training_held, training_shards
from megarl.publish import receive, wire
from megarl.publish.board import Board, wait_until
from megarl.publish.carriers import RECEIVERS
from megarl.publish.config import PublishConfig
from megarl.publish.families import parameter_table, refuse_engine_tensor
from megarl.publish.route import Route, RouteSpec
from megarl.rollout.config import EngineConfig
from megarl.rollout.engine import Engine
from megarl.third_party import engine_environment

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
DTYPE, ITEMSIZE = torch.bfloat16, 2
LONGEST_PAUSE_S = 5e-5
"""Between two looks of the naive way, which waits for every parameter."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DIGESTS = {
    "on": (wire.carry, receive.digest),
    "off": (lambda source, target, box: 0 * len(target.copy_(source)), lambda held, box: 0),
}
"""What trainer ranks and engine ranks do with each region."""


# ---------------------------------------------------------------------------------------------------- all processes of a case


class Case:
    """Who is who: trainer ranks first, then readers, one for each engine rank, or for each engine where they are real."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.rank, self.layout = task, rank(), Layout(task["data"], task["sequence"], task["tensor"])
        config = json.loads((Path(task["model"]) / "config.json").read_text())
        refuse_engine_tensor(config, task["engine_tensor"])
        self.table, size = parameter_table(config), self.layout.size
        self.shapes, self.shards = {row.name: row.shape for row in self.table}, training_shards(self.table, task["tensor"])
        self.held = training_held(self.shapes, self.shards, self.layout, task["zero"])
        self.engine = engine_held(self.table, task["engine_tensor"])
        self.engine_bytes = sum(sum(held.sizes.values()) for held in self.engine) * ITEMSIZE
        # Collectives pad shares to equal ones.
        self.largest = max(math.prod(shape) + size * max(shape) for shape in self.shapes.values())
        everybody = tuple(range(dist.get_world_size()))
        self.everybody, self.trainers = self._axis([everybody]), self._axis([everybody[:size]])
        self.replicas = self._axis(self.layout.groups("data", "sequence"))
        self.tensor, self.wire = self._axis(self.layout.groups("tensor")), self._axis([(0, *everybody[size:])])
        self.is_sliced = task["zero"] == 3 and size > task["tensor"]

    def _axis(self, groups: list[tuple[int, ...]]) -> Any:
        """This process's axis among `groups`, which all make together; None where it is in none."""
        made: dict[Any, Any] = {ranks: dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in groups}
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        return Axis("", len(mine), mine.index(self.rank), mine, made[mine]) if mine else None

    def rounds(self, do: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """What this process did in each turn, by rounds: one for memory and contents, one to make what is kept, those timed."""
        found: list[dict[str, Any]] = [{"spans": [], "told": []} for _ in self.task["turns"]]
        for number in range(-2, self.task["rounds"]):
            for turn, kept in zip(self.task["turns"], found, strict=True):
                wire.carry, receive.digest = DIGESTS[turn["digest"]]
                peak_memory.return_freed_memory(number == -2)
                barrier(self.everybody)
                if number == -2:
                    peak, kept["first"] = peak_memory.peak_of(partial(do, turn, is_first=True))
                    kept |= {"allocated": peak.allocated, "resident": peak.resident}
                    continue
                begun = time.monotonic()
                told = do(turn, is_first=False)
                if number >= 0:
                    kept["spans"].append((begun, time.monotonic()))
                    kept["told"].append(told)
        return found


class Gloo:
    """A broadcast of each parameter from rank 0, and a word from each reader when it is used."""

    def __init__(self, case: Case) -> None:
        self.axis, self.whole, self.word = case.wire, torch.zeros(case.largest, dtype=DTYPE), torch.zeros(1)

    def send(self, whole: torch.Tensor) -> None:
        dist.broadcast(whole, 0, group=self.axis.group)
        for reader in self.axis.ranks[1:]:
            dist.recv(self.word, reader, group=self.axis.group)

    def receive(self, numel: int) -> torch.Tensor:
        dist.broadcast(self.whole[:numel], 0, group=self.axis.group)
        return self.whole[:numel]

    def used(self) -> None:
        dist.send(self.word, 0, group=self.axis.group)


class Shared:
    """Memory for one whole parameter, which every reader sees."""

    def __init__(self, case: Case) -> None:
        readers, self.number, self.count = case.wire.size - 1, case.wire.rank - 1, 0
        mine = Board(1, readers, case.largest * ITEMSIZE) if case.rank == 0 else None
        path = broadcast_object(mine.path if mine else "", case.wire)
        self.board = mine or Board(1, readers, case.largest * ITEMSIZE, path)
        self.whole = self.board.memory().view(DTYPE)

    def send(self, whole: torch.Tensor) -> None:
        if whole.data_ptr() != self.whole.data_ptr():
            self.whole[: whole.numel()].copy_(whole)
        self.count += 1
        self.board.write(0, self.count)
        self._until(lambda: self.board.all_read() >= self.count)

    def receive(self, numel: int) -> torch.Tensor:
        self.count += 1
        self._until(lambda: self.board.written() >= self.count)
        return self.whole[:numel]

    def used(self) -> None:
        self.board.read(self.number, self.count)

    def _until(self, ready: Callable[[], bool]) -> None:
        wait_until(ready, lambda: False, lambda: None, longest_pause_s=LONGEST_PAUSE_S)
        self.board.until(ready, lambda: None)


def gather(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> None:
    """Every rank's part, straight into its place: gloo's own all-gather makes room for all of it again, each time."""
    places = whole.view(axis.size, -1)
    others = [(place, other) for place, other in enumerate(axis.ranks) if place != axis.rank]
    work = [dist.irecv(places[place], other, group=axis.group) for place, other in others]
    work += [dist.isend(part, other, group=axis.group) for _, other in others]
    places[axis.rank].copy_(part)
    for one in work:
        assert one is not None
        one.wait()


THROUGH = {"gloo": Gloo, "shared memory": Shared}

# --------------------------------------------------------------------------------------------------------- a trainer rank


class Readers:
    """Rank 0's engines, as `Publisher` knows them, and their answer: processes of this tool, asked over gloo."""

    def __init__(self, case: Case) -> None:
        self.axis, self.engines, self.tensor = case.wire, case.task["engines"], case.task["engine_tensor"]

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        broadcast_object([info(number) for number in range(self.engines)], self.axis)

    def update(self, version: int, *, timeout_s: float) -> Any:
        broadcast_object(version, self.axis)
        return self

    def result(self, *, timeout_s: float) -> list[list[dict[str, Any]]]:
        ranks = [held for told in gather_objects([], self.axis) for held in told]
        return [ranks[first : first + self.tensor] for first in range(0, len(ranks), self.tensor)]

    def _nothing(self, **_: Any) -> None:
        pass

    poll = settle = admit = _nothing


class Trainer:
    """Its weights, and every way to send them."""

    def __init__(self, case: Case) -> None:
        self.case, self.version, self.publishers, self.naive = case, 0, {}, {}
        held = case.held[case.rank]
        # Room for the longest share of any rank: collectives want equal ones.
        self.weights = {name: torch.zeros(max(each.sizes[name] for each in case.held), dtype=DTYPE) for name in held.sizes}
        for seed, (name, shape) in enumerate(case.shapes.items()):
            draw, size = torch.Generator().manual_seed(seed), matrix(shape)
            bits = torch.randint(-(2**15), 2**15, (size.rows, size.columns), generator=draw, dtype=torch.int16)
            for piece in (piece for piece in held.pieces if piece.tensor == name):
                top, bottom, left, right = piece.box
                piece.view(self.weights[name]).copy_(bits[top:bottom, left:right].view(DTYPE))
        share = case.engine_bytes if case.rank == 0 else case.engine_bytes // case.layout.size
        self.pair = [torch.zeros(share, dtype=torch.uint8) + value for value in (1, 2)]

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            share = self.case.engine_bytes // turn["processes"] if self.case.rank < turn["processes"] else 0
            self.pair[1][:share].copy_(self.pair[0][:share])
            return {}
        if turn["way"] != "per parameter":
            return self._publish(turn, is_first)
        self._per_parameter(turn["through"])
        if is_first:
            self.naive.clear()
        return {}

    def _publish(self, turn: dict[str, Any], is_first: bool) -> dict[str, Any]:
        mib, self.version, written, carry = turn["bucket_mib"], self.version + 1, 0, wire.carry

        def counted(source: torch.Tensor, target: torch.Tensor, box: Any) -> int:
            nonlocal written
            written += target.nbytes
            return carry(source, target, box)

        if mib not in self.publishers:
            self.publishers[mib] = self._publisher(mib)
        if is_first:
            wire.carry = counted
        found = self.publishers[mib].publish(self.version)
        route = self.publishers[mib].route
        if is_first:
            self.publishers.pop(mib).close()
        return found | {"written": written, "planned": route.written, "buckets": len(route.buckets)}

    def _publisher(self, bucket_mib: int) -> wire.Publisher:
        case, task = self.case, self.case.task
        policy = {"zero_stage": task["zero"], "shapes": case.shapes, "shards": case.shards, "held": lambda: self.weights}
        settings: Any = {
            "table": case.table,
            "policy": SimpleNamespace(**policy),
            "engines": Readers(case) if case.rank == 0 else None,
            "num_engines": task["engines"],
            "engine_tensor": task["engine_tensor"],
            "mesh": SimpleNamespace(layout=case.layout, world=case.trainers),
            "dtype": "bfloat16",
            "precision": "bfloat16",
            "vocabulary": 2,
            "max_tokens": 2,
            "seed": 0,
        }
        publish = PublishConfig(bucket_mib=bucket_mib, probe_every=0, replacements=0, timeout_s=task["deadline"])
        return wire.Publisher(publish, **settings)

    def _per_parameter(self, through: str) -> None:
        case = self.case
        if through not in self.naive:
            post = THROUGH[through](case) if case.rank == 0 else None
            needed = (post is None, case.is_sliced and case.shards, case.shards)
            made = [torch.zeros(case.largest if need else 0, dtype=DTYPE) for need in needed]
            self.naive[through] = post, post.whole if post else made[0], made[1], made[2]
        post, *room = self.naive[through]
        for name, shape in case.shapes.items():
            whole = self._gather(name, shape, *room)
            if post is not None:
                post.send(whole)

    def _gather(self, name: str, shape: tuple[int, ...], last: Any, slices: Any, parts: Any) -> torch.Tensor:
        """A parameter from all ranks' shares, flat; in `last`, if anything was to be gathered."""
        case, held, shard = self.case, self.weights[name], self.case.shards.get(name)
        if case.is_sliced:
            length = max(case.held[rank].sizes[name] for rank in case.replicas.ranks)
            found = last if shard is None else slices
            gather(found[: length * case.replicas.size], held[:length], case.replicas)
            held = found
        if shard is None:
            return held[: math.prod(shape)]
        length = max(shard.lengths) * math.prod(shape) // shard.whole
        even_rows = shard.dim == 0 and len(set(shard.lengths)) == 1
        found = (last if even_rows else parts)[: length * case.tensor.size]
        gather(found, held[:length], case.tensor)
        whole = last[: math.prod(shape)]
        for number, count in enumerate(shard.lengths if not even_rows else ()):
            target = whole.view(shape).narrow(shard.dim, shard.edges[number], count)
            target.copy_(found[number * length :][: target.numel()].view(target.shape))
        return whole


# -------------------------------------------------------------------------------------------------------- an engine rank


class Reader:
    """A process in the place of an engine rank, with buffers in the place of its weights."""

    def __init__(self, case: Case) -> None:
        self.case, self.ends, self.naive = case, {}, {}
        self.engine, self.part = divmod(case.wire.rank - 1, case.task["engine_tensor"])
        self.held = case.engine[self.part]
        self.buffers = empty_buffers(self.held, DTYPE)
        self.padding = sum(piece.box.area for piece in self.held.pieces if piece.tensor == ZEROS) * ITEMSIZE

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            return {}
        for buffer in self.buffers.values() if is_first else ():
            buffer.zero_()
        if turn["way"] == "per parameter":
            told: dict[str, Any] = {"received": self._per_parameter(turn["through"])}
        else:
            told = self._publish(turn)
        if is_first:
            self.ends.clear()
            self.naive.clear()
        if is_first and turn["way"] != "publish":
            told["content"] = [DIGESTS["on"][1](buffer[:, None], matrix(buffer.shape)) for buffer in self.buffers.values()]
        return told

    def _publish(self, turn: dict[str, Any]) -> dict[str, Any]:
        mib, received = turn["bucket_mib"], -self.padding
        if mib not in self.ends:
            info = broadcast_object([], self.case.wire)[self.engine]
            spec = RouteSpec(**info["spec"])
            route, image = Route.of(spec, self.case.table), spec.image(self.engine, self.part)
            receiver = RECEIVERS[info["carrier"]](route, self.engine, self.part, info["invitation"])
            self.ends[mib] = receiver, receive.Intake(route, receiver, image)
        receiver, intake = self.ends[mib]
        digests, seconds = [0] * len(intake.route.tensors), {"wait": 0.0, "digest": 0.0, "install": 0.0}
        version, watch = broadcast_object(0, self.case.wire), receive.deadline_watch(self.case.task["deadline"])
        receiver.begin(version)
        for bucket in intake.route.buckets:
            buffers, begun = intake.take(bucket, watch, digests, seconds), time.perf_counter()
            received += sum(buffer.nbytes for buffer in buffers.values())
            for name, buffer in buffers.items() if turn["way"] == "publish + copy" else ():
                start = bucket.starts[name]
                self.buffers[name][start : start + len(buffer)] = buffer
            seconds["install"] += time.perf_counter() - begun
            receiver.release(bucket)
        held = {"version": version, "digests": [receive.wrapped(value) for value in digests], "seconds": seconds}
        gather_objects([held], self.case.wire)
        return {"received": received}

    def _per_parameter(self, through: str) -> int:
        if through not in self.naive:
            self.naive[through] = THROUGH[through](self.case)
        post, received, pieces = self.naive[through], 0, iter(self.held.pieces)
        wanted: dict[str, list[Any]] = {}
        for piece in pieces:
            wanted.setdefault(piece.tensor, []).append(piece)
        for name, shape in self.case.shapes.items():
            whole, size = post.receive(math.prod(shape)), matrix(shape)
            received += whole.nbytes
            for piece in wanted.get(name, ()):
                top, bottom, left, right = piece.box
                part = whole.view(size.rows, size.columns)[top:bottom, left:right]
                piece.view(self.buffers[piece.buffer]).copy_(part)
            post.used()
        return received


class RealEngine:
    """A process with a vLLM engine, of random weights at first."""

    def __init__(self, case: Case) -> None:
        for name in LAUNCHER:  # vLLM launches its own
            os.environ.pop(name)
        task = case.task
        self.case, self.is_connected, self.number = case, False, case.wire.rank - 1
        self.engine = Engine(
            number=self.number,
            model=task["model"],
            config=EngineConfig(tensor=task["engine_tensor"], dtype="bfloat16"),
            max_tokens=64,
            stop_token_ids=[],
            trust_remote_code=False,
            seed=0,
            environment=engine_environment(on_cpu=True, num_threads=1, kv_cache_gib=1),
        )
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            return {}
        if not self.is_connected:
            info = broadcast_object([], self.case.wire)[self.number]
            self.loop.run_until_complete(self.engine.connect(info))
        self.is_connected = not is_first  # the trainer begins anew after the first round
        version = broadcast_object(0, self.case.wire)
        held = self.loop.run_until_complete(self.engine.update(version, self.case.task["deadline"]))
        gather_objects(held, self.case.wire)
        return {}

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One process of a case."""
    torch.set_num_threads(1)
    initialise(timeout_s=task["deadline"])
    peak_memory.return_freed_memory(True)
    peak_memory.check()
    case = Case(task)
    role = Trainer(case) if case.trainers else RealEngine(case) if task["with_engine"] else Reader(case)
    found = {"turns": case.rounds(role.do), "engine_bytes": case.engine_bytes, "is_trainer": bool(case.trainers)}
    found |= {"parameters": sum(map(math.prod, case.shapes.values())), "rank_bytes": [sum(h.sizes.values()) for h in case.engine]}
    if isinstance(role, RealEngine):
        role.close()
    finalise()
    return found


# ---------------------------------------------------------------------------------------------------------- comparison


def turns_of(args: argparse.Namespace, trainers: int, *, with_engine: bool) -> list[dict[str, Any]]:
    """What is done in each round of a case, in this order."""
    made: list[dict[str, Any]] = [{"way": "memcpy", "processes": count, "digest": "on"} for count in sorted({1, trainers})]
    if with_engine:
        return [*made, {"way": "engine", "bucket_mib": args.bucket_mib[0], "digest": "on"}]
    for way in ("publish", "publish + copy"):
        made += [{"way": way, "bucket_mib": mib, "digest": digest} for digest in args.digest for mib in args.bucket_mib]
    return made + [{"way": "per parameter", "through": name, "digest": "on"} for name in THROUGH]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every case, a launch each."""
    cases, made = [(args.layout, args.engines, args.engine_tensor)] if args.layout else CASES, []
    with tempfile.TemporaryDirectory(prefix="publish-") as folder, Others() as others:
        config = json.loads(Path(args.config).read_text()) if args.config else MODEL
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for layout, engines, tensor in cases:
            degrees = parse_layout(layout)
            trainers = degrees["data"] * degrees["sequence"] * degrees["tensor"]
            for with_engine in (False, True) if args.with_engine else (False,):
                task = degrees | {"engines": engines, "engine_tensor": tensor, "with_engine": with_engine, "model": folder}
                task |= {"rounds": args.rounds, "deadline": args.deadline}
                task["turns"] = turns_of(args, trainers, with_engine=with_engine)
                num_ranks = trainers + engines * (1 if with_engine else tensor)
                ranks = launch(__file__, task, num_ranks=num_ranks, deadline_s=args.deadline)
                made.append({"layout": layout, "engines": engines, "engine_tensor": tensor, "with_engine": with_engine})
                made[-1] |= {name: ranks[0][name] for name in ("parameters", "engine_bytes", "rank_bytes")}
                made[-1] |= {"ranks": num_ranks, "rows": rows_of(task["turns"], ranks)}
    return {"cases": made, "others": others.share}


def rows_of(turns: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each turn. Raises `RuntimeError` where a reader did not hold the same each way."""
    made = []
    for place, turn in enumerate(turns):
        trainers = [rank["turns"][place] for rank in ranks if rank["is_trainer"]]
        readers = [rank["turns"][place] for rank in ranks if not rank["is_trainer"]]
        rounds = zip(*(trainer["spans"] for trainer in trainers), strict=True)
        seconds = [max(end for _, end in spans) - min(begun for begun, _ in spans) for spans in rounds]
        row: dict[str, Any] = turn | {"seconds": with_mean(seconds)}
        row["gb_per_s"] = ranks[0]["engine_bytes"] / 1e9 / row["seconds"]["mean"]
        row["received_bytes"] = [reader["first"].get("received") for reader in readers]
        for way in ("allocated", "resident"):
            row[f"trainer_{way}_bytes"], row[f"reader_{way}_bytes"] = ([one[way] for one in them] for them in (trainers, readers))
        if "bucket_mib" in turn:
            row["written_bytes"] = sum(trainer["first"]["written"] for trainer in trainers)
            row |= {"planned_bytes": trainers[0]["first"]["planned"], "buckets": trainers[0]["first"]["buckets"]}
            for part in ("wait", "digest", "install"):
                row[f"{part}_s"] = statistics.fmean(told[f"publish/{part}_s"] for told in trainers[0]["told"])
        made.append(row)
    for number, reader in enumerate(one for one in ranks if not one["is_trainer"]):
        contents = [turn["first"]["content"] for turn in reader["turns"] if "content" in turn["first"]]
        if any(content != contents[0] for content in contents):
            raise RuntimeError(f"reader {number} holds other weights after one way than after another")
    alone, together = ([row for row in made if row["way"] == "memcpy"][place]["gb_per_s"] for place in (0, -1))
    ours = next((row["seconds"]["mean"] for row in made if row["way"] == "publish + copy"), math.nan)
    for row in made:
        row |= {"of_memcpy": row["gb_per_s"] / alone, "of_memcpy_ranks": row["gb_per_s"] / together}
        if row["way"] == "per parameter":
            row["times_ours"] = row["seconds"]["mean"] / ours
    return made


def with_mean(values: list[float]) -> dict[str, Any]:
    return spread(values) | {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    here, task = result["machine"], result["task"]
    yield f"{here['cpu']}, {here['cores']} cores; torch {here['torch']}; {task['rounds']} rounds; bfloat16"
    for case in result["cases"]:
        yield ""
        yield (
            f"{case['layout']} -> {case['engines']} {'vLLM ' * case['with_engine']}engine(s) of tensor {case['engine_tensor']}: "
            f"{case['parameters'] / 1e6:,.1f} M parameters, {case['engine_bytes'] / 1e6:,.1f} MB; {case['ranks']} processes"
        )
        yield (
            f"{'':44} {'seconds':>31} {'GB/s':>6} {'of memcpy':>10} {'taken in':>9}  {'beyond, MB: trainer':>20} {'reader':>15}  "
            "wait / digest / install s"
        )
        for row in case["rows"]:
            how = [f"{row['bucket_mib']} MiB x {row['buckets']}, digest {row['digest']}"] if "bucket_mib" in row else []
            how += [str(row[name]) for name in ("processes", "through") if name in row]
            seconds = "{mean:.4f} +- {deviation:.4f} ({min:.4f} to {max:.4f})".format(**row["seconds"])
            taken = max((count for count in row["received_bytes"] if count), default=0) / 1e6
            memory = []
            for who in ("trainer", "reader"):
                found = [row[f"{who}_{way}_bytes"] for way in ("allocated", "resident")]
                memory.append(" / ".join("?" if None in each else f"{max(each) / 1e6:,.1f}" for each in found))
            parts = " / ".join(f"{row[f'{part}_s']:.4f}" for part in ("wait", "digest", "install")) if "wait_s" in row else ""
            faster = f"{row['times_ours']:.2f} x the time of the first publish + copy" if "times_ours" in row else ""
            speed = f"{row['gb_per_s']:6.2f} {row['of_memcpy']:4.0%} {row['of_memcpy_ranks']:5.0%}"
            what = f"{row['way']}, {', '.join(how)}"
            yield f"{what:44} {seconds:>31} {speed} {taken:9,.1f}  {memory[0]:>20} {memory[1]:>15}  {parts}{faster}"
        if case["ranks"] > here["cores"]:
            yield f"{case['ranks']} processes on {here['cores']} cores: they wait for each other's time"
    if result["others"] > QUIET:
        yield f"NOT QUIET: other processes took {result['others']:.0%} of the CPU; repeat on an idle machine for the times"


def parse_layout(text: str) -> dict[str, int]:
    """data 2 tensor 1 zero 3 -> degrees by name; what is not named is 1, zero 0."""
    found = {name: int(value) for name, value in re.findall(r"([a-z]+) (\d+)", text)}
    if re.sub(r"(data|sequence|tensor|zero) \d+", "", text).strip(" x,") or min(found.values(), default=-1) < 0:
        raise ValueError(text)
    return {"data": 1, "sequence": 1, "tensor": 1, "zero": 0} | found


def layout(text: str) -> str:
    """A training layout as the command line has it."""
    parse_layout(text)
    return text


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--config", default="", help="a config.json; default: a Qwen2 of 533 M parameters")
    parser.add_argument("--layout", type=layout, help='the trainer\'s, as "data 2 tensor 1 zero 3"; default: four cases')
    parser.add_argument("--engines", type=int, default=1, help="with --layout")
    parser.add_argument("--engine-tensor", type=int, default=1, help="tensor ranks of an engine, with --layout")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[64], help="publish.bucket_mib; several are compared")
    parser.add_argument("--digest", choices=tuple(DIGESTS), nargs="+", default=["on"], help="both show what digests cost")
    parser.add_argument("--with-engine", action="store_true", help="vLLM engines as well, for the time of their repacking")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds that one case may take")
    args = parser.parse_args(argv)
    if min(args.rounds, args.engines, args.engine_tensor, *args.bucket_mib) < 1:
        parser.error("--rounds, --engines, --engine-tensor and --bucket-mib must be 1 or more")
    if not args.layout and (args.engines, args.engine_tensor) != (1, 1):
        parser.error("--engines and --engine-tensor need --layout")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    task = rank_task()
    if task is not None:
        answer(work(task))
        return 0
    args = arguments(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    try:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        result = {"machine": machine(), "task": settings, **compare(args)}
    except (RuntimeError, ValueError) as error:
        print(f"bench_publish: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if args.json else "\n".join(show(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
