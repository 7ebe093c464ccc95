"""Classifiers from the means and covariances of classes, which follow from their statistics.

None of the scores carries a prior: they compare an image with each class, however frequent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from medcil.readouts.readout import mean_over_views
from medcil.readouts.statistics import StatisticsReadout

LEAST_VARIANCE = 1e-12
"""Added to variances that are divided by: features of a class may be constant."""


class CosinePrototypes(StatisticsReadout):
    """SimpleCIL: the cosine of an image's features and the mean of a class's.

    Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models", IJCV 2024.
    """

    kind = "cosine_prototypes"
    temperature = 0.05

    weights: Float[Tensor, "features classes"]
    """μ_c / ‖μ_c‖"""

    def __init__(self, n_classes: int = 0, dim: int = 0, **sizes: Any) -> None:
        super().__init__(n_classes, dim, **sizes)
        self.register_buffer("weights", torch.zeros(self.sums.shape[1], n_classes))

    def solve(self) -> None:
        self.weights = F.normalize(self.sums).T.float().contiguous()

    def scores_of(
        self, features: Float[Tensor, "n features"], *, views: int = 1
    ) -> Float[Tensor, "_ classes"]:
        return mean_over_views(F.normalize(features) @ self.weights, views)


class LinearDiscriminants(StatisticsReadout):
    """SLDA: one normal distribution per class with one covariance Σ, the classes equally frequent.

    With Λ = ((1 - ε) Σ + ε I)⁻¹ the score is μ_cᵀ Λ φ - μ_cᵀ Λ μ_c / 2, up to a constant of all classes.
    Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR
    Workshops 2020.
    """

    kind = "linear_discriminants"

    weights: Float[Tensor, "features classes"]
    offsets: Float[Tensor, "classes"]
    shrinkage: Float[Tensor, ""]
    """ε"""

    def __init__(self, n_classes: int = 0, dim: int = 0, **sizes: Any) -> None:
        super().__init__(n_classes, dim, **sizes)
        self.register_buffer("weights", torch.zeros(self.sums.shape[1], n_classes))
        self.register_buffer("offsets", torch.zeros(n_classes))
        self.register_buffer("shrinkage", torch.tensor(1e-4, dtype=torch.float64))

    def solve(self) -> None:
        means, covariance = self.statistics.means(), self.statistics.within_covariance()
        identity = torch.eye(len(covariance)).to(covariance)
        shrunk = (1 - self.shrinkage) * covariance + self.shrinkage * identity
        # Around the mean of the means, so that the numbers stay small in single precision.
        around = means - means.mean(dim=0)
        weights = torch.linalg.solve(shrunk, around.T)
        offsets = -((means + means.mean(dim=0)) / 2 * weights.T).sum(dim=1)
        self.weights, self.offsets = weights.float().contiguous(), offsets.float()

    def scores_of(
        self, features: Float[Tensor, "n features"], *, views: int = 1
    ) -> Float[Tensor, "_ classes"]:
        return mean_over_views(features @ self.weights + self.offsets, views)


class MahalanobisDistances(StatisticsReadout):
    """FeCAM: the negative squared Mahalanobis distance to a class, of unit vectors.

    Its covariance is shrunk to Σ + a₁ V₁ I + a₂ V₂ (1 - I), with the mean variance V₁ and the mean V₂ of the
    other entries, and made a correlation matrix. Goswami et al., "FeCAM: Exploiting the Heterogeneity of
    Class Distributions in Exemplar-Free Continual Learning", NeurIPS 2023.
    """

    kind = "mahalanobis"
    temperature = 0.1

    means: Float[Tensor, "classes features"]
    """Unit vectors."""
    precisions: Float[Tensor, "classes features features"]
    """The inverse correlation matrices."""
    shrinkage: Float[Tensor, "2"]
    """a₁ and a₂"""

    def __init__(self, n_classes: int = 0, dim: int = 0, **sizes: Any) -> None:
        super().__init__(n_classes, dim, **sizes)
        n_features = self.sums.shape[1]
        self.register_buffer("means", torch.zeros(n_classes, n_features))
        self.register_buffer("precisions", torch.zeros(n_classes, n_features, n_features))
        self.register_buffer("shrinkage", torch.ones(2, dtype=torch.float64))

    def solve(self) -> None:
        self.means = F.normalize(self.sums).float()
        self.precisions = torch.stack(
            [
                torch.linalg.pinv(self._correlation(label), hermitian=True).float()
                for label in range(len(self.counts))
            ]
        )

    def _correlation(self, label: int) -> Float[Tensor, "features features"]:
        covariance = self.statistics.covariance(label)
        identity = torch.eye(len(covariance)).to(covariance)
        others = covariance * (1 - identity)
        # V₂ leaves out what is exactly 0, such as the covariances of a feature that the class never has.
        mean_other = others.sum() / others.count_nonzero().clamp(min=1)
        diagonal, other = self.shrinkage.tolist()
        shrunk = covariance + diagonal * covariance.diagonal().mean() * identity
        shrunk = shrunk + other * mean_other * (1 - identity) + LEAST_VARIANCE * identity
        deviations = shrunk.diagonal().sqrt()
        correlation: Tensor = shrunk / torch.outer(deviations, deviations)
        return correlation

    def scores_of(
        self, features: Float[Tensor, "n features"], *, views: int = 1
    ) -> Float[Tensor, "_ classes"]:
        from_means = F.normalize(features) - self.means[:, None]
        distances = (from_means @ self.precisions * from_means).sum(dim=2)
        return mean_over_views(-distances.T, views)
