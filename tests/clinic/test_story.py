"""train -> update -> update on a generated folder, from the command line; what each leaves behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import medcil
from medcil.cli.main import app, main
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.train import Trained
from medcil.clinic.update import Plan
from medcil.config import ExecutionConfig
from medcil.storage.atomic import sha256
from medcil.training.inference import predict_scores

from .generated import FEW, QUICK, content, write_folder, write_manifest

CPU = ExecutionConfig(device="cpu", threads=1)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_the_story_on_a_generated_folder(tmp_path):
    first = write_folder(tmp_path / "first", "alpha", "beta", "gamma")
    model, quick = tmp_path / "model", ("--set", "execution.threads=1")
    said = run("train", first, "--out", model, "--epochs", 2, "--backbone", "resnet8_cifar", *quick)
    assert "training.epochs 2 asked for" in said
    assert "method.name balanced" in said
    shutil.rmtree(first)  # the folder is all that is needed from now on
    said = run("update", model, write_folder(tmp_path / "second", "delta"), *quick)
    assert "The new classes are recognized in" in said
    v2 = content(model / "versions/v2")
    run("update", model, write_folder(tmp_path / "third", "epsilon", "zeta"), *quick)

    folder = ModelFolder(model)
    assert (folder.versions, folder.current) == (("v1", "v2", "v3"), "v3")
    assert content(model / "versions/v2") == v2  # never changed afterwards
    assert sorted(path.name for path in (model / "versions").iterdir()) == ["v1", "v2", "v3"]
    names = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
    assert folder.version().load_state().class_names == names
    assert folder.version().holdout().class_counts(6).tolist() == [5] * 6  # a fifth of 25
    said = run("history", model)
    assert "* v3" in said
    assert "epsilon, zeta" in said
    assert medcil.history(model)[2]["is_current"]

    run("rollback", model, "v1")
    assert folder.current == "v1"
    assert folder.versions == ("v1", "v2", "v3")
    assert exit_code("rollback", model, "v9") == 2


def test_every_file_of_a_version_is_what_its_description_says(model, delta):
    done = medcil.update(model, delta, **FEW)
    assert isinstance(done, Trained)
    version = ModelFolder(model).version("v2")
    facts = version.provenance()
    assert facts["parent"] == "v1"
    assert facts["classes_added"] == ["delta"]
    assert facts["images"] == {"delta": 20}
    assert facts["holdout"] == {"delta": 5}
    hashes = sorted(f"{sha256(path.read_bytes())} delta" for path in (delta / "delta").iterdir())
    assert facts["images_sha256"] == sha256("\n".join(hashes).encode())
    assert facts["settings"]["training"]["momentum"] == 0.9  # every default is written out
    assert facts["settings"]["training"]["epochs"] == 2
    found = version.metrics()
    state, sealed = version.load_state(), version.holdout()
    predicted = predict_scores(state, sealed, CPU).argmax(dim=1)
    assert found["accuracy"] == pytest.approx((predicted == sealed.labels).double().mean().item())
    assert version.calibration().unlike.measured_on == "hold-out"
    assert "not a medical device" in (version.root / "card.md").read_text()
    assert "What the update cost" in (version.root / "report.html").read_text()
    assert "<script" not in (version.root / "report.html").read_text()


def test_no_path_of_the_machine_and_no_patient_is_in_what_is_written(tmp_path):
    data = write_manifest(write_folder(tmp_path / "hidden-place", "alpha", "beta"))
    medcil.train(data, tmp_path / "model", **QUICK)
    for name, found in content(tmp_path / "model").items():
        assert str(tmp_path).encode() not in found, name
        assert b"hidden-place" not in found, name
        if not name.endswith("people.json"):
            assert b"-PERSON-" not in found, name


def test_people_name_every_exemplar_and_sealed_image_of_a_patient(tmp_path):
    """Against the pixels themselves: a file belongs to whoever's original shows the same."""
    data = write_manifest(write_folder(tmp_path / "data", "alpha", "beta"))
    medcil.train(data, tmp_path / "model", **QUICK)
    new = write_manifest(write_folder(tmp_path / "new", "gamma"))
    medcil.update(tmp_path / "model", new, **FEW)
    owner = {}
    for folder in (data, new):
        for path in folder.glob("*/*.png"):
            person = f"{path.parent.name.upper()}-PERSON-{int(path.stem) // 3}"
            owner[medcil_pixels(path)] = person
    for name in ("v1", "v2"):
        version = ModelFolder(tmp_path / "model").version(name)
        found = {file: person for person, files in version.people().items() for file in files}
        store = version.store
        assert found == {file: owner[medcil_pixels(store.path(Path(file).name))] for file in found}
        assert {Path(file).name for file in found} == version.image_names()
        sealed = {person for file, person in found.items() if file.startswith("holdout/")}
        kept = {person for file, person in found.items() if file.startswith("exemplars/")}
        assert not sealed & kept  # whole patients


def medcil_pixels(path: Path) -> bytes:
    from PIL import Image

    return Image.open(path).convert("RGB").tobytes()


def test_the_sealed_images_are_never_trained_on(tmp_path, monkeypatch):
    from medcil.clinic import train as training

    seen = []
    learn_task = training.learn_task

    def spy(state, task, *arguments, **options):
        seen.append(task.train.read_all())
        return learn_task(state, task, *arguments, **options)

    monkeypatch.setattr(training, "learn_task", spy)
    data = write_folder(tmp_path / "data", "alpha", "beta")
    shutil.copy(data / "alpha/000.png", data / "alpha/copy.png")  # the same file must not be on both sides
    with pytest.warns(UserWarning, match="twice|same|duplicate|copies"):
        medcil.train(data, tmp_path / "model", **QUICK)
    trained = {image.numpy().tobytes() for image in seen[0]}
    sealed = {
        image.numpy().tobytes() for image in ModelFolder(tmp_path / "model").version().holdout().read_all()
    }
    assert len(sealed) == 10
    assert not trained & sealed
    assert len(trained | sealed) == 50


def test_images_that_came_as_test_are_not_trained_on(tmp_path):
    for part, n in (("train", 22), ("test", 4)):
        write_folder(tmp_path / "data" / part, "alpha", "beta", images=n, seed=n)
    done = medcil.train(tmp_path / "data", tmp_path / "model", **QUICK, holdout=3)
    assert done.provenance["images"] == {"alpha": 22, "beta": 22}
    assert done.provenance["holdout"] == {"alpha": 3, "beta": 3}


def test_a_dry_run_writes_nothing(model, delta, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in sorted(model.rglob("*"))}
    plan = medcil.update(model, delta, dry_run=True, epochs=7)
    assert isinstance(plan, Plan)
    assert {path: path.stat().st_mtime_ns for path in sorted(model.rglob("*"))} == before
    assert (plan.version, plan.parent, plan.images, plan.holdout) == ("v2", "v1", {"delta": 20}, {"delta": 5})
    pace = ModelFolder(model).version().provenance()["images_per_second"]
    images = 20 + 60  # new ones, and three classes' exemplars
    assert plan.seconds == pytest.approx(7 * images / (pace * 3 / 4))
    longer = medcil.update(model, delta, dry_run=True, epochs=10, method="der")
    assert isinstance(longer, Plan)  # which ends with three tenths of the epochs more, on a balanced part
    assert longer.seconds == pytest.approx(13 * images / (pace * 3 / 4))
    assert "Nothing was written" in run("update", model, delta, "--dry-run")


def test_beyond_the_gate_a_version_is_written_but_not_promoted(model, delta, monkeypatch):
    from medcil.clinic import measure

    def all_are_delta(state, samples, execution):
        label = len(state.class_names) - 1 if len(state.class_names) == 4 else 0
        return torch.full((len(samples),), label).numpy()

    monkeypatch.setattr(
        measure, "predicted", all_are_delta
    )  # 5 of 15 right before, none after: a third of recall
    assert exit_code("update", model, delta, "--max-forgetting", 34, "--epochs", 1) == 0
    assert ModelFolder(model).current == "v2"
    run("rollback", model, "v1")
    assert exit_code("update", model, delta, "--max-forgetting", 33, "--epochs", 1) == 8
    folder = ModelFolder(model)
    assert (folder.versions, folder.current) == (("v1", "v2", "v3"), "v1")
    cost = json.loads((folder.version("v3").root / "forgetting.json").read_text())
    assert cost["gate"] == {"max_forgetting": 33.0, "loss_in_points": pytest.approx(100 / 3), "passed": False}
    assert not medcil.history(model)[2]["is_promoted"]
    assert folder.version().load_state().class_names == ("alpha", "beta", "gamma")


def test_without_sealed_images_there_is_no_verdict(tmp_path, delta):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    held = write_folder(tmp_path / "held", "alpha", "beta", images=6, seed=9)
    done = medcil.train(data, tmp_path / "model", eval=held, **QUICK)
    assert done.metrics["measured_on"] == "eval"
    assert done.metrics["images"] == 12
    assert done.provenance["holdout"] == {"alpha": 0, "beta": 0}
    with pytest.raises(medcil.errors.InvalidInput, match="--eval"):
        medcil.update(tmp_path / "model", delta, max_forgetting=5, **FEW)
    said = run("update", tmp_path / "model", delta, "--epochs", 1)
    assert "No verdict: measured on training exemplars: optimistic." in said
    write_folder(tmp_path / "held", "delta", images=6, seed=9)
    run("rollback", tmp_path / "model", "v1")
    measured = medcil.update(tmp_path / "model", delta, eval=held, max_forgetting=100, **FEW)
    assert isinstance(measured, Trained)
    assert measured.forgetting["measured_on"] == "eval"
    assert measured.forgetting["verdict"]
    assert {entry["file"].split("/")[0] for entry in measured.forgetting["flipped"]} <= {"alpha", "beta"}


def test_what_was_asked_for_counts_for_later_updates(model, delta):
    done = medcil.update(model, delta, method="finetune", settings=("training.momentum=0.5",))
    assert isinstance(done, Trained)
    settings = done.provenance["settings"]
    assert settings["method"]["name"] == "finetune"
    assert settings["training"]["momentum"] == 0.5
    assert settings["training"]["epochs"] == 2  # asked for when it was trained
    assert settings["network"]["backbone"] == "resnet8_cifar"


def test_a_model_keeps_its_views(tmp_path, delta):
    data, model = write_folder(tmp_path / "data", "alpha", "beta"), tmp_path / "model"
    settings = (*QUICK["settings"], "data.views=8")
    medcil.train(data, model, **{**QUICK, "settings": settings})
    medcil.update(model, delta)
    medcil.update(model, write_folder(tmp_path / "more", "epsilon"), settings=("data.views=2",))
    for name, views in (("v1", 8), ("v2", 8), ("v3", 2)):
        version = ModelFolder(model).version(name)
        assert version.load_state().preprocessing.views == views
        assert version.provenance()["settings"]["data"]["views"] == views


@pytest.mark.parametrize("views", [(1, 8), (8, 1)])
def test_an_update_that_changes_the_views_is_held_against_the_model_as_it_was(
    views, tmp_path, delta, monkeypatch
):
    from medcil.clinic import measure

    asked_in = []

    def predicted(state, *rest):
        asked_in.append(state.preprocessing.views)
        return of_module(state, *rest)

    before, after = (f"data.views={n}" for n in views)
    first = write_folder(tmp_path / "data", "alpha", "beta", "gamma")
    medcil.train(first, tmp_path / "model", **{**QUICK, "settings": (*QUICK["settings"], before)})
    of_module = measure.predicted
    monkeypatch.setattr(measure, "predicted", predicted)
    medcil.update(tmp_path / "model", delta, epochs=1, settings=(after,))
    assert asked_in == list(views)
    v1, v2 = (ModelFolder(tmp_path / "model").version(name) for name in ("v1", "v2"))
    recalls = {each["name"]: each["recall"] for each in v1.metrics()["classes"]}
    cost = json.loads((v2.root / "forgetting.json").read_text())
    assert {each["name"]: each["before"]["recall"] for each in cost["old_classes"]} == recalls


def test_an_update_may_turn_images_and_that_is_what_it_trains_with(model, delta, tmp_path):
    turned = Path(shutil.copytree(model, tmp_path / "turned"))
    medcil.update(model, delta, **FEW)
    medcil.update(turned, delta, **{**FEW, "settings": ("data.augmentation=dihedral",)})
    states = [ModelFolder(folder).version().load_state() for folder in (model, turned)]
    assert [state.preprocessing.augmentation for state in states] == ["crop", "dihedral"]
    assert not torch.equal(states[0].network.classifier.weight, states[1].network.classifier.weight)


@pytest.mark.parametrize(
    "setting", ["data.crop=16", "data.side=64", "network.backbone=resnet18", "network.weights=x"]
)
def test_what_was_settled_by_training_is_refused_in_an_update(setting, model, delta):
    before, (key, value) = content(model), setting.split("=")
    with pytest.raises(
        medcil.errors.InvalidInput,
        match=rf"^{key}={value} differs from the .* that the model",
    ):
        medcil.update(model, delta, settings=[setting])
    with pytest.raises(medcil.errors.InvalidInput, match=r"^data.root has no part in an update"):
        medcil.update(model, delta, settings=["data.root=/"])
    assert content(model) == before


def test_a_method_that_cannot_go_on_with_the_network_is_refused(model, delta):
    before = content(model)
    with pytest.raises(medcil.errors.InvalidInput, match="cannot go on with this network"):
        medcil.update(model, delta, method="podnet")
    assert content(model) == before


def test_a_method_of_statistics_is_refused_where_there_are_none(model, delta):
    """It would score every image as one of the new classes."""
    before = content(model)
    with pytest.raises(medcil.errors.InvalidInput) as error:
        medcil.update(model, delta, method="analytic")
    assert error.value.code == "method.statistics.missing"
    assert content(model) == before


def test_what_a_method_decided_is_recorded_and_on_the_card(tmp_path):
    settings = ("method.adapt=auto", "execution.threads=1")
    data = write_folder(tmp_path / "data", "alpha", "beta")
    done = medcil.train(data, tmp_path / "model", method="analytic", **QUICK | {"settings": settings})
    (decision,) = done.provenance["decisions"]
    assert decision["key"] == "method.adapt"
    assert decision["value"] in ("always", "never")
    version = ModelFolder(tmp_path / "model").version()
    assert vars(version.load_state().decisions[0]) == decision
    for name in ("card.md", "report.html"):
        assert decision["why"] in version.read(name).decode(), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["icarl", "der", "lws", "gaussians"])
def test_other_kinds_of_methods(tmp_path, delta, method):
    """Nearest means, a growing network, a second stage, a memory of numbers."""
    data = write_folder(tmp_path / "data", "alpha", "beta")
    medcil.train(data, tmp_path / "model", method=method, **QUICK)
    done = medcil.update(tmp_path / "model", delta)
    assert isinstance(done, Trained)
    assert done.provenance["settings"]["method"]["name"] == method
    assert ModelFolder(tmp_path / "model").version().load_state().class_names == ("alpha", "beta", "delta")
