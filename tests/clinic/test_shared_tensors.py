"""Versions of a model share the files of what did not change: statistics of classes, frozen networks."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import medcil
from medcil.clinic.inference import open_model
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.config import ExecutionConfig
from medcil.errors import DamagedFile
from medcil.readouts.ridge import Ridge
from medcil.storage.atomic import read_json, sha256
from medcil.storage.content_store import ContentStore
from medcil.training.state import State, load_state, save_state

from ..errors.raises import raises
from .generated import FEW, QUICK, content, write_folder, write_manifest
from .patients import people
from .tiny_model import tiny_state

CPU = ExecutionConfig(device="cpu", threads=1)
BLANK = np.zeros((1, 3, 32, 32), dtype=np.uint8)
ANALYTIC = {**QUICK, "method": "analytic", "exemplars": 2}
ANALYTIC["settings"] = ("execution.threads=1", "method.pretrained=true")


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, one more, two more; tests copy it."""
    root = tmp_path_factory.mktemp("analytic")
    for number, names in enumerate((("alpha", "beta"), ("gamma",), ("delta", "epsilon"))):
        data = write_manifest(write_folder(root / f"data{number}", *names, images=21))
        if number:
            medcil.update(root / "model", data, **FEW)
        else:
            medcil.train(data, root / "model", **ANALYTIC)
    return root


@pytest.fixture
def model(three_versions: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three_versions / "model", tmp_path / "model"))


def listed(model: Path, version: str | None = None) -> dict[str, list[str]]:
    folder = ModelFolder(model).version(version)
    return read_json(folder.state_path / "manifest.json")["tensors"]


def unlisted(model: Path) -> set[str]:
    versions = [ModelFolder(model).version(name) for name in ModelFolder(model).versions]
    names = {name for v in versions for name in v.tensor_names() | v.image_names()}
    stored = {path.name for kind in ("tensors", "images") for path in (model / kind).iterdir()}
    return stored - names - {"key"}


def ridge_state(*counts: int, pooled: bool = False, dim: int = 6) -> State:
    """Statistics of drawn features, so many of each class."""
    readout, generator = Ridge(), torch.Generator().manual_seed(0)
    readout.is_pooled, readout.balance = pooled, torch.tensor(0.5, dtype=torch.float64)
    readout._become(readout.statistics.empty(0, dim, balance=0.5 if pooled else None))
    for label, n in enumerate(counts):
        readout.add(torch.randn(n, 2, dim, generator=generator), label)
    readout.solve()
    old = tiny_state()
    readout.class_means, readout.log_prior = old.readout.class_means, old.readout.log_prior
    return replace(old, readout=readout)


def test_statistics_of_a_class_are_one_file_for_all_versions(model: Path) -> None:
    by_version = [listed(model, name)["readout.statistics"] for name in ("v1", "v2", "v3")]
    assert [len(files) for files in by_version] == [2, 3, 5]
    assert by_version[2][:3] == by_version[1]
    assert by_version[1][:2] == by_version[0]
    state = ModelFolder(model).version("v3").load_state()
    dim = state.readout.sums.shape[1]
    for label, name in enumerate(by_version[2]):
        path = model / "tensors" / name
        assert f"{sha256(path.read_bytes())}.safetensors" == name
        found = load_file(path)
        assert found["readout.counts"].tolist() == [state.inherent_counts[label]]
        assert found["readout.sums"].equal(state.readout.sums[[label]])
        assert found["readout.moments"].equal(state.readout.moments[[label]])
        assert {tensor.dtype for tensor in found.values()} == {torch.float64}
        assert 0 < path.stat().st_size - 8 * (1 + dim + dim * (dim + 1) // 2) < 512
    assert unlisted(model) == set()


def test_a_frozen_network_and_its_companion_are_stored_once(model: Path) -> None:
    versions = [listed(model, name) for name in ("v1", "v2", "v3")]
    for part, same in {"network.backbone": 1, "readout.companion": 1, "network.classifier": 3}.items():
        assert len({name for files in versions for name in files[part]}) == same, part
    raw = [path.read_bytes() for path in (model / "tensors").iterdir()]
    assert sum(b"network.backbone" in found for found in raw) == 1


def damage(path: Path) -> Iterator[str]:
    raw = bytearray(path.read_bytes())
    for place in (0, random.Random(path.name).randrange(len(raw)), len(raw) - 2):
        changed = raw.copy()
        changed[place] ^= 1
        path.write_bytes(changed)
        yield "was changed or damaged|is missing or damaged"
    path.unlink()
    yield "is missing"
    path.write_bytes(raw)


def test_damage_to_any_file_is_named_before_an_answer(model: Path) -> None:
    """Of the current version; the key of the images counts."""
    folder = ModelFolder(model).version()
    files = [folder.store.path(name) for name in folder.tensor_names()]
    images = {entry["file"] for entry in folder.exemplar_entries()}
    files += [*map(folder.store.path, images), model / "images/key"]
    expected = open_model(model, execution=CPU).answer(BLANK)
    for path in files:
        for words in damage(path):
            with pytest.raises(DamagedFile, match=f"{path} ({words}).*restore it"):
                open_model(model, execution=CPU)
    assert all(map(np.array_equal, open_model(model, execution=CPU).answer(BLANK), expected))


def test_an_older_version_does_not_need_the_newer_classes(model: Path) -> None:
    newest = listed(model, "v3")["readout.statistics"][-1]
    (model / "tensors" / newest).unlink()
    with raises("store.file.missing", newest):
        medcil.rollback(model, "v3")
    medcil.rollback(model, "v2")
    assert ModelFolder(model).version().load_state().class_names == ("alpha", "beta", "gamma")


@pytest.mark.parametrize("pooled", [False, True])
def test_a_saved_state_is_read_bit_for_bit(tmp_path: Path, pooled: bool) -> None:
    state = ridge_state(4, 7, 5, pooled=pooled)
    save_state(state, tmp_path / "state")
    again = load_state(tmp_path / "state")
    before, after = state.readout.state_dict(), again.readout.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) and before[name].dtype == after[name].dtype for name in before)
    listed = read_json(tmp_path / "state/manifest.json")["tensors"]
    assert len(listed["readout.statistics"]) == (1 if pooled else 3)


def test_a_class_that_changed_gets_a_new_file_and_the_old_one_stays(tmp_path: Path) -> None:
    store, state = ContentStore(tmp_path), ridge_state(4, 7, 5)
    save_state(state, tmp_path / "before", store)
    first = load_state(tmp_path / "before", store)
    state.readout.add(torch.ones(1, 2, 6), 1)
    save_state(state, tmp_path / "after", store)
    before, after = (
        read_json(tmp_path / name / "manifest.json")["tensors"]["readout.statistics"]
        for name in ("before", "after")
    )
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert load_state(tmp_path / "before", store).readout.counts.tolist() == [4, 7, 5]
    assert load_state(tmp_path / "after", store).readout.counts.tolist() == [4, 8, 5]
    assert load_state(tmp_path / "before", store).readout.moments.equal(first.readout.moments)


def test_a_draft_leaves_no_file_that_no_version_lists(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after it was measured; then another update throws it away, or the same one goes on."""

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    data = [write_folder(tmp_path / name, "zeta", images=n) for name, n in (("one", 21), ("other", 25))]
    expected = open_model(model, execution=CPU).answer(BLANK)
    with monkeypatch.context() as broken:
        broken.setattr(VersionFolder, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.update(model, data[0], **FEW)
    assert unlisted(model)
    assert all(map(np.array_equal, open_model(model, execution=CPU).answer(BLANK), expected))
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    medcil.update(model, data[0], **FEW)
    with pytest.warns(UserWarning, match="thrown away"):
        medcil.update(copy, data[1], **FEW)
    assert (unlisted(model), unlisted(copy)) == (set(), set())
    states = [ModelFolder(place).version().load_state() for place in (model, copy)]
    assert [state.readout.counts[-1] for state in states] == [17, 20]


@pytest.mark.parametrize("part", ["exemplars", "holdout"])
def test_erasing_a_patient_leaves_no_file_that_no_version_lists(
    model: Path, three_versions: Path, part: str
) -> None:
    patient = people(model, version="v2", part=part)[0]
    statistics = listed(model, "v3")["readout.statistics"]
    medcil.erase(model, patient)
    assert unlisted(model) == set()
    assert listed(model, "v3")["readout.statistics"] == statistics
    for name in ModelFolder(model).versions:
        assert ModelFolder(model).version(name).load_state().class_names[:2] == ("alpha", "beta")
    hidden = [name for name in content(model) if Path(name).name.startswith(".")]
    assert hidden == []
    assert not any(patient.encode() in raw for raw in content(model).values())


def test_a_copy_works_on_its_own(model: Path, tmp_path: Path) -> None:
    expected = open_model(model, execution=CPU).answer(BLANK)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    shutil.rmtree(model)
    assert all(map(np.array_equal, open_model(copy, execution=CPU).answer(BLANK), expected))
