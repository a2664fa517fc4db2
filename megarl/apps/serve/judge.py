"""A language model as a judge of responses: it reads prompt and response and writes verdicts, from
which the score is read.

    (prompt, response) --JudgePrompt--> token ids --vLLM--> texts --VerdictReader--> score

Three things never happen. The response is not searched for a verdict, only what vLLM has generated
is. A filled-in text is not expanded again, whatever braces it holds. And a filled-in text never
becomes a control token: a response that holds the text `<|im_end|>` would otherwise end the user's
message, and go on as the judge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

import regex

from megarl.data.chat_template import ChatTemplate
from megarl.data.control_tokens import ControlTokens
from megarl.data.rows import column, text_of
from megarl.data.tokens import prompt_tokens
from megarl.environments.scores import BadScore, Outcome, read_score
from megarl.settings.schema import require, shortened
from megarl.settings.serve import JudgeConfig
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "fields."
"""Beginning of a template's field, such as `fields.question`, that stands for a column of the
prompt's row in the data set."""
FIELD = regex.compile(r"|prompt|response|answer|fields\.[^{}!:]+")


def parse_template(template: str, setting: str) -> list[tuple[str, str]]:
    """Split the judge's template: "Q: {prompt} A: {response}" becomes [("Q: ", "prompt"),
    (" A: ", "response")]; text at the end has the field "". Raises `ValueError`, naming `setting`,
    for an unknown field, or if there is no `{response}`.
    """
    doubling = "write {{ and }} for braces that are no field"
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{setting} has a single brace ({error}); {doubling}") from None
    parts = list[tuple[str, str]]()
    for literal, name, spec, conversion in pieces:
        field = (
            (name or "") + (f"!{conversion}" if conversion else "") + ((spec and f":{spec}") or "")
        )
        require(
            FIELD.fullmatch(field) is not None,
            f"{setting} has {shortened(repr(f'{{{field}}}'))}, which is none of the fields"
            f" {{prompt}}, {{response}}, {{answer}} and {{fields.NAME}}; {doubling}",
        )
        parts.append((literal, field))
    require(
        any(field == "response" for _, field in parts),
        f"{setting} has no field {{response}}, so that the judge would not see what it judges; add"
        " it",
    )
    return parts


def field_values(fields: Sequence[str], prompt: Prompt, response: str) -> dict[str, str]:
    """{field: text} of the template's `fields` for one response. Columns that are neither text nor
    number are written as JSON. Raises `ValueError` if the prompt has no reference answer or no such
    column.
    """
    texts = {"prompt": prompt.text, "response": response, "answer": prompt.answer}
    require(
        "answer" not in fields or bool(prompt.answer),
        "the judge's template has the field {answer}, but the prompt has no reference answer",
    )
    row = f"row {prompt.index} of the data"
    for field in fields:
        if field.startswith(COLUMN):
            name = field.removeprefix(COLUMN)
            value: Any = column(prompt.fields, name, place=row, setting="the judge's template")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                value = json.dumps(value, ensure_ascii=False)
            texts[field] = text_of(value, what=f"column '{name}'", place=row)
    return texts


class JudgePrompt:
    """The judge's template, with the tokenizer's chat template around it, as a function from the
    texts of its fields to token ids (`ids`). `fields` lists the fields of the template in order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: JudgeConfig,
        template: str,
        setting: str = "judge.template",
    ) -> None:
        """`config`: whether the tokenizer's chat template is put around `template`, and with which
        system message; `setting`: what the recipe calls the template, for errors. Raises
        `ValueError` for a template or a tokenizer that cannot be used.
        """
        self._tokenizer, self._control = tokenizer, ControlTokens.of(tokenizer)
        self._parts = parse_template(template, setting)
        self.fields = [field for _, field in self._parts if field]
        self._system, self._chat = config.system, None
        if config.chat:
            require(
                bool(tokenizer.chat_template),
                "judge.chat is true, but the judge's tokenizer has no chat template; set chat to"
                " false, or a model with one",
            )
            variables = config.template_variables
            self._chat = ChatTemplate(tokenizer, variables, "judge", control_tokens=True)
            self._chat.check_variables()

    def ids(self, values: Mapping[str, str]) -> list[int]:
        """Token ids of the template with {field: text} filled in. Text that spells a control token
        is tokenised as plain text; raises `ValueError` for a tokenizer that cannot do so.
        """
        text = "".join(
            literal + (self._control.as_text(values[field]) if field else "")
            for literal, field in self._parts
        )
        if self._chat is None:
            return prompt_tokens(self._tokenizer, [text], "none")[0]
        turns = [{"role": "system", "content": self._system}] if self._system else []
        turns.append({"role": "user", "content": text})
        text = self._chat.text(turns, "the judge's template", asks=True)
        return prompt_tokens(self._tokenizer, [text], "rendered")[0]


class VerdictReader:
    """Reads the score out of the text that a judge has written: the last match of a regular
    expression. A table maps the matched verdict to a score; without a table the verdict is a
    number, scaled to 0 to 1 if its range is given.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """`config.verdict`: a regular expression with one group, around the verdict; if empty, one
        of `choices`, {verdict: score}, is looked for as a whole word. A number from `lowest` to
        `highest` becomes a score from 0 to 1. Raises `ValueError` for a pattern that is wrong.
        """
        self._scores = {_folded(choice): score for choice, score in config.choices.items()}
        self._range, pattern = (config.lowest, config.highest), config.verdict
        if not pattern:
            # The longest first: a text that says "sure not" does not say "sure".
            words = sorted(self._scores, key=len, reverse=True)
            either = "|".join(r"\s+".join(map(regex.escape, word.split())) for word in words)
            pattern = rf"(?i)(?<!\w)({either})(?!\w)"
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
        """The score of the last match in `text`, which a judge has generated. Raises `BadScore` if
        there is no match, no known verdict, or a number out of range.
        """
        # A pattern such as `(a+)+b` may need years.
        verdicts = [match[1] for match in self._pattern.finditer(text, timeout=1.0)]
        if not verdicts or verdicts[-1] is None:
            line = " ".join(text.split())
            end = line if len(line) <= 200 else f"...{line[-197:]}"
            raise BadScore("error", f"the judge wrote no verdict: {end!r}")
        word, (lowest, highest) = verdicts[-1], self._range
        shown = f"the judge's verdict is {shortened(repr(word))}"
        if self._scores:
            if (score := self._scores.get(_folded(word))) is None:
                raise BadScore("error", f"{shown}, none of judge.choices")
            return score
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadScore("error", f"{shown}, no finite number")
        if lowest is None or highest is None:
            return number
        if not lowest <= number <= highest:
            allowed = f"from judge.lowest {lowest:g} to judge.highest {highest:g}"
            raise BadScore("error", f"the judge's verdict is {number:g}, not {allowed}")
        return (number - lowest) / (highest - lowest)


@dataclass(frozen=True)
class ServedJudge:
    """What a reward server needs to ask its judge: settings, prompt template, reader of verdicts
    and limits, after their checks. It holds no weights, which vLLM loads later.
    """

    config: JudgeConfig
    max_tokens: int
    """Most tokens of what the judge reads and writes in one verdict."""
    prompt: JudgePrompt
    reader: VerdictReader
    stop_token_ids: list[int]
    """Ids of tokens that end what the judge writes."""


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


async def judge_response(
    judge: ServedJudge,
    ask: Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]],
    prompt: Prompt,
    response: str,
) -> Outcome:
    """Ask the judge about a response, `samples` times in one request. Returns the mean of the
    verdicts that can be read as `score`; with several samples, `metrics` has `unread`, the fraction
    of the others. `ask`: of `VllmServer`. Raises `BadScore` if no verdict can be read.
    """
    config = judge.config
    try:
        ids = judge.prompt.ids(field_values(judge.prompt.fields, prompt, response))
    except ValueError as error:
        raise BadScore("error", str(error)) from None
    request = {
        "prompt": ids,
        "n": config.samples,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "stop_token_ids": judge.stop_token_ids,
    }
    scores, problems = list[float](), list[BadScore]()
    for choice in (await ask("/v1/completions", request))["choices"]:
        try:
            if config.require_stop and choice["finish_reason"] != "stop":
                limit = f"judge.max_new_tokens {config.max_new_tokens}"
                raise BadScore(
                    "error",
                    f"the judge's text was cut off at {limit}; raise it, or set judge.require_stop"
                    " to false if the verdict comes first",
                )
            scores.append(judge.reader.read(choice["text"]))
        except BadScore as problem:
            problems.append(problem)
    if not scores:
        raise problems[0]
    mean = read_score(sum(scores) / len(scores)).reward
    unread = len(problems) / config.samples
    return Outcome(mean, metrics={"unread": unread} if config.samples > 1 else {})
