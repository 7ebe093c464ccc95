"""Settings from the images, against the table in docs/how-to/train.md; which images are sealed."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from medcil.build import RunConfig, method_settings
from medcil.clinic.holdout import set_aside
from medcil.clinic.settings import (
    Choice,
    Recipe,
    asked_keys,
    requested,
    settings_to_train,
    settings_to_update,
)
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.errors import InvalidInput
from medcil.methods.balanced import Balanced
from medcil.methods.gaussians import Gaussians
from medcil.methods.icarl import ICaRL
from medcil.methods.podnet import PODNet
from medcil.recipe import leaves

HAM10000 = ("method.preset=ham10000",)
TOTAL = ("memory.total=300",)


def updated(
    asked: Recipe, old: list[int], new: list[int], *, then: Recipe | None = None
) -> tuple[RunConfig, list[Choice]]:
    """The update of a model that was trained with `then`."""
    then = requested() if then is None else then
    parent = settings_to_train(old, 64, then)[0].identity()
    return settings_to_update(parent, asked_keys({}, (), then), old, new, asked)


@pytest.mark.parametrize(
    ("shorter", "side", "crop"), [(28, 32, 28), (64, 64, 56), (100, 128, 112), (450, 256, 224)]
)
def test_the_side_follows_the_images(monkeypatch, shorter, side, crop):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, choices = settings_to_train([100, 100], shorter, requested())
    assert (config.data.side, config.data.crop) == (side, crop)
    assert config.network.backbone == ("resnet20_cifar" if side == 32 else "resnet18")
    assert all(choice.why for choice in choices)


def test_without_a_gpu_images_are_small(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config, choices = settings_to_train([100, 100], 450, requested())
    assert config.data.side == 64
    assert "no GPU" in choices[0].why
    assert settings_to_train([100, 100], 450, requested(side=256))[0].data.side == 256


@pytest.mark.parametrize(
    ("counts", "weights", "epochs", "batch"),
    [
        ([30, 20], None, 100, 8),
        ([1000, 1000], None, 50, 32),
        ([1000, 1000], "hub", 25, 32),
        ([50_000, 50_000], None, 10, 32),
        ([100, 100], None, 100, 16),
    ],
)
def test_epochs_and_batches_follow_the_counts(counts, weights, epochs, batch):
    config, _ = settings_to_train(counts, 64, requested(weights=weights))
    assert (config.training.epochs, config.training.batch_size) == (epochs, batch)
    assert config.training.learning_rates.backbone == (0.01 if weights is None else 0.001)
    assert type(config.method) is Balanced


def test_an_update_counts_new_images_and_exemplars():
    config, _ = updated(requested(), [1000, 15], [365])
    assert config.training.epochs == 100
    assert config.training.batch_size == 32  # 365 new images, 20 and 15 exemplars
    # α = 2 (20 / 460)^(1/3), the mean over all three classes
    assert config.method.alpha == pytest.approx(2 * (20 / 460) ** (1 / 3), abs=0.01)
    assert updated(requested(method="icarl"), [1000, 15], [365])[0].method == ICaRL()


def test_what_stands_around_balanced_leaves_it_its_choices():
    """In training and in updates, with few new images and with many."""
    for new_counts in ([140], [900]):
        found = []
        for method in ("balanced", "gaussians"):
            parent = settings_to_train([300, 40, 25], 64, requested(method=method))[0]
            then = requested(method=method)
            later = updated(requested(), [300, 40, 25], new_counts, then=then)[0]
            bases = [c.method if method == "balanced" else c.method.base for c in (parent, later)]
            found.append([(base.alpha, base.sampler) for base in bases])
        assert found[0] == found[1]
    usual = Gaussians()  # and nothing else of its base is changed
    alpha = parent.method.base.alpha
    assert parent.method == replace(usual, base=replace(usual.base, alpha=alpha))
    for said, of_base in (
        ("name=ucir", {"name": "ucir"}),
        ("sampler=null", {"alpha": 1.0, "sampler": None}),
    ):
        asked = requested(method="gaussians", settings=(f"method.base.{said}",))
        config, _ = settings_to_train([30, 40], 64, asked)
        assert of_base.items() <= method_settings(config.method.base).items()


@pytest.mark.parametrize(("n_new", "sampler"), [(140, None), (141, "two_stream")])
def test_exemplars_have_a_stream_of_their_own_where_they_are_less_than_a_quarter_of_the_new(n_new, sampler):
    config, choices = updated(requested(), [1000, 15], [n_new - 40, 40])  # 20 and 15 exemplars
    assert config.method.sampler == sampler
    said = [choice.why for choice in choices if choice.key == "method.sampler"]
    assert said == ([] if sampler else ["35 exemplars to 140 new images: enough in every batch"])
    asked = requested(settings=("method.sampler=class_aware",))
    assert updated(asked, [1000, 15], [n_new])[0].method.sampler == "class_aware"
    icarl = updated(requested(method="icarl"), [1000, 15], [n_new])[0]
    assert icarl.method == ICaRL()


OLD, NEW = [2500, 1500], [2000]
"""2,000 images of a class on average, before the update and after it: α is 2 (m / 2000)^(1/3)."""


def trained_and_updated(asked: Recipe) -> list[tuple[RunConfig, list[Choice]]]:
    """The update is of a model for which nothing was asked."""
    return [settings_to_train(OLD, 64, asked), updated(asked, OLD, NEW)]


def test_exemplars_in_all_take_the_place_of_those_per_class():
    for (config, choices), alpha in zip(
        trained_and_updated(requested(settings=TOTAL)), (0.84, 0.74), strict=True
    ):
        assert (config.memory.per_class, config.memory.total) == (None, 300)
        assert config.method.alpha == alpha  # 150 of each of two classes, 100 of each of three
        assert [c.value for c in choices if c.key.startswith("memory")] == [300]
    later = updated(requested(), OLD, NEW, then=requested(settings=TOTAL))[0]
    assert (later.memory.per_class, later.memory.total, later.method.alpha) == (None, 300, 0.74)
    with pytest.raises(InvalidInput, match=r"memory\.total is 1, less than 2 classes: raise it"):
        settings_to_train(OLD, 64, requested(settings=("memory.total=1",)))


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (requested(method="ucir"), "method.name=ucir"),
        (requested(method="ucir"), "method=ucir"),
        (requested(method="gaussians"), "method=gaussians"),
        (requested(method="gaussians"), "method={name: gaussians}"),
        (requested(method="gaussians"), "method.name=gaussians"),
        (requested(exemplars=100), "memory.per_class=100"),
        (requested(exemplars=100), "memory={per_class: 100}"),
        (requested(epochs=7), "training={epochs: 7}"),
    ],
)
def test_an_option_and_the_setting_it_stands_for_are_one(option, setting):
    assert trained_and_updated(option) == trained_and_updated(requested(settings=(setting,)))


def test_milestones_of_the_first_task_do_not_hold_up_a_method_with_another_schedule():
    then = requested(method="lo2ln", settings=HAM10000)
    assert settings_to_train(OLD, 64, then)[0].first_task.milestones is not None
    asked = requested(method="podnet", settings=HAM10000)
    later = updated(asked, OLD, NEW, then=then)[0]
    assert (type(later.method), later.training.schedule) == (PODNet, "cosine")


@pytest.mark.parametrize(
    ("option", "setting", "said"),
    [
        ({"epochs": 5}, "training.epochs=7", "--epochs 5"),
        ({"epochs": 5}, "training={epochs: 7}", "--epochs 5"),
        ({"method": "ucir"}, "method.name=icarl", "--method ucir"),
        ({"method": "ucir"}, "method=icarl", "--method ucir"),
        ({"method": "gaussians"}, "method={name: lws, base: ucir}", "--method gaussians"),
        ({"exemplars": 9}, "memory.per_class=8", "--exemplars 9"),
        ({"exemplars": 9}, "memory.total=300", "--exemplars 9"),
        ({"side": 64}, "data.side=32", "--side 64"),
        ({"backbone": "resnet18"}, "network.backbone=resnet8_cifar", "--backbone resnet18"),
        ({"weights": "hub"}, "network.weights=null", "--weights hub"),
    ],
)
def test_an_option_and_a_setting_that_contradict_each_other_are_refused(option, setting, said):
    """The same said twice, and another setting of the same part, are none."""
    with pytest.raises(InvalidInput, match=re.escape(f"{said} and --set {setting} contradict each other")):
        requested(**option, settings=("training.momentum=0.5", setting))
    alike = {
        "--epochs": "training={epochs: 5, momentum: 0.5}",
        "--method": f"method={option.get('method')}",
        "--exemplars": "memory.per_class=9",
        "--side": "data.side=64",
        "--backbone": "network={scale: 2, backbone: resnet18}",
        "--weights": "network.weights=hub",
    }
    requested(**option, settings=("training.momentum=0.5", alike[said.split()[0]]))


def test_a_setting_of_a_whole_part_leaves_the_option_within_it():
    config, _ = settings_to_train(OLD, 64, requested(epochs=5, settings=("training={momentum: 0.5}",)))
    assert (config.training.epochs, config.training.momentum) == (5, 0.5)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (requested(side=32), "data.side=32"),
        (requested(side=100), "data.side=100"),
        (requested(weights="hub"), "network.weights=hub"),
        (requested(backbone="resnet8_cifar"), "network.backbone=resnet8_cifar"),
    ],
)
def test_so_are_those_of_training_alone(option, setting):
    assert settings_to_train(OLD, 64, option) == settings_to_train(OLD, 64, requested(settings=(setting,)))


@pytest.mark.parametrize(
    ("settings", "alpha"),
    [
        (["method.name=balanced"], {"method": 0.43}),
        (["memory.per_class=100"], {"method": 0.74}),
        (["method=gaussians"], {"method.base": 0.43}),
        (["method=gaussians", "method.base=balanced"], {"method.base": 0.43}),
        (["method={name: gaussians, base: {margin_weight: 0}}"], {"method.base": 0.43}),
        (["method={name: lws, base: balanced}"], {"method.base": 0.43}),
        (["method={name: gaussians, base: {name: lws, base: balanced}}"], {"method.base.base": 0.43}),
        (["method=gaussians", "method.base.alpha=0.2"], {"method.base": 0.2}),
        (["method.preset=eyepacs", "method.alpha=0.2"], {"method": 0.2}),
        (["method={name: gaussians, base: ucir}"], {}),
        (["method=lws"], {}),
    ],
)
def test_alpha_is_that_of_the_counts_where_nobody_says_another(settings, alpha):
    for config, choices in trained_and_updated(requested(settings=tuple(settings))):
        for found in (
            leaves({"method": method_settings(config.method)}),
            ((c.key, c.value) for c in choices),
        ):
            assert {key.removesuffix(".alpha"): v for key, v in found if key.endswith(".alpha")} == alpha


@pytest.mark.parametrize(
    "asked",
    [
        requested(),
        requested(method="gaussians", settings=HAM10000),
        requested(method="gaussians", epochs=5, exemplars=30, settings=(*HAM10000, "method.weight=1")),
        requested(method="icarl", settings=("method.preset=original",)),
        requested(epochs=5, settings=("training.learning_rates.backbone=0.5",)),
        requested(method="ucir", settings=("data.crop=40",)),
    ],
)
def test_what_is_shown_is_what_runs(asked):
    for config, choices in trained_and_updated(asked):
        for choice in choices:
            held = config.model_dump()
            if choice.key == "method.preset":  # every value of it is in the recipe
                continue
            for part in choice.key.split("."):
                held = held[part]
            assert held == choice.value, choice.key
        assert len({choice.key for choice in choices}) == len(choices)


def test_a_preset_goes_before_choices_and_what_is_asked_for_before_a_preset():
    for config, choices in trained_and_updated(requested(method="gaussians", settings=HAM10000)):
        found = (config.training.epochs, config.training.learning_rates.backbone)
        assert (*found, config.method.base.alpha) == (20, 0.001, 0.5)
        assert "training.epochs" not in {choice.key for choice in choices}
    for config, choices in trained_and_updated(requested(epochs=5, settings=HAM10000)):
        assert config.training.epochs == 5
        assert Choice("training.epochs", 5, "asked for") in choices


def test_exemplars_to_learn_with_are_those_that_the_model_keeps():
    _, choices = updated(requested(exemplars=500), OLD, NEW)
    assert Choice("training.batch_size", 32, "2,040 images") in choices
    assert "method.sampler" not in {choice.key for choice in choices}


def test_an_update_starts_from_the_recipe_of_its_parent():
    then = requested(method="icarl", epochs=3, settings=("training.momentum=0.5", "network.scale=2"))
    config, _ = updated(requested(settings=("training.momentum=0.6",)), OLD, NEW, then=then)
    assert (type(config.method), config.training.epochs, config.network.scale) == (ICaRL, 3, 2)
    assert config.training.momentum == 0.6
    config, _ = updated(requested(epochs=7), OLD, NEW, then=then)
    assert (config.training.epochs, config.training.momentum) == (7, 0.5)


def test_another_method_leaves_the_settings_of_the_earlier_one():
    then = requested(settings=("method={name: ucir}", "method.plugins.margin=distribution"))
    assert "WithPlugins" in str(updated(requested(), [50, 50], [50], then=then)[0].method)
    config, _ = updated(requested(method="icarl"), [50, 50], [50], then=then)
    assert type(config.method) is ICaRL


@pytest.mark.parametrize(
    ("then", "now", "memory", "method"),
    [
        (requested(exemplars=100), requested(settings=TOTAL), (None, 300), "balanced"),
        (
            requested(settings=("memory.per_class=100",)),
            requested(settings=TOTAL),
            (None, 300),
            "balanced",
        ),
        (requested(settings=TOTAL), requested(exemplars=100), (100, None), "balanced"),
        (requested(settings=TOTAL), requested(), (None, 300), "balanced"),
        (
            requested(settings=("method.alpha=0.3",)),
            requested(settings=("method.name=ucir",)),
            (20, None),
            "ucir",
        ),
        (requested(method="icarl", exemplars=9), requested(settings=("method=ucir",)), (9, None), "ucir"),
    ],
)
def test_so_does_a_setting(then, now, memory, method):
    config, _ = updated(now, OLD, NEW, then=then)
    assert (config.memory.per_class, config.memory.total) == memory
    assert method_settings(config.method)["name"] == method


def given(
    labels: list[int],
    groups: list[str] | None = None,
    is_test: list[bool] | None = None,
    *,
    patients: list[str] | None = None,
    sha256s: list[str] | None = None,
) -> ImageTable:
    n = len(labels)
    return ImageTable(
        files=MemoryFiles({}),
        names=tuple(f"{i}.png" for i in range(n)),
        labels=np.array(labels),
        class_names=tuple(f"class {c}" for c in range(max(labels) + 1)),
        groups=None if groups is None else tuple(groups),
        patients=None if patients is None else tuple(patients),
        is_test=None if is_test is None else np.array(is_test),
        sha256=tuple(sha256s or (f"{i:064x}" for i in range(n))),
    )


def test_twenty_or_a_fifth_and_at_least_one_are_sealed():
    sizes = [500, 100, 99, 12, 5, 4, 2]
    images = given([c for c, n in enumerate(sizes) for _ in range(n)])
    train, sealed = set_aside(images, 20, seed=0)
    assert list(images.counts(sealed).values()) == [20, 20, 19, 2, 1, 1, 1]
    assert sorted([*train.tolist(), *sealed.tolist()]) == list(range(len(images)))
    assert list(images.counts(set_aside(images, 3, seed=0)[1]).values()) == [3, 3, 3, 2, 1, 1, 1]
    assert len(set_aside(images, 0, seed=0)[1]) == 0


def test_a_patient_is_sealed_whole():
    groups = [f"patient {i // 4}" for i in range(400)]
    images = given([i // 200 for i in range(400)], groups)
    train, sealed = set_aside(images, 20, seed=0)
    assert list(images.counts(sealed).values()) == [20, 20]
    assert not {groups[i] for i in train.tolist()} & {groups[i] for i in sealed.tolist()}


def test_a_class_of_one_patient_cannot_be_measured():
    images = given([0] * 10 + [1] * 10, ["patient 1"] * 10 + [f"patient {i}" for i in range(2, 12)])
    with pytest.warns(UserWarning, match="No image of class 0 is of a patient"):
        train, sealed = set_aside(images, 20, seed=0)
    assert images.counts(sealed) == {"class 0": 0, "class 1": 2}
    assert images.counts(train)["class 0"] == 10


def test_of_a_test_part_no_patient_is_sealed_who_is_trained_on():
    groups = ["patient 1"] * 6 + ["patient 2"] * 6
    is_test = [False, False, False, True, True, True] + [True] * 6
    images = given([0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1], groups, is_test)
    train, sealed = set_aside(images, 2, seed=0)
    assert train.tolist() == [0, 1, 2]
    assert {groups[i] for i in sealed.tolist()} == {"patient 2"}
    assert images.counts(sealed) == {"class 0": 2, "class 1": 2}
