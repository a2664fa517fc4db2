"""The section `environment.agent` of a recipe: an agent that exists already, trained as it is."""

from typing import Annotated, Literal

from megarl.settings.addresses import VARIABLE
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText, PathText
from megarl.settings.schema import Config, Excludes, Of, Range, require


class AgentConfig(Config):
    """A program or async function that calls the model through an OpenAI-compatible server, run
    once for each rollout; its calls' answers are the model's turns.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments: `[python, my_agent.py, "{prompt}"]`. `python` is megarl's own;
    paths are relative to the working folder. Each rollout starts one process in an empty folder;
    what it prints is its answer."""
    function: Annotated[CodeText, Excludes("command")] = ""
    """`path/to/file.py:name` of an async function (prompt, client) with `prompt.text` and an
    `openai.AsyncOpenAI`. It returns an answer for the verifier, or a reward: a number or a dict
    with `reward`. `verifiers`: an environment of that library, the source of the prompts."""
    columns: Annotated[tuple[str, ...], Of("command", fix="set environment.agent.command")] = ()
    """Columns of the data in the JSON file that MEGARL_PROMPT names for the program."""
    scores_itself: Annotated[bool, Of("command", fix="set environment.agent.command")] = False
    """The program writes its score as JSON, a number or an object with `reward`, to the file that
    MEGARL_RESULT names. Otherwise the verifier scores what it prints."""
    trains: Literal["last", "all"] = "last"
    """Which answers that the agent has read are trained. `last`: the conversation that ends with
    its last answer, without discarded ones and side calls. `all`: every one, for an agent that
    shortens its history or has other agents."""
    model: str = "policy"
    """The model's name in the agent's calls; other names are refused."""
    parser: str = "hermes"
    """vLLM's tool-call parser for the model: hermes, qwen3_coder, llama3_json, mistral, ..."""
    url_variable: str = "OPENAI_BASE_URL"
    """Environment variable with the server's address for the program."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key for the program."""
    time_limit_s: Annotated[float, Range(0.01, 86400.0)] = 60.0
    """Seconds of the agent's own time in a rollout, without waiting for the model; beyond it the
    rollout failed."""
    at_once: Annotated[int, Range(1, 65536), Of("command", fix="set environment.agent.command")] = (
        256
    )
    """Most programs that run at the same time; other rollouts wait. Each of the
    `environment.num_workers` processes runs an equal share of them, at least one."""
    context_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Longest conversation in tokens; a call beyond is refused. 0, and at most:
    `rollout.max_new_tokens`."""
    rollout_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens of all conversations of a rollout, each counted once; a call beyond is refused.
    0: `training.micro_batch_tokens` x sequence ranks, or `rollout.max_new_tokens` if larger."""
    hidden: Annotated[tuple[PathText, ...], Of("command", fix="set environment.agent.command")] = ()
    """Files and folders that the program cannot read, besides run folder and data. Needs `network:
    gateway` and `environment.isolate`."""
    network: Literal["gateway", "open"] = "gateway"
    """`gateway`: the program connects to the gateway only and writes to its folder only, and
    `hidden` holds (Linux 6.7 or newer, with Landlock). `open`: no such rules."""

    @property
    def is_used(self) -> bool:
        return bool(self.command or self.function)

    @property
    def is_judge(self) -> bool:
        """Whether the agent may return a score."""
        return bool(self.function) or self.scores_itself

    @property
    def longest_s(self) -> float:
        """Seconds of an agent's own time in a rollout; 0 without one."""
        return self.time_limit_s if self.is_used else 0.0

    def check(self) -> None:
        require(
            all(self.command),
            "environment.agent.command has an empty word; set the program and its arguments",
        )
        for name in (self.url_variable, self.key_variable):
            require(
                VARIABLE.fullmatch(name) is not None,
                f"environment.agent.url_variable or key_variable is '{name}'; set the name of an"
                " environment variable in capital letters",
            )
