"""Tokenizers: SentencePiece files keep their ids through every form, and what a model cannot use is
refused with the fix.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from pathlib import Path

import make_addition
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, trainers
from transformers import AutoTokenizer

from megarl.data.tokenizer import PROBE, check_tokenizer, load_tokenizer
from megarl.engines.vllm_arguments import tokenizer_arguments

SMALL = ["--demonstrations", "4000", "--prompts", "900"]
WORDS = (
    "Natalia sold clips to her friends then half as many in May how altogether 0123456789 +-=.,?"
)
TEXTS = ["How many clips did Natalia sell altogether?", "48+24 = 72", "one", "a.b,c"]
AWKWARD = [
    " leading", "two  blanks", "trailing ", "   ", "tab\there", "line\nbreak", "",
    "caf\u00e9 \u00bd \uff21", "\u732b\U0001f600",
]  # fmt: skip


def train(folder: Path, **changes: object) -> Path:
    """A SentencePiece model of the words above."""
    corpus = folder / "corpus.txt"
    words = WORDS.split()
    lines = [" ".join(words[i % len(words)] for i in range(n, n + 7)) for n in range(400)]
    corpus.write_text("\n".join([*lines, *TEXTS]))
    settings = {
        "model_type": "unigram", "vocab_size": 120, "pad_id": 3, "hard_vocab_limit": False,
        "character_coverage": 1.0,
    }  # fmt: skip
    settings.update(changes)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spm"), minloglevel=2, **settings
    )
    return folder / "spm.model"


KINDS = {
    "unigram": {},
    "unigram-bytes": {"byte_fallback": True, "vocab_size": 380},
    "bpe": {"model_type": "bpe"},
    "bpe-bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 380},
    "llama": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 380,
     "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "no-prefix": {"add_dummy_prefix": False},
    "char": {"model_type": "char"},
    "other-ids": {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece_file_keeps_its_ids_and_texts(kind: str, tmp_path: Path) -> None:
    file = train(tmp_path, **KINDS[kind])
    original = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = load_tokenizer(str(file))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for form in (tokenizer, again, load_tokenizer(str(tmp_path / "saved"))):
        assert len(form) == original.get_piece_size()
        assert form.eos_token_id == original.eos_id()
        assert form.bos_token_id == original.bos_id()
        assert form.pad_token_id == original.pad_id()
        for text in [*TEXTS, *AWKWARD]:
            ids = form(text).input_ids
            assert ids == original.encode(text), text
            if original.unk_id() not in ids:
                assert form.decode(ids) == original.decode(ids), text
                ended = [*ids, form.eos_token_id]
                assert form.decode(ended, skip_special_tokens=True) == original.decode(ids)
        for text in TEXTS:
            assert form.decode(form(text).input_ids) == text


@pytest.fixture(scope="module")
def llama_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    file = train(tmp_path_factory.mktemp("llama"), **KINDS["llama"])
    return sentencepiece.SentencePieceProcessor(model_file=str(file)), load_tokenizer(str(file))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text(
        st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2581"), max_size=30
    )
)
def test_any_text_goes_through_a_byte_fallback_tokenizer(text: str, llama_pair: tuple) -> None:
    original, tokenizer = llama_pair
    ids = tokenizer(text).input_ids
    assert ids == original.encode(text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_without_padding_is_told_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train(tmp_path, pad_id=-1)))
    assert tokenizer.pad_token_id is None
    with pytest.raises(ValueError, match=r"spm has no padding token; set pad_token.*to '</s>'"):
        check_tokenizer(tokenizer, 1000, source="spm")


def test_what_is_no_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; set the path"):
        load_tokenizer(str(tmp_path / "none.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"bad\.model is not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "bad.model"))
    with pytest.raises(ValueError, match=r"words\); train one of type unigram, bpe or char"):
        load_tokenizer(str(train(tmp_path, model_type="word", vocab_size=30)))


def test_absent_folders_and_names_fail_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"tokenizer folder .* does not exist; set the path"):
        load_tokenizer(str(tmp_path / "none"))
    none = r"holds no tokenizer \(none of tokenizer\.json.*copy the tokenizer's files"
    with pytest.raises(ValueError, match=none):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="name is empty"):
        load_tokenizer("")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="does not load"):
        load_tokenizer(str(tmp_path))
    # An address that drops what is sent to it, as a firewall does.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    away = r"is not on this machine and the Hugging Face hub did not answer.*HF_HUB_OFFLINE"
    with pytest.raises(ValueError, match=rf"'nobody/nothing' {away}"):
        load_tokenizer("nobody/nothing")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set; unset it to download"):
        load_tokenizer("nobody/nothing")
    assert time.monotonic() - started < 60


def test_check_tokenizer_names_the_cure(tmp_path: Path) -> None:
    make_addition.write_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    check_tokenizer(tokenizer, 16, source="model")
    with pytest.raises(
        ValueError, match=r"model has 16 tokens, but the model embeds 15; .* at least 16"
    ):
        check_tokenizer(tokenizer, 15, source="model")
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no padding token; set pad_token"):
        check_tokenizer(tokenizer, 16, source="model")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no end-of-sequence token.*set eos_token"):
        check_tokenizer(tokenizer, 16, source="model")


def test_a_folder_that_declares_no_family_is_taken_as_it_is(tmp_path: Path) -> None:
    """transformers 5 would read a SentencePiece tokenizer beside a Qwen2 with Qwen's splitting
    rules.
    """
    file = train(tmp_path, **KINDS["bpe"])
    folder = tmp_path / "model"
    load_tokenizer(str(file)).save_pretrained(folder)
    family = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(family))
    original = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in TEXTS:
        assert load_tokenizer(str(folder))(text).input_ids == original.encode(text)


BYTES = {  # the splitting rule of a byte-level tokenizer.json
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": r"\p{N}{1,3}|[一-龥]+|[!-/:-~]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
}  # fmt: skip
"""{family: splitting rule of its published byte-level tokenizer.json}."""


@functools.cache
def trained(form: str) -> tokenizers.Tokenizer:
    """A small tokenizer in the published form `form`: of bytes with a rule of `BYTES`, of
    SentencePiece ("metaspace", "prepend", "gemma") or of "bert".
    """
    pre, norm = tokenizers.pre_tokenizers, tokenizers.normalizers
    special = ["<unk>", "<s>", "</s>", "[UNK]", "<|endoftext|>"]
    if form in BYTES:
        made = tokenizers.Tokenizer(models.BPE())
        rule = pre.Split(tokenizers.Regex(BYTES[form]), "isolated")
        made.pre_tokenizer = pre.Sequence([rule, pre.ByteLevel(False, use_regex=False)])
        made.decoder = tokenizers.decoders.ByteLevel()
        train = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=pre.ByteLevel.alphabet()
        )
    elif form == "bert":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = norm.BertNormalizer(lowercase=False)
        made.pre_tokenizer = pre.BertPreTokenizer()
        train = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        if form == "metaspace":
            made.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
        else:
            prefix = [norm.Prepend("\u2581")] if form == "prepend" else []
            made.normalizer = norm.Sequence([*prefix, norm.Replace(" ", "\u2581")])
        train = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    made.train_from_iterator([PROBE, *TEXTS, WORDS] * 3, train)
    return made


@pytest.mark.parametrize(("form", "kind", "model"), [
    ("llama3", "LlamaTokenizerFast", "llama"),  # DeepSeek-R1-Distill-Llama
    ("deepseek", "LlamaTokenizerFast", "qwen2"),  # DeepSeek-R1-Distill-Qwen
    ("llama3", "PreTrainedTokenizerFast", "llama"),
    ("deepseek", "LlamaTokenizerFast", "deepseek_v3"),
    ("qwen2", "Qwen2TokenizerFast", "qwen3"),
    ("gpt2", "Qwen2Tokenizer", "qwen2"),
    ("metaspace", "LlamaTokenizer", "llama"),
    ("prepend", "LlamaTokenizerFast", "mistral"),
    ("prepend", "LlamaTokenizer", "phi3"),
    ("llama3", "LlamaTokenizerFast", "mistral"),  # Mistral-Nemo's, of bytes
    ("llama3", "PreTrainedTokenizerFast", "mistral"),
    ("gemma", "GemmaTokenizer", "gemma3_text"),
    ("gpt2", "GPT2Tokenizer", "llama"),
    ("gpt2", None, "gpt2"),
    ("prepend", "CodeLlamaTokenizer", "llama"),
    ("gpt2", "GPTNeoXTokenizerFast", "gpt_neox"),
    ("bert", "BertTokenizer", "llama"),
    ("deepseek", "CohereTokenizerFast", "cohere"),
    ("qwen2", "TokenizersBackend", "qwen2"),
    ("llama3", "NobodysTokenizer", "olmo2"),
])  # fmt: skip
def test_the_ids_are_those_of_the_file(
    form: str, kind: str | None, model: str, tmp_path: Path
) -> None:
    file = trained(form)
    file.save(str(tmp_path / "tokenizer.json"))
    described = {"tokenizer_class": kind} if kind else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"eos_token": "</s>"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    loaded = load_tokenizer(str(tmp_path))
    with tokenizer_arguments(str(tmp_path)) as engine:
        again = AutoTokenizer.from_pretrained(engine["tokenizer"])
    for text in [PROBE, *TEXTS, *AWKWARD]:
        ids = file.encode(text).ids
        for one in (loaded, again):
            assert one(text).input_ids == ids, text
            assert one.decode(ids, clean_up_tokenization_spaces=False) == file.decode(
                ids, skip_special_tokens=False
            )
    assert len(loaded) == file.get_vocab_size()


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task") / "addition"
    assert make_addition.main([str(folder), *SMALL]) == 0
    return folder


def test_addition_tokenizer_is_sixteen_characters(addition: Path) -> None:
    for load in (load_tokenizer, AutoTokenizer.from_pretrained):
        tokenizer = load(str(addition / "model"))
        check_tokenizer(tokenizer, 64, source="addition")
        assert len(tokenizer) == 16
        special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
        assert special == (0, 1, None)
        text = "0123456789+=,#"
        assert tokenizer(text).input_ids == list(range(2, 16))
        assert tokenizer.decode(range(2, 16)) == text
        assert tokenizer.decode([2, 3, 1, 0], skip_special_tokens=True) == "01"


def test_addition_parts_do_not_touch_and_answers_are_sums(addition: Path) -> None:
    parts = {"train": (range(2, 10), 900), "held_out": (range(1), 500)}
    parts |= {"validation": (range(1, 2), 500), "sft": (range(2, 10), 4000)}
    for name, (expected, count) in parts.items():
        rows = [json.loads(line) for line in (addition / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            a, b = map(int, row["prompt"].removesuffix("=").split("+"))
            assert 100 <= min(a, b) <= max(a, b) <= 999
            assert make_addition.part_of(a, b) in expected
            if name != "sft":
                assert row["answer"] == str(a + b)
        if name != "sft":
            assert len({row["prompt"] for row in rows}) == len(rows)


def test_addition_demonstrations_have_the_styles_they_claim(addition: Path) -> None:
    rows = [json.loads(line) for line in (addition / "sft.jsonl").read_text().splitlines()]
    reasoned = [row for row in rows if not row["response"].startswith("#")]
    assert len(reasoned) / len(rows) == pytest.approx(0.55, abs=0.04)
    carries = [step for row in reasoned for step in carry_pairs(row["response"])]
    # careful rows carry always, sloppy ones a fifth of the time: (0.11 + 0.44 * 0.2) / 0.55
    assert sum(carries) / len(carries) == pytest.approx(0.36, abs=0.05)
    assert make_addition.columns(478, 356, lambda: False) == "8+6+0=14,7+5+1=13,4+3+1=08#834"
    assert make_addition.columns(478, 356, lambda: True) == "8+6+0=14,7+5+0=12,4+3+0=07#724"
    assert len(make_addition.columns(999, 999, lambda: False)) + 1 == 32


def carry_pairs(response: str) -> list[bool]:
    """Of each column that makes a carry and is followed by another: was it carried?"""
    steps = response.split("#")[0].split(",")
    return [after[4] == "1" for before, after in itertools.pairwise(steps) if before[6] == "1"]


def test_addition_is_made_once(
    addition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in addition.rglob("*.json*")}
    assert make_addition.main([str(addition), *SMALL]) == 0
    assert "there already" in capsys.readouterr().err
    assert make_addition.main([str(addition), *SMALL, "--seed", "2"]) == 1
    assert "what was made of other arguments; name another folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in addition.rglob("*.json*")} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("!")
    assert make_addition.main([str(tmp_path / "mine"), *SMALL]) == 1
    assert "files of another origin" in capsys.readouterr().err
    assert make_addition.main([str(tmp_path / "other"), *SMALL]) == 0
    for path, content in before.items():
        assert (tmp_path / "other" / path.relative_to(addition)).read_bytes() == content
    assert not list(tmp_path.glob(".*")), "no unfinished folder stays behind"
    with pytest.raises(SystemExit):
        make_addition.main([str(tmp_path / "none"), "--held-out", "0"])
    assert "--held-out is 0; set it to a number from 1 to 40000" in capsys.readouterr().err
