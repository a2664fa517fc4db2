"""What publishing a weight version has in common, whatever travels: attempts, engines that are lost
and replaced, and the probe.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from megarl.activity.spans import activity
from megarl.console import say
from megarl.errors import EngineLost
from megarl.parallel.collectives import broadcast_object, on_first
from megarl.parallel.mesh import ProcessMesh
from megarl.weight_sync.config import WeightSyncConfig
from megarl.weight_sync.contracts import Engines, SendsWeights
from megarl.weight_sync.probe import Probe

FurtherCheck = Callable[[Engines, Sequence[Sequence[float]]], dict[str, float]]


class Publication(ABC):
    """Publishes weight versions; every trainer rank has one, only rank 0's calls the engines.

    A subclass sends a version in `_attempt`.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        policy: SendsWeights,
        engines: Engines | None,
        mesh: ProcessMesh,
        probe: Probe,
        layouts: str,
    ) -> None:
        """`layouts`: those of trainer and engines, for messages."""
        self.config, self.policy, self.engines, self.mesh = config, policy, engines, mesh
        self._probe, self._layouts = probe, layouts
        self.members: list[int] = []
        """Numbers of the engines that take part in the present publication, on every rank."""
        self.receipts: list[str] = []
        """Receipts of the newest version, on every rank; see `weight_sync.weight_receipts`. More
        than one where engines receive the same weights in other pieces."""

    def publish(self, version: int) -> dict[str, float]:
        """Send weight version `version` to every engine that is ready. All trainer ranks call it
        together; returns metrics.

        Engines lost during the transfer or its probe are replaced and the version is sent again, up
        to `weight_sync.replacements` times. Engines that are new and ready by then receive the
        version like the others, and serve requests afterwards; those that still start get the next
        version.

        Raises `RuntimeError` on every rank if an engine does not answer in time, holds other bytes
        than were sent, or scores the probe differently from the trainer.
        """
        started_at = time.monotonic()
        failure = self._on_main("waiting for engines that start", self._hold)
        try:
            metrics: dict[str, float] = {}
            if not failure:
                failure, metrics = self._send_until_whole(version)

            def admit(engines: Engines) -> None:
                metrics["engines/replaced"] = float(engines.admit())
                metrics["engines/missing"] = float(engines.missing)

            failure = failure or self._on_main("admitting replaced engines", admit)
            if failure:
                raise RuntimeError(failure)
        finally:
            if self.engines is not None:
                self.engines.let_go()
        metrics["time/publish_s"] = time.monotonic() - started_at
        metrics, self.receipts = broadcast_object((metrics, self.receipts), self.mesh.world)
        return metrics

    def _send_until_whole(self, version: int) -> tuple[str, dict[str, float]]:
        """Send a version until no engine is lost on the way: (error message or "", metrics)."""
        replaced = 0
        while True:
            self._regroup()
            failure, lost, metrics = self._attempt(version)
            if not failure:
                failure, lost = self._check_probe(version, metrics)
            metrics["publish/replaced"] = float(replaced)
            if not lost or replaced == self.config.replacements:
                return failure, metrics
            replaced += 1
            failure = self._replace(lost, failure)
            if failure:
                return failure, metrics

    def _hold(self, engines: Engines) -> None:
        if engines.hold():
            self._forget()

    def _regroup(self) -> None:
        """Have every rank know which engines take part; all ranks call it together."""
        found = self.engines.members if self.engines is not None else []
        members = broadcast_object(found, self.mesh.world)
        if members != self.members:
            self.members = list(members)
            self._forget()
            self._resize(len(members))

    def _resize(self, count: int) -> None:  # noqa: B027 - there may be nothing to change
        """Prepare to send to `count` engines; all ranks call it together."""

    def _on_main(self, doing: str, work: Callable[[Engines], None]) -> str:
        """Run `work` on rank 0. Returns on every rank its error message, empty on success."""

        def with_engines() -> None:
            assert self.engines is not None
            work(self.engines)

        failure = on_first(with_engines, self.mesh.world)
        return f"{doing} failed: {failure}" if failure else ""

    @abstractmethod
    def _attempt(self, version: int) -> tuple[str, list[int], dict[str, float]]:
        """Send a version once: (error message or "", positions of the engines lost, metrics).

        Message and engines are the same on all ranks; only rank 0 has metrics, and sets `receipts`.
        """

    def _forget(self) -> None:  # noqa: B027 - there may be nothing to forget
        """Called on rank 0 before lost engines are replaced: new ones know nothing."""

    def _replace(self, lost: Sequence[int], failure: str) -> str:
        """Start new engines for the lost ones, given by position. Returns on all ranks an error
        message or "".
        """

        def replace(engines: Engines) -> None:
            say(f"megarl: {failure}; replacing lost engines")
            self._forget()
            engines.replace([self.members[position] for position in lost])

        return self._on_main(f"{failure}; and replacing it", replace)

    def _check_probe(self, version: int, metrics: dict[str, float]) -> tuple[str, list[int]]:
        """Compare the probe's log-probs, if this version is to be probed.

        Adds the largest difference to `metrics`. Returns on all ranks (error message or "", engines
        lost).
        """
        every = self.config.probe_every
        if not every or version % every:
            return "", []
        own = self.policy.logprobs(self._probe.samples).float().tolist()
        lost: list[int] = []

        def score(engines: Engines) -> None:
            try:
                scores = engines.score(self._probe.token_ids, timeout_s=self.config.timeout_s)
            except EngineLost as error:
                lost.extend(error.engines)
                raise
            metrics["probe/max_abs"] = self._probe.compare(
                own, scores, version=version, layouts=self._layouts, numbers=self.members
            )
            metrics.update(check_further(engines, scores))

        check_further = self._further_check(version, own)
        with activity(f"probe of weights {version}", kind="publish", of="engines"):
            failure = self._on_main(f"the probe of version {version}", score)
        return failure, broadcast_object(lost, self.mesh.world) if failure else []

    def _further_check(self, version: int, own: list[float]) -> FurtherCheck:
        """What rank 0 checks when the probe's log-probs agree: called with the engines and their
        log-probs, returns metrics. `own`: the trainer's. All ranks call this method together.
        """
        return lambda engines, scores: {}

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """Release what the publication has opened."""
