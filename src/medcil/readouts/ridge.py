"""Class-balanced ridge regression in closed form, from sums over the images of each class.

With n_c, s_c and A_c of `medcil.readouts.statistics` and weights π_c ∝ n_c^(-β),

    W = (Σ_c π_c A_c + ρ I)⁻¹ [π_1 s_1, ..., π_C s_C],

and the scores of an image are mean_v φᵀ W. The ridge ρ is chosen once, on the first images.

The recursive form of the same regression: Zhuang et al., "ACIL: Analytic Class-Incremental Learning with
Absolute Memorization and Privacy Protection", NeurIPS 2022; class-balanced weights: Fang et al., "AIR:
Analytic Imbalance Rectifier for Continual Learning", 2024.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.readouts.readout import ImageFeatures, mean_over_views
from medcil.readouts.statistics import ClassStatistics, StatisticsReadout

STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""λ: the ridge ρ = λ tr / d, where tr is the trace of Σ_c π_c A_c."""
SHARPNESSES = torch.logspace(0, 2, 81, dtype=torch.float64)
"""Among which, as among `STRENGTHS`, `Ridge.tune` chooses."""
FITTED = 0.8
"""Share of a task's groups that `Ridge.choose_on_part` fits on."""
MOST_NUMBERS = 2**24
"""Of features that leave-one-out scores are computed from at a time."""


class Ridge(StatisticsReadout):
    """Scores by ridge regression on features of the network."""

    kind = "ridge"

    weights: Float[Tensor, "features classes"]
    """W"""
    sharpness: Float[Tensor, ""]
    """Multiplies the regression's scores, so that a softmax of them is a posterior."""
    ridge: Float[Tensor, ""]
    """ρ"""

    def __init__(self, n_classes: int = 0, dim: int = 0, **sizes: Any) -> None:
        super().__init__(n_classes, dim, **sizes)
        self.register_buffer("weights", torch.zeros(self.sums.shape[1], n_classes))
        for name in ("sharpness", "ridge"):
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    def tune(self, features: Mapping[int, ImageFeatures], *, strengths: Sequence[float] = STRENGTHS) -> None:
        """Choose ρ and the sharpness on images that were just added, each scored without its group's.

        They make the images' labels the likeliest, all classes counting alike, where k s - (1 - β) log n_c
        are the logits. Later tasks keep them, so that a model does not depend on the order of its images.
        """
        labels = torch.cat([torch.full((len(f.groups),), label) for label, f in features.items()])
        values = torch.cat([f.values for f in features.values()])
        groups = [group for f in features.values() for group in f.groups]
        balance, labels = float(self.balance), labels.to(values.device)
        mean_variance = float(self.statistics.weighted_moments(balance).diagonal().mean())
        ridges = [strength * mean_variance for strength in strengths]
        scores = leave_one_group_out(self.statistics, values, labels, groups, balance=balance, ridges=ridges)
        losses = torch.stack([self._losses(s, labels) for s in scores])
        best, sharpness = divmod(int(losses.argmin()), len(SHARPNESSES))
        self.ridge = self.ridge.new_tensor(ridges[best])
        self.sharpness = self.sharpness.new_tensor(float(SHARPNESSES[sharpness]))

    def _losses(
        self, scores: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]
    ) -> Float[Tensor, "sharpnesses"]:
        """Return the cross-entropy of k s - (1 - β) log n_c for every k, all classes counting alike."""
        counts = self.counts.to(scores.device).clamp(min=1)
        prior, weights = (1 - float(self.balance)) * counts.log(), 1 / counts
        return torch.stack(
            [F.cross_entropy(k * scores - prior, labels, weights) for k in SHARPNESSES.tolist()]
        )

    def choose_on_part(
        self,
        features: Mapping[int, ImageFeatures],
        *,
        ridges: Sequence[float],
        random: np.random.Generator,
        and_sharpness: bool,
    ) -> None:
        """Choose ρ on a fifth of the images of a task, by the regression on the others of that task.

        The ρ with the least squared error is taken (McDonnell et al., "RanPAC", NeurIPS 2023), and the
        sharpness as in `tune`. Groups are not divided; if there is only one, nothing changes.
        """
        groups = sorted({group for f in features.values() for group in f.groups})
        chosen = set(random.permutation(np.array(groups))[: int(FITTED * len(groups))].tolist())
        if not chosen:
            return
        fitted, rest = {}, {}
        for label, (values, of_images) in features.items():
            is_chosen = torch.tensor([group in chosen for group in of_images], device=values.device)
            fitted[label], rest[label] = values[is_chosen], values[~is_chosen]
        n_rows = sum(values.shape[0] * values.shape[1] for values in fitted.values())
        if n_rows < self.sums.shape[1]:  # W is in the span of the rows
            rows = torch.cat([values.flatten(0, 1) for values in fitted.values()]).double()
            basis = torch.linalg.qr(rows.T).Q
            fitted, rest = (
                {c: values.double() @ basis for c, values in part.items()} for part in (fitted, rest)
            )
        pooled_balance = self.statistics.balance
        parts = (ClassStatistics.of(values, c, balance=pooled_balance) for c, values in fitted.items())
        gram, targets, _ = _normal_equations(reduce(ClassStatistics.plus, parts), float(self.balance))
        labels = torch.cat([torch.full((len(values),), c) for c, values in rest.items()]).to(gram.device)
        wanted, best = F.one_hot(labels, targets.shape[1]), (math.inf, 1.0, targets)
        for ridge in ridges:
            weights = _solved(gram, targets, ridge)
            if weights is not None:
                scores = torch.cat([values.mean(dim=1).double() @ weights for values in rest.values()])
                found = (float((scores - wanted).square().mean()), ridge, scores)
                best = min(best, found, key=itemgetter(0))
        error, ridge, scores = best
        if math.isfinite(error):
            self.ridge = self.ridge.new_tensor(ridge)
        if math.isfinite(error) and and_sharpness:
            best_of = int(self._losses(scores, labels).argmin())
            self.sharpness = self.sharpness.new_tensor(float(SHARPNESSES[best_of]))

    def solve(self) -> None:
        """Compute the weights of the scores from the statistics."""
        weights = solve_ridge(self.statistics, balance=float(self.balance), ridge=float(self.ridge))
        self.weights = weights.float().contiguous()  # the layout of a loaded state, and its rounding

    def rebalance(self, balance: float, strength: float | None = None, *, n_first: int) -> None:
        """Choose β again, and λ unless it stays, and solve. The first `n_first` classes are the first task's.

        The sharpness stays: no image is left to choose it on.
        """
        first = ClassStatistics(self.counts[:n_first], self.sums[:n_first], self.moments[:n_first])
        before, after = (
            float(first.weighted_moments(b).diagonal().mean()) for b in (float(self.balance), balance)
        )
        strength = float(self.ridge) / before if strength is None else strength
        self.ridge, self.balance = self.ridge.new_tensor(strength * after), self.balance.new_tensor(balance)
        self.solve()
        self.log_prior = self.prior_in_scores()

    def prior_in_scores(self) -> Float[Tensor, "classes"]:
        frequencies = (1 - self.balance.cpu()) * self.counts.cpu().clamp(min=1).log().float()
        return F.log_softmax(frequencies, dim=0)

    def scores_of(
        self, features: Float[Tensor, "n features"], *, views: int = 1
    ) -> Float[Tensor, "_ classes"]:
        return mean_over_views(features @ self.weights, views) * self.sharpness


def solve_ridge(statistics: ClassStatistics, *, balance: float, ridge: float) -> Float[Tensor, "dim classes"]:
    """Solve for W with β = `balance` and ρ = `ridge`."""
    gram, targets, _ = _normal_equations(statistics, balance)
    weights = _solved(gram, targets, ridge)
    if weights is None:
        shift = ridge * torch.eye(len(gram)).to(gram)
        weights = torch.linalg.pinv(gram + shift, hermitian=True) @ targets
    return weights


def _solved(
    gram: Float[Tensor, "dim dim"], targets: Float[Tensor, "dim classes"], ridge: float
) -> Float[Tensor, "dim classes"] | None:
    """Solve by Cholesky's decomposition. Return None where the ridge is lost in rounding errors."""
    factor, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram)).to(gram))
    return None if failed else torch.cholesky_solve(targets, factor)


def leave_one_group_out(
    statistics: ClassStatistics,
    features: Float[Tensor, "n views dim"],
    labels: Int[Tensor, "n"],
    groups: Sequence[str],
    *,
    balance: float,
    ridges: Sequence[float],
) -> Float[Tensor, "ridges n classes"]:
    """Score every image, for each ridge ρ, by the classifier that was solved without the images of its group.

    With rows Φ_g of the group (all views of its images), weights w_g = π / v, targets Y_g and
    S = (Σ_c π_c A_c + ρ I)⁻¹, its scores are Y_g - (I - Φ_g S Φ_gᵀ diag w_g)⁻¹ (Y_g - Φ_g W). π stays as it
    is for all images. One eigendecomposition of Σ_c π_c A_c serves every ρ.
    """
    n_views, dim = features.shape[1:]
    gram, targets, pi = _normal_equations(statistics.to(features.device), balance)
    variances, directions = torch.linalg.eigh(gram)
    targets = directions.T @ targets
    scores = gram.new_empty(len(ridges), len(features), targets.shape[1])
    for members in _groups_of_one_size(groups, most_images=MOST_NUMBERS // (n_views * dim)):
        members = members.to(features.device)
        rows = (features[members].double() @ directions).flatten(1, 2)
        wanted = F.one_hot(labels[members], targets.shape[1]).double().repeat_interleave(n_views, dim=1)
        weights = pi[labels[members]].repeat_interleave(n_views, dim=1)[:, None] / n_views
        for of_ridge, ridge in zip(scores, ridges, strict=True):
            shrunk = rows / (variances.clamp(min=0) + ridge)
            left = torch.eye(rows.shape[1]).to(gram) - shrunk @ rows.mT * weights
            fitted = wanted - torch.linalg.solve(left, wanted - shrunk @ targets)
            of_ridge[members] = fitted.unflatten(1, (-1, n_views)).mean(dim=2)
    return scores


def _groups_of_one_size(groups: Sequence[str], *, most_images: int) -> Iterator[Int[Tensor, "groups size"]]:
    """Yield the places of images group by group, many groups of equally many images at a time."""
    places = defaultdict[str, list[int]](list)
    for place, group in enumerate(groups):
        places[group].append(place)
    by_size = defaultdict[int, list[list[int]]](list)
    for members in places.values():
        by_size[len(members)].append(members)
    for size, of_size in sorted(by_size.items()):
        yield from torch.split(torch.tensor(of_size), max(1, most_images // size))


def _normal_equations(
    statistics: ClassStatistics, balance: float
) -> tuple[Float[Tensor, "dim dim"], Float[Tensor, "dim classes"], Float[Tensor, "classes"]]:
    """Σ_c π_c A_c, [π_1 s_1, ..., π_C s_C] and π."""
    pi = statistics.weights(balance)
    return statistics.weighted_moments(balance), (pi[:, None] * statistics.sums).T, pi
