"""Evaluate a model on labelled images: by image, by patient, by subgroup. Docs: docs/how-to/evaluate.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Real, UInt8

from medcil.clinic.inference import OpenModel, Watch, digest, open_model
from medcil.clinic.predict import Prediction, Prior, choose_prior, finite_number, predictions
from medcil.config import ExecutionConfig
from medcil.data.image_table import ImageTable
from medcil.data.sources import list_images
from medcil.data.sources.folder import folded
from medcil.errors import InvalidInput, known_classes, printable
from medcil.metrics.classification import (
    auroc,
    brier_score,
    calibration_error,
    class_rates,
    cohen_kappa,
    defined,
    mean_accuracy,
    mean_sensitivity,
    reliability_curve,
    weighted_confusions,
)
from medcil.metrics.intervals import (
    groups_at,
    independent_images,
    interval_of_mean,
    percentiles,
    resamplings,
    wilson,
)
from medcil.report.evaluation import write_markdown, write_page
from medcil.storage.atomic import reading, write_json, writing
from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder

FORMAT = 1
PAGE, NUMBERS, TABLES = "evaluation.html", "evaluation.json", "evaluation.md"
DRAWS = 1000
SHOWN = 20  # unreadable files in the report
RATES = ("sensitivity", "specificity", "ppv", "npv")
CALIBRATED_DRAWS = 200
"""Simulated answers of a perfectly calibrated model."""
SMALLEST_BIN = 10
"""Mean number of images in a bin of the calibration curve; there are at most 15 bins."""


@dataclass(frozen=True)
class Evaluation:
    content: dict[str, Any]
    """The content of evaluation.json."""

    @property
    def notes(self) -> list[str]:
        return list(self.content["notes"])

    def write(self, folder: Path) -> list[Path]:
        """Write evaluation.json, evaluation.md and, if the extra `report` is installed, evaluation.html."""
        written = [folder / NUMBERS, folder / TABLES]
        claim_output_folder(folder, "evaluate")
        with writing(folder):
            write_json(written[0], self.content)
            write_markdown(self.content, written[1])
            with suppress(ImportError):
                write_page(self.content, folder / PAGE)
                written.append(folder / PAGE)
        return written


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Labels and predicted probabilities of images or patients."""

    labels: Int[np.ndarray, "n"]
    probabilities: Float[np.ndarray, "n classes"]
    groups: tuple[str, ...] | None
    """Patients; the bootstrap draws all images of one."""

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, chosen: Int[np.ndarray, "m"]) -> "Evaluated":
        return Evaluated(self.labels[chosen], self.probabilities[chosen], groups_at(self.groups, chosen))

    @property
    def predictions(self) -> Int[np.ndarray, "n"]:
        return np.asarray(self.probabilities.argmax(axis=1))

    @property
    def is_right(self) -> Bool[np.ndarray, "n"]:
        return np.asarray(self.predictions == self.labels)

    @property
    def confidence(self) -> Float[np.ndarray, "n"]:
        return np.asarray(self.probabilities.max(axis=1))

    @property
    def n_bins(self) -> int:
        return max(1, min(15, len(self) // SMALLEST_BIN))


def evaluate(
    model: Path | str,
    data: Path | str,
    *,
    out: Path | str | None = None,
    prior: str | Path = "uniform",
    grades: Sequence[str] | None = None,
    all_images: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
    version: str | None = None,
    execution: ExecutionConfig | None = None,
    watch: Watch = lambda done, total: None,
) -> Evaluation:
    """Measure a model with 95% intervals; write the results to the folder `out`, if there is one.

    If the data has a split, its test images are used, unless `all_images`. `grades` names all classes from
    the lowest to the highest grade, for the quadratic kappa.
    """
    if out is not None:
        check_output_folder(Path(out), "evaluate")
    opened = open_model(Path(model), version=version, execution=execution)
    chosen = choose_prior(opened, prior)
    order = None if grades is None else _grade_order(grades, opened.class_names)
    with reading(Path(data)):
        table = list_images(Path(data), fewest_classes=1)
    table, notes = _used(table, opened, all_images=all_images)
    rows, labels, image_notes = _answered(table, opened, chosen, watch)
    evaluated, known = _known(table, rows, labels)
    measured = partial(figures, class_names=opened.class_names, draws=draws, seed=seed, order=order)
    columns = {name: [cells[i] for i in known] for name, cells in table.columns.items()}
    groups, group_notes = subgroups(columns)
    patients, patient_notes = of_patients(evaluated)
    others = [row for row, label in zip(rows, labels, strict=True) if label < 0 and row.error is None]
    unreadable = [printable(row.file) for row in rows if row.error is not None]
    unit = "images" if evaluated.groups is None else "patients"
    content = {
        "format": FORMAT,
        "version": opened.name,
        "data": printable(Path(data).name),
        "prior": {"name": chosen.name, "shares": dict(zip(opened.class_names, chosen.shares, strict=True))},
        "classes": list(opened.class_names),
        "notes": [*notes, *image_notes, *patient_notes, *group_notes],
        "unreadable": unreadable[:SHOWN],
        "by_image": measured(evaluated) | curves(evaluated),
        "by_patient": None if patients is None else measured(patients) | curves(patients),
        "by_subgroup": {
            column: {
                value: measured(evaluated.select(np.flatnonzero([each == value for each in values])))
                for value in in_order(values)
            }
            for column, values in groups.items()
        },
        "unlike": {
            "stated_false_alarms": opened.calibration.unlike.false_alarms,
            "known_classes": _share_unlike([rows[i] for i in known]),
            "other_classes": _share_unlike(others),
        },
        "intervals": {"level": 0.95, "draws": draws, "seed": seed, "unit": unit},
    }
    evaluation = Evaluation(content)
    if out is not None:
        evaluation.write(Path(out))
    return evaluation


def _used(table: ImageTable, model: OpenModel, *, all_images: bool) -> tuple[ImageTable, list[str]]:
    """Select the images, including those of unknown classes; return remarks on what is left out."""
    notes, n_images = [], len(table)
    if table.is_test is not None and not all_images and table.is_test.any():
        table = table.select(np.flatnonzero(table.is_test))
        notes.append(f"The data has a split: {len(table):,} test images of {n_images:,} images are used.")
    there = {folded(name): name for name in (table.class_names[c] for c in np.unique(table.labels))}
    known = {folded(name): name for name in model.class_names}
    unknown = sorted(name for key, name in there.items() if key not in known)
    if len(unknown) == len(there):
        hint = known_classes(unknown[0], model.class_names)
        raise InvalidInput(f"The model knows none of these classes: {', '.join(unknown[:5])}. {hint}")
    if unknown:
        n = int(np.isin(table.labels, [table.class_names.index(name) for name in unknown]).sum())
        notes.append(f"The model does not know {', '.join(unknown)}: {n:,} images are left out.")
    if absent := [name for key, name in known.items() if key not in there]:
        notes.append(f"There is no image of {', '.join(absent)}: how well it is recognized stays unknown.")
    return table, [*notes, *table.remarks]


def _answered(
    table: ImageTable, model: OpenModel, prior: Prior, watch: Watch
) -> tuple[list[Prediction], Int[np.ndarray, "n"], list[str]]:
    """Predict all images; return also their labels, -1 for an unknown class, and remarks."""
    exemplars = set[int]()

    def decode(i: int) -> UInt8[np.ndarray, "3 side side"]:
        pixels = table.decode(i, model.side).numpy()
        if digest(pixels) in model.exemplars:
            exemplars.add(i)
        return pixels

    rows, notes = list(predictions(model, table.names, decode, prior, watch=watch)), []
    in_model = {folded(name): c for c, name in enumerate(model.class_names)}
    labels = np.array([in_model.get(folded(name), -1) for name in table.class_names])[table.labels]
    if unreadable := sum(row.error is not None for row in rows):
        notes.append(f"{unreadable:,} of {len(rows):,} images cannot be read and are left out.")
    if n := len(exemplars):  # other training images cannot be recognized
        notes.append(f"{n:,} of these images are exemplars, which were trained on: figures are too good.")
    return rows, labels, notes


def _known(
    table: ImageTable, rows: Sequence[Prediction], labels: Int[np.ndarray, "n"]
) -> tuple[Evaluated, Int[np.ndarray, "m"]]:
    """Select the readable images of known classes; return their places, too."""
    errors = [row.error for row in rows]
    known = np.array([i for i in np.flatnonzero(labels >= 0) if errors[i] is None], dtype=np.int64)
    if not len(known):
        of_known = [errors[i] for i in np.flatnonzero(labels >= 0)]
        raise InvalidInput(f"None of the {len(of_known)} images of known classes can be read: {of_known[0]}")
    probabilities = np.array([rows[i].probabilities for i in known])
    return Evaluated(labels[known], probabilities, groups_at(table.groups, known)), known


def _grade_order(grades: Sequence[str], class_names: tuple[str, ...]) -> list[int]:
    for name in grades:
        if name not in class_names:
            raise InvalidInput(f"The model knows no class {name!r}. {known_classes(name, class_names)}")
    if sorted(grades) != sorted(class_names):
        raise InvalidInput(f"Grades need every class once, from the lowest to the highest: {class_names}.")
    return [class_names.index(name) for name in grades]


def _share_unlike(rows: Sequence[Prediction]) -> dict[str, Any] | None:
    """Count the images called unlike anything known."""
    n, flagged = len(rows), sum(bool(row.is_unlike) for row in rows)
    if not n:
        return None
    low, high = wilson(flagged, n)
    return {"n": n, "flagged": flagged, "value": flagged / n, "low": low, "high": high}


def figures(
    evaluated: Evaluated,
    class_names: Sequence[str],
    *,
    draws: int,
    seed: int,
    order: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Compute all figures, with a quadratic kappa if `order` ranks the classes from the lowest grade."""
    n, n_classes = len(evaluated), len(class_names)
    values = {name: one[0] for name, one in _compute(evaluated, np.ones((1, n)), order).items()}
    blocks = [
        _compute(evaluated, weights, order)
        for weights in resamplings(n, evaluated.groups, draws=draws, seed=seed)
    ]

    def bounds(name: str, c: int | None) -> tuple[float, float]:
        low, high = math.nan, math.nan
        if blocks:
            low, high = percentiles(np.concatenate([b[name] if c is None else b[name][:, c] for b in blocks]))
        if name == "balanced_accuracy":
            counted = _mean_of_shares(evaluated)
        elif name in ("accuracy", *RATES):
            counted = _share(evaluated, name, c)
        elif name == "ece" and blocks:
            return _ece_bounds(evaluated, float(values["ece"]), high, seed)
        elif low == high:  # the same in every draw: too few images, not a figure beyond doubt
            return math.nan, math.nan
        else:
            return low, high
        # Drawing again from 20 images that are all right finds no doubt; Wilson does. The wider of both.
        return float(np.nanmin([low, counted[0]])), float(np.nanmax([high, counted[1]]))

    def interval(name: str, c: int | None = None) -> dict[str, float | None]:
        value = float(values[name] if c is None else values[name][c])
        low, high = (math.nan, math.nan) if math.isnan(value) else bounds(name, c)
        return {key: defined(number) for key, number in (("value", value), ("low", low), ("high", high))}

    overall = [name for name, value in values.items() if np.ndim(value) == 0]
    support = np.bincount(evaluated.labels, minlength=n_classes)
    return {
        "n": n,
        **{name: interval(name) for name in overall},
        "classes": [
            {"name": name, "n": int(support[c])} | {key: interval(key, c) for key in (*RATES, "class_auroc")}
            for c, name in enumerate(class_names)
        ],
    }


def curves(evaluated: Evaluated) -> dict[str, Any]:
    """Compute the confusion matrix and the calibration curve."""
    ones = np.ones((1, len(evaluated)))
    n_classes = evaluated.probabilities.shape[1]
    confusion = weighted_confusions(evaluated.labels, evaluated.predictions, ones, n_classes)[0]
    bins = reliability_curve(evaluated.confidence, evaluated.is_right, n_bins=evaluated.n_bins)
    bounds = (wilson(round(b["accuracy"] * b["images"]), b["images"]) for b in bins)
    reliability = [b | {"low": low, "high": high} for b, (low, high) in zip(bins, bounds, strict=True)]
    return {"confusion": confusion.astype(int).tolist(), "reliability": reliability}


def by_patient(evaluated: Evaluated) -> tuple[Evaluated, int]:
    """Average the probabilities of each patient's images; return how many patients are left out.

    Patients with images of several classes are left out, because they have no single label.
    """
    _, first, places = np.unique(np.asarray(evaluated.groups), return_index=True, return_inverse=True)
    labels, counts = evaluated.labels[first], np.bincount(places)
    is_one = np.bincount(places, weights=evaluated.labels != labels[places]) == 0
    sums = [np.bincount(places, weights=column) for column in evaluated.probabilities.T]
    means = np.stack(sums, axis=1) / counts[:, None]
    return Evaluated(labels[is_one], means[is_one], None), int((~is_one).sum())


def _compute(
    evaluated: Evaluated, weights: Real[np.ndarray, "draws n"], order: Sequence[int] | None
) -> Mapping[str, Float[np.ndarray, "draws ..."]]:
    labels, probabilities = evaluated.labels, evaluated.probabilities
    n_classes = probabilities.shape[1]
    confusions = weighted_confusions(labels, evaluated.predictions, weights, n_classes)
    areas = np.stack([auroc(labels == c, probabilities[:, c], weights) for c in range(n_classes)], axis=1)
    with np.errstate(invalid="ignore"):  # 0 / 0 where no class has an area
        mean_area = np.nansum(areas, axis=1) / (~np.isnan(areas)).sum(axis=1)
    ranked = None if order is None else confusions[:, order][:, :, order]
    quadratic = {} if ranked is None else {"quadratic_kappa": cohen_kappa(ranked, quadratic=True)}
    return {
        "accuracy": mean_accuracy(confusions),
        "balanced_accuracy": mean_sensitivity(confusions),
        "auroc": mean_area,
        "kappa": cohen_kappa(confusions),
        **quadratic,
        "ece": calibration_error(evaluated.confidence, evaluated.is_right, weights, n_bins=evaluated.n_bins),
        "brier": brier_score(labels, probabilities, weights),
        **class_rates(confusions),
        "class_auroc": areas,
    }


def _ece_bounds(evaluated: Evaluated, value: float, highest: float, seed: int) -> tuple[float, float]:
    """Return the 95% interval of an ECE.

    Chance adds to an ECE, and again to a bootstrapped one; the interval mirrors that bias (basic bootstrap).
    If a perfectly calibrated model would show an ECE this large, the interval starts at zero.
    """
    confidence = evaluated.confidence
    generator, ones = np.random.Generator(np.random.Philox(seed)), np.ones((1, len(evaluated)))
    answers = (generator.random(len(confidence)) < confidence for _ in range(CALIBRATED_DRAWS))
    errors = [calibration_error(confidence, right, ones, n_bins=evaluated.n_bins) for right in answers]
    is_chance = value <= np.quantile(np.concatenate(errors), 0.975)
    return 0.0 if is_chance else max(0.0, 2 * value - highest), highest


def _share(evaluated: Evaluated, name: str, c: int | None) -> tuple[float, float]:
    """Return Wilson's interval of a share of images.

    If all or none are hits, differences between patients are invisible: a patient's images then count as one.
    """
    labels, predicted = evaluated.labels, evaluated.predictions
    hits, among = {
        "accuracy": (predicted == labels, np.ones(len(labels), dtype=bool)),
        "sensitivity": (predicted == c, labels == c),
        "specificity": (predicted != c, labels != c),
        "ppv": (labels == c, predicted == c),
        "npv": (labels != c, predicted != c),
    }[name]
    n_hits, n = int((hits & among).sum()), int(among.sum())
    if evaluated.groups is None or n_hits not in (0, n):
        return wilson(n_hits, n)
    independent = independent_images(n, groups_at(evaluated.groups, among))
    return wilson(independent if n_hits else 0, independent)


def _mean_of_shares(evaluated: Evaluated) -> tuple[float, float]:
    """Return the interval of the balanced accuracy, combining the distances of all classes (MOVER)."""
    there = np.unique(evaluated.labels).tolist()
    bounds = np.array([_share(evaluated, "sensitivity", c) for c in there])
    values = np.array([(evaluated.predictions == c)[evaluated.labels == c].mean() for c in there])
    low, high = interval_of_mean(values, bounds[:, 0], bounds[:, 1])
    return max(0.0, low), min(1.0, high)


def of_patients(evaluated: Evaluated) -> tuple[Evaluated | None, list[str]]:
    if evaluated.groups is None:
        return None, ["Patients are not known: images are taken to be independent of each other."]
    if len(set(evaluated.groups)) == len(evaluated):
        return None, ["Every image is of another patient: figures by patient are those by image."]
    patients, n_mixed = by_patient(evaluated)
    if not len(patients):
        return None, ["Every patient has images of several classes: there are no figures by patient."]
    mixed = f"{n_mixed:,} patients have images of several classes: they are left out of figures by patient."
    return patients, [mixed] if n_mixed else []


AGES = (20, 40, 60, 80)
MOST_VALUES = 12
"""A column with more words, or with more values than half the images, names images rather than groups."""
MOST_NUMBERS = 6
"""More numbers are grouped into ranges."""
UNKNOWN = "unknown"


def subgroups(columns: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the subgroup of each image by column, and a remark on each column without subgroups."""
    groups: dict[str, list[str]] = {}
    notes = []
    for name, cells in columns.items():
        values = [cell.strip() or UNKNOWN for cell in cells]
        known = set(values) - {UNKNOWN}
        if len(known) > MOST_NUMBERS and all(finite_number(value) is not None for value in known):
            values = _ranged(name, values)
        elif (n := len(set(values))) > min(MOST_VALUES, max(2, len(values) // 2)):
            notes.append(f"The column {name!r} has {n} different values: too many for subgroups.")
            continue
        if len(set(values) - {UNKNOWN}) > 1:
            groups[name] = values
    return groups, notes


def in_order(values: Iterable[str]) -> list[str]:
    """List each subgroup once: ranges and numbers by size, then words, `unknown` last."""

    def place(value: str) -> tuple[int, float, str]:
        if value == UNKNOWN:
            return 2, 0.0, value
        number = -math.inf if value.startswith("below ") else finite_number(value.split()[0])
        return (1, 0.0, value) if number is None else (0, number, value)

    return sorted(set(values), key=place)


def _ranged(name: str, values: Sequence[str]) -> list[str]:
    numbers = [finite_number(value) for value in values]
    known = np.array([number for number in numbers if number is not None])
    edges = (
        AGES if "age" in name.split("_") else tuple(np.unique(np.quantile(known, [0.25, 0.5, 0.75])).tolist())
    )
    names = [f"below {edges[0]:g}"]
    names += [f"{low:g} to below {high:g}" for low, high in pairwise(edges)]
    names += [f"{edges[-1]:g} and more"]
    return [UNKNOWN if n is None else names[int(np.searchsorted(edges, n, side="right"))] for n in numbers]
