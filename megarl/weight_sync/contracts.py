"""What publishing weights requires of the trained model and of the inference engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megarl.parallel.tensor import Shard
from megarl.types import Samples


class SendsWeights(Protocol):
    """A trained model whose weights can be published; every trainer rank has its part."""

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{parameter name: shape of the whole parameter}, whatever this rank has of it."""
        ...

    @property
    def shards(self) -> dict[str, Shard]:
        """{parameter name: how tensor-parallel ranks split it}; unsplit ones are left out."""
        ...

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{parameter name: this rank's part as a flat tensor}; under ZeRO 3 its slice."""
        ...

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """Log-prob of each token after the first of one sequence, [T - 1]; collective."""
        ...


class Update(Protocol):
    """One weight update that the engines are working on."""

    def poll(self) -> None:
        """Raise `EngineLost` if an engine has died so far, or `RuntimeError` if one has answered
        with an error. Returns at once.
        """
        ...

    def result(self, *, timeout_s: float) -> list[Any]:
        """Wait until every engine has answered; returns [answer of engine 0, of engine 1, ...].

        Of an update begun by `Engines.update` an answer is a list with the status of each rank
        (`WeightSyncWorker` in receiver.py), of `Engines.load_adapter` it is {"version",
        "receipt"}. Raises `EngineLost` for engines that have died or are late.
        """
        ...

    def settle(self, *, timeout_s: float) -> list[int]:
        """After an abort, wait at most `timeout_s` seconds until the engines have given the update
        up. Returns the numbers of those that have failed or have not answered.
        """
        ...


class Engines(Protocol):
    """The inference engines, as trainer rank 0 calls them.

    Calls end within `timeout_s` seconds and raise `EngineLost` where an engine has died. They
    concern the engines that take part in a publication, `members`, and number them by their
    positions there.
    """

    members: list[int]
    """Numbers of the engines that take part, ascending; `hold` and `replace` set it."""

    @property
    def missing(self) -> int:
        """Number of engines that do not take part."""
        ...

    def is_one_host(self) -> bool:
        """Whether all engines are, and stay, on the caller's host."""
        ...

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Send each engine `info(engine number)`, the fields of `bucket_receiver.InitInfo`."""
        ...

    def update(self, version: int, *, timeout_s: float) -> Update:
        """Have every engine receive `version`; returns at once."""
        ...

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Update:
        """Have every engine load the adapters in `files` as `version`; returns at once. The result
        is a list of {"version", "receipt"} of what is loaded, by engine.
        """
        ...

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]:
        """Have every engine compute log-probs of one sequence. Returns for each engine, in the
        order of `members`, len(token_ids) - 1 values: the log-prob of every token but the first,
        given the tokens before it.
        """
        ...

    def hold(self) -> list[int]:
        """Begin a publication: until `let_go`, engines are replaced only by `replace`. Sets
        `members` to the engines that run, and waits only while these are too few. Returns the
        numbers of members that have no weights yet.
        """
        ...

    def let_go(self) -> None:
        """End a publication that `hold` has begun: engines may be replaced at any time again."""
        ...

    def replace(self, numbers: Sequence[int]) -> None:
        """Begin to start new engines in the place of the engines `numbers`, which are numbers of
        engines and not positions in `members`. Sets `members` as `hold` does.
        """
        ...

    def admit(self) -> int:
        """Let replaced engines serve requests, now that they have the current weights. Returns how
        many engines were replaced in the run so far.
        """
        ...
