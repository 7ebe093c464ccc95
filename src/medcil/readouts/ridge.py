"""Class-balanced ridge regression in closed form, from sums over the images of each class.

For features φ of an image in v views, class c keeps n_c, s_c = Σ_i mean_v φ and A_c = Σ_i mean_v φ φᵀ. With
weights π_c ∝ n_c^(-β),

    W = (Σ_c π_c A_c + λ (tr / d) I)⁻¹ [π_1 s_1, ..., π_C s_C],   tr = trace of Σ_c π_c A_c,

and the scores of an image are mean_v φᵀ W. The statistics are sums, so that the order of the images makes no
difference, two hospitals may add theirs, and what was added can be subtracted again.

The recursive form of the same regression: Zhuang et al., "ACIL: Analytic Class-Incremental Learning with
Absolute Memorization and Privacy Protection", NeurIPS 2022; class-balanced weights: Fang et al., "AIR:
Analytic Imbalance Rectifier for Continual Learning", 2024.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.models.backbones import Backbone, create_backbone
from medcil.models.network import Network, Outputs
from medcil.readouts.readout import Readout, mean_over_views


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """Sums over the images of each class, in float64."""

    counts: Float[Tensor, "classes"]
    """n_c"""
    sums: Float[Tensor, "classes dim"]
    """s_c"""
    moments: Float[Tensor, "classes triangle"]
    """A_c, which is symmetric: its lower triangle, row by row."""

    @classmethod
    def empty(cls, n_classes: int, dim: int) -> "ClassStatistics":
        shapes = ((n_classes,), (n_classes, dim), (n_classes, dim * (dim + 1) // 2))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def of(
        cls, features: Float[Tensor, "n views dim"], labels: Int[Tensor, "n"], n_classes: int
    ) -> "ClassStatistics":
        """Sum up the features of labeled images."""
        features = features.double()
        n_views, dim = features.shape[1:]
        found = cls.empty(n_classes, dim)
        for c in torch.unique(labels).tolist():
            rows = features[labels == c]
            found.counts[c] = len(rows)
            found.sums[c] = rows.mean(dim=1).sum(dim=0).cpu()
            flat = rows.reshape(-1, dim)
            found.moments[c] = _packed(flat.T @ flat / n_views).cpu()
        return found

    def plus(self, other: "ClassStatistics") -> "ClassStatistics":
        """Add the images of another; it may know more classes, whose labels continue these."""
        ours, theirs = (s.padded(max(len(self.counts), len(other.counts))) for s in (self, other))
        return ClassStatistics(
            ours.counts + theirs.counts, ours.sums + theirs.sums, ours.moments + theirs.moments
        )

    def minus(self, other: "ClassStatistics") -> "ClassStatistics":
        """Remove images that were added before."""
        theirs = other.padded(len(self.counts))
        counts = self.counts - theirs.counts
        if (counts < 0).any():
            raise ValueError("more images of a class are removed than were added")
        left = (counts > 0).double()  # a class without images has no rounding errors either
        return ClassStatistics(
            counts,
            (self.sums - theirs.sums) * left[:, None],
            (self.moments - theirs.moments) * left[:, None],
        )

    def padded(self, n_classes: int) -> "ClassStatistics":
        """Append classes without images."""
        n_more = n_classes - len(self.counts)
        if n_more < 0:
            raise ValueError(f"{len(self.counts)} classes do not fit into {n_classes}")
        more = ClassStatistics.empty(n_more, self.sums.shape[1])
        return ClassStatistics(
            torch.cat([self.counts, more.counts]),
            torch.cat([self.sums, more.sums]),
            torch.cat([self.moments, more.moments]),
        )

    def class_weights(self, balance: float) -> Float[Tensor, "classes"]:
        """π_c = n_c^(-β), 0 for a class without images."""
        return torch.where(self.counts > 0, self.counts.clamp(min=1) ** -balance, 0.0)


SHARPNESSES = torch.logspace(0, 2, 81, dtype=torch.float64)
"""Among which `Ridge.sharpen` chooses."""


class Ridge(Readout):
    """Scores by ridge regression on stages of the network, and of its companion where there is one.

    φ = [u(stage), ..., u(embedding), the same of the companion, 1], where u is the global average pooling of
    a stage after its ReLU, scaled to length √dim.
    """

    kind = "ridge"
    needs_method = True

    counts: Float[Tensor, "classes"]
    sums: Float[Tensor, "classes features"]
    moments: Float[Tensor, "classes triangle"]
    """Of A_c, which is symmetric, the lower triangle."""
    weights: Float[Tensor, "features classes"]
    """W"""
    sharpness: Float[Tensor, ""]
    """Multiplies the regression's scores, so that a softmax of them is a posterior."""
    balance: Float[Tensor, ""]
    """β: the scores carry a prior ∝ n_c^(1 - β)."""

    def __init__(
        self,
        n_classes: int = 0,
        dim: int = 0,
        *,
        n_features: int = 0,
        stages: int = 1,
        companion: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(n_classes, dim)
        self.stages = stages
        self._companion_spec = companion
        self.companion: Backbone | None = None if companion is None else create_backbone(**companion)
        statistics = ClassStatistics.empty(n_classes, n_features)
        for name in ("counts", "sums", "moments"):
            self.register_buffer(name, getattr(statistics, name))
        self.register_buffer("weights", torch.zeros(n_features, n_classes))
        self.register_buffer("sharpness", torch.ones(()))
        self.register_buffer("balance", torch.ones(()))

    def spec(self) -> dict[str, Any]:
        own = {
            "n_features": len(self.weights),
            "stages": self.stages,
            "companion": self._companion_spec,
        }
        return {**super().spec(), **own}

    @property
    def statistics(self) -> ClassStatistics:
        return ClassStatistics(self.counts, self.sums, self.moments)

    def choose(self, network: Network, *, stages: int, with_companion: bool) -> None:
        """Decide what is read, before the network learns its first classes."""
        self.stages = stages
        if with_companion:
            spec = network.spec()
            self._companion_spec = {"name": spec.backbone, "last_relu": spec.last_relu}
            self.companion = copy.deepcopy(network.backbone).eval().requires_grad_(False)  # noqa: FBT003

    def features(self, out: Outputs) -> Float[Tensor, "batch features"]:
        blocks = _pooled_stages(out.maps, out.embedding, self.stages)
        if self.companion is not None:
            maps, embedding = self.companion(out.images)
            blocks += _pooled_stages(maps, embedding, self.stages)
        scaled = [F.normalize(block.float()) * block.shape[1] ** 0.5 for block in blocks]
        return torch.cat([*scaled, torch.ones_like(scaled[0][:, :1])], dim=1)

    def add(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Add images of one class."""
        labels = torch.full((len(features),), label)
        statistics = ClassStatistics.of(features, labels, label + 1)
        self._become(statistics if not len(self.counts) else self.statistics.plus(statistics))

    def solve(self, *, balance: float, strength: float) -> None:
        """Compute the weights from the statistics."""
        solution = solve_ridge(self.statistics, balance=balance, strength=strength)
        self.weights = solution.weights.float()
        self.balance = torch.tensor(balance)

    def sharpen(self, features: Mapping[int, Float[Tensor, "n views features"]], *, strength: float) -> None:
        """Fit how sharp the scores are on images that were just added: each is scored as if it had not been.

        With the prior that the scores carry, k s + β log n_c are the logits under the classes' frequencies.
        """
        labels = torch.cat([torch.full((len(f),), label) for label, f in features.items()])
        solution = solve_ridge(self.statistics, balance=float(self.balance), strength=strength)
        own = torch.cat([f.cpu() for f in features.values()])
        scores = leave_one_group_out(solution, own, labels, [str(i) for i in range(len(labels))])
        prior = float(self.balance) * self.counts.cpu().clamp(min=1).log()
        losses = [F.cross_entropy(k * scores + prior, labels) for k in SHARPNESSES]
        self.sharpness = SHARPNESSES[int(torch.stack(losses).argmin())].to(self.sharpness)

    def _become(self, statistics: "ClassStatistics") -> None:
        self.counts, self.sums, self.moments = statistics.counts, statistics.sums, statistics.moments

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        frequencies = (1 - self.balance.cpu()) * self.counts.cpu().clamp(min=1).log().float()
        super().finish_task(class_means, F.log_softmax(frequencies, dim=0))

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        return mean_over_views(self.features(out) @ self.weights, views) * self.sharpness


def _pooled_stages(
    maps: Sequence[Float[Tensor, "batch ..."]], embedding: Float[Tensor, "batch dim"], n_stages: int
) -> list[Float[Tensor, "batch _"]]:
    """The last of them is the embedding."""
    before = maps[:-1][len(maps) - n_stages :] if n_stages <= len(maps) else maps[:-1]
    return [F.relu(m.float()).mean(dim=(2, 3)) for m in before] + [embedding]


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """W, and what leave-one-out scores need beside it."""

    weights: Float[Tensor, "dim classes"]
    inverse: Float[Tensor, "dim dim"]
    """S = (Σ_c π_c A_c + λ (tr / d) I)⁻¹"""
    class_weights: Float[Tensor, "classes"]
    """π"""


def solve_ridge(statistics: ClassStatistics, *, balance: float, strength: float) -> RidgeSolution:
    """Solve for W with β = `balance` and λ = `strength`."""
    pi = statistics.class_weights(balance)
    gram = _unpacked(pi @ statistics.moments, statistics.sums.shape[1])
    gram = gram + strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    targets = (pi[:, None] * statistics.sums).T
    return RidgeSolution(inverse @ targets, inverse, pi)


def leave_one_group_out(
    solution: RidgeSolution,
    features: Float[Tensor, "n views dim"],
    labels: Int[Tensor, "n"],
    groups: Sequence[str],
) -> Float[Tensor, "n classes"]:
    """Score every image by the classifier that was solved without the images of its group.

    With rows Φ_g of the group (all views of its images), weights w_g = π / v and targets Y_g, its scores are
    Y_g - (I - Φ_g S Φ_gᵀ diag w_g)⁻¹ (Y_g - Φ_g W). π and λ tr / d stay as they are for all images.
    """
    n_views, dim = features.shape[1:]
    n_classes = solution.weights.shape[1]
    scores = torch.empty(len(features), n_classes, dtype=torch.float64)
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        rows = features[indices].double().reshape(-1, dim)
        targets = F.one_hot(labels[indices], n_classes).double().repeat_interleave(n_views, dim=0)
        weights = solution.class_weights[labels[indices]].repeat_interleave(n_views) / n_views
        hat = rows @ solution.inverse @ rows.T * weights
        residuals = torch.linalg.solve(
            torch.eye(len(rows), dtype=hat.dtype) - hat, targets - rows @ solution.weights
        )
        scores[indices] = (targets - residuals).reshape(len(indices), n_views, -1).mean(dim=1)
    return scores


def _packed(symmetric: Float[Tensor, "dim dim"]) -> Float[Tensor, "triangle"]:
    rows, columns = torch.tril_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def _unpacked(triangle: Float[Tensor, "triangle"], dim: int) -> Float[Tensor, "dim dim"]:
    rows, columns = torch.tril_indices(dim, dim, device=triangle.device)
    symmetric = triangle.new_zeros(dim, dim)
    symmetric[rows, columns] = triangle
    symmetric[columns, rows] = triangle
    return symmetric
