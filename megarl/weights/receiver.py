"""The engine's side of weight synchronisation: a weight-transfer engine in vLLM's workers.

Parameters that vLLM runs as the checkpoint has them are overwritten in place; repacked modules are
rebuilt one at a time. vLLM imports this file through `worker_extension_cls`. The trainer never
does, because vLLM's CPU worker patches torch.
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

from megarl.parallel.reshard.buckets import Bucket
from megarl.system.spans import activity
from megarl.weights.bucket_receiver import BucketReceiver, InitInfo, Modules, UpdateInfo
from megarl.weights.parameters import refuse_other_model
from megarl.weights.transports.base import GIVEN_UP, Aborted

NAME = "megarl"
"""Name of the vLLM backend that this file registers."""


def not_loaded(problem: str) -> dict[str, Any]:
    """Status of an engine rank without a complete version. `problem`: for the trainer's error
    message.
    """
    return {"version": -1, "digests": [], "seconds": {}, "problem": problem}


def _parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of the module itself, not of submodules."""
    return {name: value for name, value in layer._parameters.items() if value is not None}


class WeightSyncWorker:
    """vLLM adds it to each rank's worker; the engine calls its methods by `collective_rpc`."""

    weight_transfer_engine: Any

    def megarl_weight_status(self) -> dict[str, Any]:
        """Outcome of the last update: "version" (-1: none is complete), "digests" (a signed 64-bit
        int for each tensor of the table), "seconds" ({"wait", "digest", "install"}), "problem"
        ("" on success).
        """
        return self.weight_transfer_engine.status


class ReshardEngine(WeightTransferEngine):
    """Receives one engine rank's shard and installs it in the running model; vLLM calls its
    methods.
    """

    init_info_cls = InitInfo  # pyright: ignore[reportAssignmentType]
    update_info_cls = UpdateInfo  # pyright: ignore[reportAssignmentType]
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.status = not_loaded("")
        self._buckets: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer and check that its table fits the running model. Errors go to
        `status`.
        """
        # After an exception vLLM's executor would read the other ranks' answers as those of the
        # next call, so errors go into `status`.
        try:
            self._connect(init_info)
            self.status = not_loaded("")
        except Exception as error:
            self.status = not_loaded(str(error))

    def _connect(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._buckets = BucketReceiver(init_info, get_tensor_model_parallel_rank())
        self._compare(self._buckets.route.owned.sizes)
        self._plain = self._find_plain()

    def _compare(self, sizes: dict[str, int]) -> None:
        """Compare the engine's parameters with `sizes`, the elements of each by the parameter
        table. Raises `ValueError` if one differs, or is float32 while weights travel in 16 bit.
        """
        dtype = self._buckets.route.dtype
        for name, value in self.model.named_parameters():
            if value.dtype == torch.float32 != dtype:
                raise ValueError(
                    f"the engine's {name} is float32, and weights travel in {dtype}; set"
                    " rollout.engine.dtype to 'float32'"
                )
        in_table = {name: f"{size} elements" for name, size in sizes.items()}
        in_model, first = {}, {name for name, _ in self.model.named_parameters()}
        for path, layer in self.model.named_modules():
            if path != "lm_head" or not self._is_tied():
                in_model |= {
                    f"{path}.{leaf}": f"{value.numel()} elements"
                    for leaf, value in self._raw(layer).items()
                    if f"{path}.{leaf}" in first  # experts share the bias of their router
                }
        refuse_other_model(in_table, in_model, "the engine's model")

    def _raw(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """{name: parameter} of a layer before vLLM repacked them."""
        now, before = _parameters(layer), get_layerwise_info(layer).restore_metadata[0]
        return now | {name: value for name, value in before.items() if name in now}

    def start_weight_update(self) -> None:
        """Do nothing; vLLM calls it before `receive_weights`, which does all."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and install a version, while generation is paused. Errors go to `status`."""
        self.status = not_loaded("the version was not received completely")
        try:
            with activity(f"weights {update_info.version}", kind="publish"):
                self._receive(update_info)
        except Aborted:
            self.status = not_loaded(GIVEN_UP)
        except Exception as error:
            self.status = not_loaded(f"{type(error).__name__}: {error}")

    def _receive(self, update_info: UpdateInfo) -> None:
        receiver, version = self._buckets, update_info.version
        modules = Modules(receiver.route.owned.sizes)
        for bucket, buffers in receiver.buckets(update_info.timeout_s):
            started_at = time.perf_counter()
            rest, stored = self._write(buffers, bucket)
            for path, values in modules.complete(rest, bucket):
                self._install(self.model.get_submodule(path), values)
            receiver.seconds["install"] += time.perf_counter() - started_at
            receiver.digest(bucket, stored)
        started_at = time.perf_counter()
        for path in dict.fromkeys(name.rpartition(".")[0] for name in self._plain):
            self._repack(self.model.get_submodule(path))
        receiver.seconds["install"] += time.perf_counter() - started_at
        self.status = not_loaded("") | receiver.status(version)

    def _write(
        self, buffers: dict[str, torch.Tensor], bucket: Bucket
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copy the bucket's parameters that vLLM runs unchanged. Returns (the other buffers, what
        to digest): running parameters, or the received bytes where a layer is repacked or on
        another device type.
        """
        rest, stored = dict(buffers), dict(buffers)
        for name in buffers.keys() & self._plain.keys():
            flat, start = rest.pop(name), bucket.starts[name]
            running = self._plain[name][start : start + len(flat)]
            running.copy_(flat, non_blocking=True)  # the transport waits for it
            if running.device.type == flat.device.type:
                stored[name] = running
        return rest, stored

    def _find_plain(self) -> dict[str, torch.Tensor]:
        """{name: flat parameter} of all modules that vLLM runs as the checkpoint has them."""
        plain = {}
        for path, layer in self.model.named_modules():
            raw, running = self._raw(layer), _parameters(layer)
            alike = all(
                value.shape == raw[name].shape
                and value.dtype == self._buckets.route.dtype
                and value.is_contiguous()
                for name, value in running.items()
            )
            is_packed = self._packs_experts(layer) or (path == "lm_head" and self._is_tied())
            if alike and not is_packed:
                plain |= {f"{path}.{name}": value.data.view(-1) for name, value in running.items()}
        return plain

    def _packs_experts(self, layer: torch.nn.Module) -> bool:
        """Whether vLLM stores these experts in another order, though of the same shape."""
        return self.device.type == "cpu" and hasattr(
            getattr(layer, "quant_method", None), "moe_kernel"
        )

    def _install(self, layer: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Rebuild a module that vLLM repacks from {name: flat tensor}, as vLLM's layer-wise reload
        does. The running tensors keep their addresses, to which compiled graphs refer.
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
            parameter: Any = value.detach()
            parameter.__class__ = raw[name].__class__
            parameter.__dict__.update(raw[name].__dict__)
            layer._parameters[name] = parameter
        for name in running[0].keys() - values.keys():  # another module's
            layer._parameters[name] = running[0][name]
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
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            if self._packs_experts(layer):
                method.moe_kernel = None  # with one, vLLM does not pack again
            method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        """Repack a head that is tied to the embedding."""
        if self._is_tied():
            # On CPU a tied head multiplies with a packed copy of the embedding.
            self._repack(self.model.lm_head)  # pyright: ignore[reportArgumentType]

    def _is_tied(self) -> bool:
        hf = self.model_config.hf_text_config
        return bool(getattr(hf, "tie_word_embeddings", False)) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        if self._buckets is not None:
            self._buckets.receiver.close()
            self._buckets = None


WeightTransferEngineFactory.register_engine(NAME, ReshardEngine)
