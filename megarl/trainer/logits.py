"""What a model does to its logits: a soft cap (Gemma 2), a factor (Granite, Cohere).

logits = output head (hidden states)    ->    factor x cap tanh(logits / cap)
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

CAPPED = ("gemma2", "gemma3_text")
"""By `final_logit_softcapping`."""
DIVIDED = ("granite", "granite_swa")
"""By `logits_scaling`."""
MULTIPLIED = ("cohere", "cohere2")
"""By `logit_scale`."""


@dataclass(frozen=True)
class LogitTransform:
    """Logits are factor x cap tanh(products / cap), without the tanh if `cap` is None."""

    cap: float | None = None
    factor: float = 1.0
    """Acts as a temperature of 1 / `factor`."""

    @property
    def is_identity(self) -> bool:
        return self.cap is None and self.factor == 1.0


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """A model's soft cap and factor, where `unknown_logits` finds nothing."""
    text = config.get_text_config()
    if text.model_type in CAPPED:
        return LogitTransform(cap=getattr(text, "final_logit_softcapping", None) or None)
    if text.model_type in DIVIDED:
        return LogitTransform(factor=1.0 / text.logits_scaling)
    if text.model_type in MULTIPLIED:
        return LogitTransform(factor=float(text.logit_scale))
    return LogitTransform()


def unknown_logits(text: PretrainedConfig) -> list[str]:
    """Settings that change the logits in a way that `logit_transform` does not know, as "name =
    value".
    """
    settings = []
    cap = getattr(text, "final_logit_softcapping", None)
    if cap and text.model_type not in CAPPED:
        settings.append(f"final_logit_softcapping = {cap}")
    for name, known in (("logits_scaling", DIVIDED), ("logit_scale", MULTIPLIED)):
        value = getattr(text, name, None)
        if value not in (None, 1.0) and text.model_type not in known:
            settings.append(f"{name} = {value}")
    return settings


def refuse_transform(config: PretrainedConfig, setting: str) -> None:
    """Raise `ValueError` if a model caps or scales its logits. `setting`: the one that names it."""
    if not logit_transform(config).is_identity:
        raise ValueError(
            f"{setting} has a soft cap or a factor of its logits (model type {config.model_type}),"
            " which distillation does not support; set another model"
        )
