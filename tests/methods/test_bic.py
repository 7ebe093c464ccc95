"""BiC: the mix of two losses, images kept back, and two numbers fitted to them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.methods import terms
from medcil.methods.bic import BiC
from medcil.methods.protocol import Batch, Phase, WithTerms
from medcil.training.checkpoint import Journal
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import initial_state

from ..small import random_images, short_training, task_of
from .by_hand import (
    SPEC,
    batch_of,
    cross_entropy,
    divergence,
    labels_by_image,
    learned,
    learned_watching_images,
    log_softmax,
    phases_of,
)

ON_CPU = ExecutionConfig(device="cpu")


def weighted_losses(phase: Phase, batch: Batch) -> dict[str, float]:
    """As they enter the sum that is minimized."""
    return {name: phase.weighted(name, term(batch)).item() for name, term in phase.terms.items()}


@pytest.mark.parametrize(("n_old", "n_new"), [(3, 2), (4, 1), (2, 6)])
def test_distillation_weighs_as_much_as_old_classes_are_of_all(n_old, n_new):
    labels = [0, n_old - 1, n_old, n_old + n_new - 1]
    batch = batch_of(labels, (n_old, n_new))
    phase = phases_of(BiC(), n_old, n_new)["learn"]
    mix = n_old / (n_old + n_new)
    rows = batch.out.logits.tolist()
    # As printed: no T² makes up for the temperature.
    kd = mix * divergence([row[:n_old] for row in rows], batch.old.logits.tolist(), 2.0)
    ce = (1 - mix) * cross_entropy(rows, labels)
    assert set(phase.terms) == {"classification", "distillation"}
    found = weighted_losses(phase, batch)
    assert found["distillation"] == pytest.approx(kd, rel=1e-4)
    assert found["classification"] == pytest.approx(ce, rel=1e-5)


@pytest.mark.parametrize(("n_old", "n_new"), [(3, 2), (2, 6)])
def test_a_plugged_in_classification_weighs_as_much_as_the_one_it_replaces(n_old, n_new):
    labels = [0, n_old - 1, n_old, n_old + n_new - 1]
    batch = batch_of(labels, (n_old, n_new))
    plain = weighted_losses(phases_of(BiC(), n_old, n_new)["learn"], batch)
    plugged = {"classification": terms.focal(focusing=2.0)}
    found = weighted_losses(phases_of(WithTerms(BiC(), plugged), n_old, n_new)["learn"], batch)
    focal = 0.0
    for row, label in zip(batch.out.logits.tolist(), labels, strict=True):
        log_p = log_softmax(row)[label]
        focal -= (1 - math.exp(log_p)) ** 2 * log_p / len(labels)
    assert found["classification"] == pytest.approx(n_new / (n_old + n_new) * focal, rel=1e-4)
    assert found["classification"] != pytest.approx(plain["classification"], rel=0.01)
    assert found["distillation"] == plain["distillation"]


def test_the_temperature_is_a_setting():
    batch = batch_of([0, 1, 3], (3, 2))
    phase = phases_of(BiC(temperature=4.0), 3, 2)["learn"]
    rows = [row[:3] for row in batch.out.logits.tolist()]
    expected = 3 / 5 * divergence(rows, batch.old.logits.tolist(), 4.0)
    assert weighted_losses(phase, batch)["distillation"] == pytest.approx(expected, rel=1e-4)


def test_the_first_task_is_plain_cross_entropy_on_all_images():
    phases = phases_of(BiC(), 0, 3)
    assert list(phases) == ["learn"]
    batch = batch_of([0, 2, 1], [3])
    expected = cross_entropy(batch.out.logits.tolist(), [0, 2, 1])
    assert phases["learn"].classification(batch).item() == pytest.approx(expected, rel=1e-5)
    assert phases["learn"].part == "all"


def test_the_correction_moves_two_numbers_and_nothing_else():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1), task_of([5, 6], n_old=4, seed=2)
    state, chapters = learned(BiC(), *tasks)
    assert list(chapters) == ["learn", "correct"]
    correct = chapters["correct"]
    two = {f"classifier.calibrations.2.{name}" for name in ("gain", "shift")}
    assert correct.moved == two
    assert sum(correct.before[name].numel() for name in two) == 2
    # While it learns, the correction of the task before is there and held, that of this task is not yet.
    learn = chapters["learn"]
    assert "classifier.calibrations.1.gain" in learn.before
    assert "classifier.calibrations.2.gain" not in learn.before
    assert not {name for name in learn.moved if "calibrations" in name}
    assert state.network.spec().calibration_sizes == (0, 1, 1)


def test_corrected_logits_are_alpha_z_plus_beta_of_the_newest_classes_alone():
    state, _ = learned(BiC(), task_of([6, 5]), task_of([7, 4], n_old=2, seed=1))
    images = task_of([3, 3], seed=8).train
    found = predict_scores(state, images, ON_CPU).tolist()
    alpha, beta = (p.item() for p in state.network.classifier.calibrations["1"].parameters())
    assert (alpha, beta) != (1, 0)
    state.network.classifier.calibrations.clear()
    plain = predict_scores(state, images, ON_CPU).tolist()
    for row, z in zip(found, plain, strict=True):
        assert row == pytest.approx([z[0], z[1], alpha * z[2] + beta, alpha * z[3] + beta], abs=1e-5)


@pytest.mark.parametrize("sampler", ["plain", "balanced"])
def test_the_correction_is_learned_on_a_few_images_of_every_class_that_learning_never_drew(sampler):
    method = BiC()
    sections = {"memory": {"per_class": 20}, "training": {"epochs": 6, "batch_size": 8, "sampler": sampler}}
    first, _ = learned(method, task_of([9, 6]), **sections)
    task = task_of([12, 5], n_old=2, seed=1)
    _, diary, seen = learned_watching_images(method, first, task, **sections)
    label_of = labels_by_image(task.train, first.memory)
    kept_back, drawn = set(seen["correct"]), set(seen["learn"])
    assert not kept_back & drawn
    assert kept_back | drawn == set(label_of)
    # A tenth of 20 exemplars, as many of every class; all of them in every epoch.
    assert sorted(label_of[image] for image in kept_back) == [0, 0, 1, 1, 2, 2, 3, 3]
    correct = diary.chapters[1]
    assert all(seen["correct"].count(image) == len(correct.epochs) for image in kept_back)
    assert len(correct.epochs) == 2 * 6


def test_where_a_class_has_a_single_image_the_correction_is_passed_over():
    method = BiC()
    first, _ = learned(method, task_of([6, 5]))
    task = task_of([7, 1], n_old=2, seed=1)
    state, diary, seen = learned_watching_images(method, first, task)
    learn, correct = diary.chapters
    assert (learn.phase.name, correct.phase.name) == ("learn", "correct")
    assert set(seen["learn"]) == set(labels_by_image(task.train, first.memory))
    assert "correct" not in seen
    assert correct.moved == set()
    alpha, beta = (p.item() for p in state.network.classifier.calibrations["1"].parameters())
    assert (alpha, beta) == (1, 0)


def test_the_correction_keeps_the_prior_among_old_and_among_new_classes():
    method = BiC()
    first, _ = learned(method, task_of([12, 6]), memory={"total": 24})
    task = task_of([20, 5], n_old=2, seed=1)
    state, diary, _ = learned_watching_images(method, first, task, memory={"total": 24})
    assert diary.chapters[1].epochs  # else the correction was passed over
    # Of 20, 5 new images and 12, 6 exemplars, "learn" draws all but one (a tenth of six) of every class.
    drawn = [11, 5, 19, 4]
    means = [math.log(11 * 5) / 2] * 2 + [math.log(19 * 4) / 2] * 2
    expected = [math.log(n) - mean for n, mean in zip(drawn, means, strict=True)]
    assert state.readout.log_prior.tolist() == pytest.approx(expected, abs=1e-5)


class Logbook(Journal):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def test_the_rates_of_each_group_are_logged_as_they_decay():
    method = BiC(correction_rate=0.2)
    first, _ = learned(method, task_of([6, 5]))
    config = short_training(training={"epochs": 3, "batch_size": 8})
    logbook = Logbook()
    learn_task(first, task_of([7, 4], n_old=2, seed=1), method, config, journal=logbook)
    rates = {"learn": [], "correct": []}
    for record in logbook.records:
        rates[record["phase"]].append(record["learning_rates"])
    by_recipe = {"backbone": 0.001, "classifier": 0.1}
    factors = [1, 0.1, 0.01]
    for found, factor in zip(rates["learn"], factors, strict=True):
        assert found == pytest.approx({group: rate * factor for group, rate in by_recipe.items()})
    for found, factor in zip(rates["correct"], [1, 1, 0.1, 0.1, 0.1, 0.01], strict=True):
        assert found == pytest.approx({"correction": 0.2 * factor})


def mirror_symmetric(counts: list[int], *, first_label: int, seed: int) -> Samples:
    """So that a random flip changes nothing."""
    half = random_images(sum(counts), seed=seed)[..., :5]
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) + first_label
    return Samples(TensorImages(torch.cat([half, half.flip(-1)], dim=-1)), labels)


def test_the_two_numbers_are_those_of_gradient_descent_on_the_logits():
    method = BiC()
    state = initial_state(SPEC, Preprocessing(side=10, crop=10), seed=0)  # without random crops
    tasks = []
    for n_old in (0, 2):
        train = mirror_symmetric([6, 5], first_label=n_old, seed=n_old)
        tasks.append(Task((f"class {n_old}", f"class {n_old + 1}"), n_old, train, train))
    sections = {"memory": {"per_class": 20}, "training": {"epochs": 3, "batch_size": 16}}
    first, _ = learned(method, tasks[0], state=state, **sections)
    after, diary, seen = learned_watching_images(method, first, tasks[1], **sections)
    correct = diary.chapters[1]
    assert len(correct.epochs) == 6
    kept_back = set(seen["correct"])
    assert len(kept_back) == 8  # one batch

    everything = tasks[1].train + first.memory
    chosen = [i for i, image in enumerate(everything.read_all()) if image.numpy().tobytes() in kept_back]
    uncorrected = replace(after)
    uncorrected.network.classifier.calibrations.clear()
    rows = predict_scores(uncorrected, everything.select(torch.tensor(chosen)), ON_CPU).tolist()
    labels = everything.labels[torch.tensor(chosen)].tolist()

    alpha, beta, speed = 1.0, 0.0, [0.0, 0.0]
    for rate, found in zip([0.1, 0.1, 0.01, 0.01, 0.01, 0.001], correct.epochs, strict=True):
        slope = [0.0, 0.0]
        for z, label in zip(rows, labels, strict=True):
            p = [math.exp(x) for x in log_softmax([z[0], z[1], alpha * z[2] + beta, alpha * z[3] + beta])]
            for c in (2, 3):
                error = (p[c] - (c == label)) / len(rows)
                slope[0] += error * z[c]
                slope[1] += error
        speed = [0.9 * v + g for v, g in zip(speed, slope, strict=True)]
        alpha, beta = alpha - rate * speed[0], beta - rate * speed[1]
        gain, shift = (found[f"classifier.calibrations.1.{name}"].item() for name in ("gain", "shift"))
        assert (gain, shift) == pytest.approx((alpha, beta), abs=1e-5)
    assert abs(beta) > 1e-3
