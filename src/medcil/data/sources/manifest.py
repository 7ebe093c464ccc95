"""A manifest: a table, CSV or parquet, with a row for each image. What other columns say of
an image is kept, and has no part in training.

Rows are counted as a spreadsheet counts them: the header is row 1.
"""

import csv
import importlib
import io
import math
import posixpath
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from medcil.data.image_table import Dataset, Files, ImageTable
from medcil.data.sources.archive import open_files
from medcil.errors import InvalidInput, listed_below, printable

TABLES = (".csv", ".parquet")
PART = re.compile("(train|test)(?:ing)?|(val)(?:id|idation)?", re.IGNORECASE)
PATIENT = ("patient", "patient_id", "group", "lesion", "lesion_id")  # the first of them that a manifest has
KNOWN = {name.replace("_", ""): name for name in ("path", "label", "split", *PATIENT)}


def csv_rows(content: bytes, name: str) -> Iterator[list[str]]:
    """Every row, the header first."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidInput(f"data.root: {name} is not UTF-8 text: save it as CSV in UTF-8.") from None
    header = next(iter(text.splitlines()), "")
    separator = max(",;\t", key=header.count)
    try:
        yield from csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    except csv.Error as error:
        raise InvalidInput(f"data.root: {name} cannot be read as CSV ({error}): fix its quotes.") from None


def open_parquet(content: bytes, name: str) -> tuple[Any, type[Exception]]:
    """The opened file, and the error that reading it may raise beside OSError."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidInput(
            f"data.root: {name} is a parquet table: install pyarrow to read it (pip install pyarrow)."
        ) from None
    try:
        return parquet.ParquetFile(arrow.BufferReader(content)), arrow.ArrowException
    except (arrow.ArrowException, OSError) as error:
        raise InvalidInput(
            f"data.root: {name} cannot be read as parquet ({error}): write it again."
        ) from None


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


class UnsoundData(InvalidInput):
    """Lists that can be read, of data that cannot be trained on: a check reports all that is wrong."""

    def __init__(self, message: str, table: ImageTable) -> None:
        super().__init__(message)
        self.table = table
        """As the lists have it, with the images that are not there."""


def open_root(root: Path | None, title: str, dataset: Dataset) -> Files:
    if root is None or not root.exists():
        problem = "is not given" if root is None else f"is not at {root}"
        raise InvalidInput(f"data.root: {title} {problem}. {dataset.hint}")
    return open_files(root)


def unpack_first(names: Sequence[str]) -> str:
    """A sentence for a folder in which the images themselves are still packed; empty where none is."""
    packed = [PurePosixPath(name).name for name in names if name.lower().endswith(".zip")]
    if not packed:
        return ""
    several = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
    return f"Unpack {packed[0]}{several} first: archives inside the folder are not read. "


def find_file(names: Sequence[str], *wanted: str) -> str | None:
    """The first of these names that some folder holds; of several folders, the uppermost."""
    for name in wanted:
        found = [candidate for candidate in names if candidate == name or candidate.endswith(f"/{name}")]
        if found:
            return min(found, key=lambda candidate: (candidate.count("/"), candidate))
    return None


def find_lists(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """A training and a test list. One alone is an error: whether it is the whole split cannot be known."""
    found = {name: find_file(names, name) for pair in pairs for name in pair}
    for train, test in pairs:
        train_list, test_list = found[train], found[test]
        if train_list is not None and test_list is not None:
            return train_list, test_list
    for pair in pairs:
        present, absent = ([n for n in pair if (found[n] is not None) is there] for there in (True, False))
        if present:
            raise InvalidInput(
                f"data.root has {present[0]}, but no {absent[0]}: put both lists there, or neither."
            )
    return None


def has_columns(files: Files, name: str, columns: Sequence[str]) -> bool:
    try:
        header = next(csv_rows(files.read(name), name), [])
    except InvalidInput:
        return False
    return set(columns) <= {column.strip() for column in header}


def read_rows(files: Files, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table with a header; a cell that is not there is empty."""
    header, *rows = [row for row in csv_rows(files.read(name), name) if row] or [[]]
    places = {column.strip(): place for place, column in enumerate(header)}
    if not rows or not set(columns) <= set(places):
        raise InvalidInput(
            f"data.root: {name} has not the columns {', '.join(columns)}, or no rows; replace it."
        )
    return [
        {column: "".join(row[(place := places[column]) : place + 1]).strip() for column in columns}
        for row in rows
    ]


def named_files(wanted: Sequence[str], found: Mapping[str, str]) -> tuple[str, ...]:
    """The files of listed images; one that is not there keeps the name in the list."""
    return tuple(found.get(name, name) for name in wanted)


def complete(table: ImageTable, dataset: Dataset) -> ImageTable:
    """The table itself, unless images that it lists are not there."""
    names = table.files.names()
    there = set(names)
    absent = [name for name in table.names if name not in there]
    if not absent:
        return table
    problem = f"data.root lacks {len(absent):,} listed images, e.g. {printable(absent[0])}. "
    raise UnsoundData(listed_below(f"{problem}{unpack_first(names)}{dataset.hint}", absent), table)
