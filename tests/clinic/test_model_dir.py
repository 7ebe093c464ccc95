"""A model folder whose files have changed is found out before it answers."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medcil.clinic.inference import open_model
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.update import history
from medcil.config import ExecutionConfig
from medcil.errors import DamagedFile, MedcilError
from medcil.storage.atomic import sha256
from medcil.storage.content_store import ContentStore

from ..errors.raises import raises
from .generated import content
from .tiny_model import tiny_state, write_model

CPU = ExecutionConfig(device="cpu", threads=1)


def every_reading(model: Path) -> list[Any]:
    """All that commands tell of a model: its history; of every version the files, the hold-out, the answers
    to its images, the confusions they make, and the memory with its patients."""
    folder, found = ModelFolder(model), list[Any]()
    for name in folder.versions:
        version, opened = folder.version(name), open_model(model, version=name, execution=CPU)
        holdout, groups = version.holdout(), version.holdout_groups()
        pixels, labels = holdout.read_all().numpy(), holdout.labels
        scores, likeness = opened.answer(pixels)
        confusions = Counter(zip(labels.tolist(), scores.argmax(1).tolist(), strict=True))
        memory = version.load_state().memory
        found += [version.provenance(), version.metrics(), version.forgetting(), version.calibration()]
        found += [opened.class_names, opened.training_counts, sorted(opened.exemplars)]
        found += [version.exemplar_entries(), version.holdout_entries(), version.people(), groups]
        found += [memory.read_all().tolist(), memory.labels.tolist(), confusions]
        found += [pixels.tolist(), scores.tolist(), likeness.tolist()]
        found += [version.read(file) for file in version.files or ()]
    return [folder.current, history(model), *found]


def flipped(raw: bytes, choose: random.Random) -> bytes:
    """One other bit, and still JSON."""
    while True:
        changed = bytearray(raw)
        changed[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
        try:
            json.loads(changed)
        except ValueError:
            continue
        return bytes(changed)


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_flipped_bit_in_a_json_file_goes_unnoticed(of_patients, tmp_path, flips):
    """A command refuses the model, or everything it tells is as before."""
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    choose, expected = random.Random(0), every_reading(model)
    paths = sorted(model.rglob("*.json"))
    documents = {"calibration.json", "forgetting.json", "holdout.json", "metrics.json", "people.json"}
    assert documents | {"model.json", "manifest.json", "provenance.json"} <= {path.name for path in paths}
    before, refused, silent = content(model), 0, []
    for number in range(flips):
        path = paths[number % len(paths)]
        raw = path.read_bytes()
        path.write_bytes(flipped(raw, choose))
        try:
            if every_reading(model) != expected:
                silent.append(path)
        except MedcilError:
            refused += 1
        path.write_bytes(raw)
    assert silent == []
    assert refused > 0.9 * flips  # the rest tell nothing else: white space of model.json, for example
    assert content(model) == before


@pytest.mark.parametrize(
    "file", ["state/manifest.json", "calibration.json", "manifest.json", "../../model.json"]
)
def test_no_flipped_bit_changes_an_answer(tmp_path, file):
    model, choose = write_model(tmp_path / "model", tiny_state()), random.Random(1)
    pixels = np.zeros((1, 3, 32, 32), dtype=np.uint8)
    expected = open_model(model, execution=CPU).answer(pixels)
    path = model / "versions/v1" / file
    raw = path.read_bytes()
    for _ in range(10):
        path.write_bytes(flipped(raw, choose))
        try:
            found = open_model(model, execution=CPU).answer(pixels)
        except MedcilError:
            continue
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_exchanged_class_names_are_found_out(tmp_path):
    model = write_model(tmp_path / "model", tiny_state())
    path = model / "versions/v1/state/manifest.json"
    text = path.read_text().replace("nevus", "?").replace("melanoma", "nevus").replace("?", "melanoma")
    path.write_text(text)
    with pytest.raises(DamagedFile, match=r"state/manifest\.json was changed"):
        open_model(model, execution=CPU)


def test_an_image_is_stored_once_under_a_name_that_tells_nothing(tmp_path):
    model = write_model(tmp_path / "model", tiny_state())
    store = ModelFolder(model).store
    first = next(iter(ModelFolder(model).version().image_names()))
    raw = store.read(first)
    assert store.put(raw, "png") == first
    assert sha256(raw) not in first
    other = ContentStore(tmp_path / "other")
    other.create_key()
    assert other.put(raw, "png") != first  # the same picture has another name under another key
    shutil.copy(other.root / "images/key", model / "images/key")
    with raises("store.file.damaged", first):
        store.read(first)
