"""iCaRL in both variants, by arithmetic; its answer is the nearest mean of exemplars."""

import math

import pytest
import torch

from medcil.config import ExecutionConfig
from medcil.methods.icarl import ICaRL
from medcil.training.inference import predict_scores

from ..small import CROP, SIDE, random_samples, task_of
from .by_hand import (
    batch_of,
    binary_cross_entropy,
    cross_entropy,
    learned,
    mean,
    names_of,
    phases_of,
    tiny_network,
)

LABELS, SIZES = [0, 1, 2, 3, 4, 3], (3, 2)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_the_tables_variant_is_cross_entropy_and_the_mean_binary_one_to_old_sigmoids():
    batch = batch_of(LABELS, SIZES)
    (phase,) = phases_of(ICaRL(), 3, 2).values()
    rows, old_rows = batch.out.logits.tolist(), batch.old.logits.tolist()
    remembered = [
        binary_cross_entropy(row[c], sigmoid(old[c]))
        for row, old in zip(rows, old_rows, strict=True)
        for c in range(3)
    ]
    assert set(phase.terms) == {"classification", "distillation"}
    assert phase.terms["classification"](batch).item() == pytest.approx(cross_entropy(rows, LABELS), rel=1e-5)
    assert phase.terms["distillation"](batch).item() == pytest.approx(mean(remembered), rel=1e-5)


def test_the_original_is_the_mean_over_all_outputs_of_mixed_targets():
    batch = batch_of(LABELS, SIZES)
    (phase,) = phases_of(ICaRL(targets="sigmoid"), 3, 2).values()
    rows, old_rows = batch.out.logits.tolist(), batch.old.logits.tolist()
    losses = []
    for row, old, label in zip(rows, old_rows, LABELS, strict=True):
        targets = [sigmoid(z) for z in old] + [float(c == label) for c in (3, 4)]
        losses += [binary_cross_entropy(z, target) for z, target in zip(row, targets, strict=True)]
    assert len(losses) == 6 * 5
    total = sum(term(batch).item() for term in phase.terms.values())
    assert total == pytest.approx(mean(losses), rel=1e-5)


def test_the_first_task_of_the_original_is_binary_cross_entropy_with_the_labels():
    batch = batch_of([0, 2, 1], [3])
    (phase,) = phases_of(ICaRL(targets="sigmoid"), 0, 3).values()
    losses = [
        binary_cross_entropy(z, float(c == label))
        for row, label in zip(batch.out.logits.tolist(), [0, 2, 1], strict=True)
        for c, z in enumerate(row)
    ]
    assert set(phase.terms) == {"classification"}
    assert phase.terms["classification"](batch).item() == pytest.approx(mean(losses), rel=1e-5)


@pytest.mark.parametrize("targets", ["softmax", "sigmoid"])
def test_everything_moves_on_new_images_and_exemplars(targets):
    network = tiny_network(3)
    (phase,) = phases_of(ICaRL(targets=targets), 3, 2, network=network).values()
    every = {name for name, _ in network.named_parameters()}
    assert names_of([p for group in phase.params.values() for p in group], network) == every
    assert (phase.part, phase.training, phase.sampler) == ("all", None, None)


def test_the_answer_is_the_nearest_mean_of_exemplars_and_their_mirror_images():
    state, _ = learned(ICaRL(), task_of([6, 5]), task_of([7, 3], n_old=2, seed=1))
    images = random_samples([4, 4], seed=9)
    network, offset = state.network.eval(), (SIDE - CROP) // 2

    def unit_embedding(pixels: torch.Tensor) -> list[float]:
        with torch.no_grad():
            h = network(state.preprocessing.normalize(pixels[None])).embedding[0].tolist()
        length = math.sqrt(sum(x * x for x in h))
        return [x / length for x in h]

    def center(pixels: torch.Tensor) -> torch.Tensor:
        return pixels[:, offset : offset + CROP, offset : offset + CROP]

    means = []
    for label in range(4):
        vectors = []
        for exemplar in state.memory.of_class(label).read_all():
            vectors += [unit_embedding(center(exemplar)), unit_embedding(center(exemplar).flip(-1))]
        assert len(vectors) == 2 * [4, 4, 4, 3][label]
        average = [mean(column) for column in zip(*vectors, strict=True)]
        length = math.sqrt(sum(x * x for x in average))
        means.append([x / length for x in average])

    distances = [
        [math.dist(unit_embedding(center(image)), center_of) ** 2 for center_of in means]
        for image in images.read_all()
    ]
    scores = predict_scores(state, images, ExecutionConfig(device="cpu"))
    # Scores are 2 - distance²: the order, and all differences, are those of the distances.
    for row, expected in zip(scores.tolist(), distances, strict=True):
        assert row == pytest.approx([2 - d for d in expected], abs=1e-4)
    nearest = [row.index(min(row)) for row in distances]
    assert scores.argmax(dim=1).tolist() == nearest
    assert len(set(nearest)) > 1
