"""Weights through memory that trainer rank 0 and the engines of one host share. Both ends are in this file.

    rank 0: (name, tensor) ... -> one memory region + a manifest      engine worker: manifest -> vLLM's own loaders

The region is an anonymous memory file reached through rank 0's /proc entry, so nothing is left behind however a run
ends. The receiving end is a vLLM weight-transfer engine; importing this module inside an engine registers it (vLLM does
that when it loads `worker_extension_cls`). The trainer never imports vLLM: its CPU worker patches torch.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

NAME = "megarl_shared_memory"
ALIGN = 64
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The contiguous CPU tensor's bytes, uncopied."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def digest(tensor: torch.Tensor) -> str:
    """Content digest of a CPU tensor (BLAKE3, 128 bits)."""
    content = _bytes_of(tensor)
    threads = blake3.AUTO if len(content) > 2**24 else 1
    return blake3(content, max_threads=threads).hexdigest(16)


def total_digest(table: dict[str, str]) -> str:
    """One digest of a whole model: over the sorted names and their digests."""
    return blake3("\n".join(f"{name} {table[name]}" for name in sorted(table)).encode()).hexdigest(16)


# ---------------------------------------------------------------------------------------------------- the trainer's end


class Sender:
    """Rank 0's end: writes each version into one memory region that engines map."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """What engines hold; weights are converted on the way."""
        self._fd = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, sizes: dict[str, torch.Size]) -> dict[str, Any]:
        """Copy `weights` into the region and return the manifest engines need to read it.

        `sizes` says beforehand what will come: every name once. Raises if `weights` differs from it.
        """
        total = sum(-(-size.numel() * self.dtype.itemsize // ALIGN) * ALIGN for size in sizes.values())
        if self._map is None or len(self._map) < total:
            if self._map is not None:
                self._map.close()
            os.ftruncate(self._fd, total)
            self._map = mmap.mmap(self._fd, total)
        region = torch.frombuffer(self._map, dtype=torch.uint8)
        entries, offset = [], 0
        for name, tensor in weights:
            if name not in sizes or tensor.shape != sizes[name]:
                raise RuntimeError(f"weight {name} {tuple(tensor.shape)} was not announced for version {version}")
            count = tensor.numel() * self.dtype.itemsize
            target = region[offset : offset + count].view(self.dtype).view(tensor.shape)
            target.copy_(tensor)
            entries.append({"name": name, "shape": list(tensor.shape), "offset": offset, "digest": digest(target)})
            offset += -(-count // ALIGN) * ALIGN
        if len(entries) != len(sizes):
            missing = sorted(set(sizes) - {str(entry["name"]) for entry in entries})
            raise RuntimeError(f"version {version} lacks the weights {missing[:3]}")
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "size": total,
            "dtype": str(self.dtype).removeprefix("torch."),
            "version": version,
            "entries": entries,
            "digest": total_digest({str(entry["name"]): str(entry["digest"]) for entry in entries}),
        }

    def close(self) -> None:
        """Release the region; engines that mapped it keep their view until they unmap."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ----------------------------------------------------------------------------------------------------- the engine's end


@dataclass
class InitInfo:
    """Nothing to agree on beforehand: every manifest is complete."""


@dataclass
class UpdateInfo:
    """The manifest, as `Sender.write` returned it."""

    path: str
    size: int
    dtype: str
    version: int
    entries: list[dict[str, Any]]
    digest: str


class EngineEnd:
    """Mixed into vLLM's worker (`worker_extension_cls`): what a trainer asks a worker about its weights."""

    def megarl_digest(self) -> dict[str, Any]:
        """Version and digest of what this worker loaded last."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"version": engine.version, "digest": engine.digest}


def _register() -> None:
    """Define the receiving engine and make it known to vLLM; does nothing outside of an engine process."""
    if "vllm" not in sys.modules:
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    class SharedMemoryEngine(WeightTransferEngine):
        """Reads a manifest's weights from the mapped region through the model's own loaders."""

        init_info_cls = InitInfo  # pyright: ignore[reportAssignmentType]
        update_info_cls = UpdateInfo  # pyright: ignore[reportAssignmentType]
        supports_draft_weight_update = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.version, self.digest = -1, ""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            """Nothing yet: a damaged version must be refused before the old weights are touched."""

        def receive_weights(self, update_info: UpdateInfo) -> None:
            fd = os.open(update_info.path, os.O_RDONLY)
            try:
                region = mmap.mmap(fd, update_info.size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
            finally:
                os.close(fd)
            whole = torch.frombuffer(region, dtype=torch.uint8)
            dtype, tensors, found = DTYPES[update_info.dtype], {}, {}
            for entry in update_info.entries:
                name, shape, offset = entry["name"], entry["shape"], entry["offset"]
                count = torch.Size(shape).numel() * dtype.itemsize
                tensors[name] = whole[offset : offset + count].view(dtype).view(shape)
                found[name] = digest(tensors[name])
                if found[name] != entry["digest"]:
                    raise RuntimeError(
                        f"weight {name} of version {update_info.version} arrived damaged: its digest is {found[name]}, "
                        f"the trainer sent {entry['digest']}"
                    )
            initialize_layerwise_reload(self.model)
            # Copies: the loaders keep what they are given until a layer is complete; the region is rewritten by then.
            model: Any = self.model
            model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors.items())
            unwritten = self._unwritten()
            if unwritten:
                raise RuntimeError(f"version {update_info.version} leaves weights of the engine unwritten: {unwritten[:3]}")
            self.version, self.digest = update_info.version, total_digest(found)

        def _unwritten(self) -> list[str]:
            """Layers that have got fewer numbers than they hold; rows that pad a vocabulary may stay as they are."""
            missing = []
            for name, layer in self.model.named_modules():
                info = get_layerwise_info(layer)
                if not info.can_load() or not list(layer.parameters(recurse=False)) or name in self._tied():
                    continue
                if not (isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0):
                    missing.append(f"{name} ({info.load_numel} of {info.load_numel_total})")
            return missing

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self._tied():
                # The tied head shares the embedding's storage but, on CPU, multiplies with its own packed copy of it.
                head: Any = self.model.lm_head
                head.quant_method.process_weights_after_loading(head)

        def _tied(self) -> set[str]:
            """Names of engine layers whose weight is another's."""
            hf = self.model_config.hf_text_config
            return {"lm_head"} if getattr(hf, "tie_word_embeddings", False) and hasattr(self.model, "lm_head") else set()

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(NAME, SharedMemoryEngine)


_register()
