"""Write files atomically and durably; read them with checks.

A file is written under a temporary name in its own folder, flushed to the disk and renamed; then the folder
is flushed. After a crash at any moment a file has its old content or its new content, never a part.
"""

import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput, RunLocked

TEMPORARY = ".tmp"
FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the wide forms of East Asian keyboards."""
UMASK = os.umask(0o077)
"""Read once at import: reading it changes it for a moment, for all threads."""
os.umask(UMASK)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically and durably; create its folders."""
    if path.exists() and not path.is_file():  # renaming over a device would delete it
        raise InvalidInput(f"Not a regular file: {path}. Give another name.", code="output.file.not_regular")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; no cell can become a formula when a spreadsheet opens the file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_no_formula(cell) for cell in row] for row in (header, *rows))
    write_bytes(path, text.getvalue().encode())


def _no_formula(cell: object) -> object:
    """Put an apostrophe before text that a spreadsheet would compute; leave numbers alone."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError):
        raise DamagedFile(
            f"{path} is not readable as JSON. Restore it from a backup.", code="file.json.damaged"
        ) from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_verified(path: Path, expected: str) -> bytes:
    """Read a file and compare its sha256 with the one in its manifest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFile(
            f"{path} is missing, but its manifest lists it. Restore it.", code="file.listed.missing"
        ) from None
    if sha256(content) != expected:
        raise DamagedFile(
            f"{path} was changed or damaged: its sha256 is not that of its manifest. Restore it.",
            code="file.listed.damaged",
        )
    return content


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the operating system releases the lock when this one ends."""
    from filelock import FileLock, Timeout  # not above: `predict` from ONNX starts without it

    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunLocked(
            f"Another process is working in {folder}. Wait for it, or give another --out.",
            code="output.folder.locked",
        ) from None
    except OSError as error:
        raise InvalidInput(
            f"Cannot write to {folder}: {error.strerror}. Give another --out.",
            code="output.folder.unwritable",
        ) from None
    try:
        yield
    finally:
        lock.release()
