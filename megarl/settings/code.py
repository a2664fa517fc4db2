"""Settings of the verifier `code`, which runs the programs that a model writes."""

from typing import Annotated, Literal

from megarl.settings.recipe_paths import CodeText, PathText
from megarl.settings.schema import Config, Range, require

Protection = Literal["auto", "rlimits", "none"]


class CodeConfig(Config):
    """The verifier `code`: the response's program runs in a sandbox against the tests of the
    prompt's row.
    """

    sandbox: Protection = "auto"
    """`auto`: Landlock lets programs read only what the interpreter needs and write only to their
    folder, and a seccomp filter refuses sockets, under limits; of root, as another user. An error
    where the kernel cannot (before Linux 6.2). `rlimits`: only the limits. `none`: only limits on
    wall time and output."""
    interpreter: tuple[CodeText, ...] = ()
    """Command that runs a program, whose path is added as its last word, such as `[python,
    tiny_language.py]`; programs see the files that it names. Empty: the running Python without site
    packages."""
    visible: tuple[PathText, ...] = ()
    """Further files and folders that programs may read."""
    tests_column: str = ""
    """Column with the tests. Empty: the first of `input_output`, `test_list`, `test`,
    `public_test_cases` with `private_test_cases`, `tests` and `test_cases` that the row has."""
    fence_required: bool = False
    """A response without a fenced block is wrong. Otherwise all of it is the program."""
    partial: bool = False
    """The score is the share of tests passed. Otherwise it is 1 if all pass, else 0, and the first
    failed test ends the program."""
    tolerance: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Allowed difference of a number with a decimal point or exponent, relative to the expected
    number, or absolute where that is below 1."""
    max_tests: Annotated[int, Range(1, 10**6)] = 100
    """Most tests of a row that are run, the first ones."""
    time_limit_s: Annotated[float, Range(0.01, 3600.0)] = 4.0
    """Seconds of wall and CPU time for one test. All tests of a response have 0.9 times
    `environment.time_limit_s`; those not reached have failed."""
    memory_mib: Annotated[int, Range(16, 2**20)] = 512
    """MiB of memory of a program's processes, each and all together."""
    processes: Annotated[int, Range(1, 4096)] = 16
    """Most processes and threads of a program."""
    file_mib: Annotated[int, Range(1, 2**20)] = 16
    """MiB of a program's temporary folder, and of a file in it."""
    output_kib: Annotated[int, Range(1, 2**20)] = 1024
    """Most KiB of output of a test; one that writes more has failed."""

    def check(self) -> None:
        require(
            all(self.interpreter),
            "environment.code.interpreter holds an empty word; set it to a command such as"
            " [python, interpreter.py], or leave it out",
        )
