"""Typed Python functions as tools: the schema comes from the signature, pydantic checks each call.

def add(a: int, b: int) -> int: ...   --FunctionTool--> schema, call('{"a": 1, "b": 2}') -> "3"
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from megarl.apps.tools.tool import CallError, as_text
from megarl.environments.user_calls import LimitExceeded, UserCalls
from megarl.environments.user_code import check_function
from megarl.schema import require

FUNCTIONS = "environment.tools.functions"
SHOWN_PROBLEMS = 3
"""Number of wrong arguments that the model is told of at once."""


class FunctionTool:
    """A function of the user's as a tool. See `megarl.apps.tools.tool.Tool`."""

    def __init__(self, function: Callable[..., Any], where: str, calls: UserCalls) -> None:
        """`where`: the setting's value, for errors. `calls`: what calls the function. Raises
        `ValueError` for a parameter without a type, or of a type that JSON cannot hold.
        """
        check_function(function, where, FUNCTIONS)
        is_named = inspect.isfunction(inspect.unwrap(function)) and function.__name__.isidentifier()
        require(
            is_named,
            f"{FUNCTIONS}: {where} is a {_kind(function)}, without a name and docstring of its own"
            " that a model can be shown; write it as a function with `def`",
        )
        self._function, self._calls = function, calls
        fields: dict[str, Any] = {}
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ValueError(f"tool {where}: a type is unknown ({error}); import it") from None
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(
                    f"tool {where} takes *{name}, which a model cannot be shown; name each"
                    " parameter"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ValueError(
                    f"tool {where}: parameter '{name}' is positional only, but a call names its"
                    " arguments; remove the '/'"
                )
            if name not in hints:
                raise ValueError(
                    f"tool {where}: parameter '{name}' has no type; write it as '{name}: int', for"
                    " example"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        try:
            self._model = create_model(
                function.__name__, __config__=ConfigDict(extra="forbid"), **fields
            )
            parameters = self._model.model_json_schema()
        except (PydanticUserError, NameError, TypeError) as error:
            said = str(error).splitlines()[0]
            raise ValueError(
                f"tool {where}: a parameter's type cannot be written as JSON ({said}); use int,"
                " float, str, bool, list, dict, Literal or a pydantic model"
            ) from None
        parameters.pop("title", None)
        for one in parameters.get("properties", {}).values():
            one.pop("title", None)
        self.schema = {
            "type": "function",
            "function": {
                "name": function.__name__,
                "description": inspect.getdoc(function) or "",
                "parameters": parameters,
            },
        }

    async def call(self, arguments: str, limit_s: float) -> str:
        """See `megarl.apps.tools.tool.Tool`."""
        try:
            checked = self._model.model_validate_json(arguments)
        except ValidationError as error:
            raise CallError("; ".join(map(_problem, error.errors()[:SHOWN_PROBLEMS]))) from None
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        call = functools.partial(self._function, **given)
        try:
            late = f"the tool did not answer within {limit_s:g} s"
            made = await self._calls.run(call, (), limit_s, late)
        except LimitExceeded as error:
            raise CallError(str(error)) from None
        except BaseException as error:  # SystemExit too: a tool must not end the process
            raise CallError(f"{type(error).__name__}: {error}") from None
        return as_text(made)


def _kind(found: Any) -> str:
    return "lambda" if inspect.isfunction(found) else type(found).__name__


def _problem(found: Any) -> str:
    """One of pydantic's errors as the model is told it."""
    place = ".".join(map(str, found["loc"]))
    return f"{place}: {found['msg']}" if place else found["msg"]
