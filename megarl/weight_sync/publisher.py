"""Publish one weight version from the trainer's ranks to every engine rank, and verify it.

    trainer rank: the parts it owns --transport--> engine rank: its own tensor-parallel shard

After each publish two checks compare trainer and engines: digests of every tensor (the bytes
arrived), and the log-probs of a fixed text, the probe (the engines compute with them).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megarl.errors import EngineLost
from megarl.parallel.collectives import all_reduce, broadcast_object, gather_objects
from megarl.parallel.mesh import ProcessMesh
from megarl.weight_sync.checksums import Digest, carried, signed
from megarl.weight_sync.config import BUCKET_BYTES, WeightSyncConfig
from megarl.weight_sync.contracts import Engines, SendsWeights, Update
from megarl.weight_sync.parameters import ParameterSpec, refuse_other_model
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.publication import Publication
from megarl.weight_sync.route import Route, RouteSpec, table_fingerprint
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch
from megarl.weight_sync.transports.transport_table import SENDERS
from megarl.weight_sync.weight_receipts import receipt_of_weights

POLL_S = 0.05
"""Seconds between two checks that the engines are still alive."""

SETTLE_S = 8.0
"""Seconds that engines get to abandon a version after it was aborted."""


class Publisher(Publication):
    """Publishes all weights of the policy, and not adapters alone: sends each version from the
    trainer's ranks to the engines and checks that these have it.
    """

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
        """Plan the transfer and open the transport. Collective: every trainer rank calls it.

        Args:
            config: transport, bucket size, probe and deadlines.
            table: the model's parameter table.
            policy: the trained model, whose weights are sent.
            engines: the inference engines on rank 0, None on the other ranks.
            num_engines: number of engines.
            engine_tensor: tensor-parallel ranks of one engine.
            mesh: the trainer's process groups.
            dtype: dtype of the engines' weights, for example "bfloat16".
            precision: dtype of the trainer's forward pass.
            vocabulary: vocabulary size; the probe's tokens are drawn from it.
            max_tokens: longest sequence that the engines accept.
            seed: seed of the probe's tokens.

        Raises:
            ValueError: the parameter table does not describe the policy's model.
        """
        refuse_other_model(table, policy.shapes)
        transport = SENDERS[config.transport]
        layout, on_gpu = mesh.layout, torch.cuda.is_available()
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
            bucket_bytes=config.bucket_bytes or BUCKET_BYTES["cuda" if on_gpu else "cpu"],
            table=table_fingerprint(table),
            local=transport.LOCAL,
            one_host=broadcast_object(
                engines.is_one_host() if engines is not None else False, mesh.world
            ),
        )
        probe = Probe.random(
            dtypes=(dtype, precision),
            vocab_size=vocabulary,
            max_tokens=max_tokens,
            seed=seed,
            tolerance=config.probe_tolerance,
        )
        super().__init__(
            config, policy=policy, engines=engines, mesh=mesh, probe=probe, layouts=str(spec)
        )
        self._table = table
        self._open(spec)
        self.members = list(range(num_engines))
        self._connected = False
        self._unsettled: list[int] = []
        """Engines that had not abandoned the last failed version within `SETTLE_S`."""

    def _open(self, spec: RouteSpec) -> None:
        """Plan the transfer and open the transport; collective."""
        world = self.mesh.world
        self.route, self._layouts = Route.of_source(spec, self._table, world.rank), str(spec)
        self._tensor_index = {name: index for index, name in enumerate(self.route.tensors)}
        self._sender = SENDERS[self.config.transport](self.route, world, self.config.folder)

    def _resize(self, count: int) -> None:
        if count != self.route.spec.engines:
            self._sender.close()
            self._open(replace(self.route.spec, engines=count))

    def _attempt(self, version: int) -> tuple[str, list[int], dict[str, float]]:
        """Send a version once: (error message or "", positions of the engines lost, metrics).

        Message and engines are the same on all ranks; only rank 0 has metrics.
        """
        world, route, metrics = self.mesh.world, self.route, {}
        digests = torch.zeros(route.spec.num_destinations, len(route.tensors), dtype=torch.int64)
        problem, given_up, lost, answers = "", "", [], []
        try:
            answers = self._send(version, digests)
        except Aborted as error:  # the rank that aborted reports the reason, unless an engine did
            given_up = str(error)
            engine = self._sender.lost() if world.rank == 0 else None
            if engine is not None:
                lost = sorted({engine, *self._unsettled})
                problem = self._describe(EngineLost("its connections ended", (engine,)), version)
        except EngineLost as error:
            problem, lost = (
                self._describe(error, version),
                sorted({*error.engines, *self._unsettled}),
            )
        except Exception as error:  # gathered below, so that no rank waits for this one
            traceback.print_exc()
            why = str(error) or repr(error)
            problem, lost = f"publishing version {version} failed on rank {world.rank}: {why}", []
        reports = gather_objects((problem, lost, given_up), world)
        # A trainer rank's own error comes first: engines that aborted because of it are not lost.
        for message, engines, _ in sorted(reports, key=lambda report: bool(report[1])):
            if message:
                return message, engines, {}
        if any(reason for *_, reason in reports):
            return f"publishing version {version} failed: {GIVEN_UP}, which did not say why", [], {}
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        sums = all_reduce(digests.to(device), world).cpu()

        def compare(engines: Engines) -> None:
            self._compare(version, sums, answers)
            self.receipts = self._receipts_of(sums)
            seconds = [rank["seconds"] for engine in answers for rank in engine]
            metrics.update(
                {
                    f"publish/{kind}_s": max(found[kind] for found in seconds)
                    for kind in ("wait", "digest", "install")
                }
            )
            metrics["publish/bytes"] = float(route.written)

        return self._on_main(f"publishing version {version}", compare), [], metrics

    def _receipts_of(self, sums: torch.Tensor) -> list[str]:
        """The receipts (`receipt_of_weights`) with which the engines' answers name this version of
        the weights, each once. `sums`: [destinations, tensors] int64 digests of what was sent.
        """
        spec, found = self.route.spec, dict[str, None]()
        for engine in range(spec.engines):
            rows = [sums[spec.destination(engine, rank)] for rank in range(spec.engine_tensor)]
            found[receipt_of_weights([row.tolist() for row in rows])] = None
        return list(found)

    def _send(self, version: int, digests: torch.Tensor) -> list[list[dict[str, Any]]]:
        """Send this rank's part of a weight version and digest it.

        Fills `digests` [destinations, tensors] int64. Returns on rank 0 the status of every
        engine rank, [engine][rank]; elsewhere an empty list.
        """
        sender, route, timeout_s = self._sender, self.route, self.config.timeout_s
        update: Update | None = None
        sums: dict[tuple[int, int], Digest] = {}
        self._unsettled = []
        sender.begin(version)
        try:
            sources = self.policy.owned()
            if self.engines is not None:
                self._connect()
                update = self.engines.update(version, timeout_s=timeout_s)
            deadline = time.monotonic() + timeout_s
            watch = self._watch(deadline, update)
            for bucket in route.buckets:
                regions = (
                    (copy, copy.taken.view(sources[copy.taken.buffer]), target, copy.taken.box)
                    for copy, target in sender.reserve(bucket, watch)
                )
                for copy, value in carried(regions):
                    place = copy.destination, self._tensor_index[copy.tensor]
                    sums[place] = sums.get(place, 0) + value
                sender.commit(bucket, watch)
            for place, value in sums.items():
                digests[place] = signed(value)
            return (
                update.result(timeout_s=max(0.0, deadline - time.monotonic()))
                if update is not None
                else []
            )
        except Exception:
            sender.abort()
            if update is not None:
                self._unsettled = update.settle(timeout_s=SETTLE_S)
            raise

    def _watch(self, deadline: float, update: Update | None) -> Watch:
        """A function to call in every wait: raises once `deadline` has passed or an engine failed.

        Only rank 0 sees the engines' answers and can name the late one, so the other ranks wait
        longer.
        """
        timeout_s = self.config.timeout_s
        next_poll = time.monotonic()

        def watch() -> None:
            nonlocal next_poll
            now = time.monotonic()
            if update is None:
                if now > deadline + timeout_s + 2 * SETTLE_S:
                    raise RuntimeError(
                        f"the engines did not receive it within {timeout_s:g} s; raise"
                        " weight_sync.timeout_s"
                    )
                return
            if now > deadline:
                reached = [
                    self._sender.progress(engine) for engine in range(self.route.spec.engines)
                ]
                slow = {engine for engine, number in enumerate(reached) if number == min(reached)}
                # Not those that wait for a slow one to pass the weights on.
                late = tuple(
                    engine for engine in sorted(slow) if self._sender.relay(engine) not in slow
                )
                raise EngineLost(
                    f"it did not finish within {timeout_s:g} s; raise weight_sync.timeout_s if it"
                    " was only slow",
                    late,
                )
            if now >= next_poll:
                update.poll()
                next_poll = time.monotonic() + POLL_S

        return watch

    def _connect(self) -> None:
        """Send every engine the transport's settings and address, unless all engines have them: at
        the first publication, and after an engine was replaced.
        """
        if self._connected:
            return
        assert self.engines is not None
        info = {
            "transport": self.config.transport,
            "spec": self.route.spec.plain(),
            "init_info": self._sender.init_info(),
        }
        self.engines.connect(
            lambda position: info | {"engine": position}, timeout_s=self.config.timeout_s
        )
        self._connected = True

    def _describe(self, lost: EngineLost, version: int) -> str:
        """Error message for lost engines: which, and at which bucket of the version."""
        parts = []
        for engine in lost.engines:
            number = min(self._sender.progress(engine), len(self.route.buckets) - 1)
            parts.append(
                f"engine {self.members[engine]} was lost while it received version {version}, in"
                f" bucket {number + 1} of {len(self.route.buckets)}, which begins with"
                f" {self.route.first_tensor(number)}"
            )
        return f"{'; '.join(parts)}: {lost}"

    def _compare(
        self, version: int, sent: torch.Tensor, answers: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise `RuntimeError` where an engine rank's version or digests differ from what was sent.

        `sent` [destinations, tensors] int64 are the trainer's digests, `answers` the status of each
        [engine][rank].
        """
        for position, ranks in enumerate(answers):
            engine = self.members[position]
            for rank, status in enumerate(ranks):
                if status["version"] != version:
                    raise RuntimeError(
                        f"engine {engine}, rank {rank} has version {status['version']} instead of"
                        f" {version}"
                    )
                expected = sent[self.route.spec.destination(position, rank)]
                differing = (
                    (expected != torch.tensor(status["digests"], dtype=torch.int64))
                    .nonzero()
                    .flatten()
                    .tolist()
                )
                if differing:
                    raise RuntimeError(
                        f"engine {engine}, rank {rank} has received a wrong"
                        f" {self.route.tensors[differing[0]]} ({len(differing)} of"
                        f" {len(expected)} tensors differ from the trainer's; {self.route.spec})"
                    )

    def _forget(self) -> None:
        self._connected = False

    def close(self) -> None:
        """Release the transport's memory, files and connections."""
        self._sender.close()
