"""What the system refuses, said in a sentence with the way out. No torch."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medcil.errors import InvalidInput, MedcilError
from medcil.storage.atomic import TEMPORARY
from medcil.storage.overwrite_guard import Files, refuse_other_files, refuse_within_model

KEY = "data.root: "
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, one's share of it, or what a file may be at most."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Images are named as they were given, not as a recipe would name them."""
    try:
        yield
    except InvalidInput as error:
        if not str(error).startswith(KEY):
            raise
        raise InvalidInput(str(error).removeprefix(KEY)) from None
    except PermissionError as error:
        raise InvalidInput(f"{error.filename or path} may not be read; ask for permission to.") from None


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What was there before is as it was."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise MedcilError(
                f"There is no space left for {place}: free some and run the same command again. "
                "What was there before is as it was."
            ) from None
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise _unwritable(_named(error, place)) from None
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise InvalidInput(f"{place} is not a folder; give another one.") from None
        raise


def check_place(folder: Path, files: Files) -> None:
    """Before any work: these files may be written into the folder, and take the place of such files only."""
    refuse_within_model(folder)
    with writing(folder):
        refuse_other_files(files)
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Said before the work, not after it; a folder that is not there yet is made in the one above it."""
    with writing(folder):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder; give another one.")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise _unwritable(folder)


def _named(error: OSError, place: Path) -> Path:
    """Nobody knows the name that a file has until it is whole."""
    named = place if error.filename is None else Path(error.filename)
    return named.parent if named.name.endswith(TEMPORARY) else named


def _unwritable(place: Path) -> InvalidInput:
    return InvalidInput(f"{place} may not be written to: ask for permission, or give another one.")
