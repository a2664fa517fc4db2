"""The verifier of mathematics on GSM8K and DAPO-Math-17k: right on every reference answer, wrong on
every changed one.

Set MEGARL_GSM8K to a folder with GSM8K's train.jsonl and test.jsonl to run over all 8,792 problems;
otherwise the rows below, written in its schema, stand for them.
"""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from support.commands import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.rows import text_of
from megarl.data.source import load_prompts
from megarl.environments.verifiers import Verifier, load_verifier
from megarl.settings.data import PromptsConfig
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

NUM_PROBLEMS = 7_473 + 1_319


def written_rows() -> list[dict[str, str]]:
    """Rows in GSM8K's schema: reasoning with <<calculations>>, then `#### number`."""
    rows = []
    for n in range(1, 13):
        a, b = 37 * n, 11 * n + 5
        rows += [
            (f"Ann has {a} clips and buys {b}. How many?",
             f"Ann has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} clips.", f"{a + b}"),
            (f"A car costs ${a},500. What are two?",
             f"Two cost $<<{a}500*2={a * 1000}>>{a},500 x 2.", f"{2 * (a * 1000 + 500):,}"),
            (f"Bo owes {b} and has {n}. What is left?",
             f"{n}-{b} = <<{n}-{b}={n - b}>>{n - b}", f"{n - b}"),
            (f"Half of {2 * n + 1}?", f"{2 * n + 1}/2 = <<({2 * n + 1})/2={n}.5>>{n}.5", f"{n}.5"),
        ]  # fmt: skip
    return [
        {"question": question, "answer": f"{work}\n#### {answer}"}
        for question, work, answer in rows
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    folder = os.environ.get("MEGARL_GSM8K")
    if folder:
        files = [Path(folder) / "train.jsonl", Path(folder) / "test.jsonl"]
    else:
        files = [tmp_path_factory.mktemp("gsm8k") / "train.jsonl"]
        write_rows(files[0], written_rows())
    prompts: list[Prompt] = []
    for file in files:
        read = PromptsConfig(
            source=str(file), prompt_column="question", answer_after="####", shuffle=False
        )
        prompts += load_prompts(read, tokenizer(), seed=1)
    assert len(prompts) == (NUM_PROBLEMS if folder else len(written_rows()))
    return prompts


@pytest.fixture(scope="module")
def math() -> Verifier:
    return load_verifier(EnvironmentConfig(verifier="math"))


def ask(math: Verifier, prompt: Prompt, response: str) -> float:
    return asyncio.run(math(prompt, response))  # type: ignore[arg-type]


def changed(answer: str) -> str:
    """The answer's number, plus one."""
    return str(Fraction(answer.replace(",", "")) + 1)


def test_every_reference_answer_is_right_and_every_changed_one_wrong(
    gsm8k: list[Prompt], math: Verifier
) -> None:
    whole = [(prompt, prompt.fields["answer"]) for prompt in gsm8k]
    assert [text for prompt, text in whole if ask(math, prompt, text) != 1.0] == []
    altered = [
        (prompt, f"{text.rpartition('####')[0]}#### {changed(prompt.answer)}")
        for prompt, text in whole
    ]
    assert [text for prompt, text in altered if ask(math, prompt, text) != 0.0] == []


def test_rows_of_dapo_math(tmp_path: Path, math: Verifier) -> None:
    ask_for = (
        "Solve the following math problem step by step. The last line of your response should be of"
        " the form Answer: $Answer."
    )
    answers = ["34", "-7", "\\frac{3}{4}", "x^2+1", "1000000"]
    rows = [
        {"prompt": [{"content": f"{ask_for}\n\nProblem {n}?", "role": "user"}],
         "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}}
        for n, answer in enumerate(answers)
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    speaker = tokenizer()
    speaker.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    column: Any = {"answer_column": "reward_model.ground_truth", "template": "chat"}
    read = PromptsConfig(source=str(tmp_path / "dapo.parquet"), **column, shuffle=False)
    prompts = list(load_prompts(read, speaker, seed=1))
    assert [prompt.answer for prompt in prompts] == answers
    assert prompts[1].text == f"user: {ask_for}\n\nProblem 1?\nassistant:"
    for prompt in prompts:
        for right in (f"Thus \\boxed{{{prompt.answer}}}.", f"Answer: ${prompt.answer}$"):
            assert ask(math, prompt, right) == 1.0, right
        nearly = (f"Thus \\boxed{{{prompt.answer}+1}}.", f"Answer: ${prompt.answer}+1$")
        for wrong in (*nearly, "", "Answer:", "\\boxed{"):
            assert ask(math, prompt, wrong) == 0.0, wrong


@pytest.mark.parametrize(("value", "text"), [
    (72.0, "72"), (-3.0, "-3"), (-0.0, "0"), (1e20, "1" + 20 * "0"), (0.5, "0.5"), (72, "72"),
    ("72.0", "72.0"), (Decimal("72.0"), "72.0"), (1e30, "1e+30"),
])  # fmt: skip
def test_whole_numbers_of_float_columns_are_written_as_such(value: Any, text: str) -> None:
    assert text_of(value, what="the answer", place="row 3") == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, True])
def test_answers_that_are_no_numbers_are_refused_with_their_row(value: Any) -> None:
    with pytest.raises(ValueError, match="row 3: the answer is"):
        text_of(value, what="the answer", place="row 3")
