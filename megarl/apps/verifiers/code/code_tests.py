"""Tests of programs, as data sets hold them in their rows, and the comparison of outputs.

| column | content | data sets |
|---|---|---|
| `input_output` | {"inputs", "outputs", "fn_name"}, also as JSON text | APPS, TACO |
| `public_test_cases`, `private_test_cases` | list of {"input", "output"} | LiveCodeBench |
| `test_list` | list of `assert` statements | MBPP |
| `test` | text with `def check(candidate)`; `entry_point`, `prompt` beside it | HumanEval |
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from megarl.apps.verifiers.code.program_server import encode
from megarl.apps.verifiers.code.tested_names import names_of_tests

COLUMNS = (
    *("input_output", "test_list", "test", "public_test_cases", "private_test_cases"),
    *("tests", "test_cases"),
)
"""Columns of a row in which tests are looked for, in this order."""
ADDED = ("public_test_cases", "private_test_cases")
SETUPS = ("test_setup_code", "test_imports")
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
"""Python reads the digits of every script as numbers, those who judge programs do not."""
FENCE = "```"
LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
SPACES = " \t\r\f\v"
"""What stands between words and at the ends of lines: ASCII only."""
SPACE = re.compile(f"([{SPACES}]+)")
PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Tests:
    """The tests of one row of a data set for a program that a model writes. `kind` says what a test
    does: it gives the program standard input (`stdin`), calls the program's function (`calls`), or
    runs Python statements that call its functions (`asserts`). Other fields hold the tests, the
    expected results, and text to put in front of the program.
    """

    kind: Literal["stdin", "calls", "asserts"]
    tests: list[Any]
    """For each test what is given to the sandbox: the input text; the call as a dict {"call": name
    of the function, "args": encoded values, "named": {}}; or the statements as text."""
    expected: list[Any] = field(default_factory=list)
    """For each test the expected output text, or the value that the call returns; empty for
    asserts."""
    wrapped: bool = False
    """Whether an expected list of one value may stand for the value itself, as in APPS."""
    prefix: str = ""
    """Text to put in front of a program that is only the body of the function `named`."""
    beside: str = ""
    """Text to put in front of a program that defines the function `named` itself."""
    named: str = ""
    """Name of the function that the data set wants; "" if it asks for a whole program."""
    more: dict[str, Any] = field(default_factory=dict)
    """For asserts: {"setup": text of statements that run before the tests, "names": names of the
    program's functions, "modules": names of modules of Python's library}; else empty."""

    def whole(self, program: str) -> str:
        """The text to run for `program`, the code that `extract` took from a response: the program
        with the data set's own code in front. This code is the head of the function if the program
        is only its body, otherwise what the function needs beside it; nothing if the data set has
        no such code.
        """
        if not self.named:
            return program
        # A body is indented from its first line on, whatever a model has written behind it.
        if program.lstrip("\r\n")[:1] in (" ", "\t"):
            return self.prefix.rstrip(" \t") + program
        defines = re.search(rf"^(?:async +)?def +{self.named}\b", program, re.MULTILINE)
        return (self.beside if defines else self.prefix) + program


def read_tests(row: Mapping[str, Any], column: str = "", most: int = 10**6) -> Tests:
    """Read the first `most` tests of a program from a row of a data set, {column: value}. `column`:
    the column that holds the tests; "" for the first that the row has of `input_output`,
    `test_list`, `test`, `public_test_cases` with `private_test_cases`, `tests` and `test_cases`.
    Returns the inputs or statements with the expected results, and which of the three forms they
    have. Raises `ValueError` if there are none or their form is unknown.
    """
    names = (column,) if column else COLUMNS
    present = [name for name in names if row.get(name) not in (None, "", [], {})]
    if not present:
        raise ValueError(
            f"the row has no tests in {'column ' if column else ''}{', '.join(names)}; set"
            " environment.code.tests_column to the column that holds them"
        )
    name = present[0]
    value = _parsed(row[name], name)
    if name in ADDED and not column:
        value = [test for key in ADDED if key in present for test in _parsed(row[key], key)]
    tests = _read(value, row, name)
    if not tests.tests:
        raise ValueError(f"column {name} holds no test; remove the row, or set another column")
    return replace(tests, tests=tests.tests[:most], expected=tests.expected[:most])


def _parsed(value: Any, column: str) -> Any:
    """`value`, read as JSON if it is the text of an object or a list."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"column {column} is no JSON ({error}); mend it") from None


def _read(value: Any, row: Mapping[str, Any], column: str) -> Tests:
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        inputs, outputs = value["inputs"], value["outputs"]
        if not (isinstance(inputs, list) and isinstance(outputs, list)):
            raise ValueError(f"column {column}: inputs and outputs must be lists")
        if len(inputs) != len(outputs):
            raise ValueError(
                f"column {column} has {len(inputs)} inputs and {len(outputs)} outputs; mend it"
            )
        name = value.get("fn_name")
        if not name:
            return Tests("stdin", [_lines(text) for text in inputs], [_lines(o) for o in outputs])
        return Tests(
            "calls", [_call(name, _decoded(item), column) for item in inputs], outputs, wrapped=True
        )
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return _read_cases(value, row, column)
    if isinstance(value, str) and "def check(" in value:
        return _read_check(value, row, column)
    texts = [value] if isinstance(value, str) and "assert" in value else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return _asserts(texts, _setup(row), row, column)
    raise ValueError(
        f"column {column} is no known form of tests: {str(value)[:80]!r}; docs/reference_rewards.md"
        " lists the forms"
    )


def _read_cases(value: list[Any], row: Mapping[str, Any], column: str) -> Tests:
    """Tests in the form of LiveCodeBench."""
    if not all("input" in case and "output" in case for case in value):
        raise ValueError(f"column {column}: every test needs 'input' and 'output'")
    if not any(case.get("testtype") == "functional" for case in value):
        inputs = [_lines(case["input"]) for case in value]
        return Tests("stdin", inputs, [_lines(case["output"]) for case in value])
    metadata = _parsed(row.get("metadata") or {}, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    name = name or row.get("fn_name") or row.get("func_name")
    if not name:
        raise ValueError(
            f"column {column} has functional tests, but column metadata has no func_name; add it"
        )
    try:
        calls = [
            _call(name, [json.loads(line) for line in case["input"].splitlines() if line], column)
            for case in value
        ]
        return Tests("calls", calls, [json.loads(case["output"]) for case in value])
    except (ValueError, AttributeError) as error:
        raise ValueError(f"column {column}: a functional test is no JSON ({error})") from None


def _read_check(value: str, row: Mapping[str, Any], column: str) -> Tests:
    """Tests in the form of HumanEval."""
    name, prompt = row.get("entry_point"), row.get("prompt")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"column {column} defines check(candidate), but column entry_point names no function"
        )
    starts, beside = _source(prompt, name) if isinstance(prompt, str) else ("", "")
    tests = _asserts([f"{value}\n\ncheck({name})\n"], starts, row, column, [name])
    return replace(tests, prefix=starts, beside=beside, named=name)


def _asserts(
    texts: list[str], setup: str, row: Mapping[str, Any], column: str, own: Sequence[str] = ()
) -> Tests:
    try:
        names = names_of_tests(texts, setup, row, own)
    except ValueError as error:
        raise ValueError(f"column {column}: {error}") from None
    more = {"setup": setup, "names": names.program, "modules": names.modules}
    return Tests("asserts", texts, more=more)


def _source(prompt: str, name: str) -> tuple[str, str]:
    """(a prompt, the same without its function `name`); both are "" unless the prompt is Python
    that defines this function, of which the body may be missing.
    """
    whole = prompt.rstrip() + "\n"
    for more in ("", "    pass\n"):
        try:
            tree = ast.parse(whole + more)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines = whole.split("\n")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                begin = min(item.lineno for item in (node, *node.decorator_list))
                rest = "\n".join([*lines[: begin - 1], *lines[node.end_lineno :]])
                # A last line of spaces is the indentation of the response.
                is_open = not prompt.rpartition("\n")[2].strip()
                return prompt if is_open else f"{prompt}\n", rest and f"{rest}\n"
    return "", ""


def _setup(row: Mapping[str, Any]) -> str:
    """The Python code of a row of a data set that is run before the row's assert statements: its
    columns `SETUPS`, joined by newlines.
    """
    parts = [row.get(name) or "" for name in SETUPS]
    return "\n".join("\n".join(item) if isinstance(item, list) else str(item) for item in parts)


def _lines(value: Any) -> str:
    """The input or the expected output of a test as one text. `value`: the text, or the list of its
    lines, as some data sets have it.
    """
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _decoded(value: Any) -> Any:
    """The arguments of a function call as a list of Python values. `value`: a text with an argument
    in JSON on each line; anything else is returned unchanged.
    """
    if not isinstance(value, str):
        return value
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except ValueError:
        return [value]


def _call(name: Any, arguments: Any, column: str) -> dict[str, Any]:
    def refuse(value: Any) -> int:
        raise ValueError(f"column {column}: an argument is no JSON value ({value!r})")

    if not isinstance(arguments, list):
        raise ValueError(f"column {column}: the input of a function must be a list of arguments")
    return {"call": str(name), "args": encode(arguments, refuse), "named": {}}


class FencedBlock(NamedTuple):
    """A fenced block of Markdown."""

    language: str
    lines: list[str]
    is_closed: bool
    """Whether it has an end; the last of a response may have none."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def fenced_blocks(response: str) -> list[FencedBlock]:
    """The fenced blocks of a model's response, in their order."""
    blocks: list[FencedBlock] = []
    inside = False
    for line in response.replace("\r\n", "\n").split("\n"):  # others stand in texts of a program
        bare = line.strip()
        if inside and bare == FENCE:
            inside, blocks[-1] = False, blocks[-1]._replace(is_closed=True)
        elif inside:
            blocks[-1].lines.append(line)
        elif bare.startswith(FENCE) and FENCE not in bare[3:]:
            inside = True
            blocks.append(FencedBlock(bare[3:].strip().lower(), [], False))
    return blocks


def extract(response: str, *, fence_required: bool = False) -> str | None:
    """The text of the Python program in a model's response: the last fenced block marked as Python,
    else the last fenced block, else the whole response, or None with `fence_required`. A last block
    without an end runs to the end of the response.
    """
    blocks = fenced_blocks(response)
    if not blocks:
        return None if fence_required else response
    return ([block for block in blocks if block.language in PYTHON] or blocks)[-1].text


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs (text) are equal but for ASCII spaces at the ends of lines, empty lines
    at the end, and the way in which numbers are written (`2.50` equals `2.5`; whole numbers with
    leading zeros are compared as text). `tolerance`: difference allowed for numbers with a decimal
    point or exponent, relative to the expected number, or absolute where that is below 1.
    """
    ours, theirs = _kept_lines(output), _kept_lines(expected)
    return len(ours) == len(theirs) and all(
        line == other or _same_line(line, other, tolerance)
        for line, other in zip(ours, theirs, strict=True)
    )


def _kept_lines(text: str) -> list[str]:
    return [line.rstrip(SPACES) for line in text.rstrip(SPACES + "\n").split("\n")]


def _same_line(output: str, expected: str, tolerance: float) -> bool:
    ours, theirs = (SPACE.split(line) for line in (output, expected))
    if all(map(NUMBER.fullmatch, filter(None, [*ours[::2], *theirs[::2]]))):
        ours, theirs = (list(filter(None, line[::2])) for line in (ours, theirs))
    return len(ours) == len(theirs) and all(
        word == other or _same_number(word, other, tolerance)
        for word, other in zip(ours, theirs, strict=True)
    )


def _same_number(text: str, expected: str, tolerance: float) -> bool:
    if not (NUMBER.fullmatch(text) and NUMBER.fullmatch(expected)):
        return False
    if LEADING_ZERO.fullmatch(text) or LEADING_ZERO.fullmatch(expected):
        return False  # digits of another base, or a code
    if Decimal(text) == Decimal(expected):
        return True
    is_whole = not set(text + expected) & set(".eE")
    return not is_whole and _close(float(text), float(expected), tolerance)


def _close(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * max(1.0, abs(expected)) < math.inf


def as_json(value: Any) -> Any:
    """JSON of a value that a program has returned: tuples as lists, and keys of dicts as texts.
    `value`: data of `encode`, with types that JSON lacks as {"t": type, "v": content}. Raises
    `TypeError`, `ValueError` or `KeyError` for what JSON cannot hold, as a set, and for other data.

    Keys become texts before they are hashed: 50,000 numbers with one hash took two minutes.
    """
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value["t"] == "tuple":
        return as_json(value["v"])
    if value["t"] != "dict" or any(isinstance(key, list | dict) for key, _ in value["v"]):
        raise TypeError(f"JSON has no such {value['t']}")
    pairs = [(key if isinstance(key, str) else json.dumps(key), item) for key, item in value["v"]]
    return {key: as_json(item) for key, item in pairs}


def same_value(found: Any, expected: Any, tolerance: float = 0.0, *, wrapped: bool = False) -> bool:
    """Whether the value `found` that a function returned equals the `expected` JSON value. Tuples
    count as lists, and keys of dicts as texts. `tolerance`: difference allowed for floats, relative
    to the expected number, or absolute where that is below 1. `wrapped`: an expected list of one
    value may stand for the value. Raises `TypeError` for a value that JSON cannot hold.
    """
    value = json.loads(json.dumps(found))
    if same_json(value, expected, tolerance):
        return True
    is_wrapped = wrapped and isinstance(expected, list) and len(expected) == 1
    return is_wrapped and same_json(value, expected[0], tolerance)


def same_json(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal, true not being 1. `tolerance`: difference allowed for
    floats, relative to the expected number, or absolute where that is below 1.
    """
    if isinstance(expected, bool) != isinstance(value, bool):
        return False
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or _close(float(value), expected, tolerance)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_json(item, other, tolerance) for item, other in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            same_json(value[key], expected[key], tolerance) for key in expected
        )
    return bool(value == expected)
