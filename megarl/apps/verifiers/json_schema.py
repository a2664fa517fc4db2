"""The verifier `json_schema`: is the response JSON that a JSON Schema allows?"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

from megarl.apps.verifiers.code.code_tests import fenced_blocks, same_json
from megarl.environments.response_text import row_value
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import shortened
from megarl.types import Prompt

MISSING = object()


def json_schema(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[float]]:
    """Make the verifier `json_schema` from the recipe: an async function (prompt, response) that
    returns 1.0 if the last fenced json block of the response, or without one the whole response, is
    JSON that the schema allows and, with `json_schema.value` (a dotted path), the value there
    equals the reference answer; else 0.0. The schema is in the recipe or in a column of the data.
    Nothing that it refers to is fetched.

    Raises `ValueError` if the recipe's schema is not a valid JSON Schema. The function raises it if
    the schema in a prompt's row is not.
    """
    settings = config.json_schema
    common = _validator(settings.schema, "json_schema.schema") if settings.schema else None

    async def verify(prompt: Prompt, response: str) -> float:
        from referencing.exceptions import Unresolvable

        validator, location = common, "json_schema.schema"
        if validator is None:  # each row has its own schema
            setting = "json_schema.schema_column"
            location = f"row {prompt.index}, column '{settings.schema_column}'"
            validator = _validator(row_value(prompt, settings.schema_column, setting), location)
        blocks = [block for block in fenced_blocks(response) if block.language == "json"]
        text = next((block.text for block in reversed(blocks) if block.is_closed), response)
        try:
            value = json.loads(text, parse_constant=_refuse)
            if not validator.is_valid(value):
                return 0.0
        except Unresolvable as error:
            raise ValueError(
                f"{location} refers to {shortened(repr(error.ref))}, which is not in it; write what"
                " it names into the schema, under $defs (addresses are not fetched)"
            ) from None
        # No JSON, nested thousands deep, or 1e400 where the schema has a multipleOf
        except (ValueError, RecursionError, ArithmeticError):
            return 0.0
        return float(not settings.value or _equals(_at(value, settings.value), prompt.answer))

    return verify


def _validator(schema: Any, location: str) -> Any:
    """A validator of a schema, given as an object or as the text of its JSON."""
    import referencing
    from jsonschema import SchemaError, validators

    try:
        tree = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(tree, dict | bool):
            raise ValueError("it is no object")
        validator = validators.validator_for(tree, default=validators.Draft202012Validator)
        validator.check_schema(tree)  # pyright: ignore[reportArgumentType] - may be a bool
    except (ValueError, RecursionError, SchemaError) as error:
        reason = error.message if isinstance(error, SchemaError) else str(error)
        raise ValueError(
            f"{location} is no JSON Schema ({shortened(reason)}); correct it"
        ) from None
    # An own registry: the default one would fetch what "$ref" names.
    return validator(tree, registry=referencing.Registry())


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _at(value: Any, path: str) -> Any:
    """The value at a dotted place of a JSON tree; `MISSING` where there is none."""
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 10:
            value = value[int(key)] if int(key) < len(value) else MISSING
        else:
            return MISSING
    return value


def _equals(value: Any, answer: str) -> bool:
    """Whether a JSON value is the reference answer: a number by its value, true, false and null by
    these words, a list or object as JSON, a text to the letter but for spaces around it.
    """
    answer = answer.strip()
    if isinstance(value, str):
        return value.strip() == answer
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Not fractions: 1e999999999 would be written out.
            return Decimal(repr(value)) == Decimal(answer.replace(",", ""))
        return same_json(value, json.loads(answer))
    except (ValueError, ArithmeticError, RecursionError):
        return False
