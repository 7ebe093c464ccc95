"""A patient is subtracted from the statistics of classes: the model is that of the other images."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import medcil
from medcil.clinic.corrections.learned import Learned, hash_patient
from medcil.clinic.model_dir import ModelFolder
from medcil.errors import RunConflict

from ..errors.raises import raises
from .deliveries import (
    PATIENT,
    assert_equal_models,
    edited,
    images_of,
    ridge_in,
    state_of,
    train_deliveries,
    write_deliveries,
    write_rows,
)
from .generated import QUICK, content, write_folder, write_manifest
from .patients import traces
from .test_story import exit_code, run

FROZEN = "method.adapt=never"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deliveries, those without the patient, and models of them."""
    root = tmp_path_factory.mktemp("subtracted")
    write_deliveries(root / "all")
    edited(root / "all", root / "others", lambda row: row[2] != PATIENT)
    images_of(root / "all", root / "theirs")
    train_deliveries(root / "all", root / "model", FROZEN)
    train_deliveries(root / "all", root / "embedded", FROZEN, keep_embeddings=True)
    train_deliveries(root / "others", root / "expected", FROZEN)
    return root


@pytest.fixture
def model(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "model", tmp_path / "model"))


@pytest.fixture
def embedded(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "embedded", tmp_path / "embedded"))


def hashes_of(model: Path) -> tuple[set[str], list[bytes]]:
    """What is kept of the patient: keyed hashes, and the bytes of embeddings."""
    version = ModelFolder(model).version()
    learned, patient = Learned.read(version), hash_patient(PATIENT, version.store)
    images = learned.of_patient(patient)
    features = learned.features(images, version.store).values()
    return {patient, *(entry.image for entry in images)}, [values[0].numpy().tobytes() for values in features]


def search(model: Path, root: Path, keyed: set[str], embeddings: list[bytes]) -> list[str]:
    found = traces(model, sorted((root / "theirs").iterdir()), PATIENT)
    for name, raw in content(model).items():
        found += [f"{name}: keyed hash" for value in keyed if value.encode() in raw]
        found += [f"{name}: embedding" for value in embeddings if value in raw]
    return found


@pytest.mark.parametrize("way", ["images", "embeddings"])
def test_the_model_is_the_one_that_never_had_the_patient(way, model, embedded, root):
    place, given = (model, root / "theirs") if way == "images" else (embedded, None)
    keyed, embeddings = hashes_of(place)
    assert (len(keyed), len(embeddings)) == (10, 0 if way == "images" else 9)
    kinds = {found.partition(": ")[2] for found in search(place, root, keyed, embeddings)}
    assert kinds == {"id", "keyed hash"} | ({"embedding"} if embeddings else set())
    done = medcil.erase(place, PATIENT.lower(), images=given)
    assert (done.subtracted, done.summed_up, done.trained) == (9, (), ())
    assert done.versions == ("v1", "v2")
    assert search(place, root, keyed, embeddings) == []
    for version in ("v1", "v2"):
        assert_equal_models(place, root / "expected", version)
        metrics = [ModelFolder(each).version(version).metrics() for each in (place, root / "expected")]
        assert metrics[0]["confusion"] == metrics[1]["confusion"]
    weights = [ridge_in(each, "v2").weights for each in (place, root / "expected")]
    difference = float((weights[0] - weights[1]).abs().max() / weights[1].abs().max())
    assert done.digits is not None
    assert 4 <= done.digits <= -np.log10(max(difference, 1e-8)) + 1  # what it says of itself is true
    stone = json.loads((place / "tombstones.json").read_text())["tombstones"][0]
    assert (stone["subtracted"], stone["digits"]) == (9, done.digits)
    with raises("input.invalid", "knows no patient"):
        medcil.erase(place, PATIENT)


def test_what_is_subtracted_is_exact(embedded, root):
    """On the same features: sums in plain NumPy."""
    before, version = ridge_in(embedded, "v2"), ModelFolder(embedded).version("v2")
    learned, names = Learned.read(version), version.class_names()
    theirs = learned.of_patient(hash_patient(PATIENT, version.store))
    features = learned.features(theirs, version.store)
    medcil.erase(embedded, PATIENT)
    after = ridge_in(embedded, "v2")
    lower = np.tril_indices(before.sums.shape[1])
    for label, name in enumerate(names):
        values = np.stack([features[e.image].double().numpy() for e in theirs if e.class_name == name])
        assert values.shape[:2] == (3, 2)
        sums = before.sums[label].numpy() - values.mean(axis=1).sum(axis=0)
        moments = before.moments[label].numpy() - np.einsum("nvi,nvj->ij", values, values)[lower] / 2
        np.testing.assert_allclose(after.sums[label], sums, rtol=0, atol=1e-8)
        np.testing.assert_allclose(after.moments[label], moments, rtol=0, atol=1e-8)
    left = Learned.read(ModelFolder(embedded).version("v2"))
    kept = left.features(left.images, version.store)
    total = torch.stack([kept[e.image] for e in left.images if e.class_name == "gamma"]).double()
    np.testing.assert_allclose(after.sums[2], total.mean(dim=1).sum(dim=0), atol=1e-8)


def test_without_images_it_says_what_remains_and_images_may_come_later(model, root, capsys):
    keyed, _ = hashes_of(model)
    assert exit_code("erase", model, "--patient", PATIENT) == 9
    said = capsys.readouterr()
    assert "Not subtracted: the statistics of v1, v2 still contain" in " ".join(said.out.split())
    assert "medcil erase MODEL --patient ID --images DIR" in " ".join(said.err.split())
    assert {found.partition(": ")[2] for found in search(model, root, keyed, [])} == {"keyed hash"}
    counts = ridge_in(model, "v2").counts.tolist()
    said = run("erase", model, "--patient", PATIENT, "--images", root / "all")  # others are not used
    assert "Subtracted from the statistics: 9 images." in said
    assert ridge_in(model, "v2").counts.tolist() == [n - 3 for n in counts]
    assert search(model, root, keyed, []) == []
    assert_equal_models(model, root / "expected", "v2")


def test_a_trained_network_is_not_unlearned_and_a_later_patient_never_reached_it(root, tmp_path):
    model = train_deliveries(root / "all", tmp_path / "model", keep_embeddings=True)
    before = state_of(model, "v1").network.state_dict()
    said = run("erase", model, "--patient", PATIENT)
    assert "The weights are not unlearned. Trained on images of this patient: v1, v2." in said
    assert "method.adapt=never" in said
    after = state_of(model, "v1").network.state_dict()
    assert all(after[name].equal(values) for name, values in before.items())
    rows = edited(root / "all", tmp_path / "apart", lambda row: row[1] == "gamma" or row[2] != PATIENT)
    model = train_deliveries(rows, tmp_path / "later", keep_embeddings=True)
    assert "No network was trained on images of this patient." in run("erase", model, "--patient", PATIENT)


@pytest.mark.parametrize("missing", [1, 9])
def test_images_that_are_not_those_that_were_learned_are_refused(missing, model, root, tmp_path):
    given = Path(shutil.copytree(root / "theirs", tmp_path / "given"))
    for path in sorted(given.iterdir())[:missing]:
        shutil.copy(root / "all/first/alpha/000.png", path)
    before = content(model)
    with raises("model.images.missing", f"lacks {missing} of 9"):
        medcil.erase(model, PATIENT, images=given)
    with raises("data.root.missing"):
        medcil.erase(model, PATIENT, images=tmp_path / "none")
    assert content(model) == before


def test_an_unrecorded_image_in_the_statistics_is_not_passed_over(model, root):
    """Such as of a model that another medcil has written."""
    from .generated import reseal

    for version in ("v1", "v2"):
        (model / "versions" / version / "learned.json").unlink()
    reseal(model)
    done = medcil.erase(model, PATIENT, images=root / "theirs")
    assert (done.summed_up, done.is_recorded, done.subtracted) == (("v1", "v2"), False, 0)


def test_embeddings_need_statistics(root, tmp_path):
    with raises("model.embeddings.unsupported"):
        medcil.train(root / "all/first", tmp_path / "model", method="finetune", keep_embeddings=True, **QUICK)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupted_it_goes_on_without_the_images(number, model, root, monkeypatch):
    from medcil.clinic import erase as erasing

    keyed, _ = hashes_of(model)
    calls, write = [], erasing.write_cleaned

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(erasing, "write_cleaned", stop)
        with pytest.raises(KeyboardInterrupt):
            medcil.erase(model, PATIENT, images=root / "theirs")
    assert [state_of(model, v).readout.counts[0].item() for v in ("v1", "v2")] == [30 - 3 * (number - 1), 30]
    with pytest.raises(RunConflict):
        medcil.update(model, root / "all/second")
    assert medcil.erase(model, PATIENT).subtracted == 9
    assert search(model, root, keyed, []) == []
    assert_equal_models(model, root / "expected", "v2")
    assert not list(model.glob(".erasing*"))


def test_images_of_a_known_class_that_came_later_are_subtracted_too(root, tmp_path):
    """The patient's images of a first class arrive with the second delivery."""
    late = Path(shutil.copytree(root / "all", tmp_path / "late"))
    with (late / "first/images.csv").open() as file:
        _, *rows = csv.reader(file)
    theirs = [row for row in rows if row[2] == PATIENT and row[1] == "alpha"]
    write_rows(late / "first", [row for row in rows if row not in theirs])
    with (late / "second/images.csv").open() as file:
        _, *more = csv.reader(file)
    (late / "second/alpha").mkdir()
    for row in theirs:
        (late / "first" / row[0]).rename(late / "second" / row[0])
    write_rows(late / "second", [*more, *theirs])
    model = train_deliveries(late, tmp_path / "model", FROZEN)
    assert medcil.erase(model, PATIENT, images=root / "theirs").subtracted == 9
    assert ridge_in(model, "v1").counts.tolist() == [27, 27]
    assert_equal_models(model, root / "expected", "v2")


def test_a_model_that_started_from_another_network_has_nothing_left(root, tmp_path):
    write_folder(tmp_path / "public", "delta", "epsilon", images=36)
    medcil.train(write_manifest(tmp_path / "public"), tmp_path / "network", method="analytic", **QUICK)
    for name in ("all", "others"):
        options = {"start": tmp_path / "network", "settings": ("execution.threads=1",)}
        medcil.train(root / name / "first", tmp_path / name, **options)
    done = medcil.erase(tmp_path / "all", PATIENT, images=root / "theirs")
    assert (done.subtracted, done.trained) == (6, ())
    assert_equal_models(tmp_path / "all", tmp_path / "others", "v1")
