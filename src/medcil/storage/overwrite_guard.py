"""Overwrite protection for command outputs.

An output folder must be new, empty, or written by the same command before: a marker file in it says so. An
output file must be new, or begin like one that the same command writes. Nothing is written into a model
folder, because `medcil erase` must know what each of its files holds.
"""

import os
from pathlib import Path

from medcil.errors import InvalidInput, RunConflict
from medcil.storage.atomic import not_a_folder, reading, unwritable, write_bytes, writing

MARKER = ".medcil"
HEAD = 64
"""Bytes of a file in which its kind shows."""


def check_output_folder(folder: Path, command: str) -> None:
    """Refuse a folder that this command cannot write, or did not write; call it before any work."""
    refuse_within_model(folder)
    check_writable(folder)
    with writing(folder):
        # The names come first: another process that writes here has written its marker before them.
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if any(not name.startswith(".") for name in names) and not _is_marked(folder, command):
            raise RunConflict(
                f"{folder} is not empty and not an output of `medcil {command}`. Choose a new folder.",
                code="output.exists",
            )


def claim_output_folder(folder: Path, command: str) -> None:
    """Create and mark the folder; call it before the first file is written."""
    check_output_folder(folder, command)
    if not _is_marked(folder, command):
        with writing(folder):
            write_bytes(folder / MARKER, f"medcil {command}\n".encode())


def check_output_file(path: Path, mark: bytes) -> None:
    """Refuse a file that exists, unless its first bytes hold `mark`; call it before any work."""
    refuse_within_model(path)
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder. Name a file in it.", code="output.is_a_folder")
    with reading(path):
        # A pipe or a device is not read: that could wait forever.
        if os.path.lexists(path) and not (path.is_file() and mark in _head(path)):
            raise RunConflict(
                f"{path} exists and was not written by this command. Choose another name.",
                code="output.exists",
            )
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written; for a new folder its nearest existing parent counts."""
    with writing(folder):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    if not folder.is_dir():
        raise not_a_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise unwritable(folder)


def refuse_within_data(path: Path, data: Path) -> None:
    """Refuse an output inside a folder of images: the next command would read it as data."""
    if data.is_dir() and path.resolve().is_relative_to(data.resolve()):
        raise InvalidInput(
            f"{path} is inside the data in {data}. Choose a place outside.", code="output.in_data"
        )


def refuse_within_model(path: Path) -> None:
    """Refuse an output inside a model folder."""
    resolved = Path(os.path.realpath(path))
    for folder in (resolved, *resolved.parents):
        if (folder / "model.json").is_file() and (folder / "versions").is_dir():
            raise InvalidInput(
                f"{path} is inside the model folder {folder}. Choose a place outside.", code="output.in_model"
            )


def _is_marked(folder: Path, command: str) -> bool:
    marker = folder / MARKER
    return marker.is_file() and marker.read_bytes() == f"medcil {command}\n".encode()


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)
