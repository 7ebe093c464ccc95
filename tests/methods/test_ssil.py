"""SS-IL: a softmax for the old classes and one for the new; a distillation for each old task."""

import math

import pytest

from medcil.methods.ssil import SSIL

from ..small import task_of
from .by_hand import (
    batch_of,
    cross_entropy,
    divergence,
    learned,
    learned_watching_images,
    log_softmax,
    mean,
    phases_of,
    tiny_network,
)

LABELS, SIZES = [0, 4, 5, 3, 6, 1, 5], (2, 3, 2)


def later(method: SSIL):
    return phases_of(method, 5, 2, network=tiny_network(2, 3))["learn"]


def test_old_samples_compete_among_old_classes_and_new_ones_among_new():
    batch = batch_of(LABELS, SIZES)
    losses = []
    for row, label in zip(batch.out.logits.tolist(), LABELS, strict=True):
        own, first = (row[:5], 0) if label < 5 else (row[5:], 5)
        losses.append(-log_softmax(own)[label - first])
    assert later(SSIL()).classification(batch).item() == pytest.approx(mean(losses), rel=1e-5)


@pytest.mark.parametrize("temperature", [2.0, 3.0])
def test_each_old_task_is_remembered_by_itself(temperature):
    batch = batch_of(LABELS, SIZES)
    rows, old_rows = batch.out.logits.tolist(), batch.old.logits.tolist()
    of_tasks = [
        divergence([row[a:b] for row in rows], [row[a:b] for row in old_rows], temperature)
        for a, b in ((0, 2), (2, 5))
    ]
    phase = later(SSIL(temperature=temperature))
    assert set(phase.terms) == {"classification", "distillation"}
    expected = temperature**2 * sum(of_tasks)
    assert phase.terms["distillation"](batch).item() == pytest.approx(expected, rel=1e-4)


def test_each_side_carries_the_prior_among_its_own_classes():
    counts = batch_of([0], SIZES, drawn=[4, 4, 2, 8, 2, 30, 10]).counts
    prior = later(SSIL()).classification.log_prior(counts, 5).tolist()
    expected = [math.log(n / 20) for n in (4, 4, 2, 8, 2)] + [math.log(n / 40) for n in (30, 10)]
    assert prior == pytest.approx(expected, abs=1e-5)


def test_the_first_task_is_plain_cross_entropy():
    (phase,) = phases_of(SSIL(), 0, 3).values()
    batch = batch_of([0, 2, 1], [3])
    assert set(phase.terms) == {"classification"}
    assert phase.sampler is None
    expected = cross_entropy(batch.out.logits.tolist(), [0, 2, 1])
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)


def test_every_batch_has_a_quarter_of_its_size_of_exemplars_beside_the_new_images():
    assert later(SSIL()).sampler == "two_stream"
    first, _ = learned(SSIL(), task_of([6, 5]))
    task = task_of([7, 5], n_old=2, seed=1)
    training = {"epochs": 1, "batch_size": 4, "sampler": "balanced"}  # the recipe's, which gives way
    _, _, seen = learned_watching_images(SSIL(), first, task, training=training)
    new = [image.numpy().tobytes() for image in task.train.read_all()]
    exemplars = {image.numpy().tobytes() for image in first.memory.read_all()}
    drawn = seen["learn"]
    assert sorted(image for image in drawn if image not in exemplars) == sorted(new)
    assert len(drawn) == 3 * (4 + 1)
    batches = [drawn[i : i + 5] for i in range(0, 15, 5)]
    assert [sum(image in exemplars for image in batch) for batch in batches] == [1, 1, 1]
