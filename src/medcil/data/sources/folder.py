"""One's own images: a folder per class, or a manifest that names each file; plain images and DICOM alike.

docs/how-to/use-your-own-images.md describes the layouts. Everything is listed and checked here before a pixel
is decoded.
"""

import io
import itertools
import posixpath
import re
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from medcil.data.decoding.image import is_dicom
from medcil.data.image_table import Files, ImageTable, numbered_groups
from medcil.data.sources.archive import FolderFiles, open_files
from medcil.data.sources.manifest import TABLES, UnsoundData, is_manifest, part_of, read_manifest
from medcil.data.sources.medmnist import read_npz
from medcil.errors import InvalidInput, listed_below, printable

IMAGES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
SHOWN = 3  # examples in a message


def read_own(path: Path, *, fewest_classes: int = 2) -> ImageTable:
    """A folder, an archive or a manifest of one's own images, by name; the classes in natural order.

    One class can be added to a model, though nothing can be learned from one class alone.
    """
    if not path.exists():
        raise InvalidInput(
            f"data.root: there is nothing at {path}. Give a folder with one subfolder per class, a manifest "
            "(.csv or .parquet), or an archive (.zip, .tar) of either."
        )
    if path.suffix.lower() == ".npz" and path.is_file():
        return read_npz(path, path.name)
    if path.suffix.lower() in TABLES and path.is_file():
        return _from_manifest(open_files(path.parent), _composed(path.name), path, fewest_classes)
    files = open_files(path)
    names = files.names()
    manifest = _find_manifest(files, names, path)
    if manifest is not None:
        return _from_manifest(files, manifest, path, fewest_classes)
    return _from_folders(files, names, path, fewest_classes)


class _Image(NamedTuple):
    name: str
    label: str
    part: str = ""
    """Of the split: train, val or test."""
    patient: str = ""
    further: tuple[tuple[str, str], ...] = ()


def _catalog(files: Files, images: Sequence[_Image], root: Path, fewest_classes: int) -> ImageTable:
    """The images by name, so that the same images in another order or layout are the same data."""
    images = sorted(images, key=lambda image: _composed(image.name))
    names = tuple(image.name for image in images)
    spelled, colliding = _spellings({image.label for image in images})
    class_names = tuple(sorted(set(spelled.values()), key=_natural))
    if len(class_names) < fewest_classes:
        raise InvalidInput(
            f"data.root: {root} has only one class, {class_names[0]!r}; two are the least. "
            "Is this the folder above the class folders?"
        )
    label_of = {name: label for label, name in enumerate(class_names)}
    patients = one_spelling([image.patient for image in images])
    patients = patients if any(patients) else _patients_in_headers(files, names)
    table = ImageTable(
        files=files,
        names=names,
        labels=np.array([label_of[spelled[image.label]] for image in images], dtype=np.int64),
        class_names=class_names,
        groups=_groups(names, patients),
        patients=tuple(patients) if any(patients) else None,
        is_test=_is_test([image.part for image in images], root),
        columns={name: tuple(dict(image.further)[name] for image in images) for name, _ in images[0].further},
    )
    if colliding:
        first = (
            f"data.root: {root} has two classes that differ in case or encoding only, "
            f"{colliding[0]}: rename one of them, or put them together."
        )
        raise UnsoundData(listed_below(first, colliding[1:]), table)
    return table


def _spellings(labels: set[str]) -> tuple[dict[str, str], list[str]]:
    """How each label is written as a class, and which two would look the same; these stay apart."""
    by_key: dict[str, str] = {}
    colliding = []
    for label in sorted(labels):
        other = by_key.setdefault(folded(label), label)
        if other != label:
            colliding.append(f"{other!a} and {label!a}")
    spelled = {label: label if colliding else _composed(label) for label in labels}
    return spelled, colliding


def one_spelling(patients: Sequence[str]) -> list[str]:
    """One name for a patient whom a list writes in several ways: the first of them in the alphabet."""
    first_of: dict[str, str] = {}
    for patient in sorted(set(patients)):
        first_of.setdefault(folded(patient), patient)
    return [first_of[folded(patient)] for patient in patients]


def folded(text: str) -> str:
    """The same for what differs in case or encoding only."""
    return _composed(_composed(text).casefold())


def names_patient(text: str, patient: str) -> bool:
    """Whether a text, such as a file name, contains a patient's id.

    Case, encoding, and what separates the words of the id make no difference: "MUELLER HANS 1" is in
    `Mueller_Hans_1_left.png`. Within a longer number or word an id names nobody: "1" is not in `4711.png`.
    """
    words = re.findall(r"\d+|[^\W\d_]+", folded(patient))
    if not words:
        return bool(patient.strip()) and folded(patient.strip()) in folded(text)
    pattern = "".join(
        word + (r"[\W_]+" if word.isdecimal() and after.isdecimal() else r"[\W_]*")
        for word, after in itertools.pairwise(words)
    )
    before = r"(?<!\d)" if words[0].isdecimal() else r"(?<![^\W\d_])"
    behind = r"(?!\d)" if words[-1].isdecimal() else r"(?![^\W\d_])"
    return re.search(f"{before}{pattern}{words[-1]}{behind}", folded(text)) is not None


def _composed(text: str) -> str:
    """One encoding for what looks the same: file systems differ in how they write an accent."""
    return unicodedata.normalize("NFC", text)


def _natural(text: str) -> list[tuple[int, int | str]]:
    """So that grade 2 comes before grade 10."""
    parts = re.split(r"([0-9]+)", text.casefold())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part] + [(2, text)]


def _is_test(parts: Sequence[str], root: Path) -> Bool[np.ndarray, "n"] | None:
    """What is called test; where nothing is, what is called validation."""
    found = set(parts)
    if found <= {"train", ""}:
        return None
    if "train" not in found:
        what = "test images only" if "test" in found else "validation images only"
        raise InvalidInput(f"data.root: {root} has {what}: add the training images, in train/ or as train.")
    held_out = "test" if "test" in found else "val"
    return np.array([part == held_out for part in parts])


def _groups(names: Sequence[str], patients: Sequence[str]) -> tuple[str, ...] | None:
    """Numbers in place of patients' ids, for all that needs to know only who is whose."""
    if not any(patients):
        return None
    groups = [patient or f"image {name}" for name, patient in zip(names, patients, strict=True)]
    return numbered_groups(groups, names)


def _patients_in_headers(files: Files, names: Sequence[str]) -> list[str]:
    possible = [name for name in names if not name.lower().endswith(IMAGES)]
    found = dict(zip(possible, dicom_patients(files, possible), strict=True))
    return [found.get(name, "") for name in names]


def _from_folders(files: Files, names: Sequence[str], root: Path, fewest_classes: int) -> ImageTable:
    images = [name for name in names if _is_image(files, name)]
    if not images:
        raise InvalidInput(
            f"data.root: {root} holds no images ({', '.join(IMAGES)} or DICOM). Give a folder with one "
            "subfolder per class, or a manifest with the columns path and label."
        )
    paths = _without_wrapper([name.split("/") for name in images])
    tops = {path[0] for path in paths if len(path) > 1}
    is_split = any(part_of(top) == "train" for top in tops) or (bool(tops) and all(map(part_of, tops)))
    depth = 1 if is_split else 0  # of the class folder
    loose = [name for name, path in zip(images, paths, strict=True) if len(path) < depth + 2]
    if loose:
        raise InvalidInput(
            f"data.root: {len(loose)} of {len(images)} images in {root} are in no class folder "
            f"({', '.join(loose[:SHOWN])}): move each into the folder of its class, or give a manifest."
        )
    strangers = sorted(top for top in tops if not part_of(top))
    if is_split and strangers:
        raise InvalidInput(
            f"data.root: beside the training images in {root} is the folder {strangers[0]!r}, neither test "
            "nor val: move it away, or put all class folders on one level."
        )
    found = [
        _Image(name, label=path[depth], part=part_of(path[0]) if is_split else "")
        for name, path in zip(images, paths, strict=True)
    ]
    tables = [name for name in names if name.lower().endswith(TABLES)]
    if tables and len({image.label for image in found}) < fewest_classes:
        raise InvalidInput(
            f"data.root: {root} has only one class folder, {found[0].label!r}, and {tables[0]} is no "
            "manifest: call its columns of files and classes path and label, or make a folder per class."
        )
    return _catalog(files, found, root, fewest_classes)


def _is_image(files: Files, name: str) -> bool:
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if suffix in IMAGES or suffix in DICOM:
        return True
    if path.name.upper() == "DICOMDIR":  # DICOM's own list of files
        return False
    # DICOM files are often named by a number or by dotted numbers alone.
    return (not suffix or suffix[1:].isdecimal()) and has_dicom_mark(files, name)


def _without_wrapper(paths: list[list[str]]) -> list[list[str]]:
    """Archives often hold one folder with everything in it: its name is no class."""
    while len({path[0] for path in paths}) == 1 and min(map(len, paths)) > 2 and not part_of(paths[0][0]):
        paths = [path[1:] for path in paths]
    return paths


def _find_manifest(files: Files, names: Sequence[str], root: Path) -> str | None:
    """The one table that has the columns of a manifest, at the top or as deep as a single folder leads."""
    shared = PurePosixPath(posixpath.commonpath([posixpath.dirname(name) for name in names] or [""]))
    tables = [name for name in names if name.lower().endswith(TABLES)]
    tables = [name for name in tables if PurePosixPath(name).parent in (shared, *shared.parents)]
    found = [name for name in tables if is_manifest(files.read(name), name)]
    if len(found) > 1:
        raise InvalidInput(
            f"data.root: {root} has two manifests, {found[0]} and {found[1]}: give one of them."
        )
    return found[0] if found else None


def _from_manifest(files: Files, manifest: str, root: Path, fewest_classes: int) -> ImageTable:
    rows = read_manifest(files.read(manifest), manifest, root)
    stored = {_composed(name): name for name in files.names()}
    folder = posixpath.dirname(manifest)
    images: dict[str, tuple[int, _Image]] = {}
    for row in rows:
        name = _composed(posixpath.join(folder, row.path))
        image = _Image(stored.get(name, name), row.label, row.part, row.patient, row.further)
        first, same = images.setdefault(name, (row.number, image))
        if same is not image:
            said = (
                f"after row {first}"
                if same.label == row.label
                else f"as {row.label!r}, row {first} as {same.label!r}"
            )
            raise InvalidInput(
                f"data.root: row {row.number} of {root} lists {printable(row.path)} again, {said}: keep one."
            )
    table = _catalog(files, [image for _, image in images.values()], root, fewest_classes)
    absent = [f"row {number}: {name}" for name, (number, _) in images.items() if name not in stored]
    if absent:
        first_line = (
            f"data.root: {len(absent):,} of {len(images):,} files that {root} lists are absent: correct the "
            "paths, which count from the manifest's own folder."
        )
        raise UnsoundData(listed_below(first_line, absent), table)
    return table


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


DICOM = (".dcm", ".dicom", ".ima")
MARK_ENDS = 132  # bytes


def has_dicom_mark(files: Files, name: str) -> bool:
    with _opened(files, name) as file:
        return is_dicom(file.read(MARK_ENDS))


def dicom_patients(files: Files, names: Sequence[str]) -> list[str]:
    """The patients' ids in the headers; empty where there is none."""
    there = set(files.names())
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor() as pool:  # they quote the file
        return list(pool.map(lambda name: _patient_id(files, name) if name in there else "", names))


def _opened(files: Files, name: str) -> Any:
    """From a folder not as a whole: a header takes little of a large file. Archives have no such way."""
    if not isinstance(files, FolderFiles):
        return nullcontext(io.BytesIO(files.read(name)))
    try:
        return files.places[name].open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{files.places[name]} cannot be read ({error.strerror}); make it readable."
        ) from None


def _patient_id(files: Files, name: str) -> str:
    with _opened(files, name) as file:
        if not is_dicom(file.read(MARK_ENDS)) and not name.lower().endswith(DICOM):
            return ""
        file.seek(0)
        return _read_id(file, name)


def _read_id(file: Any, name: str) -> str:
    try:
        from pydicom import dcmread
    except ImportError:
        raise InvalidInput(f"{name} is a DICOM file: install pydicom to read it.") from None
    try:
        header = dcmread(file, force=True, specific_tags=["PatientID"], stop_before_pixels=True)
        return str(header.get("PatientID") or "").strip()
    except Exception:  # a damaged header makes pydicom raise errors of many kinds; decoding names the file
        return ""
