"""A role: one model of a run (policy, reference, critic, reward model) on a mesh of ranks.

    backbone + head + optional optimizer        Role("reference", ..., optimizer_steps=None)

A loop makes the roles it needs. A frozen role scores: `role.score(batch, packed)` returns a column,
one float32 for each token of this rank's samples. A role with an optimizer is trained by
`megarl.trainer.step.optimizer_step` on such columns.
"""

from __future__ import annotations

import contextlib
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
from megarl.trainer.packing import pack_mini_batch, pack_shared
from megarl.trainer.zero import TrainEngine
from megarl.types import MicroBatch, Samples, StepBatch

Column = list[torch.Tensor]
"""A per-token result for one batch: for each mini-batch a float32 tensor [T], of hidden states
[T, H], over the tokens of this data-parallel rank's samples. It is 0 for tokens that the policy did
not generate. Ranks with the same samples have the same column."""


class Role:
    """One model of a run (policy, reference, critic, teacher or reward model) on this rank, under
    DeepSpeed ZeRO. `pack` or `pack_step` makes its inputs, `score` runs it without gradients; with
    an optimizer, `megarl.trainer.step.optimizer_step` trains it. All ranks of `mesh` create it and
    call its methods together. `name`: for messages. `head`: what it computes: "logprobs", "value"
    (a number for each token), "scalar" (one for each sample) or "states" (last hidden states).
    `optimizer_steps`: of the whole run, for the learning-rate schedule; None makes a frozen model.
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
        """All ranks of `mesh` create the role together.

        `optimizer_steps`: optimizer steps of the whole run, for the learning-rate schedule; None
        makes a frozen role without an optimizer, which has adapters only if `training.lora` names
        an adapter to start from. `training` sets precision, ZeRO stage and optimizer. Raises
        `UserError` on every rank if a weight is not finite.
        """
        if optimizer_steps is None and not training.lora.adapter:  # new adapters change nothing
            training = replace(training, lora=LoraConfig())
        self.name, self.mesh, self.device, self.training = name, mesh, device, training
        self.head: HeadName = head
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
        if broken := self.engine.broken_weight():
            source = training.lora.adapter if "lora_" in broken else ""
            raise UserError(
                f"the weight {broken} of the {name} has a value that is not finite; fetch"
                f" {source or model.path} again, or choose another"
            )
        self._prove_attention()

    def _prove_attention(self) -> None:
        """Compare the attention kernel of variable length, where one is used, with float64, for the
        heads of every layer on this rank: by a forward pass of two tokens without gradients. Raises
        `RuntimeError` if the kernel is wrong.

        The first training pass is too late, because the comparison computes gradients, which fails
        inside a layer with gradient checkpointing.
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
        """{Hugging Face name: shape} of all weights, as they are before any sharding, without LoRA
        adapters.
        """
        return self.engine.module.shapes()

    @property
    def shards(self) -> dict[str, Shard]:
        """{parameter name: which indices of which dimension each tensor-parallel rank holds},
        without LoRA adapters. A parameter without an entry is held whole by every tensor-parallel
        rank.
        """
        shards = self.engine.module.shards
        return {name: shard for name, shard in shards.items() if not is_adapter(name)}

    @property
    def windows(self) -> list[int | None]:
        """For each layer of the model, in order: the width of its sliding-window attention in
        tokens, or None if it attends to all earlier tokens.
        """
        return self.engine.module.windows

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage for this model, 0 to 3."""
        return self.training.zero_stage

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{Hugging Face name: flat tensor} of this rank's part of every weight: its tensor-parallel
        shard, and under ZeRO 3 its slice of that shard. The tensors are the model's own memory, not
        copies; only where there are LoRA adapters, these are merged into a copy. All ranks of the
        mesh call it together, as adapters are gathered.
        """
        return self.engine.owned()

    def pack(self, samples: Samples, micro_batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Concatenate the samples of a mini-batch into packed sequences (micro-batches) on this
        rank's device. `micro_batches`: for each packed sequence, the indices of its samples in
        `samples`. With sequence parallelism this rank gets its part of each; all these ranks pass
        the same arguments.
        """
        training = self.training
        return pack_mini_batch(
            *(samples, micro_batches, self.device, self.mesh.sequence),
            *(training.sequence.cut, training.share_prefix, self.windows),
        )

    def pack_step(self, batch: StepBatch) -> list[list[MicroBatch]]:
        """For each mini-batch of a step, this rank's packed sequences (micro-batches), as `score`
        and the trainers take them in their argument `packed`.
        """
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
    ) -> Column:
        """Run the model on one step's samples without gradients. Returns a column: for each
        mini-batch a float32 tensor [T] over the tokens of this rank's samples, with a number for
        each token that the policy generated and 0 elsewhere. By head: log-probs at `temperature`,
        the divisor of the logits; values; with "scalar" the score of each sample, at its last
        token; with "states" hidden states [T, H] in the model's dtype. The entries of the first
        `skip` mini-batches stay 0.

        `packed`: what `pack_step` returned for `batch`. All ranks of the mesh call it together.
        """
        kind = "logprobs" if self.name == "policy" else "score"
        with activity(f"{self.head} of the {self.name}", kind=kind):
            parts = enumerate(zip(batch.samples, packed, strict=True))
            return [
                self._scored(one, micro_batches if number >= skip else (), temperature)
                for number, (one, micro_batches) in parts
            ]

    def _scored(
        self, samples: Samples, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> torch.Tensor:
        """The column of one mini-batch, 0 for tokens that are not in `micro_batches`."""
        width, dtype = (), torch.float32
        if self.head == "states":
            text = self.engine.module.model.config.get_text_config()
            width, dtype = (text.hidden_size,), DTYPES[self.training.dtype]
        found = torch.zeros(len(samples.token_ids), *width, dtype=dtype, device=self.device)
        last = dict(zip(samples.ids.tolist(), (samples.offsets[1:] - 1).tolist(), strict=True))
        for micro in micro_batches:
            output = self.engine(micro, temperature)
            if self.head == "scalar":
                scores, ids = output
                found[[last[name] for name in ids.tolist()]] = scores
                continue
            found[micro.places[micro.mask]] = output[0] if isinstance(output, tuple) else output
        # Each sequence rank has filled its own tokens.
        return all_reduce(found, self.mesh.sequence)

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """Float32 log-probs [M], at temperature 1, of the tokens of `samples` that have `mask`
        True, in their order, without gradients. All ranks of the mesh call it together with the
        same samples and get the same result.
        """
        return self.token_statistics(samples)[0]

    @torch.no_grad()
    def token_statistics(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropies [M]), float32 at temperature 1, of the tokens of `samples` that
        have `mask` True, in their order, without gradients. All ranks of the mesh call it together
        with the same samples and get the same result.
        """
        sequence = self.mesh.sequence
        micro = pack_shared(samples, self.device, sequence, self.training.sequence.cut)
        mine = self.engine(micro, 1.0)
        found = torch.zeros(3, len(samples.token_ids), dtype=mine[0].dtype, device=self.device)
        place = micro.places[micro.mask]
        found[0, place], found[1, place], found[2, place] = *mine, 1.0
        whole = all_reduce(found, sequence)
        return whole[0][whole[2] > 0], whole[1][whole[2] > 0]

    def adapter_files(self) -> dict[str, bytes]:
        """{file name: content} of the LoRA adapters in PEFT's format: adapter_config.json and
        adapter_model.safetensors. All ranks of the mesh call it together; each gets the result.
        """
        return adapter_bytes(self.engine.whole_adapters(), self.training.lora, base=None)

    def keep_adapters(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Copy the LoRA adapters as they are now. Returns a function that makes a context manager,
        in whose block the model computes with this copy instead of what it has learnt or loaded
        since. All ranks of the mesh call `keep_adapters` together, and enter and leave the blocks
        together.
        """
        return self.engine.keep_adapters()

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """A context manager in whose block the model computes with the base weights alone, without
        LoRA adapters; it changes nothing for a model that has none. All ranks of the mesh enter it
        together.
        """
        adapters = self.engine.module.adapters
        return contextlib.nullcontext() if adapters is None else adapters.off()

    def destroy(self) -> None:
        """Release DeepSpeed's hooks and the memory of the model; the object cannot be used
        afterwards.
        """
        self.engine.destroy()
