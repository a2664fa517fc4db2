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
        """[T - 1] log-probs, by the model's present weights, of the tokens of one sequence of T
        tokens, each given those before it; the first token has none. All ranks call it together.
        `samples`: the sequence, as a single sample.
        """
        ...


class Update(Protocol):
    """One weight update that the engines are working on."""

    def poll(self) -> None:
        """Check the update without waiting. Raises `EngineLost` if an engine has died since it
        began, or `RuntimeError` if an engine has answered with an error.
        """
        ...

    def result(self, *, timeout_s: float) -> list[Any]:
        """Wait at most `timeout_s` seconds until every engine has answered, and return the answers
        in the order of `Engines.members`.

        After `Engines.update` the answer of an engine is a list with the status of each of its
        ranks (`WeightSyncWorker` in receiver.py). After `Engines.load_adapter` it is {"version":
        the version that the engine has loaded, "receipt": the digest of its weights}. Raises
        `EngineLost` for engines that have died or have not answered in time.
        """
        ...

    def settle(self, *, timeout_s: float) -> list[int]:
        """After the transfer was aborted, wait at most `timeout_s` seconds until the engines have
        stopped receiving. Returns the numbers of the engines that have failed or not answered.
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
        """Number of the run's engines that are not in `members`."""
        ...

    def is_one_host(self) -> bool:
        """Whether all engines run on the caller's host, and replaced ones will too."""
        ...

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Send every engine what it needs to connect to the trainer's transport. `info`: called
        with the position of an engine in `members`, returns the fields of
        `bucket_receiver.InitInfo`.
        """
        ...

    def update(self, version: int, *, timeout_s: float) -> Update:
        """Have every engine begin to receive weights, and return without waiting. `version`: the
        weight version that tokens generated with them will carry.
        """
        ...

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Update:
        """Have every engine begin to load LoRA adapters, and return without waiting. `version`: the
        weight version that tokens generated with them will carry. `files`: {file name: content} of
        a folder in PEFT's format.
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
        """Begin to publish a version. From now on until `let_go`, the supervisor does not start new
        engines in the place of dead ones; only `replace` does. Sets `members` to the engines that
        run, after a wait if these are too few. Returns the numbers of members without weights.
        """
        ...

    def let_go(self) -> None:
        """End the publication of a version that began with `hold`. The supervisor may start new
        engines in the place of dead ones again.
        """
        ...

    def replace(self, numbers: Sequence[int]) -> None:
        """Start new engines in the place of those with the given `numbers`, without waiting until
        they are ready. `numbers` are those in `members`, not positions there. Sets `members` as
        `hold` does.
        """
        ...

    def admit(self) -> int:
        """Let replaced engines serve requests, now that they have the current weights. Returns how
        many engines were replaced in the run so far.
        """
        ...
