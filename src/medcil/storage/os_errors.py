"""Translate the operating system's refusals into errors that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medcil.errors import InvalidInput, MedcilError
from medcil.storage.atomic import TEMPORARY

RECIPE_KEY = "data.root: "
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's quota is used up, or the file is larger than the file system allows."""


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
