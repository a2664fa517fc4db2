"""Where prompts and demonstrations come from, and which columns of a row matter."""

from fractions import Fraction
from typing import Annotated, Literal, Self

from megarl.limits import MOST_TOKENS
from megarl.recipe_paths import PathText
from megarl.schema import Config, Excludes, Needs, Of, Range, replace, require

TemplateName = Literal["none", "chat", "rendered"]
"""How the texts of a data set become what a model reads: `none`, as they are, with the tokenizer's
first special tokens; `chat`, by the tokenizer's chat template; `rendered`, as they are, because a
chat template has written them already, special tokens included."""

TemplateVariables = dict[str, bool | int | float | str]
"""{name: value} of variables that a chat template reads, such as enable_thinking."""

TooLong = Literal["refuse", "drop", "truncate_left"]
"""What becomes of rows that are too long: an error, left out, or prompts that begin later."""


WEIGHT_TOLERANCE = Fraction(1, 10**6)
"""How far the sum of a mixture's weights may be from 1; within it the weights are scaled to 1."""


class PromptSourceConfig(Config):
    """One source of a mixture. A setting that is None is that of the section around `sources`."""

    source: Annotated[PathText, Needs("set it to a data file or hub name")]
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    weight: Annotated[float, Range(1e-6, 1.0)]
    """Share of the prompts that come from this source; the weights of a mixture add up to 1."""
    environment: str | None = None
    """Name in `environment.mixture` of the verifier for the rows of this source."""
    environment_column: str | None = None
    """Column with that name for each row, used instead of `environment`."""
    subset: str | None = None
    """As `prompts.subset`, for this source."""
    split: str | None = None
    """As `prompts.split`, for this source."""
    unique: bool | None = None
    """As `prompts.unique`, for this source."""
    prompt_column: str | None = None
    """As `prompts.prompt_column`, for this source."""
    answer_column: str | None = None
    """As `prompts.answer_column`, for this source."""
    tools_column: str | None = None
    """As `prompts.tools_column`, for this source."""
    choices_column: str | None = None
    """As `prompts.choices_column`, for this source."""
    answer_after: str | None = None
    """As `prompts.answer_after`, for this source."""
    template: TemplateName | None = None
    """As `prompts.template`, for this source."""
    template_variables: TemplateVariables | None = None
    """As `prompts.template_variables`, for this source."""
    system: str | None = None
    """As `prompts.system`, for this source."""
    instruction: str | None = None
    """As `prompts.instruction`, for this source."""
    shuffle: bool | None = None
    """As `prompts.shuffle`, for this source."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """As `prompts.limit`, for this source."""


class PromptsConfig(Config):
    """Rows of a data set, or of several in a mixture, turned into prompts."""

    source: Annotated[PathText, Excludes("sources")] = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
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
    split: str = "train"
    """Split of a hub data set, such as 'train', or of a folder whose files are named by split;
    ignored for a single file or a pattern."""
    unique: bool = False
    """Keep each prompt only once, even if the source repeats it (DAPO-Math-17k repeats each about a
    hundred times)."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content}; content may be a text
    or a list of OpenAI content parts). A name with dots selects a nested column."""
    answer_column: str = "answer"
    """Column with the reference answer for the verifier. A name with dots selects a nested column;
    empty for data without answers, whose reward needs none."""
    tools_column: str = "tools"
    """With `template: chat`, column with the tools that the model is shown: a list in OpenAI's
    format, or the text of its JSON. Rows without it have none; empty: no row has."""
    choices_column: Annotated[str, Of("answer_column")] = ""
    """Column with the choices of a multiple-choice problem: a list of texts, {label: [...], text:
    [...]}, or {A: text, B: text}. Each choice becomes a line "A. text" below the prompt, and the
    answer (label, text or number from 0) becomes its label. Empty: no choices."""
    answer_after: Annotated[str, Of("answer_column")] = ""
    """If set, the reference answer is the text after the last occurrence of this marker (GSM8K:
    '####')."""
    template: TemplateName = "none"
    """`chat` renders the prompt with the tokenizer's chat template; required for a chat column.
    `rendered` reads texts that a template has written, as `megarl sample` stores them."""
    template_variables: Annotated[TemplateVariables, Of("template", "chat")] = {}
    """With `template: chat`, variables that the chat template reads: `{enable_thinking: false}`.
    One that it does not read is an error."""
    system: Annotated[str, Of("template", "chat")] = ""
    """A system message put before the prompt when the chat template is used."""
    instruction: str = ""
    """A text appended to the prompt (or to its last user message), after a newline."""
    max_prompt_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 1024
    """Maximum prompt length; see `too_long`."""
    too_long: TooLong = "refuse"
    """What becomes of prompts with more tokens than `max_prompt_tokens`: `refuse`, an error before
    the run starts; `drop`, the row is left out; `truncate_left`, the prompt keeps its last tokens
    only, without the beginning that the chat template has written. How many there are is said."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only the first `limit` rows."""

    def check(self) -> None:
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
        """The settings of source `number` of the mixture, as those of a single source."""
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
        """The settings of each source: of a mixture several, without a mixture one."""
        return [self.part(number) for number in range(len(self.sources))] or [self]

    @property
    def names_data(self) -> bool:
        """Whether there is a source."""
        return bool(self.source or self.sources)

    @property
    def label(self) -> str:
        """The source, or the sources of a mixture, for messages and results."""
        return self.source or " + ".join(part.source for part in self.sources)


def exact(weight: float) -> Fraction:
    """A weight as the decimal number that the recipe writes: 0.7 is 7/10."""
    return Fraction(repr(weight))


WITHOUT_CHAT = Of("template", "none", "rendered")


class DemonstrationsConfig(Config):
    """Rows of a data set, turned into (prompt, response) pairs for supervised fine-tuning."""

    source: PathText = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    split: str = "train"
    """Split of a hub data set, such as 'train', or of a folder whose files are named by split;
    ignored for a single file or a pattern."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content})."""
    response_column: str = "response"
    """Column with the response; the token that ends a turn is appended."""
    messages_column: Annotated[str, Of("template", "chat")] = ""
    """Column with whole conversations (lists of {role, content, ...}), used instead of
    prompt_column and response_column; needs `template: chat`. Every assistant turn is trained on,
    tool calls included, up to the token that ends it."""
    tools_column: str = "tools"
    """With `template: chat`, column with the tools that the model is shown: a list in OpenAI's
    format, or the text of its JSON. Rows without it have none; empty: no row has."""
    text_column: Annotated[str, Excludes("messages_column"), WITHOUT_CHAT] = ""
    """Column with whole texts, used instead of prompt_column and response_column: all of a text is
    trained on, up to an end-of-sequence token that is appended."""
    template: TemplateName = "none"
    """`chat` renders the prompt with the tokenizer's chat template. `rendered` reads texts that a
    template has written, as `megarl sample` stores them."""
    template_variables: Annotated[TemplateVariables, Of("template", "chat")] = {}
    """As `prompts.template_variables`."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Maximum length of prompt and response together; see `too_long`."""
    too_long: TooLong = "refuse"
    """What becomes of longer rows: `refuse`, an error before the run starts; `drop`, the row is
    left out; `truncate_left`, the prompt keeps its last tokens only, the response all of its own.
    Of a conversation the prompt is what stands before the first reply. How many there are is
    said."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only the first `limit` rows."""


class PreferencesConfig(Config):
    """Rows of a data set, each with a better and a worse response to one prompt; or, for KTO, each
    with one response and whether it is desirable.
    """

    source: PathText = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    subset: str = ""
    """Configuration of a hub data set that has several."""
    split: str = "train"
    """Split of a hub data set, such as 'train_prefs', or of a folder with files named by split;
    ignored for a single file or a pattern."""
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
    tools_column: str = "tools"
    """With `template: chat`, column with the tools that the model is shown: a list in OpenAI's
    format, or the text of its JSON. Rows without it have none; empty: no row has."""
    margin_column: Annotated[str, Excludes("response_column")] = ""
    """Column with a number: by how much the chosen response is better. `megarl reward-model`
    trains the difference of the two scores to exceed it. Empty: 0."""
    response_column: str = ""
    """Used instead of `chosen_column` and `rejected_column`, with KTO only: column with the one
    response of the row."""
    label_column: str = "label"
    """With `response_column`: column that says whether the response is desirable (true or false, 1
    or 0)."""
    template: TemplateName = "none"
    """`chat` renders prompt and responses with the tokenizer's chat template. `rendered` reads
    prompts that a template has written, as `megarl sample` stores them."""
    template_variables: Annotated[TemplateVariables, Of("template", "chat")] = {}
    """As `prompts.template_variables`."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Maximum length of a prompt and one response together; see `too_long`."""
    too_long: TooLong = "refuse"
    """What becomes of longer rows: `refuse`, an error before the run starts; `drop`, the row is
    left out; `truncate_left`, the prompt keeps its last tokens only, the responses all of their
    own. How many there are is said."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only the first `limit` rows."""
