"""Each thing that can be wrong, with each command that it can happen to, as a user meets it.

The exit code is the one of docs/reference/exit-codes.md, the first line says what is wrong and what to do,
nothing is written or changed.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from ..ordinary_user import ordinary_user
from .commands import COMMANDS, Place, arguments, run
from .generated import content, write_counts, write_folder


@pytest.fixture
def place(of_patients: Path, delta: Path, tmp_path: Path, monkeypatch) -> Place:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    return Place(model, delta, of_patients / "first", tmp_path / "out")


@pytest.fixture
def refused(place, tmp_path, capsys) -> Callable[..., None]:
    """(exit code, parts of the first line, the command): what lies in the test's folder stays as it is."""

    def check(code: int, parts: tuple[str, ...], *given: object) -> None:
        before = everything(tmp_path)
        said = run(capsys, *given)
        assert said.code == code, said.err
        for part in parts:
            assert part.lower() in said.first.lower()
        assert "Traceback" not in said.err
        assert ".tmp" not in said.err  # a name that nobody knows
        assert everything(tmp_path) == before

    return check


def everything(folder: Path) -> dict[str, bytes | None]:
    """Folders too."""
    return {str(path): None for path in folder.rglob("*") if path.is_dir()} | content(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_model_folder(command, place, refused):
    shutil.rmtree(place.model)
    refused(
        2, ("model does not exist", "Give the folder that `medcil train` wrote"), *arguments(command, place)
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_folder_for_a_model(command, place, refused):
    shutil.rmtree(place.model)
    place.model.mkdir()
    parts = ("model is no model folder (no model.json)", "Give the folder that `medcil train` wrote")
    refused(2, parts, *arguments(command, place))


@pytest.mark.parametrize("command", ["predict", "history", "update"])
def test_a_model_whose_training_was_killed(command, place, refused):
    (place.model / "versions/v1").rename(place.model / "versions/.v1.part")
    (place.model / "model.json").unlink()
    parts = ("is a model whose training is not finished", "run the same `medcil train` command again")
    refused(2, parts, *arguments(command, place))


@pytest.mark.parametrize("command", ["history", "export", "explain", "update"])
def test_a_file_for_a_model_folder(command, place, refused):
    shutil.rmtree(place.model)
    place.model.write_bytes(b"exported")
    refused(2, ("model is a file: this needs the model folder",), *arguments(command, place))


MANIFESTS = ["model.json", "state/manifest.json"]
"""Of the model, and of the weights and exemplars of a version."""


def everywhere(model: Path, file: str) -> list[Path]:
    """The file of the model, or of its versions."""
    return [model / file] if file == "model.json" else sorted(model.glob(f"versions/v*/{file}"))


@pytest.mark.parametrize("damaged", ["{", "[]", "{}"])
@pytest.mark.parametrize("file", MANIFESTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_manifest(command, file, damaged, place, refused):
    for path in everywhere(place.model, file):
        path.write_text(damaged)
    refused(5, (file, "restore it"), *arguments(command, place))


@pytest.mark.parametrize("damaged", ["{", "[]", "{}"])
@pytest.mark.parametrize(
    ("file", "command"),
    [
        *(("provenance.json", command) for command in ("update", "erase", "history")),
        *(("metrics.json", command) for command in ("erase", "history")),
        *(("holdout.json", command) for command in ("export", "erase")),
        *(("calibration.json", command) for command in ("predict", "evaluate", "export", "explain", "serve")),
        ("forgetting.json", "history"),
        ("people.json", "erase"),
    ],
)
def test_another_damaged_file_of_a_version(command, file, damaged, place, refused):
    for path in everywhere(place.model, file):
        path.write_text(damaged)
    refused(5, (file, "restore it"), *arguments(command, place))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_of_a_newer_version(command, place, refused):
    path = place.model / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    parts = ("was written by a newer medcil (format 99, this one reads 3): update medcil.",)
    refused(2, parts, *arguments(command, place))


@pytest.mark.parametrize("command", ["train", "update", "predict", "evaluate", "explain"])
def test_an_empty_folder_of_images(command, place, refused, tmp_path):
    empty = tmp_path / "empty"
    (empty / "alpha").mkdir(parents=True)
    given = arguments(command, place)
    given[1 if command == "train" else 2] = str(empty)
    refused(2, (f"{empty} holds no images", "Give a folder"), *given)


@pytest.mark.parametrize("command", ["train", "update"])
def test_settings_that_cannot_be_meant(command, place, refused):
    given = arguments(command, place)  # with --epochs 1
    given[1 if command == "train" else 2] = str(place.out / "none")  # said before any image is looked for
    parts = ("--epochs 1 and --set training.epochs=7 contradict each other: give one of them.",)
    refused(2, parts, *given, "--set", "training.epochs=7")
    parts = ("execution.processes=2: one process trains a model folder. Leave it out",)
    refused(2, parts, *given, "--set", "training.epochs=1", "--set", "execution.processes=2")


def test_one_class_only(place, refused, tmp_path):
    given = arguments("train", place)
    given[1] = str(write_folder(tmp_path / "one", "alpha", images=3))
    refused(2, ("has only one class, 'alpha'; two are the least",), *given)


@pytest.mark.parametrize("command", ["train", "update"])
def test_a_class_with_one_image(command, place, refused, tmp_path):
    given = arguments(command, place)
    data = write_counts(tmp_path / "few", {"delta": 1, "epsilon": 5})
    given[1 if command == "train" else 2] = str(data)
    refused(2, ("cannot be learned from", "add images, merge the classes", "delta: 1"), *given)


@pytest.mark.parametrize("command", ["train", "update", "evaluate"])
def test_the_same_class_twice(command, place, refused, tmp_path):
    data = write_folder(tmp_path / "twice", "delta", "epsilon", images=3)
    (data / "epsilon").rename(data / "Delta")
    given = arguments(command, place)
    given[1 if command == "train" else 2] = str(data)
    refused(2, ("two classes that differ in case or encoding only", "rename one of them"), *given)


def test_a_class_that_the_model_knows(place, refused, tmp_path):
    data = write_folder(tmp_path / "known", "beta", images=3)
    parts = ("The model knows the class 'beta'", "move that folder away")
    refused(2, parts, "update", place.model, data)


def test_a_version_that_is_not_there(place, refused):
    for command in ("predict", "evaluate", "export", "explain"):
        parts = ("has no version 'v11'. Did you mean 'v1'?",)
        refused(2, parts, *arguments(command, place), "--version", "v11")
    refused(2, ("has no version 'V1'. Did you mean 'v1'?",), "rollback", place.model, "V1")
    exported = place.out / "model.onnx"
    refused(2, ("holds one version: leave 'v1' out",), "predict", exported, place.image, "--version", "v1")


@pytest.fixture
def modes() -> Iterator[Callable[[Path, int], None]]:
    """Sets a mode; afterwards everything may be removed again."""
    changed = []

    def set_mode(path: Path, mode: int) -> None:
        changed.append((path, path.stat().st_mode))
        path.chmod(mode)

    yield set_mode
    for path, mode in reversed(changed):
        path.chmod(mode)


@pytest.mark.parametrize(
    "part", ["model.json", "versions", "versions/v2", "versions/v2/state/manifest.json", ""]
)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_permission_to_read_a_model(command, part, place, modes, tmp_path, capsys):
    before, given = everything(tmp_path), arguments(command, place)
    given = [argument.replace("v1", "v2") for argument in given] if command == "rollback" else given
    modes(place.model / part, 0)
    with ordinary_user():
        said = run(capsys, *given)
    (place.model / part).chmod(0o755)
    assert said.code == 2, said.err
    assert str(place.model) in said.first
    assert "permission denied" in said.first
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", ["update", "erase", "rollback"])
def test_no_permission_to_write_to_a_model(command, place, modes, refused):
    for folder in (place.model, place.model / "versions"):
        modes(folder, 0o555)
    parts = (f"{place.model}", "Cannot write to")
    with ordinary_user():
        refused(2, parts, *arguments(command, place))


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain", "export", "history", "serve"])
def test_who_may_only_read_a_model_can_use_it(command, place, modes, capsys):
    for folder in (place.model, *(path for path in place.model.rglob("*") if path.is_dir())):
        modes(folder, 0o555)
    before = everything(place.model)
    with ordinary_user():
        said = run(capsys, *arguments(command, place))
    assert said.code == 0, said.err
    assert everything(place.model) == before


@pytest.mark.parametrize("command", ["train", "predict", "evaluate", "export", "explain"])
def test_no_permission_to_write_beside_the_model(command, place, modes, refused):
    modes(place.out, 0o555)
    parts = (str(place.out), "Cannot write to")
    with ordinary_user():
        refused(2, parts, *arguments(command, place))


@pytest.mark.parametrize("command", ["train", "update", "predict", "evaluate", "explain"])
def test_no_permission_to_read_images(command, place, modes, refused, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(place.new if command == "update" else place.labeled, own)
    given = arguments(command, Place(place.model, own, own, place.out))
    for closed in (own, own / ("delta" if command == "update" else "alpha")):
        modes(closed, 0)
        with ordinary_user():
            said_of = (str(own),)
            refused(2, said_of, *given)
        closed.chmod(0o755)
