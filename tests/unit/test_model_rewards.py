"""Scores of reward models become rewards of the right samples and tokens, and are those of
transformers: whatever a tokenizer pads with, a text in a batch is scored at its last token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.rollouts import dealt
from support.tiny import groups
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from megarl.data.tokenizer import pad_apart
from megarl.errors import UserError
from megarl.objectives.advantages import ADVANTAGES
from megarl.parallel.mesh import Axis
from megarl.settings.training import ModelConfig
from megarl.trainer.model_rewards import RewardModels
from megarl.trainer.plan import refuse_other_tokenizer
from megarl.types import StepBatch

CPU = torch.device("cpu")
ALONE = Axis("data", 1, 0, (0,), None)


class Given:
    """A scorer with known scores: sample n gets `scale` x n."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, batch: StepBatch, packed: Any, *, temperature: float) -> list[torch.Tensor]:
        assert temperature == 1.0
        found = []
        for samples in batch.samples:
            column = torch.zeros(len(samples.token_ids))
            column[samples.offsets[1:] - 1] = self.scale * torch.from_numpy(samples.ids).float()
            found.append(column)
        return found


@pytest.fixture
def batch() -> StepBatch:
    return dealt(groups(3, 2, seed=1), step=4, num_mini_batches=2).share(0)


def rewarded(batch: StepBatch, scales: dict[str, float]) -> StepBatch:
    models: Any = {name: Given(scale) for name, scale in scales.items()}
    made = RewardModels(models, {"a": 0.5, "b": -2.0})
    return made.rewarded(batch, made.scores(batch, ()), data=ALONE, device=CPU)


def test_weighted_scores_are_added_at_the_last_generated_token(batch: StepBatch) -> None:
    found = rewarded(batch, {"a": 1.0, "b": 3.0})
    added = (0.5 * 1.0 - 2.0 * 3.0) * np.arange(6)
    assert found.rewards == pytest.approx(batch.rewards + added)
    for before, after in zip(batch.samples, found.samples, strict=True):
        gained = after.rewards - before.rewards
        for n, name in enumerate(after.ids):
            part = gained[after.offsets[n] : after.offsets[n + 1]]
            last = np.flatnonzero(after.mask[after.offsets[n] : after.offsets[n + 1]])[-1]
            assert part[last] == pytest.approx(added[name])
            assert (np.delete(part, last) == 0).all()
    assert found.metrics["reward_model/b/mean"] == pytest.approx(7.5)
    assert found.metrics["reward_model/a/std"] == pytest.approx(np.arange(6).std())
    assert found.metrics["reward/mean"] == pytest.approx(found.rewards.mean())
    assert found.metrics["accuracy"] == batch.metrics["accuracy"]


def test_a_greedy_response_is_scored_and_left_out_of_the_statistics() -> None:
    """ReMax under a reward model: the score of a group's last sample is what others are compared
    with, and no token of it gets a reward.
    """
    made = [replace(group, greedy=group.rollouts[0]) for group in groups(2, 2, seed=1)]
    made = [replace(group, rollouts=group.rollouts[1:]) for group in made]
    scored = dealt(made, sends_untrained=True).share(0)
    found = rewarded(scored, {"a": 1.0})
    assert found.response_tokens.astype(bool).tolist() == [True, False, True, False]
    assert found.rewards == pytest.approx(scored.rewards + 0.5 * np.arange(4))
    assert found.metrics["reward_model/a/mean"] == pytest.approx((0 + 2) / 2)
    assert found.metrics["reward/mean"] == pytest.approx(found.rewards[[0, 2]].mean())
    assert found.metrics["reward/greedy_mean"] == pytest.approx(found.rewards[[1, 3]].mean())
    (samples,) = found.samples
    for position, number in enumerate(samples.ids.tolist()):
        total = samples.select([position]).rewards.sum()
        assert total == pytest.approx(found.rewards[number] if number in (0, 2) else 0.0)
    arrays = (found.rewards, found.groups, found.response_tokens)
    advantages = ADVANTAGES["remax"](*map(torch.from_numpy, arrays))
    expected = found.rewards - found.rewards[[1, 1, 3, 3]]
    assert advantages.numpy() == pytest.approx(expected)


def test_without_models_nothing_changes(batch: StepBatch) -> None:
    assert rewarded(batch, {}) is batch


def test_a_score_that_is_not_finite_ends_the_run(batch: StepBatch) -> None:
    with pytest.raises(UserError, match=r"reward model b scores a response of step 5 .* not finit"):
        rewarded(batch, {"a": 1.0, "b": float("inf")})


def test_a_step_without_samples(batch: StepBatch) -> None:
    none = np.zeros(0)
    empty = replace(batch, samples=[], micro_batches=[], rewards=none, response_tokens=none)
    assert len(rewarded(empty, {"a": 1.0}).rewards) == 0


SIGNS = "0123456789+="
TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
PADDINGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "its own": ({"pad": "<pad>"}, 0, "<pad>"),
    "its end of sequence": ({"pad": "<eos>"}, 1, "<|pad|>"),
    "its end of sequence, beside a reserved token": (
        {"pad": "<eos>", "more": ["<end>", "<reserved_7>"]}, 0, "<reserved_7>"),
    "its end of sequence, in a full vocabulary": ({"pad": "<eos>", "bos": "<bos>"}, 0, "<bos>"),
    "the same, without a beginning": ({"pad": "<eos>", "more": ["<end>", "<x>"]}, 0, "<x>"),
    "its beginning of sequence": ({"pad": "<bos>", "bos": "<bos>"}, 1, "<|pad|>"),
    "its beginning, in a full vocabulary": ({"pad": "<bos>", "bos": "<bos>"}, 0, "<bos>"),
    "its unknown token": ({"pad": "<unk>"}, 1, "<|pad|>"),
    "the end of a turn": ({"pad": "<end>"}, 1, "<|pad|>"),
}  # fmt: skip
"""{what the tokenizer pads with: (its special tokens, tokens that the model embeds beyond the
tokenizer's, what pads afterwards)}"""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {}, "llama": {}, "mistral": {"sliding_window": 4}, "phi3": {"pad_token_id": 0},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 16},
}  # fmt: skip


def tokenizer_of(folder: Path, pad: str, bos: str | None = None, more: Any = ()) -> Any:
    """Characters, with "<eos>", "<unk>" and other special tokens."""
    named = {"pad_token": pad, "bos_token": bos, "eos_token": "<eos>", "unk_token": "<unk>"}
    words = dict.fromkeys(["<eos>", "<unk>", *SIGNS, *filter(None, (pad, bos)), *more])
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        additional_special_tokens=list(more),
        **{name: word for name, word in named.items() if word},
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def exported(folder: Path, family: str, padding: str) -> Path:
    """A classifier with the tokenizer of `PADDINGS`, as `task: reward_model` saves both."""
    (named, room, _), place = PADDINGS[padding], folder / "exported"
    tokenizer = tokenizer_of(folder / "policy", **named)
    size = len(tokenizer) + room
    pad_apart(tokenizer, size, source="here")
    sizes: dict[str, Any] = dict(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_labels=1,
    )  # fmt: skip
    # Another than its tokenizer.
    ids: dict[str, Any] = {"pad_token_id": 3, "bos_token_id": None, "eos_token_id": 0}
    kind = transformers.CONFIG_MAPPING[family]
    config: Any = kind(**sizes | ids | FAMILIES[family] | {"initializer_range": 0.3})
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.score.weight.data.normal_()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


TEXTS = [
    "1+2=3<eos>", "1<eos>2<eos>+45678=90123456789<eos>", "7<eos>", "9?<eos>", "12+<end>34=46<eos>",
    "<unk>1?<eos><eos>", "12+34=46",  # a response that was cut off
]  # fmt: skip


@pytest.mark.parametrize(("family", "padding"), [
    *(("qwen2", padding) for padding in PADDINGS),
    *((family, "its end of sequence") for family in list(FAMILIES)[1:]),
])  # fmt: skip
def test_scores_of_batches_are_those_of_last_tokens(
    family: str, padding: str, tmp_path: Path
) -> None:
    place = exported(tmp_path, family, padding)
    tokenizer = AutoTokenizer.from_pretrained(place)
    # float32 rounds another batch by up to 1.1e-5 of 3.3. What stays, 2e-6, are the angles of
    # shifted positions, which transformers computes in float32.
    model = AutoModelForSequenceClassification.from_pretrained(place).double()
    assert tokenizer.pad_token == PADDINGS[padding][2]
    assert model.config.pad_token_id == tokenizer.pad_token_id
    bos = PADDINGS[padding][0].get("bos") or ""
    texts = [bos + text for text in TEXTS]
    with torch.no_grad():
        expected = []
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            hidden = model.model(ids, use_cache=False).last_hidden_state
            expected.append(model.score(hidden[0, -1]).item())
        for side in ("left", "right"):
            for batch in (slice(None), slice(2, 3), slice(0, 2)):
                options: Any = {"padding": True, "padding_side": side, "return_tensors": "pt"}
                found = model(**tokenizer(texts[batch], **options)).logits[:, 0].tolist()
                assert found == pytest.approx(expected[batch], abs=1e-5), side
    policy = ModelConfig(path=str(tmp_path / "policy"))
    refuse_other_tokenizer("critic", policy, ModelConfig(path=str(place)))


def test_a_tokenizer_without_any_other_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "<eos>", more=["<end>"])
    with pytest.raises(ValueError, match=r"tokenizer here has no token to pad with .* at least 16"):
        pad_apart(tokenizer, 15, source="here")
    tokenizer = tokenizer_of(tmp_path / "other", "<eos>", more=["<x>"])
    policy = ModelConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"has another tokenizer than model\.path"):
        refuse_other_tokenizer("critic", policy, ModelConfig(path=str(tmp_path / "other")))
