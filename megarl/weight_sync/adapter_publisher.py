"""Publish only a policy's LoRA adapters: engines have read the base model from disk, and vLLM adds
the adapters as it computes.

    trainer ranks: A and B --gathered on rank 0--> files in PEFT's format --as bytes--> every engine

The probe is scored with and without adapters on both sides, since new adapters change less than
its tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megarl.errors import EngineLost
from megarl.parallel.collectives import gather_objects
from megarl.parallel.mesh import ProcessMesh
from megarl.weight_sync.config import WeightSyncConfig
from megarl.weight_sync.contracts import Engines, SendsWeights
from megarl.weight_sync.probe import Effect, Probe
from megarl.weight_sync.publication import FurtherCheck, Publication
from megarl.weight_sync.transports.base import Aborted
from megarl.weight_sync.weight_receipts import receipt_of_adapter


class SendsAdapters(SendsWeights, Protocol):
    """A trained model whose adapters can be published."""

    def adapter_files(self) -> dict[str, bytes]:
        """{file name: content} of all A and B in PEFT's format, on every rank; collective."""
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """A context manager in which `logprobs` are those of the base model."""
        ...


class AdapterPublisher(Publication):
    """Publishes adapters."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        policy: SendsAdapters,
        engines: Engines | None,
        mesh: ProcessMesh,
        probe: Probe,
        layouts: str,
    ) -> None:
        """`engines` are started with the base model's weights and the adapters' rank. `layouts`:
        those of trainer and engines, for messages.
        """
        super().__init__(
            config, policy=policy, engines=engines, mesh=mesh, probe=probe, layouts=layouts
        )
        self._sender = policy

    def _attempt(self, version: int) -> tuple[str, list[int], dict[str, float]]:
        files, metrics = self._sender.adapter_files(), {}
        problem, lost = "", list[int]()
        try:
            if self.engines is not None:
                metrics = self._send(version, files)
        except EngineLost as error:
            problem, lost = f"publishing version {version} failed: {error}", [*error.engines]
        except Exception as error:  # gathered below, so that no rank waits for this one
            problem = f"publishing version {version} failed: {error}"
        for message, engines in gather_objects((problem, lost), self.mesh.world):
            if message:
                return message, engines, {}
        return "", [], metrics

    def _further_check(self, version: int, own: list[float]) -> FurtherCheck:
        with self._sender.adapters_off():
            trainer = Effect(own, self.policy.logprobs(self._probe.samples).float().tolist())

        def check(engines: Engines, scores: Sequence[Sequence[float]]) -> dict[str, float]:
            base = engines.score(
                self._probe.token_ids, timeout_s=self.config.timeout_s, adapted=False
            )
            found = [Effect(*pair) for pair in zip(scores, base, strict=True)]
            gap = self._probe.compare_effects(trainer, found, version=version, numbers=self.members)
            return {"probe/adapter_gap": gap}

        return check

    def _send(self, version: int, files: dict[str, bytes]) -> dict[str, float]:
        """On rank 0, send the adapters to every engine and wait until each has loaded them."""
        assert self.engines is not None
        timeout_s = self.config.timeout_s
        deadline = time.monotonic() + timeout_s
        update = self.engines.load_adapter(version, files, timeout_s=timeout_s)
        try:
            loaded = update.result(timeout_s=max(0.0, deadline - time.monotonic()))
        except Aborted as error:
            raise RuntimeError(str(error)) from None
        receipt = receipt_of_adapter(files)
        self.receipts, wanted = [receipt], {"version": version, "receipt": receipt}
        for number, found in zip(self.members, loaded, strict=True):
            if found != wanted:
                raise RuntimeError(
                    f"engine {number} has adapters of version {found['version']} and receipt"
                    f" {found['receipt']} instead of version {version} and {receipt}"
                )
        return {"publish/bytes": float(sum(map(len, files.values()))) * len(loaded)}
