"""Renders results of benchmarks as Markdown, a section each: what results/speed/README.md contains.

python benchmarks/show.py build/bench/*.json > speed.md
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from measuring import Row, markdown_table

ORDER = ("step", "terms", "whole_run", "together", "cpu", "growth", "streaming", "features", "update")


def section(result: Row) -> str:
    found = dict(result["machine"])
    date, commit = found.pop("date"), found.pop("commit")
    where = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    parts = [
        f"## {result['benchmark']}",
        result["about"],
        markdown_table(result["rows"]),
        *(f"Note: {note}." for note in result["notes"]),
        f"`{result['command']}`, {date}, commit {commit}; {where}.",
    ]
    return "\n\n".join(parts)


def place(result: Row) -> tuple[int, str]:
    name = result["benchmark"]
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    paths = parser.parse_args(arguments).results
    results = sorted((json.loads(path.read_text()) for path in paths), key=place)
    text = "\n\n".join(["# Speed", *(section(result) for result in results)])
    print(text)
    return text


if __name__ == "__main__":
    main()
