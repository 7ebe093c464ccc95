"""A manifest: a table, CSV or parquet, with a row for each image. What other columns say of
an image is kept, and has no part in training.

Rows are counted as a spreadsheet counts them: the header is row 1.
"""

import math
import posixpath
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from medcil.data.sources.tables import csv_rows, open_parquet
from medcil.errors import InvalidInput, printable

TABLES = (".csv", ".parquet")
PART = re.compile("(train|test)(?:ing)?|(val)(?:id|idation)?", re.IGNORECASE)
PATIENT = ("patient", "patient_id", "group", "lesion", "lesion_id")  # the first of them that a manifest has
KNOWN = {name.replace("_", ""): name for name in ("path", "label", "split", *PATIENT)}


class Row(NamedTuple):
    number: int
    path: str
    """Below the manifest's folder, with forward slashes."""
    label: str
    part: str
    """train, test or val; empty where the manifest has no split."""
    patient: str
    further: tuple[tuple[str, str], ...]
    """What the other columns say."""


def is_manifest(content: bytes, name: str) -> bool:
    """Whether a table has the columns of a manifest; many folders hold others too."""
    if name.lower().endswith(".csv"):  # of another encoding too: reading it says what is wrong
        content = content.partition(b"\n")[0].decode("utf-8", "replace").encode()
    try:
        return {"path", "label"} <= set(_columns(_numbered(content, name)))
    except InvalidInput:
        return False


def read_manifest(content: bytes, name: str, root: Path) -> list[Row]:
    numbered = _numbered(content, name)
    columns = _columns(numbered)
    for column in ("path", "label"):
        if column not in columns:
            found = printable(", ".join(columns)) or "none"
            raise InvalidInput(f"data.root: {root} has no column {column} (found: {found}): add it.")
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise InvalidInput(f"data.root: {root} has two columns {twice[0]!r}: rename or remove one.")
    rows = []
    for number, cells in numbered:
        try:
            rows.append(_row(number, cells, columns))
        except ValueError as problem:
            raise InvalidInput(f"data.root: row {number} of {root} {problem}.") from None
    if not rows:
        raise InvalidInput(f"data.root: {root} lists no images: add a row for each.")
    return rows


def part_of(word: str) -> str:
    """`train`, `test` or `val`; empty where the word is none of them."""
    match = PART.fullmatch(word)
    return (match[1] or match[2]).lower() if match else ""


def _row(number: int, row: Sequence[str], columns: Sequence[str]) -> Row:
    if len(row) != len(columns):
        raise ValueError(f"has {len(row)} fields, the header {len(columns)}: quote text with separators")
    cells = {column: cell.strip() for column, cell in zip(columns, row, strict=True)}
    for column in ("path", "label"):
        if not cells[column]:
            raise ValueError(f"has no {column}: fill it in")
        if any(unicodedata.category(letter) == "Cc" for letter in cells[column]):
            raise ValueError(
                f"has control characters in its {column} ({printable(cells[column])}): remove them"
            )
    path = posixpath.normpath(cells["path"].replace("\\", "/"))
    if path.startswith("/") or re.match("[A-Za-z]:", path):
        raise ValueError(
            f"has an absolute path ({printable(cells['path'])}): write it relative to the manifest's folder, "
            "below which the images belong"
        )
    if path.startswith("../") or path in ("..", "."):
        raise ValueError(
            f"leads out of the manifest's folder ({printable(cells['path'])}): put the images below it"
        )
    if "split" in cells and not part_of(cells["split"]):
        raise ValueError(f"has the split {cells['split']!r}: write train, test or val")
    patient = next((cells[column] for column in PATIENT if column in cells), "")
    further = tuple((name, cell) for name, cell in cells.items() if name and name not in KNOWN.values())
    return Row(number, path, cells["label"], part_of(cells.get("split", "")), patient, further)


def _columns(numbered: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Takes the header off the rows."""
    return [_known_as(name.strip().casefold()) for name in next(numbered, (1, []))[1]]


def _known_as(name: str) -> str:
    """`Patient ID`, `PatientID` and `patient-id` are `patient_id`; other columns keep their names."""
    return KNOWN.get(re.sub(r"[\W_]", "", name), name)


def _numbered(content: bytes, name: str) -> Iterator[tuple[int, list[str]]]:
    """The header, then every row that is not blank."""
    rows = _parquet_rows(content, name) if name.lower().endswith(".parquet") else csv_rows(content, name)
    return ((number, row) for number, row in enumerate(rows, start=1) if any(cell.strip() for cell in row))


def _parquet_rows(content: bytes, name: str) -> Iterator[list[str]]:
    file, arrow_error = open_parquet(content, name)
    try:
        yield list(file.schema_arrow.names)
        for batch in file.iter_batches():
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield [_cell(value) for value in row]
    except (arrow_error, OSError) as error:
        raise InvalidInput(
            f"data.root: {name} cannot be read as parquet ({error}): write it again."
        ) from None


def _cell(value: object) -> str:
    """What is missing is empty, in either of the ways in which tables are written."""
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if is_missing else str(value)
