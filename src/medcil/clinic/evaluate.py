"""Evaluate a model on labelled images: by image, by patient, by subgroup. Docs: docs/how-to/evaluate.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from medcil.clinic.evaluation_figures import Evaluated, curves, figures, in_order, of_patients, subgroups
from medcil.clinic.inference import OpenModel, Watch, answers, digest, open_model
from medcil.clinic.predict import Prior, choose_prior
from medcil.config import ExecutionConfig
from medcil.data.image_table import ImageTable
from medcil.data.sources import list_images
from medcil.data.sources.folder import folded
from medcil.errors import InvalidInput, nearest, printable
from medcil.metrics.intervals import wilson
from medcil.report.evaluation import write_markdown
from medcil.storage.atomic import reading, write_json, writing
from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder

FORMAT = 1
PAGE, NUMBERS, TABLES = "evaluation.html", "evaluation.json", "evaluation.md"
DRAWS = 1000
SHOWN = 20  # unreadable files in the report


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
            try:
                from medcil.report.evaluation import write_page
            except ImportError:
                return written
            write_page(self.content, folder / PAGE)
        return [*written, folder / PAGE]


@dataclass(frozen=True, eq=False)
class _Scored:
    """The answers for the images, in their order."""

    labels: Int[np.ndarray, "n"]
    """Index of the class in the model; -1 for an unknown class."""
    probabilities: Float[np.ndarray, "n classes"]
    is_unlike: Bool[np.ndarray, "n"]
    errors: Sequence[str | None]
    n_exemplars: int
    """Images that are exemplars of the model; other training images cannot be recognized."""

    @property
    def is_read(self) -> Bool[np.ndarray, "n"]:
        return np.array([error is None for error in self.errors])


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
    used, notes = _used(table, opened, all_images=all_images)
    scored = _score(table, used, opened, chosen, watch)
    evaluated, known = _known(table, used, scored)

    def measured(part: Evaluated) -> dict[str, Any]:
        return figures(part, opened.class_names, draws=draws, seed=seed, order=order)

    n_classes = len(opened.class_names)
    columns = {name: [cells[i] for i in known] for name, cells in table.columns.items()}
    groups, group_notes = subgroups(columns)
    patients, patient_notes = of_patients(evaluated)
    unit = "images" if evaluated.groups is None else "patients"
    unreadable = [table.names[used[i]] for i in np.flatnonzero(~scored.is_read)]
    content = {
        "format": FORMAT,
        "version": opened.name,
        "data": printable(Path(data).name),
        "prior": {"name": chosen.name, "shares": dict(zip(opened.class_names, chosen.shares, strict=True))},
        "classes": list(opened.class_names),
        "notes": [*notes, *_image_notes(scored, len(unreadable)), *patient_notes, *group_notes],
        "unreadable": [printable(name) for name in unreadable[:SHOWN]],
        "by_image": measured(evaluated) | curves(evaluated, n_classes),
        "by_patient": None if patients is None else measured(patients) | curves(patients, n_classes),
        "by_subgroup": {
            column: {
                value: measured(evaluated.select(np.flatnonzero([each == value for each in values])))
                for value in in_order(values)
            }
            for column, values in groups.items()
        },
        "unlike": _unlike(scored, opened.calibration.unlike.false_alarms),
        "intervals": {"level": 0.95, "draws": draws, "seed": seed, "unit": unit},
    }
    evaluation = Evaluation(content)
    if out is not None:
        evaluation.write(Path(out))
    return evaluation


def _used(table: ImageTable, model: OpenModel, *, all_images: bool) -> tuple[Int[np.ndarray, "n"], list[str]]:
    """Select the images, including those of unknown classes; return remarks on what is left out."""
    used, notes = np.arange(len(table.names)), []
    if table.is_test is not None and not all_images and table.is_test.any():
        used = np.flatnonzero(table.is_test)
        notes.append(f"The data has a split: {len(used):,} test images of {len(table):,} images are used.")
    there = {folded(name): name for name in (table.class_names[c] for c in np.unique(table.labels[used]))}
    known = {folded(name): name for name in model.class_names}
    unknown = sorted(name for key, name in there.items() if key not in known)
    if len(unknown) == len(there):
        hint = nearest(unknown[0], model.class_names)
        raise InvalidInput(f"The model knows none of these classes: {', '.join(unknown[:5])}. {hint}")
    if unknown:
        is_unknown = np.isin(table.labels[used], [table.class_names.index(name) for name in unknown])
        n, names = int(is_unknown.sum()), ", ".join(unknown)
        notes.append(f"The model does not know {names}: {n:,} images are left out.")
    if absent := [name for key, name in known.items() if key not in there]:
        notes.append(f"There is no image of {', '.join(absent)}: how well it is recognized stays unknown.")
    return used, notes


def _score(
    table: ImageTable, used: Int[np.ndarray, "n"], model: OpenModel, prior: Prior, watch: Watch
) -> _Scored:
    exemplars: set[int] = set()

    def decode(i: int) -> UInt8[np.ndarray, "3 side side"]:
        pixels = table.decode(int(used[i]), model.side).numpy()
        if digest(pixels) in model.exemplars:
            exemplars.add(i)
        return pixels

    batches = list(answers(model, len(used), decode, watch))
    scores = np.concatenate([batch.scores for batch in batches])
    in_model = {folded(name): c for c, name in enumerate(model.class_names)}
    return _Scored(
        np.array([in_model.get(folded(table.class_names[table.labels[i]]), -1) for i in used]),
        model.calibration.probabilities(scores, prior.shares),
        model.calibration.is_unlike(np.concatenate([batch.likeness for batch in batches])),
        [error for batch in batches for error in batch.errors],
        len(exemplars),
    )


def _known(
    table: ImageTable, used: Int[np.ndarray, "n"], scored: _Scored
) -> tuple[Evaluated, Int[np.ndarray, "m"]]:
    """Select the readable images of known classes; return their places in the table, too."""
    known = np.flatnonzero(scored.is_read & (scored.labels >= 0))
    if not len(known):
        of_known = [error for error, label in zip(scored.errors, scored.labels, strict=True) if label >= 0]
        raise InvalidInput(f"None of the {len(of_known)} images of known classes can be read: {of_known[0]}")
    groups = None if table.groups is None else tuple(table.groups[i] for i in used[known])
    return Evaluated(scored.labels[known], scored.probabilities[known], groups), used[known]


def _grade_order(grades: Sequence[str], class_names: tuple[str, ...]) -> list[int]:
    for name in grades:
        if name not in class_names:
            raise InvalidInput(f"The model knows no class {name!r}. {nearest(name, class_names)}")
    if sorted(grades) != sorted(class_names):
        raise InvalidInput(f"Grades need every class once, from the lowest to the highest: {class_names}.")
    return [class_names.index(name) for name in grades]


def _image_notes(scored: _Scored, n_unreadable: int) -> list[str]:
    notes = []
    if n_unreadable:
        n = len(scored.errors)
        notes.append(f"{n_unreadable:,} of {n:,} images cannot be read and are left out.")
    if n := scored.n_exemplars:
        notes.append(f"{n:,} of these images are exemplars, which were trained on: figures are too good.")
    return notes


def _unlike(scored: _Scored, stated: float | None) -> dict[str, Any]:
    """Count the images called unlike anything known: rightly for other classes, falsely for known ones."""

    def share(chosen: Bool[np.ndarray, "n"]) -> dict[str, Any] | None:
        n, flagged = int(chosen.sum()), int(scored.is_unlike[chosen].sum())
        if not n:
            return None
        low, high = wilson(flagged, n)
        return {"n": n, "flagged": flagged, "value": flagged / n, "low": low, "high": high}

    return {
        "stated_false_alarms": stated,
        "known_classes": share(scored.is_read & (scored.labels >= 0)),
        "other_classes": share(scored.is_read & (scored.labels < 0)),
    }
