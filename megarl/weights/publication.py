"""What publishing whole weights and LoRA adapters have in common: attempts, lost engines, the
probe.

An attempt has four collectives, of adapters two: the engines that take part, the ranks' errors, the
sum of digests, the outcome of the checks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from megarl.errors import ProcessLost
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.system.console import say
from megarl.system.spans import activity
from megarl.types import Samples
from megarl.weights.engine_client import EngineClient
from megarl.weights.probe import Probe


class SendsWeights(Protocol):
    """A trained model whose weights can be sent; each trainer rank has its part."""

    @property
    def zero_stage(self) -> int: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{published tensor: whole shape}."""
        ...

    @property
    def shards(self) -> dict[str, Shard]:
        """{parameter: how ranks split it}, without those that are not split."""
        ...

    @property
    def fused(self) -> dict[str, list[tuple[str, tuple[int, int]]]]:
        """See `megarl.parallel.reshard.owned.Fused`."""
        ...

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{tensor: flat part} of this rank's shard or, under ZeRO 3, its slice."""
        ...

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """[T - 1] log-probs of the tokens of one sequence but the first. Collective."""
        ...


Model = TypeVar("Model", bound=SendsWeights)

Verify = Callable[[EngineClient], dict[str, float]]
"""Rank 0 calls it when a version was sent: checks the engines, sets `Publication.receipts`, returns
metrics.
"""

FurtherCheck = Callable[[EngineClient, Sequence[Sequence[float]]], dict[str, float]]
"""Rank 0 calls it with the engines' log-probs if these agree; returns metrics."""


class Publication(ABC, Generic[Model]):
    """Sends weight versions to the engines and checks what they have. Methods are collective."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        policy: Model,
        engines: EngineClient | None,
        mesh: ProcessMesh,
        probe: Probe,
        layouts: str,
    ) -> None:
        """`engines`: None but on rank 0. `layouts`: for error messages."""
        self.config, self.policy, self.engines, self.mesh = config, policy, engines, mesh
        self._probe, self._layouts = probe, layouts
        self.members: list[int] = []
        """Numbers of the engines that get the present version."""
        self.receipts: list[str] = []
        """Of the newest version. Each response must carry one of them; engines may receive in
        different pieces.
        """
        self._is_connected = False
        """Whether all engines know the transport."""
        self._number = 0
        """Number of the present attempt."""
        self._doing = ""
        """What rank 0 does in `_on_main`, for the error message."""

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy's weights as `version` to every engine that is ready; returns metrics.
        Collective.

        Lost engines are replaced and the version is sent again, up to `weight_sync.replacements`
        times. Raises `RuntimeError` on every rank if an engine is late, holds other bytes, or fails
        the probe.
        """
        failure, lost, metrics = "", list[int](), {}
        self._started_at = time.monotonic()
        for replaced in range(self.config.replacements + 1):
            self._begin(version, failure, lost)
            failure, lost, verify = self._transfer(version)
            if not failure:
                failure, lost, metrics = self._conclude(version, verify)
            self._is_connected &= not failure
            if not lost:
                metrics["publish/replaced"] = float(replaced)
                break
        if failure:
            raise RuntimeError(failure)
        return metrics

    def _begin(self, version: int, failure: str, lost: Sequence[int]) -> None:
        """Tell every rank which engines take part, after engines `lost` with `failure` were
        replaced.
        """
        self._number += 1

        def regroup(engines: EngineClient) -> list[int]:
            if lost:
                say(f"megarl: {failure}; replacing lost engines")
            members, has_new = engines.hold([self.members[position] for position in lost])
            self._is_connected &= not has_new
            if members == self.members:
                prepare()
            return members

        def prepare() -> None:
            self._doing = f"publishing version {version}"
            self._prepare(version)

        doing = f"{failure}; and replacing it" if lost else "waiting for engines that start"
        problem, _, members = self._on_main(doing, regroup)
        if members is not None and members != self.members:
            self.members, self._is_connected = members, False
            self._resize(len(members))
            problem, *_ = self._on_main(doing, lambda _: prepare())
        if problem:
            raise RuntimeError(problem)

    def _on_main(
        self, doing: str, work: Callable[[EngineClient], Any]
    ) -> tuple[str, list[int], Any]:
        """Run `work` on rank 0. Returns (error message or "", positions of lost engines, result or
        None).
        """
        self._doing, outcome = doing, ("", list[int](), None)
        if self.engines is not None:
            try:
                outcome = "", [], work(self.engines)
            except Exception as error:
                lost = [*error.engines] if isinstance(error, ProcessLost) else []
                outcome = f"{self._doing} failed: {str(error) or repr(error)}", lost, None
        return broadcast_object(outcome, self.mesh.world)

    def _conclude(self, version: int, verify: Verify) -> tuple[str, list[int], dict[str, float]]:
        """Check a version that was sent: (error message or "", positions of lost engines,
        metrics).
        """
        logprobs, every, further = list[float](), self.config.probe_every, None
        if every and version % every == 0:
            logprobs = self.policy.logprobs(self._probe.samples).float().tolist()
            further = self._further_check(version, logprobs)

        def conclude(engines: EngineClient) -> tuple[dict[str, float], list[str]]:
            metrics = verify(engines)
            if logprobs:
                self._doing = f"the probe of version {version}"
                metrics |= self._check_probe(engines, version, logprobs, further)
            self._doing = "admitting replaced engines"
            metrics |= engines.admit()
            metrics["time/publish_s"] = time.monotonic() - self._started_at
            return metrics, self.receipts

        failure, lost, checked = self._on_main(f"publishing version {version}", conclude)
        metrics, self.receipts = checked or ({}, self.receipts)
        return failure, lost, metrics

    def _check_probe(
        self,
        engines: EngineClient,
        version: int,
        expected: list[float],
        further: FurtherCheck | None,
    ) -> dict[str, float]:
        with activity(f"probe of weights {version}", kind="publish", of="engines"):
            scores = engines.score(self._probe.token_ids, timeout_s=self.config.timeout_s)
            worst = self._probe.compare(
                expected, scores, version=version, layouts=self._layouts, numbers=self.members
            )
            metrics = further(engines, scores) if further is not None else {}
            return metrics | {"probe/max_abs": worst}

    @abstractmethod
    def _transfer(self, version: int) -> tuple[str, list[int], Verify]:
        """Send a version once: (error message or "", positions of lost engines, its check), on all
        ranks.
        """

    def _prepare(self, version: int) -> None:
        """Rank 0 calls it before the others begin an attempt."""

    def _resize(self, count: int) -> None:
        """Prepare to send to `count` engines. Collective."""

    def _further_check(self, version: int, expected: list[float]) -> FurtherCheck | None:
        """What else to check if the probe's log-probs agree with the trainer's, `expected`.
        Collective.
        """
        return None

    def close(self) -> None:
        """Release what was opened to send weights."""
