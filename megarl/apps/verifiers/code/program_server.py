"""Calls functions of a tested program, in the program's own process; values travel as JSON.

The text of this file is given to the interpreter in the sandbox, so it imports only the standard
library, and not `typing`, which takes as long to import as Python takes to start. Requests come on
descriptor 3 and replies go to descriptor 4, a line each:

    {"call": name, "args": [values], "named": {}}
        ->  {"value": value} or {"raised": class, "text": message}

The program may change this file's functions without harm: its replies are not believed, but
compared with what is expected, in a process that the program cannot reach.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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
"""{module: names} that tests of functions (LeetCode's) expect a program to have without an import.
"""
MODULES = (*COMMON, "random", "re")


CONTAINERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    dict: (lambda value: [[key, item] for key, item in value.items()], dict),
    bytes: (lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
"""{type: (function from a value to its content as a list or text, function from that to a value)}
"""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Make data for JSON of a value that travels between a tested program and its tests: lists,
    texts, numbers and None stay as they are; tuples, sets, dicts, bytes, complex numbers and ranges
    become {"t": name of the type, "v": content}. Any other object becomes {"t": "kept", "v":
    keep(value)}, where `keep` stores the object and returns its index.
    """
    if value is None:
        return None
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    for base, (content, _) in CONTAINERS.items():
        if isinstance(value, base):
            return {"t": base.__name__, "v": encode(content(value), keep)}
    return {"t": "kept", "v": keep(value)}


def decode(value: Any, kept: Callable[[int], Any]) -> Any:
    """Turn data from `encode`, such as {"t": "tuple", "v": [1, 2]}, back into the value. `kept`:
    function from an index to the object that `encode` gave to `keep`, or to what stands for it.
    Raises `TypeError`, `ValueError`, `KeyError` or `AttributeError` for data that `encode` does not
    make.
    """
    if isinstance(value, list):
        return [decode(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    content = decode(value["v"], kept)
    if value["t"] == "kept":
        return kept(content)
    [make] = [make for base, (_, make) in CONTAINERS.items() if base.__name__ == value["t"]]
    return make(content)


def common_names(source: str) -> dict[str, Any]:
    """Names of Python's library that a program may use without an import, as LeetCode's do: {name:
    object} of those, such as `List`, `deque` or `math`, that occur in `source`, the text of the
    program; their modules are imported.
    """
    objects: dict[str, Any] = {}
    for module, names in COMMON.items():
        present = [name for name in names.split() if name in source]
        if present:
            library = importlib.import_module(module)
            objects |= {name: getattr(library, name) for name in present}
    for module in MODULES:
        if f"{module}." in source:
            objects[module] = importlib.import_module(module)
    return objects


def load_program(path: str) -> tuple[dict[str, Any], BaseException | None]:
    """Run the program file `path` as a module that is not `__main__`. Returns (the names that it
    defines, the exception that it raised or None).
    """
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
) -> str:
    """Call a function of the tested program for a request {"call": its name, "args": [encoded
    values], "named": {name: encoded value}}. Returns one line of JSON: {"value"} of the function,
    or {"raised", "text"} of its exception; raises nothing. `names`: {name: object} that the program
    defines; a function that is missing there is looked for in an object of its class `Solution`.
    `kept`: objects that JSON cannot hold, to which results of this call are added and whose indices
    travel instead. `failed`: the exception that loading the program raised, which is then the reply
    to every request; None if it loaded.
    """

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    try:
        if failed is not None:
            raise failed
        name = request["call"]
        function = names.get(name)
        if function is None and hasattr(names.get("Solution"), name):
            function = getattr(names["Solution"](), name)
        if function is None:
            raise NameError(f"the program has no function {name}")
        arguments = [decode(item, kept.__getitem__) for item in request["args"]]
        named = {key: decode(item, kept.__getitem__) for key, item in request["named"].items()}
        return json.dumps({"value": encode(function(*arguments, **named), keep)})
    except BaseException as error:
        return json.dumps({"raised": type(error).__name__, "text": str(error)[:1000]})


def _end_forks(pid: int) -> None:
    """End this process if the program has forked it from `pid`, and its code came back, or raised:
    it would reply a second time, and read the requests to the other.
    """
    if os.getpid() != pid:
        os._exit(0)


def main(path: str) -> None:
    """Main function of a tested program's process: load the program file `path` and call its
    functions as requests ask for it, one line of JSON each, on descriptor 3, with replies on
    descriptor 4, until descriptor 3 is closed.
    """
    builtins.exit = builtins.quit = sys.exit
    requests, replies = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    pid = os.getpid()
    names, failed = load_program(path)
    _end_forks(pid)
    kept: list[Any] = []
    for line in requests:
        reply = call(names, json.loads(line), kept, failed)
        _end_forks(pid)
        replies.write(reply.encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
