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
    """How a model's logits follow from the products of hidden states and output head."""

    cap: float | None = None
    """Soft cap of the logits, applied first; None for none."""
    factor: float = 1.0
    """Factor of the logits, which is as a temperature of 1 / `factor`."""

    @property
    def is_identity(self) -> bool:
        """Whether the logits are the products themselves."""
        return self.cap is None and self.factor == 1.0


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """The transform of a model whose configuration has passed `unknown_logits`."""
    text = config.get_text_config()
    if text.model_type in CAPPED:
        return LogitTransform(cap=getattr(text, "final_logit_softcapping", None) or None)
    if text.model_type in DIVIDED:
        return LogitTransform(factor=1.0 / text.logits_scaling)
    if text.model_type in MULTIPLIED:
        return LogitTransform(factor=float(text.logit_scale))
    return LogitTransform()


def unknown_logits(text: PretrainedConfig) -> list[str]:
    """What the configuration `text` says of the logits, and `logit_transform` does not know."""
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
    """Raise `ValueError` if the model in `setting` transforms its logits, which distillation does
    not support.
    """
    if not logit_transform(config).is_identity:
        raise ValueError(
            f"{setting} has a soft cap or a factor of its logits (model type {config.model_type}),"
            " which distillation does not support; set another model"
        )
