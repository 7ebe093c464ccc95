"""A patient is forgotten: every file of the model folder is searched for what was the patient's."""

import errno
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import medcil
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, MedcilError, RunConflict
from medcil.training.inference import predict_scores

from .generated import content, forget_versions, reseal, write_folder
from .patients import QUICK, originals, people, pixels, png_of_ours, search, stored
from .test_story import exit_code, run

CPU = ExecutionConfig(device="cpu", threads=1)
PERSON = re.compile(r"[A-Z]+-PERSON-\d+")


@pytest.fixture
def images(of_patients) -> Path:
    return Path(of_patients)


@pytest.fixture
def model(of_patients, tmp_path) -> Path:
    return Path(shutil.copytree(of_patients / "model", tmp_path / "model"))


def check_versions(model: Path) -> None:
    """Each loads with its sha256s, and its figures are those of the images it holds."""
    for name in ModelFolder(model).versions:
        version = ModelFolder(model).version(name)
        state, sealed, found = version.load_state(), version.holdout(), version.metrics()
        right = predict_scores(state, sealed, CPU).argmax(dim=1) == sealed.labels
        assert found["images"] == len(sealed)
        assert found["accuracy"] == pytest.approx(right.double().mean().item())
        assert version.calibration().images == len(sealed)
        assert f"measured on {len(sealed)} sealed" in (version.root / "card.md").read_text()
        files = [file for of_patient in version.people().values() for file in of_patient]
        assert {Path(file).name for file in files} == version.image_names()
    stored_names = {path.name for path in (model / "images").glob("*.png")}
    folder = ModelFolder(model)
    assert stored_names == {image for name in folder.versions for image in folder.version(name).image_names()}


def opened(model: Path) -> dict[str, VersionFolder]:
    return {name: ModelFolder(model).version(name) for name in ("v1", "v2")}


@pytest.mark.parametrize("part", ["exemplars", "holdout"])
def test_nothing_of_a_patient_remains_and_all_else_does(model, images, part):
    patient = people(model, version="v1", part=part)[0]
    before, shown = stored(model), opened(model)
    states = {name: version.load_state() for name, version in shown.items()}
    names = {Path(file).name for v in shown.values() for file in v.people()[patient]}
    kinds = {name: sorted(p.name for p in v.root.iterdir()) for name, v in shown.items()}
    assert search(model, images, patient)

    done = medcil.erase(model, patient.lower())  # as in a manifest, case makes no difference

    assert search(model, images, patient) == []
    theirs = {pixels(path) for path in originals(images, patient)}
    assert stored(model) == Counter({key: n for key, n in before.items() if key not in theirs})
    assert done.images == len(theirs & set(before))
    for name, found in content(model).items():  # the random names of removed files say who was where
        assert not any(file.encode() in found for file in names), name
    check_versions(model)
    shown = opened(model)
    assert {name: sorted(p.name for p in v.root.iterdir()) for name, v in shown.items()} == kinds
    for name, version in shown.items():
        new, old = version.load_state().network.state_dict(), states[name].network.state_dict()
        assert all(torch.equal(new[key], old[key]) for key in old)  # not unlearned
    assert done.trained == (("v1", "v2") if part == "exemplars" else ())
    assert done.versions == ("v1", "v2")
    facts = shown["v1"].provenance(), shown["v2"].provenance()
    assert (facts[0]["images_sha256"], len(facts[1]["images_sha256"])) == (None, 64)
    stones = json.loads((model / "tombstones.json").read_text())["tombstones"]
    assert [(stone["images"], stone["versions"]) for stone in stones] == [(done.images, 2)]
    assert set(stones[0]) == {"date", "images", "versions"}
    medcil.rollback(model, "v1")
    assert ModelFolder(model).version().load_state().class_names == ("alpha", "beta")


def test_class_means_are_those_of_the_exemplars_that_remain(model):
    version = ModelFolder(model).version("v2")
    patient = people(model, version="v2", part="exemplars")[0]
    before = version.load_state()
    medcil.erase(model, patient)
    state = ModelFolder(model).version("v2").load_state()
    label = state.class_names.index(patient.split("-")[0].lower())
    others = [c for c in range(3) if c != label]
    assert torch.equal(state.readout.class_means[others], before.readout.class_means[others])
    assert (state.preprocessing.side, state.preprocessing.crop) == (32, 28)
    kept = state.memory.read_all()[state.memory.labels == label]
    crops = state.preprocessing.normalize(kept[..., 2:30, 2:30])
    with torch.no_grad():
        embedded = [F.normalize(state.network.eval()(x).embedding) for x in (crops, crops.flip(-1))]
    expected = F.normalize(torch.cat(embedded).mean(dim=0), dim=0)
    torch.testing.assert_close(state.readout.class_means[label], expected, rtol=0, atol=1e-5)
    assert (expected - before.readout.class_means[label]).abs().max() > 1e-4


def test_a_patient_of_whom_no_image_was_kept_is_known_and_forgotten(images, tmp_path):
    """Trained on, and neither exemplar nor sealed: only the list of who was trained on knows."""
    model = tmp_path / "model"
    medcil.train(images / "first", model, backbone="resnet8_cifar", exemplars=1, **QUICK)
    version = ModelFolder(model).version()
    patient = min(set(version.trained_patients()) - set(version.people()))
    before = stored(model)
    done = medcil.erase(model, patient)
    assert (done.images, done.trained, stored(model)) == (0, ("v1",), before)
    assert search(model, images, patient) == []
    check_versions(model)


def test_a_class_without_exemplars_still_works(model, images, tmp_path):
    manifest = model / "versions/v2/state/manifest.json"  # scores are then products with the class means
    manifest.write_text(manifest.read_text().replace('"kind": "classifier"', '"kind": "nearest_mean"'))
    reseal(model)
    gone = [person for person in people(model, version="v2", part="exemplars") if person.startswith("ALPHA")]
    said = [run("erase", model, "--patient", person) for person in gone]
    assert "no exemplar of alpha" in said[-1]
    assert "weights are not unlearned" in said[-1]
    assert "v1, v2" in said[-1]
    state = ModelFolder(model).version().load_state()
    assert state.memory.class_counts(3).tolist()[0] == 0
    assert state.readout.class_means.norm(dim=1).tolist() == pytest.approx([1, 1, 1])
    scores = predict_scores(state, ModelFolder(model).version().holdout(), CPU)
    assert scores[:, 0].std() > 0
    rows = medcil.predict(model, [images / "first/alpha"]).rows
    assert len(rows) == 21
    delta = write_folder(tmp_path / "delta", "delta", images=21)
    with pytest.warns(UserWarning, match="no exemplar of alpha"):
        medcil.update(model, delta, method="icarl", **QUICK)
    state = ModelFolder(model).version().load_state()
    assert (state.class_names[-1], state.readout.kind) == ("delta", "nearest_mean")
    assert state.readout.class_means.norm(dim=1).tolist() == pytest.approx(
        [1] * 4
    )  # alpha can still be nearest
    assert all(search(model, images, person) == [] for person in gone)


def test_what_else_lies_in_the_folder(model, images, tmp_path):
    """Unfinished versions and explanations hold images and go; what is not ours is named."""
    patient = people(model, version="v2", part="holdout")[0]
    shutil.copytree(model / "versions/v2", model / "versions/.v3.part/version")
    (model / ".model.json.x.tmp").write_text(patient)
    (model / "explained").mkdir()
    (model / "explained/explanation.json").write_text(f'"{patient}"')
    (model / "versions/v1/thumbnail.png").write_bytes(png_of_ours(originals(images, patient)[0]))
    (model / "notes.txt").write_text("mine")
    (model / "versions/mine.txt").write_text("mine")
    done = medcil.erase(model, patient)
    assert done.thrown_away == ("explained", "versions/.v3.part")
    assert done.left == ("notes.txt", "versions/mine.txt")
    assert search(model, images, patient) == []


@pytest.mark.parametrize("beside", [None, "empty", "draft"])
def test_a_version_that_is_not_listed_stops_it(model, beside):
    patient = people(model, version="v1", part="holdout")[0]
    forget_versions(model, "v2")
    if beside:
        (model / "versions/.v2.part").mkdir()
    if beside == "draft":
        (model / "versions/.v2.part/request.json").write_text("{}")
    before = content(model)
    with pytest.raises(RunConflict, match=r"v2 exists, but model\.json does not list it"):
        medcil.erase(model, patient)
    assert content(model) == before


def test_file_names_given_with_eval_that_name_the_patient_go(model):
    patient = people(model, version="v2", part="exemplars")[0]
    path = model / "versions/v2/forgetting.json"
    cost = json.loads(path.read_text())
    entry = {"class": "alpha", "before": "alpha", "after": "gamma"}
    written = patient.lower().replace("-", "_")
    names = (written, f"{patient}7", "somebody")
    flipped = [{"file": f"alpha/{name}-1.png", **entry} for name in names]
    path.write_text(json.dumps({**cost, "measured_on": "eval", "flipped": flipped}))
    found = json.loads((model / "versions/v2/metrics.json").read_text())
    (model / "versions/v2/metrics.json").write_text(json.dumps({**found, "measured_on": "eval"}))
    reseal(model)
    with pytest.raises(InvalidInput, match="nothing was changed"):
        medcil.erase(model, "some")  # part of a name is nobody's id
    medcil.erase(model, patient)
    assert json.loads(path.read_text())["flipped"] == [{"file": "name removed", **entry}, *flipped[1:]]
    report = (model / "versions/v2/report.html").read_text()
    assert f"{written}-1.png" not in report
    assert "somebody-1.png" in report


def test_a_picture_filed_under_two_patients_goes_with_either(model):
    path = model / "versions/v1/people.json"
    found = json.loads(path.read_text())
    one, other = list(found["patients"])[:2]
    shared = found["patients"][one][0]
    found["patients"][other].append(shared)
    path.write_text(json.dumps(found))
    reseal(model)
    medcil.erase(model, one)
    left = ModelFolder(model).version("v1")
    assert one not in left.people()
    assert all(left.store.path(Path(file).name).exists() for file in left.people()[other])


def test_nobody_is_found(model, tmp_path, capsys):
    before = content(model)
    assert exit_code("erase", model, "--patient", "NOBODY") == 2
    message = capsys.readouterr().err
    assert "nothing was changed" in message
    assert not PERSON.search(message)  # no other patient's id as a suggestion
    for version in ("v1", "v2"):
        (model / "versions" / version / "people.json").unlink()
    reseal(model)
    before = content(model)
    with pytest.raises(InvalidInput, match="came without patients"):
        medcil.erase(model, "ALPHA-PERSON-0")
    assert content(model) == before
    assert exit_code("erase", tmp_path / "none", "--patient", "x") == 2
    assert not (tmp_path / "none").exists()


def test_links_are_not_taken_for_what_they_point_to(model, images, tmp_path):
    patient = people(model, version="v2", part="holdout")[0]
    (tmp_path / "explained").mkdir()
    (tmp_path / "explained/explanation.json").write_text("{}")
    (model / "explained").symlink_to(tmp_path / "explained")
    (model / "versions/v1").rename(tmp_path / "v1")
    (model / "versions/v1").symlink_to(tmp_path / "v1")
    before = content(tmp_path / "v1")
    with pytest.raises(InvalidInput, match="v1 is a link"):
        medcil.erase(model, patient)
    assert content(tmp_path / "v1") == before
    (model / "versions/v1").unlink()
    (tmp_path / "v1").rename(model / "versions/v1")
    done = medcil.erase(model, patient)
    assert (done.thrown_away, done.left) == ((), ("explained",))
    assert search(model, images, patient) == []


@pytest.mark.parametrize("patient", ["", " "])
def test_an_empty_id_is_nobody(model, patient):
    with pytest.raises(InvalidInput, match="id is empty"):
        medcil.erase(model, patient)


def test_another_patient_begun_before_is_finished_first(model, images, monkeypatch):
    from medcil.clinic import erase as erasing

    one, other = people(model, version="v1", part="exemplars")[:2]

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as disk:
        disk.setattr(erasing, "write_cleaned", full)
        with pytest.raises(MedcilError, match="No space left"):
            medcil.erase(model, one)
    check_versions(model)
    with pytest.raises(RunConflict, match="A patient is being erased"):
        medcil.update(model, images / "second")
    assert medcil.erase(model, other).versions == ("v1", "v2")
    assert [search(model, images, patient) for patient in (one, other)] == [[], []]
    assert len(json.loads((model / "tombstones.json").read_text())["tombstones"]) == 2
