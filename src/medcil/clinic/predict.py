"""Classify images: find them, choose a prior, and make a row for each. Docs: docs/how-to/predict.md."""

import glob
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from medcil.clinic.calibration import OperatingPoint, abstention_sentence, check_sensitivity, operating_points
from medcil.clinic.inference import BATCH, OpenModel, Pixels, Watch, open_model
from medcil.config import usable_cores
from medcil.data.decoding import is_dicom, read_upright, resized_planes
from medcil.errors import InvalidInput, known_classes, nearest, printable
from medcil.storage.atomic import reading, write_csv, writing
from medcil.storage.overwrite_guard import check_output_file

if TYPE_CHECKING:
    from medcil.config import ExecutionConfig


IMAGES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".dcm", ".dicom", ".ima")
ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
LARGEST = 256 << 20
"""Bytes; larger files are refused."""


@dataclass(frozen=True, eq=False)
class FoundImage:
    name: str
    """The path as the caller wrote it, and the path inside that folder or archive."""
    read: Callable[[], bytes]

    def decode(self, side: int) -> UInt8[np.ndarray, "3 side side"]:
        return resized_planes(read_upright(self.read(), side=side, name=printable(self.name)), side)


def find_images(wanted: Sequence[str | Path]) -> list[FoundImage]:
    """List the images of files, folders, archives and patterns, in that order; each image once.

    A named file is always listed, and an error appears when it is read. In folders and archives only files
    with the extension of an image, or with DICOM content, are listed.
    """
    found: dict[str, FoundImage] = {}
    for each in wanted:
        with reading(Path(each)):
            images = {image.name: image for image in _images_at(str(each))}
        if not images and Path(each).is_dir():
            raise InvalidInput(f"{each} holds no images. Give a folder with JPEG, PNG, DICOM, ... files.")
        found |= images
    if not found:
        raise InvalidInput("No images were named. Give files, folders, archives or quoted patterns.")
    return list(found.values())


def _images_at(wanted: str) -> Iterator[FoundImage]:
    path = Path(wanted)
    if path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield from _in_archive(path) if _is_archive(path) else [FoundImage(wanted, partial(_read, path))]
    elif glob.has_magic(wanted):
        matches = sorted(glob.glob(wanted, recursive=True))
        if not matches:
            raise InvalidInput(f"No file matches {wanted!r}: check the pattern.")
        for match in matches:
            yield from _images_at(match)
    else:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if 0 < len(beside) <= 1000 else ""
        raise InvalidInput(f"There is nothing at {wanted}: check the path. {hint}".rstrip())


def _in_folder(folder: Path) -> Iterator[FoundImage]:
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place) / name for name in sorted(files) if not name.startswith(".")):
            if _is_image(path, partial(_head, path)):
                yield FoundImage(str(path), partial(_read, path))


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(132)


def _raise(error: OSError) -> None:
    """Raise, because the images of an unreadable folder would be missing silently."""
    raise error


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES) or (
        path.suffix.lower() not in IMAGES and zipfile.is_zipfile(path)
    )


def _in_archive(path: Path) -> Iterator[FoundImage]:
    from medcil.data.sources.archive import open_files  # the one place that reads archives

    files = open_files(path)
    for name in files.names():
        if _is_image(PurePath(name), partial(files.read, name)):
            yield FoundImage(f"{path}/{name}", partial(files.read, name))


def _is_image(path: PurePath, read: Callable[[], bytes]) -> bool:
    """Go by the extension; DICOM files often have none, or dotted numbers as names, and have a mark."""
    if path.suffix.lower() in IMAGES or (path.suffix and not path.suffix[1:].isdecimal()):
        return path.suffix.lower() in IMAGES
    try:
        return is_dicom(read())
    except (InvalidInput, OSError):
        return False


def _read(path: Path) -> bytes:
    name = printable(str(path))
    try:
        if path.exists() and not path.is_file():  # a pipe could be waited for forever
            raise InvalidInput(f"{name} is no regular file; remove it.")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read ({error.strerror}); make it readable.") from None
    if len(content) > LARGEST:
        raise InvalidInput(f"{name} has more than {LARGEST:,} bytes; shrink it.")
    return content


TABLES = (".csv", ".yaml", ".yml")
ROUNDING = 0.005
"""Tolerance of the sum of shares, for rounded files."""


@dataclass(frozen=True)
class Prior:
    name: str
    """`uniform`, `training`, or the name of the file."""
    shares: tuple[float, ...]
    """Of each class of the model; they sum to one."""


def choose_prior(model: OpenModel, wanted: str | Path) -> Prior:
    """Return the prior `uniform`, `training` (the class frequencies of the training images), or that of a
    file."""
    n = len(model.class_names)
    if str(wanted) == "uniform":
        return Prior("uniform", (1 / n,) * n)
    if str(wanted) == "training":
        total = sum(model.training_counts)
        if not total:
            raise InvalidInput(f"{model.name} does not say how many images it has learned. Give a file.")
        return Prior("training", tuple(count / total for count in model.training_counts))
    path = Path(wanted)
    if not path.is_file():
        raise InvalidInput(
            f"The prior {str(wanted)!r} is neither `uniform` nor `training` nor a file ({', '.join(TABLES)})."
        )
    return Prior(path.name, _checked(_read_shares(path), model.class_names, path))


def _read_shares(path: Path) -> Mapping[str, Any]:
    """Read the shares by class, unparsed."""
    import yaml

    from medcil.recipe import load_yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _read_rows(text, path)
        # Names as they are written: YAML would take a class called `no` for false, and `010` for eight.
        content = load_yaml(text, source=str(path), as_text=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"{path} cannot be read ({reason}). Write lines `class: share`.") from None
    if not isinstance(content, Mapping):
        raise InvalidInput(f"{path} holds no shares. Write lines `class: share`.")
    return content


def _read_rows(text: str, path: Path) -> Mapping[str, Any]:
    from medcil.data.sources.manifest import csv_rows

    rows = [[cell.strip() for cell in row] for row in csv_rows(text.encode(), str(path)) if any(row)]
    if rows and finite_number(rows[0][-1]) is None:  # a header
        rows = rows[1:]
    shares = {row[0]: row[-1] for row in rows}
    if len(shares) < len(rows) or any(len(row) != 2 for row in rows):
        raise InvalidInput(f"{path} has a class twice, or not two cells in each row: write class,share.")
    return shares


def _checked(shares: Mapping[str, Any], class_names: tuple[str, ...], path: Path) -> tuple[float, ...]:
    for name in shares:
        if name not in class_names:
            raise InvalidInput(
                f"{path}: the model knows no class {name!r}. {known_classes(name, class_names)}"
            )
    numbers = []
    for name in class_names:
        if name not in shares:
            raise InvalidInput(f"{path} has no share for {name!r}: add it, or 0 where it never occurs.")
        number = finite_number(shares[name])
        if number is None or number < 0:
            raise InvalidInput(f"{path}: the share of {name!r} is {shares[name]!r}, no number from 0 to 1.")
        numbers.append(number)
    total = math.fsum(numbers)
    if abs(total - 1) > ROUNDING:
        percent = " Are these percent? Divide by 100." if abs(total - 100) <= 100 * ROUNDING else ""
        raise InvalidInput(f"{path}: the shares sum to {total:g}, not to 1: correct them.{percent}")
    return tuple(number / total for number in numbers)


def finite_number(value: Any) -> float | None:
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


YES_NO = {True: "yes", False: "no", None: ""}


@dataclass(frozen=True)
class Prediction:
    """The answer for one image; an image that cannot be read has an error and nothing else."""

    file: str
    error: str | None = None
    predicted: str | None = None
    probability: float | None = None
    probabilities: tuple[float, ...] = ()
    """Of every class, in the order of the model."""
    is_unlike: bool | None = None
    """Whether the image is unlike anything known."""
    likeness: float | None = None
    is_abstained: bool | None = None
    """Whether the probability is too low for an answer."""
    flags: tuple[bool, ...] = ()
    """Whether each class with an operating point reaches its threshold."""


@dataclass(frozen=True)
class Predictions:
    rows: tuple[Prediction, ...]
    class_names: tuple[str, ...]
    version: str
    prior: Prior
    operating_points: tuple[OperatingPoint, ...]
    top_k: int
    notes: tuple[str, ...]
    """Remarks on the rows, in sentences."""

    @property
    def header(self) -> list[str]:
        ranks = range(2, min(self.top_k, len(self.class_names)) + 1)
        return [
            *("file", "predicted", "probability", "unlike", "abstained"),
            *(f"flag({point.class_name})" for point in self.operating_points),
            *(column for k in ranks for column in (f"top_{k}", f"top_{k}_probability")),
            *(f"p({name})" for name in self.class_names),
            *("likeness", "prior", "version", "error"),
        ]

    def write_csv(self, path: Path) -> None:
        with writing(path):
            write_csv(path, self.header, map(self._cells, self.rows))

    def _cells(self, row: Prediction) -> list[str]:
        if row.error is not None:
            empty = [""] * (len(self.header) - 4)
            return [printable(row.file), *empty, self.prior.name, self.version, printable(row.error)]
        ranked = sorted(range(len(self.class_names)), key=lambda c: -row.probabilities[c])[1 : self.top_k]
        return [
            *(printable(row.file), str(row.predicted), _digits(row.probability)),
            *(YES_NO[row.is_unlike], YES_NO[row.is_abstained]),
            *(YES_NO[flag] for flag in row.flags),
            *(cell for c in ranked for cell in (self.class_names[c], _digits(row.probabilities[c]))),
            *(_digits(probability) for probability in row.probabilities),
            *(_digits(row.likeness), self.prior.name, self.version, ""),
        ]


def predict(
    model: Path | str,
    images: str | Path | Sequence[str | Path],
    *,
    out: Path | str | None = None,
    prior: str | Path = "uniform",
    top_k: int = 3,
    sensitivity: Mapping[str, float] | None = None,
    abstain_below: float | None = None,
    version: str | None = None,
    execution: "ExecutionConfig | None" = None,
    watch: Watch = lambda done, total: None,
) -> Predictions:
    """Predict images, with one row for each, even if it cannot be read; write them to the CSV file `out`.

    Images are files, folders, archives or patterns. The prior is `uniform`, `training` or a file of shares.
    `sensitivity` flags a class from the probability at which that share of it is detected.
    """
    if top_k < 1:
        raise InvalidInput(f"top_k is {top_k}: give 1 or more.")
    if abstain_below is not None and not 0 < abstain_below <= 1:
        raise InvalidInput(f"abstain_below is {abstain_below:g}: give a probability between 0 and 1.")
    if out is not None:
        check_output_file(Path(out), b"file,predicted,")
    found = find_images([images] if isinstance(images, str | Path) else images)
    opened = open_model(Path(model), version=version, execution=execution)
    chosen = choose_prior(opened, prior)
    for name, share in (sensitivity or {}).items():
        check_sensitivity(name, share, opened.class_names)
    points, notes = _measured_on_holdout(opened, chosen, sensitivity or {}, abstain_below)

    names, decode = [image.name for image in found], lambda i: found[i].decode(opened.side)
    rows = tuple(predictions(opened, names, decode, chosen, points, abstain_below, watch))
    notes += _counted(opened, rows)
    result = Predictions(rows, opened.class_names, opened.name, chosen, tuple(points), top_k, tuple(notes))
    if out is not None:
        result.write_csv(Path(out))
    return result


def predictions(
    model: OpenModel,
    names: Sequence[str],
    decode: Callable[[int], UInt8[np.ndarray, "3 side side"]],
    prior: Prior,
    points: Sequence[OperatingPoint] = (),
    abstain_below: float | None = None,
    watch: Watch = lambda done, total: None,
) -> Iterator[Prediction]:
    """Yield the answer for each image; `decode` returns the pixels of the i-th, or raises InvalidInput.

    An image that cannot be read has an error in its place; no other answer changes.
    """
    thresholds = [(model.class_names.index(point.class_name), point.threshold) for point in points]
    for images, pixels, errors in _decoded(range(len(names)), decode, model.side):
        scores, likeness = model.answer(pixels)
        is_finite = np.all(np.isfinite(scores), axis=1)
        shares = model.calibration.probabilities(np.where(is_finite[:, None], scores, 0), prior.shares)
        is_unlike = model.calibration.is_unlike(likeness)
        watch(images.stop, len(names))
        for place, i in enumerate(images):
            row, error = shares[place], errors[place]
            if error is None and not is_finite[place]:
                error = "The model's scores for it are not finite; train the model again."
            if error is not None:
                yield Prediction(names[i], error)
                continue
            yield Prediction(
                file=names[i],
                predicted=model.class_names[int(row.argmax())],
                probability=float(row.max()),
                probabilities=tuple(row.tolist()),
                is_unlike=bool(is_unlike[place]),
                likeness=float(likeness[place]),
                is_abstained=None if abstain_below is None else bool(row.max() < abstain_below),
                flags=tuple(bool(row[c] >= threshold) for c, threshold in thresholds),
            )


def _decoded(
    images: range, decode: Callable[[int], UInt8[np.ndarray, "3 side side"]], side: int
) -> Iterator[tuple[range, Pixels, list[str | None]]]:
    """Yield batches of images, their pixels, and why an image cannot be read.

    Threads decode one batch while the previous one is computed, so at most two are in memory.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        coming = [pool.submit(decode, i) for i in images[:BATCH]]
        for first in images[::BATCH]:
            now, coming = coming, [pool.submit(decode, i) for i in images[first + BATCH : first + 2 * BATCH]]
            # A black image replaces one that cannot be read, because rounding depends on the size of a batch.
            pixels = np.zeros((len(now), 3, side, side), dtype=np.uint8)
            errors: list[str | None] = [None] * len(now)
            for place, image in enumerate(now):
                try:
                    pixels[place] = image.result()
                except (InvalidInput, OSError, MemoryError) as error:
                    errors[place] = (str(error).splitlines() or [type(error).__name__])[0]
            yield images[first : first + BATCH], pixels, errors


def _measured_on_holdout(
    model: OpenModel, prior: Prior, sensitivity: Mapping[str, float], abstain_below: float | None
) -> tuple[list[OperatingPoint], list[str]]:
    """Return the operating points, and remarks on what the hold-out supports."""
    notes = [*model.calibration.notes]
    if not sensitivity and (abstain_below is None or model.folder is None):
        return [], notes
    scores, labels, groups = model.holdout_answers()
    probabilities = model.calibration.probabilities(scores, prior.shares)
    points = operating_points(probabilities, labels, model.class_names, sensitivity, groups)
    notes += [point.sentence for point in points]
    if abstain_below is not None:
        notes.append(abstention_sentence(probabilities, labels, abstain_below, groups))
    return points, notes


def _counted(model: OpenModel, rows: Sequence[Prediction]) -> list[str]:
    read = [row for row in rows if row.error is None]
    notes = []
    if len(read) < len(rows):
        notes.append(f"{len(rows) - len(read):,} of {len(rows):,} files cannot be read; their rows say why.")
    rate = model.calibration.unlike.false_alarms
    if rate is None:
        notes.append("Whether an image is unlike anything known was never measured for this model.")
    elif read:
        n = sum(bool(row.is_unlike) for row in read)
        measured_on = model.calibration.unlike.measured_on
        set_on = "images of --eval" if measured_on == "eval" else measured_on
        notes.append(
            f"{n:,} of {len(read):,} images are unlike anything known; of the images of any known class up "
            f"to {100 * rate:.3g}% are falsely called so (set on the {set_on})."
        )
    return notes


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
