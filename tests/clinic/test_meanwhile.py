"""Another command changes the model while an update looks at images or learns; and what lies in its way."""

import json
import shutil
from pathlib import Path

import pytest

import medcil
from medcil.clinic.model_dir import Draft, ModelFolder, VersionFolder
from medcil.clinic.train import FIRST, Watches, check_new_model
from medcil.errors import DamagedFile, InvalidInput, RunConflict

from ..errors.raises import raises
from .generated import FEW, content, forget_versions, reseal, write_folder
from .patients import QUICK, people, search


@pytest.fixture
def shared(of_patients, tmp_path) -> Path:
    """A model of patients, to be changed."""
    return Path(shutil.copytree(of_patients / "model", tmp_path / "shared"))


def test_whoever_is_forgotten_while_images_are_looked_at_does_not_come_back(shared, of_patients, delta):
    patient = people(shared, version="v2", part="exemplars")[0]
    watches = Watches(settings=lambda choices, lesson: medcil.erase(shared, patient))
    with pytest.raises(RunConflict, match="Another command has changed"):
        medcil.update(shared, delta, watches=watches, **QUICK)
    assert search(shared, of_patients, patient) == []
    medcil.update(shared, delta, **QUICK)
    assert search(shared, of_patients, patient) == []


def test_a_rollback_meanwhile_is_not_undone(shared, delta):
    watches = Watches(settings=lambda choices, lesson: medcil.rollback(shared, "v1"))
    with pytest.raises(RunConflict, match="Run this one again"):
        medcil.update(shared, delta, watches=watches, **QUICK)
    assert (ModelFolder(shared).versions, ModelFolder(shared).current) == (("v1", "v2"), "v1")


def stop(progress: object) -> None:
    raise KeyboardInterrupt


def test_what_was_not_listed_yet_is_measured_as_it_is_asked_for_now(model, delta, tmp_path, monkeypatch):
    """Killed between its last folder and the last write; then run again with a gate and other images."""
    held = write_folder(tmp_path / "held", "alpha", "delta", images=4, seed=9)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.update(model, delta, **FEW)
    assert (model / "versions/v2").is_dir()
    learned = content(model / "versions/v2/state")
    medcil.update(model, delta, eval=held, max_forgetting=100, **FEW)
    cost = json.loads((model / "versions/v2/forgetting.json").read_text())
    assert (cost["measured_on"], cost["gate"]["max_forgetting"]) == ("eval", 100)
    assert content(model / "versions/v2/state") == learned


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_version_that_an_older_list_does_not_have_is_never_deleted(shared, delta, dry_run):
    """model.json comes from a backup that was made before v2."""
    forget_versions(shared, "v2")
    before = content(shared)
    with pytest.raises(RunConflict, match=r"v2 exists, but model\.json does not list it"):
        medcil.update(shared, delta, dry_run=dry_run, **QUICK)
    assert content(shared) == before


@pytest.mark.parametrize("beside", ["empty", "foreign", "file"])
def test_what_is_no_draft_does_not_show_that_a_version_may_go(shared, delta, beside):
    part = shared / "versions/.v2.part"
    part.write_text("") if beside == "file" else part.mkdir()
    if beside == "foreign":
        (part / "notes.txt").write_text("mine")
    forget_versions(shared, "v2")
    before = content(shared)
    with pytest.raises(RunConflict, match=r"v2 exists, but model\.json does not list it"):
        medcil.update(shared, delta, **QUICK)
    assert content(shared) == before


@pytest.mark.parametrize("beside", ["foreign", "file"])
def test_a_foreign_draft_is_not_removed(model, delta, beside):
    part = model / "versions/.v2.part"
    path = part if beside == "file" else part / "notes.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with raises("model.draft.foreign", ".v2.part"):
        medcil.update(model, delta, **FEW)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("lost", ["write", "clean"])
def test_a_finished_version_is_never_dropped(model, delta, tmp_path, monkeypatch, lost):
    """Killed before or after it is listed; afterwards the older model.json is there."""

    def killed(place: ModelFolder | Draft, *arguments: object) -> None:
        if isinstance(place, ModelFolder) or (place.name == "v2" and place.place.exists()):
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(*((ModelFolder, "write") if lost == "write" else (Draft, "clean")), killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.update(model, delta, **FEW)
    if lost == "clean":
        forget_versions(model, "v2")
    before, learned = content(model), content(model / "versions/v2/state")
    with pytest.raises(RunConflict, match=r"v2 exists, but model\.json does not list it"):
        medcil.update(model, write_folder(tmp_path / "other", "epsilon"), **FEW)
    assert content(model) == before
    medcil.update(model, delta, **FEW)
    assert ModelFolder(model).versions == ("v1", "v2")
    assert content(model / "versions/v2/state") == learned


def test_a_version_thrown_away_in_part_is_never_gone_on_with(model, delta, tmp_path, monkeypatch):
    """The first command is killed after it has measured, another one while it tidies that away."""

    def killed(place: VersionFolder | Path, *arguments: object, **options: object) -> None:
        if isinstance(place, VersionFolder) or place.name == ".v2.part":
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(VersionFolder, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.update(model, delta, **FEW)
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", killed)
        with pytest.warns(UserWarning, match="thrown away"), pytest.raises(KeyboardInterrupt):
            medcil.update(model, write_folder(tmp_path / "other", "epsilon"), **FEW)
    (model / "versions/.v2.part/version/state/manifest.json").unlink()  # as if deleted in part
    with pytest.warns(UserWarning, match="thrown away"):
        medcil.update(model, delta, **FEW)
    assert ModelFolder(model).version("v2").metrics()["images"]


def test_what_a_killed_command_left_is_no_stranger(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/.model.json.abc.tmp").touch()
    folder = ModelFolder(tmp_path / "model")
    check_new_model(Draft(folder, FIRST))
    (tmp_path / "model/notes.txt").touch()
    with pytest.raises(RunConflict, match=r"notes\.txt"):
        check_new_model(Draft(folder, FIRST))


def test_an_update_goes_on_though_medcil_has_learned_of_a_setting_since(model, delta):
    with pytest.raises(KeyboardInterrupt):
        medcil.update(model, delta, watches=Watches(training=stop), **QUICK)
    path = model / "versions/.v2.part/request.json"
    request = json.loads(path.read_text())
    assert request["settings"]["first_task"].pop("sampler") is None
    path.write_text(json.dumps(request))
    medcil.update(model, delta, **QUICK)  # that it starts over would be warned of, an error here


@pytest.mark.parametrize("is_killed", [False, True])
def test_versions_without_their_list_are_left_as_they_are(shared, of_patients, delta, is_killed):
    """Also where an update of that model was killed before the list was lost."""
    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            medcil.update(shared, delta, watches=Watches(training=stop), **QUICK)
    (shared / "model.json").unlink()
    before = content(shared)
    said = r"model\.json is missing beside v1\. Restore it, or give another --out"
    with pytest.raises(DamagedFile, match=said):
        medcil.train(of_patients / "first", shared, backbone="resnet8_cifar", **QUICK)
    assert content(shared) == before


def test_the_folder_one_stands_in_is_called_a_model_where_it_is_one(shared, of_patients, monkeypatch):
    monkeypatch.chdir(shared)
    with pytest.raises(RunConflict, match="is a model already"):
        medcil.train(of_patients / "first", ".", **QUICK)


def test_a_model_among_the_images_is_refused(model, delta, tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    with pytest.raises(InvalidInput, match="inside the data"):
        medcil.train(data, data / "model")
    with pytest.raises(InvalidInput, match="inside the data"):
        medcil.update(model, model.parent)
    assert not (data / "model").exists()


@pytest.mark.parametrize("file", ["../../../secret.png", "/etc/secret.png", "..", "", 7])
def test_no_sealed_image_lies_elsewhere(model, delta, file):
    path = model / "versions/v1/holdout.json"
    manifest = json.loads(path.read_text())
    manifest["images"][0]["file"] = file
    path.write_text(json.dumps(manifest))
    reseal(model)
    with pytest.raises(DamagedFile, match=r"is no image or|is damaged"):
        medcil.update(model, delta, **FEW)
