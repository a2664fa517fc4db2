"""The section `environment.agent` of a recipe: a program, or an async function, that calls the
model through an OpenAI-compatible server while it works, and is trained as it is.
"""

from typing import Annotated, Literal

from megarl.settings.addresses import VARIABLE
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText, PathText
from megarl.settings.schema import Config, Excludes, Of, Range, require


class AgentConfig(Config):
    """An agent that exists already: a program that finds the model by environment variables, or an
    async function. Each rollout is one run of the agent on one prompt; the model's turns are what
    it generates for the agent's calls. `megarl.apps.gateway` runs the agent and answers its calls.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments: `[python, my_agent.py, "{prompt}"]`. `python` is megarl's own;
    paths are relative to the folder from which the run is started; `{prompt}` stands for the text
    of the prompt. Each rollout starts one process, in an empty folder of its own. What it prints is
    its answer."""
    function: Annotated[CodeText, Excludes("command")] = ""
    """`path/to/file.py:name` of an async function (prompt, client), called in a worker process:
    `prompt.text` is the prompt, `client` an `openai.AsyncOpenAI`. It returns its answer, a text
    that the verifier scores, or a reward, a number or a dict with `reward`. `verifiers` plays an
    environment of that library, the source of the prompts."""
    columns: Annotated[tuple[str, ...], Of("command", fix="set environment.agent.command")] = ()
    """Columns of the data that the program may see, beside the prompt, in the JSON file that the
    environment variable MEGARL_PROMPT names."""
    scores_itself: Annotated[bool, Of("command", fix="set environment.agent.command")] = False
    """Whether the program scores itself: it writes JSON, a number or an object with `reward`, to
    the file that the environment variable MEGARL_RESULT names. Otherwise there is no such file, and
    the verifier scores what it prints."""
    trains: Literal["last", "all"] = "last"
    """Which of the answers that the agent has read are trained. `last`: the conversation that its
    last answer ends, so not what it threw away and asked again, nor side calls, such as for a
    title. `all`: every one, for an agent that shortens its history or has other agents. Answers
    that no client has read are never trained."""
    model: str = "policy"
    """The model's name in the agent's calls; a call that asks for another model is refused. Set it
    to the name that the agent uses."""
    parser: str = "hermes"
    """vLLM's tool-call parser for the model: hermes, qwen3_coder, llama3_json, mistral, ..."""
    url_variable: str = "OPENAI_BASE_URL"
    """Name of the environment variable in which the program finds the server's address."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable in which the program finds its key."""
    time_limit_s: Annotated[float, Range(0.01, 86400.0)] = 60.0
    """Seconds that the agent itself may take in a rollout, all together; the time in which it waits
    for the model does not count. Beyond it the rollout counts as a failure (time-out)."""
    context_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Longest conversation in tokens, with the answer; a call beyond it is refused. 0:
    `rollout.max_new_tokens`, which is also the most."""
    rollout_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens of all conversations of a rollout, each counted once; a call beyond is refused.
    0: `training.micro_batch_tokens` x sequence ranks, or `rollout.max_new_tokens` if larger."""
    hidden: Annotated[tuple[PathText, ...], Of("command", fix="set environment.agent.command")] = ()
    """Further files and folders that the program cannot read, besides the run's folder and the
    recipe's data. Needs `network: gateway` and `environment.isolate`."""
    network: Literal["gateway", "open"] = "gateway"
    """`gateway`: the program connects to the gateway only and writes to its folder only, and
    `hidden` holds (Linux 6.7 or newer, with Landlock). `open`: no such rules."""

    @property
    def is_used(self) -> bool:
        """Whether the recipe names an agent: a program or a function."""
        return bool(self.command or self.function)

    @property
    def is_judge(self) -> bool:
        """Whether the agent may return a score: a function, or a program that scores itself."""
        return bool(self.function) or self.scores_itself

    @property
    def longest_s(self) -> float:
        """Seconds that an agent itself may take in a rollout; 0 without one."""
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
