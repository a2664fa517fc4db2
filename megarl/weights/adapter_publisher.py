"""Sends only a policy's LoRA adapters: the engines have read the base model from disk.

    trainer ranks: A and B --gathered on rank 0--> files in PEFT's format --as bytes--> every engine

The probe is scored with and without adapters on both sides, since new adapters change less than its
tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megarl.weights.engine_client import EngineClient
from megarl.weights.probe import Effect
from megarl.weights.publication import FurtherCheck, Publication, SendsWeights, Verify
from megarl.weights.transports.base import Aborted
from megarl.weights.weight_receipts import receipt_of_adapter


class SendsAdapters(SendsWeights, Protocol):
    """A trained model whose LoRA adapters can be sent."""

    def adapter_files(self) -> dict[str, bytes]:
        """{file name: content} of all LoRA matrices in PEFT's format, on every rank. Collective."""
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """In its block, `logprobs` are those of the base model."""
        ...


class AdapterPublisher(Publication[SendsAdapters]):
    """Sends LoRA adapters to engines that were started with the base model and the adapters'
    rank.
    """

    def _transfer(self, version: int) -> tuple[str, list[int], Verify]:
        files = self.policy.adapter_files()
        return "", [], lambda engines: self._send(engines, version, files)

    def _further_check(self, version: int, expected: list[float]) -> FurtherCheck:
        with self.policy.adapters_off():
            trainer = Effect(expected, self.policy.logprobs(self._probe.samples).float().tolist())

        def check(engines: EngineClient, scores: Sequence[Sequence[float]]) -> dict[str, float]:
            base = engines.score(
                self._probe.token_ids, timeout_s=self.config.timeout_s, adapted=False
            )
            effects = [Effect(*pair) for pair in zip(scores, base, strict=True)]
            gap = self._probe.compare_effects(
                trainer, effects, version=version, numbers=self.members
            )
            return {"probe/adapter_gap": gap}

        return check

    def _send(
        self, engines: EngineClient, version: int, files: dict[str, bytes]
    ) -> dict[str, float]:
        timeout_s = self.config.timeout_s
        update = engines.load_adapter(version, files, timeout_s=timeout_s)
        try:
            loaded = update.result(timeout_s=timeout_s)
        except Aborted as error:
            raise RuntimeError(str(error)) from None
        receipt = receipt_of_adapter(files)
        self.receipts, expected = [receipt], {"version": version, "receipt": receipt}
        for number, status in zip(self.members, loaded, strict=True):
            if status != expected:
                raise RuntimeError(
                    f"engine {number} has adapters of version {status['version']} and receipt"
                    f" {status['receipt']} instead of version {version} and {receipt}"
                )
        return {"publish/bytes": float(sum(map(len, files.values()))) * len(loaded)}
