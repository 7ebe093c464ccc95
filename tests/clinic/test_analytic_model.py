"""A model that keeps statistics: no exemplar, no training in an update, and commands that say so."""

import warnings
from pathlib import Path

import pytest
import torch

import medcil
from medcil.clinic.explain import explain
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.settings import FEATURES, requested, settings_to_train, settings_to_update
from medcil.clinic.train import Watches
from medcil.clinic.update import TIMES_SCORED, Plan
from medcil.training.checkpoint import Progress

from .generated import FEW, QUICK, write_folder, write_manifest
from .test_story import run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part, names in (("first", ("alpha", "beta")), ("second", ("delta",)), ("third", ("zeta",))):
        write_manifest(write_folder(root / part, *names))
    return root


@pytest.fixture(scope="module")
def model(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, the second by an update."""
    model = tmp_path_factory.mktemp("analytic") / "model"
    medcil.train(images / "first", model, method="analytic", **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that the update forgets what has no exemplar
        medcil.update(model, images / "second", **FEW)
    return model


def test_no_image_is_kept_but_the_sealed_ones_and_no_weight_moves(model):
    first, second = (ModelFolder(model).version(name).load_state() for name in ("v1", "v2"))
    assert len(first.memory) == len(second.memory) == 0
    sealed = ModelFolder(model).version().holdout_entries()
    assert len(list((model / "images").rglob("*.png"))) == len(sealed) > 0
    after = second.network.backbone.state_dict()
    assert all(
        torch.equal(after[name], before) for name, before in first.network.backbone.state_dict().items()
    )
    assert ModelFolder(model).version().calibration().unlike.measured_on == "hold-out"


def test_a_dry_run_counts_images_to_embed_and_no_epochs(model, images):
    folder = ModelFolder(model)
    paces = [folder.version(name).provenance() for name in ("v1", "v2")]
    plan = medcil.update(model, images / "third", dry_run=True)
    assert isinstance(plan, Plan)
    n_sealed = plan.holdout["zeta"] + len(folder.version().holdout_entries())
    n_images = plan.images["zeta"] + TIMES_SCORED * n_sealed
    assert plan.epochs == 0
    assert {choice.why for choice in plan.choices} == {"inherited from v2"}
    assert plan.seconds == pytest.approx(n_images / paces[1]["images_embedded_per_second"])
    assert "no training: about" in run("update", model, images / "third", "--dry-run")
    # Nothing has measured since v1 how fast this machine trains, and v1 did so without an old network.
    assert paces[1]["images_per_second"] is None
    with pytest.warns(UserWarning, match="no exemplar of alpha, beta, delta"):
        trained = medcil.update(model, images / "third", dry_run=True, method="balanced", epochs=7)
    assert isinstance(trained, Plan)
    assert trained.seconds == pytest.approx(7 * plan.images["zeta"] / (paces[0]["images_per_second"] * 3 / 4))


def test_progress_of_an_update_is_told_in_images(images, tmp_path):
    seen: list[Progress] = []
    watches = Watches(training=seen.append)
    medcil.train(images / "first", tmp_path / "model", method="analytic", watches=watches, **QUICK)
    embedded = [now for now in seen if now.is_embedding]
    n_images = sum(ModelFolder(tmp_path / "model").version().provenance()["images"].values())
    steps = [now.step for now in embedded]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1], {now.steps for now in embedded}) == (0, n_images, {n_images})
    assert [now.losses for now in embedded].count({}) == 1  # the end
    assert embedded == seen[-len(embedded) :]  # after the training


def test_explain_says_that_there_is_no_exemplar(model, images, tmp_path):
    found = explain(model, images / "first/alpha/000.png", tmp_path / "out")
    assert [of.neighbors for of in found.classes] == [(), ()]
    assert "keeps no exemplar of" in (tmp_path / "out/index.html").read_text()


def test_without_sealed_images_nothing_is_said_to_be_measured(images, tmp_path):
    said = run(
        *("train", images / "first", "--out", tmp_path / "model", "--method", "analytic", "--holdout", 0),
        *("--epochs", 1, "--backbone", "resnet8_cifar", "--set", "execution.threads=1"),
    )
    assert "Not measured: there is no image to measure on." in said
    assert "optimistic" not in said
    said = run("update", tmp_path / "model", images / "second")
    assert "No verdict: nothing to measure on." in said
    assert "embedding 25/25 images" in said


@pytest.mark.parametrize("weights", [None, "hub"])
def test_the_second_network_comes_with_pretrained_weights(weights):
    asked = requested(method="analytic", weights=weights)
    config, choices = settings_to_train([100, 40], 64, asked)
    expected = FEATURES[weights is not None]
    assert {key: getattr(config.method, key) for key in expected} == dict(expected)
    assert expected["pretrained"] == (weights is not None)
    assert (config.memory.per_class, config.data.views) == (0, 1)
    assert {choice.key for choice in choices} >= {"memory.per_class", "data.views", "method.pretrained"}
    mine = ("memory.per_class=5", "data.views=4", "method.pretrained=true", "method.stages=1")
    config = settings_to_train([100, 40], 64, requested(method="analytic", settings=mine))[0]
    assert (config.memory.per_class, config.data.views) == (5, 4)
    assert (config.method.pretrained, config.method.stages) == (True, 1)


def test_a_method_that_needs_exemplars_gets_them_again():
    for exemplars, expected in ((None, 20), (0, 0)):
        asked = requested(method="analytic", exemplars=exemplars)
        parent = settings_to_train([100, 40], 64, asked)[0].identity()
        keys = ["memory.per_class"] if exemplars == 0 else []
        config, _ = settings_to_update(parent, keys, [100, 40], [60], requested(method="balanced"))
        assert config.memory.quota(3) == expected
        again, _ = settings_to_update(parent, keys, [100, 40], [60], requested())
        assert again.memory.quota(3) == 0
