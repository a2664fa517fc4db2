"""Sections of a recipe for data: where prompts, demonstrations and preferences come from, and which
columns of a row are read.
"""

from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import PathText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, replace, require

TemplateName = Literal["none", "chat", "rendered"]
"""How the texts of a data set become what a model reads: `none`, as they are, with the tokenizer's
first special tokens; `chat`, by the tokenizer's chat template; `rendered`, as they are, because a
chat template has written them already, special tokens included."""

TemplateVariables = dict[str, bool | int | float | str]
"""{name: value} of variables that a chat template reads, such as enable_thinking."""

Arguments = dict[str, Any]
"""{name: value} for a source that makes its rows."""

TooLong = Literal["refuse", "drop", "truncate_left"]
"""What becomes of rows that are too long: an error, left out, or prompts that begin later."""


WEIGHT_TOLERANCE = Fraction(1, 10**6)
"""How far the sum of a mixture's weights may be from 1; within it the weights are scaled to 1."""


class PromptSourceConfig(Config):
    """One source in `prompts.sources`, a mixture of data sets. A setting that is null has the value
    that `prompts` itself has for it.
    """

    source: Annotated[PathText, Needs("set it to a data file or hub name")]
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    weight: Annotated[float, Range(1e-6, 1.0)]
    """Fraction of the prompts that come from this source; the weights of a mixture add up to 1."""
    arguments: Arguments | None = None
    """Of a source that makes its rows, such as `reasoning_gym:NAME`; null: `prompts.arguments`."""
    environment: str | None = None
    """Name in `environment.mixture` of the verifier for the rows of this source."""
    environment_column: str | None = None
    """Column with the name of the verifier for each row, used instead of `environment`."""
    subset: str | None = None
    """Configuration of a hub data set that has several; null: `prompts.subset`."""
    split: str | None = None
    """Split of a hub data set or of a folder whose files are named by split; null:
    `prompts.split`."""
    unique: bool | None = None
    """Keep each prompt only once; null: `prompts.unique`."""
    prompt_column: str | None = None
    """Column with the prompt; null: `prompts.prompt_column`."""
    answer_column: str | None = None
    """Column with the reference answer; null: `prompts.answer_column`."""
    tools_column: str | None = None
    """Column with the tools that the model is shown; null: `prompts.tools_column`."""
    choices_column: str | None = None
    """Column with the choices of a multiple-choice problem; null: `prompts.choices_column`."""
    answer_after: str | None = None
    """Marker behind which the reference answer stands; null: `prompts.answer_after`."""
    template: TemplateName | None = None
    """How prompts are rendered: `none`, `chat` or `rendered`; null: `prompts.template`."""
    template_variables: TemplateVariables | None = None
    """Variables that the chat template reads; null: `prompts.template_variables`."""
    system: str | None = None
    """System message put before the prompt; null: `prompts.system`."""
    instruction: str | None = None
    """Text appended to the prompt; null: `prompts.instruction`."""
    shuffle: bool | None = None
    """Shuffle every epoch; null: `prompts.shuffle`."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only the first `limit` rows; null: `prompts.limit`."""


class DataSetConfig(Config):
    """Settings that data sets of every kind have: where the rows are and how they are read."""

    source: PathText = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    split: str = "train"
    """Split of a hub data set, such as 'train', or of a folder whose files are named by split;
    ignored for a single file or a pattern."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content}; content may be a text
    or a list of OpenAI content parts). A name with dots selects a nested column."""
    tools_column: str = "tools"
    """With `template: chat`, column with the tools that the model is shown: a list in OpenAI's
    format, or the text of its JSON. Rows without it have none; empty: no row has."""
    template: TemplateName = "none"
    """`chat` renders the prompt with the tokenizer's chat template; required for a chat column.
    `rendered` reads texts that a template has written, as `megarl sample` stores them."""
    template_variables: Annotated[TemplateVariables, Of("template", "chat")] = {}
    """With `template: chat`, variables that the chat template reads: `{enable_thinking: false}`.
    One that it does not read is an error."""
    control_tokens: Annotated[bool, Of("template", "chat")] = False
    """With `template: chat`, text of a chat that spells a control token of the tokenizer, such as
    `<|im_end|>` in a user's message, is that token; otherwise it is ordinary text. In turns of the
    assistant only the tokens that open and end turns are ordinary text."""
    too_long: TooLong = "refuse"
    """What becomes of rows with more tokens than `max_tokens` (prompts: `max_prompt_tokens`):
    `refuse`, an error before the run starts; `drop`, the row is left out; `truncate_left`, the
    prompt keeps its last tokens only, without the beginning that a chat template has written, a
    response all of its own. Of a conversation the prompt is what stands before the first reply. How
    many such rows there are is said."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only the first `limit` rows."""


class PromptsConfig(DataSetConfig):
    """Rows of a data set, or of a mixture of several, turned into prompts for reinforcement
    learning.
    """

    source: Annotated[PathText, Excludes("sources")] = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub.
    `reasoning_gym:NAME`, `gymnasium:NAME`, `textarena:NAME` and `openenv:http://host:port` make
    their rows (docs/howto/environments_of_others.md)."""
    arguments: Arguments = {}
    """Of a source that makes its rows: `{size: 500, seed: 1}` and settings of its own."""
    sources: tuple[PromptSourceConfig, ...] = ()
    """Several sources, used instead of `source`: `[{source: a.jsonl, weight: 0.7, environment:
    math}, ...]`. Of any n consecutive prompts of training, each source gives its weight x n, with
    an error of at most the number of sources. Each source has its own epochs. The other settings
    of this section hold for every source that does not set its own."""
    environment: str = ""
    """Name in `environment.mixture` of the verifier for all rows; empty without a mixture."""
    environment_column: Annotated[str, Excludes("environment")] = ""
    """Column with the name in `environment.mixture` of the verifier for each row, used instead of
    `environment`. A name with dots selects a nested column."""
    subset: str = ""
    """Configuration of a hub data set that has several (openai/gsm8k: 'main')."""
    unique: bool = False
    """Keep each prompt only once, even if the source repeats it (DAPO-Math-17k repeats each about a
    hundred times)."""
    answer_column: str = "answer"
    """Column with the reference answer for the verifier. A name with dots selects a nested column;
    empty for data without answers, whose reward needs none."""
    choices_column: Annotated[str, Of("answer_column")] = ""
    """Column with the choices of a multiple-choice problem: a list of texts, {label: [...], text:
    [...]}, or {A: text, B: text}. Each choice becomes a line "A. text" below the prompt, and the
    answer (label, text or number from 0) becomes its label. Empty: no choices."""
    answer_after: Annotated[str, Of("answer_column")] = ""
    """If set, the reference answer is the text after the last occurrence of this marker (GSM8K:
    '####')."""
    system: Annotated[str, Of("template", "chat")] = ""
    """A system message put before the prompt when the chat template is used."""
    instruction: str = ""
    """A text appended to the prompt (or to its last user message), after a newline."""
    max_prompt_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 1024
    """Most tokens of a prompt; `too_long` says what becomes of longer ones."""

    def check(self) -> None:
        require(
            self.names_data or not self.arguments,
            f"PromptsConfig.arguments is {self.arguments}, but there is no source; set source to"
            " one that makes its rows, or leave arguments out",
        )
        if not self.sources:
            return
        weights = [part.weight for part in self.sources]
        total = sum(map(exact, weights), Fraction(0))
        require(
            abs(total - 1) <= WEIGHT_TOLERANCE,
            f"the weights of PromptsConfig.sources are {', '.join(f'{one:g}' for one in weights)},"
            f" which add up to {float(total):g}; set weights that add up to 1",
        )
        for number in range(len(self.sources)):
            try:
                self.part(number)
            except ValueError as error:
                raise ValueError(f"PromptsConfig.sources[{number}]: {error}") from None

    def part(self, number: int) -> Self:
        """A `PromptsConfig` for source `number` (from 0) of the mixture `sources`, as if it were
        the only source; a setting that the source leaves out is that of the whole section.
        """
        part = dict(self.sources[number])
        own = {name: part[name] for name in part if name != "weight" and part[name] is not None}
        # A source that says how its rows are judged does not take the other way from around it.
        if "environment" in own:
            own.setdefault("environment_column", "")
        elif "environment_column" in own:
            own["environment"] = ""
        return replace(self, sources=(), **own)

    @property
    def parts(self) -> list[Self]:
        """A list with a `PromptsConfig` for each source, as if it were the only one: several of the
        mixture `sources`, otherwise this configuration alone.
        """
        return [self.part(number) for number in range(len(self.sources))] or [self]

    @property
    def names_data(self) -> bool:
        """Whether the recipe names a data set here, by `source` or `sources`."""
        return bool(self.source or self.sources)

    @property
    def label(self) -> str:
        """The `source` of the prompts, a path or hub name, or those of the mixture `sources` joined
        by " + ", for messages and results.
        """
        return self.source or " + ".join(part.source for part in self.sources)


def exact(weight: float) -> Fraction:
    """The weight as the decimal fraction that the recipe writes: 0.7 gives 7/10, not the nearest
    double.
    """
    return Fraction(repr(weight))


WITHOUT_CHAT = Of("template", "none", "rendered")


class DemonstrationsConfig(DataSetConfig):
    """Rows of a data set, turned into (prompt, response) pairs for supervised fine-tuning."""

    response_column: str = "response"
    """Column with the response; the token that ends a turn is appended."""
    messages_column: Annotated[str, Of("template", "chat")] = ""
    """Column with whole conversations (lists of {role, content, ...}), used instead of
    prompt_column and response_column; needs `template: chat`. Every assistant turn is trained on,
    tool calls included, up to the token that ends it."""
    text_column: Annotated[str, Excludes("messages_column"), WITHOUT_CHAT] = ""
    """Column with whole texts, used instead of prompt_column and response_column: all of a text is
    trained on, up to an end-of-sequence token that is appended."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Most tokens of prompt and response together; `too_long` says what becomes of longer rows."""


class PreferencesConfig(DataSetConfig):
    """Rows of a data set, each with a better and a worse response to one prompt; or, for KTO, each
    with one response and whether it is desirable.
    """

    subset: str = ""
    """Configuration of a hub data set that has several."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content, ...}), which the
    responses go on from. A response that is a conversation may repeat it, whole (as in
    UltraFeedback) or its last turns, or hold it where there is no such column; empty: it always
    does."""
    chosen_column: str = "chosen"
    """Column with the better response: a text, a chat with the assistant's turn alone, or a
    conversation that ends with it; chats need `template: chat`. The token that ends a turn is
    appended to a text."""
    rejected_column: str = "rejected"
    """Column with the worse response, in the same form."""
    margin_column: Annotated[str, Excludes("response_column")] = ""
    """Column with a number: by how much the chosen response is better. `task: reward_model`
    trains the difference of the two scores to exceed it. Empty: 0."""
    response_column: str = ""
    """Used instead of `chosen_column` and `rejected_column`, with KTO only: column with the one
    response of the row."""
    label_column: str = "label"
    """With `response_column`: column that says whether the response is desirable (true or false, 1
    or 0)."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Most tokens of a prompt and one response together; `too_long` says what becomes of longer
    rows."""
