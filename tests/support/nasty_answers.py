"""Answers made to hold up, confuse or break a verifier of mathematics, each with its verdict."""

from __future__ import annotations

NINES = "9" * 200

NASTY: dict[str, tuple[str, str, bool]] = {
    # size
    "a million digits in a box": ("5", "\\boxed{" + "5" * 10**6 + "}", False),
    "a million characters, then right": ("5", "x " * 500_000 + "#### 5", True),
    "a million dollars": ("5", "$" * 10**6, False),
    "a million backslashes": ("5", "\\" * 10**6, False),
    "a million minus signs": ("5", "\\boxed{" + "-" * 10**6 + "5}", False),
    "100,000 boxes": ("5", "\\boxed{4}" * 100_000 + "\\boxed{5}", True),
    "100,000 hashes": ("5", "####" * 100_000 + " 5", True),
    "many formulas": ("5", "$x$ " * 20_000 + "The answer is $5$.", True),
    # nesting
    "braces 100,000 deep": ("5", "\\boxed{" + "{" * 10**5 + "5" + "}" * 10**5 + "}", False),
    "parentheses 300 deep": ("5", "\\boxed{" + "(" * 300 + "5" + ")" * 300 + "}", True),
    "fractions 50 deep": ("5", "\\boxed{" + "\\frac{1}{" * 50 + "x" + "}" * 50 + "}", False),
    "left and right": ("5", "\\boxed{" + "\\left(" * 200 + "x" + "\\right)" * 200 + "}", False),
    "unclosed box": ("5", "The answer is \\boxed{5", False),
    "unclosed box after a right one": ("5", "\\boxed{5} and \\boxed{5", False),
    "brackets that cross": ("5", "\\boxed{([5)]}", False),
    # numbers without end
    "tower in braces": ("5", "\\boxed{9^{9^{9^{9}}}}", False),
    "huge exponent of e": ("5", "#### 1e999999999", False),
    "a long sum": ("5", "\\boxed{" + "+".join(["x_{1}"] * 150) + "}", False),
    "an integral in prose": ("5", "So it is $\\int_0^{\\infty} e^{-x^2} \\sin(x^3) dx$.", False),
    "a sum over a million": ("5", "\\boxed{\\sum_{k=1}^{1000000} k^{1000}}", False),
    "roundings of towers": ("5", "\\boxed{9^{9^{9^9}} \\approx 3}", False),
    "roundings without end": ("5", "\\boxed{" + " \\approx ".join(["x"] * 90) + "}", False),
    "a ratio of 400 parts": ("1:2", "\\boxed{" + ":".join("1" * 400) + "}", False),
    "a fraction over over over": ("5", "\\boxed{" + "{a\\over " * 100 + "}", False),
    "dollars before numbers": ("7", "$5 " * 300_000, False),
    "a prime power": ("5", f"\\boxed{{{NINES}^{{9999}}}}", False),
    # no number
    "division by zero": ("5", "\\boxed{1/0}", False),
    "empty box": ("5", "\\boxed{}", False),
    "nan is not nan": ("5", "#### nan", False),
    "infinity": ("5", "\\boxed{\\infty}", False),
    "zero to the zero": ("5", "\\boxed{0^{0^{-1}}}", False),
    "a control character": ("5", "\\boxed{5\x00}", False),
    "half a surrogate pair": ("5", "\ud800 \\boxed{5}", True),
    "nothing": ("5", "", False),
    # code
    "import": ("5", "\\boxed{__import__('os').system('kill -9 '+str(__import__('os').getpid()))}", False),
    "a class of classes": ("5", "\\boxed{().__class__.__bases__[0].__subclasses__()}", False),
    "sympy's own names": ("5", "\\boxed{Integer(5)+S('exit()')}", False),
    "input of TeX": ("5", "\\boxed{\\input{/etc/passwd}}", False),
    # forms that are read, right and wrong
    "percent": ("50", "\\boxed{50\\%}", True),
    "percent is no share": ("0.5", "\\boxed{50\\%}", False),
    "interval": ("[0, 5)", "\\boxed{[0,5)}", True),
    "interval of another end": ("[0, 5)", "\\boxed{[0,5]}", False),
    "set in another order": ("\\{1, 2, 3\\}", "\\boxed{\\{3, 1, 2\\}}", True),
    "matrix": (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}",
        True,
    ),
    "matrix transposed": (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\boxed{\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}}",
        False,
    ),
    "full-width digits": ("42", "\\boxed{\uff14\uff12}", True),
    "superscript digits": ("42", "\\boxed{\u2074\u00b2}", False),
    "a right-to-left mark": ("42", "\u202e\\boxed{42}", True),
    "negative zero": ("0", "\\boxed{-0}", True),
    "several answers": ("5", "\\boxed{5, 6}", False),
    "an inequality": ("5", "\\boxed{x < 5}", False),
    "a right answer and then no answer": ("5", "\\boxed{5} \\boxed{?}", False),
    "tags": ("5", "<think>\\boxed{6}</think><answer>5</answer>", True),
}  # fmt: skip
"""{what it is: (reference answer, response, whether the response is right)}"""
