"""Methods stay short, and what several of them do is written down once, elsewhere."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import medcil

PACKAGE = Path(medcil.__file__).parent
SHARED = {"presets", "protocol", "terms", "memory", "outline"}
"""What all methods share, and settings as data."""
METHODS = sorted(path for path in (PACKAGE / "methods").glob("*.py") if path.stem not in SHARED)
MOST_LINES = 120
RUN = 6
"""Lines one after the other that make a copy; fewer are the vocabulary that methods share."""
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


def _lines_of(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def runs(source: str) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    """Every six code lines that follow each other, with their numbers."""
    lines = list(code_lines(source).items())
    for start in range(len(lines) - RUN + 1):
        numbers, texts = zip(*lines[start : start + RUN], strict=True)
        yield list(numbers), texts


def copies(texts: dict[str, str], others: dict[str, str]) -> Iterator[str]:
    """Each line of the texts that lies in a run of six standing word for word in another file."""
    runs_of = {name: {run for _, run in runs(text)} for name, text in others.items()}
    for name, text in texts.items():
        copied = {
            number
            for numbers, run in runs(text)
            if any(run in found for other, found in runs_of.items() if other != name)
            for number in numbers
        }
        yield from (f"{name}:{number}: {code_lines(text)[number]}" for number in sorted(copied))


def test_lines_are_counted_without_what_is_no_code():
    lines = ['"""Doc."""', "import os", "", "# comment", "def f(x):", '    """Doc', "", '    string."""']
    source = "\n".join([*lines, "    return (", "        x", "    )", ""])
    assert code_lines(source) == {2: "import os", 5: "def f(x):", 9: "return (", 10: "x", 11: ")"}


def test_a_copied_run_is_found():
    copied = [f"value_{i} = function({i})" for i in range(6)]
    texts = {
        "a": "\n".join(["own = 1", *copied, "own = 2"]),
        "b": "\n".join(["if other:", *(f"    {line}  # indented" for line in copied[:3]), "", *copied[3:]]),
        "c": "\n".join(copied[:5]),
    }
    texts["b"] = texts["b"].replace("  # indented", "")
    assert list(copies({"a": texts["a"]}, texts)) == [f"a:{i + 2}: {line}" for i, line in enumerate(copied)]
    assert list(copies({"c": texts["c"]}, texts)) == []


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_is_at_most_120_lines_of_code(path):
    assert len(code_lines(path.read_text(encoding="utf-8"))) <= MOST_LINES


def test_hardly_a_line_of_a_method_stands_in_another_file():
    everything = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.stem not in SHARED
    }
    methods = {name: text for name, text in everything.items() if name.startswith("methods")}
    n_lines = sum(len(code_lines(text)) for text in methods.values())
    found = list(copies(methods, everything))
    share = len(found) / n_lines
    assert share < 0.05, f"{share:.0%} of {n_lines} lines are copies:\n" + "\n".join(found)
