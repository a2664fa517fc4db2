"""A role: one model of a run (policy, reference, critic, reward model) on a mesh of ranks.

    backbone + head + optional optimizer        Role("reference", ..., optimizer_steps=None)

A frozen role scores samples. `megarl.trainer.step.optimizer_step` trains a role with an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.checkpoints.adapter_files import adapter_bytes
from megarl.errors import UserError
from megarl.kernels.packed_attention import varlen_kernel
from megarl.parallel.collectives import all_reduce
from megarl.parallel.deepspeed_world import confine
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig, ModelConfig, TrainingConfig
from megarl.system.spans import activity
from megarl.trainer.build import DTYPES, build_network
from megarl.trainer.compilation import drop_stale_locks
from megarl.trainer.heads import HeadName
from megarl.trainer.lora import is_adapter
from megarl.trainer.packing import pack_shared
from megarl.trainer.zero import TrainEngine
from megarl.types import MicroBatch, Samples, StepBatch

Column = list[torch.Tensor]
"""For each mini-batch a float32 tensor [T], or hidden states [T, H], over the tokens of this
data-parallel rank's samples, 0 for tokens that the policy did not generate. Ranks with the same
samples have the same column."""


class Role:
    """One model of a run on this rank, under DeepSpeed ZeRO. Its methods are collective over
    `mesh`.
    """

    def __init__(
        self,
        name: str,
        *,
        model: ModelConfig,
        training: TrainingConfig,
        mesh: ProcessMesh,
        device: torch.device,
        seed: int,
        head: HeadName = "logprobs",
        optimizer_steps: int | None = None,
    ) -> None:
        """Load the model. `head`: what it computes from its hidden states (`megarl.trainer.heads`).
        `optimizer_steps`: their number in the whole run, for the learning-rate schedule; None for
        a frozen model, which has LoRA adapters only if `training.lora.adapter` names them. Raises
        `UserError` on every rank if a weight is not finite.
        """
        if optimizer_steps is None and not training.lora.adapter:  # new adapters change nothing
            training = replace(training, lora=LoraConfig())
        self.name, self.mesh, self.device, self.training = name, mesh, device, training
        self.head: HeadName = head
        self.replays_experts = False
        """Whether its routers take the experts that engines report with samples."""
        drop_stale_locks()  # DeepSpeed compiles at first use, and would wait for them
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            confine(mesh)
        self.engine = TrainEngine(
            build_network(
                model,
                training,
                mesh,
                device,
                seed=seed,
                head=head,
                # A frozen model that scores was trained to; a new score would stay 0.
                needs_score=head == "scalar" and optimizer_steps is None,
            ),
            training,
            mesh,
            device,
            total_steps=optimizer_steps or 0,
            trains=optimizer_steps is not None,
        )
        if weight := self.engine.broken_weight():
            source = training.lora.adapter if "lora_" in weight else ""
            raise UserError(
                f"the weight {weight} of the {name} has a value that is not finite; fetch"
                f" {source or model.path} again, or choose another"
            )
        self._prove_attention()

    def _prove_attention(self) -> None:
        """Compare the attention kernel of variable length, if used, with float64, by a forward
        pass. Raises `RuntimeError` if it is wrong.

        A training pass is too late: the comparison computes gradients, which fails inside a layer
        with gradient checkpointing.
        """
        dtype = DTYPES[self.training.dtype]
        kernel = varlen_kernel(self.training.attention, dtype, self.device)
        # Rows that are cut over ranks have other kernels.
        if kernel is not None and self.mesh.sequence.size == 1:
            (micro,) = self.pack(Samples.one(0, [0, 0]), [[0]])
            with torch.no_grad():
                self.engine(micro, 1.0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{published name: whole shape} of all weights without LoRA adapters."""
        return self.engine.module.shapes()

    @property
    def shards(self) -> dict[str, Shard]:
        """{parameter name: shard} of what ranks split, without LoRA adapters."""
        shards = self.engine.module.shards
        return {name: shard for name, shard in shards.items() if not is_adapter(name)}

    @property
    def fused(self) -> dict[str, list[tuple[str, tuple[int, int]]]]:
        """{parameter: (name, shape) of the published tensors joined in it}, such as experts'."""
        return self.engine.module.fused

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window in tokens, or None."""
        return self.engine.module.windows

    @property
    def zero_stage(self) -> int:
        return self.training.zero_stage

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{published name: flat tensor} of this rank's part of every weight, as
        `TrainEngine.owned`.
        """
        return self.engine.owned()

    def pack(self, samples: Samples, micro_batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """The samples of a mini-batch as packed sequences on this rank's device. `micro_batches`:
        each one's samples. Sequence-parallel ranks pass the same arguments; each gets its part.
        """
        training = self.training
        if not self.replays_experts:
            samples = dataclasses.replace(samples, experts=None)
        cut, share = training.sequence.cut, training.share_prefix
        return [
            pack_shared(
                *(samples.select(chosen), self.device, self.mesh.sequence, cut),
                *(samples.places(chosen), share, self.windows),
            )
            for chosen in micro_batches
        ]

    def pack_step(self, batch: StepBatch) -> list[list[MicroBatch]]:
        """For each mini-batch of a step, this rank's packed sequences."""
        pairs = zip(batch.samples, batch.micro_batches, strict=True)
        return [self.pack(samples, micro_batches) for samples, micro_batches in pairs]

    @torch.no_grad()
    def score(
        self,
        batch: StepBatch,
        packed: Sequence[Sequence[MicroBatch]],
        *,
        temperature: float = 1.0,
        skip: int = 0,
        keeps_experts: bool = False,
    ) -> Column:
        """A column over a step's samples, without gradients. By head: log-probs at `temperature`,
        the divisor of the logits; values; with "scalar" each sample's score, at its last token;
        with "states" hidden states [T, H] in the model's dtype. The first `skip` mini-batches stay
        0. `keeps_experts`: put the experts that the routers choose into the others of `packed`.
        """
        span_kind = "logprobs" if self.name == "policy" else "score"
        with activity(f"{self.head} of the {self.name}", kind=span_kind):
            parts = enumerate(zip(batch.samples, packed, strict=True))
            return [
                self._scored(
                    samples, micro_batches if number >= skip else (), temperature, keeps_experts
                )
                for number, (samples, micro_batches) in parts
            ]

    def _scored(
        self,
        samples: Samples,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        keeps_experts: bool = False,
    ) -> torch.Tensor:
        """The column of one mini-batch, 0 for tokens outside `micro_batches`."""
        width, dtype = (), torch.float32
        if self.head == "states":
            text = self.engine.module.model.config.get_text_config()
            width, dtype = (text.hidden_size,), DTYPES[self.training.dtype]
        column = torch.zeros(len(samples.token_ids), *width, dtype=dtype, device=self.device)
        last = dict(zip(samples.ids.tolist(), (samples.offsets[1:] - 1).tolist(), strict=True))
        routers = self.engine.module.routers
        for index, micro in enumerate(micro_batches):
            routers.used = [] if keeps_experts else None
            output = self.engine(micro, temperature)
            if routers.used is not None:
                assert isinstance(micro_batches, list)
                experts = torch.stack(routers.used, 1).to(torch.int16)
                micro_batches[index] = dataclasses.replace(micro, experts=experts)
                routers.used = None
            if self.head == "scalar":
                scores, ids = output
                column[[last[name] for name in ids.tolist()]] = scores
                continue
            column[micro.places[micro.mask]] = output[0] if isinstance(output, tuple) else output
        # Each sequence rank has filled its own tokens.
        return all_reduce(column, self.mesh.sequence)

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """[M] float32 log-probs at temperature 1 of the tokens that have `mask` True, without
        gradients. All ranks pass the same samples.
        """
        return self.token_statistics(samples)[0]

    @torch.no_grad()
    def token_statistics(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies), as `logprobs`."""
        sequence = self.mesh.sequence
        micro = pack_shared(samples, self.device, sequence, self.training.sequence.cut)
        statistics = self.engine(micro, 1.0)
        shares = torch.zeros(
            3, len(samples.token_ids), dtype=statistics[0].dtype, device=self.device
        )
        index = micro.places[micro.mask]
        shares[0, index], shares[1, index], shares[2, index] = *statistics, 1.0
        whole = all_reduce(shares, sequence)
        return whole[0][whole[2] > 0], whole[1][whole[2] > 0]

    def adapter_files(self) -> dict[str, bytes]:
        """{file name: content} of the LoRA adapters in PEFT's format, on every rank."""
        return adapter_bytes(self.engine.whole_adapters(), self.training.lora, base=None)

    def keep_adapters(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """As `TrainEngine.keep_adapters`."""
        return self.engine.keep_adapters()

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model computes without LoRA adapters, if it has any."""
        adapters = self.engine.module.adapters
        return contextlib.nullcontext() if adapters is None else adapters.off()

    def destroy(self) -> None:
        """Release DeepSpeed's hooks and the model's memory; the object cannot be used
        afterwards.
        """
        self.engine.destroy()
