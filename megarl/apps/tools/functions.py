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

from megarl.apps.tools.tool import CallError, as_text, function_schema
from megarl.environments.scores import BadScore
from megarl.environments.user_calls import UserCalls
from megarl.environments.user_code import check_function
from megarl.settings.schema import require

FUNCTIONS = "environment.tools.functions"
SHOWN_PROBLEMS = 3
"""Most wrong arguments that the model is told of at once."""


class FunctionTool:
    """A typed Python function of the user's as a tool that the model may call: `schema` describes
    it in OpenAI's format, made from its signature and docstring, and `call` runs it.
    """

    def __init__(self, function: Callable[..., Any], where: str, calls: UserCalls) -> None:
        """`where`: the function's name in the recipe, file.py:function, for errors. `calls`: runs
        the function in threads, under a time limit. Raises `ValueError` for a parameter without a
        type or with a star, or of a type that JSON cannot hold.
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
            wrong = ""
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                wrong = "has a star, and a model cannot be shown it; name each parameter"
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                wrong = "is positional only, but a call names its arguments; remove the '/'"
            elif name not in hints:
                wrong = f"has no type; write it as '{name}: int', for example"
            require(not wrong, f"tool {where}: parameter '{name}' {wrong}")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        try:
            self._model = create_model(
                function.__name__, __config__=ConfigDict(extra="forbid"), **fields
            )
            parameters = self._model.model_json_schema()
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"tool {where}: a parameter's type cannot be written as JSON ({reason}); use int,"
                " float, str, bool, list, dict, Literal or a pydantic model"
            ) from None
        parameters.pop("title", None)
        for schema in parameters.get("properties", {}).values():
            schema.pop("title", None)
        self.schema = function_schema(function.__name__, inspect.getdoc(function), parameters)

    async def call(self, arguments: str, limit_s: float) -> str:
        """Call the function with `arguments`, JSON text of an object, checked by pydantic, and
        return its result as text for the model. A plain function runs in a thread. Raises
        `CallError`, which the model is told, for wrong arguments, for an error of the function, for
        a result that JSON cannot hold, and if the function does not answer within `limit_s`
        seconds; its Python code is then stopped.
        """
        try:
            checked = self._model.model_validate_json(arguments)
        except ValidationError as error:
            raise CallError("; ".join(map(_problem, error.errors()[:SHOWN_PROBLEMS]))) from None
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        call = functools.partial(self._function, **values)
        try:
            late = f"the tool did not answer within {limit_s:g} s"
            result = await self._calls.run(call, (), limit_s, late)
        except BadScore as error:
            raise CallError(str(error)) from None
        except BaseException as error:  # SystemExit too: a tool must not end the process
            raise CallError(f"{type(error).__name__}: {error}") from None
        return as_text(result)


def _kind(found: Any) -> str:
    return "lambda" if inspect.isfunction(found) else type(found).__name__


def _problem(found: Any) -> str:
    """One of pydantic's errors as the model is told it."""
    place = ".".join(map(str, found["loc"]))
    return f"{place}: {found['msg']}" if place else found["msg"]
