"""Settings of the verifier `code`, which runs the programs that a model writes: which tests a
program must pass, and what it may use.
"""

from typing import Annotated, Literal

from megarl.settings.recipe_paths import CodeText, PathText
from megarl.settings.schema import Config, Range, require

Protection = Literal["auto", "namespaces", "rlimits", "none"]


class CodeConfig(Config):
    """The verifier `code`, which extracts a program from a response, runs it in a sandbox against
    the tests of the prompt's row and scores it by the tests passed: where the tests are, and the
    limits.
    """

    sandbox: Protection = "auto"
    """`namespaces`: programs run as another user in Linux namespaces of their own (processes,
    mounts, network), with a read-only file system of which they see only what the interpreter
    needs, without capabilities, under a seccomp filter and limits. `rlimits`: only the limits;
    programs can read files and use the network. `none`: only the limits on wall time and output.
    `auto`: `namespaces`, or an error where the kernel refuses those."""
    interpreter: tuple[CodeText, ...] = ()
    """Command that runs a program; the path of the program is added as its last word. Empty: the
    running Python without site packages. For another language, for example
    `[python, tiny_language.py]`. Words that name files are made visible to programs."""
    visible: tuple[PathText, ...] = ()
    """Further files and folders that programs may read, such as a folder of packages."""
    tests_column: str = ""
    """Column with the tests. Empty: the first of `input_output`, `test_list`, `test`,
    `public_test_cases`, `private_test_cases`, `tests` and `test_cases` that the row has; the tests
    of `public_test_cases` and `private_test_cases` are added up."""
    fence_required: bool = False
    """A response without a fenced block counts as wrong. Otherwise the whole response is the
    program."""
    partial: bool = False
    """The score is the fraction of tests passed. Otherwise it is 1 if all pass, else 0, and the
    first failed test ends the run of the program."""
    tolerance: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Allowed difference of a number with a decimal point or exponent, relative to the expected
    number, or absolute where that is below 1. 0: the numbers must be equal."""
    max_tests: Annotated[int, Range(1, 10**6)] = 100
    """Most tests of a row that are run: the first ones."""
    time_limit_s: Annotated[float, Range(0.01, 3600.0)] = 4.0
    """Seconds of wall time and of CPU time for one test. All tests of a response together have
    0.9 times `environment.time_limit_s`; a test that is not reached within it has failed."""
    memory_mib: Annotated[int, Range(16, 2**20)] = 512
    """Memory of a program in MiB: of each of its processes, and of all of them together."""
    processes: Annotated[int, Range(1, 4096)] = 16
    """Most processes and threads of a program at the same time."""
    file_mib: Annotated[int, Range(1, 2**20)] = 16
    """Size of the temporary folder of a program, and of a file in it, in MiB."""
    output_kib: Annotated[int, Range(1, 2**20)] = 1024
    """Most output of a test in KiB; a program that writes more has failed the test."""

    def check(self) -> None:
        require(
            all(self.interpreter),
            "environment.code.interpreter holds an empty word; set it to a command such as"
            " [python, interpreter.py], or leave it out",
        )
