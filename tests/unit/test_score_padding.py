"""Reward models as transformers reads them: whatever a tokenizer pads with, the classifier's score
of a text in a batch is that of its last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from megarl.checks.roles import refuse_other_tokenizer
from megarl.data.tokenizer import pad_apart
from megarl.trainer.config import ModelConfig

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
    """A classifier with the tokenizer of `PADDINGS`, as `megarl reward-model` saves both."""
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
