"""Tables as people save them: CSV with commas, semicolons or tabs, and parquet."""

import csv
import importlib
import io
from collections.abc import Iterator
from typing import Any

from medcil.errors import InvalidInput


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
