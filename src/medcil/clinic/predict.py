"""A model's answers on images, in rows: calibrated, under a named prior. See docs/how-to/predict.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from medcil.clinic.image_paths import find_images
from medcil.clinic.inference import OpenModel, Watch, answers, open_model
from medcil.clinic.priors import Prior, choose_prior
from medcil.clinic.thresholds import (
    OperatingPoint,
    abstention_sentence,
    check_sensitivity,
    operating_points,
)
from medcil.data.wording import printable
from medcil.errors import InvalidInput
from medcil.storage.atomic import write_csv
from medcil.storage.os_errors import writing
from medcil.storage.overwrite_guard import check_output_file

if TYPE_CHECKING:
    from medcil.config import ExecutionConfig

YES_NO = {True: "yes", False: "no", None: ""}


@dataclass(frozen=True)
class Prediction:
    """Of one image; an image that cannot be read has its error, and nothing else."""

    file: str
    error: str | None = None
    predicted: str | None = None
    probability: float | None = None
    probabilities: tuple[float, ...] = ()
    """Of every class of the model, in its order."""
    is_unlike: bool | None = None
    """Unlike anything known."""
    likeness: float | None = None
    is_abstained: bool | None = None
    """The probability is too low for an answer to be given."""
    flags: tuple[bool, ...] = ()
    """Whether the classes with an operating point reach it."""


@dataclass(frozen=True)
class Predictions:
    rows: tuple[Prediction, ...]
    class_names: tuple[str, ...]
    version: str
    prior: Prior
    operating_points: tuple[OperatingPoint, ...]
    top_k: int
    notes: tuple[str, ...]
    """What whoever reads the rows should know, in sentences."""

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

    def table(self) -> list[list[str]]:
        return [self._cells(row) for row in self.rows]

    def write_csv(self, path: Path) -> None:
        with writing(path):
            write_csv(path, self.header, self.table())

    def _cells(self, row: Prediction) -> list[str]:
        n_top = min(self.top_k, len(self.class_names)) - 1
        if row.error is not None:
            empty = [""] * (4 + len(self.operating_points) + 2 * n_top + len(self.class_names) + 1)
            return [printable(row.file), *empty, self.prior.name, self.version, printable(row.error)]
        ranked = top_classes(row.probabilities, n_top + 1)[1:]
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
    """A row for each image, also for one that cannot be read; written to `out`, a CSV file, where given.

    Images are files, folders, archives or patterns. The prior is `uniform`, `training` or a file of shares.
    `sensitivity` flags a class from the probability on at which so large a share of it is caught.
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

    rows: list[Prediction] = []
    for batch in answers(opened, len(found), lambda i: found[i].decode(opened.side), watch):
        probabilities = opened.calibration.probabilities(batch.scores, chosen.shares)
        is_unlike = opened.calibration.is_unlike(batch.likeness)
        for place, error in enumerate(batch.errors):
            name = found[batch.first + place].name
            if error is not None:
                rows.append(Prediction(name, error))
                continue
            of_image = probabilities[place]
            rows.append(
                Prediction(
                    file=name,
                    predicted=opened.class_names[int(of_image.argmax())],
                    probability=float(of_image.max()),
                    probabilities=tuple(of_image.tolist()),
                    is_unlike=bool(is_unlike[place]),
                    likeness=float(batch.likeness[place]),
                    is_abstained=None if abstain_below is None else bool(of_image.max() < abstain_below),
                    flags=_flags(of_image, opened.class_names, points),
                )
            )
    notes += _counted(opened, rows)
    predictions = Predictions(
        tuple(rows), opened.class_names, opened.name, chosen, tuple(points), top_k, tuple(notes)
    )
    if out is not None:
        predictions.write_csv(Path(out))
    return predictions


def top_classes(probabilities: Sequence[float], k: int) -> list[int]:
    """The most probable classes, the first of equal ones first."""
    return sorted(range(len(probabilities)), key=lambda c: -probabilities[c])[:k]


def _measured_on_holdout(
    model: OpenModel, prior: Prior, sensitivity: Mapping[str, float], abstain_below: float | None
) -> tuple[list[OperatingPoint], list[str]]:
    """The operating points, and sentences about what is known of them."""
    notes = [*model.calibration.notes]
    if not sensitivity and (abstain_below is None or model.read_holdout is None):
        return [], notes
    scores, labels, groups = model.holdout_answers()
    probabilities = model.calibration.probabilities(scores, prior.shares)
    points = operating_points(probabilities, labels, model.class_names, sensitivity, groups)
    notes += [point.sentence() for point in points]
    if abstain_below is not None:
        notes.append(abstention_sentence(probabilities, labels, abstain_below, groups))
    return points, notes


def _flags(
    probabilities: Float[np.ndarray, "classes"], class_names: Sequence[str], points: Sequence[OperatingPoint]
) -> tuple[bool, ...]:
    return tuple(bool(probabilities[class_names.index(p.class_name)] >= p.threshold) for p in points)


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
