"""The house stays small, and its prose plain."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "medcil"
FILES = sorted(SOURCE.rglob("*.py"))
WORDS_TO_AVOID = re.compile(
    r"\b(to be had|mend(s|ed|ing)?|lies?|lay|lain|laying|lying|stands?|stood|standing|heed(s|ed|ing)?"
    r"|bears?(?! beaver)|bore|borne|bearing|anew|who(m|se)?ever|of before|(what|that) (is|was) asked for"
    r"|ha(s|ve|d) no say)\b",
    re.IGNORECASE,
)
PROSE = ["src", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "results", "recipes"]
PROSE += ["examples", "benchmarks", "proofs"]


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return (line, text) of comments, docstrings and messages in Python; pages without their code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        if path.suffix == ".md":
            blank = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
            text = blank.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
        return list(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    strings = [
        (node.lineno + number, line)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for number, line in enumerate(node.value.splitlines())
    ]
    return [(number, line) for number, line in comments + strings if " " in line]


def test_no_folder_has_more_than_15_files():
    """Methods have one file each."""
    folders = Counter(path.parent.relative_to(SOURCE).as_posix() for path in FILES)
    assert {folder: n for folder, n in folders.items() if n > 15 and folder != "methods"} == {}


@pytest.mark.parametrize("where", PROSE)
def test_prose_has_none_of_the_words_to_avoid(where):
    root = ROOT / where
    kinds = {".py", ".md", ".html", ".js", ".css", ".j2", ".tex", ".yaml", ".sh"}
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in kinds)
    assert paths
    assert [
        f"{path.relative_to(ROOT).as_posix()}:{number}: {word.group()}"
        for path in paths
        for number, line in prose_of(path)
        for word in WORDS_TO_AVOID.finditer(line)
    ] == []
