"""The engine's side of weight synchronisation: a vLLM weight-transfer engine.

Parameters that vLLM runs as they are stored in checkpoints are overwritten in place. Modules whose
weights vLLM repacks are rebuilt one at a time. vLLM imports this file in its workers through
`worker_extension_cls`, which registers the engine. The trainer never imports it, because vLLM's CPU
worker patches torch.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from megarl.activity.spans import activity
from megarl.parallel.reshard.buckets import Bucket
from megarl.weight_sync.bucket_receiver import (
    BucketReceiver,
    InitInfo,
    Modules,
    UpdateInfo,
    deadline_watch,
)
from megarl.weight_sync.checksums import Digest, signed
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted
from megarl.weight_sync.transports.transport_table import RECEIVERS

NAME = "megarl"
"""Name of the vLLM weight-transfer backend that this file registers."""


def not_loaded(problem: str) -> dict[str, Any]:
    """Status of an engine rank without a complete weight version.

    `problem` is the reason or empty.
    """
    return {"version": -1, "digests": [], "seconds": {}, "problem": problem}


class WeightSyncWorker:
    """A mixin that vLLM adds to the worker of each engine rank (its `worker_extension_cls`). The
    engine actor calls the methods on all ranks by vLLM's `collective_rpc`.
    """

    weight_transfer_engine: Any
    """The worker's `ReshardEngine`, which vLLM creates."""

    def megarl_weight_status(self) -> dict[str, Any]:
        """Outcome of this rank's last weight update, a dict:
        version: weight version that is loaded, -1 if none is complete
        digests: one signed 64-bit integer for each tensor of the parameter table
        seconds: {"wait": s, "digest": s, "install": s}
        problem: error message, empty on success"""
        return self.weight_transfer_engine.status


class ReshardEngine(WeightTransferEngine):
    """Receives one engine rank's shard of the weights and installs it in the running model."""

    init_info_cls = InitInfo  # pyright: ignore[reportAssignmentType]
    update_info_cls = UpdateInfo  # pyright: ignore[reportAssignmentType]
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.status = not_loaded("")
        self._receiver: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Prepare for weights, called by vLLM before the first version: work out which regions of
        which tensors this engine rank receives, check that they fill the running model's
        parameters, and connect to the trainer's transport.

        Errors are not raised but put in `status`.
        """
        # After an exception vLLM's executor would read the other ranks' answers as those of the
        # next call, so errors go into `status`.
        try:
            self._connect(init_info)
            self.status = not_loaded("")
        except Exception as error:
            self.status = not_loaded(str(error))

    def _connect(self, init_info: InitInfo) -> None:
        """As `init_transfer_engine`, but errors are raised."""
        self.shutdown()
        spec, rank = RouteSpec(**init_info.spec), get_tensor_model_parallel_rank()
        table = parameter_table(self.model_config.hf_config.to_dict())
        route = Route.of_destination(spec, table, spec.destination(init_info.engine, rank))
        self._compare(route.owned.sizes)
        self._receiver = RECEIVERS[init_info.transport](
            route, init_info.engine, rank, init_info.init_info
        )
        self._buckets = BucketReceiver(route, self._receiver)
        self._route = route
        self._plain = self._find_plain()

    def _compare(self, sizes: dict[str, int]) -> None:
        """Raise `ValueError` with the first parameter whose size differs between model and route.

        `sizes`: {parameter name: number of elements} according to the parameter table.
        """
        in_model = {}
        for path, layer in self.model.named_modules():
            if path != "lm_head" or not self._is_tied():
                in_model |= {
                    f"{path}.{leaf}": value.numel() for leaf, value in self._raw(layer).items()
                }
        for name in sorted(in_model.keys() | sizes.keys()):
            if in_model.get(name) != sizes.get(name):
                raise ValueError(
                    f"the engine's model and its parameter table differ at {name}:"
                    f" {in_model.get(name)} elements in the model, {sizes.get(name)} in the table;"
                    " correct the family's entry in megarl/weight_sync/families.py"
                )

    def _raw(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """{name: parameter} of a layer as they were before vLLM repacked the weights."""
        now = {name: value for name, value in layer._parameters.items() if value is not None}
        return now | {
            name: value
            for name, value in get_layerwise_info(layer).restore_metadata[0].items()
            if name in now
        }

    def start_weight_update(self) -> None:
        """Called by vLLM before each update.

        Raises `RuntimeError` where no transport is connected.
        """
        if self._receiver is None:
            raise RuntimeError(
                "the engine has no transport to receive weights through; call"
                " init_weight_transfer_engine first"
            )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and install one weight version. Errors are not raised but put in `status`."""
        self.status = not_loaded("the version was not received completely")
        try:
            with activity(f"weights {update_info.version}", kind="publish"):
                self._receive(update_info)
        except Aborted:
            self.status = not_loaded(GIVEN_UP)
        except Exception as error:
            self.status = not_loaded(f"{type(error).__name__}: {error}")

    def _receive(self, update_info: UpdateInfo) -> None:
        """Receive and install one weight version; raises errors, which the caller reports."""
        route = self._route
        seconds: dict[str, float] = {"wait": 0.0, "digest": 0.0, "install": 0.0}
        digests: list[Digest] = [0] * len(route.tensors)
        watch = deadline_watch(update_info.timeout_s)
        modules = Modules(self._route.owned.sizes)
        for bucket, buffers in self._buckets.buckets(update_info.version, watch, seconds):
            started_at = time.perf_counter()
            for path, values in modules.complete(self._write(buffers, bucket), bucket):
                self._install(self.model.get_submodule(path), values)
            seconds["install"] += time.perf_counter() - started_at
            self._buckets.digest(bucket, self._written(buffers, bucket), digests, seconds)
        started_at = time.perf_counter()
        for path in dict.fromkeys(name.rpartition(".")[0] for name in self._plain):
            self._repack(self.model.get_submodule(path))
        seconds["install"] += time.perf_counter() - started_at
        self.status = not_loaded("") | {
            "version": update_info.version,
            "digests": [signed(value) for value in digests],
            "seconds": seconds,
        }

    def _write(self, buffers: dict[str, torch.Tensor], bucket: Bucket) -> dict[str, torch.Tensor]:
        """Copy the bucket's parameters that vLLM runs unchanged; returns the other buffers."""
        for name, flat in buffers.items():
            if name in self._plain:
                running = self._plain[name][bucket.starts[name] : bucket.starts[name] + len(flat)]
                running.copy_(flat, non_blocking=True)  # the transport waits for it
        return {name: flat for name, flat in buffers.items() if name not in self._plain}

    def _written(self, buffers: dict[str, torch.Tensor], bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's buffers as the engine stores them, to be digested.

        Running parameters where possible; the received bytes where a layer is repacked or on
        another kind of device than the transport.
        """
        found = dict(buffers)
        for name, flat in buffers.items():
            running = self._plain.get(name)
            if running is not None and running.device.type == flat.device.type:
                found[name] = running[bucket.starts[name] : bucket.starts[name] + len(flat)]
        return found

    def _find_plain(self) -> dict[str, torch.Tensor]:
        """{name: flat parameter} of all modules that vLLM runs with the checkpoint's parameters."""
        found = {}
        for path, layer in self.model.named_modules():
            raw, running = (
                self._raw(layer),
                {name: value for name, value in layer._parameters.items() if value is not None},
            )
            alike = all(
                value.shape == raw[name].shape
                and value.dtype == self._route.dtype
                and value.is_contiguous()
                for name, value in running.items()
            )
            if alike and (path != "lm_head" or not self._is_tied()):
                found |= {f"{path}.{name}": value.data.view(-1) for name, value in running.items()}
        return found

    def _install(self, layer: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Rebuild a module that vLLM repacks from its checkpoint parameters {name: flat tensor}.

        The repacked weights are copied into the running ones, whose addresses stay the same:
        compiled graphs refer to them. Restoring, repacking and copying follow vLLM's layer-wise
        reload.
        """
        raw = self._raw(layer)
        running: Any = get_layer_params_buffers(layer)
        transient = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, get_layerwise_info(layer))
        for name, flat in values.items():
            value = flat.view(raw[name].shape).to(self.device, non_blocking=True)
            if layer._parameters[name] is running[0].get(name):  # a bias, which is never replaced
                running[0][name].data.copy_(value)
                continue
            made: Any = value.detach()
            made.__class__ = raw[name].__class__
            made.__dict__.update(raw[name].__dict__)
            layer._parameters[name] = made
        self._repack(layer)
        for name, old in running[0].items():
            new: Any = layer._parameters[name]
            if new is not old:
                old.data.copy_(new)
                layer._parameters[name] = old
        for name, old in running[1].items():
            new = layer._buffers.get(name)
            if new is not None and new is not old and not new.is_meta and name not in transient:
                old.data.copy_(new)
            layer.register_buffer(name, old, persistent=name not in transient)

    def _repack(self, layer: torch.nn.Module) -> None:
        """Let vLLM transform a layer's weights, as it does after loading a checkpoint."""
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        """Called by vLLM after each update; repacks a tied output head."""
        if self._is_tied():
            # On CPU a tied head multiplies with a packed copy of the embedding.
            self._repack(self.model.lm_head)  # pyright: ignore[reportArgumentType]

    def _is_tied(self) -> bool:
        """Whether the output head shares the embedding's weight."""
        hf = self.model_config.hf_text_config
        return bool(getattr(hf, "tie_word_embeddings", False)) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        """Close the connection to the trainer."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


WeightTransferEngineFactory.register_engine(NAME, ReshardEngine)
