"""Configuration of metrics, transcripts and progress."""

from __future__ import annotations

from megarl.schema import config, require_range


@config
class ObserveConfig:
    """Where metrics and transcripts of a run go; `metrics.jsonl` is always written."""

    tensorboard: bool = True
    """Also write metrics for TensorBoard."""
    wandb_project: str = ""
    """Weights & Biases project that also gets the metrics, if set; the API key comes from the
    environment."""
    transcripts_per_step: int = 2
    """Groups per step whose rollouts are written to `transcripts.jsonl`."""
    progress: bool = True
    """Show progress on standard error."""

    def __post_init__(self) -> None:
        require_range("observe.transcripts_per_step", self.transcripts_per_step, 0)
