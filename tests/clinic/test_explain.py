"""What an explanation says, against the same computed place by place."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from medcil.clinic.calibration import Calibration, Unlike
from medcil.clinic.explain import Explanation, explain, explain_state
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages, encode_png, no_samples
from medcil.data.transforms import Preprocessing
from medcil.errors import InvalidInput

from ..small import random_images
from .tiny_model import NAMES, tiny_state, write_model

CPU = ExecutionConfig(device="cpu")
SIDE, CROP, WINDOW = 22, 20, 4
TEMPERATURE = 0.1  # so that the falls are far above rounding


def state_of(n_exemplars: int = 3, views: int = 1):
    """Larger images than elsewhere, so that windows are small."""
    labels = torch.arange(3).repeat_interleave(n_exemplars)
    memory = Samples(TensorImages(random_images(len(labels), side=SIDE, seed=4)), labels)
    return replace(
        tiny_state(), memory=memory, preprocessing=Preprocessing(side=SIDE, crop=CROP, views=views)
    )


def calibration_of(state, threshold: float = -1.0) -> Calibration:
    prior = tuple(state.readout.log_prior.tolist())
    return Calibration(TEMPERATURE, prior, Unlike(threshold, 0.05, "hold-out"), images=60)


def explained(state, pixels, **options) -> Explanation:
    return explain_state(state, pixels, calibration=calibration_of(state), execution=CPU, **options)


def odds_by_hand(state, seen: torch.Tensor, c: int) -> float:
    views = [seen.numpy(), np.flip(seen.numpy(), 3)][: state.preprocessing.views]
    with torch.no_grad():
        scores = sum(state.network.eval()(torch.from_numpy(view.copy())).logits[0] for view in views)
    scores = scores.double() / len(views)
    p = torch.softmax((scores - state.readout.log_prior) / TEMPERATURE, dim=0)
    return float(torch.log(p[c] / (p.sum() - p[c])))


@pytest.mark.parametrize("views", [1, 2])
def test_the_map_is_the_fall_of_the_log_odds_where_the_image_is_covered(views):
    state, pixels = state_of(views=views), random_images(1, side=SIDE, seed=9)[0]
    found = explained(state, pixels)
    assert (found.window, found.classes[0].saliency.shape) == (WINDOW, (CROP, CROP))
    seen = state.preprocessing.normalize(pixels[None, :, 1:21, 1:21])
    mirrored = np.pad(seen[0].numpy().astype(np.float64), ((0, 0), (5, 5), (5, 5)), mode="reflect")
    for of in found.classes:
        c = NAMES.index(of.name)
        whole = odds_by_hand(state, seen, c)
        assert of.probability == pytest.approx(1 / (1 + np.exp(-whole)), abs=1e-5)
        # One window alone reaches a corner's outermost place.
        for corner in ((0, 0), (0, CROP - WINDOW), (CROP - WINDOW, 0)):
            covered = seen.clone()
            for y in range(corner[0], corner[0] + WINDOW):
                for x in range(corner[1], corner[1] + WINDOW):
                    surroundings = mirrored[:, y : y + 11, x : x + 11].mean(axis=(1, 2))
                    covered[0, :, y, x] = torch.from_numpy(surroundings)
            fall = whole - odds_by_hand(state, covered, c)
            place = tuple(0 if start == 0 else CROP - 1 for start in corner)
            assert of.saliency[place] == pytest.approx(fall, abs=1e-4)
            assert abs(fall) > 2e-3


def test_the_classes_are_the_two_most_probable_ones():
    found = explained(state_of(), random_images(1, side=SIDE, seed=9)[0])
    ranked = sorted(found.probabilities, key=found.probabilities.__getitem__, reverse=True)
    assert ranked[:2] == [of.name for of in found.classes]
    assert sum(found.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize("views", [1, 8])
def test_the_nearest_exemplars_come_first(views):
    state = state_of(views=views)
    exemplars = state.memory.read_all()
    found = explained(state, exemplars[4], files=[f"{i}.png" for i in range(9)])
    by_name = {of.name: of for of in found.classes}
    with torch.no_grad():
        crops = state.preprocessing.normalize(exemplars[:, :, 1:21, 1:21])
        units = F.normalize(state.network.eval()(crops).embedding)
    for c, name in enumerate(NAMES):
        if name in by_name:
            cosines = {f"{i}.png": float(units[i] @ units[4]) for i in range(3 * c, 3 * c + 3)}
            order = sorted(cosines, key=lambda file: -cosines[file])
            assert [n.file for n in by_name[name].neighbors] == order
            assert [n.cosine for n in by_name[name].neighbors] == pytest.approx(
                [cosines[file] for file in order], abs=1e-5
            )


def test_the_network_is_left_as_it_was():
    state = state_of()
    state.network.train()
    before = {name: tensor.clone() for name, tensor in state.network.state_dict().items()}
    explained(state, random_images(1, side=SIDE)[0])
    assert state.network.training
    assert all(torch.equal(before[name], tensor) for name, tensor in state.network.state_dict().items())
    assert all(p.grad is None for p in state.network.parameters() if isinstance(p, nn.Parameter))


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model", tiny_state())


def test_the_page_travels_alone(model, tmp_path):
    name = "a<b>&.png"
    Image.fromarray(random_images(1)[0].permute(1, 2, 0).numpy()).resize((40, 30)).save(tmp_path / name)
    found = explain(model, tmp_path / name, tmp_path / "out", execution=CPU)
    out = tmp_path / "out"
    assert sorted(p.name for p in out.glob("[!.]*")) == ["explanation.json", "explanation.png", "index.html"]
    page = (out / "index.html").read_text()
    assert "a&lt;b&gt;&amp;.png" in page
    assert "<b>" not in page
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page
    assert str(tmp_path) not in page
    assert "not a medical device" in page
    content = json.loads((out / "explanation.json").read_text())
    assert content["probabilities"] == found.probabilities
    listed = json.loads((model / "versions/v1/state/manifest.json").read_text())["exemplars"]
    of_class = {entry["file"]: entry["class"] for entry in listed}
    for of in content["classes"]:
        assert [of_class[n["file"]] for n in of["nearest_exemplars"]] == [of["name"]] * 2
    with Image.open(out / "explanation.png") as picture:
        assert min(picture.size) > 600


def test_a_name_that_is_no_text_is_written_as_such(model, tmp_path):
    image = tmp_path / os.fsdecode(b"lesion\xff.png")
    image.write_bytes(encode_png(random_images(1)[0]))
    explain(model, image, tmp_path / "out", execution=CPU)
    assert r"lesion\udcff.png" in (tmp_path / "out" / "index.html").read_text()


def test_a_class_without_exemplars_and_an_unknown_image_are_said_to_be_so(tmp_path):
    from medcil.clinic.explain import render_page, write_explanation

    state = replace(state_of(), memory=no_samples(SIDE))
    found = explain_state(
        state,
        random_images(1, side=SIDE)[0],
        calibration=calibration_of(state, threshold=2.0),
        execution=CPU,
    )
    assert (found.classes[0].neighbors, found.is_unlike) == ((), True)
    write_explanation(found, tmp_path / "out")
    page = (tmp_path / "out/index.html").read_text()
    assert "unlike anything the model knows" in page
    assert f"keeps no exemplar of {found.classes[0].name} and {found.classes[1].name}" in page
    with Image.open(tmp_path / "out" / "explanation.png") as picture:
        assert picture.size[0] > 2 * picture.size[1]  # and has no empty rows for them
    assert "unlike anything" not in render_page(replace(found, is_unlike=False), b"")


def test_what_cannot_be_explained_is_refused(model, tmp_path):
    with pytest.raises(InvalidInput, match="There is nothing at"):
        explain(model, tmp_path / "none.png", tmp_path / "out")
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        explain(model, tmp_path / "bad.png", tmp_path / "out")
    (tmp_path / "two").mkdir()
    for i in range(2):
        Image.new("RGB", (4, 4)).save(tmp_path / "two" / f"{i}.png")
    with pytest.raises(InvalidInput, match="holds 2 images"):
        explain(model, tmp_path / "two", tmp_path / "out")
    assert not (tmp_path / "out").exists()
