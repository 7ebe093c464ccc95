"""Files of a model folder: read as what they should be, and copied."""

import re
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput
from medcil.storage.atomic import read_json, write_bytes
from medcil.storage.os_errors import reading


def copy_files(source: Path, target: Path) -> None:
    """Written anew: on the disk when this returns, and ours to change. What links point to is left out."""
    for name in _files(source):
        write_bytes(target / name, (source / name).read_bytes())


def same_files(source: Path, copy: Path) -> bool:
    """Whether copying once more would change nothing."""
    names = _files(source)
    return names == _files(copy) and all(
        (source / name).read_bytes() == (copy / name).read_bytes() for name in names
    )


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder) for path in found)


def is_sealed_image(entry: Any) -> bool:
    """A sealed image, in the hold-out itself: a folder that comes from elsewhere names no file outside."""
    is_text = isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("file", "sha256", "class")
    )
    return is_text and re.fullmatch(r"\w[\w.-]*", entry["file"]) is not None


def read_object(path: Path, *needed: str, newest_format: int | None = None) -> dict[str, Any]:
    """A JSON object of ours with these keys."""
    with reading(path.parent):
        if not path.exists():
            raise DamagedFile(f"{path} is missing; restore it.")
        content = read_json(path)
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} is damaged (no JSON object); restore it.")
    if newest_format is not None:
        found = content.get("format")
        if isinstance(found, int) and found > newest_format:
            raise InvalidInput(
                f"{path} was written by a newer medcil (format {found}, this one reads {newest_format}): "
                "update medcil."
            )
        if found != newest_format:
            raise DamagedFile(f"{path} is damaged (format {found!r}); restore it.")
    missing = [key for key in needed if key not in content]
    if missing:
        raise DamagedFile(f"{path} is damaged ({missing[0]!r} is missing); restore it.")
    return content
