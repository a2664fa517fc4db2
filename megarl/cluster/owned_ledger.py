"""The rollout service with the ledger of a run that owns its run folder. Like the service's process
this imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megarl.checkpoints.lease import Claim
from megarl.cluster.remote_environment import RemoteEnvironment
from megarl.errors import UserError
from megarl.ledger.journal import FILE, LostError
from megarl.ledger.recorder import Recorder
from megarl.rollout.service import RolloutService

Built = tuple[RolloutService, RemoteEnvironment]


def with_ledger(build: Callable[[], Built], folder: Path, claim: Claim | None) -> Built:
    """What `build` returns, with a service that records in the ledger of the run folder `folder`
    as long as `claim` holds. Called in the service's process. Raises `OSError` or `ValueError` for
    a ledger that cannot be continued, and `UserError` where another run owns the folder.
    """
    service, environment = build()
    lost = claim.problem if claim is not None else str
    try:
        service.ledger = Recorder(folder / FILE, lost)
    except LostError as error:
        raise UserError(str(error)) from None
    return service, environment
