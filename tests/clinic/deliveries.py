"""Images of patients with several classes, and analytic models of them with and without a patient."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import medcil
from medcil.clinic.model_dir import ModelFolder
from medcil.config import ExecutionConfig
from medcil.readouts.ridge import Ridge
from medcil.training.inference import predict_scores
from medcil.training.state import State

from .generated import FEW, QUICK, write_folder

PATIENT = "PERSON-2"
CPU = ExecutionConfig(device="cpu", threads=1)
Edit = Callable[[list[str]], bool]


def write_deliveries(root: Path) -> Path:
    """Two classes, then one more; three images of each class are of one patient, the last six are tests."""
    for part, names in (("first", ("alpha", "beta")), ("second", ("gamma",))):
        write_folder(root / part, *names, images=36)
        rows = [
            [
                path.relative_to(root / part).as_posix(),
                path.parent.name,
                person_of(path),
                "test" if int(path.stem) >= 30 else "train",
            ]
            for path in sorted((root / part).glob("*/*.png"))
        ]
        write_rows(root / part, rows)
    return root


def person_of(path: Path) -> str:
    number = int(path.stem)
    return f"{path.parent.name}-{number}" if number >= 30 else f"PERSON-{number // 3}"


def write_rows(folder: Path, rows: list[list[str]]) -> Path:
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "patient", "split"], *rows])
    return folder


def edited(root: Path, out: Path, keeps: Edit) -> Path:
    """Copy the deliveries; `keeps` may change a row of the manifest, and says whether it stays."""
    shutil.copytree(root, out)
    for part in ("first", "second"):
        with (out / part / "images.csv").open() as file:
            _, *rows = csv.reader(file)
        kept = [row for row in rows if keeps(row)]
        listed = {row[0] for row in kept}
        for path in (out / part).glob("*/*.png"):
            if path.relative_to(out / part).as_posix() not in listed:
                path.unlink()
        write_rows(out / part, kept)
    return out


def train_deliveries(root: Path, model: Path, *settings: str, keep_embeddings: bool = False) -> Path:
    options = {"settings": ("execution.threads=1", "data.views=2", "training.batch_size=7", *settings)}
    medcil.train(
        *(root / "first", model), method="analytic", keep_embeddings=keep_embeddings, **QUICK | options
    )
    medcil.update(model, root / "second", keep_embeddings=keep_embeddings, **FEW)
    return model


def images_of(root: Path, out: Path) -> Path:
    """A plain folder with the patient's images, under other names."""
    out.mkdir()
    for path in sorted(root.glob("*/*/*.png")):
        if person_of(path) == PATIENT:
            shutil.copy(path, out / f"{path.parent.name}-{path.name}")
    return out


def ridge_in(model: Path, version: str) -> Ridge:
    readout = state_of(model, version).readout
    assert isinstance(readout, Ridge)
    return readout


def state_of(model: Path, version: str) -> State:
    return ModelFolder(model).version(version).load_state()


def assert_equal_models(found: Path, expected: Path, version: str, *, other: str | None = None) -> None:
    """The same but for rounding: features of an image depend on its batch in their last digits."""
    one, two = state_of(found, version), state_of(expected, other or version)
    assert one.class_names == two.class_names
    assert one.inherent_counts.tolist() == two.inherent_counts.tolist()
    assert one.network.classifier.block_sizes == two.network.classifier.block_sizes
    ridges = [state.readout for state in (one, two)]
    assert ridges[0].counts.equal(ridges[1].counts)
    assert float(ridges[0].ridge) == pytest.approx(float(ridges[1].ridge), rel=1e-6)
    for name in ("sums", "moments", "weights", "class_means", "log_prior"):
        a, b = (getattr(ridge, name).double().numpy() for ridge in ridges)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()), err_msg=name)
    rows = [state.network.classifier.weight.detach().numpy() for state in (one, two)]
    np.testing.assert_allclose(*rows, atol=1e-5)
    images = ModelFolder(expected).version(other or version).holdout()
    scores = [predict_scores(state, images, CPU) / state.readout.sharpness.float() for state in (one, two)]
    assert len(images)
    np.testing.assert_allclose(*scores, atol=1e-5)
