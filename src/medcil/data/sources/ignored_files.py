"""Files among one's own images that are not read: files of other formats, class folders without images."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from medcil.data.image_table import ImageTable
from medcil.data.sources.archive import FolderFiles
from medcil.data.sources.manifest import TABLES, is_manifest, part_of

LITTER = {"thumbs.db", "desktop.ini", "dicomdir", "ehthumbs.db"}  # what systems leave in folders of images
UNREAD_PICTURES = (".heic", ".heif", ".gif", ".avif", ".jp2", ".jpx", ".jxl", ".svs", ".nii", ".psd")


@dataclass(frozen=True)
class Ignored:
    files: dict[str, list[str]]
    """By extension, the most frequent first."""
    folders: list[str]
    """Class folders without an image that is read."""


def ignored_files(table: ImageTable) -> Ignored:
    """A manifest names what counts, and other files there are ignored."""
    files, read = table.files, set(table.names)
    names = [name for name in files.names() if PurePosixPath(name).name.lower() not in LITTER]
    depth = _depth_of_classes(table.names)
    tables = [name for name in names if name.lower().endswith(TABLES) and name.count("/") <= depth]
    if any(is_manifest(files.read(name), name) for name in tables):
        return Ignored({}, [])
    others = [name for name in names if name not in read and name.count("/") > depth]
    by_extension = defaultdict(list)
    for name in others:
        by_extension[PurePosixPath(name).suffix.lower() or "no extension"].append(name)
    frequent = sorted(by_extension.items(), key=lambda item: (-len(item[1]), item[0]))
    return Ignored(dict(frequent), _classes_without_images(table, others, depth))


def _depth_of_classes(names: Sequence[str]) -> int:
    """The number of folders above the class folders: wrappers, and the parts of a split."""
    parents = [name.split("/")[:-1] for name in names]
    depth = 0
    while parents and len({tuple(path[: depth + 1]) for path in parents}) == 1:
        if min(map(len, parents)) < depth + 2:
            return depth
        depth += 1
    tops = {path[depth] for path in parents if len(path) > depth}
    return depth + 1 if tops and all(map(part_of, tops)) else depth


def _classes_without_images(table: ImageTable, others: Sequence[str], depth: int) -> list[str]:
    """Class folders that are empty or hold nothing but pictures of formats that are not read."""
    with_images = {_class_folder(name, depth) for name in table.names}
    unread: dict[str, list[str]] = defaultdict(list)
    for name in others:
        unread[_class_folder(name, depth)].append(name)
    found = [
        folder
        for folder, held in unread.items()
        if all(name.lower().endswith(UNREAD_PICTURES) for name in held)
    ]
    found += [folder for folder in _folders(table, depth) if folder not in unread]
    return sorted(set(found) - with_images)


def _class_folder(name: str, depth: int) -> str:
    return "/".join(name.split("/")[: depth + 1])


def _folders(table: ImageTable, depth: int) -> Iterator[str]:
    """Beside the class folders with images; only a real folder tells of empty ones."""
    if not isinstance(table.files, FolderFiles):
        return
    root = table.files.path
    for above in {"/".join(name.split("/")[:depth]) for name in table.names}:
        for path in sorted((root / above).iterdir()):
            if path.is_dir() and not path.name.startswith((".", "__MACOSX")):
                yield path.relative_to(root).as_posix()
