"""Engine ranks without an engine: processes that are told through a pipe to connect to a transport
and to take versions in.

Case -> Engines (in the trainer's rank 0) -> processes that run `engine`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import scatter
from megarl.parallel.reshard.plan import make_plan
from megarl.weights.bucket_receiver import BucketReceiver, InitInfo
from megarl.weights.parameters import ParameterSpec, engine_owned, table_to_json
from megarl.weights.route import RouteSpec, own_ranks, table_fingerprint, training_parts
from megarl.weights.transports.transport_table import TRANSPORTS
from support.tables import Cut, Row, engine_table, training_shards

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    """A trainer's layout, and engines."""

    data: int
    tensor: int
    zero_stage: int
    engines: int
    engine_tensor: int

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"data{self.data}-tensor{self.tensor}-zero{self.zero_stage}-to-{self.engines}x{self.engine_tensor}"


def model_table(
    sizes: Sequence[int], experts: int, tied: bool, biases: bool, norms: bool
) -> list[Row]:
    """A decoder's tensors; with `norms` also a scalar and a tensor of three dimensions, which
    nobody cuts.
    """
    layers, hidden, heads, key_heads, width, intermediate, vocabulary = sizes
    words, rows = (vocabulary, hidden), list[Row]()

    def add(
        name: str, shape: tuple[int, ...], cut: Cut = "whole", engine: str = "", heads: int = 0
    ) -> None:
        rows.append(Row(name, shape, cut, engine or name, heads))

    add("embed.weight", words, "vocab")
    for number in range(layers):
        at = f"layers.{number}."
        for kind, more in (("weight", (hidden,)), ("bias", ()))[: 1 + biases]:
            stack, keys = f"{at}qkv.{kind}", (key_heads * width, *more)
            add(f"{at}q.{kind}", (heads * width, *more), "outputs", stack)
            for name in "kv":
                add(f"{at}{name}.{kind}", keys, "kv_heads", stack, key_heads)
        add(f"{at}o.weight", (hidden, heads * width), "inputs")
        add(f"{at}norm.weight", (hidden,))
        if norms:
            for name in "qk":
                add(f"{at}{name}_norm.weight", (width,))
            add(f"{at}scale", ())
            add(f"{at}conv", (3, 2, width))
        if experts:
            add(f"{at}router.weight", (experts, hidden))
        for expert in range(max(1, experts)):
            mlp = f"{at}experts.{expert}" if experts else f"{at}mlp"
            for name in ("gate", "up"):
                add(f"{mlp}.{name}.weight", (intermediate, hidden), "outputs", f"{at}mlp.gate_up")
            add(f"{mlp}.down.weight", (hidden, intermediate), "inputs", f"{at}mlp.down")
    add("norm.weight", (hidden,))
    if not tied:
        add("head.weight", words, "vocab")
    return rows


ROWS = model_table((3, 16, 4, 2, 4, 24, 100), 0, tied=False, biases=True, norms=False)
"""A small decoder; its 100 words are padded to 128."""


def table(tensor: int = 1) -> list[ParameterSpec]:
    """What engines of `tensor` ranks store of it."""
    return engine_table(ROWS, tensor)


def weights(version: int) -> dict[str, Any]:
    """A version's whole tensors, float32."""
    draw = torch.Generator().manual_seed(version)
    return {row.name: torch.randn(row.shape, generator=draw) for row in ROWS}


def spec_of(case: Case, transport: str) -> Any:
    return RouteSpec(
        layout=Layout(case.data, 1, case.tensor),
        zero_stage=case.zero_stage,
        shards=training_shards(ROWS, case.tensor),
        engines=case.engines,
        engine_tensor=case.engine_tensor,
        dtype="bfloat16",
        bucket_bytes=1024,
        table=table_fingerprint(table(case.engine_tensor)),
        local=TRANSPORTS[transport].Sender.LOCAL,
    )


def whole_plan(spec: Any, table: list[Any]) -> Any:
    """The copies of all ranks, in one plan; a route has one rank's part of it."""
    engine = engine_owned(table, spec.engine_tensor)
    destinations = engine * spec.engines if spec.local else engine
    return make_plan(training_parts(spec, table), destinations, own_ranks(spec))


def regions(sources: dict[str, Any], placed: list[Any]) -> list[Any]:
    """What `carried` takes for the (copy, target) that a sender has reserved; the keys are the
    copies.
    """
    return [
        (copy, copy.taken.view(sources[copy.taken.buffer]), target, copy.taken.box)
        for copy, target in placed
    ]


def engine(pipe: Connection) -> None:
    """Connect and take in versions as told, until told to stop."""
    intake: BucketReceiver | None = None
    if torch.cuda.is_available():
        torch.cuda.init()  # as an engine has, so that memory is registered
    pipe.send("here")
    while (told := pipe.recv()) is not None:
        if "transport" in told:
            if intake is not None:
                intake.receiver.close()
            rank = told.pop("rank")
            intake = BucketReceiver(InitInfo(**told), rank)
            pipe.send("connected")
            continue
        assert intake is not None
        try:
            pipe.send(take(intake, told["version"], told["die_at"]))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"})
    if intake is not None:
        intake.receiver.close()


def take(intake: Any, version: int, die_at: int) -> dict[str, Any]:
    """One version: whether its bytes are right, and their digests."""
    wrong, arrived = list[str](), list[Any]()
    expected = scatter(
        intake.route.owned, {name: whole.bfloat16() for name, whole in weights(version).items()}
    )
    for bucket, found in intake.buckets(DEADLINE_S):
        intake.digest(bucket, found)
        if bucket.number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, flat in found.items():
            start = bucket.starts[name]
            wanted = expected[name][start : start + len(flat)]
            if torch.cuda.is_available():  # looked at when the transport has used the memory again
                copied = flat.to("cuda", non_blocking=True, copy=True)
                arrived.append((name, copied, wanted))
            elif not torch.equal(flat, wanted):
                wrong.append(name)
            if start + len(flat) == len(expected[name]):
                del expected[name]
    wrong += [name for name, flat, wanted in arrived if not torch.equal(flat.cpu(), wanted)]
    return {"wrong": wrong + sorted(expected), **intake.status(version)}


class Engines:
    """Every engine rank of a case, and `spare` ones that take the place of those who are lost; rank
    0 of the trainer has them.
    """

    def __init__(self, case: Case, spare: int) -> None:
        self.case = case
        started = [self._start() for _ in range(case.engines * case.engine_tensor + spare)]
        for number, (_, pipe) in enumerate(started):
            assert pipe.poll(60) and pipe.recv() == "here", number
        self.ranks, self.spare = started[: len(started) - spare], started[len(started) - spare :]
        self.victim = 0
        self.connected, self.asked = "", list(range(len(self.ranks)))

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        mine, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno())]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": paths}
        )
        theirs.close()
        return process, mine

    def connect(self, transport: str, spec: Any, init_info: dict[str, Any]) -> None:
        if self.connected == transport:
            return
        for number, (_, pipe) in enumerate(self.ranks):
            engine, rank = divmod(number, self.case.engine_tensor)
            info = {"transport": transport, "spec": asdict(spec), "init_info": init_info}
            info["table"] = table_to_json(table(spec.engine_tensor))
            pipe.send(info | {"engine": engine, "rank": rank})
        for number, (_, pipe) in enumerate(self.ranks):
            assert pipe.poll(DEADLINE_S) and pipe.recv() == "connected", number
        self.connected = transport

    def update(self, version: int, without: int, die_at: int) -> None:
        """All but rank `without` take the version in, rank `victim` until bucket `die_at`."""
        self.asked = [number for number in range(len(self.ranks)) if number != without]
        for number in self.asked:
            self.ranks[number][1].send(
                {"version": version, "die_at": die_at if number == self.victim else -1}
            )

    def poll(self) -> None:
        for number, (process, _) in enumerate(self.ranks):
            if process.poll() is not None:
                raise RuntimeError(f"engine rank {number} died")

    def answers(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline, found = time.monotonic() + timeout_s, []
        for number in self.asked:
            try:
                late = not self.ranks[number][1].poll(max(0.0, deadline - time.monotonic()))
                found.append({"error": "late"} if late else self.ranks[number][1].recv())
            except EOFError:
                found.append({"error": "died"})
        return found

    def replace(self) -> None:
        """A fresh process in the place of the victim."""
        self.ranks[self.victim][0].wait(DEADLINE_S)
        self.ranks[self.victim], self.connected = self.spare.pop(), ""

    def close(self) -> None:
        for process, pipe in [*self.ranks, *self.spare]:
            if process.poll() is None:
                pipe.send(None)
        for process, _ in [*self.ranks, *self.spare]:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    engine(Connection(int(sys.argv[1])))
