"""A language model as a judge of responses: it reads prompt and response and writes verdicts, from
which the score is read.

    template --parse_template--> [literal, field, ...] --chat template--> JudgePrompt
    (prompt, response) --JudgePrompt--> token ids --engine--> token ids --VerdictReader--> score

Three things never happen. The response is not searched for a verdict, only what the engine has
generated is. A filled-in text is not expanded again, whatever braces it holds. And a filled-in text
never becomes a control token: a response that holds the text `<|im_end|>` would otherwise end the
user's message, and go on as the judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from megarl.chat_template import ChatTemplate, Variables
from megarl.control_tokens import ControlTokens
from megarl.data.config import TemplateName
from megarl.data.rows import column, text_of
from megarl.data.tokens import prompt_tokens
from megarl.environments.scores import BadScore, Outcome, read_score
from megarl.schema import require, shortened
from megarl.types import Prompt, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.apps.serve.served_models import ServedJudge
    from megarl.serve_config import JudgeConfig

ROW = "fields."
"""Beginning of a template's field, such as `fields.question`, that stands for a column of the
prompt's row in the data set."""
FIELD = regex.compile(
    r"\{\{|\}\}|\{(?<field>prompt|response|answer|fields\.[^{}!:]+)\}|\{[^{}]*\}?|\}"
)
"""Regular expression that matches a field of a template, in the group `field`, or another brace."""


def parse_template(template: str, setting: str) -> tuple[list[str], list[str]]:
    """Split the judge's template, a text with fields `{prompt}`, `{response}`, `{answer}` and
    `{fields.NAME}`, into (literals, fields): the text before each field and, as the last literal,
    what follows them all; `{{` stands for a brace. Raises `ValueError`, naming `setting`, for an
    unknown field, or if there is no `{response}`.
    """
    literals, fields, end = [""], list[str](), 0
    for match in FIELD.finditer(template):
        literals[-1] += template[end : match.start()]
        end = match.end()
        if match["field"]:
            fields.append(match["field"])
            literals.append("")
            continue
        require(
            match[0] in ("{{", "}}"),
            f"{setting} has {shortened(repr(match[0]))}, which is none of the fields {{prompt}},"
            " {response}, {answer} and {fields.NAME}; write {{ and }} for braces that are no field",
        )
        literals[-1] += match[0][0]
    literals[-1] += template[end:]
    require(
        "response" in fields,
        f"{setting} has no field {{response}}, so that the judge would not see what it judges; add"
        " it",
    )
    return literals, fields


def values(fields: Sequence[str], prompt: Prompt, response: str) -> dict[str, str]:
    """The texts to put into the judge's template for one response, {field: text}. `fields`: names
    of the template's fields, "prompt", "response", "answer" or "fields.NAME", where NAME is a
    column of the prompt's row in the data set. Columns that are neither text nor number are written
    as JSON. Raises `ValueError` if the prompt has no reference answer or no such column.
    """
    found = {"prompt": prompt.text, "response": response, "answer": prompt.answer}
    require(
        "answer" not in fields or bool(prompt.answer),
        "the judge's template has the field {answer}, but the prompt has no reference answer",
    )
    place = f"row {prompt.index} of the data"
    for field in fields:
        if field.startswith(ROW):
            name = field.removeprefix(ROW)
            value: Any = column(prompt.fields, name, place=place, setting="the judge's template")
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            found[field] = (
                text_of(value, what=f"column '{name}'", place=place)
                if is_plain
                else json.dumps(value, ensure_ascii=False)
            )
    return found


class JudgePrompt:
    """The judge's template, with the tokenizer's chat template around it, as a function from the
    texts of its fields to token ids (`ids`). `fields` lists the fields of the template in order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        *,
        setting: str,
        chat: bool,
        system: str = "",
        variables: Variables | None = None,
    ) -> None:
        """Parse `template`. `setting`: what the recipe calls the template, for errors. `chat`:
        whether the tokenizer's chat template is put around it. `system`: the chat's system message;
        empty for none. `variables`: of the chat template. Raises `ValueError` for a template or a
        tokenizer that cannot be used.
        """
        self._tokenizer, self._control = tokenizer, ControlTokens.of(tokenizer)
        literals, self.fields = parse_template(template, setting)
        self._template: TemplateName = "rendered" if chat else "none"
        self._literals = _in_chat(tokenizer, literals, system, variables) if chat else literals

    def ids(self, filled: Mapping[str, str]) -> list[int]:
        """Token ids of the template with {field: text} filled in. Text that spells a control token
        is tokenised as plain text; raises `ValueError` for a tokenizer that cannot do so.
        """
        whole = self._literals[0]
        for field, literal in zip(self.fields, self._literals[1:], strict=True):
            whole += self._control.as_text(filled[field]) + literal
        return prompt_tokens(self._tokenizer, [whole], self._template)[0]


def _in_chat(
    tokenizer: PreTrainedTokenizerBase,
    literals: Sequence[str],
    system: str,
    variables: Variables | None,
) -> list[str]:
    """The literals with what the tokenizer's chat template writes around them. Raises `ValueError`
    if there is no such template, or the message does not stand in it as it is.
    """
    require(
        bool(tokenizer.chat_template),
        "judge.chat is true, but the judge's tokenizer has no chat template; set chat to false, or"
        " a model with one",
    )
    marks = [f"\ue000{number}\ue001" for number in range(len(literals) - 1)]
    message = literals[0] + "".join(a + b for a, b in zip(marks, literals[1:], strict=True))
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": message})
    template, found = ChatTemplate(tokenizer, variables, "judge", control_tokens=True), list[str]()
    template.check_variables()
    rest = template.text(turns, "the judge's template", asks=True)
    for mark in marks:
        before, _, after = rest.partition(mark)
        require(
            rest.count(mark) == 1,
            "the chat template of the judge's tokenizer does not write the user's message as it"
            " is; set judge.chat to false and write the chat into the template",
        )
        found.append(before)
        rest = after
    return [*found, rest]


SEARCH_LIMIT_S = 1.0
"""Most seconds of one search in a judge's text: a pattern such as `(a+)+b` may need years."""


class NoVerdict(BadScore):
    """Raised where a judge, a language model that scores responses, has written no verdict that can
    be read: the response gets no score, and its failure is counted as "error". The message says
    what was found.
    """

    def __init__(self, said: str) -> None:
        super().__init__("error", said)


class VerdictReader:
    """Reads the score out of the text that a judge, a language model, has written: `read` finds the
    last match of a regular expression. A table maps the matched verdict to a score; without a table
    the verdict is a number, scaled to 0 to 1 if its range is given.
    """

    def __init__(
        self,
        pattern: str,
        choices: Mapping[str, float],
        lowest: float | None = None,
        highest: float | None = None,
    ) -> None:
        """`pattern`: a regular expression with one group, around the verdict; if empty, one of
        `choices` is looked for as a whole word. `choices`: {verdict: score}; if empty, the group is
        a number. A number from `lowest` to `highest` becomes a score from 0 to 1; with None the
        number is the score. Raises `ValueError` for a pattern that is wrong.
        """
        self._scores = {_folded(choice): score for choice, score in choices.items()}
        self._lowest, self._highest = lowest, highest
        if not pattern:
            # The longest first: a text that says "sure not" does not say "sure".
            words = sorted(self._scores, key=len, reverse=True)
            found = "|".join(r"\s+".join(map(regex.escape, word.split())) for word in words)
            self._pattern = regex.compile(rf"(?<!\w)({found})(?!\w)", regex.IGNORECASE)
            return
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(
                f"judge.verdict {shortened(repr(pattern))} is no regular expression ({error});"
                " correct it"
            ) from None
        require(
            self._pattern.groups == 1,
            f"judge.verdict {shortened(repr(pattern))} has {self._pattern.groups} groups; set one"
            " with exactly one group, around the verdict itself, as in 'Score: (\\d+)', and write"
            " (?:...) for others",
        )

    def read(self, text: str) -> float:
        """The score of the last match of the pattern in `text`, which is what a judge has
        generated, without its prompt. Raises `NoVerdict` if there is no match, no known verdict, or
        a number out of range.
        """
        said = None
        try:
            for match in self._pattern.finditer(text, timeout=SEARCH_LIMIT_S):
                said = match[1]
        except TimeoutError:
            raise NoVerdict(
                f"judge.verdict was not found within {SEARCH_LIMIT_S:g} s in {_end(text)}; set a"
                " simpler pattern"
            ) from None
        if said is None:
            raise NoVerdict(f"the judge wrote no verdict: {_end(text)}")
        if self._scores:
            if (score := self._scores.get(_folded(said))) is None:
                raise NoVerdict(
                    f"the judge's verdict is {shortened(repr(said))}, none of judge.choices"
                )
            return score
        return self._scaled(said)

    def _scaled(self, said: str) -> float:
        try:
            number = float(said)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise NoVerdict(f"the judge's verdict is {shortened(repr(said))}, no finite number")
        if self._lowest is None or self._highest is None:
            return number
        if not self._lowest <= number <= self._highest:
            raise NoVerdict(
                f"the judge's verdict is {number:g}, not from judge.lowest {self._lowest:g} to"
                f" judge.highest {self._highest:g}"
            )
        return (number - self._lowest) / (self._highest - self._lowest)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _end(text: str) -> str:
    """The last characters of a text, on one line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 200 else f"...{line[-197:]}")


async def judged(
    config: JudgeConfig,
    served: ServedJudge,
    generate: Callable[..., Awaitable[Segment]],
    prompt: Prompt,
    response: str,
) -> Outcome:
    """Ask the judge, a language model, about a response `config.samples` times at the same time.
    Returns the mean of the verdicts that can be read as `score`; with several samples, `metrics`
    has `unread`, the fraction that could not be read. `served`: the judge's tokenizer, template and
    reader of verdicts. `generate`: the method of the vLLM engine that continues token ids; its
    errors are raised unchanged. Raises `NoVerdict` if no verdict can be read or the prompt is too
    long, and `BadScore` if the mean is not finite or too large for a reward.
    """
    try:
        ids = served.prompt.ids(values(served.prompt.fields, prompt, response))
    except ValueError as error:
        raise NoVerdict(str(error)) from None
    if len(ids) + config.max_new_tokens > served.max_tokens:
        raise NoVerdict(
            f"the judge would read {len(ids):,} tokens, and with judge.max_new_tokens"
            f" {config.max_new_tokens:,} they exceed judge.max_tokens {served.max_tokens:,}"
        )

    async def verdict(number: int) -> float | NoVerdict:
        segment = await generate(
            ids,
            seed=seed_of(config.seed, ids, number),
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
        )
        if config.require_stop and segment.finish != "stop":
            return NoVerdict(
                f"the judge's text was cut off at judge.max_new_tokens {config.max_new_tokens};"
                " raise it, or set judge.require_stop to false if the verdict comes first"
            )
        written = segment.arrays.token_ids.tolist()
        text = str(served.tokenizer.decode(written, skip_special_tokens=True))
        try:
            return served.reader.read(text)
        except NoVerdict as error:
            return error

    answers = await asyncio.gather(*map(verdict, range(config.samples)))
    found = [answer for answer in answers if not isinstance(answer, NoVerdict)]
    if not found:
        raise next(answer for answer in answers if isinstance(answer, NoVerdict))
    unread = (len(answers) - len(found)) / len(answers)
    score = read_score(sum(found) / len(found))
    return Outcome(score.reward, metrics={"unread": unread} if config.samples > 1 else {})


def seed_of(seed: int, ids: list[int], number: int) -> int:
    """Seed, below 2**31, for sampling one of a judge's verdicts on a response, the one with the
    number `number` (from 0). `ids`: the judge's prompt as token ids; `seed`: `judge.seed` of the
    recipe. Equal arguments give the same seed.
    """
    content = np.asarray([seed, number, *ids], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") >> 1
