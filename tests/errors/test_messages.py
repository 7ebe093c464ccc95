"""Every error that has a code of its own, with the template of its message, in one file: messages.txt.

`make messages` writes the file again. A message is changed by changing it in the source and writing the file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "medcil"
SNAPSHOT = Path(__file__).with_name("messages.txt")
CODE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){1,3}")


def errors() -> Iterator[tuple[str, str, str]]:
    """(code, class, message) of every call that creates an error with a code, read from the source."""
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            codes = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if codes and isinstance(codes[0], ast.Constant) and isinstance(codes[0].value, str):
                yield codes[0].value, ast.unparse(call.func), _template(call.args[0])


def _template(message: ast.expr) -> str:
    """The text with its values in braces; a computed text is shown as its expression."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else ast.literal_eval(part)
            for part in message.values
        )
    return f"{{{ast.unparse(message)}}}"


def snapshot() -> str:
    lines = {f"{code}  {kind}  {' '.join(text.split())}" for code, kind, text in errors()}
    return "\n".join(sorted(lines)) + "\n"


def test_the_messages_are_those_of_the_snapshot() -> None:
    assert SNAPSHOT.read_text(encoding="utf-8") == snapshot(), (
        "run `make messages` and look at the difference"
    )


def test_codes_are_dotted_words_and_belong_to_one_class_each() -> None:
    classes: dict[str, set[str]] = {}
    for code, kind, _ in errors():
        assert CODE.fullmatch(code), code
        classes.setdefault(code, set()).add(kind)
    assert {code: kinds for code, kinds in classes.items() if len(kinds) > 1} == {}


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
    sys.stdout.write(f"{SNAPSHOT}\n")
