"""The interpreter of the stack language of launch/recipes/programs.yaml.

    python tiny_language.py PROGRAM

`PROGRAM` is a file of commands, one character each:

    0 to 9   push the digit
    x        push the number of the input line
    + - *    pop b, pop a, push a + b, a - b or a * b
    .        pop a number and print it on a line of its own

Spaces and line ends are skipped. The program runs once for each line of standard input, a whole
number each, with an empty stack every time. Any other character, a command that finds too few
numbers on the stack, and an input line that is no number end the interpreter with exit code 1.
"""

import sys

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
LARGEST = 10**1000  # Python refuses to print numbers of more than 4300 digits


def run(program: str, number: int) -> list[int]:
    """What `program` prints for the input `number`. Raises `ValueError` with what is wrong."""
    stack: list[int] = []
    printed: list[int] = []

    def pop() -> int:
        if not stack:
            raise ValueError(f"command {place} ('{command}') finds too few numbers on the stack")
        return stack.pop()

    for place, command in enumerate(program, 1):
        if command in "0123456789":
            stack.append(int(command))
        elif command == "x":
            stack.append(number)
        elif command in OPERATIONS:
            b, a = pop(), pop()
            stack.append(OPERATIONS[command](a, b))
            if abs(stack[-1]) > LARGEST:
                raise ValueError(f"command {place} ('{command}') makes a number above 10**1000")
        elif command == ".":
            printed.append(pop())
        elif not command.isspace():
            raise ValueError(f"character {place} ({command!r}) is no command")
    return printed


def main(path: str) -> int:
    """Run the program in the file `path` on every line of standard input; the exit code."""
    try:
        with open(path, encoding="utf-8") as file:  # pathlib would double the time to start
            program = file.read()
        for line in sys.stdin:
            for number in run(program, int(line)):
                print(number)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
