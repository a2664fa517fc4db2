"""The sections `observe`, `early_stop` and `replay` of a recipe, and the names of the metrics."""

from typing import Annotated

from megarl.settings.limits import MOST_SAMPLES, MOST_STEPS
from megarl.settings.recipe_paths import PathText
from megarl.settings.schema import Config, Range, require

STEP_METRICS = (
    *("reward/mean", "reward/std", "reward/responses", "accuracy"),
    *("length/mean", "length/max", "length/truncated_share", "length/penalty"),
    *("groups/drawn", "groups/rejected", "groups/stale", "groups/equal", "samples/computed"),
    *("staleness/max", "staleness/mean"),
    *("staleness/token_mean", "staleness/token_max"),
    *("verifier/errors", "verifier/timeouts", "verifier/nans"),
    *("verifier/response_limits", "verifier/abstained"),
    *("tokens/generated", "tokens/generated_per_s", "tokens/trained", "tokens/trained_per_s"),
    *("tokens/computed", "tokens/shared_saved"),
    *("reward/greedy_mean", "accuracy_greedy", "kl_coefficient"),
    *("correction/mean", "correction/effective_samples"),
    *("correction/dropped_share", "correction/clipped_share"),
    *("loss", "entropy", "clip_share", "kl", "grad_norm", "learning_rate", "skipped_steps"),
    *("loss_scale", "overflows", "critic/loss_scale", "critic/overflows"),
    *("critic/loss", "critic/clip_share", "critic/explained_variance"),
    *("critic/grad_norm", "critic/learning_rate", "critic/skipped_steps"),
    *("mismatch/mean_abs", "mismatch/max_abs", "mismatch/k1", "mismatch/k3"),
    *("mismatch/outside_share", "probe/max_abs", "publish/replaced", "publish/bytes"),
    *("publish/wait_s", "publish/digest_s", "publish/install_s"),
    *("time/rollout_s", "time/wait_s", "time/train_s", "time/publish_s", "time/step_s"),
)
"""Metrics of a step of `task: rl`; a verifier's own are `environment/<name>`."""
DISTILLATION_METRICS = ("divergence", "teacher_logprob")
"""Metrics of a step that only `task: distill` has."""
EVALUATION_METRICS = (
    *("accuracy", "reward/mean", "reward/responses", "length/mean", "length/truncated_share"),
    *("verifier/failures", "verifier/abstained", "problems"),
)
"""Metrics of an evaluation, each with `eval/` or `eval_sampled/` before it."""
Bound = Annotated[float | None, Range(-8e307, 8e307)]


class ObserveConfig(Config):
    """What a run reports besides `metrics.jsonl`, and where."""

    tensorboard: bool = True
    """Also write metrics for TensorBoard."""
    wandb_project: str = ""
    """Weights & Biases project for the metrics; the API key comes from the environment."""
    mlflow_experiment: str = ""
    """MLflow experiment for the metrics, at MLFLOW_TRACKING_URI of the environment."""
    trackio_project: str = ""
    """trackio project for the metrics, at TRACKIO_DIR, TRACKIO_SERVER_URL or TRACKIO_SPACE_ID of
    the environment."""
    transcripts_per_step: Annotated[int, Range(0, MOST_SAMPLES)] = 2
    """Groups (all rollouts of one prompt) of each step in `transcripts.jsonl`."""
    transcripts_gib: Annotated[float, Range(0.0, 1e6)] = 4.0
    """GiB of transcripts to keep, in files of 64 MiB; beyond it the oldest but the first are
    removed."""
    progress: bool = True
    """Show progress on standard error."""
    batches: bool = False
    """Write each step's batch to the run folder's `batches/`, 13 bytes a token, for `megarl
    replay`."""
    activity: bool = True
    """Record what each process does in `activity/`, for `megarl status` and Perfetto."""


class EarlyStopConfig(Config):
    """Ends a run early, with a checkpoint, once a metric has reached a bound."""

    metric: str = ""
    """A metric in `metrics.jsonl` or `evaluations.jsonl`, such as eval/accuracy; empty: no early
    stop."""
    at_least: Bound = None
    """Stop once the metric is this or higher."""
    at_most: Bound = None
    """Stop once the metric is this or lower."""

    def check(self) -> None:
        bounds = [bound for bound in (self.at_least, self.at_most) if bound is not None]
        require(
            len(bounds) == (1 if self.metric else 0),
            f"early_stop.metric is {self.metric!r}, with at_least {self.at_least} and at_most"
            f" {self.at_most}; set a metric and one of the two, or none of the three",
        )


class ReplayConfig(Config):
    """Settings of `megarl replay`, which repeats training steps on a run's recorded batches."""

    run: PathText = ""
    """The run folder with the batches, set by `megarl replay RUN`."""
    steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps to train again, from the first; 0: all that the run has finished."""
