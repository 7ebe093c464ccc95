"""The ablation solves every variant task by task from one set of features."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs"))
from analytic_ablation import VARIANTS, VIEWS, Features, Variant, confusions_by_step

BLOCKS = (6, 3, 4)
SIZES = (3, 2, 2)
N_CLASSES = sum(SIZES)


def noisy_classes(n_each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N_CLASSES).repeat_interleave(n_each)
    centers = torch.randn(N_CLASSES, 2 * sum(BLOCKS), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(len(labels), VIEWS, 2 * sum(BLOCKS), generator=generator)
    features = centers[labels][:, None] + noise
    return torch.cat([features, torch.ones_like(features[:, :, :1])], dim=2), labels


@pytest.fixture(scope="module")
def features() -> Features:
    (train, train_labels), (test, test_labels) = noisy_classes(30, seed=1), noisy_classes(10, seed=2)
    groups = [f"patient {i // 2}" for i in range(len(train))]
    roots = (train.relu().sqrt(), test.relu().sqrt())
    return Features(train, train_labels, groups, test, test_labels, BLOCKS, roots)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_solved_after_every_task(variant, features):
    small = replace(variant, n_random=min(variant.n_random, 50))
    found = [confusion for confusion, _ in confusions_by_step(features, small, SIZES)]
    assert [confusion.sum(axis=1).tolist() for confusion in found] == [[10] * n for n in (3, 5, 7)]
    assert np.trace(found[-1]) > 25  # of 70; by chance 10


def test_slda_is_that_of_scikit_learn_on_the_classes_so_far(features):
    columns = [
        *range(6),
        *range(9, 13),
        *range(13, 19),
        *range(22, 26),
    ]  # last stage and the one before, twice
    for step, (confusion, _) in enumerate(
        confusions_by_step(features, Variant("SLDA", solver="slda"), SIZES), start=1
    ):
        n_seen = sum(SIZES[:step])
        own = features.train_labels < n_seen
        theirs = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / n_seen] * n_seen)
        rows = features.train[own][:, :, columns].flatten(0, 1).numpy()
        theirs.fit(rows, features.train_labels[own].repeat_interleave(VIEWS).numpy())
        tested = features.test_labels < n_seen
        mean = features.test[tested][:, :, columns].mean(dim=1).numpy()
        right = theirs.predict(mean) == features.test_labels[tested].numpy()
        assert abs(right.sum() - np.trace(confusion)) <= 1  # ε = 1e-4


def test_the_last_stage_alone_is_read_where_a_variant_says_so(features):
    variant = Variant("", solver="slda", stages=1, has_copy=False)
    assert features.columns(variant).tolist() == list(range(6))
    with_copy = Variant("", stages=1)
    assert features.columns(with_copy).tolist() == [*range(6), *range(13, 19), 26]
