"""Whoever is sealed is never trained on, in this version or a later one; and the other way round."""

import csv
import shutil
from pathlib import Path

import pytest
from PIL import Image

import medcil
from medcil.clinic.holdout import Seen, set_aside
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.train import Watches
from medcil.clinic.update import Plan
from medcil.data.cache import prepare
from medcil.data.sources.folder import read_own
from medcil.errors import InvalidInput

from .generated import write_folder
from .patients import QUICK, people
from .test_settings import given


@pytest.fixture
def model(of_patients, tmp_path) -> Path:
    return Path(shutil.copytree(of_patients / "model", tmp_path / "model"))


def write_patients(folder: Path, patients: list[str]) -> Path:
    """Images of a new class, in turn of these patients."""
    write_folder(folder, "delta", images=24)
    with (folder / "images.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "patient"])
        for number, path in enumerate(sorted(folder.glob("*/*.png"))):
            writer.writerow([path.relative_to(folder).as_posix(), "delta", patients[number % len(patients)]])
    return folder


def test_a_patient_stays_on_one_side_in_all_versions(model, tmp_path):
    sealed = people(model, version="v1", part="holdout")[0]
    trained = set(ModelFolder(model).version("v1").trained_patients())
    dropped = min(trained - set(ModelFolder(model).version("v2").people()))  # trained on, nothing kept
    kept = people(model, version="v2", part="exemplars")[0]
    new = write_patients(tmp_path / "new", [sealed.lower(), dropped, kept, *"abcdefg"])
    with pytest.warns(UserWarning, match="3 images are of sealed patients"):
        medcil.update(model, new, **QUICK)
    version = ModelFolder(model).version("v3")
    names = {who.casefold() for who in version.trained_patients()}
    assert sealed.casefold() not in names
    assert {dropped.casefold(), kept.casefold()} < names
    places = {
        (who.casefold(), file.split("/")[0]) for who, files in version.people().items() for file in files
    }
    assert (sealed.casefold(), "exemplars") not in places
    assert {(who.casefold(), "holdout") for who in (dropped, kept)}.isdisjoint(places)
    assert version.provenance()["holdout"] == {"delta": 5}  # a fifth: those three, and one patient more


def test_where_nobody_else_is_there_to_learn_from(model, tmp_path):
    sealed = people(model, version="v2", part="holdout")
    assert len(sealed) > 1
    with pytest.raises(InvalidInput, match="All images of 'delta' are of patients who are sealed"):
        medcil.update(model, write_patients(tmp_path / "new", sealed), **QUICK)


def test_without_sealing_a_sealed_patient_is_left_out():
    images = given([0] * 6, groups=["patient 1"] * 2 + ["patient 2"] * 4, patients=["Ann"] * 2 + ["Bob"] * 4)
    with pytest.warns(UserWarning, match="2 images"):
        train, sealed = set_aside(images, 0, seed=0, seen=Seen(sealed=frozenset({"ann"})))
    assert (train.tolist(), sealed.tolist()) == ([2, 3, 4, 5], [])


def test_of_a_test_part_nobody_is_sealed_whom_an_earlier_version_was_trained_on():
    names = ["Ann", "Bob", "Cy", "Di", "Ed", "Flo"]
    images = given([0] * 6, names, [False, False, True, True, True, False], patients=names)
    seen = Seen(sealed=frozenset({"ann"}), trained=frozenset({"cy", "di"}))
    with pytest.warns(UserWarning, match="1 images"):
        train, sealed = set_aside(images, 6, seed=0, seen=seen)
    assert (train.tolist(), sealed.tolist()) == ([1, 5], [0, 4])


def test_patients_who_share_a_file_are_on_the_same_side():
    """Seven patients of two images; each pair of neighbors among the first four has one file in common."""
    groups = [f"patient {i // 2}" for i in range(14)]
    hashes = ["a", "x", "x", "y", "y", "z", "z", *"bcdefgh"]
    for seed in range(20):
        images = given([0] * 14, groups, sha256s=hashes)
        train, sealed = set_aside(images, 6, seed=seed)
        assert {hashes[i] for i in train.tolist()}.isdisjoint(hashes[i] for i in sealed.tolist())
        assert len(sealed)


@pytest.mark.parametrize("part", ["exemplars", "holdout"])
def test_a_picture_that_the_model_keeps_cannot_come_again_as_another_class(model, tmp_path, part):
    new = write_folder(tmp_path / "new", "delta")
    version = ModelFolder(model).version()
    kept = next(file for files in version.people().values() for file in files if file.startswith(part))
    image = version.store.path(Path(kept).name)
    Image.open(image).save(new / "delta/again.bmp")  # the same pixels in another file
    with pytest.raises(InvalidInput, match=r"1 pictures of .* are known .*delta/again.bmp: '[a-z]+'"):
        medcil.update(model, new, dry_run=True)


def test_what_is_measured_on_was_not_trained_on(model, of_patients, tmp_path):
    new = write_folder(tmp_path / "new", "delta")
    held = write_folder(tmp_path / "held", "alpha", images=6, seed=9)
    trained = ModelFolder(model).version("v1").trained_patients()[0]
    rows = [f"alpha/00{number}.png,alpha,{trained if number < 2 else number}" for number in range(6)]
    (held / "list.csv").write_text("\n".join(["path,label,patient", *rows]))
    with pytest.warns(UserWarning, match="2 of 6 images of --eval are of patients who are trained on"):
        assert isinstance(medcil.update(model, new, eval=held, dry_run=True), Plan)
    (held / "list.csv").unlink()
    version = ModelFolder(model).version()
    exemplar = version.exemplar_entries()[0]["file"]
    shutil.copy(version.store.path(exemplar), held / "alpha/exemplar.png")
    with pytest.raises(InvalidInput, match=r"1 images that are trained on"):
        medcil.update(model, new, eval=held, dry_run=True)


def test_numbers_of_two_stores_are_of_different_people(of_patients, tmp_path):
    """A prepared store has numbers in place of patients: patient 1 of another store is somebody else."""
    for name, fewest in (("first", 2), ("second", 1)):
        prepare(read_own(of_patients / name, fewest_classes=fewest), tmp_path / name, side=32)
    model = tmp_path / "model"
    medcil.train(tmp_path / "first", model, backbone="resnet8_cifar", exemplars=5, **QUICK)
    medcil.update(model, tmp_path / "second", **QUICK)
    version = ModelFolder(model).version()
    assert {who.split(" of ")[1] for who in version.people()} == {"v1", "v2"}
    exemplar = people(model, version="v2", part="exemplars")[-1]
    before = version.holdout().class_counts(3).tolist()
    medcil.erase(model, exemplar)
    assert exemplar not in ModelFolder(model).version().people()
    assert ModelFolder(model).version().holdout().class_counts(3).tolist() == before
    with pytest.raises(InvalidInput, match="are numbers"):
        medcil.erase(model, "ALPHA-PERSON-0")


def test_images_to_measure_on_may_write_a_class_in_another_case(model, delta, tmp_path):
    held = write_folder(tmp_path / "held", "alpha", "beta", "delta", images=4, seed=9)
    found = []
    for spelled in ("beta", "BETA"):
        (held / "beta").rename(held / spelled)
        copy = shutil.copytree(model, tmp_path / spelled)
        found.append(medcil.update(copy, delta, eval=held, **QUICK).metrics)
    assert found[0]["images"] == 12
    assert found[0] == found[1]


def test_where_no_patient_is_known_training_and_updating_say_so(model, delta, tmp_path):
    """And say nothing where patients are named, however their column is written."""
    named = write_patients(tmp_path / "new", list("abcdefgh"))
    listed = (named / "images.csv").read_text()
    (named / "images.csv").write_text(listed.replace("patient", "Patient ID", 1))
    plan = medcil.update(model, named, dry_run=True, **QUICK)  # a warning would be an error here
    assert isinstance(plan, Plan)
    assert plan.holdout["delta"] % 3 == 0  # of three images each
    with pytest.warns(UserWarning, match="^No patient is known, .*in the column `patient`"):
        medcil.update(model, delta, dry_run=True, **QUICK)

    def stop(choices: object, lesson: object) -> None:
        raise KeyboardInterrupt

    data = write_folder(tmp_path / "data", "alpha", "beta")
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="^No patient is known"):
        medcil.train(data, tmp_path / "other", watches=Watches(settings=stop), **QUICK)
