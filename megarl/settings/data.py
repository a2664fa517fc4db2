"""Sections of a recipe for data: where the rows are, and which of their columns are read."""

from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import PathText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, replace, require

TemplateName = Literal["none", "chat", "rendered"]
"""How texts become what a model reads: `none`, as they are, with the tokenizer's first special
tokens; `chat`, by the tokenizer's chat template; `rendered`, as they are, since a template has
written them."""

TemplateVariables = dict[str, bool | int | float | str]
"""{name: value} of variables of a chat template, such as enable_thinking."""

Arguments = dict[str, Any]
"""{name: value} for a source that makes its rows."""

TooLong = Literal["refuse", "drop", "truncate_left"]
"""What becomes of rows that are too long."""


WEIGHT_TOLERANCE = Fraction(1, 10**6)
"""How far a mixture's weights may add up from 1; within it they are scaled."""


class PromptSourceConfig(Config):
    """A source in `prompts.sources`; a setting that is null is that of `prompts`."""

    source: Annotated[PathText, Needs("set it to a data file or hub name")]
    """A .json, .jsonl, .parquet or .csv file, or a data set on the Hugging Face hub."""
    weight: Annotated[float, Range(1e-6, 1.0)]
    """Fraction of the prompts that come from this source; all add up to 1."""
    arguments: Arguments | None = None
    """Of a source that makes its rows, such as `reasoning_gym:NAME`."""
    environment: str | None = None
    """Name in `environment.mixture` of the verifier for these rows."""
    environment_column: str | None = None
    """Column with each row's verifier, instead of `environment`."""
    subset: str | None = None
    """Configuration of a hub data set that has several."""
    split: str | None = None
    """Split of a hub data set or of a folder."""
    unique: bool | None = None
    """Keep each prompt only once."""
    prompt_column: str | None = None
    """Column with the prompt."""
    answer_column: str | None = None
    """Column with the reference answer."""
    tools_column: str | None = None
    """Column with the tools that the model is shown."""
    choices_column: str | None = None
    """Column with the choices of a multiple-choice problem."""
    answer_after: str | None = None
    """Marker behind which the reference answer stands."""
    template: TemplateName | None = None
    """How prompts are rendered."""
    template_variables: TemplateVariables | None = None
    """Variables of the chat template."""
    system: str | None = None
    """System message before the prompt."""
    instruction: str | None = None
    """Text appended to the prompt."""
    shuffle: bool | None = None
    """Shuffle every epoch."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only so many rows, the first ones."""


class DataSetConfig(Config):
    """Where the rows of a data set are, and how they are read."""

    source: PathText = ""
    """A .json, .jsonl, .parquet or .csv file, or a data set on the Hugging Face hub."""
    split: str = "train"
    """Split of a hub data set, such as 'train', or of a folder whose files are named by split; a
    file or pattern has none."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content}, where content is a text
    or OpenAI content parts). Dots in a name select a nested column."""
    tools_column: str = "tools"
    """With `template: chat`, column with the tools that the model is shown: a list in OpenAI's
    format, or its JSON. Empty: no row has tools."""
    template: TemplateName = "none"
    """`chat` renders the prompt with the tokenizer's chat template, as chat columns need;
    `rendered` reads what a template has written, as `megarl sample` stores it."""
    template_variables: Annotated[TemplateVariables, Of("template", "chat")] = {}
    """With `template: chat`, variables of the template: `{enable_thinking: false}`; unknown ones
    are an error."""
    control_tokens: Annotated[bool, Of("template", "chat")] = False
    """With `template: chat`, a control token such as `<|im_end|>`, spelled in a chat, is that
    token; otherwise it is ordinary text. In the assistant's turns only tokens that open and end
    turns are ordinary text."""
    too_long: TooLong = "refuse"
    """What becomes of rows with more than `max_tokens` (prompts: `max_prompt_tokens`): `refuse`, an
    error before the run; `drop`, left out; `truncate_left`, the prompt (of a conversation what
    stands before the first reply) keeps its last tokens, without the template's beginning."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: Annotated[int | None, Range(1, 10**9)] = None
    """Use only so many rows, the first ones."""


class PromptsConfig(DataSetConfig):
    """Prompts for reinforcement learning, of one data set or a mixture."""

    source: Annotated[PathText, Excludes("sources")] = ""
    """A .json, .jsonl, .parquet or .csv file, or a data set on the Hugging Face hub.
    `reasoning_gym:NAME`, `gymnasium:NAME`, `textarena:NAME` and `openenv:http://host:port` make
    their rows (docs/howto/environments_of_others.md)."""
    arguments: Arguments = {}
    """Of a source that makes its rows: `{size: 500, seed: 1}` and its own settings."""
    sources: tuple[PromptSourceConfig, ...] = ()
    """Several sources, instead of `source`: `[{source: a.jsonl, weight: 0.7, environment: math},
    ...]`. Of any n consecutive prompts each gives its weight x n, within the number of sources.
    Each has its own epochs; other settings of this section are its defaults."""
    environment: str = ""
    """Name in `environment.mixture` of the verifier for all rows."""
    environment_column: Annotated[str, Excludes("environment")] = ""
    """Column with each row's verifier in `environment.mixture`, instead of `environment`. Dots
    select a nested column."""
    subset: str = ""
    """Configuration of a hub data set that has several (openai/gsm8k: 'main')."""
    unique: bool = False
    """Keep each prompt only once (DAPO-Math-17k repeats each about a hundred times)."""
    answer_column: str = "answer"
    """Column with the reference answer; dots select a nested column. Empty: the reward needs
    none."""
    choices_column: Annotated[str, Of("answer_column")] = ""
    """Column with the choices of a multiple-choice problem: a list of texts, {label: [...], text:
    [...]}, or {A: text, B: text}. Each becomes a line "A. text" below the prompt, and the answer
    (label, text or number from 0) its label. Empty: no choices."""
    answer_after: Annotated[str, Of("answer_column")] = ""
    """The reference answer is the text after the last occurrence of this marker (GSM8K: '####');
    empty: all of it."""
    system: Annotated[str, Of("template", "chat")] = ""
    """System message before the prompt, with the chat template."""
    instruction: str = ""
    """Text appended to the prompt, or its last user message, after a newline."""
    max_prompt_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 1024
    """Most tokens of a prompt; see `too_long`."""

    def check(self) -> None:
        require(
            self.names_data or not self.arguments,
            f"PromptsConfig.arguments is {self.arguments}, but there is no source; set source to"
            " one that makes its rows, or leave arguments out",
        )
        if not self.sources:
            return
        weights = [source.weight for source in self.sources]
        total = sum(map(exact, weights), Fraction(0))
        require(
            abs(total - 1) <= WEIGHT_TOLERANCE,
            f"the weights of PromptsConfig.sources are {', '.join(f'{w:g}' for w in weights)},"
            f" which add up to {float(total):g}; set weights that add up to 1",
        )
        for number in range(len(self.sources)):
            try:
                self.part(number)
            except ValueError as error:
                raise ValueError(f"PromptsConfig.sources[{number}]: {error}") from None

    def part(self, number: int) -> Self:
        """Source `number` (from 0) of `sources` as if it were the only one."""
        source = dict(self.sources[number])
        changes = {
            name: source[name] for name in source if name != "weight" and source[name] is not None
        }
        # A source that says how its rows are judged does not take the other way from around it.
        if "environment" in changes:
            changes.setdefault("environment_column", "")
        elif "environment_column" in changes:
            changes["environment"] = ""
        return replace(self, sources=(), **changes)

    @property
    def parts(self) -> list[Self]:
        """Each source as if it were the only one; without `sources` this configuration alone."""
        return [self.part(number) for number in range(len(self.sources))] or [self]

    @property
    def names_data(self) -> bool:
        """Whether the recipe names a data set here."""
        return bool(self.source or self.sources)

    @property
    def label(self) -> str:
        """The `source`, or those of `sources` joined by " + ", for messages and results."""
        return self.source or " + ".join(source.source for source in self.sources)


def exact(weight: float) -> Fraction:
    """The weight as the recipe writes it: 0.7 gives 7/10, not the nearest double."""
    return Fraction(repr(weight))


WITHOUT_CHAT = Of("template", "none", "rendered")


class DemonstrationsConfig(DataSetConfig):
    """Pairs of prompt and response for supervised fine-tuning."""

    response_column: str = "response"
    """Column with the response; the token that ends a turn is appended."""
    messages_column: Annotated[str, Of("template", "chat")] = ""
    """Column with whole conversations, instead of prompt_column and response_column; needs
    `template: chat`. Every assistant turn is trained on, with its tool calls and the token that
    ends it."""
    text_column: Annotated[str, Excludes("messages_column"), WITHOUT_CHAT] = ""
    """Column with whole texts, instead of prompt_column and response_column, all trained on, with
    an end-of-sequence token appended."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Most tokens of prompt and response together; see `too_long`."""


class PreferencesConfig(DataSetConfig):
    """Pairs of a better and a worse response to one prompt; or, for KTO, responses each with
    whether it is desirable.
    """

    subset: str = ""
    """Configuration of a hub data set that has several."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat from which the responses go on. A response that is
    a conversation may repeat it, whole (as in UltraFeedback) or its last turns, or hold it where
    the column is missing. Empty: responses always hold it."""
    chosen_column: str = "chosen"
    """Column with the better response: a text, to which the token that ends a turn is appended, the
    assistant's turn as a chat, or a conversation that ends with it; chats need `template: chat`."""
    rejected_column: str = "rejected"
    """Column with the worse response, in the same form."""
    margin_column: Annotated[str, Excludes("response_column")] = ""
    """Column with how much better the chosen response is, which `task: reward_model` trains the
    difference of scores to exceed. Empty: 0."""
    response_column: str = ""
    """With KTO, instead of `chosen_column` and `rejected_column`: column with the row's one
    response."""
    label_column: str = "label"
    """With `response_column`: column with whether it is desirable (true or false, 1 or 0)."""
    max_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 2048
    """Most tokens of a prompt and one response together; see `too_long`."""
