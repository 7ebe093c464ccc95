"""Methods with a frozen network, from images to scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from medcil.data.stream import Task
from medcil.methods.acil import ACIL
from medcil.methods.fecam import FeCAM
from medcil.methods.protocol import Method
from medcil.methods.ranpac import RIDGES, RanPAC
from medcil.methods.simplecil import SimpleCIL
from medcil.methods.slda import SLDA
from medcil.readouts.ridge import Ridge
from medcil.readouts.statistics import StatisticsReadout, unpacked
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import State

from ..small import SMALLEST, content_of, new_state, random_samples, short_training, task_of

COUNTS = [9, 6, 7, 5]
CONFIG = short_training(memory={"per_class": 0})
FAMILY: list[Method] = [
    SimpleCIL(),
    SLDA(shrinkage=0.1),
    FeCAM(adapt="never"),
    RanPAC(random_features=60),
    ACIL(adapt="never", random_features=60),
    ACIL(adapt="never", random_features=60, balance=1.0, pooled=False),
]
named = pytest.mark.parametrize(
    "method", FAMILY, ids=lambda m: f"{type(m).__name__} {getattr(m, 'balance', '')}"
)


def learned(method: Method, *sizes: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> State:
    """Learn the classes in tasks of these sizes."""
    whole = random_samples(COUNTS)
    state, done = new_state(spec=SMALLEST), 0
    for size in sizes:
        own = torch.cat([torch.nonzero(whole.labels == c).flatten() for c in order[done : done + size]])
        images = whole.select(own)
        labels = torch.tensor([order.index(c) for c in images.labels.tolist()])
        train = replace(images, labels=labels)
        names = tuple(f"class {c}" for c in order[done : done + size])
        state = learn_task(state, Task(names, done, train, train), method, CONFIG)
        done += size
    return state


def readout_of(state: State) -> StatisticsReadout:
    assert isinstance(state.readout, StatisticsReadout)
    return state.readout


def scores_of(state: State) -> torch.Tensor:
    return predict_scores(state, random_samples([20], seed=5), CONFIG.execution)


@named
def test_classes_may_come_in_any_tasks_and_any_order(method, monkeypatch):
    """The sharpness is chosen on the first task, so its classes stay; RanPAC's ridge by every task."""
    monkeypatch.setattr("medcil.methods.ranpac.RIDGES", (0.1,))
    expected = scores_of(learned(method, 2, 2))
    order = (1, 0, 3, 2)
    for found in (
        scores_of(learned(method, 2, 1, 1)),
        scores_of(learned(method, 2, 1, 1, order=order))[:, [order.index(c) for c in range(4)]],
    ):
        sharpness = (
            found.std() / expected.std()
        )  # the fifth it is chosen on is drawn from the images in order
        assert (found / sharpness - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-3 * expected.abs().max()


@named
def test_a_network_that_does_not_adapt_stays_as_it_came(method):
    before = content_of(new_state(spec=SMALLEST).network.backbone)
    after = content_of(learned(method, 2, 2).network.backbone)
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@named
def test_likeness_is_measured_to_the_embeddings_of_all_images(method):
    state = learned(method, 2, 2)
    images = random_samples(COUNTS)
    pixels = state.preprocessing.normalize(images.read_all()[:, :, 1:9, 1:9])
    with torch.no_grad():
        embeddings = state.network.eval()(pixels).embedding
    for c in range(4):
        own = embeddings[images.labels == c]
        mean = (
            own.mean(dim=0) if readout_of(state).feature_spec.has_embedding else F.normalize(own).mean(dim=0)
        )
        torch.testing.assert_close(
            state.readout.class_means[c], F.normalize(mean, dim=0), rtol=1e-3, atol=1e-3
        )


def test_aper_has_the_features_of_both_networks():
    state = learned(SimpleCIL(adapt="always", pretrained=True), 2, 2)
    readout, images = readout_of(state), random_samples(COUNTS)
    pixels = state.preprocessing.normalize(images.read_all()[:, :, 1:9, 1:9])
    before = new_state(spec=SMALLEST).network.eval()
    with torch.no_grad():
        adapted, pretrained = state.network.eval()(pixels).embedding, before.backbone(pixels)[1]
    assert (adapted - pretrained).abs().max() > 1e-3
    both = torch.cat([adapted, pretrained], dim=1)
    sums = torch.stack([both[images.labels == c].sum(dim=0) for c in range(4)])
    torch.testing.assert_close(readout.sums.float(), sums, rtol=1e-3, atol=1e-3)


def test_air_weighs_classes_alike_with_weights_of_mean_one():
    method = ACIL(adapt="never", random_features=40, balance=1.0, pooled=False)
    readout = readout_of(learned(method, 2, 2))
    assert isinstance(readout, Ridge)
    weights = 1 / np.array(COUNTS)
    weights *= len(COUNTS) / weights.sum()
    gram = sum(w * unpacked(m, 40).numpy() for w, m in zip(weights, readout.moments, strict=True))
    targets = (weights[:, None] * readout.sums.numpy()).T
    expected = np.linalg.solve(gram + 0.1 * np.eye(40), targets)
    np.testing.assert_allclose(readout.weights.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(readout.log_prior.numpy(), np.log(np.full(4, 0.25)), atol=1e-6)


def test_acil_is_ridge_regression_on_random_features_alone():
    readout = readout_of(learned(ACIL(adapt="never", random_features=40), 2, 2))
    assert isinstance(readout, Ridge)
    gram = unpacked(readout.moments[0], 40).numpy() + 0.1 * np.eye(40)
    np.testing.assert_allclose(
        readout.weights.numpy(), np.linalg.solve(gram, readout.sums.numpy().T), rtol=1e-4, atol=1e-5
    )
    prior = np.log(np.array(COUNTS) / sum(COUNTS))
    np.testing.assert_allclose(readout.log_prior.numpy(), prior, atol=1e-6)


def test_every_task_of_ranpac_chooses_the_ridge(monkeypatch):
    np.testing.assert_allclose(RIDGES, np.logspace(-8, 8, 17))
    state = new_state(spec=SMALLEST)
    for n_old, counts, ridges in ((0, [9, 6], (7.0,)), (2, [30], (5.0,)), (3, [4, 40], (1e9, 3.0))):
        monkeypatch.setattr("medcil.methods.ranpac.RIDGES", ridges)
        task = task_of(counts, n_old=n_old, seed=n_old)
        state = learn_task(state, task, RanPAC(random_features=60), CONFIG)
        assert isinstance(state.readout, Ridge)
        assert float(state.readout.ridge) == ridges[-1]


def test_fecam_shrinks_as_often_as_it_says():
    for times, expected in ((1, [1.0, 0.5]), (2, [3.0, 1.25])):
        readout = readout_of(learned(FeCAM(adapt="never", shrinkage_others=0.5, times=times), 2, 2))
        assert readout.state_dict()["shrinkage"].tolist() == expected


@named
def test_more_images_of_known_classes_alone_are_added_exactly(method):
    whole = random_samples(COUNTS)
    is_late = torch.cat([torch.arange(n) >= n - 2 for n in COUNTS])  # two of each class
    state, names = new_state(spec=SMALLEST), tuple("abcd")
    for n_old, part in ((0, ~is_late), (4, is_late & (whole.labels != 1))):
        images = whole.select(torch.nonzero(part).flatten())
        state = learn_task(state, Task(names[n_old:], n_old, images, images), method, CONFIG)
    images = whole.select(torch.nonzero(~is_late | (whole.labels != 1)).flatten())
    at_once = readout_of(learn_task(new_state(spec=SMALLEST), Task(names, 0, images, images), method, CONFIG))
    found = readout_of(state)
    assert found.counts.tolist() == at_once.counts.tolist() == [9, 4, 7, 5]
    assert state.network.classifier.block_sizes == (4,)
    for part in ("sums", "moments"):
        expected = getattr(at_once, part)
        assert (getattr(found, part) - expected).abs().max() <= 1e-5 * expected.abs().max(), part
