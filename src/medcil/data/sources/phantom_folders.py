"""Synthetic images as a clinic might have them: folders to try the workflow with, nothing to download.

The classes are those of `medcil.data.sources.phantom`: no picture shows a patient and no class is a disease.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from medcil.data.sources.phantom import CODES, draw, image_rng
from medcil.errors import RunConflict
from medcil.storage.atomic import write_csv, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_model

FOLDERS: Mapping[str, Mapping[str, int]] = {
    "first": {"NV": 150, "BKL": 70, "DF": 25},
    "second": {"AKIEC": 60, "VASC": 40},
    "third": {"BCC": 50},
    "eval": dict.fromkeys(("NV", "BKL", "DF", "AKIEC", "VASC", "BCC"), 20),
}
"""Images of each class; what is in a folder has its own patients."""
UNLABELED = 12
SIDE = 64
MANIFEST = "images.csv"


class Drawn(NamedTuple):
    """A row of the manifest."""

    path: str
    label: str
    patient: str
    age: int
    sex: str


def write_phantom_images(out: Path, *, seed: int = 0) -> dict[str, int]:
    """Folders of images with a manifest each, and `new` without labels; returns how many are in each.

    They appear all at once: a call that is interrupted leaves nothing at `out`.
    """
    refuse_within_model(out)
    if out.exists():
        raise RunConflict(f"{out} is there already and is left as it is. Give another --out.")
    check_writable(out.parent)
    part = out.with_name(f".{out.name}.part")
    with writing(out):
        shutil.rmtree(part, ignore_errors=True)
        counts = _write(part, np.random.default_rng(seed), seed)
        part.rename(out)
    return counts


def _write(root: Path, rng: np.random.Generator, seed: int) -> dict[str, int]:
    counts, n_drawn, n_patients = {}, 0, 0
    for folder, classes in FOLDERS.items():
        rows = []
        for label, n_images in classes.items():
            for row in _rows(label, n_images, n_patients, rng):
                _save(root / folder / row.path, label, n_drawn, seed)
                rows.append(row)
                n_drawn += 1
            n_patients = int(rows[-1].patient[1:])
        write_csv(root / folder / MANIFEST, Drawn._fields, rows)
        counts[folder] = len(rows)
    known = [label for folder, classes in FOLDERS.items() if folder != "eval" for label in classes]
    for number in range(UNLABELED):
        _save(root / "new" / f"{number + 1:03d}.png", known[number % len(known)], n_drawn + number, seed)
    return {**counts, "new": UNLABELED}


def _rows(label: str, n_images: int, n_patients: int, rng: np.random.Generator) -> Iterator[Drawn]:
    """One or two images of a patient. Names of files tell nothing about patients."""
    left, age, sex = 0, 0, ""
    for number in range(n_images):
        if not left:
            n_patients += 1
            left, age, sex = int(rng.integers(1, 3)), int(rng.integers(18, 90)), "fm"[rng.integers(2)]
        left -= 1
        yield Drawn(f"{label}/{number + 1:03d}.png", label, f"P{n_patients:03d}", age, sex)


def _save(path: Path, label: str, index: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw(CODES.index(label), image_rng("train", index, seed), SIDE)).save(path)
