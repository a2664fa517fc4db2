"""The section `environment.tools` of a recipe."""

from typing import Annotated

from megarl.settings.addresses import check_address, check_variable, is_remote
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Range, require


class ToolsConfig(Config):
    """Python functions and MCP servers that the model may call in its response. The prompt shows
    them by the tokenizer's chat template; results become part of the rollout.
    """

    functions: tuple[CodeText, ...] = ()
    """Typed functions, as `path/to/file.py:function`; the model sees names, signatures and
    docstrings."""
    servers: dict[str, str] = {}
    """{name: command line or address} of MCP servers, of which all tools are offered. A command is
    started beside each worker process and spoken to over standard input and output, an address
    (http://host:port/mcp) by streamable HTTP."""
    server_tokens: dict[str, str] = {}
    """{name of a server with an address: environment variable with its bearer token}. Tools that
    are Python functions can read this variable; its value is written nowhere."""
    parser: str = "hermes"
    """vLLM's tool-call parser for the model: hermes, qwen3_coder, llama3_json, mistral, ..."""
    time_limit_s: Annotated[float, Range(0.01, 3600.0)] = 5.0
    """Seconds for one call; beyond it the model reads that it took too long, and goes on."""
    result_characters: Annotated[int, Range(1, 10**7)] = 4096
    """Most characters of a result that the model reads."""

    @property
    def are_used(self) -> bool:
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
