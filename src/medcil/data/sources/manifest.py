"""Lists of images: manifests, and the lists of published datasets; CSV or parquet."""

import csv
import importlib
import io
import math
import posixpath
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from medcil.data.image_table import Dataset, Files, ImageTable, Preprocess
from medcil.data.sources.archive import open_files
from medcil.errors import InvalidInput, listed_below, needs_extra, printable

TABLES = (".csv", ".parquet")
PART = re.compile("(train|test)(?:ing)?|(val)(?:id|idation)?", re.IGNORECASE)
PATIENT = ("patient", "patient_id", "group", "lesion", "lesion_id")  # the first of them that a manifest has
KNOWN = {name.replace("_", ""): name for name in ("path", "label", "split", *PATIENT)}


def csv_rows(content: bytes, name: str) -> Iterator[list[str]]:
    """Read every row, the header first."""
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


@contextmanager
def open_parquet(content: bytes, name: str) -> Iterator[Any]:
    """Open a parquet file; an error of reading it, here or in the block, names it."""
    with needs_extra("parquet"):
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        yield parquet.ParquetFile(arrow.BufferReader(content))
    except (arrow.ArrowException, OSError) as error:
        raise InvalidInput(f"data.root: {name} cannot be read as parquet ({error}).") from None


class Row(NamedTuple):
    """An image in a list."""

    path: str
    """Below the list's folder, with forward slashes."""
    label: str
    part: str = ""
    """train, test or val; empty where there is no split."""
    patient: str = ""
    further: Mapping[str, str] = {}
    """What the other columns say."""


def is_manifest(content: bytes, name: str) -> bool:
    """Tell whether a table has the columns of a manifest; many folders hold others too."""
    if name.lower().endswith(".csv"):  # of another encoding too: reading it says what is wrong
        content = content.partition(b"\n")[0].decode("utf-8", "replace").encode()
    try:
        return {"path", "label"} <= set(_columns(_numbered(content, name)))
    except InvalidInput:
        return False


def read_manifest(content: bytes, name: str, root: Path) -> list[tuple[int, Row]]:
    """Return the rows with their numbers, as a spreadsheet counts them: the header is row 1."""
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
            rows.append((number, _row(cells, columns)))
        except ValueError as problem:
            raise InvalidInput(f"data.root: row {number} of {root} {problem}.") from None
    if not rows:
        raise InvalidInput(f"data.root: {root} lists no images: add a row for each.")
    return rows


def part_of(word: str) -> str:
    """Return `train`, `test` or `val`; empty where the word is none of them."""
    match = PART.fullmatch(word)
    return (match[1] or match[2]).lower() if match else ""


def _row(row: Sequence[str], columns: Sequence[str]) -> Row:
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
    path, written = posixpath.normpath(cells["path"].replace("\\", "/")), printable(cells["path"])
    if path.startswith("/") or re.match("[A-Za-z]:", path):
        raise ValueError(f"has an absolute path ({written}): write it relative to the manifest's folder")
    if path.startswith("../") or path in ("..", "."):
        raise ValueError(f"leads out of the manifest's folder ({written}): put the images below it")
    if "split" in cells and not part_of(cells["split"]):
        raise ValueError(f"has the split {cells['split']!r}: write train, test or val")
    patient = next((cells[column] for column in PATIENT if column in cells), "")
    further = {name: cell for name, cell in cells.items() if name and name not in KNOWN.values()}
    return Row(path, cells["label"], part_of(cells.get("split", "")), patient, further)


def _columns(numbered: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Take the header off the rows."""
    return [_known_as(name.strip().casefold()) for name in next(numbered, (1, []))[1]]


def _known_as(name: str) -> str:
    """Return `patient_id` for `Patient ID`, `PatientID` and `patient-id`; other columns keep their names."""
    return KNOWN.get(re.sub(r"[\W_]", "", name), name)


def _numbered(content: bytes, name: str) -> Iterator[tuple[int, list[str]]]:
    """Return the header, then every row that is not blank, with their numbers."""
    rows = _parquet_rows(content, name) if name.lower().endswith(".parquet") else csv_rows(content, name)
    return ((number, row) for number, row in enumerate(rows, start=1) if any(cell.strip() for cell in row))


def _parquet_rows(content: bytes, name: str) -> Iterator[list[str]]:
    with open_parquet(content, name) as file:
        yield list(file.schema_arrow.names)
        for batch in file.iter_batches():
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield [_cell(value) for value in row]


def _cell(value: object) -> str:
    """Return the text of a value; empty for either of the ways in which tables mark a missing one."""
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
    """Return a sentence for a folder in which images are still packed; empty where none are."""
    packed = [PurePosixPath(name).name for name in names if name.lower().endswith(".zip")]
    if not packed:
        return ""
    several = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
    return f"Unpack {packed[0]}{several} first: archives inside the folder are not read. "


def find_file(names: Sequence[str], *wanted: str) -> str | None:
    """Find the first of these names that some folder holds; of several folders, in the uppermost."""
    for name in wanted:
        found = [candidate for candidate in names if candidate == name or candidate.endswith(f"/{name}")]
        if found:
            return min(found, key=lambda candidate: (candidate.count("/"), candidate))
    return None


def split_rows(
    files: Files, pairs: Sequence[tuple[str, str]], columns: Sequence[str]
) -> list[tuple[str, dict[str, str]]] | None:
    """Read a training and a test list: `train` or `test`, and a row. None where no pair of lists has a file.

    One list alone is an error: whether it is the whole split cannot be known.
    """
    names = files.names()
    found = {name: find_file(names, name) for pair in pairs for name in pair}
    for pair in pairs:
        lists = [found[name] for name in pair]
        if None not in lists:
            parts = zip(("train", "test"), lists, strict=True)
            return [(part, row) for part, name in parts if name for row in read_rows(files, name, columns)]
    for pair in pairs:
        present, absent = ([n for n in pair if (found[n] is not None) is there] for there in (True, False))
        if present:
            raise InvalidInput(f"data.root has {present[0]}, but no {absent[0]}: give both, or neither.")
    return None


def has_columns(files: Files, name: str, columns: Sequence[str]) -> bool:
    try:
        header = next(csv_rows(files.read(name), name), [])
    except InvalidInput:
        return False
    return set(columns) <= {column.strip() for column in header}


def read_rows(
    files: Files, name: str, columns: Sequence[str], *, optional: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Read the rows of a table with a header; a cell that is not there is empty."""
    header, *rows = [row for row in csv_rows(files.read(name), name) if row] or [[]]
    places = {column.strip(): place for place, column in enumerate(header)}
    if not rows or not set(columns) <= set(places):
        raise InvalidInput(f"data.root: {name} has not the columns {', '.join(columns)}, or no rows.")
    columns = [column for column in (*columns, *optional) if column in places]
    return [
        {column: "".join(row[(place := places[column]) : place + 1]).strip() for column in columns}
        for row in rows
    ]


def dataset_table(
    dataset: Dataset,
    files: Files,
    rows: Sequence[Row],
    images: Mapping[str, str],
    preprocess: Preprocess | None = None,
) -> ImageTable:
    """List images in the order of the rows. `images` maps the paths in the rows to files.

    UnsoundData where listed images are absent; in its table they keep the names in the list.
    """
    label_of = {name: label for label, name in enumerate(dataset.class_names)}
    patients = [row.patient for row in rows]
    is_test = np.array([row.part == "test" for row in rows])
    table = ImageTable(
        files,
        tuple(images.get(row.path, row.path) for row in rows),
        np.array([label_of[row.label] for row in rows], dtype=np.int64),
        dataset.class_names,
        groups=tuple(patients) if any(patients) else None,
        is_test=is_test if is_test.any() else None,
        preprocess=preprocess,
        columns={name: tuple(row.further[name] for row in rows) for name in rows[0].further},
    )
    absent = [row.path for row in rows if row.path not in images]
    if not absent:
        return table
    problem = f"data.root lacks {len(absent):,} listed images, e.g. {printable(absent[0])}. "
    raise UnsoundData(listed_below(f"{problem}{unpack_first(files.names())}{dataset.hint}", absent), table)
