"""One version of the weights, from the trainer's ranks to every engine rank, with proof that it
arrived.

every rank: its own parts --transport--> each engine rank: its own shard;  digests are compared, and
a fixed text is scored
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megarl.errors import EngineLost
from megarl.parallel.collectives import all_reduce, broadcast_object, gather_objects, on_first
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard
from megarl.types import Samples
from megarl.weight_sync.checksums import carry
from megarl.weight_sync.config import WeightSyncConfig
from megarl.weight_sync.parameters import ParameterSpec
from megarl.weight_sync.route import Route, RouteSpec, table_fingerprint
from megarl.weight_sync.transports.base import Aborted, Watch
from megarl.weight_sync.transports.registry import SENDERS

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest log-prob difference of a probe by engine dtype: rounding, not an error.

On random words a trained model amplifies rounding: in float32 transformers' own differs from its
float64 by up to 1.1e-4 on the quick start's models (docs/results.md), the trainer from it by 2e-6,
and another machine's kernels by as much as float64. That the weights arrived is what digests prove,
to the bit; the probe finds engines that compute with them in another way.
"""

PROBE_TOKENS = 48

POLL_S = 0.05
"""Between two looks at whether the engines are still there."""

SETTLE_S = 8.0
"""Patience with engines that were told to give a version up."""


class SendsWeights(Protocol):
    """What publishing asks of the policy."""

    @property
    def zero_stage(self) -> int: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def shards(self) -> dict[str, Shard]: ...

    def owned(self) -> dict[str, torch.Tensor]: ...

    def logprobs(self, samples: Samples) -> torch.Tensor: ...


class Answer(Protocol):
    """The engines' answers to one update, on their way."""

    def poll(self) -> None: ...

    def result(self, *, timeout_s: float) -> list[list[dict[str, Any]]]: ...

    def settle(self, *, timeout_s: float) -> list[int]: ...


class Engines(Protocol):
    """What publishing asks of the engines, from rank 0. Calls raise within `timeout_s`,
    `EngineLost` where one is lost.
    """

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None: ...

    def update(self, version: int, *, timeout_s: float) -> Answer: ...

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]: ...

    def replace(self, numbers: Sequence[int]) -> None: ...

    def admit(self) -> None: ...


class Publisher:
    """The trainer's end on every rank; `engines` on rank 0 only."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        table: Sequence[ParameterSpec],
        policy: SendsWeights,
        engines: Engines | None,
        num_engines: int,
        engine_tensor: int,
        mesh: ProcessMesh,
        dtype: str,
        precision: str,
        vocabulary: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """All ranks make theirs together. `dtype` is the engines', `precision` the trainer's; the
        probe stays below the engines' limit of `max_tokens`. Raises `ValueError` where the table is
        not of the policy's model."""
        refuse_other_model(table, policy.shapes)
        self._tolerance = config.probe_tolerance or max(TOLERANCES[dtype], TOLERANCES[precision])
        self.config, self.policy, self.engines, self.mesh = config, policy, engines, mesh
        transport = SENDERS[config.transport]
        layout = mesh.layout
        spec = RouteSpec(
            data=layout.data,
            sequence=layout.sequence,
            tensor=layout.tensor,
            zero_stage=policy.zero_stage,
            shards={name: [shard.dim, *shard.edges] for name, shard in policy.shards.items()},
            engines=num_engines,
            engine_tensor=engine_tensor,
            shared=transport.SHARED,
            dtype=dtype,
            bucket_bytes=config.bucket_bytes,
            table=table_fingerprint(table),
            local=transport.LOCAL,
        )
        self.route = Route.of(spec, table)
        self._place = {name: place for place, name in enumerate(self.route.tensors)}
        self._sender = transport(self.route, mesh.world, config.folder)
        self._connected = False
        self._unsettled: list[int] = []
        """Engines that had failed, or were still at a version, some time after it was given up."""
        draw = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, max_tokens - 1)
        tokens = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        self._probe = Samples.one(0, tokens)

    def publish(self, version: int) -> dict[str, float]:
        """Bring version `version` to every engine; all ranks call it. Returns metrics.

        Engines that are lost on the way are replaced, and the version sent again. Raises
        `RuntimeError`, on every rank, where an engine does not answer in time, holds other bytes
        than were sent, or scores the probe differently.
        """
        started_at, replaced = time.monotonic(), 0
        while True:
            failure, lost, found = self._attempt(version)
            if not lost or replaced == self.config.replacements:
                break
            replaced += 1
            failure = self._replace(lost, failure)
            if failure:
                break
        failure = failure or self._check_probe(version, found)
        failure = failure or self._on_main(
            "telling of fresh engines", lambda engines: engines.admit()
        )
        if failure:
            raise RuntimeError(failure)
        found |= {
            "time/publish_s": time.monotonic() - started_at,
            "publish/replaced": float(replaced),
        }
        return broadcast_object(found, self.mesh.world)

    def _on_main(self, doing: str, work: Callable[[Engines], None]) -> str:
        """Have rank 0 do something with the engines; what goes wrong there is returned on every
        rank, or nothing.
        """

        def with_engines() -> None:
            assert self.engines is not None
            work(self.engines)

        failure = on_first(with_engines, self.mesh.world)
        return f"{doing} failed: {failure}" if failure else ""

    def _attempt(self, version: int) -> tuple[str, list[int], dict[str, float]]:
        """(what went wrong, engines lost by it, metrics), the same on all ranks but for the
        metrics.
        """
        world, route, found = self.mesh.world, self.route, {}
        digests = torch.zeros(route.spec.num_images, len(route.tensors), dtype=torch.int64)
        problem, lost, answers = "", [], []
        try:
            answers = self._send(version, digests)
        except Aborted:
            pass  # whoever gave up says why
        except EngineLost as error:
            problem, lost = (
                self._describe(error, version),
                sorted({*error.engines, *self._unsettled}),
            )
        except Exception as error:  # told to every rank below, so that none waits for this one
            problem, lost = f"publishing version {version} failed on rank {world.rank}: {error}", []
        told = gather_objects((problem, lost), world)
        # What went wrong on a rank comes first: engines that gave up with it are not lost.
        for said, engines in sorted(told, key=lambda one: bool(one[1])):
            if said:
                return said, engines, {}
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        sums = all_reduce(digests.to(device), world).cpu()

        def compare(engines: Engines) -> None:
            self._compare(version, sums, answers)
            kinds = [rank["seconds"] for engine in answers for rank in engine]
            found.update(
                {
                    f"publish/{kind}_s": max(seconds[kind] for seconds in kinds)
                    for kind in ("wait", "digest", "install")
                }
            )
            found["publish/bytes"] = float(route.written)

        return self._on_main(f"publishing version {version}", compare), [], found

    def _send(self, version: int, digests: torch.Tensor) -> list[list[dict[str, Any]]]:
        """This rank's parts of every bucket; on rank 0, also what the engines say they hold."""
        sender, route, timeout_s = self._sender, self.route, self.config.timeout_s
        answer: Answer | None = None
        self._unsettled = []
        sender.begin(version)
        try:
            sources = self.policy.owned()
            if self.engines is not None:
                self._connect()
                answer = self.engines.update(version, timeout_s=timeout_s)
            deadline = time.monotonic() + timeout_s
            watch = self._watch(deadline, answer)
            for bucket in route.buckets:
                for copy, target in sender.reserve(bucket, watch):
                    source = copy.taken.view(sources[copy.taken.buffer])
                    digests[copy.destination, self._place[copy.tensor]] += carry(
                        source, target, copy.taken.box
                    )
                sender.commit(bucket, watch)
            sender.end(watch)
            return (
                answer.result(timeout_s=max(0.0, deadline - time.monotonic()))
                if answer is not None
                else []
            )
        except Exception:
            sender.abort()
            if answer is not None:
                self._unsettled = answer.settle(timeout_s=SETTLE_S)
            raise

    def _watch(self, deadline: float, answer: Answer | None) -> Watch:
        """Raises when `deadline` has passed, and, where this rank hears from the engines, when some
        of them fail.

        Other ranks wait longer, for rank 0 knows which engine is late, and may have had to connect
        them first.
        """
        timeout_s = self.config.timeout_s
        next_look = time.monotonic()

        def watch() -> None:
            nonlocal next_look
            now = time.monotonic()
            if answer is None:
                if now > deadline + timeout_s + 2 * SETTLE_S:
                    raise RuntimeError(
                        f"the engines did not take it in within {timeout_s:g} s; raise"
                        " weight_sync.timeout_s"
                    )
                return
            if now > deadline:
                reached = [
                    self._sender.progress(engine) for engine in range(self.route.spec.engines)
                ]
                late = tuple(
                    engine for engine, number in enumerate(reached) if number == min(reached)
                )
                raise EngineLost(
                    f"it was not done within {timeout_s:g} s; raise weight_sync.timeout_s if it"
                    " only was slow",
                    late,
                )
            if now >= next_look:
                answer.poll()
                next_look = time.monotonic() + POLL_S

        return watch

    def _connect(self) -> None:
        """Tell engines where their weights come from, once, and again after one was replaced."""
        if self._connected:
            return
        assert self.engines is not None
        told = {
            "transport": self.config.transport,
            "spec": self.route.spec.plain(),
            "init_info": self._sender.init_info(),
        }
        self.engines.connect(
            lambda number: told | {"engine": number}, timeout_s=self.config.timeout_s
        )
        self._connected = True

    def _describe(self, lost: EngineLost, version: int) -> str:
        """What is known of engines that were lost on the way."""
        said = []
        for engine in lost.engines:
            number = min(self._sender.progress(engine), len(self.route.buckets) - 1)
            said.append(
                f"engine {engine} was lost while it took in version {version}, in bucket"
                f" {number + 1} of {len(self.route.buckets)}, which begins with"
                f" {self.route.first_tensor(number)}"
            )
        return f"{'; '.join(said)}: {lost}"

    def _replace(self, lost: Sequence[int], failure: str) -> str:
        """Fresh engines in the place of lost ones, on rank 0; returns what else went wrong, on all
        ranks.
        """

        def replace(engines: Engines) -> None:
            print(f"megarl: {failure}; starting anew", file=sys.stderr, flush=True)
            self._connected = False
            engines.replace(lost)

        return self._on_main(f"{failure}; and replacing it", replace)

    def _compare(
        self, version: int, sent: torch.Tensor, answers: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise `RuntimeError` where an engine rank holds other than what was sent to it."""
        for engine, ranks in enumerate(answers):
            for rank, owned in enumerate(ranks):
                if owned["version"] != version:
                    raise RuntimeError(
                        f"engine {engine}, rank {rank} holds version {owned['version']}"
                    )
                wanted = sent[self.route.spec.image(engine, rank)]
                differing = (
                    (wanted != torch.tensor(owned["digests"], dtype=torch.int64))
                    .nonzero()
                    .flatten()
                    .tolist()
                )
                if differing:
                    raise RuntimeError(
                        f"engine {engine}, rank {rank} holds another"
                        f" {self.route.tensors[differing[0]]} than the trainer ({len(differing)} of"
                        f" {len(wanted)} tensors differ; {self.route.spec})"
                    )

    def _check_probe(self, version: int, found: dict[str, float]) -> str:
        """Score a fixed text on both sides, if this version is to be probed; what is wrong, on all
        ranks, or nothing.
        """
        every = self.config.probe_every
        if not every or version % every:
            return ""
        mine = self.policy.logprobs(self._probe).float().tolist()

        def score(engines: Engines) -> None:
            found["probe/max_abs"] = self._score(engines, mine, version)

        return self._on_main(f"the probe of version {version}", score)

    def _score(self, engines: Engines, mine: list[float], version: int) -> float:
        """Largest difference of the probe's log-probs between trainer and engines; raises where it
        is too large.
        """
        worst = 0.0
        for number, theirs in enumerate(
            engines.score(self._probe.token_ids.tolist(), timeout_s=self.config.timeout_s)
        ):
            gaps = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
            gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
            worst = max(worst, gap)
            if gap > self._tolerance:
                raise RuntimeError(
                    f"engine {number} scores the probe text differently from the trainer at version"
                    f" {version}: log-probs differ by up to {gap:.2e}, more than"
                    f" {self._tolerance:.0e}; the weights it computes with are not those published"
                    f" ({self.route.spec}; raise weight_sync.probe_tolerance only if you know why)"
                )
        return worst

    def close(self) -> None:
        """Release the transport."""
        self._sender.close()


def refuse_other_model(
    table: Sequence[ParameterSpec], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ValueError`, with the name, where the parameter table and the policy's model
    differ.
    """
    there = {row.name: row.shape for row in table}
    for name in sorted(there.keys() | shapes.keys()):
        if there.get(name) != shapes.get(name):
            raise ValueError(
                f"the model and its parameter table differ at {name}: {shapes.get(name)} in the"
                f" model, {there.get(name)} in the table; correct the family's entry in"
                " megarl/weight_sync/families.py"
            )
