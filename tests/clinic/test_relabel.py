"""Images move to other classes, and classes go: the model is one that was trained so from the beginning."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import medcil
from medcil.clinic.corrections.learned import Learned
from medcil.clinic.model_dir import ModelFolder

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
)
from .generated import FEW, QUICK, content, write_folder
from .test_story import run

FROZEN = "method.adapt=never"
MOVED = {"alpha/004.png": "beta", "beta/010.png": "gamma", "gamma/000.png": "alpha"}


def corrected(row: list[str]) -> bool:
    """Change a row of a manifest to the right class."""
    row[1] = {"alpha/004.png": "beta"}.get(row[0], row[1])
    return True


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("relabelled")
    write_deliveries(root / "all")
    train_deliveries(root / "all", root / "model", FROZEN, keep_embeddings=True)
    edited(root / "all", root / "right", corrected)
    train_deliveries(root / "right", root / "expected", FROZEN)
    return root


@pytest.fixture
def model(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "model", tmp_path / "model"))


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    def write(**classes: str) -> Path:
        path = tmp_path / "corrections.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["path", "label"], *classes.items()])
        return path

    return write


@pytest.mark.parametrize("way", ["images", "embeddings"])
def test_a_relabelled_image_leaves_the_model_that_was_trained_with_the_right_class(
    way, model, root, table, tmp_path
):
    before = content(model / "versions")
    wrong = ModelFolder(model).version("v2").metrics()
    images = root / "all/first" if way == "images" else None
    done = medcil.relabel(model, table(**{"alpha/004.png": "BETA", "alpha/001.png": "alpha"}), images=images)
    assert (done.version, done.provenance["parent"]) == ("v3", "v2")
    assert_equal_models(model, root / "expected", "v3", other="v2")
    assert before.items() <= content(model / "versions").items()  # what was there does not change
    facts = done.provenance
    assert (facts["corrected"], facts["classes_added"], facts["images"]) == ("1 from alpha to beta", [], {})
    assert medcil.history(model)[2]["corrected"] == "1 from alpha to beta"
    cost = done.forgetting
    assert [c["before"]["right"] for c in cost["old_classes"]] == [c["right"] for c in wrong["classes"]]
    assert [c["after"]["right"] for c in cost["old_classes"]] == [c["right"] for c in done.metrics["classes"]]
    page = (model / "versions/v3/report.html").read_text()
    assert "Corrected from v2: 1 from alpha to beta" in page
    learned = Learned.read(ModelFolder(model).version("v3"))
    assert learned.counts() == {"alpha": 29, "beta": 31, "gamma": 30}
    assert medcil.rollback(model, "v2") == "v3"
    assert_equal_models(model, root / "model", "v2")


def test_moved_sums_are_exact_and_moving_back_gives_the_first_model(model, table):
    """On the same features: sums in plain NumPy."""
    version, before = ModelFolder(model).version("v2"), ridge_in(model, "v2")
    medcil.relabel(model, table(**MOVED))
    learned, after = Learned.read(ModelFolder(model).version("v3")), ridge_in(model, "v3")
    features = learned.features(learned.images, version.store)
    lower = np.tril_indices(before.sums.shape[1])
    for label, name in enumerate(("alpha", "beta", "gamma")):
        values = np.stack(
            [features[e.image].double().numpy() for e in learned.images if e.class_name == name]
        )
        np.testing.assert_allclose(after.sums[label], values.mean(axis=1).sum(axis=0), rtol=0, atol=1e-8)
        moments = np.einsum("nvi,nvj->ij", values, values)[lower] / 2
        np.testing.assert_allclose(after.moments[label], moments, rtol=0, atol=1e-8)
    assert after.counts.tolist() == state_of(model, "v3").inherent_counts.tolist() == [30, 30, 30]
    medcil.relabel(model, table(**{path: path.split("/")[0] for path in MOVED}))
    again = ridge_in(model, "v4")
    assert float(again.ridge) == pytest.approx(float(before.ridge), rel=1e-9)
    np.testing.assert_allclose(again.sums, before.sums, rtol=0, atol=1e-8)
    np.testing.assert_allclose(again.weights, before.weights, rtol=0, atol=1e-5)


def test_a_sealed_image_changes_its_class_in_the_list(model, root, table):
    said = run("relabel", model, table(**{"gamma/035.png": "alpha"}), "--images", root / "all/second")
    assert "Relabelled: 1 from gamma to alpha." in said
    folder = ModelFolder(model)
    before, after = (folder.version(name) for name in ("v2", "v3"))
    assert [e["file"] for e in before.holdout_entries()] == [e["file"] for e in after.holdout_entries()]
    assert [c["images"] for c in after.metrics()["classes"]] == [7, 6, 5]
    assert ridge_in(model, "v3").sums.equal(ridge_in(model, "v2").sums)
    assert after.people() == before.people()


def test_an_exemplar_changes_its_class(root, table, tmp_path):
    data = root / "all/first"
    options = {"method": "analytic", "exemplars": 4, **QUICK}
    medcil.train(data, tmp_path / "model", **options)
    version = ModelFolder(tmp_path / "model").version()
    files = [Path(entry["file"]) for entry in version.exemplar_entries() if entry["class"] == "alpha"]
    pixels = {Image.open(version.store.path(file.name)).tobytes() for file in files}
    (chosen, *_) = [path for path in sorted(data.glob("alpha/*.png")) if Image.open(path).tobytes() in pixels]
    medcil.relabel(tmp_path / "model", table(**{f"alpha/{chosen.name}": "beta"}), images=data)
    after = ModelFolder(tmp_path / "model").version()
    assert [entry["class"] for entry in after.exemplar_entries()].count("beta") == 5
    kept = {Path(file).name for of_patient in after.people().values() for file in of_patient}
    assert kept == after.image_names() == version.image_names()
    assert after.load_state().readout.counts.tolist() == [29, 31]


@pytest.mark.parametrize(
    ("rows", "given", "code", "words"),
    [
        ({"alpha/004.png": "omega"}, True, "model.relabel.class", "Row 2"),
        ({"alpha/001.png": "beta", "alpha/999.png": "beta"}, True, "model.relabel.path", "Row 3"),
        ({"alpha/999.png": "beta"}, False, "model.relabel.image", "Row 2"),
        ({"alpha/004.png": "alpha"}, True, "model.relabel.unchanged", ""),
        ({f"alpha/{n:03d}.png": "beta" for n in range(30)}, True, "model.relabel.emptied", "alpha"),
    ],
    ids=["class", "path", "name", "unchanged", "emptied"],
)
def test_what_cannot_be_relabelled_is_refused(rows, given, code, words, model, root, table):
    before = content(model)
    with raises(code, words):
        medcil.relabel(model, table(**rows), images=root / "all/first" if given else None)
    assert content(model) == before


def test_an_image_that_was_never_learned_and_one_listed_twice_are_refused(model, root, table, tmp_path):
    strange = write_folder(tmp_path / "strange", "alpha", images=2, seed=5)
    with raises("model.relabel.image", "Row 2", "alpha/000.png"):
        medcil.relabel(model, table(**{"alpha/000.png": "beta"}), images=strange)
    path = table(**{"alpha/004.png": "beta"})
    path.write_text(path.read_text() + "alpha/004.png,alpha\n")
    with raises("model.relabel.twice", "Row 3"):
        medcil.relabel(model, path, images=root / "all/first")


@pytest.mark.parametrize("gone", ["alpha", "gamma"])
def test_a_retired_class_leaves_the_model_that_never_had_it(gone, model, root, tmp_path):
    before = content(model / "versions")
    done = medcil.retire(model, gone.upper())
    left = [name for name in ("alpha", "beta", "gamma") if name != gone]
    version, old = ModelFolder(model).version("v3"), ModelFolder(model).version("v2")
    state, was = version.load_state(), old.load_state()
    assert list(state.class_names) == left
    assert before.items() <= content(model / "versions").items()
    kept = [was.class_names.index(name) for name in left]
    for part in ("counts", "sums", "moments"):
        assert getattr(state.readout, part).equal(getattr(was.readout, part)[kept])
    assert state.network.classifier.block_sizes == ((1, 1) if gone == "alpha" else (2, 0))
    assert version.holdout_entries() == [e for e in old.holdout_entries() if e["class"] != gone]
    assert not any(who.startswith(gone) for who in version.people())
    assert [c["name"] for c in done.metrics["classes"]] == left
    assert [c["name"] for c in done.forgetting["old_classes"]] == left
    assert done.provenance["corrected"] == f"{gone} retired"
    if gone == "gamma":  # the first task alone
        expected = ridge_in(root / "model", "v1")
        assert float(state.readout.ridge) == float(expected.ridge)
        np.testing.assert_allclose(state.readout.weights, expected.weights, rtol=0, atol=1e-6)
        np.testing.assert_allclose(state.readout.log_prior, expected.log_prior, atol=1e-6)
    medcil.update(model, write_folder(tmp_path / "more", gone, images=36, seed=7), holdout=0, **FEW)
    assert ModelFolder(model).version().class_names() == (*left, gone)


def test_flips_from_a_retired_class_have_its_name(model):
    done = medcil.retire(model, "alpha")
    old = [f["before"] for f in done.forgetting["flipped"]]
    confusion = ModelFolder(model).version("v2").metrics()["confusion"]
    assert old.count("alpha") == confusion[1][0] + confusion[2][0]


def test_what_cannot_be_retired_is_refused(model, tmp_path, table):
    with raises("model.class.unknown"):
        medcil.retire(model, "omega")
    medcil.retire(model, "gamma")
    with raises("model.retire.last"):
        medcil.retire(model, "beta")
    data = write_folder(tmp_path / "data", "alpha", "beta", "gamma", images=36)
    medcil.train(data, tmp_path / "other", method="finetune", **QUICK)
    with raises("model.retire.unsupported"):
        medcil.retire(tmp_path / "other", "alpha")
    with raises("model.relabel.unsupported"):
        medcil.relabel(tmp_path / "other", table(**{"alpha/000.png": "beta"}), images=data)


@pytest.mark.parametrize("command", ["relabel", "retire"])
@pytest.mark.parametrize("where", ["write", "publish"])
def test_killed_before_the_last_writes_the_same_command_finishes_it(
    command, where, model, table, monkeypatch
):
    from medcil.clinic.model_dir import VersionFolder

    corrections = table(**{"alpha/004.png": "beta"})

    def go() -> None:
        medcil.retire(model, "alpha") if command == "retire" else medcil.relabel(model, corrections)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder if where == "write" else VersionFolder, where, killed)
        with pytest.raises(KeyboardInterrupt):
            go()
    assert ModelFolder(model).versions == ("v1", "v2")
    assert_equal_models(model, model, "v2")
    go()
    assert ModelFolder(model).current == "v3"
    assert sorted(path.name for path in (model / "versions").iterdir()) == ["v1", "v2", "v3"]
    counts = state_of(model, "v3").readout.counts.tolist()
    assert counts == ([30, 30] if command == "retire" else [29, 31, 30])


def test_another_correction_does_not_continue_a_draft(model, table, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.relabel(model, table(**{"alpha/004.png": "beta"}))
    with raises("model.version.unlisted"):
        medcil.relabel(model, table(**{"alpha/005.png": "beta"}))


def test_a_patient_is_erased_from_corrected_versions_too(model, root, table, tmp_path):
    images_of(root / "all", tmp_path / "theirs")
    medcil.relabel(model, table(**{"alpha/006.png": "beta"}))  # of the patient
    medcil.retire(model, "gamma")
    done = medcil.erase(model, PATIENT)
    assert done.versions == ("v1", "v2", "v3", "v4")
    assert (done.subtracted, done.summed_up) == (9, ())
    counts = {name: ridge_in(model, name).counts.tolist() for name in done.versions}
    assert counts == {"v1": [27, 27], "v2": [27, 27, 27], "v3": [27, 27, 27], "v4": [27, 27]}
    assert_equal_models(model, model, "v3", other="v2")
    assert json.loads((model / "tombstones.json").read_text())["tombstones"][0]["subtracted"] == 9
