"""Send one weight version from the trainer's ranks to every engine rank, and verify it.

trainer rank: the parts it owns --transport--> engine rank: its own tensor-parallel shard
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from megarl.errors import ProcessLost
from megarl.parallel.collectives import all_reduce, gather_objects
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.weight_sync import BUCKET_BYTES, WeightSyncConfig
from megarl.weights.checksums import Digest, carried, signed
from megarl.weights.engine_client import EngineCall, EngineClient
from megarl.weights.parameters import ParameterSpec, refuse_other_model, table_to_json
from megarl.weights.probe import Probe
from megarl.weights.publication import Publication, SendsWeights, Verify
from megarl.weights.route import Route, RouteSpec, table_fingerprint
from megarl.weights.transports.base import GIVEN_UP, Aborted, Watch
from megarl.weights.transports.transport_table import TRANSPORTS
from megarl.weights.weight_receipts import receipt_of_weights

SETTLE_S = 8.0
"""Seconds that engines get to abandon a version after an abort."""


class Publisher(Publication[SendsWeights]):
    """Sends all weights of the policy, not adapters alone, and checks the engines' digests."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        table: Sequence[ParameterSpec],
        policy: SendsWeights,
        engines: EngineClient | None,
        num_engines: int,
        engine_tensor: int,
        mesh: ProcessMesh,
        dtype: str,
        probe: Probe,
        shares_gpus: bool = False,
    ) -> None:
        """Plan the transfer and open the transport. Collective.

        `table`: the model's parameter table. `dtype`: of the engines' weights. Raises `ValueError`
        if the table is not of the policy's model.
        """
        refuse_other_model(
            {parameter.name: parameter.shape for parameter in table}, policy.shapes, "the model"
        )
        sender = TRANSPORTS[config.transport].Sender
        device = "cuda" if torch.cuda.is_available() else "cpu"
        spec = RouteSpec(
            layout=mesh.layout,
            zero_stage=policy.zero_stage,
            shards=policy.shards,
            fused=policy.fused,
            engines=num_engines,
            engine_tensor=engine_tensor,
            dtype=dtype,
            bucket_bytes=config.bucket_bytes or BUCKET_BYTES[device],
            table=table_fingerprint(table),
            local=sender.LOCAL,
            shares_gpus=shares_gpus,
            one_host=engines is not None and engines.is_one_host(),
        )
        super().__init__(
            config, policy=policy, engines=engines, mesh=mesh, probe=probe, layouts=str(spec)
        )
        self._table = table
        self._open(spec)
        self.members = list(range(num_engines))

    def _open(self, spec: RouteSpec) -> None:
        world = self.mesh.world
        self.route, self._layouts = Route.of_source(spec, self._table, world.rank), str(spec)
        self._tensor_index = {name: index for index, name in enumerate(self.route.tensors)}
        make = TRANSPORTS[self.config.transport].Sender
        self._sender = make(self.route, world)

    def _resize(self, count: int) -> None:
        if count != self.route.spec.engines:
            self._sender.close()
            self._open(replace(self.route.spec, engines=count))

    def _prepare(self, version: int) -> None:
        self._sender.begin(self._number, anew=not self._is_connected)

    def _transfer(self, version: int) -> tuple[str, list[int], Verify]:
        shape = self.route.spec.num_destinations, len(self.route.tensors)
        digests = torch.zeros(shape, dtype=torch.int64)
        answers, failure, update = [], None, None
        try:
            if self.engines is None:  # rank 0 has begun in _prepare
                self._sender.begin(self._number)
            sources = self.policy.owned()
            if self.engines is not None:
                self._connect(self.engines)
                # returns at once: engines receive meanwhile
                update = self.engines.update(version, timeout_s=self.config.timeout_s)
            answers = self._send(sources, update, digests)
        except Exception as error:  # gathered below, so that no rank waits for this one
            cause, unsettled = error, list[int]()
            try:
                self._sender.abort()
                unsettled = update.settle(timeout_s=SETTLE_S) if update is not None else []
            except Exception as later:  # the service died too
                cause = later
            failure = self._explain(cause, version, unsettled)
        world = self.mesh.world
        if failures := list(filter(None, gather_objects(failure, world))):
            _, problem, lost = min(failures, key=lambda cause: cause[0])
            return problem, lost, lambda engines: {}
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        sums = all_reduce(digests.to(device), world).cpu()  # modulo 2^64
        return "", [], lambda engines: self._verify(version, sums, answers)

    def _explain(
        self, error: Exception, version: int, unsettled: list[int]
    ) -> tuple[int, str, list[int]]:
        """(rank of the cause, of which the lowest counts; message; positions of lost engines) of an
        error. `unsettled`: engines that have not abandoned the version in time.
        """
        doing = f"publishing version {version} failed"
        if isinstance(error, Aborted):  # the rank that aborted tells why
            return 2, f"{doing}: {GIVEN_UP}, which did not say why", []
        if isinstance(error, ProcessLost) and error.engines:
            parts, buckets = [], self.route.buckets
            for engine in error.engines:
                number = max(0, min(self._sender.progress(engine), len(buckets) - 1))
                parts.append(
                    f"engine {self.members[engine]} was lost while it received version {version},"
                    f" in bucket {number + 1} of {len(buckets)}, which begins with"
                    f" {self.route.first_tensor(number)}"
                )
            lost = sorted({*error.engines, *unsettled})
            return 1, f"{'; '.join(parts)}: {error}", lost
        # A rank's own error comes first: engines that aborted because of it are not lost.
        traceback.print_exception(error)
        return 0, f"{doing} on rank {self.mesh.world.rank}: {str(error) or repr(error)}", []

    def _send(
        self, sources: Mapping[str, torch.Tensor], update: EngineCall | None, digests: torch.Tensor
    ) -> list[list[dict[str, Any]]]:
        """Write this rank's weights into each bucket for the transport. Fills `digests`
        [destinations, tensors] int64; returns on rank 0, which has begun the `update`, the status
        dict of every [engine][rank].
        """
        sender, sent = self._sender, dict[tuple[int, int], Digest]()
        deadline = time.monotonic() + self.config.timeout_s
        watch = self._watch(deadline, update)
        for bucket in self.route.buckets:
            # (copy, source view, target view, box); carried copies them and yields digests
            regions = (
                (copy, copy.taken.view(sources[copy.taken.buffer]), target, copy.taken.box)
                for copy, target in sender.reserve(bucket, watch)
            )
            for copy, digest in carried(regions):
                key = copy.destination, self._tensor_index[copy.tensor]
                # digests of a tensor's regions add up
                sent[key] = sent.get(key, 0) + digest
            sender.commit(bucket, watch)
        for key, digest in sent.items():
            digests[key] = signed(digest)
        if update is None:
            return []
        return update.result(timeout_s=max(0.0, deadline - time.monotonic()))

    def _watch(self, deadline: float, update: EngineCall | None) -> Watch:
        """A function that raises in a wait once `deadline` has passed or an engine failed. Only
        rank 0 can name the late engine, so the other ranks wait longer.
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
                reached = list(map(self._sender.progress, range(self.route.spec.engines)))
                late = tuple(e for e, number in enumerate(reached) if number == min(reached))
                raise ProcessLost(
                    f"it did not finish within {timeout_s:g} s; raise weight_sync.timeout_s if it"
                    " was only slow",
                    late,
                )
            if now >= next_poll:
                update.poll()
                next_poll = time.monotonic() + 0.05

        return watch

    def _connect(self, engines: EngineClient) -> None:
        if self._is_connected:
            return
        info = {
            "transport": self.config.transport,
            "spec": asdict(self.route.spec),
            "init_info": self._sender.init_info(),
            "table": table_to_json(self._table),
        }
        infos = {number: info | {"engine": n} for n, number in enumerate(self.members)}
        engines.connect(infos, timeout_s=self.config.timeout_s)
        self._is_connected = True

    def _verify(
        self, version: int, sums: torch.Tensor, answers: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, float]:
        """Set the receipts and return metrics; raises `RuntimeError` for a wrong version or digest.
        `sums`: as `_send` fills them, over all ranks.
        """
        for position, ranks in enumerate(answers):
            for rank, status in enumerate(ranks):
                who = f"engine {self.members[position]}, rank {rank}"
                if status["version"] != version:
                    raise RuntimeError(
                        f"{who} has version {status['version']} instead of {version}"
                    )
                expected = sums[self.route.spec.destination(position, rank)].tolist()
                pairs = zip(self.route.tensors, expected, status["digests"], strict=True)
                differing = [name for name, sent, received in pairs if sent != received]
                if differing:
                    raise RuntimeError(
                        f"{who} has received a wrong {differing[0]} ({len(differing)} of"
                        f" {len(expected)} tensors differ from the trainer's; {self.route.spec})"
                    )
        receipts = [receipt_of_weights([rank["digests"] for rank in ranks]) for ranks in answers]
        self.receipts = list(dict.fromkeys(receipts))
        seconds = [rank["seconds"] for ranks in answers for rank in ranks]
        metrics = {
            f"publish/{phase}_s": max(rank[phase] for rank in seconds)
            for phase in ("wait", "digest", "install")
        }
        copies = self.route.spec.engines if self._sender.SENDS_TO_EACH else 1
        return metrics | {"publish/bytes": float(self.route.written * copies)}

    def close(self) -> None:
        self._sender.close()
