"""Classes as normal distributions of unit embeddings, all with one covariance: a second opinion."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

RIDGE = 1e-3
"""Of the map from old to new embeddings, as a share of their mean variance."""
LEAST_VARIANCE = 1e-6
"""Of a coordinate, where single images of classes show none."""


class ClassGaussians(nn.Module):
    """Means and covariance of what the classes look like to the network, and the read-out made of them.

    Images of old classes are gone, but their distributions can follow the network: see `carried`.
    """

    means: Float[Tensor, "classes dim"]
    covariance: Float[Tensor, "dim dim"]
    n_images: Float[Tensor, ""]
    """From which the covariance was taken."""
    directions: Float[Tensor, "classes dim"]
    offsets: Float[Tensor, "classes"]
    weight: Float[Tensor, ""]
    """λ"""
    favor: Float[Tensor, "classes"]
    """δ: by how much the scores put a class before others, beyond the prior of the classifier's logits."""

    def __init__(self, n_classes: int, dim: int) -> None:
        """All zeros, in the shapes that a state's tensors fill."""
        super().__init__()
        shapes = {
            "means": (n_classes, dim),
            "covariance": (dim, dim),
            "n_images": (),
            "directions": (n_classes, dim),
            "offsets": (n_classes,),
            "weight": (),
            "favor": (n_classes,),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    @classmethod
    def of(cls, units: Float[Tensor, "n dim"], labels: Int[Tensor, "n"]) -> "ClassGaussians":
        """Of images of the classes 0, 1, ..., each of which has one at least."""
        members = F.one_hot(labels).T.to(units)
        means = members @ units / members.sum(dim=1, keepdim=True)
        around = units - means[labels]
        found = cls(*means.shape)
        found.means, found.n_images = means, units.new_tensor(len(units))
        found.covariance = around.T @ around / len(units)
        return found

    def carried(
        self, old: Float[Tensor, "n dim"], new: Float[Tensor, "n dim_new"], labels: Int[Tensor, "n"]
    ) -> "ClassGaussians":
        """Where the classes are to a network that has learned on, judged by images both networks have seen.

        The affine map that takes the one's embeddings of them to the other's, h_new ≈ A h_old + b, takes a
        class there too: μ -> A μ + b, Σ -> A Σ Aᵀ + what the map leaves unexplained. It is fitted by ridge
        regression in which every class weighs the same.
        """
        weights = 1 / torch.bincount(labels).to(old)[labels]
        weights = weights / weights.sum()
        center_old, center_new = weights @ old, weights @ new
        x, y = old - center_old, new - center_new
        gram = (x * weights[:, None]).T @ x
        gram = gram + RIDGE * _mean_variance(gram) * torch.eye(len(gram)).to(gram)
        to_new = torch.linalg.solve(gram, (x * weights[:, None]).T @ y)  # Aᵀ
        rest = y - x @ to_new
        found = ClassGaussians(len(self.means), new.shape[1])
        found.means = (self.means.to(old) - center_old) @ to_new + center_new
        found.covariance = to_new.T @ self.covariance.to(old) @ to_new + (rest * weights[:, None]).T @ rest
        found.n_images = self.n_images
        return found

    def joined(self, more: "ClassGaussians") -> "ClassGaussians":
        """With more classes; the covariance is that of all images."""
        found = ClassGaussians(len(self.means) + len(more.means), more.means.shape[1])
        found.means = torch.cat([self.means, more.means])
        found.n_images = self.n_images + more.n_images
        scatter = self.n_images * self.covariance + more.n_images * more.covariance
        found.covariance = scatter / found.n_images
        return found

    def prepare(self, *, weight: float, shrinkage: float, favor: float = 0.0, n_old: int = 0) -> None:
        """For reading out: the log density of class c, up to what all classes share, is

        d_c(h) = μ_cᵀ S h - μ_cᵀ S μ_c / 2, S the inverse of (1 - shrinkage) Σ + shrinkage (tr Σ / dim) I.
        """
        sphere = _mean_variance(self.covariance) * torch.eye(len(self.covariance)).to(self.covariance)
        shrunk = (1 - shrinkage) * self.covariance + shrinkage * sphere
        self.directions = torch.linalg.solve(shrunk, self.means.T).T.contiguous()
        self.offsets = -(self.directions * self.means).sum(dim=1) / 2
        self.weight = self.means.new_tensor(weight)
        self.favor = favor * (torch.arange(len(self.means)) < n_old).to(self.means)

    def forward(self, embedding: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """The discriminants d_c of embeddings of any length."""
        return F.normalize(embedding) @ self.directions.T + self.offsets

    def scores(
        self,
        logits: Float[Tensor, "batch classes"],
        discriminants: Float[Tensor, "batch classes"],
        log_prior: Float[Tensor, "classes"],
    ) -> Float[Tensor, "batch classes"]:
        """Both posteriors, as if every class were as frequent as any other, mixed; then the prior π + δ.

        log(softmax(s - π) + λ softmax(d)) + π + δ, where π is the logits' part of it
        """
        classifiers = F.log_softmax(logits - (log_prior - self.favor), dim=1)
        own = F.log_softmax(discriminants, dim=1) + self.weight.log()
        # Not logaddexp, which an exported file would compute as log(exp a + exp b).
        mixed = torch.stack([classifiers, own]).logsumexp(dim=0)
        return mixed + log_prior


def _mean_variance(covariance: Float[Tensor, "dim dim"]) -> Float[Tensor, ""]:
    return covariance.diagonal().mean().clamp(min=LEAST_VARIANCE)
