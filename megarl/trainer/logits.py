"""What a model does to its logits after the output head: a soft cap (Gemma 2), a factor (Granite,
Cohere).

    logits = output head (hidden states)    ->    factor x cap tanh(logits / cap)
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

CAPPED = ("gemma2", "gemma3_text")
"""Model types that cap their logits at `final_logit_softcapping`."""
DIVIDED = ("granite", "granite_swa")
"""Model types that divide their logits by `logits_scaling`."""
MULTIPLIED = ("cohere", "cohere2")
"""Model types that multiply their logits by `logit_scale`."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the products of hidden states and output head to get its logits: logits
    = factor x cap tanh(products / cap), without the tanh if `cap` is None.
    """

    cap: float | None = None
    """Soft cap of the logits, applied first; None for none."""
    factor: float = 1.0
    """Factor of the logits after the cap; it acts as a temperature of 1 / `factor`."""

    @property
    def is_identity(self) -> bool:
        """Whether the logits are the products of hidden states and output head themselves, without
        a soft cap and with the factor 1.
        """
        return self.cap is None and self.factor == 1.0


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """The soft cap and the factor by which a model's logits follow from the products of hidden
    states and output head, read from its configuration. Only right for a configuration for which
    `unknown_logits` returns an empty list.
    """
    text = config.get_text_config()
    if text.model_type in CAPPED:
        return LogitTransform(cap=getattr(text, "final_logit_softcapping", None) or None)
    if text.model_type in DIVIDED:
        return LogitTransform(factor=1.0 / text.logits_scaling)
    if text.model_type in MULTIPLIED:
        return LogitTransform(factor=float(text.logit_scale))
    return LogitTransform()


def unknown_logits(text: PretrainedConfig) -> list[str]:
    """Settings of a model's text configuration that change its logits in a way that
    `logit_transform` does not know, each as "name = value"; an empty list if there are none.
    """
    found = []
    cap = getattr(text, "final_logit_softcapping", None)
    if cap and text.model_type not in CAPPED:
        found.append(f"final_logit_softcapping = {cap}")
    for name, known in (("logits_scaling", DIVIDED), ("logit_scale", MULTIPLIED)):
        value = getattr(text, name, None)
        if value not in (None, 1.0) and text.model_type not in known:
            found.append(f"{name} = {value}")
    return found


def refuse_transform(config: PretrainedConfig, setting: str) -> None:
    """Raise `ValueError` if a model with this configuration has a soft cap or a factor of its
    logits, which distillation does not support. `setting`: the setting that names the model, such
    as "model.path", for the message.
    """
    if not logit_transform(config).is_identity:
        raise ValueError(
            f"{setting} has a soft cap or a factor of its logits (model type {config.model_type}),"
            " which distillation does not support; set another model"
        )
