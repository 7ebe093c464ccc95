"""Each thing that can be wrong has its own message, which says what to do; the model is as it was."""

import errno
import json
from pathlib import Path

import pytest

import medcil
from medcil import errors
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.train import Watches
from medcil.storage import atomic

from .generated import FEW, QUICK, content, write_counts, write_folder


def refused(code: int, *parts: str):
    """The first line of the message has all these parts."""
    return _Refused(code, parts)


class _Refused:
    def __init__(self, code: int, parts: tuple[str, ...]) -> None:
        self.code, self.parts = code, parts

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        assert isinstance(error, errors.MedcilError), error
        first = str(error).splitlines()[0]
        assert error.exit_code == self.code
        for part in self.parts:
            assert part.lower() in first.lower()
        return True


def test_an_empty_folder(tmp_path):
    (tmp_path / "data").mkdir()
    with refused(2, "holds no images", "one subfolder per class"):
        medcil.train(tmp_path / "data", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_one_class_only(tmp_path):
    with refused(2, "only one class", "'alpha'", "two are the least"):
        medcil.train(write_folder(tmp_path / "data", "alpha"), tmp_path / "model")


def test_a_class_with_one_image(tmp_path):
    data = write_counts(tmp_path / "data", {"alpha": 25, "beta": 1})
    with refused(2, "add images, merge the classes or leave them out", "beta: 1"):
        medcil.train(data, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_damaged_image(tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    (data / "alpha/003.png").write_bytes(b"no image")
    with refused(2, "replace or leave them out", "alpha/003.png"):
        medcil.train(data, tmp_path / "model")


def test_a_folder_that_is_a_model_already(model, delta):
    before = content(model)
    with refused(4, "is a model already", "medcil update"):
        medcil.train(delta, model)
    assert content(model) == before


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/dear.txt").write_text("...")
    with refused(4, "holds no model", "dear.txt", "new folder"):
        medcil.train(write_folder(tmp_path / "data", "alpha", "beta"), tmp_path / "letters", **QUICK)


@pytest.mark.parametrize("name", ["beta", "Beta"])
def test_a_class_that_the_model_knows(model, tmp_path, name):
    write_folder(tmp_path / "new", "beta", "delta", seed=1)
    (tmp_path / "new/beta").rename(tmp_path / "new" / name)
    before = content(model)
    with refused(2, repr(name), "knows the class", "Move that folder away"):
        medcil.update(model, tmp_path / "new")
    assert content(model) == before


def test_a_missing_model_folder(tmp_path, delta):
    for call in (medcil.update, lambda model, _: medcil.history(model), medcil.rollback):
        with refused(2, "does not exist", "medcil train"):
            call(tmp_path / "nowhere", delta if call is medcil.update else "v1")
    with refused(2, "is no model folder", "medcil train"):
        medcil.history(delta)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "written",
    [
        "{",
        "[]",
        "{}",
        '{"format": 3}',
        '{"format": 3, "current": "v2", "versions": {"v1": "0"}, "sha256": "0"}',
        '{"format": 3, "current": "../v1", "versions": {"../v1": "0"}, "sha256": "0"}',
    ],
)
def test_a_damaged_manifest(model, written):
    (model / "model.json").write_text(written)
    with refused(5, "model.json", "restore it"):
        medcil.history(model)


@pytest.mark.parametrize("file", ["holdout.json", "provenance.json", "state/manifest.json"])
def test_a_damaged_file_of_a_version(model, delta, file):
    (model / "versions/v1" / file).write_text('{"format": 1')
    before = content(model)
    with refused(5, Path(file).name, "restore it"):
        medcil.update(model, delta, **FEW)
    assert {name: found for name, found in content(model).items() if ".part" not in name} == before


def test_a_changed_sealed_image(model):
    version = ModelFolder(model).version()
    first = version.holdout_entries()[0]["file"]
    version.store.path(first).write_bytes(b"changed")
    with refused(5, first, "restore it"):
        version.holdout()


def test_a_version_that_is_gone(model):
    (model / "versions/v1").rename(model / "versions/elsewhere")
    with refused(5, "is missing", "restore it"):
        ModelFolder(model).version()


def test_a_model_of_a_newer_version(model, delta):
    content_of = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps({**content_of, "format": 4}))
    with refused(2, "newer medcil", "update medcil"):
        medcil.update(model, delta)


def test_an_unknown_version_leads_to_the_nearest(model):
    with refused(2, "no version 'v11'", "Did you mean 'v1'?"):
        medcil.rollback(model, "v11")


def test_no_disk_space(model, delta, monkeypatch):
    before = content(model)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", full)
        with refused(1, "No space left", "run the same command again"):
            medcil.update(model, delta, **FEW)
    assert {name: found for name, found in content(model).items() if ".part" not in name} == before
    medcil.update(model, delta, **FEW)
    assert ModelFolder(model).current == "v2"


def test_no_permission_to_write(model, delta, monkeypatch):
    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(model / "versions"))

    monkeypatch.setattr(atomic.tempfile, "mkstemp", forbidden)
    with refused(2, "Cannot write to", "permission denied"):
        medcil.update(model, delta, **FEW)


def test_no_permission_to_read(model, monkeypatch):
    def forbidden(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with refused(2, "model.json", "permission denied"):
        medcil.history(model)


def test_two_at_once(model, delta):
    with ModelFolder(model).locked(), refused(3, "Another process is working"):
        medcil.update(model, delta, **FEW)


def test_another_update_that_was_faster(model, delta, tmp_path):
    other = write_folder(tmp_path / "other", "zeta")

    def meanwhile(*_: object) -> None:
        medcil.update(model, other, **FEW)

    with refused(4, "Another command has changed", "Run this one again"):
        medcil.update(model, delta, **FEW, watches=Watches(settings=meanwhile))
    assert ModelFolder(model).version("v2").load_state().class_names == ("alpha", "beta", "gamma", "zeta")
    medcil.update(model, delta, **FEW)
    assert ModelFolder(model).version().name == "v3"


def test_images_to_measure_on_that_are_trained_on(tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    with refused(2, "50 images that are trained on", "out of one"):
        medcil.train(data, tmp_path / "model", eval=data, **QUICK)


def test_images_to_measure_on_of_an_unknown_class(tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    held = write_folder(tmp_path / "held", "zeta")
    with refused(2, "'zeta'", "does not know", "Rename the folder"):
        medcil.train(data, tmp_path / "model", eval=held, **QUICK)


def test_a_method_that_does_not_exist(tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    with refused(2, "no method 'balancd'", "Did you mean 'balanced'?"):
        medcil.train(data, tmp_path / "model", method="balancd")
