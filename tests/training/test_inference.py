"""Embeddings, class means and scores against one image at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages, no_samples
from medcil.models.network import Network, Outputs
from medcil.training import feed as feed_module
from medcil.training import inference as predict_module
from medcil.training.feed import Feed
from medcil.training.inference import (
    Embeddings,
    choose_device,
    class_means,
    embed,
    predict_scores,
)
from medcil.training.state import State

from ..small import CROP, PREPROCESSING, SIDE, new_state, random_images, random_samples, readout_of

CPU = ExecutionConfig(device="cpu")
N_CLASSES = 3


@pytest.fixture
def memory():
    return random_samples([4, 3, 2])


@pytest.fixture
def network():
    network = new_state(seed=2).network
    network.grow(torch.randn(N_CLASSES, 64, generator=torch.Generator().manual_seed(0)))
    return network.requires_grad_(requires_grad=False)


def feed_of(samples) -> Feed:
    return Feed(samples, PREPROCESSING, torch.device("cpu"), CPU)


def state_of(network, means, kind) -> State:
    return replace(
        new_state(),
        network=network,
        class_names=("a", "b", "c"),
        inherent_counts=torch.ones(N_CLASSES, dtype=torch.int64),
        readout=readout_of(means, kind=kind),
    )


def outputs(embedding, cosine, logits) -> Outputs:
    return Outputs((), embedding, embedding, cosine, logits, None)


def embedded_alone(network, pixels, *, flip=False):
    margin = (SIDE - CROP) // 2
    crop = pixels[:, margin : margin + CROP, margin : margin + CROP]
    image = PREPROCESSING.normalize((crop.flip(-1) if flip else crop)[None])
    _, embedding = network.eval().backbone(image)
    return embedding[0]


@pytest.mark.parametrize("flip", [True, False])
def test_embeddings_are_those_of_each_image_alone(network, memory, flip, monkeypatch):
    monkeypatch.setattr(feed_module, "EVALUATION_BATCH", 4)
    indices = torch.tensor([8, 0, 5, 5, 2, 1])
    expected = [embedded_alone(network, memory.read_all()[i], flip=flip) for i in indices]
    actual = embed(network.train(), feed_of(memory), indices, flip=flip)
    torch.testing.assert_close(actual, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert not any(module.training for module in network.modules())


def test_nothing_to_embed_gives_no_embeddings(network, memory):
    assert embed(network, feed_of(memory), torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_class_means_are_of_unit_embeddings_of_exemplars_and_their_mirror_images(network, memory):
    means = class_means(network, feed_of(memory))
    for label in range(N_CLASSES):
        rows = [
            embedded_alone(network, pixels, flip=flip)
            for pixels in memory.of_class(label).read_all()
            for flip in (False, True)
        ]
        mean = sum(row / row.norm() for row in rows) / len(rows)
        torch.testing.assert_close(means[label], mean / mean.norm(), atol=1e-5, rtol=1e-4)


def test_a_class_without_exemplars_has_the_direction_of_its_weights(network, memory):
    weights = network.classifier.class_weights
    directions = weights / weights.norm(dim=1, keepdim=True)
    torch.testing.assert_close(class_means(network, feed_of(no_samples(SIDE))), directions)
    others = torch.nonzero(memory.labels != 1).flatten()
    means, whole = class_means(network, feed_of(memory.select(others))), class_means(network, feed_of(memory))
    torch.testing.assert_close(means[1], directions[1])
    torch.testing.assert_close(means[[0, 2]], whole[[0, 2]])


def test_scores_of_a_classifier_are_its_logits():
    out = outputs(torch.randn(5, 4), torch.randn(5, 3), torch.randn(5, 3))
    assert torch.equal(readout_of(torch.randn(3, 4)).scores(out), out.logits)


def test_the_nearest_mean_scores_best():
    generator = torch.Generator().manual_seed(0)
    means = torch.nn.functional.normalize(torch.randn(6, 4, generator=generator))
    embedding = 3 * torch.randn(200, 4, generator=generator)
    ignored = torch.zeros(200, 6)
    scores = readout_of(means, kind="nearest_mean").scores(outputs(embedding, ignored, ignored))
    unit = embedding / embedding.norm(dim=1, keepdim=True)
    by_distance = [min(range(6), key=lambda c: float((h - means[c]).norm())) for h in unit]
    assert scores.argmax(dim=1).tolist() == by_distance
    neighbors = KNeighborsClassifier(1).fit(means.numpy(), range(6))
    assert scores.argmax(dim=1).tolist() == neighbors.predict(unit.numpy()).tolist()
    distances = torch.cdist(unit, means) ** 2
    torch.testing.assert_close(scores - scores[:, :1], distances[:, :1] - distances, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["classifier", "nearest_mean"])
def test_predictions_are_those_of_each_image_alone(network, memory, kind, monkeypatch):
    monkeypatch.setattr(feed_module, "EVALUATION_BATCH", 4)
    means = class_means(network, feed_of(memory))
    state = state_of(network, means, kind)
    test = random_samples([5, 5], seed=3)
    scores = predict_scores(state, test, CPU)
    assert scores.shape == (10, N_CLASSES)
    for row, pixels in zip(scores, test.read_all(), strict=True):
        h = embedded_alone(network, pixels)
        if kind == "classifier":
            w = torch.cat([columns for (columns,) in network.classifier.blocks])
            expected = network.classifier.scale * (w @ h) / h.norm() / w.norm(dim=1)
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
        else:
            assert row.argmax() == (h / h.norm() - means).norm(dim=1).argmin()


def in_views(state: State, views: int) -> State:
    return replace(state, preprocessing=replace(state.preprocessing, views=views))


def symmetries(crop: np.ndarray, views: int) -> list[np.ndarray]:
    turned = [np.rot90(crop, turns, axes=(1, 2)) for turns in range(4 if views == 8 else 1)]
    return [*turned, *(np.flip(one, 2) for one in turned)]


@pytest.mark.parametrize("kind", ["classifier", "nearest_mean"])
@pytest.mark.parametrize("views", [2, 8])
def test_scores_are_the_mean_over_the_views(network, memory, kind, views, monkeypatch):
    monkeypatch.setattr(feed_module, "EVALUATION_BATCH", 24)
    sizes, features = [], Network.features
    monkeypatch.setattr(
        Network, "features", lambda n, images: sizes.append(len(images)) or features(n, images)
    )
    means = class_means(network, feed_of(memory))
    test = random_samples([5, 5], seed=3)
    sizes.clear()
    scores = predict_scores(in_views(state_of(network, means, kind), views), test, CPU)
    assert sum(sizes) == 10 * views
    assert max(sizes) <= 24  # no more of them at once than of images in one view
    margin = (SIDE - CROP) // 2
    spread = 0.0
    for row, pixels in zip(scores, test.read_all().numpy(), strict=True):
        crop = pixels[:, margin : margin + CROP, margin : margin + CROP]
        seen = [torch.from_numpy(view.copy())[None] for view in symmetries(crop, views)]
        of_views = torch.cat(
            [readout_of(means, kind=kind).scores(network(PREPROCESSING.normalize(view))) for view in seen]
        )
        torch.testing.assert_close(row, sum(of_views) / len(seen), atol=1e-5, rtol=1e-4)
        spread = max(spread, float(of_views.std(dim=0).max()))
    assert spread > 1e-3  # the views are scored differently at all


def test_an_image_that_is_the_same_in_every_view_is_scored_as_in_one(network):
    state = state_of(network, torch.zeros(N_CLASSES, 64), "classifier")
    alike = np.maximum.reduce(symmetries(random_images(1)[0].numpy(), 8))
    samples = Samples(TensorImages(torch.from_numpy(alike)[None]), torch.zeros(1, dtype=torch.int64))
    one = predict_scores(state, samples, CPU)
    for views in (2, 8):
        torch.testing.assert_close(predict_scores(in_views(state, views), samples, CPU), one)


@pytest.mark.parametrize("views", [1, 8])
def test_no_images_have_no_scores(network, views):
    state = in_views(state_of(network, torch.zeros(N_CLASSES, 64), "classifier"), views)
    assert predict_scores(state, no_samples(SIDE), CPU).shape == (0, 3)


def test_the_device_is_the_one_asked_for(monkeypatch):
    assert choose_device(CPU).type == "cpu"
    for is_available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_available=is_available: is_available)
        assert choose_device(ExecutionConfig()).type == kind


def test_embeddings_are_those_of_the_network_as_it_is():
    state, samples = new_state(), random_samples([5, 3, 4])
    feed = feed_of(samples)
    embeddings = Embeddings(state.network, feed)

    def expected(label):
        return embed(state.network, feed, torch.nonzero(samples.labels == label).flatten())

    for label in (2, 0, 1):
        torch.testing.assert_close(embeddings(label), expected(label))
    with torch.no_grad():
        next(state.network.backbone.parameters()).mul_(2)
    torch.testing.assert_close(embeddings(1), expected(1))
    state.network.grow(torch.zeros(2, state.network.classifier.dim))
    state.network.add_branch(shared_stages=0)
    assert embeddings(1).shape == (3, state.network.classifier.dim)
    torch.testing.assert_close(embeddings(1), expected(1))


def test_all_classes_together_take_one_pass(monkeypatch):
    state, samples = new_state(), random_samples([2] * 30)
    embeddings, seen = Embeddings(state.network, feed_of(samples)), []
    features = Network.features
    monkeypatch.setattr(
        Network, "features", lambda n, images: seen.append(len(images)) or features(n, images)
    )
    for label in range(30):
        assert len(embeddings(label)) == 2
    assert seen == [60]
    embeddings.clear()
    embeddings(3)
    assert seen == [60, 60]


def test_too_many_embeddings_are_not_kept(monkeypatch):
    monkeypatch.setattr(predict_module, "MOST_BYTES", 10)
    state, samples = new_state(), random_samples([5, 3])
    embeddings = Embeddings(state.network, feed_of(samples))
    torch.testing.assert_close(embeddings(1), embed(state.network, feed_of(samples), torch.arange(5, 8)))
