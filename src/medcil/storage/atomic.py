"""Write files atomically and durably, read them with checks, and translate OSError into messages for users.

A file is written under a temporary name in its own folder, flushed to the disk and renamed; then the folder
is flushed. After a crash at any moment a file has its old content or its new content, never a part.
"""

import csv
import errno
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput, MedcilError, RunLocked

TEMPORARY = ".tmp"
FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the wide forms of East Asian keyboards."""
RECIPE_KEY = "data.root: "
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's quota is used up, or the file is larger than the file system allows."""
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
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            held = lock.acquire()
    except Timeout:
        raise RunLocked(
            f"Another process is working in {folder}. Wait for it to end.", code="folder.locked"
        ) from None
    with held:
        yield


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report a path that cannot be read; without the recipe's key, since no recipe named the path."""
    try:
        yield
    except InvalidInput as error:
        if not str(error).startswith(RECIPE_KEY):
            raise
        raise InvalidInput(str(error).removeprefix(RECIPE_KEY), code=error.code) from None
    except PermissionError as error:
        raise InvalidInput(
            f"Cannot read {error.filename or path}: permission denied. Check its permissions.",
            code="input.unreadable",
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a path that cannot be written; files are replaced only when they are complete."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise MedcilError(
                f"No space left to write {path}. Free some and run the same command again. "
                "Existing files are unchanged.",
                code="output.no_space",
            ) from None
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise unwritable(_final_path(error, path)) from None
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise not_a_folder(path) from None
        raise


def unwritable(path: Path) -> InvalidInput:
    return InvalidInput(
        f"Cannot write to {path}: permission denied. Check its permissions, or choose another place.",
        code="output.unwritable",
    )


def not_a_folder(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is not a folder. Choose another place.", code="output.not_a_folder")


def _final_path(error: OSError, path: Path) -> Path:
    """Name the folder instead of a temporary file, which users do not know."""
    named = path if error.filename is None else Path(error.filename)
    return named.parent if named.name.endswith(TEMPORARY) else named
