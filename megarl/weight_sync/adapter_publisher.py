"""Publish only a policy's LoRA adapters: engines have read the base model from disk, and vLLM adds
the adapters as it computes.

    trainer ranks: A and B --gathered on rank 0--> files in PEFT's format --as bytes--> every engine
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Protocol

import torch

from megarl.checkpoints.adapter_files import write_adapter
from megarl.errors import EngineLost
from megarl.parallel.collectives import gather_objects
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.config import LoraConfig
from megarl.weight_sync.config import WeightSyncConfig
from megarl.weight_sync.contracts import Engines, SendsWeights
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.publication import Publication
from megarl.weight_sync.transports.base import Aborted


class SendsAdapters(SendsWeights, Protocol):
    """A trained model whose adapters can be published."""

    def whole_adapters(self) -> dict[str, torch.Tensor]:
        """{parameter name: whole tensor} of all A and B, on every rank; collective."""
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
        lora: LoraConfig,
    ) -> None:
        """`engines` are started with the base model's weights and `lora.rank`. `layouts`: those of
        trainer and engines, for messages.
        """
        super().__init__(
            config, policy=policy, engines=engines, mesh=mesh, probe=probe, layouts=layouts
        )
        self._sender, self._lora = policy, lora

    def _attempt(self, version: int) -> tuple[str, list[int], dict[str, float]]:
        tensors, metrics = self._sender.whole_adapters(), {}
        problem, lost = "", list[int]()
        try:
            if self.engines is not None:
                metrics = self._send(version, tensors)
        except EngineLost as error:
            problem, lost = f"publishing version {version} failed: {error}", [*error.engines]
        except Exception as error:  # gathered below, so that no rank waits for this one
            problem = f"publishing version {version} failed: {error}"
        for message, engines in gather_objects((problem, lost), self.mesh.world):
            if message:
                return message, engines, {}
        return "", [], metrics

    def _send(self, version: int, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """On rank 0, send the adapters to every engine and wait until each has loaded them."""
        assert self.engines is not None
        with tempfile.TemporaryDirectory(prefix="megarl_adapter_") as folder:
            written = write_adapter(Path(folder), tensors, self._lora, base=None)
            files = {path.name: path.read_bytes() for path in written}
        timeout_s = self.config.timeout_s
        deadline = time.monotonic() + timeout_s
        update = self.engines.load_adapter(version, files, timeout_s=timeout_s)
        try:
            loaded = update.result(timeout_s=max(0.0, deadline - time.monotonic()))
        except Aborted as error:
            raise RuntimeError(str(error)) from None
        wrong = [number for number, found in enumerate(loaded) if found["version"] != version]
        if wrong:
            raise RuntimeError(f"engine {wrong[0]} has another version than {version}")
        return {"publish/bytes": float(sum(map(len, files.values()))) * len(loaded)}
