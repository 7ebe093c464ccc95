"""A state saved and loaded says the same; a damaged one says which file to restore."""

import json
import os
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image

from medcil.config import ExecutionConfig
from medcil.data.transforms import Preprocessing
from medcil.errors import DamagedFile, InvalidInput, MedcilError
from medcil.methods import terms
from medcil.methods.protocol import Phase, random_weights
from medcil.storage.atomic import sha256
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state, load_state, save_state

from ..small import (
    PREPROCESSING,
    SMALLEST,
    SPEC,
    changed_names,
    content_of,
    new_state,
    random_samples,
    readout_of,
    short_training,
    task_of,
)

CPU = ExecutionConfig(device="cpu")


def small_state(**changes) -> State:
    """Three classes in two blocks, exemplars in an order that no sorting would give."""
    state = new_state(seed=4)
    generator = torch.Generator().manual_seed(1)
    for size in (2, 1):
        state.network.grow(torch.randn(size, 64, generator=generator))
    state.network.requires_grad_(requires_grad=False)
    memory = random_samples([3, 2, 4]).select(torch.tensor([8, 0, 4, 2, 7, 1, 3, 5, 6])).copied()
    state = replace(
        state,
        memory=memory,
        class_names=("b", "a", "Ünïcode /\\ name"),
        inherent_counts=torch.tensor([30, 2, 400]),
        readout=readout_of(torch.randn(3, 64, generator=generator), torch.tensor([0.0, -0.5, 1.5])),
    )
    return replace(state, **changes)


@pytest.mark.parametrize("part", ["network", "class_means"])
def test_a_tensor_that_is_not_finite_is_never_saved(tmp_path, part):
    state = small_state()
    tensor = next(state.network.parameters()).data if part == "network" else state.readout.class_means
    tensor.view(-1)[0] = float("nan")
    with pytest.raises(MedcilError, match=rf"diverged: (readout\.)?{part}"):
        save_state(state, tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path):
    save_state(small_state(), tmp_path / "state")
    return tmp_path / "state"


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def listed_files(folder) -> list[str]:
    manifest = manifest_of(folder)
    tensors = [f"tensors/{name}" for group in manifest["tensors"].values() for name in group]
    return [*tensors, *(entry["file"] for entry in manifest["exemplars"])]


@pytest.mark.parametrize("kind", ["classifier", "nearest_mean"])
def test_a_loaded_state_is_the_saved_one(tmp_path, kind):
    preprocessing = Preprocessing(10, 8, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), views=8)
    state = small_state(preprocessing=preprocessing)
    state = replace(state, readout=readout_of(state.readout.class_means, kind=kind))
    save_state(state, tmp_path)
    again = load_state(tmp_path)
    assert again.class_names == state.class_names
    assert again.readout.kind == state.readout.kind
    assert again.preprocessing == state.preprocessing
    assert again.network.spec() == state.network.spec()
    assert torch.equal(again.inherent_counts, state.inherent_counts)
    for name, tensor in state.readout.named_buffers():
        assert torch.equal(again.readout.get_buffer(name), tensor)
    assert torch.equal(again.memory.labels, state.memory.labels)
    assert torch.equal(again.memory.read_all(), state.memory.read_all())
    test = random_samples([5], seed=9)
    assert torch.equal(predict_scores(again, test, CPU), predict_scores(state, test, CPU))


def test_a_state_that_says_nothing_of_views_has_one(saved):
    manifest = manifest_of(saved)
    assert manifest["preprocessing"].pop("views") == 1
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert load_state(saved).preprocessing == PREPROCESSING


def a_little_of_everything(network, increment):
    """A branch, several proxies, calibrations of one number and of one for each class."""
    network.add_branch(shared_stages=1)
    for block, size in enumerate(network.classifier.block_sizes):
        network.classifier.calibrate(block, size=size if block == 0 else 1)
    params = {
        "backbone": [*network.backbone.parameters(), *network.branches.parameters()],
        "classifier": [column for block in network.classifier.blocks for column in block],
        "calibration": list(network.classifier.calibrations.parameters()),
    }
    yield Phase("learn", {"classification": terms.cross_entropy()}, params, rates={"calibration": 0.01})


@dataclass(frozen=True)
class Rich:
    readout: str = "classifier"

    def learn(self, network, increment):
        network.grow(random_weights(increment, increment.n_new, 3, network.classifier.dim))
        yield from a_little_of_everything(network, increment)


def test_branches_proxies_and_calibrations_are_saved_bit_for_bit(tmp_path):
    config = short_training()
    state = learn_task(new_state(spec=SMALLEST), task_of([6, 5, 4]), Rich(), config)
    state = learn_task(state, task_of([5, 4], n_old=3), Rich(), config)
    spec = state.network.spec()
    assert (spec.n_branches, spec.shared_stages, spec.n_proxies) == (2, 1, 3)
    assert (spec.block_sizes, spec.calibration_sizes) == ((3, 2), (3, 1))
    calibrations = state.network.classifier.calibrations
    assert all(c.gain.ne(1).all() and c.shift.ne(0).all() for c in calibrations.values())

    save_state(state, tmp_path / "state")
    again = load_state(tmp_path / "state")
    assert again.network.spec() == spec
    assert again.network.state_dict().keys() == state.network.state_dict().keys()
    assert changed_names(content_of(state.network), content_of(again.network)) == set()
    test = random_samples([5], seed=9)
    assert torch.equal(predict_scores(again, test, CPU), predict_scores(state, test, CPU))
    # What is learned from it next is the same, too.
    next_task = task_of([4], n_old=5, seed=1)
    after, after_again = (learn_task(s, next_task, Rich(), config) for s in (state, again))
    assert changed_names(content_of(after.network), content_of(after_again.network)) == set()
    assert torch.equal(after_again.readout.class_means, after.readout.class_means)


def test_saving_twice_says_the_same_but_for_the_names_of_exemplars(tmp_path):
    for name in ("once", "twice"):
        save_state(small_state(), tmp_path / name)
    once, twice = (manifest_of(tmp_path / name) for name in ("once", "twice"))
    assert {e.pop("file") for e in once["exemplars"]} & {e.pop("file") for e in twice["exemplars"]} == set()
    assert once == twice


def test_a_state_without_classes_can_be_saved(tmp_path):
    save_state(new_state(), tmp_path)
    again = load_state(tmp_path)
    assert again.class_names == ()
    assert len(again.memory) == 0
    assert again.memory.images.side == PREPROCESSING.side


def test_the_folder_holds_the_manifest_tensors_and_png_files(saved):
    found = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *listed_files(saved)}
    assert {path.rsplit(".", 1)[1] for path in found} == {"json", "safetensors", "png"}
    for path in saved.glob("exemplars/*"):
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.info == {}


def test_exemplars_are_ranked_within_their_class(saved):
    ranks = {}
    for entry in manifest_of(saved)["exemplars"]:
        assert entry["rank"] == ranks.get(entry["class"], 0)
        ranks[entry["class"]] = entry["rank"] + 1
    assert ranks == {"b": 3, "a": 2, "Ünïcode /\\ name": 4}


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_damage_to_any_listed_file_is_found(saved, damage):
    for name in listed_files(saved):
        path = saved / name
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            middle = len(content) // 2
            tail = bytes([content[middle] ^ 1]) + content[middle + 1 :] if damage == "changed" else b""
            path.write_bytes(content[:middle] + tail)
        with pytest.raises(DamagedFile) as error:
            load_state(saved)
        assert str(path) in str(error.value)
        path.write_bytes(content)
    load_state(saved)


@pytest.mark.parametrize(
    "key",
    [
        "format",
        "class_names",
        "inherent_counts",
        "network",
        "readout",
        "preprocessing",
        "tensors",
        "exemplars",
    ],
)
def test_a_manifest_without_a_key_is_damaged(saved, key):
    manifest = manifest_of(saved)
    del manifest[key]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFile, match=r"manifest\.json"):
        load_state(saved)


@pytest.mark.parametrize(
    "change",
    [
        *({"block_sizes": sizes} for sizes in ([1, 1, 1], [2], [])),
        {"n_proxies": 2},
        {"n_branches": 1},
        {"calibration_sizes": [0, 1]},
        {"calibration_sizes": [0, 0, 1]},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_its_tensors_is_damaged(saved, change):
    manifest = manifest_of(saved)
    manifest["network"].update(change)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFile):
        load_state(saved)


def test_a_state_of_another_version_says_so(saved):
    manifest = manifest_of(saved)
    (saved / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(InvalidInput, match="has format 99"):
        load_state(saved)


def test_a_folder_without_a_manifest_holds_no_state(saved, tmp_path):
    (saved / "manifest.json").unlink()
    for folder in (saved, tmp_path / "none"):
        with pytest.raises(MedcilError, match=str(folder)):
            load_state(folder)


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        "medcil.storage.atomic.os.replace",
        lambda old, new, replace=os.replace: (written.append(new.name), replace(old, new)),
    )
    save_state(small_state(), tmp_path / "state")
    assert written[-1] == "manifest.json"
    assert len(written) == 1 + len(listed_files(tmp_path / "state"))


class Payload:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_no_pickle_is_read(saved, monkeypatch):
    content = pickle.dumps(Payload())

    def refuse(*arguments, **options):
        raise AssertionError("nothing may be unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(os, "system", refuse)
    load_state(saved)

    name = f"{sha256(content)}.safetensors"
    (saved / "tensors" / name).write_bytes(content)
    manifest = manifest_of(saved)
    manifest["tensors"]["readout.log_prior"] = [name]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFile):
        load_state(saved)


def test_the_first_network_is_a_function_of_the_seed():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (initial_state(SPEC, PREPROCESSING, seed=seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    name = "backbone.stages.0.0.0.weight"
    weights = [state.network.state_dict()[name] for state in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_manifest_reaches_no_file_outside_its_folder(saved, tmp_path):
    manifest = manifest_of(saved)
    outside = saved.parent / "elsewhere.png"
    outside.write_bytes((saved / manifest["exemplars"][0]["file"]).read_bytes())
    manifest["exemplars"][0]["file"] = "../elsewhere.png"
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFile, match="outside"):
        load_state(saved)
