"""What sending a weight version to the engines (publishing it) has in common for whole weights and
LoRA adapters: what it requires of the trained model and of the inference engines, attempts, engines
that are lost and replaced, and the probe, a fixed text that both sides score.

An attempt has four collectives, of adapters two: rank 0 tells which engines take part and that the
transport is ready, the ranks tell each other how they fared, and add up their digests, and rank 0
tells what came of the checks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from megarl.errors import EngineLost
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.system.console import say
from megarl.system.spans import activity
from megarl.types import Samples
from megarl.weights.probe import Probe


class SendsWeights(Protocol):
    """Interface of a trained model whose weights can be sent to engines; every trainer rank has an
    object for its part of the model.
    """

    @property
    def zero_stage(self) -> int:
        """ZeRO stage with which the model is trained, 0 to 3."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{parameter name: shape of the whole parameter}, also if this rank has only a part."""
        ...

    @property
    def shards(self) -> dict[str, Shard]:
        """How the model's tensor-parallel ranks split its parameters: {parameter name: a `Shard`:
        rank r has the indices [edges[r], edges[r + 1]) of dimension `dim`}. Those that are not
        split are left out.
        """
        ...

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{parameter name: flat tensor} of this rank's part: its whole tensor-parallel shard or,
        under ZeRO 3, its slice of that shard.
        """
        ...

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """[T - 1] log-probs, by the model's present weights, of the tokens of one sequence of T
        tokens, each given those before it; the first token has none. All ranks call it together.
        `samples`: the sequence, as `Samples` (token ids, masks and offsets) with a single sample.
        """
        ...


class Update(Protocol):
    """Interface of one weight update that all engines have begun: check it, or wait for its end.
    Engines are named by their positions in `Engines.members`, also in `EngineLost.engines`.
    """

    def poll(self) -> None:
        """Check the update without waiting. Raises `EngineLost` if an engine is dead or has
        answered with an error, or `Aborted` if one has only stopped because another process gave
        the update up.
        """
        ...

    def result(self, *, timeout_s: float) -> list[Any]:
        """Wait at most `timeout_s` seconds until every engine has answered, and return the answers
        in the order of `Engines.members`.

        After `Engines.update` the answer of an engine is a list with a dict for each of its ranks:
        "version", "digests" (an int for each tensor), "seconds" ({phase: s}), "problem" (error
        message or ""). After `Engines.load_adapter` it is {"version": the version that the engine
        has loaded, "receipt": the digest of its adapters}. Raises `EngineLost` for engines that are
        dead, have failed, or have not answered in time.
        """
        ...

    def settle(self, *, timeout_s: float) -> list[int]:
        """After the transfer was aborted, wait at most `timeout_s` seconds until the engines have
        stopped receiving. Returns the positions of two kinds of engines: those that still receive,
        and those that failed by an error of their own rather than by the abort.
        """
        ...


class Engines(Protocol):
    """Interface of all inference engines of a run, as trainer rank 0 calls them.

    Where nothing else is said, methods concern the engines in `members`, which get the weight
    version that is being sent, and name engines by their positions in that list. Methods with
    `timeout_s` wait at most so many seconds, and raise `EngineLost` where an engine has died.
    """

    members: list[int]
    """Numbers, in the run, of the engines that take part, ascending; `hold` and `replace` set it.
    """

    @property
    def preemptions(self) -> int:
        """Times that engines have pushed a running request out of a full key-value cache so far."""
        ...

    @property
    def missing(self) -> int:
        """Number of the run's engines that do not get the present weight version, because they are
        dead or starting.
        """
        ...

    def is_one_host(self) -> bool:
        """Whether all engines, and those that may be started in their places, run on the caller's
        host.
        """
        ...

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Send every engine what it needs to connect to the trainer's transport, and wait until all
        have connected. `info(position)`: the dict for the engine at that index of `members`, with
        "transport" (its name), "spec" (the fields of a `RouteSpec`, by which both sides plan the
        transfer), "engine" (the index), "init_info" (what the transport's sender says, such as
        addresses), and "table" (the model's parameter table as JSON text).
        """
        ...

    def update(self, version: int, *, timeout_s: float) -> Update:
        """Have every engine begin to receive weights, and return without waiting; `result` of the
        returned `Update` waits for the engines' answers. `version`: the weight version that tokens
        generated with them will carry.
        """
        ...

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Update:
        """Have every engine begin to load LoRA adapters, and return without waiting; `result` of
        the returned `Update` waits for the engines' answers. `version`: the weight version that
        tokens generated with them will carry. `files`: {file name: content} of a folder in PEFT's
        format.
        """
        ...

    def score(
        self, token_ids: list[int], *, timeout_s: float, adapted: bool = True
    ) -> list[list[float]]:
        """Have every engine compute log-probs of one sequence. Returns for each engine, in the
        order of `members`, len(token_ids) - 1 values: the log-prob of every token but the first,
        given the tokens before it. With `adapted` False without the loaded LoRA adapters.
        """
        ...

    def hold(self) -> list[int]:
        """Begin to send a weight version: sets `members` to the engines that are ready. Returns the
        numbers, in the run, of those of them that have no weights yet. Raises `ProcessLost` if no
        engine is left.
        """
        ...

    def replace(self, numbers: Sequence[int]) -> None:
        """Have the engines with the given `numbers` in the run replaced, and set `members` to those
        that are ready. Raises `ProcessLost` if no engine is left.
        """
        ...

    def admit(self) -> int:
        """Let replaced engines serve requests, now that they have the current weights. Returns how
        many engines were replaced in the run so far.
        """
        ...


Model = TypeVar("Model", bound=SendsWeights)
"""The type of the trained model that is sent."""

Verify = Callable[[Engines], dict[str, float]]
"""What rank 0 calls when a version has been sent: looks at what the engines have, sets
`Publication.receipts` and returns metrics."""

FurtherCheck = Callable[[Engines, Sequence[Sequence[float]]], dict[str, float]]
"""What rank 0 calls when the probe's log-probs agree, with those of the engines; returns
metrics."""


class Publication(ABC, Generic[Model]):
    """Sends weight versions to the engines and checks what they have. Every trainer rank has one
    and calls its methods together with the others; only rank 0's calls the engines.

    A subclass defines `_transfer`, which sends a version.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        policy: Model,
        engines: Engines | None,
        mesh: ProcessMesh,
        probe: Probe,
        layouts: str,
    ) -> None:
        """`engines`: on rank 0; None on the other ranks. `probe`: the text that trainer and engines
        score. `layouts`: parallelism of trainer and engines as text, for error messages.
        """
        self.config, self.policy, self.engines, self.mesh = config, policy, engines, mesh
        self._probe, self._layouts = probe, layouts
        self.members: list[int] = []
        """Numbers of the engines that get the present version, on every rank."""
        self.receipts: list[str] = []
        """Receipts (digests as hex text) of the newest version, on every rank, one of which each
        response must carry. More than one where engines receive the same weights in other pieces.
        """
        self._is_connected = False
        """Whether all engines know the transport; new ones know nothing, and after a failed attempt
        all connect anew."""
        self._number = 0
        """Number of the present attempt to send a version, on every rank."""
        self._doing = ""
        """What rank 0 does in `_on_main`, for the error message."""

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy's present weights as version `version` to every engine that is ready. All
        trainer ranks call it together; it blocks. Returns metrics {name: value}, the same on all.

        Engines lost during the transfer or its probe are replaced, and the version is sent to the
        others again, up to `weight_sync.replacements` times. Engines that are new and ready by then
        receive the version like the others, and serve requests afterwards; those that still start
        get the next version.

        Raises `RuntimeError` on every rank if an engine does not answer in time, holds other bytes
        than were sent, or scores the probe, a fixed text, differently from the trainer.
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
        """Begin an attempt: have every rank know which engines take part, after new ones were
        started for those that the attempt before, which ended with `failure`, has `lost`.
        """
        self._number += 1

        def regroup(engines: Engines) -> list[int]:
            if lost:
                say(f"megarl: {failure}; replacing lost engines")
                engines.replace([self.members[position] for position in lost])
            elif engines.hold():
                self._is_connected = False
            if engines.members == self.members:
                prepare(engines)
            return [*engines.members]

        def prepare(engines: Engines) -> None:
            self._doing = f"publishing version {version}"
            self._prepare(version)

        doing = f"{failure}; and replacing it" if lost else "waiting for engines that start"
        problem, _, members = self._on_main(doing, regroup)
        if members is not None and members != self.members:
            self.members, self._is_connected = members, False
            self._resize(len(members))
            problem, *_ = self._on_main(doing, prepare)
        if problem:
            raise RuntimeError(problem)

    def _on_main(self, doing: str, work: Callable[[Engines], Any]) -> tuple[str, list[int], Any]:
        """Run `work` on rank 0. Returns on every rank (error message or "", positions of the
        engines that its error calls lost, its result or None).
        """
        self._doing, found = doing, ("", list[int](), None)
        if self.engines is not None:
            try:
                found = "", [], work(self.engines)
            except Exception as error:
                lost = [*error.engines] if isinstance(error, EngineLost) else []
                found = f"{self._doing} failed: {str(error) or repr(error)}", lost, None
        return broadcast_object(found, self.mesh.world)

    def _conclude(self, version: int, verify: Verify) -> tuple[str, list[int], dict[str, float]]:
        """Check a version that was sent, and let new engines serve requests. Returns on all ranks
        (error message or "", positions of the engines lost, metrics).
        """
        own, every, further = list[float](), self.config.probe_every, None
        if every and version % every == 0:
            own = self.policy.logprobs(self._probe.samples).float().tolist()
            further = self._further_check(version, own)

        def conclude(engines: Engines) -> tuple[dict[str, float], list[str]]:
            metrics = verify(engines)
            if own:
                self._doing = f"the probe of version {version}"
                metrics |= self._check_probe(engines, version, own, further)
            self._doing = "admitting replaced engines"
            metrics["engines/replaced"] = float(engines.admit())
            metrics["engines/missing"] = float(engines.missing)
            metrics["rollout/preemptions"] = float(engines.preemptions)
            metrics["time/publish_s"] = time.monotonic() - self._started_at
            return metrics, self.receipts

        failure, lost, found = self._on_main(f"publishing version {version}", conclude)
        metrics, self.receipts = found or ({}, self.receipts)
        return failure, lost, metrics

    def _check_probe(
        self, engines: Engines, version: int, own: list[float], further: FurtherCheck | None
    ) -> dict[str, float]:
        """Compare the probe's log-probs with the trainer's, `own`; returns metrics."""
        with activity(f"probe of weights {version}", kind="publish", of="engines"):
            scores = engines.score(self._probe.token_ids, timeout_s=self.config.timeout_s)
            worst = self._probe.compare(
                own, scores, version=version, layouts=self._layouts, numbers=self.members
            )
            found = further(engines, scores) if further is not None else {}
            return found | {"probe/max_abs": worst}

    @abstractmethod
    def _transfer(self, version: int) -> tuple[str, list[int], Verify]:
        """Send a version once: (error message or "", positions of the engines lost, its check).

        Message and engines are the same on all ranks.
        """

    def _prepare(self, version: int) -> None:
        """Called on rank 0 before the other ranks begin an attempt."""

    def _resize(self, count: int) -> None:
        """Prepare to send to `count` engines; all ranks call it together."""

    def _further_check(self, version: int, own: list[float]) -> FurtherCheck | None:
        """What else is checked where the probe's log-probs agree. `own`: the trainer's. All ranks
        call this method together.
        """
        return None

    def close(self) -> None:
        """Release the connections, files and memory that were opened to send weights; every rank
        calls it at the end. Here it does nothing.
        """
