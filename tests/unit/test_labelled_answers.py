"""Agreement of the verifier `math` with labels: GSM8K's reference solutions, each written in many
ways, right and with a wrong number near the right one.

Set MEGARL_GSM8K to a folder with GSM8K's test.jsonl for all of its 1,319 problems; otherwise
numbers of the same kinds stand for them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

from megarl.environments.verifiers import load_verifier
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

LEAST = 0.99
"""Smallest agreement with the labels that is allowed."""
UNFINISHED = "boxed sum"
"""The form whose value has still to be computed: it is no answer, whatever the number is."""
FORMS = {
    "hash": "{work}\n#### {n}",
    "hash, comma": "{work}\n#### {comma}",
    "hash, dollars": "{work}\n#### ${comma}",
    "hash, unit": "{work}\n#### {n} apples",
    "hash, bold": "{work}\n#### **{n}**",
    "hash, exponent": "{work}\n#### {n}e0",
    "hash, then text": "{work}\n#### {n}\n\nCheck: 3 + 4 = 7, which holds.",
    "boxed": "{work} So \\boxed{{{n}}}.",
    "boxed in dollars": "{work} Therefore $\\boxed{{{n}}}$",
    "boxed, displayed": "{work}\n\\[\n\\boxed{{{comma}}}\n\\]",
    "boxed, dollar sign": "{work} $\\boxed{{\\${n}}}$",
    "boxed, text": "{work} $\\boxed{{{n} \\text{{ dollars}}}}$",
    "boxed, comma in braces": "{work} $\\boxed{{{brace}}}$",
    "boxed, then text": "{work} \\boxed{{{n}}}\n\nI hope this helps! Ask me 3 more questions.",
    "boxed, then a unit": "{work} The answer is \\boxed{{{n}}} dollars per week.",
    "boxed equation": "{work} \\boxed{{x = {n}}}",
    "boxed, cents": "{work} \\boxed{{{n}.00}}",
    "boxed twice": "First \\boxed{{{other}}}, no: {work} \\boxed{{{n}}}",
    "boxed, bold": "{work} **\\boxed{{{n}}}**",
    "boxed percent": "{work} \\boxed{{{n}\\%}}",
    "boxed fraction": "{work} \\boxed{{\\frac{{{double}}}{{2}}}}",
    UNFINISHED: "{work} \\boxed{{{less} + 1}}",
    "boxed degrees": "{work} \\boxed{{{n}^\\circ}}",
    "A:": "{work}\nA: {n}",
    "A: with a unit": "{work}\nA: {n} dollars a day",
    "Answer:": "{work}\nAnswer: {n}",
    "Answer: in LaTeX": "{work}\nAnswer: \\({n}\\)",
    "Answer: bold": "{work}\n\n**Answer:** {n}",
    "Final Answer, bold": "{work}\n\n**Final Answer: {comma}**",
    "The final answer is": "{work}\nThe final answer is {n}.",
    "The answer is, in dollars": "{work}\nThe answer is ${comma}.00.",
    "The answer is": "{work} The answer is {comma}.",
    "The answer is, unit": "{work} The answer is {n} apples.",
    "The answer is, in LaTeX": "{work} The answer is ${n}$.",
    "bold in a sentence": "{work}\nSo she has **{n}** apples left.",
    "bold dollars": "{work}\nSo he makes **${comma}** every day.",
    "a sentence": "{work}\nTherefore, the total is {n}.",
    "a sentence with dollars": "{work}\nTherefore, the total is ${comma}.",
    "a list before": "1. 3 apples\n2. 4 pears\n{work}\nIn total: {n}",
    "an equation": "{work}\n2 + 3 = 5, so the total is 5 + x = {n}",
    "an equation in LaTeX": "{work}\n$2 \\times 3 = 6$, so the total is $6 + x = {n}$.",
    "Minerva": "{work}\nFinal Answer: The final answer is ${n}$. I hope it is correct.",
    "reasoning in tags": "<think>\nMaybe \\boxed{{{other}}}? {work}\n</think>\nIt is \\boxed{{{n}}}",
    "answer in tags": "<think>{work}</think><answer>{n}</answer>",
    "sentence in tags": "<think>{work}</think>\n<answer>The total is {comma} dollars.</answer>",
    "boxed in tags": "<think>{work}</think>\n<answer>So \\boxed{{{n}}}</answer>",
}
"""Ways in which models write the final answer {n} behind their work."""


def written(number: Fraction, work: str) -> dict[str, str]:
    """The number in the ways that the forms use."""

    def plain(value: Fraction) -> str:
        return str(value) if value.denominator == 1 else str(float(value))

    value: int | float = number.numerator if number.denominator == 1 else float(number)
    return {
        "work": work, "n": plain(number), "comma": f"{value:,}",
        "brace": f"{value:,}".replace(",", "{,}"), "other": plain(number + 7),
        "double": plain(2 * number), "less": plain(number - 1),
    }  # fmt: skip


def near(number: Fraction, turn: int) -> Fraction:
    """A wrong number near the right one: one more, ten times, the negative, a half more."""
    other = -number if number else number + 2
    return (number + 1, number * 10 if number else number + 3, other, number + Fraction(1, 2))[
        turn % 4
    ]


def solutions() -> list[tuple[str, str]]:
    """(work, reference answer) of each problem."""
    folder = os.environ.get("MEGARL_GSM8K")
    if not folder:
        answers = ["18", "3", "70,000", "540", "2,125", "0", "1,234,567", "64", "5.5", "-4"]
        return [(f"We add 2 and 3, {n} times.", answer) for n, answer in enumerate(answers)]
    found = []
    for line in (Path(folder) / "test.jsonl").read_text().splitlines():
        work, _, answer = json.loads(line)["answer"].rpartition("####")
        found.append((re.sub(r"<<.*?>>", "", work).strip(), answer.strip()))
    return found


async def test_math_agrees_with_the_labels() -> None:
    math = load_verifier(EnvironmentConfig(verifier="math"))
    total: Counter[bool] = Counter()
    wrong: Counter[tuple[str, bool]] = Counter()
    shown: dict[tuple[str, bool], str] = {}

    for index, (work, answer) in enumerate(solutions()):
        value = Fraction(answer.replace(",", ""))
        for turn, (form, template) in enumerate(FORMS.items()):
            for number, label in ((value, True), (near(value, index + turn), False)):
                if number.denominator != 1 and (".00" in template or "e0" in template):
                    continue  # 5.5.00 is no number
                text = template.format(**written(number, work))
                label = label and form != UNFINISHED
                score = await math(Prompt(index, "", [], answer), text)
                total[label] += 1
                if score != float(label):
                    wrong[form, label] += 1
                    shown.setdefault((form, label), f"{answer}: ...{text[-100:]!r}")
    count, failed = sum(total.values()), sum(wrong.values())
    print(f"{count:,} responses, {total[True]:,} right and {total[False]:,} wrong:"
          f" {count - failed:,} verdicts agree, {1 - failed / count:.5f}")  # fmt: skip
    for key, number in wrong.most_common():
        print(*key, number, shown[key])
    assert min(total.values()) > 0.4 * count
    assert 1 - failed / count >= LEAST, shown
