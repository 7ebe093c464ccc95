"""What every reader of an owner's layout needs: opening it, finding its lists, matching them with files."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from medcil.data.image_table import Files, ImageTable
from medcil.data.sources.archive import open_files
from medcil.data.sources.tables import csv_rows
from medcil.errors import InvalidInput, listed_below, printable


class UnsoundData(InvalidInput):
    """Lists that can be read, of data that cannot be trained on: a check reports all that is wrong."""

    def __init__(self, message: str, table: ImageTable) -> None:
        super().__init__(message)
        self.table = table
        """As the lists have it, with the images that are not there."""


def give(needed: str, page: str) -> str:
    """A sentence that leads from missing data to the data."""
    return f"Give the folder or archive that holds {needed}. Owner's page: {page}."


def open_root(root: Path | None, title: str, needed: str, page: str) -> Files:
    if root is None or not root.exists():
        problem = "is not given" if root is None else f"is not at {root}"
        raise InvalidInput(f"data.root: {title} {problem}. {give(needed, page)}")
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


def complete(table: ImageTable, needed: str) -> ImageTable:
    """The table itself, unless images that it lists are not there."""
    names = table.files.names()
    there = set(names)
    absent = [name for name in table.names if name not in there]
    if not absent:
        return table
    problem = f"data.root lacks {len(absent):,} listed images, e.g. {printable(absent[0])}. "
    raise UnsoundData(listed_below(f"{problem}{unpack_first(names)}{needed}", absent), table)
