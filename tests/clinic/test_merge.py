"""Two hospitals join their models: the result is the model of all their images, and holds none of them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import medcil
from medcil.cli.main import main
from medcil.clinic import merge as merging
from medcil.clinic.inference import open_model
from medcil.clinic.model_dir import Draft, ModelFolder, VersionFolder
from medcil.clinic.train import Watches
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.errors import MedcilError
from medcil.readouts.ridge import Ridge, solve_ridge
from medcil.readouts.statistics import ClassStatistics
from medcil.storage.atomic import sha256
from medcil.training.checkpoint import Progress
from medcil.training.feed import Feed
from medcil.training.inference import readout_features
from medcil.training.state import State

from ..errors.raises import raises
from .generated import QUICK, content, write_counts, write_folder, write_manifest
from .patients import pixels, png_of_ours

ONE = ("execution.threads=1",)
FIRST = {"alpha": 30, "beta": 24}
SECOND = {"gamma": 27, "beta": 21}
CPU = ExecutionConfig(device="cpu", threads=1)


@dataclass(frozen=True)
class Place:
    """Images and models of two hospitals, the second one started from the network of the first."""

    root: Path
    """first/ and second/ with their images, both/ with all, test/ with others."""
    a: Path
    b: Path

    def copied(self, to: Path) -> "Place":
        for name in ("A", "B"):
            shutil.copytree(self.root / name, to / name)
        return Place(self.root, to / "A", to / "B")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Nobody seals an image, so that both models have seen all that they could."""
    root = tmp_path_factory.mktemp("hospitals")
    write_counts(root / "first", FIRST, seed=1)
    write_counts(root / "second", SECOND, seed=2)
    for part in ("first", "second"):
        manifest = write_manifest(root / part) / "images.csv"
        manifest.write_text(manifest.read_text().replace("PERSON", f"PERSON-{part}"))
        for path in (root / part).glob("*/*.png"):
            place = root / "both" / path.parent.name / f"{part}-{path.name}"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    write_folder(root / "test", "alpha", "beta", "gamma", images=9, seed=3)
    settings = (*ONE, "method.pretrained=true", "data.views=2", "network.recalibrate_batch_norm=true")
    medcil.train(root / "first", root / "A", method="analytic", holdout=0, **QUICK | {"settings": settings})
    medcil.train(root / "second", root / "B", start=root / "A", holdout=0, settings=ONE)
    return Place(root, root / "A", root / "B")


@pytest.fixture(scope="module")
def merged(hospitals: Place) -> Path:
    medcil.merge(hospitals.a, hospitals.b, out=hospitals.root / "C")
    return hospitals.root / "C"


def state_of(model: Path, version: str | None = None) -> State:
    return ModelFolder(model).version(version).load_state()


def ridge_of(model: Path) -> Ridge:
    readout = state_of(model).readout
    assert isinstance(readout, Ridge)
    return readout


def by_class(model: Path) -> dict[str, torch.Tensor]:
    """Weights, log prior, class mean, count, sum and moments of each class, in float64."""
    state, ridge = state_of(model), ridge_of(model)
    parts = (ridge.weights.T, ridge.log_prior[:, None], ridge.class_means, ridge.counts[:, None])
    rows = torch.cat([part.double() for part in (*parts, ridge.sums, ridge.moments)], dim=1)
    return dict(zip(state.class_names, rows, strict=True))


def scores_by_class(model: Path, images: Path) -> dict[str, np.ndarray]:
    opened = open_model(model, execution=CPU)
    shown = np.stack([picture(path) for path in sorted(images.glob("*/*.png"))])
    scores, _ = opened.answer(shown)
    return dict(zip(opened.class_names, scores.T, strict=True))


def picture(path: Path) -> np.ndarray:
    return np.frombuffer(pixels(path), dtype=np.uint8).reshape(32, 32, 3).transpose(2, 0, 1).copy()


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance, err_msg=name)


# A model from the network of another.


def test_the_network_is_that_of_the_other_model_bit_for_bit_and_nothing_trains(hospitals, tmp_path):
    seen: list[Progress] = []
    before = content(hospitals.a)
    watches = Watches(training=seen.append)
    plan = medcil.train(
        hospitals.root / "second", tmp_path / "B", start=hospitals.a, settings=ONE, dry_run=True
    )
    assert plan.epochs == 0
    assert not (tmp_path / "B").exists()
    done = medcil.train(
        hospitals.root / "second", tmp_path / "B", start=hospitals.a, settings=ONE, watches=watches
    )
    assert content(hospitals.a) == before
    assert (plan.images, plan.holdout) == (done.provenance["images"], done.provenance["holdout"])
    assert seen
    assert all(now.is_embedding for now in seen)
    (a, b), tensors = (state_of(hospitals.a), state_of(tmp_path / "B")), []
    for state in (a, b):
        parts = {"network": state.network.backbone, "second": state.readout.companion}
        tensors.append({f"{k}.{n}": t for k, part in parts.items() for n, t in part.state_dict().items()})
    assert any(name.endswith("running_var") for name in tensors[0])
    assert all(tensors[1][name].equal(tensor) for name, tensor in tensors[0].items())
    assert a.readout.feature_spec == b.readout.feature_spec
    for name in ("balance", "ridge", "sharpness", "projection"):
        assert getattr(a.readout, name).equal(getattr(b.readout, name)), name
    assert (b.class_names, len(b.memory)) == (("beta", "gamma"), 0)
    assert b.inherent_counts.tolist() == [18, 21]  # without the sealed ones, three of a patient
    origin = ModelFolder(hospitals.a).version()
    assert done.provenance["started_from"] == {"version": "v1", "sha256": origin.sha256}
    assert done.provenance["settings"]["method"] == origin.provenance()["settings"]["method"]
    assert f"beta, gamma (with the network of v1 {origin.sha256[:12]})" in done_report(tmp_path / "B")


def done_report(model: Path) -> str:
    return ModelFolder(model).version().read("report.html").decode()


def test_patients_on_whom_the_network_was_trained_are_not_sealed(hospitals, tmp_path):
    """The same patients come again, with other images; and one who is new, whose number comes last."""
    images = write_counts(tmp_path / "again", {"alpha": 33, "zeta": 30}, seed=8)
    manifest = write_manifest(images) / "images.csv"
    manifest.write_text(manifest.read_text().replace("PERSON", "PERSON-first"))
    medcil.train(images, tmp_path / "B", start=hospitals.a, settings=ONE)
    sealed = ModelFolder(tmp_path / "B").version().people()
    assert sealed
    assert {patient for patient in sealed if patient.startswith("ALPHA")} == {"ALPHA-PERSON-first-10"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"method": "balanced"}, "model.start.settled"),
        ({"side": 64}, "model.start.settled"),
        ({"backbone": "resnet18"}, "model.start.settled"),
        ({"settings": ("method.balance=1",)}, "model.start.settled"),
        ({"settings": ("data.views=1",)}, "model.start.settled"),
    ],
    ids=str,
)
def test_what_the_features_depend_on_cannot_be_chosen_again(options, code, hospitals, tmp_path):
    with raises(code, "Leave it out"):
        medcil.train(hospitals.root / "second", tmp_path / "B", start=hospitals.a, **options)
    assert not (tmp_path / "B/model.json").exists()


def test_a_start_that_was_killed_is_continued_and_another_one_is_not(hospitals, tmp_path, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    for number, other in enumerate((hospitals.a, None)):
        place = tmp_path / str(number)
        with monkeypatch.context() as broken:
            broken.setattr(VersionFolder, "publish", killed)
            with pytest.raises(KeyboardInterrupt):
                medcil.train(hospitals.root / "second", place, start=hospitals.a, holdout=0, settings=ONE)
        if other is None:
            with pytest.warns(UserWarning, match="thrown away"):
                medcil.train(hospitals.root / "second", place, holdout=0, **QUICK)
            assert ModelFolder(place).version().provenance()["started_from"] is None
        else:
            medcil.train(hospitals.root / "second", place, start=other, holdout=0, settings=ONE)
            assert_close(by_class(place), by_class(hospitals.b), 0)


# The merged model.


@pytest.mark.parametrize("pooled", [False, True])
def test_on_given_features_it_is_the_regression_on_all_images(pooled):
    """In NumPy, by least squares over the rows of both, whose classes have other labels here."""
    random, dim, views, ridge, balance = np.random.default_rng(5), 7, 3, 0.3, 0.5
    labels_of = {"A": [0, 1, 2], "B": [3, 4] if pooled else [3, 1]}
    rows, targets, parts = [], [], {}
    for name, labels in labels_of.items():
        part = Ridge(n_features=dim, is_pooled=pooled)
        part.balance.fill_(balance)
        for own, label in enumerate(labels):
            features = torch.from_numpy(random.normal(label, 1, (4 + 3 * own, views, dim)))
            part.add(features, own)
            rows.append(features.numpy().reshape(-1, dim))
            targets.append(np.full(len(features) * views, label))
        parts[name] = part
    total = Ridge(n_features=dim, is_pooled=pooled)
    total.balance.fill_(balance)
    for name in ("B", "A"):
        total.merge(parts[name], labels_of[name])
    found = solve_ridge(total.statistics, balance=balance, ridge=ridge).numpy()
    x, y = np.concatenate(rows), np.concatenate(targets)
    pi = (np.bincount(y) / views) ** -balance / views
    expected = np.linalg.solve(
        (x * pi[y, None]).T @ x + ridge * np.eye(dim), (x * pi[y, None]).T @ np.eye(max(y) + 1)[y]
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(x @ found, x @ expected, rtol=0, atol=1e-8)


def test_on_the_features_of_both_hospitals_it_is_the_regression_on_all_images(hospitals, merged):
    """The features of every image as the network gives them, in one pass; then least squares in float64."""
    state = state_of(merged)
    names = state.class_names
    paths = sorted((hospitals.root / "both").glob("*/*.png"))
    labels = torch.tensor([names.index(path.parent.name) for path in paths])
    images = Samples(TensorImages(torch.stack([torch.from_numpy(picture(path)) for path in paths])), labels)
    total = None
    with Feed(images, state.preprocessing, torch.device("cpu"), CPU) as feed, torch.no_grad():
        for label in range(len(names)):
            features = readout_features(state.network, state.readout, feed, len(paths), label).values
            own = ClassStatistics.of(features, label)
            total = own if total is None else total.plus(own)
    ridge = ridge_of(merged)
    settled = {"balance": float(ridge.balance), "ridge": float(ridge.ridge)}
    expected, found = (solve_ridge(s, **settled) for s in (total, ridge.statistics))
    assert ridge.counts.tolist() == [30, 45, 27]
    torch.testing.assert_close(ridge.sums, total.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ridge.weights, found.float(), rtol=0, atol=0)


def test_from_folders_to_scores_it_is_the_model_trained_on_both(hospitals, merged, tmp_path):
    medcil.train(hospitals.root / "both", tmp_path / "pooled", start=hospitals.a, holdout=0, settings=ONE)
    assert state_of(merged).class_names == ("alpha", "beta", "gamma")
    assert_close(by_class(merged), by_class(tmp_path / "pooled"), 1e-5)
    found, expected = (scores_by_class(m, hospitals.root / "test") for m in (merged, tmp_path / "pooled"))
    assert_close(found, expected, 1e-5)
    apart = scores_by_class(hospitals.b, hospitals.root / "test")
    assert np.abs(apart["beta"] - found["beta"]).max() > 0.01  # merging does change something


def test_which_model_is_first_changes_the_order_of_the_labels_alone(hospitals, merged, tmp_path):
    medcil.merge(hospitals.b, hospitals.a, out=tmp_path / "C")
    assert state_of(tmp_path / "C").class_names == ("beta", "gamma", "alpha")
    assert_close(by_class(tmp_path / "C"), by_class(merged), 1e-7)
    found, expected = (scores_by_class(m, hospitals.root / "test") for m in (tmp_path / "C", merged))
    assert_close(found, expected, 1e-5)
    one, other = (ModelFolder(m).version() for m in (tmp_path / "C", merged))
    assert one.calibration().temperature == other.calibration().temperature
    assert one.provenance()["images"] == other.provenance()["images"]


def traces(model: Path, hospitals: Place) -> set[str]:
    """Names of files with a picture, or with the bytes, the pixels, a hash or the patient of an image."""
    needles = {b"\x89PNG", b"PERSON"}
    for path in hospitals.root.glob("[fst]*/*/*.png"):
        ours = png_of_ours(path)
        digests = [bytes.fromhex(sha256(raw)) for raw in (path.read_bytes(), ours, pixels(path))]
        needles |= {ours, pixels(path), picture(path).tobytes()}
        needles |= {form for digest in digests for form in (digest, digest.hex().encode())}
    files = content(model).items()
    return {name for name, raw in files if any(needle in raw for needle in needles)}


def test_three_hospitals_at_once_or_one_after_the_other(hospitals, merged, tmp_path):
    images = write_folder(tmp_path / "third", "alpha", "zeta", images=20, seed=7)
    medcil.train(images, tmp_path / "D", start=merged, holdout=0, settings=ONE)
    medcil.merge(hospitals.a, tmp_path / "D", hospitals.b, out=tmp_path / "at once")
    medcil.merge(tmp_path / "D", merged, out=tmp_path / "after")
    assert state_of(tmp_path / "at once").class_names == ("alpha", "beta", "zeta", "gamma")
    assert_close(by_class(tmp_path / "after"), by_class(tmp_path / "at once"), 1e-7)


def test_one_model_alone_is_copied_without_images_to_hand_over(sealing, tmp_path):
    medcil.merge(sealing.b, out=tmp_path / "B", rename={"zeta": "Z"})
    found, expected = (by_class(model) for model in (tmp_path / "B", sealing.b))
    expected["Z"] = expected.pop("zeta")
    assert_close(found, expected, 0)
    assert traces(sealing.b, sealing) != set() == traces(tmp_path / "B", sealing)
    medcil.merge(sealing.a, tmp_path / "B", out=tmp_path / "C")
    assert state_of(tmp_path / "C").class_names == ("alpha", "beta", "gamma", "Z")
    with raises("model.merge.repeated"):
        medcil.merge(sealing.b, tmp_path / "B", out=tmp_path / "D")


def test_no_file_has_an_image_or_a_patient_of_either(hospitals, merged):
    assert traces(merged, hospitals) == set()
    assert [path.name for path in (merged / "images").iterdir()] == ["key"]
    assert len(traces(hospitals.a, hospitals)) > 0  # who was trained on
    version = ModelFolder(merged).version()
    assert (version.people(), version.trained_patients(), version.holdout_entries()) == ({}, [], [])


def test_it_says_of_what_it_is_made_and_that_it_is_not_measured(hospitals, tmp_path, capsys):
    sources = [content(model) for model in (hospitals.a, hospitals.b)]
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(hospitals.a), str(hospitals.b), "--out", str(tmp_path / "C")])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not measured: there is no image to measure on." in said
    assert "beta 45 0" in said
    assert [content(model) for model in (hospitals.a, hospitals.b)] == sources
    hashes = [ModelFolder(model).version().sha256 for model in (hospitals.a, hospitals.b)]
    version = ModelFolder(tmp_path / "C").version()
    facts = version.provenance()
    assert facts["merged_from"] == [{"version": "v1", "sha256": value} for value in hashes]
    assert (facts["parent"], facts["images"]) == (None, {"alpha": 30, "beta": 45, "gamma": 27})
    (past,) = medcil.history(tmp_path / "C")
    assert past["merged_from"] == facts["merged_from"]
    with pytest.raises(SystemExit):
        main(["history", str(tmp_path / "C")])
    said = capsys.readouterr().out
    assert all(part in said for part in ("merged", hashes[0][:12], hashes[1][:12]))
    assert "optimistic" not in said
    assert hashes[1][:12] in version.read("card.md").decode()
    calibration = version.calibration()
    assert (calibration.temperature, calibration.unlike.threshold) == (1, None)
    assert "no images to calibrate on" in calibration.notes[0]


def test_given_images_measure_and_calibrate_it(hospitals, tmp_path):
    done = medcil.merge(hospitals.a, hospitals.b, out=tmp_path / "C", eval=hospitals.root / "test")
    assert (done.metrics["measured_on"], done.metrics["images"]) == ("eval", 27)
    scores = scores_by_class(tmp_path / "C", hospitals.root / "test")
    truth = [path.parent.name for path in sorted((hospitals.root / "test").glob("*/*.png"))]
    names = list(scores)
    right = np.array([names[i] for i in np.argmax(list(scores.values()), axis=0)]) == np.array(truth)
    assert done.metrics["accuracy"] == pytest.approx(right.mean())
    assert ModelFolder(tmp_path / "C").version().calibration().images == 27
    assert [path.name for path in (tmp_path / "C/images").iterdir()] == ["key"]


def test_every_command_works_with_it(hospitals, merged, tmp_path):
    """An update of it is the merger with a model that was updated."""
    model = Path(shutil.copytree(merged, tmp_path / "C"))
    delta = write_folder(tmp_path / "delta", "delta", images=20)
    b = Path(shutil.copytree(hospitals.b, tmp_path / "B"))
    for place in (model, b):
        done = medcil.update(place, delta, holdout=0, settings=ONE)
        assert done.promoted
    medcil.merge(hospitals.a, b, out=tmp_path / "again")
    assert_close(by_class(model), by_class(tmp_path / "again"), 1e-5)
    assert [past["version"] for past in medcil.history(model)] == ["v1", "v2"]
    medcil.export(model, tmp_path / "C.onnx")
    rows = [
        medcil.predict(of, [str(hospitals.root / "test")], out=tmp_path / f"{number}.csv").rows
        for number, of in enumerate((model, tmp_path / "C.onnx"))
    ]
    assert [row.predicted for row in rows[0]] == [row.predicted for row in rows[1]]
    assert len(rows[0]) == 27
    medcil.rebalance(model, balance=1)
    assert float(ridge_of(model).balance) == 1
    with raises("model.patient.merged", "merge again"):
        medcil.erase(model, "ALPHA-PERSON-1")


# Sealed images.


@pytest.fixture(scope="module")
def sealing(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The second hospital trains on all beta images, also of patients whom the first has sealed; and on a
    picture that is sealed there, of another patient here."""
    root = tmp_path_factory.mktemp("sealing")
    for part, counts, seed in (
        ("first", FIRST, 1),
        ("second", {**SECOND, "beta": 24}, 2),
        ("third", {"zeta": 21}, 3),
    ):
        write_manifest(write_counts(root / part, counts, seed=seed))
    medcil.train(root / "first", root / "A", method="analytic", **QUICK)
    version = ModelFolder(root / "A").version()
    sealed = next(entry["file"] for entry in version.holdout_entries() if entry["class"] == "alpha")
    (root / "second/gamma/030.png").write_bytes(version.store.read(sealed))
    write_manifest(root / "second")
    medcil.train(root / "second", root / "B", start=root / "A", holdout=0, settings=ONE)
    medcil.update(root / "B", root / "third", holdout=6, settings=ONE)
    return Place(root, root / "A", root / "B")


def test_the_sealed_images_of_both_are_copied_if_asked_to(sealing, tmp_path):
    """But for pictures and patients on whom the other was trained."""
    a, b = (ModelFolder(model).version() for model in (sealing.a, sealing.b))
    theirs = {
        name
        for version in (a, b, ModelFolder(sealing.b).version("v1"))
        for name in version.trained_patients()
    }
    expected = {
        (pixels(version.store.read(entry["file"])), entry["class"])
        for version in (a, b)
        for who, files in version.people().items()
        for entry in version.holdout_entries()
        if f"holdout/{entry['file']}" in files and who not in theirs
    }
    learned = {pixels(path) for path in (sealing.root / "second").glob("*/*.png")}
    assert {name for picture, name in expected if picture in learned} == {"alpha"}
    expected = {(picture, name) for picture, name in expected if picture not in learned}
    n_all = len(a.holdout_entries()) + len(b.holdout_entries())
    assert 0 < len(expected) < n_all
    with pytest.warns(UserWarning, match=f"{n_all - len(expected)} sealed images are left out"):
        done = medcil.merge(sealing.a, sealing.b, out=tmp_path / "C", with_holdouts=True)
    version = ModelFolder(tmp_path / "C").version()
    found = {
        (pixels(version.store.read(entry["file"])), entry["class"]) for entry in version.holdout_entries()
    }
    assert found == expected
    assert (done.metrics["measured_on"], done.metrics["images"]) == ("hold-out", len(expected))
    assert sum(done.provenance["holdout"].values()) == len(expected)
    assert version.calibration().images == len(expected)
    sealed = version.people()
    assert {f"holdout/{entry['file']}" for entry in version.holdout_entries()} == set().union(
        *sealed.values()
    )
    assert version.trained_patients() == []
    patient = next(iter(sealed))
    assert medcil.erase(tmp_path / "C", patient).images == len(sealed[patient])
    assert patient.encode() not in b"".join(content(tmp_path / "C").values())


def test_a_picture_that_two_hospitals_name_differently_measures_nothing(hospitals, monkeypatch):
    images = [
        merging.SealedImage(content, name, "", is_trained_on=False)
        for content, name in ((b"1", "alpha"), (b"1", "alpha"), (b"2", "alpha"), (b"2", "beta"))
    ]
    monkeypatch.setattr(merging, "_sealed_in", lambda partner, partners: images)
    partner = merging.Partner.opened(hospitals.a)
    with pytest.warns(UserWarning, match="2 sealed images are left out"):
        found = merging.Sealed.of([partner])
    assert [image.content for image in found.images] == [b"1", b"1"]


def test_a_patient_is_erased_in_the_hospital_and_the_models_merged_again(sealing, tmp_path):
    """In the model that was started nothing else changes; in the first one ρ does."""
    for name in ("A", "B"):
        shutil.copytree(sealing.root / name, tmp_path / name)
    a, b = tmp_path / "A", tmp_path / "B"
    ridge = float(ridge_of(a).ridge)
    version = ModelFolder(b).version("v1")
    patient = version.trained_patients()[0]
    erased = medcil.erase(b, patient, images=sealing.root / "second")
    assert (erased.subtracted, erased.trained) == (3, ())
    assert float(ridge_of(b).ridge) == ridge
    images = Path(shutil.copytree(sealing.root / "second", tmp_path / "images"))
    rows = (images / "images.csv").read_text().splitlines()
    for row in (row for row in rows if row.endswith(patient)):
        (images / row.split(",")[0]).unlink()
    (images / "images.csv").write_text("\n".join(row for row in rows if not row.endswith(patient)))
    medcil.train(images, tmp_path / "refit", start=a, holdout=0, settings=ONE)
    medcil.update(tmp_path / "refit", sealing.root / "third", holdout=6, settings=ONE)
    for part in ("B", "refit"):
        medcil.merge(a, tmp_path / part, out=tmp_path / f"C-{part}")
    assert_close(by_class(tmp_path / "C-B"), by_class(tmp_path / "C-refit"), 1e-4)
    medcil.erase(a, ModelFolder(a).version().trained_patients()[0], images=sealing.root / "first")
    assert float(ridge_of(a).ridge) != ridge
    with raises("model.merge.different", "ρ differs"):
        medcil.merge(a, b, out=tmp_path / "C")
    medcil.merge(a, b, out=tmp_path / "C", ridge_of_first=True)
    assert float(ridge_of(tmp_path / "C").ridge) == float(ridge_of(a).ridge)


# What is refused.


@pytest.fixture
def place(hospitals: Place, tmp_path: Path) -> Place:
    return hospitals.copied(tmp_path)


def other_balance(place: Place) -> tuple[Path, Path]:
    medcil.rebalance(place.b, balance=1)
    return place.a, place.b


def other_ridge(place: Place) -> tuple[Path, Path]:
    medcil.rebalance(place.b, strength=0.3)
    return place.a, place.b


def other_network(place: Place) -> tuple[Path, Path]:
    settings = (*ONE, "method.pretrained=true", "data.views=2")
    options = QUICK | {"settings": settings}
    shutil.rmtree(place.b)
    medcil.train(place.root / "second", place.b, method="analytic", holdout=0, **options)
    return place.a, place.b


def other_features(place: Place) -> tuple[Path, Path]:
    shutil.rmtree(place.b)
    options = QUICK | {"settings": (*ONE, "data.views=2", "method.stages=1")}
    medcil.train(place.root / "second", place.b, method="analytic", holdout=0, **options)
    return place.a, place.b


def other_views(place: Place) -> tuple[Path, Path]:
    shutil.rmtree(place.b)
    medcil.train(place.root / "second", place.b, method="analytic", holdout=0, **QUICK)
    return place.a, place.b


def a_method_without_statistics(place: Place) -> tuple[Path, Path]:
    shutil.rmtree(place.b)
    medcil.train(place.root / "second", place.b, method="finetune", holdout=0, **QUICK)
    return place.a, place.b


def itself(place: Place) -> tuple[Path, Path]:
    return place.a, place.a


def an_updated_copy(place: Place) -> tuple[Path, Path]:
    shutil.rmtree(place.b)
    shutil.copytree(place.a, place.b)
    delta = write_folder(place.b.parent / "delta", "delta", images=20)
    medcil.update(place.b, delta, holdout=0, settings=ONE)
    return place.a, place.b


def what_it_was_merged_from(place: Place) -> tuple[Path, Path]:
    medcil.merge(place.a, place.b, out=place.a.parent / "both")
    return place.a.parent / "both", place.b


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (other_balance, "model.merge.different", ("β differs: 0.5 and 1", "train --from")),
        (other_ridge, "model.merge.different", ("ρ differs: ", "train --from")),
        (other_network, "model.merge.different", ("The frozen network differs", "train --from")),
        (other_features, "model.merge.different", ("The feature setting stages differs: 2 and 1",)),
        (other_views, "model.merge.different", ("data.views differs: 2 and 1",)),
        (a_method_without_statistics, "model.merge.unsupported", ("its method is finetune",)),
        (itself, "model.merge.repeated", ("images in common",)),
        (an_updated_copy, "model.merge.repeated", ("images in common",)),
        (what_it_was_merged_from, "model.merge.repeated", ("images in common",)),
    ],
)
def test_models_that_cannot_be_added_are_refused(prepare, code, words, place, tmp_path):
    models = prepare(place)
    before = [content(model) for model in models]
    for pair in (models, models[::-1]):
        with raises(code, *words[1:]):
            medcil.merge(*pair, out=tmp_path / "C")
        assert not (tmp_path / "C").exists()
    with raises(code, *words):
        medcil.merge(*models, out=tmp_path / "C")
    assert [content(model) for model in models] == before


def test_a_network_without_statistics_is_nothing_to_start_from(model, hospitals, tmp_path):
    with raises("model.merge.unsupported", "keeps no statistics: its method is balanced"):
        medcil.train(hospitals.root / "second", tmp_path / "B", start=model)
    assert not (tmp_path / "B").exists()


@pytest.mark.parametrize(("name", "code"), [("A", "run.conflict"), ("A/inside", "output.in_model")])
def test_no_model_is_written_over_or_into(name, code, place, tmp_path):
    before = content(place.a)
    with raises(code):
        medcil.merge(place.a, place.b, out=tmp_path / name)
    assert content(place.a) == before


def test_names_that_look_alike_are_renamed_by_the_hospital(hospitals, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(hospitals.root / "second", images)
    for old, new in {"beta": "Be-ta", "gamma": "delta"}.items():
        (images / old).rename(images / new)
    (images / "images.csv").unlink()
    medcil.train(images, tmp_path / "B", start=hospitals.a, holdout=0, settings=ONE)

    def merge(**rename: str) -> tuple[str, ...]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        medcil.merge(
            hospitals.a,
            tmp_path / "B",
            out=out,
            rename={key.replace("_", "-"): v for key, v in rename.items()},
        )
        return state_of(out).class_names

    with raises("model.merge.similar", "'Be-ta' and 'beta' differ in case or spacing only", "--rename"):
        merge()
    with raises("model.merge.similar"):
        merge(delta="Alpha")
    with raises("model.merge.rename", "No model has a class 'bet' to rename. Did you mean 'beta'?"):
        merge(bet="x")
    with raises("model.merge.rename", "Two classes"):
        merge(delta="x", Be_ta="x")
    assert merge(Be_ta="other", delta="gamma") == ("alpha", "beta", "other", "gamma")
    assert merge(Be_ta="beta") == ("alpha", "beta", "delta")


@pytest.mark.parametrize("text", ["beta", "=x", "beta=", "a=b a=c"])
def test_a_new_name_is_written_as_a_pair(text, place, tmp_path, capsys):
    options = [word for pair in text.split() for word in ("--rename", pair)]
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(place.a), str(place.b), "--out", str(tmp_path / "C"), *options])
    assert ended.value.code == 2
    assert "write CLASS=NAME once for each class" in capsys.readouterr().err


# Interrupted.

MOMENTS = [
    (merging.Sealed, "write", True),
    (merging, "store", False),
    (merging, "store", True),
    (merging, "describe", False),
    (VersionFolder, "publish", True),
    (ModelFolder, "write", True),
    (Draft, "clean", True),
]


@pytest.mark.parametrize(("where", "name", "after"), MOMENTS, ids=str)
def test_interrupted_it_is_whole_or_not_there_and_the_same_command_completes(
    where, name, after, place, merged, tmp_path, monkeypatch
):
    before = [content(model) for model in (place.a, place.b)]
    original: Callable[..., object] = getattr(where, name)

    def killed(*arguments: object, **options: object) -> None:
        if name == "clean" and not (tmp_path / "C/model.json").exists():
            return original(*arguments, **options)  # at the beginning
        if after:
            original(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(where, name, killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.merge(place.a, place.b, out=tmp_path / "C")
    is_listed = name == "clean" or (name == "write" and where is ModelFolder and after)
    assert ModelFolder(tmp_path / "C").exists == is_listed
    if is_listed:
        assert ModelFolder(tmp_path / "C").version().metrics()["images"] == 0
    if (name, after) != ("clean", True):
        medcil.merge(place.a, place.b, out=tmp_path / "C")
    assert_close(by_class(tmp_path / "C"), by_class(merged), 0)
    assert [path.name for path in (tmp_path / "C/versions").iterdir()] == ["v1"]
    with pytest.raises(MedcilError, match="is a model already"):
        medcil.merge(place.a, place.b, out=tmp_path / "C")
    assert [content(model) for model in (place.a, place.b)] == before
