"""Methods stay short, and what several of them do is written down once, elsewhere."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import medcil

PACKAGE = Path(medcil.__file__).parent
METHODS = sorted((PACKAGE / "methods").glob("*.py"))
MOST_LINES = 120
SAYS_NOTHING = 25
"""Shorter lines, such as a closing bracket or `if increment.is_first:`, are alike by necessity."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> dict[int, str]:
    """By number, stripped: neither blank lines, comments nor docstrings."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            numbers |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers -= _lines_of(node)
    lines = source.splitlines()
    return {number: lines[number - 1].strip() for number in sorted(numbers)}


def telling_lines(source: str) -> dict[int, str]:
    """Those that could have been copied: no imports, no decorators, nothing short."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= _lines_of(node)
        for decorator in getattr(node, "decorator_list", []):
            left_out |= _lines_of(decorator)
    return {
        number: line
        for number, line in code_lines(source).items()
        if number not in left_out and len(line) >= SAYS_NOTHING
    }


def _lines_of(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def copies(texts: dict[str, str], others: dict[str, str]) -> Iterator[str]:
    """Each line of the texts that stands word for word in another file."""
    lines_of = {name: set(telling_lines(text).values()) for name, text in others.items()}
    for name, text in texts.items():
        for number, line in telling_lines(text).items():
            also_in = sorted(other for other, lines in lines_of.items() if other != name and line in lines)
            if also_in:
                yield f"{name}:{number}: {line}  (also in {', '.join(also_in)})"


def test_lines_are_counted_without_what_is_no_code():
    lines = ['"""Doc."""', "import os", "", "# comment", "def f(x):", '    """Doc', "", '    string."""']
    source = "\n".join([*lines, "    return (", "        x", "    )", ""])
    assert code_lines(source) == {2: "import os", 5: "def f(x):", 9: "return (", 10: "x", 11: ")"}


def test_a_copied_line_is_found():
    long = "value_of_something = function_of(something)"
    texts = {"a": f"import x\n{long}\nb = 1\n", "b": f"{long}  \nb = 1\n", "c": f"# {long}\n"}
    assert list(copies({"a": texts["a"]}, texts)) == [f"a:2: {long}  (also in b)"]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_is_at_most_120_lines_of_code(path):
    n_lines = len(code_lines(path.read_text(encoding="utf-8")))
    if path.stem == "presets":
        pytest.skip("settings as data, no code")
    assert n_lines <= MOST_LINES


def test_hardly_a_line_of_a_method_stands_in_another_file():
    everything = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.stem != "presets"
    }
    methods = {name: text for name, text in everything.items() if name.startswith("methods")}
    n_telling = sum(len(telling_lines(text)) for text in methods.values())
    found = list(copies(methods, everything))
    share = len(found) / n_telling
    assert share < 0.05, f"{share:.0%} of {n_telling} lines are copies:\n" + "\n".join(found)
