"""`adapt: auto`: a trial decides by patients that it does not train on, and leaves nothing behind."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

from medcil.build import RunConfig, resolve
from medcil.data.samples import Samples
from medcil.data.stream import Task
from medcil.errors import InvalidInput
from medcil.methods.analytic import Analytic
from medcil.methods.trial import leave_one_out_accuracy
from medcil.readouts.readout import ImageFeatures
from medcil.storage.run_dir import RunDir
from medcil.training import loop
from medcil.training.checkpoint import FileJournal, Progress
from medcil.training.loop import learn_task
from medcil.training.state import State, load_state, save_state

from ..conformance.subjects import colored, config, differing, new_state, tensors_of
from ..small import Interrupted

AUTO = Analytic(adapt="auto")
COUNTS = (24, 12, 16)
LEARNING = config(memory={"per_class": 0}, training={"epochs": 4, "batch_size": 8})


def patients() -> np.ndarray:
    """Two images each, in one order for all classes: some have images of two classes."""
    return np.array([f"patient {i // 2 % 22}" for i in range(sum(COUNTS))])


def task() -> Task:
    images = colored(COUNTS)
    images = Samples(images.images, images.labels, groups=patients())
    return Task(("a", "b", "c"), 0, images, images)


def blind_state() -> State:
    """A network whose first layer sees nothing: all images have the same features, until it learns."""
    state = new_state()
    convolution, _, shift, *_ = state.network.backbone.parameters()
    convolution.data.zero_()
    shift.data.fill_(1.0)  # above 0, where ReLU has a gradient
    return state


def learned(state: State, **options: object) -> State:
    return learn_task(state, task(), AUTO, LEARNING, **options)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The images that each phase draws from."""
    parts: list[set[int]] = []
    plan: Callable[..., object] = loop.EpochPlanner

    def record(part: torch.Tensor, *rest: object, **options: object) -> object:
        parts.append(set(part.tolist()))
        return plan(part, *rest, **options)

    monkeypatch.setattr(loop, "EpochPlanner", record)
    return parts


def test_features_that_are_perfect_already_stay_and_the_trial_leaves_nothing_behind(drawn):
    """The colors of the classes are seen by any network."""
    after = learned(new_state())
    (decision,) = after.decisions
    assert (decision.key, decision.value) == ("method.adapt", "never")
    assert "100.0% as it came" in decision.why
    assert len(drawn) == 1
    never = learn_task(new_state(), task(), replace(AUTO, adapt="never"), LEARNING)
    assert differing(tensors_of(after), tensors_of(never)) == set()
    assert after.readout.spec() == never.readout.spec()


def test_features_that_are_useless_are_learned_from_all_images(drawn):
    after = learned(blind_state())
    (decision,) = after.decisions
    assert (decision.key, decision.value) == ("method.adapt", "always")
    trial, whole = drawn
    assert whole == set(range(sum(COUNTS)))
    kept_back = whole - trial
    groups = patients()
    assert set(groups[list(kept_back)]) & set(groups[list(trial)]) == set()
    labels = colored(COUNTS).labels.numpy()
    for c, n in enumerate(COUNTS):
        assert 0 < (labels[list(kept_back)] == c).sum() < n / 2
    assert f"on {len(kept_back)} images of {len(set(groups[list(kept_back)]))} groups" in decision.why
    assert after.readout.companion is not None
    assert not after.network.backbone.state_dict().keys() ^ blind_state().network.backbone.state_dict().keys()
    assert after.network.classifier.block_sizes == (3,)


def test_a_run_that_was_interrupted_after_the_decision_repeats_it(tmp_path):
    def journal(name: str) -> FileJournal:
        return FileJournal(RunDir(tmp_path / name), 1, log_size_before=0)

    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    every = config(memory={"per_class": 0}, execution={"device": "cpu", "threads": 1, "checkpoint_every": 1})
    whole = learn_task(blind_state(), task(), AUTO, every, journal=journal("whole"))

    def stop(progress: Progress) -> None:
        if (progress.number, progress.epoch) == (2, 1):
            raise Interrupted

    with pytest.raises(Interrupted):
        learn_task(blind_state(), task(), AUTO, every, journal=journal("pieces"), watch=stop)
    resumed = learn_task(blind_state(), task(), AUTO, every, journal=journal("pieces"))
    assert differing(tensors_of(whole), tensors_of(resumed)) == set()
    assert resumed.decisions == whole.decisions
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "pieces")]
    assert logs[0] == logs[1]
    (record,) = [line for line in map(json.loads, logs[0].splitlines()) if "decision" in line]
    assert record == {"task": 1, "decision": vars(whole.decisions[0])}


def test_a_decision_stays_with_the_state(tmp_path):
    state = learned(new_state())
    save_state(state, tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert loaded.decisions == state.decisions
    later = replace(task(), class_names=("d", "e", "f"), n_old=3)
    later = replace(later, train=replace(later.train, labels=later.train.labels + 3))
    assert learn_task(loaded, later, AUTO, LEARNING).decisions == state.decisions


def test_the_figure_is_that_of_refits_without_each_patient():
    random, labels = np.random.default_rng(0), np.repeat([0, 1, 2], [20, 9, 5])
    values = random.normal(size=(34, 2, 6)) + 1.2 * np.eye(3, 6)[labels][:, None]
    groups = np.array([f"patient {g}" for g in random.integers(0, 9, 34)])
    features = {
        c: ImageFeatures(torch.tensor(values[labels == c]), groups[labels == c].tolist()) for c in range(3)
    }
    pi = (np.bincount(labels) ** -0.5)[labels]

    def gram(chosen: np.ndarray) -> np.ndarray:
        return np.einsum("i,ivd,ive->de", pi[chosen] / 2, values[chosen], values[chosen])

    ridge = 0.1 * np.trace(gram(labels >= 0)) / 6 * np.eye(6)
    predicted = np.empty(34)
    for group in set(groups):
        rest, own = groups != group, groups == group
        targets = (pi[rest, None] * values[rest].mean(axis=1)).T @ np.eye(3)[labels[rest]]
        scores = values[own].mean(axis=1) @ np.linalg.solve(gram(rest) + ridge, targets)
        predicted[own] = scores.argmax(axis=1)
    for scored in (set(groups), set(groups[::5])):
        own = np.isin(groups, list(scored))
        found = leave_one_out_accuracy(features, scored, balance=0.5, strengths=(0.1,))
        assert found == pytest.approx(balanced_accuracy_score(labels[own], predicted[own]))
        assert 0.3 < found < 0.95


def test_a_network_that_stays_as_it_came_is_not_recalibrated():
    recipe = {
        "data": {"name": "phantom", "side": 20, "crop": 16},
        "scenario": {"base": 4, "increment": 3},
        "method": {"name": "analytic", "adapt": "never"},
        "network": {"backbone": "resnet8_cifar", "recalibrate_batch_norm": True},
    }
    with pytest.raises(InvalidInput) as refused:
        resolve(RunConfig.model_validate(recipe))
    assert refused.value.code == "config.network.frozen"
    resolve(RunConfig.model_validate(recipe | {"network": {"backbone": "resnet8_cifar"}}))
