"""A dataset as its owners distribute it is read as that: its classes, and what belongs together."""

import csv
from pathlib import Path

import pytest

import medcil
from medcil.clinic.holdout import read_images, set_aside
from medcil.errors import InvalidInput

from .generated import QUICK, write_folder


def write_ham10000(root: Path, **diagnoses: str) -> Path:
    """Its layout, with generated images in it: two of each lesion."""
    write_folder(root, *diagnoses, images=20)
    rows = []
    for folder, diagnosis in diagnoses.items():
        for path in sorted((root / folder).iterdir()):
            name = f"ISIC_{len(rows):07d}"
            path.rename(root / f"{name}.jpg")  # what it holds is PNG: formats are known by content
            rows.append([f"HAM_{len(rows) // 2:07d}", name, diagnosis])
        (root / folder).rmdir()
    with (root / "HAM10000_metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["lesion_id", "image_id", "dx"], *rows])
    return root


def test_ham10000_is_learned_from_as_it_comes(tmp_path):
    """With the classes that are there; of a lesion all images are sealed, or none."""
    data = write_ham10000(tmp_path / "data", alpha="mel", beta="bcc", gamma="df")
    done = medcil.train(data, tmp_path / "model", **QUICK)
    assert done.provenance["images"] == {"MEL": 16, "BCC": 16, "DF": 16}
    given = read_images(data, 32, version="v1", fewest_classes=2)
    train, sealed = set_aside(given, 20, seed=0)
    groups = given.groups
    assert groups is not None
    assert given.counts(sealed) == done.provenance["holdout"]
    assert len({groups[i] for i in sealed.tolist()}) == len(sealed) / 2
    assert {groups[i] for i in train.tolist()}.isdisjoint(groups[i] for i in sealed.tolist())
    later = write_ham10000(tmp_path / "later", delta="vasc")
    medcil.update(tmp_path / "model", later, epochs=1)
    assert medcil.history(tmp_path / "model")[1]["classes_added"] == ["VASC"]
    with pytest.raises(InvalidInput, match="Give at least two"):
        medcil.train(later, tmp_path / "other")
