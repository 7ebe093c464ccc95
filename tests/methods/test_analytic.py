"""The analytic method from images to scores: what makes no difference to it, and what its parts do."""

from dataclasses import replace

import pytest
import torch

from medcil.build import RunConfig, build_method, method_settings
from medcil.data.stream import Task
from medcil.errors import InvalidInput
from medcil.experiments.run import run_experiment
from medcil.methods.analytic import Analytic
from medcil.methods.outline import outline
from medcil.readouts.ridge import Ridge
from medcil.storage.run_dir import RunDir
from medcil.training import feed
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import State, load_state

from ..small import SMALLEST, changed_names, content_of, new_state, random_samples, short_training, task_of

FROZEN = Analytic(adapt="never", strength=1e-3)
COUNTS = [9, 6, 7, 5]
CONFIG = short_training(memory={"per_class": 0})


def learned(*sizes: int, order: list[int] | None = None) -> tuple[State, list[int]]:
    """Learn the classes in tasks of these sizes. Return the state and each class's label in it."""
    order = order or list(range(len(COUNTS)))
    whole = random_samples(COUNTS)
    state, done = new_state(spec=SMALLEST), 0
    for size in sizes:
        own = torch.cat([torch.nonzero(whole.labels == c).flatten() for c in order[done : done + size]])
        images = whole.select(own)
        labels = torch.tensor([order.index(c) for c in images.labels.tolist()])
        train = replace(images, labels=labels)
        names = tuple(f"class {c}" for c in order[done : done + size])
        state = learn_task(state, Task(names, done, train, train), FROZEN, CONFIG)
        done += size
    return state, [order.index(c) for c in range(len(COUNTS))]


def scores_of(state: State, labels: list[int]) -> torch.Tensor:
    return predict_scores(state, random_samples([20], seed=5), CONFIG.execution)[:, labels]


def ridge_of(state: State) -> Ridge:
    assert isinstance(state.readout, Ridge)
    return state.readout


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not (expected[0] - expected[1]).abs().max() <= 1e-3 * expected.abs().max()  # images do differ


def test_classes_may_come_all_at_once_or_one_by_one_and_in_any_order():
    """ρ and the sharpness are chosen on the first task, so its classes stay."""
    expected = scores_of(*learned(2, 2))
    assert_close(scores_of(*learned(2, 1, 1)), expected)
    assert_close(scores_of(*learned(2, 1, 1, order=[1, 0, 3, 2])), expected)


@pytest.mark.parametrize("size", [4, 7, 1000])
def test_other_batches_make_no_difference(size, monkeypatch):
    expected = scores_of(*learned(2, 2))
    monkeypatch.setattr(feed, "EVALUATION_BATCH", size)
    assert_close(scores_of(*learned(2, 2)), expected)


def test_more_images_of_known_classes_come_in_any_later_task():
    """All but three images of each class first, these three later, beside a new class."""
    whole = random_samples(COUNTS)
    is_late = torch.zeros(len(whole), dtype=torch.bool)
    for c in range(3):
        is_late[torch.nonzero(whole.labels == c).flatten()[-3:]] = True
    is_late |= whole.labels == 3
    method = replace(FROZEN, strength=1e-9)  # no ridge: it is chosen on the first images
    state = new_state(spec=SMALLEST)
    parts = [(0, ~is_late, ("a", "b", "c")), (3, is_late, ("d",))]
    for n_old, part, names in parts:
        images = whole.select(torch.nonzero(part).flatten())
        state = learn_task(state, Task(names, n_old, images, images), method, CONFIG)
    everything = Task(("a", "b", "c", "d"), 0, whole, whole)
    at_once = learn_task(new_state(spec=SMALLEST), everything, method, CONFIG)
    found, expected = ridge_of(state).statistics, ridge_of(at_once).statistics
    assert found.counts.tolist() == COUNTS == expected.counts.tolist()
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.moments, expected.moments, rtol=1e-5, atol=1e-3)


def test_a_network_that_does_not_adapt_stays_as_it_came():
    before = content_of(new_state(spec=SMALLEST).network.backbone)
    after = content_of(learned(2, 2)[0].network.backbone)
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_no_image_is_kept_unless_asked_for():
    state, _ = learned(2, 2)
    assert len(state.memory) == 0
    asked = learn_task(new_state(spec=SMALLEST), task_of([6, 4]), FROZEN, short_training())
    assert asked.memory.labels.tolist() == [0] * 4 + [1] * 4


RECIPE = {
    "data": {"name": "phantom", "side": 20, "crop": 16, "views": 2},
    "scenario": {"base": 4, "increment": 3},
    "method": {"name": "analytic", "adapt": "never"},
    "network": {"backbone": "resnet8_cifar"},
    "memory": {"per_class": 0},
}


@pytest.mark.parametrize(
    "change",
    [
        {"resident": "no"},
        pytest.param({"processes": 2}, marks=pytest.mark.slow),
        pytest.param({"processes": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_streamed_images_and_several_processes_give_the_same_statistics(change, tmp_path):
    states = []
    for name, own in (("plain", {}), ("changed", change)):
        recipe = RECIPE | {"execution": {"device": "cpu", "threads": 1} | own}
        run_experiment(RunConfig.model_validate(recipe), tmp_path / name)
        states.append(load_state(RunDir(tmp_path / name).task(2).state))
    expected, found = (ridge_of(state).statistics for state in states)
    assert found.counts.equal(expected.counts)
    for part in ("sums", "moments"):
        error = (getattr(found, part) - getattr(expected, part)).abs().max()
        assert error <= 1e-6 * getattr(expected, part).abs().max(), part
    torch.testing.assert_close(ridge_of(states[1]).weights, ridge_of(states[0]).weights, rtol=1e-5, atol=1e-5)


def trained(method: Analytic, **sections: object) -> State:
    config = short_training(memory={"per_class": 0}, **sections)
    return learn_task(new_state(spec=SMALLEST), task_of([9, 6, 7]), method, config)


@pytest.mark.parametrize(
    "method",
    [
        Analytic(turned_labels="instead"),
        Analytic(turned_labels="beside"),
        Analytic(mixup=0.4),
        Analytic(turned_labels="instead", mixup=0.4),
    ],
    ids=str,
)
def test_every_option_of_the_first_task_changes_the_features(method):
    plain, changed = trained(Analytic()), trained(method)
    assert changed_names(content_of(plain.network.backbone), content_of(changed.network.backbone))
    assert changed.network.classifier.n_classes == 3
    assert changed.network.auxiliary is None
    assert len(predict_scores(changed, random_samples([5]), CONFIG.execution)[0]) == 3


def test_plugins_reach_the_first_task_where_asked_for():
    words = {"name": "analytic", "plugins": {"classification": "cil_balanced"}}
    with pytest.raises(InvalidInput) as refused:
        build_method(words)
    assert refused.value.code == "config.plugins.unreachable"
    words["plugins"] = {"classification": "cil_balanced", "embedding": "contrastive", "tasks": "first"}
    method = build_method(words)
    assert build_method(method_settings(method)) == method
    first, *later = outline(method)
    assert first.terms == ("classification", "embedding")
    assert not later
    assert trained(method).readout.log_prior.shape == (3,)
