"""Gaussians: what is remembered of classes after each task, whatever method trains the network."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from medcil.build import build_method
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput
from medcil.methods.balanced import Balanced
from medcil.methods.gaussians import Gaussians
from medcil.methods.icarl import ICaRL
from medcil.methods.lo2ln import LO2LN
from medcil.methods.ucir import UCIR
from medcil.training.feed import Feed
from medcil.training.inference import embed, predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import load_state, save_state

from ..small import PREPROCESSING, SMALLEST, new_state, short_training, task_of
from .by_hand import phases_of

CPU = ExecutionConfig(device="cpu")
FIRST, SECOND = task_of([9, 7]), task_of([8, 5], n_old=2, seed=1)


def units(state, samples):
    """Of center crops, by the state's network."""
    feed = Feed(samples, state.preprocessing, torch.device("cpu"), CPU)
    return F.normalize(embed(state.network, feed, torch.arange(len(samples)))).double().numpy()


def two_tasks(method, before=None, **sections):
    config = short_training(**sections)
    first = learn_task(new_state(spec=SMALLEST), FIRST, before or method, config)
    return first, learn_task(first, SECOND, method, config)


def test_a_class_is_the_mean_of_all_its_images_when_it_was_new():
    first, second = two_tasks(Gaussians())
    for state, task in ((first, FIRST), (second, SECOND)):
        embeddings, labels = units(state, task.train), task.train.labels.numpy()
        for c in range(task.n_old, task.n_seen):
            expected = embeddings[labels == c].mean(axis=0)
            np.testing.assert_allclose(state.readout.means[c].numpy(), expected, atol=1e-5)
    assert second.readout.n_images == 9 + 7 + 8 + 5


def test_old_classes_follow_the_map_that_fits_the_images_at_hand():
    first, second = two_tasks(Gaussians())
    at_hand = SECOND.train + first.memory
    labels = at_hand.labels.numpy()
    x, y = units(first, at_hand), units(second, at_hand)
    # Weighted ridge regression as one least-squares problem, of rows scaled by the root of their weight.
    share = 1 / np.bincount(labels)[labels] / 4
    centers = [share @ each for each in (x, y)]
    rows = np.sqrt(share)[:, None] * (x - centers[0])
    ridge = 1e-3 * (rows**2).sum() / rows.shape[1]
    above = np.vstack([rows, math.sqrt(ridge) * np.eye(rows.shape[1])])
    right = np.vstack([np.sqrt(share)[:, None] * (y - centers[1]), np.zeros((rows.shape[1], y.shape[1]))])
    fitted = np.linalg.lstsq(above, right, rcond=None)[0]
    before = first.readout.means.double().numpy()
    expected = (before - centers[0]) @ fitted + centers[1]
    np.testing.assert_allclose(second.readout.means[:2].numpy(), expected, atol=1e-4)
    rest = np.sqrt(share)[:, None] * ((y - centers[1]) - (x - centers[0]) @ fitted)
    old = fitted.T @ first.readout.covariance.double().numpy() @ fitted + rest.T @ rest
    new = units(second, SECOND.train)
    of = SECOND.train.labels.numpy()
    scatter = sum(np.cov(new[of == c].T, bias=True) * (of == c).sum() for c in (2, 3))
    covariance = second.readout.covariance.numpy()
    np.testing.assert_allclose(covariance, (16 * old + scatter) / 29, atol=1e-5)


def test_training_is_the_base_methods():
    base = Balanced(alpha=0.3)
    plain, around = two_tasks(base)[1], two_tasks(Gaussians(base))[1]
    for (name, one), other in zip(plain.network.named_parameters(), around.network.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert list(phases_of(Gaussians(base), 2, 2)) == list(phases_of(base, 2, 2))


def test_scores_are_what_the_network_and_its_gaussians_say_and_the_prior_in_them_is_known():
    method = Gaussians(Balanced(alpha=0.25), weight=0.4, favor=0.3)
    first, second = two_tasks(method)
    logits = predict_scores(two_tasks(Balanced(alpha=0.25))[1], SECOND.test, CPU)
    gaussians, prior = second.readout, torch.tensor([math.log(4)] * 2 + [0.0] * 2)
    own = gaussians.discriminants(torch.tensor(units(second, SECOND.test)).float())
    mixed = (logits - prior).softmax(dim=1) + 0.4 * own.softmax(dim=1)
    expected = mixed.log() + prior + torch.tensor([0.3, 0.3, 0, 0])
    torch.testing.assert_close(predict_scores(second, SECOND.test, CPU), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second.readout.log_prior, prior + torch.tensor([0.3, 0.3, 0, 0]))
    counts = torch.tensor([9.0, 7.0]).log()
    torch.testing.assert_close(first.readout.log_prior, counts)  # plain cross-entropy's


def test_views_are_averaged_before_the_posteriors_are_mixed():
    _, second = two_tasks(Gaussians())
    in_views = replace(second, preprocessing=replace(PREPROCESSING, views=8))
    pixels = SECOND.test.read_all()[:, :, 1:9, 1:9].numpy()  # the center
    turned = [np.rot90(each, turns, (2, 3)) for each in (pixels, pixels[..., ::-1]) for turns in range(4)]
    with torch.no_grad():
        views = [PREPROCESSING.normalize(torch.from_numpy(view.copy())) for view in turned]
        outputs = [second.network.eval()(view) for view in views]
        gaussians = second.readout
        logits = torch.stack([out.logits for out in outputs]).mean(dim=0)
        own = torch.stack([gaussians.discriminants(out.embedding) for out in outputs]).mean(dim=0)
    found = predict_scores(in_views, SECOND.test, CPU)
    unbiased = (logits - (gaussians.log_prior - gaussians.favor)).softmax(dim=1)
    expected = (unbiased + gaussians.weight * own.softmax(dim=1)).log() + gaussians.log_prior
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, predict_scores(second, SECOND.test, CPU), atol=1e-3)


def test_they_are_kept_with_the_model(tmp_path):
    _, second = two_tasks(Gaussians())
    save_state(second, tmp_path / "state")
    again = load_state(tmp_path / "state")
    assert again.readout.kind == "gaussians"
    assert torch.equal(predict_scores(again, SECOND.test, CPU), predict_scores(second, SECOND.test, CPU))
    third = task_of([6], n_old=4, seed=2)
    states = [learn_task(state, third, Gaussians(), short_training()) for state in (second, again)]
    means = [state.readout.means for state in states]
    assert torch.equal(*means)
    assert len(means[0]) == 5


def test_a_model_trained_without_them_starts_from_its_exemplars():
    first, second = two_tasks(Gaussians(), before=Balanced())
    embeddings, labels = units(second, first.memory), first.memory.labels.numpy()
    for c in range(2):
        expected = embeddings[labels == c].mean(axis=0)
        np.testing.assert_allclose(second.readout.means[c].numpy(), expected, atol=1e-5)


def test_without_exemplars_either_a_class_is_where_its_weights_point():
    _, second = two_tasks(Gaussians(), before=Balanced(), memory={"total": 1})
    weights = F.normalize(second.network.classifier.weight)
    torch.testing.assert_close(second.readout.means[:2], weights[:2])
    assert predict_scores(second, SECOND.test, CPU).isfinite().all()


def test_classes_of_a_single_image_can_be_learned():
    config = short_training(memory={"total": 1})
    first = learn_task(new_state(spec=SMALLEST), task_of([1, 1]), Gaussians(), config)
    second = learn_task(first, task_of([1], n_old=2, seed=1), Gaussians(), config)
    assert predict_scores(second, SECOND.test, CPU).isfinite().all()


def test_a_map_fitted_on_new_images_alone_serves_where_there_are_no_exemplars():
    _, second = two_tasks(Gaussians(), memory={"total": 1})
    assert predict_scores(second, SECOND.test, CPU).isfinite().all()


@pytest.mark.parametrize("base", [UCIR(), LO2LN()])
def test_it_stands_around_other_methods_also_such_as_grow_the_embedding(base):
    _, second = two_tasks(Gaussians(base))
    assert second.readout.means.shape == (4, second.network.classifier.dim)
    assert predict_scores(second, SECOND.test, CPU).isfinite().all()


def test_a_recipe_says_what_it_stands_around():
    method = build_method({"name": "gaussians", "base": {"name": "ucir", "n_rivals": 1}, "weight": 0.2})
    assert method == Gaussians(UCIR(n_rivals=1), weight=0.2)
    assert Gaussians().base == Balanced(distillation="kl", distillation_weight=1.0)


@pytest.mark.parametrize("base", [ICaRL(), Gaussians()])
def test_a_base_that_does_not_score_by_its_classifier_is_refused(base):
    with pytest.raises(ValueError, match="base must score by its classifier"):
        Gaussians(base)
    name = "icarl" if isinstance(base, ICaRL) else "gaussians"
    with pytest.raises(InvalidInput, match=r"^method: base must score by its classifier"):
        build_method({"name": "gaussians", "base": name})


@pytest.mark.parametrize("wrong", [{"weight": -0.1}, {"shrinkage": 0.0}, {"shrinkage": 1.5}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(InvalidInput, match=f"^method.{next(iter(wrong))}: "):
        build_method({"name": "gaussians", **wrong})
