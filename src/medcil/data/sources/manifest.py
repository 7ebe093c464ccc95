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
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from medcil.data.image_table import Dataset, Files, ImageTable, Preprocess
from medcil.data.sources.archive import open_files
from medcil.errors import InvalidInput, listed_below, needs_extra, printable

TABLES = (".csv", ".parquet")
PART = re.compile("(train|test)(?:ing)?|(val)(?:id|idation)?", re.IGNORECASE)
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "image": (
        *("path", "file", "filename", "filepath", "image", "imageid", "imagename", "imagepath", "imagefile"),
        *("img", "imgid", "imgname", "imgpath", "idcode"),
    ),
    "class": ("label", "labelname", "class", "classname", "diagnosis", "dx", "target", "category"),
    "patient": ("patient", "patientid", "subject", "subjectid", "group", "lesion", "lesionid"),
    "split": ("split", "set", "subset", "partition"),
}
"""Names of a manifest's columns by what they say, in lower case, of letters and digits alone.

The first name counts before all others; of a patient's, each counts before those that follow.
"""


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


@dataclass(frozen=True)
class Columns:
    """The columns of a manifest, and which of them says what."""

    names: tuple[str, ...]
    """As they are written."""
    places: Mapping[str, tuple[int, ...]]
    """Of the columns that may be the image, the class, the patient, the split; one at most, once checked."""

    @classmethod
    def of(cls, header: Sequence[str]) -> "Columns":
        names = tuple(name.strip() for name in header)
        plain = [re.sub(r"[\W_]", "", name.casefold()) for name in names]
        places = {}
        for role, known in COLUMNS.items():
            first = next((name for name in known if name in plain), None)
            wanted = (first,) if role == "patient" or first == known[0] else known
            places[role] = tuple(place for place, name in enumerate(plain) if name in wanted)
        return cls(names, places)

    @property
    def are_a_manifest(self) -> bool:
        return bool(self.places["image"] and self.places["class"])

    def checked(self, root: Path) -> "Columns":
        """Refuse columns that are absent or cannot be told apart."""
        for role, (name, *_) in COLUMNS.items():
            places = self.places[role]
            if not places and role in ("image", "class"):
                found = printable(", ".join(self.names)) or "none"
                raise InvalidInput(
                    f"data.root: {root} has no column of the {role} (found: {found}). Call it {name}.",
                    code="data.manifest.column.missing",
                )
            if len(places) > 1:
                several = printable(" and ".join(repr(self.names[place]) for place in places))
                raise InvalidInput(
                    f"data.root: {root} has {len(places)} columns of the {role}, {several}. Call one {name}.",
                    code="data.manifest.column.ambiguous",
                )
        others = [name for name, _ in self.further]
        if twice := sorted({name for name in others if others.count(name) > 1}):
            raise InvalidInput(f"data.root: {root} has two columns {twice[0]!r}: rename or remove one.")
        return self

    @cached_property
    def further(self) -> list[tuple[str, int]]:
        """Names and places of the other columns, without those that may name a patient."""
        known = {place for places in self.places.values() for place in places}
        return [
            (name.casefold(), place)
            for place, name in enumerate(self.names)
            if name and place not in known and re.sub(r"[\W_]", "", name.casefold()) not in COLUMNS["patient"]
        ]

    def __str__(self) -> str:
        shown = (f"{role} ← {self.names[places[0]]}" for role, places in self.places.items() if places)
        return f"columns: {printable(', '.join(shown))}"


def header_of(content: bytes, name: str) -> Columns:
    """Read the columns of any table; none where it cannot be read."""
    if name.lower().endswith(".csv"):  # of another encoding too: reading it says what is wrong
        content = content.partition(b"\n")[0].decode("utf-8", "replace").encode()
    try:
        return Columns.of(next(_numbered(content, name), (1, []))[1])
    except InvalidInput:
        return Columns.of(())


def read_manifest(content: bytes, name: str, root: Path) -> tuple[Columns, list[tuple[int, Row]]]:
    """Return the columns and the rows, numbered as a spreadsheet counts them: the header is row 1."""
    numbered = _numbered(content, name)
    columns = Columns.of(next(numbered, (1, []))[1]).checked(root)
    listed = list(numbered)
    columns = _with_parts(columns, [row for _, row in listed])
    rows = []
    for number, row in listed:
        try:
            rows.append((number, _row(row, columns)))
        except ValueError as problem:
            raise InvalidInput(f"data.root: row {number} of {root} {problem}.") from None
    if not rows:
        raise InvalidInput(f"data.root: {root} lists no images: add a row for each.")
    return columns, rows


def _with_parts(columns: Columns, rows: Sequence[Sequence[str]]) -> Columns:
    """Take `set` and its like for the split only where a cell names a part of one."""
    for place in columns.places["split"]:
        is_plain = columns.names[place].casefold() != COLUMNS["split"][0]
        if is_plain and not any(part_of(row[place].strip()) for row in rows if place < len(row)):
            return replace(columns, places={**columns.places, "split": ()})
    return columns


def part_of(word: str) -> str:
    """Return `train`, `test` or `val`; empty where the word is none of them."""
    match = PART.fullmatch(word)
    return (match[1] or match[2]).lower() if match else ""


def _row(row: Sequence[str], columns: Columns) -> Row:
    if len(row) != len(columns.names):
        raise ValueError(
            f"has {len(row)} fields, the header {len(columns.names)}: quote text with separators"
        )
    said: dict[str, str] = {}
    for role, places in columns.places.items():
        said[role] = row[places[0]].strip() if places else ""
    for role in ("image", "class"):
        name = columns.names[columns.places[role][0]]
        if not said[role]:
            raise ValueError(f"has no {printable(name)}: fill it in")
        if any(unicodedata.category(letter) == "Cc" for letter in said[role]):
            raise ValueError(
                f"has control characters in its {printable(name)} ({printable(said[role])}): remove them"
            )
    path, written = posixpath.normpath(said["image"].replace("\\", "/")), printable(said["image"])
    if path.startswith("/") or re.match("[A-Za-z]:", path):
        raise ValueError(f"has an absolute path ({written}): write it relative to the manifest's folder")
    if path.startswith("../") or path in ("..", "."):
        raise ValueError(f"leads out of the manifest's folder ({written}): put the images below it")
    if columns.places["split"] and not part_of(said["split"]):
        raise ValueError(f"has the split {said['split']!r}: write train, test or val")
    further = {name: row[place].strip() for name, place in columns.further}
    return Row(path, said["class"], part_of(said["split"]), said["patient"], further)


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
