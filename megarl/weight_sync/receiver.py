"""The engine's end of the wire: a vLLM weight-transfer engine that rebuilds vLLM's model one module
at a time.

vLLM imports this module in its workers, as the home of `worker_extension_cls`, and thereby
registers the engine. The trainer never imports it: vLLM's CPU worker patches torch.
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
from megarl.weight_sync.bucket_receiver import InitInfo, Intake, Modules, UpdateInfo, deadline_watch
from megarl.weight_sync.checksums import signed
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted
from megarl.weight_sync.transports.registry import RECEIVERS

NAME = "megarl"
"""The vLLM weight-transfer backend that this file registers."""


def nothing(problem: str) -> dict[str, Any]:
    """What a worker answers that holds no version: why, if it should."""
    return {"version": -1, "digests": [], "seconds": {}, "problem": problem}


class EngineEnd:
    """Mixed into vLLM's worker (`worker_extension_cls`): what a trainer asks a worker about its
    weights.
    """

    weight_transfer_engine: Any
    """The worker's own."""

    def megarl_owned(self) -> dict[str, Any]:
        """{version, digests: of each tensor, seconds: of each kind of work, problem} of what this
        worker was told to do last.
        """
        return self.weight_transfer_engine.owned


class ReshardEngine(WeightTransferEngine):
    """Takes in one rank's own shard."""

    init_info_cls = InitInfo  # pyright: ignore[reportAssignmentType]
    update_info_cls = UpdateInfo  # pyright: ignore[reportAssignmentType]
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.owned = nothing("")
        self._receiver: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Make the route, compare it with the model that is there, and connect. What goes wrong is
        in `owned`.
        """
        # Nothing is raised here and below: vLLM's executor would leave the other ranks' answers for
        # the next call.
        try:
            self._connect(init_info)
            self.owned = nothing("")
        except Exception as error:
            self.owned = nothing(str(error))

    def _connect(self, init_info: InitInfo) -> None:
        self.shutdown()
        spec, rank = RouteSpec(**init_info.spec), get_tensor_model_parallel_rank()
        route = Route.of(spec, parameter_table(self.model_config.hf_config.to_dict()))
        self._compare(route.owned(spec.image(init_info.engine, rank)).sizes)
        self._receiver = RECEIVERS[init_info.transport](
            route, init_info.engine, rank, init_info.init_info
        )
        self._intake = Intake(route, self._receiver, spec.image(init_info.engine, rank))
        self._route = route
        self._plain = self._find_plain()

    def _compare(self, sizes: dict[str, int]) -> None:
        """The table describes exactly this model's parameters; raises `ValueError` with the first
        that differs.
        """
        there = {}
        for path, layer in self.model.named_modules():
            if path != "lm_head" or not self._is_tied():
                there |= {
                    f"{path}.{leaf}": owned.numel() for leaf, owned in self._raw(layer).items()
                }
        for name in sorted(there.keys() | sizes.keys()):
            if there.get(name) != sizes.get(name):
                raise ValueError(
                    f"the engine's model and its parameter table differ at {name}:"
                    f" {there.get(name)} numbers there, {sizes.get(name)} in the table; correct the"
                    " family's entry in megarl/weight_sync/families.py"
                )

    def _raw(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """A layer's parameters as they were before the engine repacked them."""
        now = {name: owned for name, owned in layer._parameters.items() if owned is not None}
        return now | {
            name: owned
            for name, owned in get_layerwise_info(layer).restore_metadata[0].items()
            if name in now
        }

    def start_weight_update(self) -> None:
        if self._receiver is None:
            raise RuntimeError(
                "the engine was not told where its weights come from (init_weight_transfer_engine)"
            )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take in a version; what goes wrong is in `owned`."""
        self.owned = nothing("the version was not taken in to the end")
        try:
            self._receive(update_info)
        except Aborted:
            self.owned = nothing(GIVEN_UP)
        except Exception as error:
            self.owned = nothing(f"{type(error).__name__}: {error}")

    def _receive(self, update_info: UpdateInfo) -> None:
        route = self._route
        seconds: dict[str, float] = {"wait": 0.0, "digest": 0.0, "install": 0.0}
        digests, watch = [0] * len(route.tensors), deadline_watch(update_info.timeout_s)
        self._receiver.begin(update_info.version)
        modules = Modules(self._intake.owned.sizes)
        for bucket in route.buckets:
            buffers = self._intake.take(bucket, watch, seconds)
            started_at = time.perf_counter()
            for path, values in modules.complete(self._write(buffers, bucket), bucket):
                self._install(self.model.get_submodule(path), values)
            seconds["install"] += time.perf_counter() - started_at
            self._intake.digest(bucket, self._written(buffers, bucket), digests, seconds)
            self._receiver.release(bucket)
        started_at = time.perf_counter()
        for path in dict.fromkeys(name.rpartition(".")[0] for name in self._plain):
            self._repack(self.model.get_submodule(path))
        seconds["install"] += time.perf_counter() - started_at
        self.owned = nothing("") | {
            "version": update_info.version,
            "digests": [signed(value) for value in digests],
            "seconds": seconds,
        }

    def _write(self, buffers: dict[str, torch.Tensor], bucket: Bucket) -> dict[str, torch.Tensor]:
        """Copy what runs as it is received into what runs; returns the rest."""
        for name, flat in buffers.items():
            if name in self._plain:
                self._plain[name][bucket.starts[name] : bucket.starts[name] + len(flat)] = flat
        return {name: flat for name, flat in buffers.items() if name not in self._plain}

    def _written(self, buffers: dict[str, torch.Tensor], bucket: Bucket) -> dict[str, torch.Tensor]:
        """What the engine holds of a bucket: the running parameters; what it received, where they
        cannot be compared with that.

        They cannot where a layer runs repacked, or on another kind of device: digests are made
        where the transport's bytes are.
        """
        found = dict(buffers)
        for name, flat in buffers.items():
            running = self._plain.get(name)
            if running is not None and running.device.type == flat.device.type:
                found[name] = running[bucket.starts[name] : bucket.starts[name] + len(flat)]
        return found

    def _find_plain(self) -> dict[str, torch.Tensor]:
        """Parameters that run as they are received, flat: those of modules of which none is
        repacked.
        """
        found = {}
        for path, layer in self.model.named_modules():
            raw, running = (
                self._raw(layer),
                {name: owned for name, owned in layer._parameters.items() if owned is not None},
            )
            alike = all(
                owned.shape == raw[name].shape
                and owned.dtype == self._route.dtype
                and owned.is_contiguous()
                for name, owned in running.items()
            )
            if alike and (path != "lm_head" or not self._is_tied()):
                found |= {f"{path}.{name}": owned.data.view(-1) for name, owned in running.items()}
        return found

    def _install(self, layer: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Rebuild one module that runs repacked from its raw parameters, which are only read: what
        runs keeps its addresses.
        """
        raw = self._raw(layer)
        running: Any = get_layer_params_buffers(layer)
        transient = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, get_layerwise_info(layer))
        for name, flat in values.items():
            value = flat.view(raw[name].shape).to(self.device)
            if layer._parameters[name] is running[0].get(name):  # a bias: it is never taken away
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
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        if self._is_tied():
            # The tied head shares the embedding's storage but, on CPU, multiplies with its own
            # packed copy of it.
            self._repack(self.model.lm_head)  # pyright: ignore[reportArgumentType]

    def _is_tied(self) -> bool:
        hf = self.model_config.hf_text_config
        return bool(getattr(hf, "tie_word_embeddings", False)) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


WeightTransferEngineFactory.register_engine(NAME, ReshardEngine)
