"""UCIR: the less-forget constraint and its growing weight, the ranking, and what it holds."""

import math

import pytest

from medcil.methods.ucir import UCIR

from ..small import task_of
from .by_hand import (
    batch_of,
    cosine,
    cross_entropy,
    labels_drawn_from_exemplars,
    learned,
    mean,
    phases_of,
    ranking,
    under,
)

LABELS, SIZES = [0, 1, 2, 3, 4, 5, 1], (3, 3)


def less_forget(batch) -> float:
    pairs = zip(batch.out.embedding.tolist(), batch.old.embedding.tolist(), strict=True)
    return mean([1 - cosine(new, old) for new, old in pairs])


@pytest.mark.parametrize(
    ("adaptive", "n_old", "n_new", "weight"),
    [
        ("seen", 3, 3, 5 * math.sqrt(6 / 3)),
        ("seen", 4, 1, 5 * math.sqrt(5 / 1)),
        ("old", 3, 3, 5 * math.sqrt(3 / 3)),
        ("old", 50, 10, 5 * math.sqrt(50 / 10)),
    ],
)
def test_embeddings_that_turn_cost_more_the_more_classes_there_are(adaptive, n_old, n_new, weight):
    phase = phases_of(UCIR(adaptive=adaptive), n_old, n_new)["learn"]
    batch = batch_of(LABELS, SIZES)
    assert phase.terms["less_forget"](batch).item() == pytest.approx(weight * less_forget(batch), rel=1e-5)


def test_the_base_of_that_weight_is_a_setting():
    phase = phases_of(UCIR(lambda_base=10.0), 3, 3)["learn"]
    batch = batch_of(LABELS, SIZES)
    expected = 10 * math.sqrt(2) * less_forget(batch)
    assert phase.terms["less_forget"](batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("n_rivals", [1, 2, 3, 7])
def test_old_samples_keep_a_margin_to_the_hardest_new_classes(n_rivals):
    batch = batch_of(LABELS, SIZES)
    phase = phases_of(UCIR(n_rivals=n_rivals), 3, 3)["learn"]
    rows = batch.out.cosine.tolist()
    expected = ranking(rows, LABELS, n_old=3, n_rivals=n_rivals, margin=0.5)
    assert expected > 0
    assert phase.terms["ranking"](batch).item() == pytest.approx(expected, rel=1e-5)


def test_the_defaults_are_two_rivals_weight_one_and_margin_one_half():
    batch = batch_of(LABELS, SIZES)
    rows = batch.out.cosine.tolist()
    by_default, heavier = (phases_of(m, 3, 3)["learn"] for m in (UCIR(), UCIR(ranking_weight=3.0)))
    expected = ranking(rows, LABELS, n_old=3, n_rivals=2, margin=0.5)
    assert by_default.terms["ranking"](batch).item() == pytest.approx(expected, rel=1e-5)
    assert heavier.terms["ranking"](batch).item() == pytest.approx(3 * expected, rel=1e-5)


def test_beside_these_it_is_cross_entropy_on_scaled_cosines():
    batch = batch_of(LABELS, SIZES)
    phase = phases_of(UCIR(), 3, 3)["learn"]
    assert set(phase.terms) == {"classification", "less_forget", "ranking"}
    expected = cross_entropy(batch.out.logits.tolist(), LABELS)
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)
    (first,) = phases_of(UCIR(), 0, 3).values()
    assert set(first.terms) == {"classification"}


def test_old_class_weights_are_held_and_all_else_moves():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1), task_of([5], n_old=4, seed=2)
    _, chapters = learned(UCIR(), *tasks)
    assert list(chapters) == ["learn"]
    chapter = chapters["learn"]
    held = {"classifier.blocks.0.0", "classifier.blocks.1.0"}
    assert chapter.moved == set(chapter.before) - held


def test_the_first_task_moves_everything():
    _, chapters = learned(UCIR(), task_of([6, 5]))
    assert chapters["learn"].moved == set(chapters["learn"].before)


def test_fine_tuning_moves_the_whole_classifier_and_nothing_else():
    method = UCIR(finetune_share=1.0)
    _, chapters = learned(method, task_of([6, 5]), task_of([7, 4], n_old=2, seed=1))
    assert list(chapters) == ["learn", "fine-tune"]
    chapter = chapters["fine-tune"]
    assert chapter.moved == under("classifier.", chapter.before)
    assert {"classifier.blocks.0.0", "classifier.blocks.1.0", "classifier.scale"} <= chapter.moved


@pytest.mark.parametrize("sampler", ["plain", "balanced"])
@pytest.mark.parametrize(("memory", "each"), [({"per_class": 4}, 4), ({"total": 12}, 3)])
def test_fine_tuning_draws_as_many_exemplars_of_every_class_each_once(memory, each, sampler):
    method = UCIR(finetune_share=1.0)
    found = labels_drawn_from_exemplars(method, "fine-tune", memory=memory, sampler=sampler)
    assert found == sorted(each * [0, 1, 2, 3])


def test_fine_tuning_is_plain_cross_entropy_at_a_rate_of_its_own():
    phase = phases_of(UCIR(finetune_share=0.2), 3, 3)["fine-tune"]
    assert set(phase.terms) == {"classification"}
    assert phase.part == "exemplars"
    training = phase.training
    assert training is not None
    assert (training.epochs, phase.rates) == (20, {"classifier": 0.01})
    assert (training.schedule, training.milestones) == ("milestones", (0.5,))
