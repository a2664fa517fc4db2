"""How new weights reach the engines, and how that is checked."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require_range


@config
class PublishConfig:
    """The wire from the trainer to the engines."""

    carrier: Literal["shared_memory"] = "shared_memory"
    """How bytes travel: a name in megarl.publish.CARRIERS."""
    probe_every: int = 1
    """Versions between log-prob probes (a fixed text scored by trainer and engines); 0 turns them off."""
    probe_tolerance: float = 0.0
    """Largest log-prob difference a probe may show before the run stops; 0 means 1e-3 in float32 and 0.5 in bfloat16."""
    timeout_s: float = 120.0
    """A publish that takes longer ends the run with an error that names the engine."""

    def __post_init__(self) -> None:
        require_range("publish.probe_every", self.probe_every, 0)
        require_range("publish.probe_tolerance", self.probe_tolerance, 0.0)
        require_range("publish.timeout_s", self.timeout_s, 0.1)
