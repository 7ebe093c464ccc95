"""Class-balanced ridge regression in closed form, from sums over the images of each class.

With n_c, s_c and A_c of `medcil.readouts.statistics` and weights π_c ∝ n_c^(-β),

    W = (Σ_c π_c A_c + ρ I)⁻¹ [π_1 s_1, ..., π_C s_C],

and the scores of an image are mean_v φᵀ W. The ridge ρ is chosen once, on the first images.

The recursive form of the same regression: Zhuang et al., "ACIL: Analytic Class-Incremental Learning with
Absolute Memorization and Privacy Protection", NeurIPS 2022; class-balanced weights: Fang et al., "AIR:
Analytic Imbalance Rectifier for Continual Learning", 2024.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.models.network import Outputs
from medcil.readouts.readout import ImageFeatures, mean_over_views
from medcil.readouts.statistics import ClassStatistics, StatisticsReadout

STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""λ: the ridge ρ = λ tr / d, where tr is the trace of Σ_c π_c A_c."""
SHARPNESSES = torch.logspace(0, 2, 81, dtype=torch.float64)
"""Among which, as among `STRENGTHS`, `Ridge.tune` chooses."""
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
        counts = self.counts.to(values.device).clamp(min=1)
        prior, weights = (1 - balance) * counts.log(), 1 / counts
        losses = [
            F.cross_entropy(k * s - prior, labels, weights) for s in scores for k in SHARPNESSES.tolist()
        ]
        best, sharpness = divmod(int(torch.stack(losses).argmin()), len(SHARPNESSES))
        self.ridge = self.ridge.new_tensor(ridges[best])
        self.sharpness = self.sharpness.new_tensor(float(SHARPNESSES[sharpness]))

    def solve(self) -> None:
        """Compute the weights of the scores from the statistics."""
        weights = solve_ridge(self.statistics, balance=float(self.balance), ridge=float(self.ridge))
        self.weights = weights.float().contiguous()  # the layout of a loaded state, and its rounding

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        frequencies = (1 - self.balance.cpu()) * self.counts.cpu().clamp(min=1).log().float()
        super().finish_task(class_means, F.log_softmax(frequencies, dim=0))

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        return mean_over_views(self.features(out) @ self.weights, views) * self.sharpness


def solve_ridge(statistics: ClassStatistics, *, balance: float, ridge: float) -> Float[Tensor, "dim classes"]:
    """Solve for W with β = `balance` and ρ = `ridge`."""
    gram, targets, _ = _normal_equations(statistics, balance)
    shift = ridge * torch.eye(len(gram)).to(gram)
    return torch.cholesky_solve(targets, torch.linalg.cholesky(gram + shift))


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
