"""The section `environment.tools` of a recipe: which tools a model may call, and how its calls are
read.
"""

from typing import Annotated

from megarl.settings.addresses import check_address, check_variable, is_remote
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Range, require


class ToolsConfig(Config):
    """Tools, Python functions and MCP servers, that the model may call in the middle of its
    response; the results become part of the rollout. The prompt shows the tools through the
    tokenizer's chat template.
    """

    functions: tuple[CodeText, ...] = ()
    """Typed Python functions, each as `path/to/file.py:function`. Their names, signatures and
    docstrings are what the model is shown."""
    servers: dict[str, str] = {}
    """{name: command line or address} of MCP servers. A command line is started beside each worker
    process and spoken to over its standard input and output; an address (http://host:port/mcp) is
    spoken to by streamable HTTP. All their tools are offered."""
    server_tokens: dict[str, str] = {}
    """{name of a server with an address: name of the environment variable that holds its bearer
    token}. Tools that are Python functions run in processes that can read this variable; its value
    is written nowhere."""
    parser: str = "hermes"
    """vLLM's tool-call parser for the model: hermes, qwen3_coder, llama3_json, mistral, ..."""
    time_limit_s: Annotated[float, Range(0.01, 3600.0)] = 5.0
    """Time limit of one call in seconds. Beyond it the model reads that the call took too long, and
    goes on."""
    result_characters: Annotated[int, Range(1, 10**7)] = 4096
    """Most characters of a call's result that the model reads; the rest is cut off."""

    @property
    def are_used(self) -> bool:
        """Whether the recipe names any tool: a function or an MCP server."""
        return bool(self.functions or self.servers)

    def check(self) -> None:
        for name in self.functions:
            file, colon, function = name.rpartition(":")
            require(
                bool(colon) and file.endswith(".py") and function.isidentifier(),
                f"environment.tools.functions has '{name}'; set it to path/to/file.py:function",
            )
        for name, command in self.servers.items():
            require(
                bool(command.strip()),
                f"environment.tools.servers.{name} is empty; set the command line or the address"
                " of an MCP server",
            )
            if is_remote(command):
                where = f"environment.tools.server_tokens.{name}"
                check_address(command, f"environment.tools.servers.{name}", "/mcp", where)
        for name, variable in self.server_tokens.items():
            setting = f"environment.tools.server_tokens.{name}"
            require(
                is_remote(self.servers.get(name, "")),
                f"{setting} is set, but environment.tools.servers has no address (http://...) of"
                " that name; set one, or leave it out",
            )
            check_variable(variable or "an empty text", setting)
