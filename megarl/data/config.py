"""Where prompts and demonstrations come from, and which columns of a row matter."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require, require_range


@config
class PromptsConfig:
    """Rows of a data set, turned into prompts."""

    source: str = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    subset: str = ""
    """Configuration of a hub data set that has several (openai/gsm8k: 'main')."""
    split: str = "train"
    """Split of a hub data set, such as 'train'; ignored for files."""
    unique: bool = False
    """Keep each prompt only once, even if the source repeats it (DAPO-Math-17k repeats each about a
    hundred times)."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content}). A name with dots
    selects a nested column."""
    answer_column: str = "answer"
    """Column with the reference answer for the verifier. A name with dots selects a nested
    column."""
    answer_after: str = ""
    """If set, the reference answer is the text after the last occurrence of this marker (GSM8K:
    '####')."""
    template: Literal["none", "chat"] = "none"
    """`chat` renders the prompt with the tokenizer's chat template; required for a chat column."""
    system: str = ""
    """A system message put before the prompt when the chat template is used."""
    instruction: str = ""
    """A text appended to the prompt (or to its last user message), after a newline."""
    max_prompt_tokens: int = 1024
    """Maximum prompt length. A longer prompt is an error before the run starts, which names the
    row."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: int | None = None
    """Use only the first `limit` rows."""

    def __post_init__(self) -> None:
        require_range("prompts.max_prompt_tokens", self.max_prompt_tokens, 1)
        require_range("prompts.limit", self.limit, 1)
        require(
            self.template == "chat" or not self.system,
            "prompts.system is set but prompts.template is 'none'; set prompts.template to 'chat'"
            " or remove the system message",
        )


@config
class DemonstrationsConfig:
    """Rows of a data set, turned into (prompt, response) pairs for supervised fine-tuning."""

    source: str = ""
    """A .json, .jsonl, .parquet or .csv file, or the name of a data set on the Hugging Face hub."""
    split: str = "train"
    """Split of a hub data set, such as 'train'; ignored for files."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a chat (a list of {role, content})."""
    response_column: str = "response"
    """Column with the response; an end-of-sequence token is appended."""
    template: Literal["none", "chat"] = "none"
    """`chat` renders the prompt with the tokenizer's chat template."""
    max_tokens: int = 2048
    """Maximum length of prompt and response together. A longer row is an error before the run
    starts, which names the row."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: int | None = None
    """Use only the first `limit` rows."""

    def __post_init__(self) -> None:
        require_range("demonstrations.max_tokens", self.max_tokens, 2)
        require_range("demonstrations.limit", self.limit, 1)
