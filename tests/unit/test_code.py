"""The verifier `code`: tests of every form, forged verdicts, and what is said of bad rows."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.environments import verdicts

from megarl.apps.doctor.doctor import check_sandbox
from megarl.apps.verifiers.code.code_tests import (
    extract,
    read_tests,
    same_output,
    same_value,
)
from megarl.apps.verifiers.code.code_verifier import check_rows, code, say_protection
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.environments.scores import BadScore, Score
from megarl.settings.code import CodeConfig
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

Verify = Callable[[dict[str, Any], str], Score]


def prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(index=0, text="", token_ids=[1], answer="", fields=row)


def made(**settings: Any) -> Verify:
    """A function (row, response) -> score, with its own sandbox."""
    time_limit_s = settings.pop("response_limit_s", 20.0)
    given = CodeConfig(**{"time_limit_s": 3.0, **settings})
    config = EnvironmentConfig(verifier="code", code=given, time_limit_s=time_limit_s)
    verify = code(config)

    async def ask(row: dict[str, Any], response: str) -> Score:
        return await verify(prompt(row), response)

    return lambda row, response: asyncio.run(ask(row, response))


@pytest.fixture(scope="module")
def verify() -> Verify:
    return made()


@pytest.fixture(scope="module")
def partial() -> Verify:
    return made(partial=True, time_limit_s=1.0)


# ------------------------------------------------------------------ problems of every form

READS = "import math\na, b = map(int, input().split())\nprint(math.gcd(a, b))"
DEFINES = "import math\ndef f(a, b): return math.gcd(a, b)"
SOLUTION = "class Solution:\n    def f(self, a: int, b: int) -> Optional[List[int]]:\n        return gcd(a, b)"
PAIRS = {"inputs": ["4 6", "6 9"], "outputs": ["2", "3"]}
ENDS = [{"input": "4 6", "output": "2"}, {"input": "6 9", "output": "3", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "4\n6", "output": "2", "testtype": "functional"},
              {"input": "6\n9", "output": "3", "testtype": "functional"}]  # fmt: skip
CALLED = {"fn_name": "f", "inputs": [[4, 6], [6, 9]]}
CHECKED = "def check(candidate):\n    assert candidate(4, 6) == 2 and candidate(6, 9) == 3\n"
PROBLEMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stdin": ({"input_output": PAIRS}, (READS,)),
    "stdin as text": ({"input_output": json.dumps(PAIRS)}, (READS,)),
    "calls": ({"input_output": {**CALLED, "outputs": [2, 3]}}, (DEFINES, SOLUTION)),
    "wrapped": ({"input_output": {**CALLED, "outputs": [[2], [3]]}}, (DEFINES, SOLUTION)),
    "cases": (
        {"public_test_cases": json.dumps(ENDS[:1]), "private_test_cases": json.dumps(ENDS[1:])},
        (READS,),
    ),
    "functional": (
        {"public_test_cases": FUNCTIONAL, "metadata": json.dumps({"func_name": "f"})},
        (DEFINES, SOLUTION),
    ),
    "asserts": ({"test_list": ["assert f(4, 6) == 2", "assert f(6, 9) == 3"]}, (DEFINES,)),
    "check": (
        {"prompt": "import math\ndef f(a, b):\n", "entry_point": "f", "test": CHECKED},
        (DEFINES, "    return math.gcd(a, b)\n"),
    ),
}


@pytest.mark.parametrize("form", PROBLEMS)
def test_problems_of_every_form(verify: Verify, form: str) -> None:
    """The wrong program passes the first test alone."""
    row, programs = PROBLEMS[form]
    for right in programs:
        wrong = right.replace("math.gcd(a, b)", "a - 2").replace("gcd(a, b)", "a - 2")
        assert verify(row, right).reward == 1.0, right
        assert verify(row, wrong).reward == 0.0, wrong


def test_the_share_of_tests(partial: Verify) -> None:
    row = {"input_output": {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "4", "9", "16"]}}
    program = "n = int(input())\nif n == 2: 1 / 0\nif n == 3: print(8)\nelse: print(n * n)"
    assert partial(row, program) == Score(0.5, False, {"tests_passed": 0.5, "timed_out": 0.0})
    slow = "n = int(input())\nwhile n == 2: pass\nprint(n * n)"
    assert partial(row, slow) == Score(0.75, False, {"tests_passed": 0.75, "timed_out": 1.0})
    calls = {"input_output": {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [1, 4, 9]}}
    dies = "import os\ndef f(n):\n    if n == 2: os._exit(0)\n    return n * n"
    assert partial(calls, dies).reward == pytest.approx(2 / 3)
    hangs = "def f(n):\n    while n == 1: pass\n    return n * n"
    assert partial(calls, hangs).reward == pytest.approx(2 / 3)
    asserts = {"test_list": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]}
    assert partial(asserts, dies).reward == pytest.approx(2 / 3)
    assert partial(asserts, hangs).reward == pytest.approx(2 / 3)
    assert partial(asserts, "def f(n): return 4").reward == pytest.approx(1 / 3)


def test_tests_may_use_modules_that_the_program_imports(verify: Verify) -> None:
    """Of Python's library; they are imported for the tests, whose values the program cannot touch."""
    right = "import math, operator\ndef area(r): return math.pi * r * r"
    for test in (
        "assert math.isclose(area(2), 4 * math.pi)",
        "assert operator.ge(area(2), 12)",
        "assert [*itertools.chain([area(0)], [1])] == [0, 1]",
    ):
        assert verify({"test_list": [test]}, right).reward == 1.0, test
        assert verify({"test_list": [test]}, right.replace("r * r", "-r - 1")).reward == 0.0, test


def test_a_wrong_program_ends_early(verify: Verify) -> None:
    """Of 100 tests that each take 0.2 s, only those of the first round are run."""
    row = {"input_output": {"inputs": ["1"] * 100, "outputs": ["2"] * 100}}
    score = verify(row, "import time; time.sleep(0.2); print(1)")
    assert score == Score(0.0, False, {"tests_passed": 0.0, "timed_out": 0.0})


def test_all_tests_have_one_limit() -> None:
    judge = made(response_limit_s=2.0, time_limit_s=1.0)
    row = {"input_output": {"inputs": ["1"] * 50, "outputs": ["1"] * 50}}
    score = judge(row, "import time; time.sleep(0.3); print(1)")
    assert score.reward == 0.0 and score.metrics["timed_out"] == 1.0
    assert 0.02 < score.metrics["tests_passed"] < 0.2
    assert made(max_tests=3)(row, "print(1)").metrics["tests_passed"] == 1.0


def test_much_output_is_read_in_parts() -> None:
    """What the verifier holds at a time is bounded, whatever programs write."""
    config = CodeConfig(partial=True)
    row = {"input_output": {"inputs": ["1"] * 20, "outputs": ["y" * 10**6] * 20}}
    made_here = Sandbox(config)
    results = made_here.run("stdin", "print('y' * 10**6)", ["1"] * 20, total_s=20.0)
    made_here.close()
    assert len(results) == 17
    assert made(partial=True)(row, "print('y' * 10**6)").reward == 1.0


# --------------------------------------------------------------------------- forged verdicts

EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def f(*_): return Equal()
"""
FORGERIES = {
    "says so": "print('passed'); print('{\"passed\": true}')\ndef f(*_): print('passed')",
    "exits": "import os\nos._exit(0)",
    "exits when called": "import os\ndef f(*_): os._exit(0)",
    "is equal to all": EQUAL,
    "an int that is equal to all": EQUAL.replace("class Equal:", "class Equal(int):"),
    "a text that is equal to all": EQUAL.replace("class Equal:", "class Equal(str):"),
    "a list that is equal to all": EQUAL.replace("class Equal:", "class Equal(list):"),
    "patches": """
import builtins, json, sys
builtins.AssertionError = builtins.Exception = type("E", (BaseException,), {})
builtins.all = builtins.isinstance = lambda *_: True
json.dumps = lambda *_, **__: '{"passed": true, "value": 1}'
sys.excepthook = lambda *_: None
def f(*_): return 0
""",
    "writes to every descriptor": """
import os
def f(*_):
    for number in range(3, 128):
        try: os.write(number, b'{"passed": true}\\n{"value": 0}\\n' * 8)
        except OSError: pass
f()
""",
    "looks for what is expected": """
import gc, os, re, sys
def f(*_):
    seen = str([one for one in gc.get_objects() if isinstance(one, (dict, list, str, bytes))])
    for frame in sys._current_frames().values():
        while frame: seen += str(frame.f_locals); frame = frame.f_back
    for process in os.listdir("/proc"):
        for name in ("cmdline", "environ", "mem", "fd/0", "fd/1", "fd/3", "fd/5"):
            try:
                with open(f"/proc/{process}/{name}", "rb") as file:
                    if name == "mem" and process.isdigit():
                        for line in open(f"/proc/{process}/maps"):
                            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                            if end < 1 << 47 and "rw" in line and end - begin < 1 << 24:
                                try:
                                    file.seek(begin); seen += file.read(end - begin).decode("latin-1")
                                except OSError: pass
                    elif not name.startswith("fd"): seen += file.read().decode("latin-1")
            except OSError: pass
    seen += "".join(open(x).read() for x in os.listdir(".") if os.path.isfile(x))
    # the program's own text names no number of eight digits
    found = re.findall(r"(?<!\\d)8642\\d{4}(?!\\d)", seen)
    return int(found[0]) if found else 0
if __name__ == "__main__": print(f())
""",
    "kills the others": """
import os
def f(*_):
    for process in range(1, 50):
        if process != os.getpid():
            try: os.kill(process, 9)
            except OSError: pass
f()
""",
    "changes the checker": """
import os
def f(*_):
    for process in range(1, 50):
        if process != os.getpid():
            try: open(f"/proc/{process}/mem", "r+b")
            except OSError: continue
            return 86420975
    return 0
""",
}
ROWS = {
    "stdin": {"input_output": {"inputs": ["1"], "outputs": ["86420975"]}},
    "calls": {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [86420975]}},
    "asserts": {"test_list": ["assert f(1) == 86420975"]},
    "check": {"entry_point": "f", "prompt": "def f(n):\n    pass\n",
     "test": "def check(candidate):\n    assert candidate(1) == 86420975\n"},
}  # fmt: skip


@pytest.mark.parametrize("how", FORGERIES)
def test_a_verdict_cannot_be_forged(verify: Verify, how: str) -> None:
    for form, row in ROWS.items():
        assert verify(row, FORGERIES[how]).reward == 0.0, form
    right = "def f(n): return 86420975\nif __name__ == '__main__': print(f(1))"
    assert [verify(row, right).reward for row in ROWS.values()] == [1.0] * 4


def test_a_name_that_is_there_without_an_import_is_no_solution(verify: Verify) -> None:
    row = {"input_output": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}}
    assert verify(row, "# gcd").reward == 0.0
    assert verify(row, "def solution(a, b): return gcd(a, b)").reward == 0.0
    assert verify(row, "from math import gcd").reward == 1.0


def test_replies_that_break_a_reader_are_wrong(verify: Verify) -> None:
    for reply in ("[" * 100_000, '{"value": {"t": "kept", "v": 0}}', '{"value": {"t": "x"}}', "1e999", "\xff", '{"value": {"t": "range", "v": [0, 0, 0]}}', '{"value": {"t": "set", "v": [[1]]}}'):  # fmt: skip
        program = (
            f"import os\ndef f(*_): os.write(4, {reply!r}.encode('latin-1') + b'\\n'); os._exit(0)"
        )
        for form in ("calls", "asserts", "check"):
            assert verify(ROWS[form], program).reward == 0.0, (form, reply)


FORKED = """import os, sys
def f(n):
    child = os.fork()
    if child == 0:
        {what}
    os.waitpid(child, 0)
    return n
"""
FORKS = [FORKED.format(what=what) for what in ("sys.exit(0)", "return -1", "raise ValueError")]
FORKS.append("import os, sys\nif os.fork() == 0: sys.exit(0)\ndef f(n): return n")
FORKS.append("import os\nos.fork()\ndef f(n): return n")


@pytest.mark.parametrize("program", FORKS)
def test_a_program_that_forks_replies_once(verify: Verify, program: str) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [1, 2, 3]}}
    asserts = {"test_list": [f"assert f({n}) == {n}" for n in range(3)]}
    assert [verify(one, program).reward for one in (row, asserts)] == [1.0, 1.0]


def test_a_reply_too_many_ends_with_its_program(verify: Verify) -> None:
    """It is read as the reply to the program's next call, and by no other program's tests."""
    for ends in ("", "; os._exit(0)", "; os.closerange(3, 9)"):
        program = f"import os\ndef f(n): os.write(4, b'{{\"value\": 1}}\\n' * 9){ends}; return n"
        verify(ROWS["calls"], program)
        row = {"input_output": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [2, 3]}}
        assert verify(row, "def f(n): return n").reward == 1.0, ends


# ------------------------------------------------------------------------ values and helpers


def test_asserts_see_python_values(verify: Verify) -> None:
    """Tuples, sets, dicts with numbers as keys, exceptions and objects of the program arrive."""
    program = """
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
def total(pairs): return sum(one.a * one.b for one in pairs)
def several(n): return {n: (n, {n}, frozenset([n]), b"x", 1j, range(n), None, True)}
def fails(n): raise ValueError(f"no {n}")
def apply(values, times=1): return [value * times for value in values]
"""
    row = {
        "test_setup_code": "import math\nlimit = 3",
        "entry_point": ["total", "several", "fails", "apply"],
        "code": program,  # which defines Pair, too
        "test_list": [
            "assert total([Pair(1, 2), Pair(3, 4)]) == 14",
            "assert several(limit) == {3: (3, {3}, frozenset([3]), b'x', 1j, range(3), None, True)}",
            "try:\n    fails(2)\n    raise TypeError\nexcept ValueError as error:\n    assert str(error) == 'no 2'",
            "assert math.isclose(apply((0.1, 0.2), times=3)[0], 0.3)",
            "assert [total([Pair(n, n)]) for n in range(3)] == [0, 1, 4]",
        ],
    }
    assert verify(row, program) == Score(1.0, True, {"tests_passed": 1.0, "timed_out": 0.0})


def test_values_of_livecodebench_are_not_wrapped(verify: Verify) -> None:
    """As those of APPS are, in the column `input_output`."""
    cases = [{"input": "5", "output": "[5]", "testtype": "functional"}]
    row = {"public_test_cases": cases, "metadata": {"func_name": "f"}}
    apps = {"input_output": {"fn_name": "f", "inputs": [[5]], "outputs": [[5]]}}
    assert [verify(one, "def f(x): return [x]").reward for one in (row, apps)] == [1.0, 1.0]
    assert [verify(one, "def f(x): return x").reward for one in (row, apps)] == [0.0, 1.0]


def test_a_program_does_not_end_a_loop_of_its_tests(verify: Verify) -> None:
    """`StopIteration` of a function would end the `map` that calls it as if all was done."""
    row = {"test_list": ["assert all(map(lambda n: f(n) == n, [1, 2]))"]}
    assert verify(row, "def f(n): raise StopIteration").reward == 0.0
    own = "class Mine(StopIteration): pass\nStopIteration = Mine\ndef f(n): raise Mine"
    assert verify(row, own).reward == 0.0
    assert verify(row, "raise StopIteration").reward == 0.0
    assert verify(row, "def f(n): return n").reward == 1.0


def test_a_function_may_be_named_like_one_of_python(verify: Verify) -> None:
    """As `sum` in task 126 of MBPP, which takes two numbers."""
    tests = ["assert {}(10, 15) == 6", "assert len([{}(4, 6)]) == 1", "assert {}(4, 6) == 3"]
    for name in ("sum", "total"):
        row = {"test_list": [one.format(name) for one in tests]}
        method = f"class Solution:\n    def {name}(self, a, b): return b - a + 1"
        for right in (f"def {name}(a, b): return b - a + 1", f"{name} = lambda a, b: b - a + 1"):
            assert verify(row, right).reward == 1.0
        assert verify(row, method).reward == 1.0
        assert verify(row, f"def {name}(a, b): return 6").reward == 0.0
        assert verify(row, "def other(a, b): return b - a + 1").reward == 0.0
    assert verify({**row, "code": method.split("\n")[1].strip()}, method).reward == 1.0
    # Several of its own: which one is tested is not known, so none is.
    both = "def abs(x): return 0\ndef sum(a, b): return 7\n"
    assert verify({"test_list": ["assert abs(sum(10, 15) - 6) == 0"]}, both).reward == 0.0


def test_a_program_does_not_replace_what_its_tests_call(verify: Verify) -> None:
    """A test of a function of the program calls Python's own `all`."""
    row = {"test_list": ["assert all(f(n) == n for n in (1, 2))", "assert all([f(3) == 3])"]}
    replaced = "def f(n): return 0\ndef all(values): return True\n"
    assert verify(row, replaced).reward == 0.0
    assert verify(row, replaced.replace("return 0", "return n")).reward == 1.0
    check = {"entry_point": "f", "prompt": ""}
    check["test"] = "def check(candidate):\n    assert all([candidate(1) == 1])\n"
    assert verify(check, replaced).reward == 0.0


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
PROMPTS = {
    "text around the code": "Complete this function:\n\ndef add(a, b):\n    '''Add.'''\n",
    "no last newline": "def add(a, b):\n    '''Add.'''",
    "a comment in place of a body": "def add(a, b):\n    # Add.\n",
    "another function": "def add_all(a, b):\n    '''Add.'''\n",
    "the function within a text": "'''\ndef add(a, b):\n'''",
    "none": None,
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_whole_function_is_right_whatever_the_prompt_is(verify: Verify, kind: str) -> None:
    row = {"test": CHECK, "entry_point": "add", "prompt": PROMPTS[kind]}
    program = "```python\ndef add(a, b):\n    return a {} b\n```"
    assert verify(row, program.format("+")).reward == 1.0
    assert verify(row, program.format("-")).reward == 0.0


def test_the_prompt_is_put_in_front_of_a_body(verify: Verify) -> None:
    """And what it has besides the function, in front of the function, too."""
    for start in ("    # Add.", "    '''Add.'''", "    '''Add.'''\n"):
        begins = "import math\nhalf = 0.5\n@staticmethod\ndef add(a, b):\n"
        row = {"test": CHECK, "entry_point": "add", "prompt": f"{begins}{start}"}
        assert verify(row, "    return math.floor(a + b + half)").reward == 1.0
        assert verify(row, "    return math.floor(a - b + half)").reward == 0.0
        assert verify(row, "def add(a, b): return math.floor(a + b + half)").reward == 1.0
        # What a model writes behind the body does not make the body another function.
        again = "    return math.floor(a + b + half)\n\ndef add(a, b):\n    return 3\n"
        assert verify(row, again).reward == 1.0


def test_a_prompt_may_end_with_the_indentation_of_the_body(verify: Verify) -> None:
    row = {"test": CHECK, "entry_point": "add", "prompt": "def add(a, b):\n    '''Add.'''\n    "}
    for body in ("return a + b", "    return a + b", "\n    return a + b"):
        assert verify(row, body).reward == 1.0
        assert verify(row, body.replace("+", "-")).reward == 0.0


@pytest.mark.parametrize(("found", "expected", "same"), [
    ("1 2\n", "1 2", True), ("1 2 \n\n", "1 2\n", True), ("1  2", "1 2", True), ("1.50", "1.5", True),
    ("1e3", "1000.0", True), ("1", "1.0", True), ("01", "1", False), ("01", "1.0", False),
    ("101", "00101", False), ("-007", "-7", False), ("+5", "5", True), ("00", "0", False), ("00101", "00101", True),
    ("1 01", "1  01", True), ("00.50", "0.5", True), ("1", "1e0", True), ("0", "0.0", True),
    ("a 1.0", "a 1", True), ("", "", True),
    ("\n", "", True), ("1\r\n2", "1\n2", True), ("-0", "0", True), ("100000000000000000001", "100000000000000000000", False),
    ("1\n2", "1 2", False), ("a  b", "a b", False), (" a", "a", False), ("1.0001", "1", False),
    ("１２", "12", False), ("٣", "3", False), ("1\u3000 2", "1 2", False), ("1\x1f2", "1 2", False), ("3\xa0", "3", False),
    ("\x1c\n", "", False), ("nan", "nan", True), ("a", "A", False), ("1", "1 1", False), ("", "0", False), ("0.1", "0.10000001", False),
])  # fmt: skip
def test_outputs_are_compared(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) == same


def test_tolerance() -> None:
    assert same_output("0.333333", "0.3333333333", 1e-5)
    assert not same_output("0.3334", "0.3333333333", 1e-5)
    assert same_output("1000001.0", "1000000.0", 1e-5)
    assert not same_output("1000001", "1000000", 1e-5)  # whole numbers are exact
    assert same_value([0.1 + 0.2], [0.3], 1e-9) and not same_value([0.1 + 0.2], [0.3])
    assert same_value((1, 2), [1, 2]) and same_value({1: 2}, {"1": 2})
    assert not same_value(5, [5]) and same_value(5, [5], wrapped=True)
    assert same_value([5], [5], wrapped=True) and not same_value(5, [5, 5], wrapped=True)
    assert not same_value(True, 1) and not same_value([5], 5) and not same_value("1", 1)
    assert not same_value(True, 1.0) and not same_value(1.0, True) and not same_value([True], [1.0])
    assert same_value(1, 1.0) and same_value(1.0, 1) and same_value(True, True)
    assert not same_value(float("nan"), 1.0, 0.5) and not same_value([1], [1, 2])


def test_the_program_of_a_response() -> None:
    fence = "```"
    text = f"a\n{fence}python\nfirst\n{fence}\nb\n{fence}py\nsecond\n{fence}\n{fence}text\nshown\n{fence}"
    assert extract(text) == "second\n"
    assert extract(f"{fence}\nonly\n{fence}\nend") == "only\n"
    assert extract(f"{fence}python\ncut off") == "cut off\n"
    assert extract(f"{fence}cpp\nx\n{fence}") == "x\n"
    assert extract("print(1)") == "print(1)"
    assert extract("print(1)", fence_required=True) is None
    assert extract("use ```x``` here") == "use ```x``` here"
    assert extract(f"{fence}\nprint('\u2028\x0c\x1c')\r\n{fence}") == "print('\u2028\x0c\x1c')\n"


COLLIDES = """
numbers = [n * (2**61 - 1) for n in range(50_000)]
class Items(dict):
    def items(self): return [(n, 0) for n in numbers]
class Members(set):
    def __iter__(self): return iter(numbers)
"""


@pytest.mark.parametrize("value", ["Items()", "Members()", "[{0: (Items(),)}]"])
def test_numbers_that_collide_cost_the_verifier_no_time(verify: Verify, value: str) -> None:
    """All hashes are 0; the program builds no dict or set itself."""
    began, program = time.process_time(), f"{COLLIDES}def f(n): return {value}"
    assert verify(ROWS["calls"], program).reward == 0.0
    assert time.process_time() - began < 10  # CPU time of the verifier; it was two minutes


def test_a_response_without_a_block_may_be_wrong(verify: Verify) -> None:
    strict = made(fence_required=True)
    assert verify(ROWS["stdin"], "print(86420975)").reward == 1.0
    assert strict(ROWS["stdin"], "print(86420975)").reward == 0.0
    assert strict(ROWS["stdin"], "```python\nprint(86420975)\n```").reward == 1.0


# --------------------------------------------------------------------------- rows and recipes

BAD_ROWS = {
    "has no tests in input_output": {"question": "x"},
    "has no tests in": {"test_list": [], "input_output": None},
    "is no JSON": {"input_output": '{"inputs": ['},
    "2 inputs and 1 outputs": {"input_output": {"inputs": ["", ""], "outputs": [""]}},
    "must be lists": {"input_output": {"inputs": "1", "outputs": "1"}},
    "holds no test": {"input_output": {"inputs": [], "outputs": []}},
    "must be a list of arguments": {
        "input_output": {"fn_name": "f", "inputs": [1], "outputs": [1]}
    },
    "no func_name": {"tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
    "needs 'input' and 'output'": {"tests": [{"input": "1"}]},
    "names no function": {"test": "def check(candidate): pass"},
    "is no known form": {"tests": "eJx9kE"},
}


@pytest.mark.parametrize("said", BAD_ROWS)
def test_bad_rows(verify: Verify, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(BAD_ROWS[said])
    with pytest.raises(BadScore, match=said):
        verify(BAD_ROWS[said], "x")


def test_every_row_is_looked_at_before_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    config = EnvironmentConfig(verifier="code")
    rows = [replace(prompt(ROWS["stdin"]), index=index) for index in range(5)]
    check_rows(config, rows, "prompts")
    rows[3] = replace(rows[3], fields={"input_output": ""})
    with pytest.raises(ValueError, match=r"row 3: the row has no tests .* set .*tests_column"):
        check_rows(config, rows, "prompts")
    check_rows(EnvironmentConfig(), rows, "prompts")  # another verifier
    say_protection(config)
    say_protection(EnvironmentConfig())
    assert capfd.readouterr().err.count("programs run under Landlock and seccomp") == 1
    assert next(check_sandbox()).status == "ok"


LAX = "def compare(*_): return True\ndef f(*_): return 3"
CHECKS_F = {
    "entry_point": "f",
    "test": "def check(candidate):\n    assert compare(candidate(1), 2)",
}
UNCLEAR: dict[str, dict[str, Any]] = {
    "compare, f": {"test_list": ["assert compare(f(1), 2)"]},
    "f, isclose": {"test_list": ["assert f(1) == 1", "assert isclose(f(2), 0.5)"]},
    "compare, f, in a variable": {"test_list": ["x = f(1)\nassert compare(x, 2)"]},
    "compare, f, in a function": {
        "test_setup_code": "def holds(x): return compare(x, 2)", "test_list": ["assert holds(f(1))"]
    },
    "Approx, f": {"test_list": ["assert f(1) == Approx(2)"]},
    "compare": {"test_list": ["assert compare(f(1), 2)"], "entry_point": "f"},
    "compare,": CHECKS_F,
    "check_f": {"test_list": ["assert f(1) == 3", "check_f(2)"], "code": "def f(x): return 3"},
}  # fmt: skip


@pytest.mark.parametrize("names", UNCLEAR)
def test_a_program_does_not_answer_for_helpers(verify: Verify, names: str) -> None:
    row, name = UNCLEAR[names], re.escape(names.partition(", in")[0].rstrip(","))
    with pytest.raises(ValueError, match=rf"row 0: column test.* its tests use {name}, .*define"):
        check_rows(EnvironmentConfig(verifier="code"), [prompt(row)], "prompts")
    with pytest.raises(BadScore, match="could answer for"):
        verify(row, LAX)


@pytest.mark.parametrize("row", [
    {"test_list": ["assert compare(f(1), 2)"], "test_setup_code": "from operator import eq as compare"},
    {"test_list": ["assert isclose(f(1), 2)"], "test_imports": ["from math import *"]},
    {"test_list": ["assert compare(f(1)) == 2"], "test_setup_code": "def compare(x): return x"},
    {"test_list": ["assert compare(f(1), 2)"], "entry_point": "f, compare"},
    {"test_list": ["assert f([Pair(1, 2)]) == 2", "assert f(pairs=[Pair(1, 2)]) == 2"]},
    {"test_list": ["assert f(n := 1) == 2", "assert [f(n) for n in (1,)] == [2]"]},
])  # fmt: skip
def test_names_of_tests_that_are_clear(verify: Verify, row: dict[str, Any]) -> None:
    program = "Pair = lambda *_: 0\ndef f(*_, **__): return 2\ndef compare(a, b): return a == b"
    assert verify(row, program).reward == 1.0
    assert verify(row, program.replace("return 2", "return 4")).reward == 0.0


def test_tests_are_read_from_the_column_that_is_set() -> None:
    row = {"input_output": {"inputs": ["1"], "outputs": ["1"]}, "mine": ["assert f(1) == 1"]}
    assert read_tests(row).kind == "stdin"
    assert read_tests(row, "mine").kind == "asserts"
    with pytest.raises(ValueError, match="no tests in column other"):
        read_tests(row, "other")


# ------------------------------------------------------------ another language, worker processes

TINY = """
import sys
stack = []
for word in open(sys.argv[1]).read().split():
    if word == "read": stack.append(int(input()))
    elif word == "print": print(stack.pop())
    elif word in ("+", "*"):
        b, a = stack.pop(), stack.pop()
        stack.append(a + b if word == "+" else a * b)
    else: stack.append(int(word))
"""


def test_another_language(tmp_path: Path) -> None:
    """The interpreter's file is seen, also in the folder for temporary files, and cannot be
    changed."""
    (tmp_path / "tiny.py").write_text(TINY)
    tmp_path.chmod(0o755)
    command = ("python", "-I", "-S", str(tmp_path / "tiny.py"))
    judge = made(interpreter=command)
    row = {"input_output": {"inputs": ["3\n4\n", "5\n6\n"], "outputs": ["14", "22"]}}
    assert judge(row, "read read + 2 * print").reward == 1.0
    assert judge(row, "```\nread read * 2 + print\n```").reward == 0.0  # right for the first test
    assert judge(row, "import os").reward == 0.0
    with pytest.raises(ValueError, match="begins with 'nolang', which is no program"):
        made(interpreter=("nolang",))
    with pytest.raises(ValueError, match=r"names the file gone\.py, which does not exist"):
        made(interpreter=("python", "gone.py"))


def test_further_folders_can_be_seen(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "module_of_ours.py").write_text("value = 86420975")
    program = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport module_of_ours\nprint(module_of_ours.value)"
    assert made(visible=(str(tmp_path),))(ROWS["stdin"], program).reward == 1.0
    assert made()(ROWS["stdin"], program).reward == 0.0
    tmp_path.chmod(0o777)  # read-only all the same
    writes = f"open({str(tmp_path / 'new')!r}, 'w')\n{program}"
    assert made(visible=(str(tmp_path),))(ROWS["stdin"], writes).reward == 0.0
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="names /nowhere, which does not exist"):
        made(visible=("/nowhere",))


def test_in_a_worker_process() -> None:
    """Under the pool's limits; an endless program is a wrong response, not a failed verifier."""
    config = EnvironmentConfig(verifier="code", time_limit_s=3.0, wrong=-1.0)
    found = verdicts(
        config, "print(86420975)", "print(1)", "while True: pass", "x = bytearray(10 << 30)",
        prompt=prompt(ROWS["stdin"]),
    )  # fmt: skip
    assert [one.reward for one in found] == [1.0, -1.0, -1.0, -1.0]
    assert [one.failure for one in found] == [""] * 4
    assert found[2].metrics["timed_out"] == 1.0
    [failed] = verdicts(config, "print(1)", prompt=prompt({"x": 1}))
    assert failed.failure == "error" and "set environment.code.tests_column" in failed.detail
