"""`data.held_out`: training images take the test's place, and the test images are never read."""

import io
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.build import build_stream, parse_recipe
from medcil.config import RunConfig
from medcil.data.cache import prepare
from medcil.data.sources import phantom
from medcil.data.sources.folder import read_own
from medcil.data.stream import Stream
from medcil.experiments.run import run_experiment
from medcil.storage.atomic import read_json

CLASSES = ("eczema", "nevus", "wart")
Patient = Callable[[str, int], str]


def gray(c: int, i: int, *, is_test: bool) -> int:
    """Every image has a level of its own, by which it is known later."""
    return 40 * c + 2 * i + (120 if is_test else 0)


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 6), level).save(buffer, format="PNG")
    return buffer.getvalue()


def write_images(root: Path, *, n: int = 10, patient: Patient | None = None, can_test: bool = True) -> Path:
    """n training and 4 test images a class; where they cannot be read, the test images are damaged."""
    rows = ["path,label,split" + (",patient" if patient else "")]
    for split, n_images in (("train", n), ("test", 4)):
        for c, name in enumerate(CLASSES):
            for i in range(n_images):
                path = root / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                is_test = split == "test"
                whole = png(gray(c, i, is_test=is_test))
                path.write_bytes(whole if can_test or not is_test else whole[:40])
                # A patient of the test is one of training: only training images are asked whose they are.
                who = f",{patient(name, i)}" if patient else ""
                rows.append(f"{split}/{name}/{i}.png,{name},{split}{who}")
    if patient:
        (root / "list.csv").write_text("\n".join(rows))
    return root / "list.csv" if patient else root


def config(root: Path | None, *settings: str, name: str = "own", side: int = 6) -> RunConfig:
    content = {
        "data": {"name": name, "side": side, "crop": side, "held_out": 0.3},
        "scenario": {"base": 2, "increment": 1},
        "network": {"backbone": "resnet8_cifar"},
        "memory": {"per_class": 2},
        "training": {"epochs": 1, "batch_size": 8},
        "method": {"name": "balanced"},
        "execution": {"device": "cpu", "threads": 1},
    }
    return parse_recipe(content, [f"data.root={root}", *settings] if root else settings)


def levels(samples) -> list[int]:
    return samples.read_all()[:, 0, 0, 0].tolist()


def known_levels(*, is_test: bool, n: int) -> set[int]:
    return {gray(c, i, is_test=is_test) for c in range(3) for i in range(n)}


def assert_held_out_of_training(stream: Stream, *, n: int = 10) -> None:
    train, held = levels(stream.train), levels(stream.test)
    assert not set(train) & set(held)
    assert {*train, *held} == known_levels(is_test=False, n=n)
    assert len(train) + len(held) == 3 * n


def test_a_share_of_every_class_is_held_out_and_the_test_images_are_not_read(tmp_path):
    stream = build_stream(config(write_images(tmp_path, can_test=False)))
    assert_held_out_of_training(stream)
    assert stream.test.class_counts(3).tolist() == [3, 3, 3]
    assert stream.split == "0.3 of the training images, held out by images (given test not read)"


def test_without_it_the_test_images_are_read(tmp_path):
    """So that the test above can fail."""
    with pytest.raises(Exception, match="test"):
        build_stream(config(write_images(tmp_path, can_test=False), "data.held_out=null"))


@pytest.mark.parametrize("rule", ["given", "images", "groups"])
def test_patients_stay_whole_however_the_test_was_split_off(tmp_path, rule):
    """Three images of every patient; a split by images tears them apart from the test, and no further."""
    path = write_images(tmp_path, patient=lambda name, i: f"{name} {i // 3}")
    with pytest.warns(UserWarning, match="appear on both sides") if rule == "given" else nullcontext():
        stream = build_stream(config(path, f"data.split={rule}", "data.split_seed=3"))
    patient_of = {
        gray(c, i, is_test=is_test): (c, i // 3)
        for c in range(3)
        for i in range(10)
        for is_test in (False, True)
    }
    train, held = levels(stream.train), levels(stream.test)
    assert held
    assert not {patient_of[level] for level in train} & {patient_of[level] for level in held}
    assert stream.split.startswith("0.3 of the training images, held out by groups")
    # What the split set apart for the test is on neither side.
    there = config(path, f"data.split={rule}", "data.split_seed=3", "data.held_out=null")
    with pytest.warns(UserWarning, match="appear on both sides") if rule == "given" else nullcontext():
        whole = build_stream(there)
    assert Counter(train) + Counter(held) == Counter(levels(whole.train))
    assert not set(held) & set(levels(whole.test))


def test_a_prepared_store_holds_out_the_same_images(tmp_path):
    path = write_images(tmp_path / "images", patient=lambda name, i: f"{name} {i // 2}")
    prepare(read_own(path), tmp_path / "store", side=6)
    with pytest.warns(UserWarning, match="appear on both sides"):
        one, other = (build_stream(config(root)) for root in (path, tmp_path / "store"))
    assert_held_out_of_training(one)
    assert levels(one.test) == levels(other.test)
    assert levels(one.train) == levels(other.train)


def test_a_long_tail_is_cut_first_and_what_it_leaves_out_is_not_held_out(tmp_path):
    """Ten images of the first class, five of the second, two of the last; a share of these is held out."""
    root = write_images(tmp_path)
    tail = "scenario.long_tail={ratio: 0.25}"
    stream = build_stream(config(root, tail))
    whole = build_stream(config(root, tail, "data.held_out=null"))
    assert whole.train.class_counts(3).tolist() == [10, 5, 2]
    assert Counter(levels(stream.train) + levels(stream.test)) == Counter(levels(whole.train))
    counts = stream.test.class_counts(3).tolist()
    assert counts[0] == 3
    assert counts[1] in (1, 2)
    assert counts[2] == 1


def test_phantom_holds_out_of_its_training_images():
    stream = build_stream(config(None, name="phantom", side=16))
    whole = build_stream(config(None, "data.held_out=null", name="phantom", side=16))
    n = len(whole.train)
    assert len(stream.train) + len(stream.test) == n
    shares = stream.test.class_counts(7) / whole.train.class_counts(7)
    assert torch.allclose(shares, torch.tensor(0.3), atol=0.03)
    pixels, _ = phantom.phantom_arrays("test", side=16)
    tested = {image.tobytes() for image in pixels}
    assert not tested & {image.numpy().tobytes() for image in stream.test.read_all()}


def test_another_seed_holds_out_other_images(tmp_path):
    root = write_images(tmp_path)
    drawn = [levels(build_stream(config(root, f"data.split_seed={seed}")).test) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) != set(drawn[2])


@pytest.mark.parametrize("patient", [None, lambda name, i: "Jo" if name == "wart" else f"{name} {i}"])
def test_a_class_that_cannot_be_held_out_is_named(tmp_path, patient):
    root = write_images(tmp_path, patient=patient)
    settings = ["data.split=images"] if patient else ["scenario.long_tail={ratio: 0.1}"]
    what = "patient or lesion" if patient else "image"
    with pytest.warns(UserWarning, match=f"no more than one {what} of wart to train on"):
        stream = build_stream(config(root, *settings))
    assert stream.train.class_counts(3)[2] > 0
    assert stream.test.class_counts(3).tolist()[2] == 0


def test_a_run_records_what_it_was_tested_on_and_is_another_run_without(tmp_path):
    recipe = config(write_images(tmp_path / "images", can_test=False))
    metrics = run_experiment(recipe, tmp_path / "run")
    assert metrics["split"] == "0.3 of the training images, held out by images (given test not read)"
    assert metrics["inherent_counts"] == [7, 7, 7]
    assert [sum(map(sum, step["confusion"])) for step in metrics["steps"]] == [6, 9]
    assert read_json(tmp_path / "run/data.json")["test"]["images"] == 9
    assert np.isfinite(metrics["acc_balanced"])
