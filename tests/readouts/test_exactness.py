"""Statistics are exact: the same weights and scores as a refit, whatever the way the images came.

On given features, in float64, to 1e-8, at a fixed β and ridge ρ; problems of random shapes.
"""

import dataclasses
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medcil.readouts.ridge import leave_one_group_out, solve_ridge
from medcil.readouts.statistics import ClassStatistics
from medcil.training.distributed import Ranks

FEW = settings(max_examples=25, deadline=None)


@dataclass(frozen=True)
class Problem:
    features: torch.Tensor
    labels: torch.Tensor
    groups: list[str]
    """Patients: of several images, and of several classes."""
    balance: float
    ridge: float
    seed: int

    @property
    def n_classes(self) -> int:
        return int(self.labels.max()) + 1

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def statistics(self, *portions: torch.Tensor) -> ClassStatistics:
        """Add portions of the images one after the other, each class by class."""
        total = ClassStatistics.empty(0, self.features.shape[2])
        for portion in portions:
            labels = self.labels[portion]
            for c in torch.unique(labels).tolist():
                total = total.plus(ClassStatistics.of(self.features[portion[labels == c]], c))
        return total.padded(self.n_classes)

    def refit(self, images: torch.Tensor, pi: np.ndarray | None = None) -> np.ndarray:
        """W of weighted least squares over every view of these images, as NumPy solves it."""
        n_views, dim = self.features.shape[1:]
        labels = self.labels[images].numpy()
        counts = np.bincount(labels, minlength=self.n_classes)
        pi = np.where(counts > 0, np.maximum(counts, 1.0) ** -self.balance, 0) if pi is None else pi
        rows = self.features[images].numpy().reshape(-1, dim)
        targets = np.eye(self.n_classes)[labels].repeat(n_views, axis=0)
        roots = np.sqrt(pi[labels] / n_views).repeat(n_views)[:, None]
        above = np.concatenate([roots * rows, np.sqrt(self.ridge) * np.eye(dim)])
        below = np.concatenate([roots * targets, np.zeros((dim, self.n_classes))])
        return np.linalg.lstsq(above, below, rcond=None)[0]

    def assert_exact(self, statistics: ClassStatistics, images: torch.Tensor) -> None:
        """The weights, and the scores of all images, are those of a refit on these images."""
        weights = solve_ridge(statistics, balance=self.balance, ridge=self.ridge).numpy()
        expected = self.refit(images)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-8)
        means = self.features.mean(dim=1).numpy()
        np.testing.assert_allclose(means @ weights, means @ expected, rtol=0, atol=1e-8)


def problem(
    seed: int, counts: Sequence[int], *, views: int, dim: int, balance: float, ridge: float
) -> Problem:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    centers = 2 * random.normal(size=(len(counts), 1, dim))
    features = centers[labels] + random.normal(size=(len(labels), views, dim))
    groups = random.integers(0, max(2, len(labels) // 3), size=len(labels))
    tensors = torch.tensor(features), torch.tensor(labels)
    return Problem(*tensors, [f"patient {g}" for g in groups], balance, ridge, seed)


PROBLEMS = st.builds(
    problem,
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 15), min_size=1, max_size=5),
    views=st.integers(1, 4),
    dim=st.integers(1, 9),
    balance=st.floats(0, 1.5),
    ridge=st.floats(1e-3, 10),
)
FIXED = problem(5, (40, 12, 7, 3), views=3, dim=7, balance=0.5, ridge=0.1)


@FEW
@given(PROBLEMS)
def test_images_may_come_in_any_order_and_in_any_portions(given_problem):
    random, n = given_problem.random(), len(given_problem.labels)
    shuffled = torch.tensor(random.permutation(n))
    cuts = sorted(random.integers(0, n + 1, size=3).tolist())
    for portions in (torch.arange(n)[None], shuffled[:, None], torch.tensor_split(shuffled, cuts)):
        given_problem.assert_exact(given_problem.statistics(*portions), torch.arange(n))


@FEW
@given(PROBLEMS)
def test_classes_may_come_in_any_order(given_problem):
    order = torch.tensor(given_problem.random().permutation(given_problem.n_classes))
    renamed = dataclasses.replace(given_problem, labels=torch.argsort(order)[given_problem.labels])
    everything = torch.arange(len(renamed.labels))
    first, second = (
        solve_ridge(one.statistics(everything), balance=one.balance, ridge=one.ridge)
        for one in (given_problem, renamed)
    )
    torch.testing.assert_close(second, first[:, order], rtol=0, atol=1e-8)


@FEW
@given(PROBLEMS)
def test_images_added_and_removed_again_were_never_there(given_problem):
    n = len(given_problem.labels)
    parts = given_problem.random().integers(0, 2, size=n).astype(bool)
    parts[0] = True
    stays, goes = torch.tensor(np.flatnonzero(parts)), torch.tensor(np.flatnonzero(~parts))
    whole = given_problem.statistics(torch.arange(n))
    given_problem.assert_exact(whole.minus(given_problem.statistics(goes)), stays)


@FEW
@given(PROBLEMS)
def test_merged_hospitals_equal_all_their_images(given_problem):
    n = len(given_problem.labels)
    random = given_problem.random()
    parts = [torch.tensor(part) for part in np.array_split(random.permutation(n), 3)]
    a, b, c = (given_problem.statistics(part) for part in parts)
    for merged in (a.plus(b).plus(c), c.plus(b.plus(a))):
        given_problem.assert_exact(merged, torch.arange(n))


@FEW
@given(PROBLEMS)
def test_leaving_out_a_group_equals_a_refit_without_it(given_problem):
    """π and ρ stay as they are for all images."""
    everything, groups = torch.arange(len(given_problem.labels)), np.array(given_problem.groups)
    statistics = given_problem.statistics(everything)
    (scores,) = leave_one_group_out(
        statistics,
        given_problem.features,
        given_problem.labels,
        given_problem.groups,
        balance=given_problem.balance,
        ridges=[given_problem.ridge],
    )
    pi = statistics.weights(given_problem.balance).numpy()
    means = given_problem.features.mean(dim=1).numpy()
    for group in np.unique(groups):
        refit = given_problem.refit(everything[groups != group], pi)
        own = groups == group
        np.testing.assert_allclose(scores[own].numpy(), means[own] @ refit, rtol=0, atol=1e-8)


def test_the_problem_has_what_makes_leaving_out_difficult():
    """Patients of several images, and of several classes."""
    classes_of = {
        g: {int(c) for c, of in zip(FIXED.labels, FIXED.groups, strict=True) if of == g} for g in FIXED.groups
    }
    assert max(map(len, classes_of.values())) > 1
    assert len(classes_of) < len(FIXED.labels) / 2


def _one_process(rank: int, folder: Path) -> None:
    """Two ways to share the work: add the statistics of the shares, or gather the features first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    ranks, n = Ranks(), len(FIXED.labels)
    own = ranks.share(n)
    statistics = FIXED.statistics(torch.arange(n)[own])
    gathered = ranks.gather(FIXED.features[own], n)
    save_file(
        {
            **{name: getattr(statistics, name) for name in ("counts", "sums", "moments")},
            "gathered": gathered.contiguous(),
        },
        folder / f"{rank}.safetensors",
    )
    dist.destroy_process_group()


def test_four_processes_compute_what_one_does(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=_one_process, args=(rank, tmp_path)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode == 0
    tensors = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(4)]
    merged = ClassStatistics.empty(FIXED.n_classes, FIXED.features.shape[2])
    for own in tensors:
        assert own["gathered"].equal(FIXED.features)
        share = ClassStatistics(own["counts"], own["sums"], own["moments"])
        assert 0 < share.counts.sum() < len(FIXED.labels)
        merged = merged.plus(share)
    FIXED.assert_exact(merged, torch.arange(len(FIXED.labels)))


@pytest.mark.parametrize(
    "wrong", [{"ridge": FIXED.ridge * 1.001}, {"balance": FIXED.balance + 0.001}, {"n_missing": 1}], ids=str
)
def test_the_comparison_notices_what_differs(wrong):
    everything = torch.arange(len(FIXED.labels))
    n_missing = wrong.pop("n_missing", 0)
    other = dataclasses.replace(FIXED, **wrong)
    other_weights = other.refit(everything[n_missing:])
    assert np.abs(other_weights - FIXED.refit(everything)).max() > 1e-7
