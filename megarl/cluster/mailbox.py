"""Many small requests to one Ray actor in few calls, with token arrays left in Ray's object store.

    RolloutService  --Mailbox.ask-->  submit(requests, *arrays)  -->  Inbox.serve  (in the actor)
                    <-- answers ---   collect() -> answers, arrays

A Ray call costs its caller about a millisecond, so requests and answers travel in batches: an
answer waits `Pace.linger_s` for others, unless no other request is under way. The arrays that
answers bring are a return value of their own, which Ray keeps in the object store of the node where
they were made and which the caller owns: the caller sees references, and the arrays outlive the
actor that made them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
)

from megarl.activity.busy import Busy
from megarl.cluster.deaths import DEATHS, why_dead
from megarl.errors import ArraysLost, EngineLost, EngineUnreachable
from megarl.types import TokenArrays

LINGER_SHARE, MIN_LINGER_S, MAX_LINGER_S = 0.1, 0.01, 1.0
"""How long `Inbox.collect` holds a finished answer back, so that later answers travel in the same
call. The wait is this share of the mean generation time or of the answer's own latency, whichever
is longer, within the two bounds in seconds."""

GATHER_SHARE, TICK_SHARE, MIN_TICK_S = 0.25, 0.02, 0.005
"""How long `Mailbox` holds requests back to send them in one call: at most `GATHER_SHARE` of
`Pace.linger_s`, and no longer than until a tick has brought no further request. A tick is
`TICK_SHARE` of `Pace.linger_s`, at least `MIN_TICK_S` seconds. Requests come in bursts: the groups
that a step starts, and those whose answers came in one call."""

MAX_BATCH = 64
"""Most requests, or answers, in one Ray call. An event loop is blocked while it handles a batch."""

MAX_BATCH_BYTES = 4 * 2**20
"""`Inbox.collect` adds no further answer once the token arrays of the batch have this many bytes. A
rank that needs one sample of a batch fetches the whole batch."""

MIN_STORED_BYTES, INLINE_BYTES = 16 * 2**10, 100 * 2**10
"""Ray keeps a return value of less than `INLINE_BYTES` in the memory of the calling process instead
of the object store. A batch of arrays of at least `MIN_STORED_BYTES` is padded to `INLINE_BYTES`,
so that it goes to the object store."""

GOES_ON = "`--resume auto` goes on from the newest checkpoint"
"""Advice for a run that ends by what it has lost."""

ENGINE_DEAD = "EngineDeadError"
"""Name of the exception that vLLM raises when one of its processes is dead. The name is compared,
since vLLM is not imported here."""


@dataclass(frozen=True, slots=True)
class StoredArrays:
    """Token arrays in Ray's object store. See `Segment.arrays`."""

    ref: Any
    """`ray.ObjectRef` of a list of arrays."""
    position: int
    """Index of the arrays in the list that `ref` refers to."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception raised in an actor, as text: the caller may be unable to import its class."""

    kind: str
    message: str


def fetch(
    arrays: Sequence[StoredArrays], timeout_s: float, what: str = "segments"
) -> list[TokenArrays]:
    """Read token arrays from Ray's object store, without a copy, in the order of the references.
    `what`: whose they are, for errors.

    With a `timeout_s` given, has the type `megarl.rollout.batch.Fetch`. Raises `ArraysLost` if
    the node that stored the arrays is lost, and `RuntimeError` if they do not arrive within
    `timeout_s`.
    """
    refs = list({one.ref: None for one in arrays})
    try:
        found = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
    except GetTimeoutError:
        raise RuntimeError(
            f"the token arrays of {len(arrays)} {what} did not arrive within {timeout_s:g} s"
        ) from None
    except ObjectLostError as error:
        lost = set(filter(_is_lost, refs))
        count = sum(one.ref in lost for one in arrays) or "some"
        raise ArraysLost(
            f"the token arrays of {count} of {len(arrays)} {what} were lost with the node"
            f" that held them ({str(error).splitlines()[0]}); {GOES_ON}"
        ) from error
    return [TokenArrays(*found[one.ref][one.position]) for one in arrays]


def _is_lost(ref: Any) -> bool:
    """Whether Ray has told this process that the object `ref` is lost. Does not wait: an object
    whose loss is not known yet counts as not lost.
    """
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return False
    except ObjectLostError:
        return True
    return False


def store(arrays: Sequence[TokenArrays]) -> list[StoredArrays]:
    """Put token arrays into Ray's object store, which keeps them as long as this process lives and
    a reference is left; `fetch` reads them.
    """
    found: list[StoredArrays] = []
    for start in range(0, len(arrays), MAX_BATCH):
        batch = [(one.token_ids, one.logprobs) for one in arrays[start : start + MAX_BATCH]]
        ref = ray.put(batch)
        found += [StoredArrays(ref, position) for position in range(len(batch))]
    return found


_Queued = tuple[int, Any, list[StoredArrays]]
"""A request that is not sent yet: (request number, request, token arrays that go with it)."""


class Pace:
    """Running mean of the generation time, which sets how long an answer is held back
    (`linger_s`).
    """

    linger_s = MIN_LINGER_S

    def record(self, generation_s: float) -> None:
        """Update `linger_s` with the duration of one generation, in seconds."""
        aim = min(max(LINGER_SHARE * generation_s, MIN_LINGER_S), MAX_LINGER_S)
        self.linger_s += 0.05 * (aim - self.linger_s)


class Mailbox:
    """Sends requests to one Ray actor, an `Inbox`, in batches, and returns the answers to the
    callers.

    All calls must come from one event loop. Several mailboxes may send to one actor: each has a
    name of its own, under which the actor keeps its requests and answers.
    """

    def __init__(
        self,
        handle: Any,
        pace: Pace,
        busy: Busy | None = None,
        *,
        drops: bool = False,
        name: str = "",
    ) -> None:
        """`handle`: a Ray actor whose class is an `Inbox`. `busy`: records that this process waits
        for answers. `drops`: whether the actor stops to serve a request whose caller is cancelled.
        `name`: under which the actor keeps the requests, if no other mailbox has it.
        """
        self._name = name or uuid.uuid4().hex
        self._busy = busy or Busy("answers", kind="wait")
        self._drop_from, self._dropped = handle.drop if drops else None, list[int]()
        self._collect_from, self._submit_to = handle.collect.options(num_returns=2), handle.submit
        self._pace = pace
        self._next = self._collections = 0
        self._outbox: list[_Queued] = []
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None

    async def ask(
        self, request: Any, arrays: Sequence[StoredArrays] = (), busy: Busy | None = None
    ) -> Any:
        """Have the actor run `serve(request, arrays)` and return the result. `busy`: records the
        wait for this answer, instead of that of the mailbox.

        If the result is a `Segment`, its `arrays` are replaced by a `StoredArrays`. Raises
        `EngineLost` if the actor, or a process it depends on, is dead, and `EngineUnreachable` if
        the actor may still be alive. Raises `ValueError` if
        `serve` raised one, and `RuntimeError` for any other exception of `serve`. Raises
        `ArraysLost` if `arrays` were lost with the node that held them; requests with other arrays
        go on.
        """
        loop = asyncio.get_running_loop()
        number, self._next = self._next, self._next + 1
        answer = self._pending[number] = loop.create_future()
        self._outbox.append((number, request, list(arrays)))
        if self._sender is None:
            self._sender = loop.create_task(self._send())
        if self._collector is None:
            self._collector = loop.create_task(self._collect())
        try:
            with (busy or self._busy).request():
                return await answer
        except asyncio.CancelledError:
            self._drop(number)
            raise
        finally:
            self._pending.pop(number, None)

    def _drop(self, number: int) -> None:
        """Have the actor stop to serve request `number`, together with all that are cancelled at
        the same time.
        """
        if self._drop_from is not None:
            if not self._dropped:
                asyncio.get_running_loop().call_soon(self._send_dropped)
            self._dropped.append(number)

    def _send_dropped(self) -> None:
        assert self._drop_from is not None
        dropped, self._dropped = set(self._dropped), []
        unsent = {number for number, *_ in self._outbox} & dropped
        self._outbox = [one for one in self._outbox if one[0] not in unsent]
        if dropped - unsent:
            self._drop_from.remote(self._name, sorted(dropped - unsent))

    async def _send(self) -> None:
        """Send the queued requests to the actor in batches, until none is queued."""
        try:
            while self._outbox:
                await self._gather()
                while self._outbox:
                    batch, self._outbox = self._outbox[:MAX_BATCH], self._outbox[MAX_BATCH:]
                    await self._submit(batch)
        except Exception as error:
            self.fail(error)
        finally:
            self._sender = None

    async def _submit(self, batch: list[_Queued]) -> None:
        """Send requests in one call. A call that fails in a living actor, as Ray has it fail where
        an array is lost, is not begun: its requests are sent one by one, and those that fail alone
        get the error.
        """
        batch = [one for one in batch if one[0] in self._pending]  # the others are cancelled
        if not batch:
            return
        places: dict[Any, int] = {}
        requests = [
            (
                number,
                request,
                [(places.setdefault(a.ref, len(places)), a.position) for a in arrays],
            )
            for number, request, arrays in batch
        ]
        try:
            await self._submit_to.remote(self._name, requests, *places)
        except DEATHS:
            raise
        except Exception as error:
            if len(batch) > 1:
                await asyncio.gather(*(self._submit([one]) for one in batch))
                return
            waiting = self._pending.get(batch[0][0])
            if waiting is not None and not waiting.done():
                waiting.set_exception(_arrays_lost(error) if _means_loss(error) else error)

    async def _gather(self) -> None:
        """Wait for further requests to send in the same call; see `GATHER_SHARE`."""
        linger_s, known = self._pace.linger_s, -1
        ends_at = time.monotonic() + GATHER_SHARE * linger_s
        tick_s = max(MIN_TICK_S, TICK_SHARE * linger_s)
        while known < self._next and (left_s := ends_at - time.monotonic()) > 0:
            known = self._next
            await asyncio.sleep(min(tick_s, left_s))

    async def _collect(self) -> None:
        """Fetch answers from the actor and hand each to its caller, while any request is
        unanswered.
        """
        try:
            self._collections += 1
            while self._pending:
                pending, arrays = self._collect_from.remote(
                    self._name, self._pace.linger_s, self._collections
                )
                answers = await pending
                for number, answer, position in answers:
                    waiting = self._pending.get(number)
                    if waiting is None or waiting.done():
                        continue  # its deadline has passed
                    if isinstance(answer, Failure):
                        waiting.set_exception(_exception(answer))
                    elif position >= 0:
                        waiting.set_result(replace(answer, arrays=StoredArrays(arrays, position)))
                    else:
                        waiting.set_result(answer)
                # Let the requests' owners leave `_pending` before it is looked at. An actor that
                # answers at once, and with nothing, is not asked without end.
                await asyncio.sleep(0 if answers else max(self._pace.linger_s, MIN_LINGER_S))
        except Exception as error:
            self.fail(error)
        finally:
            self._collector = None

    def fail(self, error: Exception) -> None:
        """End every unanswered request with the exception `error`."""
        if isinstance(error, ActorUnavailableError) or _means_loss(error):
            for number in self._pending:  # they are asked again, under other numbers
                self._drop(number)
            error = EngineUnreachable(f"it could not be reached ({str(error).splitlines()[0]})")
        elif isinstance(error, DEATHS):
            error = EngineLost(f"its process died ({why_dead(error)})")
        self._outbox = []
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)


def _means_loss(error: Exception) -> bool:
    """Whether a call failed since an object of Ray's store is lost. An actor that could not read
    its arguments raises a `RayTaskError` of that cause.
    """
    return isinstance(getattr(error, "cause", None) or error, ObjectLostError)


def _arrays_lost(error: Exception) -> ArraysLost:
    return ArraysLost(
        "the token arrays of a rollout were lost with the node that held them"
        f" ({str(getattr(error, 'cause', None) or error).splitlines()[0]}); {GOES_ON}"
    )


def _exception(failure: Failure) -> Exception:
    if failure.kind == ENGINE_DEAD:
        return EngineLost("one of its processes died")
    if failure.kind == "ValueError":
        return ValueError(failure.message)
    return RuntimeError(f"{failure.kind}: {failure.message}")
