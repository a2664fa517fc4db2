"""Calls functions of a program, in the program's own process; values travel as JSON.

This file's text is handed to the interpreter in the sandbox, so it imports only the standard
library, and not `json`, which takes as long to import as Python takes to start. Requests come on
descriptor 3 and replies go to descriptor 4, a line each; a request as a Python literal, a reply,
which is read by a process that must not trust it, as JSON:

    {"call": name, "args": [values], "named": {}}
        ->  {"value": value} or {"raised": class, "text": message}

Nothing that the program could do to this file's functions matters: its replies are claims, which
are compared with what is expected in a process that it cannot reach.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from typing import Any

COMMON = {
    "typing": "Any Callable Deque Dict FrozenSet Generator Iterable Iterator List NamedTuple"
    " Optional Sequence Set Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby permutations product",
    "functools": "cache cmp_to_key lru_cache reduce",
    "bisect": "bisect bisect_left bisect_right insort",
    "math": "ceil comb factorial floor gcd inf lcm log sqrt",
    "string": "ascii_lowercase ascii_uppercase",
    "operator": "add itemgetter mul xor",
}
"""{module: names} that function tests (LeetCode's) expect a program to have without an import."""
MODULES = (*COMMON, "random", "re")


def encode(value: Any, kept: list[Any]) -> Any:
    """`value` for JSON: lists, texts, numbers and None as they are, other containers as {"t": type,
    "v": content}. What is none of these is added to `kept` and becomes {"t": "kept", "v": index}.
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(one, kept) for one in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"t": kind.__name__, "v": [encode(one, kept) for one in value]}
    if isinstance(value, dict):
        pairs = [[encode(key, kept), encode(one, kept)] for key, one in value.items()]
        return {"t": "dict", "v": pairs}
    if isinstance(value, bytes):
        return {"t": "bytes", "v": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"t": "complex", "v": [value.real, value.imag]}
    if isinstance(value, range):
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    kept.append(value)
    return {"t": "kept", "v": len(kept) - 1}


def decode(value: Any, kept: Any) -> Any:
    """The inverse of `encode`. `kept`: function of an index that gives the object, or what stands
    for it. Raises `KeyError`, `TypeError` or `ValueError` for what `encode` does not make.
    """
    if isinstance(value, list):
        return [decode(one, kept) for one in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["t"], value["v"]
    if kind == "dict":
        return {decode(key, kept): decode(one, kept) for key, one in content}
    if kind == "kept":
        return kept(content)
    if kind == "bytes":
        return content.encode("latin-1")
    if kind in ("complex", "range"):
        return {"complex": complex, "range": range}[kind](*content)
    made = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(decode(one, kept) for one in content)


def to_json(value: Any) -> str:
    """A value made by `encode` as JSON. Raises `ValueError` for numbers of too many digits."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(to_json, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{to_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and value - value != 0.0:  # not finite
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return repr(value)


def _quoted(text: str) -> str:
    try:
        from _json import encode_basestring_ascii as quoted
    except ImportError:  # a Python without that accelerator
        from json.encoder import encode_basestring_ascii as quoted
    return quoted(text)


def common_names(source: str) -> dict[str, Any]:
    """The names of `COMMON` and `MODULES` that occur in the text of a program, imported."""
    found: dict[str, Any] = {}
    for module, names in COMMON.items():
        wanted = [name for name in names.split() if name in source]
        if wanted:
            made = importlib.import_module(module)
            found |= {name: getattr(made, name) for name in wanted}
    for module in MODULES:
        if f"{module}." in source:
            found[module] = importlib.import_module(module)
    return found


def load_program(path: str) -> tuple[dict[str, Any], BaseException | None]:
    """Run a program as a module that is not `__main__`. Returns its names and what it raised."""
    module = type(sys)("program")
    sys.modules["program"] = module
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        # Beneath the program's own names, so that none of these passes for a function of its own
        module.__dict__["__builtins__"] = builtins.__dict__ | common_names(source)
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - what a sandbox is for
    except BaseException as error:
        return module.__dict__, error
    return module.__dict__, None


def call(
    names: dict[str, Any], request: dict[str, Any], kept: list[Any], failed: BaseException | None
) -> dict[str, Any]:
    """The reply to a request. A name that the program has not defined is looked for in an object of
    its class `Solution`. `failed`: what loading the program raised.
    """
    try:
        if failed is not None:
            raise failed
        name = request["call"]
        found = names.get(name)
        if found is None and hasattr(names.get("Solution"), name):
            found = getattr(names["Solution"](), name)
        if found is None:
            raise NameError(f"the program has no function {name}")
        arguments = [decode(one, kept.__getitem__) for one in request["args"]]
        named = {key: decode(one, kept.__getitem__) for key, one in request["named"].items()}
        return {"value": encode(found(*arguments, **named), kept)}
    except BaseException as error:
        return {"raised": type(error).__name__, "text": str(error)[:1000]}


def _end_forks(own: int) -> None:
    """End this process if the program has forked it from `own`, and its code came back, or raised:
    it would reply a second time, and read the requests to the other.
    """
    if os.getpid() != own:
        os._exit(0)


def main(path: str) -> None:
    """Serve requests until descriptor 3 is closed."""
    builtins.exit = builtins.quit = sys.exit
    requests, replies = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    own = os.getpid()
    names, failed = load_program(path)
    _end_forks(own)
    kept: list[Any] = []
    for line in requests:
        try:
            request = eval(line, {"inf": float("inf"), "nan": float("nan")})  # noqa: S307 - trusted
            reply = to_json(call(names, request, kept, failed))
        except BaseException as error:
            reply = to_json({"raised": type(error).__name__, "text": str(error)[:1000]})
        _end_forks(own)
        replies.write(reply.encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
