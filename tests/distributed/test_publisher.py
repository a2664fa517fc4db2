"""What goes wrong on one rank while two publish is told on both, for what it is, and the next
version arrives.

Engines are threads of rank 0 with the real receiving end; tests/system has the real engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.engine_ranks import table, weights
from support.ranks import run_ranks

from megarl.errors import ProcessLost
from megarl.parallel import collectives
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.reshard.boxes import scatter
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.weights import checksums
from megarl.weights import publisher as wire
from megarl.weights.bucket_receiver import BucketReceiver, InitInfo
from megarl.weights.probe import Probe
from megarl.weights.transports.base import Aborted

DEADLINE_S, HANG_S = 20.0, 5.0


class Engine:
    """One engine of one rank, taking versions in."""

    def __init__(self) -> None:
        self.dies_at, self.hangs = -1, False

    def connect(self, info: dict[str, Any]) -> None:
        self.intake = BucketReceiver(InitInfo(**info), 0)
        self.receiver: Any = self.intake.receiver

    def take(self, version: int) -> list[dict[str, Any]]:
        if self.hangs and self.dies_at >= 0:
            meeting = self.receiver._meeting
            meeting.follow()
            while not meeting.is_aborted():
                time.sleep(0.05)
            self.receiver.close()
            raise OSError("the engine hung")
        for bucket, stored in self.intake.buckets(DEADLINE_S):
            if bucket.number == self.dies_at:
                self.receiver.close()
                raise OSError("the engine is gone")
            self.intake.digest(bucket, stored)
        return [self.intake.status(version)]


class Answer:
    def __init__(self, engines: Sequence[Engine], version: int, service_dies: bool) -> None:
        self.outcomes: dict[int, Any] = {}
        self.service_dies = service_dies
        self.threads = [
            threading.Thread(target=self._take, args=(n, e, version)) for n, e in enumerate(engines)
        ]
        for thread in self.threads:
            thread.start()

    def _take(self, number: int, engine: Engine, version: int) -> None:
        try:
            self.outcomes[number] = engine.take(version)
        except Exception as error:
            self.outcomes[number] = error

    def poll(self) -> None:
        gone = {n: o for n, o in list(self.outcomes.items()) if isinstance(o, OSError)}
        if gone:
            raise ProcessLost(str(next(iter(gone.values()))), tuple(gone))
        for outcome in list(self.outcomes.values()):
            if isinstance(outcome, Exception):
                raise Aborted(str(outcome)) if isinstance(outcome, Aborted) else outcome

    def result(self, *, timeout_s: float) -> list[Any]:
        for thread in self.threads:
            thread.join(timeout_s)
        self.poll()
        return [self.outcomes[number] for number in range(len(self.threads))]

    def settle(self, *, timeout_s: float) -> list[int]:
        for thread in self.threads:
            thread.join(timeout_s)
        if self.service_dies:
            raise ProcessLost("the rollout service is gone")
        return [number for number, outcome in self.outcomes.items() if isinstance(outcome, OSError)]


class Engines:
    """What `Publisher` asks of engines."""

    def __init__(self, count: int) -> None:
        self.engines, self.replaced, self.admit_fails = [Engine() for _ in range(count)], [], False
        self.members, self.start_slowly, self.service_dies = list(range(count)), False, False

    def present(self) -> list[Engine]:
        return [self.engines[number] for number in self.members]

    def is_one_host(self) -> bool:
        return True

    def connect(self, infos: Mapping[int, dict[str, Any]], *, timeout_s: float) -> None:
        for number, info in infos.items():
            self.engines[number].connect(info)

    def update(self, version: int, *, timeout_s: float) -> Answer:
        return Answer(self.present(), version, self.service_dies)

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]:
        return [[0.0] * (len(token_ids) - 1) for _ in self.members]

    def hold(self, lost: Sequence[int] = ()) -> tuple[list[int], bool]:
        self.replaced += lost
        for number in lost:
            self.engines[number] = Engine()
        every = list(range(len(self.engines)))
        slow = lost if self.start_slowly else ()
        before, self.members = self.members, [number for number in every if number not in slow]
        return self.members, bool(lost) or before != self.members

    def admit(self) -> dict[str, float]:
        if self.admit_fails:
            raise RuntimeError("nobody home")
        return {"engines/missing": float(len(self.engines) - len(self.members))}


class Policy:
    """Weights of a version, cut as ZeRO 3 over two ranks cuts them."""

    zero_stage, shards, fused = 3, {}, {}

    def __init__(self, rank: int) -> None:
        self.rank, self.version, self.fails, self.damages = rank, 0, False, False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {row.name: row.shape for row in table()}

    def owned(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("out of memory, say")
        return scatter(
            training_owned(self.shapes, {}, Layout(data=2), 3)[self.rank], weights(self.version)
        )

    def logprobs(self, samples: Sequence[Any]) -> Any:
        return torch.zeros(len(samples.token_ids) - 1)


def publishes(case: str) -> list[str]:
    """What each of three publishes came to on this rank; the second is the one in which something
    goes wrong.
    """
    bucket_bytes = 2**20 if "one bucket" in case else 2**10
    transport = "point_to_point" if "messages" in case else "shared_memory"
    count, victim = (3, 1) if "messages" in case else (2, 0)
    mesh_module.initialise(timeout_s=60)
    found = []
    with (
        ProcessMesh(Layout(data=2), timeout_s=60) as mesh,
        patch.object(WeightSyncConfig, "bucket_bytes", bucket_bytes),
    ):
        engines = Engines(count) if mesh.rank == 0 else None
        policy = Policy(mesh.rank)
        publisher = wire.Publisher(
            WeightSyncConfig(
                timeout_s=HANG_S if "hangs" in case else DEADLINE_S, transport=transport
            ),
            table=table(),
            policy=policy,
            engines=engines,
            num_engines=count,
            engine_tensor=1,
            mesh=mesh,
            dtype="float32",
            probe=Probe.random(
                dtypes=("float32",), vocab_size=100, max_tokens=16, seed=0, tolerance=0.0
            ),
        )
        plain = checksums.carry
        for version in range(3):
            policy.version, wrong = version, version == 1
            policy.fails = wrong and mesh.rank == 1 and "rank fails" in case
            if wrong and "damage" in case and mesh.rank == 1:
                checksums.carry = lambda source, target, box: plain(source, target, box) + 1
            if engines is not None:
                engines.start_slowly = "slow start" in case
                engines.admit_fails = wrong and "admit" in case
                engines.service_dies = wrong and "service" in case
                dies = any(word in case for word in ("dies", "hangs", "both"))
                engines.engines[victim].dies_at = 2 if wrong and dies else -1
                engines.engines[victim].hangs = "hangs" in case
                if "both" in case:
                    engines.engines[1].dies_at = 3 if wrong else -1
            try:
                with patch.object(collectives, "waits", wraps=collectives.waits) as told:
                    metrics = publisher.publish(version)
                assert version > 0 or told.call_count == 4, told.call_args_list
                found.append(f"replaced {metrics['publish/replaced']:.0f}")
                if metrics["engines/missing"]:
                    found[-1] += f", missing {metrics['engines/missing']:.0f}"
            except RuntimeError as error:
                found.append(str(error))
            checksums.carry = plain
        found.append(f"replaced engines {engines.replaced if engines else []}")
        publisher.close()
    mesh_module.finalise()
    return found


CASES = {
    "a rank fails": ("publishing version 1 failed on rank 1: out of memory, say", []),
    "a rank fails, one bucket": ("publishing version 1 failed on rank 1: out of memory, say", []),
    "an engine dies": ("replaced 1", [0]),
    "an engine dies, and the service": (
        "publishing version 1 failed on rank 0: the rollout service is gone",
        [],
    ),
    "both engines die": ("replaced 1", [0, 1]),
    "an engine dies, messages": ("replaced 1", [1]),
    "an engine hangs from the start, messages": ("replaced 1", [1]),
    "an engine dies, slow start": ("replaced 1, missing 1", [0]),
    "an engine dies, slow start, messages": ("replaced 1, missing 1", [1]),
    "damage": ("engine 0, rank 0 has received a wrong", []),
    "admit fails": ("admitting replaced engines failed: nobody home", []),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_hear_what_went_wrong(case: str) -> None:
    says, replaced = CASES[case]
    for rank, (first, second, third, engines) in enumerate(
        run_ranks(2, __file__, "publishes", case, timeout_s=90)
    ):
        assert first == third == "replaced 0", (first, third)
        assert says in second, second
        if rank == 0:
            assert engines == f"replaced engines {replaced}"
