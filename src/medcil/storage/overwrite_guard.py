"""Where results may lie: nothing of anyone else's is replaced, and nothing is put into a model folder."""

import os
from collections.abc import Mapping
from pathlib import Path

from medcil.errors import InvalidInput, RunConflict

HEAD = 1 << 16
Files = Mapping[Path, bytes | None]
"""What a command is about to write -> what the first bytes of such a file hold. None: it tells nothing, and
is the command's where another of its files is."""


def generator(kind: str) -> bytes:
    """What the head of a page has: which command wrote it."""
    return f'<meta name="generator" content="medcil {kind}">'.encode()


def refuse_other_files(files: Files) -> None:
    """Before any work: a file takes the place of such a file only."""
    # Those that tell nothing are looked for first: another process writes them after one that tells.
    in_order = sorted(files, key=lambda path: files[path] is not None)
    there = [path for path in in_order if os.path.lexists(path)]
    own = {path for path in there if (mark := files[path]) is not None and holds(path, mark)}
    for path in there:
        if path not in own and (files[path] is not None or not own):
            raise RunConflict(
                f"{path} is there and was not written by this command: move it away, or give another place."
            )


def holds(path: Path, mark: bytes) -> bool:
    """Among its first bytes."""
    if not path.is_file():  # a folder, or a device or a pipe, which would be waited for
        return False
    with path.open("rb") as file:
        return mark in file.read(HEAD)


def refuse_within_model(place: Path) -> None:
    """Before any work: erasing a patient needs to know what all files of a model hold."""
    resolved = Path(os.path.realpath(place))
    for folder in (resolved, *resolved.parents):
        if os.path.isfile(folder / "model.json") and os.path.isdir(folder / "versions"):
            raise InvalidInput(
                f"{place} lies in a model folder ({folder}), which holds versions and nothing else: give "
                "another place."
            )
