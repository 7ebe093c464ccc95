"""Which images are meant: files, folders, archives and patterns become a list, in a fixed order."""

import glob
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from medcil.data.decoding.image import is_dicom, read_upright, resized_planes
from medcil.data.wording import printable
from medcil.errors import InvalidInput, nearest
from medcil.storage.os_errors import reading

if TYPE_CHECKING:
    from medcil.data.catalog import Files

IMAGES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".dcm", ".dicom", ".ima")
ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
LARGEST = 256 << 20
"""Bytes of a file that is read."""


@dataclass(frozen=True, eq=False)
class FoundImage:
    name: str
    """As it was asked for, and below that folder or archive."""
    read: Callable[[], bytes]

    def decode(self, side: int) -> UInt8[np.ndarray, "3 side side"]:
        content = self.read()
        if self.name.lower().endswith(IMAGES[-3:]) and not is_dicom(content):
            from medcil.data.decoding.dicom import (
                read_upright_dicom,  # which says what a DICOM file must have
            )

            return resized_planes(read_upright_dicom(content, printable(self.name)), side)
        return resized_planes(read_upright(content, side=side, name=printable(self.name)), side)


def find_images(wanted: Sequence[str | Path]) -> list[FoundImage]:
    """Everything that was asked for, in that order, folders by name; each image once.

    A file that is named is taken, whatever it is: what is wrong with it is said when it is read. In folders
    and archives only what is an image by its name, or DICOM by its content, is looked at.
    """
    found: dict[str, FoundImage] = {}
    for each in wanted:
        n_before = len(found)
        with reading(Path(each)):
            for image in _found(str(each)):
                found.setdefault(image.name, image)
        if len(found) == n_before and Path(each).is_dir():
            raise InvalidInput(
                f"{each} holds no images. Give a folder that does ({', '.join(IMAGES[:3])}, ... or DICOM)."
            )
    if not found:
        raise InvalidInput(
            "No images were named: give files, folders, archives or patterns such as 'new/*.png'."
        )
    return list(found.values())


def _found(wanted: str) -> Iterator[FoundImage]:
    path = Path(wanted)
    if path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield from _in_archive(path) if _is_archive(path) else [_of_file(path)]
    elif glob.has_magic(wanted):
        matches = sorted(glob.glob(wanted, recursive=True))
        if not matches:
            raise InvalidInput(f"No file matches {wanted!r}: mend the pattern.")
        for match in matches:
            yield from _found(match)
    else:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if 0 < len(beside) <= 1000 else ""
        raise InvalidInput(f"There is nothing at {wanted}: mend the path. {hint}".rstrip())


def _in_folder(folder: Path) -> Iterator[FoundImage]:
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place) / name
            if not name.startswith(".") and (path.suffix.lower() in IMAGES or _has_dicom_mark(path)):
                yield _of_file(path)


def _raise(error: OSError) -> None:
    """Images in a folder that may not be looked into would be missing without a word."""
    raise error


def _of_file(path: Path) -> FoundImage:
    def read() -> bytes:
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InvalidInput(f"{printable(str(path))} is no regular file; remove it.")
            with path.open("rb") as file:
                content = file.read(LARGEST + 1)
        except OSError as error:
            name = printable(str(path))
            raise InvalidInput(f"{name} cannot be read ({error.strerror}); make it readable.") from None
        if len(content) > LARGEST:
            raise InvalidInput(f"{printable(str(path))} has more than {LARGEST:,} bytes; shrink it.")
        return content

    return FoundImage(str(path), read)


def _may_be_dicom(path: PurePath) -> bool:
    """DICOM files are often named by a number or by dotted numbers alone."""
    return not path.suffix or path.suffix[1:].isdecimal()


def _has_dicom_mark(path: Path) -> bool:
    if not _may_be_dicom(path):
        return False
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return is_dicom(file.read(132))
    except OSError:
        return False


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES) or (
        path.suffix.lower() not in IMAGES and zipfile.is_zipfile(path)
    )


def _in_archive(path: Path) -> Iterator[FoundImage]:
    from medcil.data.sources.archive import open_files  # the one place that reads archives

    files = open_files(path)
    for name in files.names():
        if name.lower().endswith(IMAGES) or (_may_be_dicom(PurePath(name)) and _is_dicom_in(files, name)):
            yield FoundImage(f"{path}/{name}", partial(files.read, name))


def _is_dicom_in(files: "Files", name: str) -> bool:
    try:
        return is_dicom(files.read(name))
    except InvalidInput:
        return False
