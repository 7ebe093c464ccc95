"""Class gaussians: one normal distribution of unit embeddings per class, beside the classifier."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.models.network import Outputs
from medcil.readouts.readout import Readout, mean_over_views

RIDGE = 1e-3
"""Strength of the ridge regression from old to new embeddings, as a share of their mean variance."""
LEAST_VARIANCE = 1e-6
"""Least mean variance: classes of single images have none."""


class ClassGaussians(Readout):
    """Mixes the classifier's posterior with that of one normal distribution per class and one covariance.

    Images of old classes are gone, but their distributions can follow the network: see `carry`.
    """

    kind = "gaussians"
    needs_method = True

    means: Float[Tensor, "classes dim"]
    covariance: Float[Tensor, "dim dim"]
    n_images: Float[Tensor, ""]
    """Number of images that the covariance was computed from."""
    directions: Float[Tensor, "classes dim"]
    offsets: Float[Tensor, "classes"]
    weight: Float[Tensor, ""]
    """λ"""
    favor: Float[Tensor, "classes"]
    """δ: added to the scores of a class, besides the prior of the classifier's logits."""

    def __init__(self, n_classes: int = 0, dim: int = 0) -> None:
        super().__init__(n_classes, dim)
        self.register_buffer("means", torch.zeros(n_classes, dim))
        self.register_buffer("covariance", torch.zeros(dim, dim))
        self.register_buffer("n_images", torch.zeros(()))
        self.register_buffer("directions", torch.zeros(n_classes, dim))
        self.register_buffer("offsets", torch.zeros(n_classes))
        self.register_buffer("weight", torch.zeros(()))
        self.register_buffer("favor", torch.zeros(n_classes))

    @property
    def is_empty(self) -> bool:
        return not len(self.means)

    def add(self, units: Float[Tensor, "n dim"], labels: Int[Tensor, "n"]) -> None:
        """Add the classes that follow those already here, each with at least one image.

        The covariance becomes that of all images, around the mean of each one's class.
        """
        members = F.one_hot(labels - len(self.means)).T.to(units)
        means = members @ units / members.sum(dim=1, keepdim=True)
        around = units - means[labels - len(self.means)]
        covariance, n = around.T @ around / len(units), units.new_tensor(len(units))
        if self.is_empty:
            self.means, self.covariance, self.n_images = means, covariance, n
            return
        scatter = self.n_images * self.covariance + n * covariance
        self.n_images = self.n_images + n
        self.covariance = scatter / self.n_images
        self.means = torch.cat([self.means, means])

    def carry(
        self, old: Float[Tensor, "n dim"], new: Float[Tensor, "n dim_new"], labels: Int[Tensor, "n"]
    ) -> None:
        """Move the classes to where the network sees them after it has learned more.

        The affine map that takes the old network's embeddings of some images to the new one's,
        h_new ≈ A h_old + b, takes a class there too: μ -> A μ + b, Σ -> A Σ Aᵀ + what the map leaves
        unexplained. It is fitted by ridge regression in which every class weighs the same.
        """
        weights = 1 / torch.bincount(labels).to(old)[labels]
        weights = weights / weights.sum()
        center_old, center_new = weights @ old, weights @ new
        x, y = old - center_old, new - center_new
        gram = (x * weights[:, None]).T @ x
        gram = gram + RIDGE * _mean_variance(gram) * torch.eye(len(gram)).to(gram)
        to_new = torch.linalg.solve(gram, (x * weights[:, None]).T @ y)  # Aᵀ
        rest = y - x @ to_new
        self.means = (self.means.to(old) - center_old) @ to_new + center_new
        self.covariance = to_new.T @ self.covariance.to(old) @ to_new + (rest * weights[:, None]).T @ rest
        self.n_images = self.n_images.to(old)

    def prepare(self, *, weight: float, shrinkage: float, favor: float = 0.0, n_old: int = 0) -> None:
        """Compute the discriminants' parameters. The log density of class c, up to a constant of all, is

        d_c(h) = μ_cᵀ S h - μ_cᵀ S μ_c / 2, S the inverse of (1 - shrinkage) Σ + shrinkage (tr Σ / dim) I.
        """
        sphere = _mean_variance(self.covariance) * torch.eye(len(self.covariance)).to(self.covariance)
        shrunk = (1 - shrinkage) * self.covariance + shrinkage * sphere
        self.directions = torch.linalg.solve(shrunk, self.means.T).T.contiguous()
        self.offsets = -(self.directions * self.means).sum(dim=1) / 2
        self.weight = self.means.new_tensor(weight)
        self.favor = favor * (torch.arange(len(self.means)) < n_old).to(self.means)

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        if len(self.means) != len(class_means):
            raise TypeError('a method with the readout "gaussians" must add every class to it')
        super().finish_task(class_means, log_prior + self.favor.to(log_prior))

    def discriminants(self, embedding: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Compute d_c for embeddings of any length."""
        return F.normalize(embedding) @ self.directions.T + self.offsets

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        """Mix both posteriors, as if every class were as frequent as any other; then add the prior π + δ.

        log(softmax(s - π) + λ softmax(d)) + π + δ, where π is the part of the prior in the logits s
        """
        logits = mean_over_views(out.logits, views)
        discriminants = mean_over_views(self.discriminants(out.embedding), views)
        classifiers = F.log_softmax(logits - (self.log_prior - self.favor), dim=1)
        own = F.log_softmax(discriminants, dim=1) + self.weight.log()
        # Not logaddexp, which an exported file would compute as log(exp a + exp b).
        return torch.stack([classifiers, own]).logsumexp(dim=0) + self.log_prior


def _mean_variance(covariance: Float[Tensor, "dim dim"]) -> Float[Tensor, ""]:
    return covariance.diagonal().mean().clamp(min=LEAST_VARIANCE)
