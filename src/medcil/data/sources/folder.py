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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Bool

from medcil.data.decoding import is_dicom
from medcil.data.image_table import Files, ImageTable, numbered_groups
from medcil.data.sources.archive import FolderFiles, open_files
from medcil.data.sources.manifest import TABLES, Row, UnsoundData, header_of, part_of, read_manifest
from medcil.data.sources.medmnist import read_npz
from medcil.errors import InvalidInput, listed_below, needs_extra, printable

IMAGES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
DICOM = (".dcm", ".dicom", ".ima")
LITTER = {"thumbs.db", "desktop.ini", "dicomdir", "ehthumbs.db"}  # what systems leave in folders of images
UNREAD_PICTURES = (".heic", ".heif", ".gif", ".avif", ".jp2", ".jpx", ".jxl", ".svs", ".nii", ".psd")


def read_own(path: Path, *, fewest_classes: int = 2) -> ImageTable:
    """List a folder, an archive or a manifest of one's own images, by name; the classes in natural order.

    One class can be added to a model, though nothing can be learned from one class alone.
    """
    if not path.exists():
        raise InvalidInput(
            f"data.root: there is nothing at {path}. Give a folder with one subfolder per class.",
            code="data.root.missing",
        )
    if path.suffix.lower() == ".npz" and path.is_file():
        return read_npz(path, path.name)
    is_table = path.suffix.lower() in TABLES and path.is_file()
    files = open_files(path.parent if is_table else path)
    manifest = _composed(path.name) if is_table else _find_manifest(files, path)
    table = _from_folders(files, path) if manifest is None else _from_manifest(files, manifest, path)
    if len(table.class_names) < fewest_classes:
        advice = "" if manifest is not None else _no_manifest(files)
        advice = advice or "Is this the folder above the class folders?"
        problem = f"has only one class, {table.class_names[0]!r}; two are the least"
        raise InvalidInput(f"data.root: {path} {problem}. {advice}")
    return table


def _table(files: Files, rows: Sequence[Row], root: Path) -> ImageTable:
    """Order the images by name, so that the same images in another order or layout are the same data."""
    rows = sorted(rows, key=lambda row: _composed(row.path))
    names = tuple(row.path for row in rows)
    spellings = _first_spellings(row.label for row in rows)
    colliding = [f"{first!a} and {label!a}" for label, first in spellings.items() if first != label]
    spelled = {label: label if colliding else _composed(label) for label in spellings}
    class_names = tuple(sorted(set(spelled.values()), key=_natural))
    label_of = {name: label for label, name in enumerate(class_names)}
    spelling_of = _first_spellings(row.patient for row in rows)
    patients = [spelling_of[row.patient] for row in rows]
    patients = patients if any(patients) else _patients_in_headers(files, names)
    is_test, is_validation, remarks = _split([row.part for row in rows], root)
    # Numbers in place of patients' ids, for all that needs to know only who is whose.
    groups = [patient or f"image {name}" for name, patient in zip(names, patients, strict=True)]
    table = ImageTable(
        files=files,
        names=names,
        labels=np.array([label_of[spelled[row.label]] for row in rows], dtype=np.int64),
        class_names=class_names,
        groups=numbered_groups(groups, names) if any(patients) else None,
        patients=tuple(patients) if any(patients) else None,
        is_test=is_test,
        is_validation=is_validation,
        remarks=remarks,
        columns={name: tuple(row.further[name] for row in rows) for name in rows[0].further},
    )
    if colliding:
        problem = f"has two classes that differ in case or encoding only, {colliding[0]}"
        raise UnsoundData(
            listed_below(f"data.root: {root} {problem}: rename one of them.", colliding[1:]), table
        )
    return table


def _first_spellings(texts: Iterable[str]) -> dict[str, str]:
    """Map each text to the first in the alphabet from which it differs in case or encoding at most."""
    first_of: dict[str, str] = {}
    return {text: first_of.setdefault(folded(text), text) for text in sorted(set(texts))}


def folded(text: str) -> str:
    """Return the same for texts that differ in case or encoding only."""
    return _composed(_composed(text).casefold())


def names_patient(text: str, patient: str) -> bool:
    """Tell whether a text, such as a file name, contains a patient's id.

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
    """Encode what looks the same in one way: file systems differ in how they write an accent."""
    return unicodedata.normalize("NFC", text)


def _natural(text: str) -> list[tuple[int, int | str]]:
    """Return a key for sorting by which grade 2 comes before grade 10."""
    parts = re.split(r"([0-9]+)", text.casefold())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part] + [(2, text)]


Part = Bool[np.ndarray, "n"] | None


def _split(parts: Sequence[str], root: Path) -> tuple[Part, Part, tuple[str, ...]]:
    """Tell which images are tested on, and which others are for validation; also in words.

    Where none is called test, those for validation are tested on.
    """
    if set(parts) <= {"train", ""}:
        return None, None, ()
    kinds = [part for part in ("val", "test") if part in parts]
    if "train" not in parts:
        kind = "test" if "test" in kinds else "validation"
        raise InvalidInput(f"data.root: {root} has {kind} images only: add the training images, in train/.")
    is_part = [np.array([part == kind for part in parts]) for kind in kinds]
    uses = ["measured on, not trained on", "for `medcil evaluate`, not trained on"]
    counts = [f"{kind} {is_part[i].sum():,} ({uses[i]})" for i, kind in enumerate(kinds)]
    remark = f"split: train {parts.count('train'):,}, {', '.join(counts)}"
    return is_part[-1], is_part[0] if len(kinds) > 1 else None, (remark,)


def _from_folders(files: Files, root: Path) -> ImageTable:
    images = [name for name in files.names() if _is_image(files, name)]
    if not images:
        raise InvalidInput(
            f"data.root: {root} holds no images. Give a folder with one subfolder per class, or a manifest."
        )
    depth, is_split = _depth_of_classes(images)
    paths = [name.split("/") for name in images]
    loose = [name for name, path in zip(images, paths, strict=True) if len(path) < depth + 2]
    if loose:
        problem = f"{len(loose)} of {len(images)} images in {root} are in no class folder"
        advice = _no_manifest(files) or "Move them there, or give a manifest."
        raise InvalidInput(listed_below(f"data.root: {problem}. {advice}", loose))
    parts = [path[depth - 1] if is_split else "" for path in paths]
    strangers = sorted({part for part in parts if is_split and not part_of(part)})
    if strangers:
        problem = f"beside train in {root} is the folder {strangers[0]!r}, neither test nor val"
        raise InvalidInput(f"data.root: {problem}. Move it away, or put all class folders on one level.")
    rows = [
        Row(name, path[depth], part_of(part)) for name, path, part in zip(images, paths, parts, strict=True)
    ]
    return _table(files, rows, root)


def _depth_of_classes(names: Sequence[str]) -> tuple[int, bool]:
    """Count the folders above the class folders, and tell whether the lowest of them are parts of a split.

    Archives often hold one folder with everything in it: its name is no class.
    """
    paths = [name.split("/") for name in names]
    fewest, depth = min(map(len, paths)), 0
    while fewest > depth + 2 and len({path[depth] for path in paths}) == 1 and not part_of(paths[0][depth]):
        depth += 1
    tops = {path[depth] for path in paths if len(path) > depth + 1}
    is_split = any(part_of(top) == "train" for top in tops) or (bool(tops) and all(map(part_of, tops)))
    return depth + is_split, is_split


def _is_image(files: Files, name: str) -> bool:
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if suffix in IMAGES or suffix in DICOM:
        return True
    if path.name.upper() == "DICOMDIR":  # DICOM's own list of files
        return False
    # DICOM files are often named by a number or by dotted numbers alone.
    if suffix and not suffix[1:].isdecimal():
        return False
    with _opened(files, name) as file:
        return is_dicom(file.read(132))


def _find_manifest(files: Files, root: Path) -> str | None:
    """Find the one table with the columns of a manifest."""
    found = [name for name in _tables(files) if header_of(files.read(name), name).are_a_manifest]
    if len(found) > 1:
        raise InvalidInput(f"data.root: {root} has two manifests, {found[0]} and {found[1]}: give one.")
    return found[0] if found else None


def _tables(files: Files) -> list[str]:
    """List the tables at the top, or as deep as a single folder leads."""
    names = files.names()
    shared = PurePosixPath(posixpath.commonpath([posixpath.dirname(name) for name in names] or [""]))
    tables = [name for name in names if name.lower().endswith(TABLES)]
    return [name for name in tables if PurePosixPath(name).parent in (shared, *shared.parents)]


def _no_manifest(files: Files) -> str:
    """Say which columns a table has that is no manifest; empty where there is no table."""
    for name in _tables(files):
        columns = printable(", ".join(header_of(files.read(name), name).names)) or "none"
        return f"{name} has the columns {columns}: call those of image and class path and label."
    return ""


def _from_manifest(files: Files, manifest: str, root: Path) -> ImageTable:
    find = _Finder(files, posixpath.dirname(manifest))
    rows: dict[str, tuple[int, Row]] = {}
    absent: list[str] = []
    columns, listed = read_manifest(files.read(manifest), manifest, root)
    for number, row in listed:
        stored, several = find(row.path)
        if len(several) > 1:
            problem = f"names {printable(row.path)}, which is {several[0]} and {several[1]}"
            raise InvalidInput(f"data.root: row {number} of {root} {problem}: write the path.")
        first, same = rows.setdefault(_composed(stored), (number, row._replace(path=stored)))
        if first != number:
            is_same = same.label == row.label
            said = f"after row {first}" if is_same else f"as {row.label!r}, row {first} as {same.label!r}"
            problem = f"lists {printable(row.path)} again, {said}"
            raise InvalidInput(f"data.root: row {number} of {root} {problem}: keep one.")
        absent += [] if several else [f"row {number}: {stored}"]
    table = _table(files, [row for _, row in rows.values()], root)
    table = replace(table, remarks=(str(columns), *table.remarks))
    if absent:
        problem = f"{len(absent):,} of {len(rows):,} files that {root} lists are absent"
        first_line = f"data.root: {problem}. Correct the paths, which count from its own folder."
        raise UnsoundData(listed_below(first_line, absent), table)
    return table


class _Finder:
    """Finds the file that a manifest names by its path or the end of it, with or without an extension."""

    def __init__(self, files: Files, folder: str) -> None:
        self.folder = folder
        self.stored = {_composed(name): name for name in files.names()}

    def __call__(self, path: str) -> tuple[str, Sequence[str]]:
        """Return the name of the file, and all files that may be meant; none where it is absent."""
        name = _composed(posixpath.join(self.folder, path))
        if name in self.stored:
            return self.stored[name], (name,)
        several = [found for found in self._by_end[PurePosixPath(name).name] if self._is_at(found, path)]
        return (self.stored[several[0]] if several else name), several

    def _is_at(self, found: str, path: str) -> bool:
        ending = f"/{_composed(path)}"
        return f"/{found}".endswith(ending) or f"/{_without_extension(found)}".endswith(ending)

    @cached_property
    def _by_end(self) -> Mapping[str, list[str]]:
        """Map the last part of a path, with and without the extension of an image, to files of the folder."""
        found = defaultdict(list)
        above = f"{self.folder}/" if self.folder else ""
        for name in sorted(self.stored):
            if name.startswith(_composed(above)) and name.lower().endswith((*IMAGES, *DICOM)):
                last = PurePosixPath(name).name
                for key in {last, _without_extension(last)}:
                    found[key].append(name)
        return defaultdict(list, found)


def _without_extension(name: str) -> str:
    return name.removesuffix(PurePosixPath(name).suffix)


def _patients_in_headers(files: Files, names: Sequence[str]) -> list[str]:
    """Read the patients' ids in DICOM files; empty where there is none."""
    there = set(files.names())

    def patient(name: str) -> str:
        return "" if name.lower().endswith(IMAGES) or name not in there else _patient_id(files, name)

    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor() as pool:  # they quote the file
        return list(pool.map(patient, names))


def _opened(files: Files, name: str) -> Any:
    """Open a file; one in a folder is not read as a whole, since a header takes little of it."""
    if not isinstance(files, FolderFiles):
        return nullcontext(io.BytesIO(files.read(name)))
    path = files.places[name]
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}); make it readable.") from None


def _patient_id(files: Files, name: str) -> str:
    with _opened(files, name) as file:
        if not name.lower().endswith(DICOM) and not is_dicom(file.read(132)):
            return ""
        with needs_extra("dicom"):
            from pydicom import dcmread
        file.seek(0)
        try:
            header = dcmread(file, force=True, specific_tags=["PatientID"], stop_before_pixels=True)
            return str(header.get("PatientID") or "").strip()
        except Exception:  # pydicom raises errors of many kinds for a damaged header; decoding names the file
            return ""


@dataclass(frozen=True)
class Ignored:
    """Files among one's own images that are not read."""

    files: dict[str, list[str]]
    """By extension, the most frequent first."""
    folders: list[str]
    """Class folders without an image that is read."""


def ignored_files(table: ImageTable) -> Ignored:
    """Find the files that are not read; none beside a manifest, which names the files that count."""
    files, images = table.files, set(table.names)
    names = [name for name in files.names() if PurePosixPath(name).name.lower() not in LITTER]
    depth, _ = _depth_of_classes(table.names)
    tables = [name for name in names if name.lower().endswith(TABLES) and name.count("/") <= depth]
    if any(header_of(files.read(name), name).are_a_manifest for name in tables):
        return Ignored({}, [])
    by_extension, by_folder = defaultdict(list), defaultdict(list)
    for name in names:
        if name not in images and name.count("/") > depth:
            by_extension[PurePosixPath(name).suffix.lower() or "no extension"].append(name)
            by_folder[_class_folder(name, depth)].append(name)
    if isinstance(files, FolderFiles):  # only a real folder tells of empty ones
        for above in {"/".join(name.split("/")[:depth]) for name in table.names}:
            for path in (files.path / above).iterdir():
                if path.is_dir() and not path.name.startswith((".", "__MACOSX")):
                    by_folder.setdefault(path.relative_to(files.path).as_posix(), [])
    frequent = sorted(by_extension.items(), key=lambda item: (-len(item[1]), item[0]))
    with_images = {_class_folder(name, depth) for name in table.names}
    unread = [
        folder
        for folder, held in by_folder.items()
        if folder not in with_images and all(name.lower().endswith(UNREAD_PICTURES) for name in held)
    ]
    return Ignored(dict(frequent), sorted(unread))


def _class_folder(name: str, depth: int) -> str:
    return "/".join(name.split("/")[: depth + 1])
