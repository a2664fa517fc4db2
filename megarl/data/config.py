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
    """Which configuration of a data set from the hub, where it has several (openai/gsm8k: 'main').
    """
    split: str = "train"
    """Which split, for a data set from the hub; files have none."""
    unique: bool = False
    """Use each prompt once, however often the source repeats it (DAPO-Math-17k repeats each about a
    hundred times).
    """
    prompt_column: str = "prompt"
    """Column of the prompt: a text, or a chat (a list of {role, content}). Dots reach into nested
    columns.
    """
    answer_column: str = "answer"
    """Column of the reference answer that the verifier compares with. Dots reach into nested
    columns.
    """
    answer_after: str = ""
    """Where set, the answer is what follows the last occurrence of this marker (GSM8K: '####')."""
    template: Literal["none", "chat"] = "none"
    """`chat` renders the prompt with the tokenizer's chat template; a chat column needs it."""
    system: str = ""
    """A system message put before the prompt when the chat template is used."""
    instruction: str = ""
    """A text appended to the prompt (or to its last user message), after a newline."""
    max_prompt_tokens: int = 1024
    """A longer prompt stops the run before it starts, naming the row."""
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
    """Which split, for a data set from the hub."""
    prompt_column: str = "prompt"
    """Column of the prompt: a text, or a chat."""
    response_column: str = "response"
    """Column of the response; the end-of-sequence token is added to it."""
    template: Literal["none", "chat"] = "none"
    """`chat` renders the prompt with the tokenizer's chat template."""
    max_tokens: int = 2048
    """Prompt and response together; a longer row stops the run before it starts, naming the row."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    limit: int | None = None
    """Use only the first `limit` rows."""

    def __post_init__(self) -> None:
        require_range("demonstrations.max_tokens", self.max_tokens, 2)
        require_range("demonstrations.limit", self.limit, 1)
