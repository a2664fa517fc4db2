"""What a run writes down."""

from __future__ import annotations

from megarl.schema import config, require_range


@config
class ObserveConfig:
    """Sinks of metrics and transcripts; `metrics.jsonl` is always written."""

    tensorboard: bool = True
    wandb_project: str = ""
    """Where set, metrics also go to this Weights & Biases project (the key comes from the
    environment).
    """
    transcripts_per_step: int = 2
    """Groups whose rollouts are written out at every step."""
    progress: bool = True
    """Progress bars on standard error."""

    def __post_init__(self) -> None:
        require_range("observe.transcripts_per_step", self.transcripts_per_step, 0)
