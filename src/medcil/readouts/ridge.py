"""Class-balanced ridge regression in closed form, from sums over the images of each class.

For features φ of an image in v views, class c keeps n_c, s_c = Σ_i mean_v φ and A_c = Σ_i mean_v φ φᵀ. With
weights π_c ∝ n_c^(-β),

    W = (Σ_c π_c A_c + ρ I)⁻¹ [π_1 s_1, ..., π_C s_C],

and the scores of an image are mean_v φᵀ W. The ridge ρ is chosen once, on the first images. The statistics
are sums, so that the order of the images makes no difference, two hospitals may add theirs, and what was
added can be subtracted again.

The recursive form of the same regression: Zhuang et al., "ACIL: Analytic Class-Incremental Learning with
Absolute Memorization and Privacy Protection", NeurIPS 2022; class-balanced weights: Fang et al., "AIR:
Analytic Imbalance Rectifier for Continual Learning", 2024.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.models.backbones import Backbone, create_backbone
from medcil.models.network import Network, Outputs
from medcil.readouts.readout import ImageFeatures, Readout, mean_over_views


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


STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""λ: the ridge ρ = λ tr / d, where tr is the trace of Σ_c π_c A_c."""
SHARPNESSES = torch.logspace(0, 2, 81, dtype=torch.float64)
"""Among which, as among `STRENGTHS`, `Ridge.tune` chooses."""
MOST_NUMBERS = 2**24
"""Of features that leave-one-out scores are computed from at a time."""


class Ridge(Readout):
    """Scores by ridge regression on stages of the network, and of its companion where there is one.

    φ = [u(stage), ..., u(embedding), the same of the companion, 1], where u is the global average pooling of
    a stage, of a ResNet's after its ReLU, scaled to length √dim.
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
    ridge: Float[Tensor, ""]
    """ρ"""

    def __init__(
        self,
        n_classes: int = 0,
        dim: int = 0,
        *,
        n_features: int = 0,
        stages: int = 1,
        relu: bool = True,
        companion: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(n_classes, dim)
        self.stages, self.relu = stages, relu
        self._companion_spec = companion
        self.companion: Backbone | None = None if companion is None else create_backbone(**companion)
        statistics = ClassStatistics.empty(n_classes, n_features)
        for name in ("counts", "sums", "moments"):
            self.register_buffer(name, getattr(statistics, name))
        self.register_buffer("weights", torch.zeros(n_features, n_classes))
        for name in ("sharpness", "balance", "ridge"):
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    def spec(self) -> dict[str, Any]:
        own = {
            "n_features": len(self.weights),
            "stages": self.stages,
            "relu": self.relu,
            "companion": self._companion_spec,
        }
        return {**super().spec(), **own}

    @property
    def statistics(self) -> ClassStatistics:
        return ClassStatistics(self.counts, self.sums, self.moments)

    def choose(self, network: Network, *, stages: int, with_companion: bool) -> None:
        """Decide what is read, before the network learns its first classes."""
        self.stages, self.relu = stages, network.backbone.is_staged
        if with_companion:
            spec = network.spec()
            self._companion_spec = {"name": spec.backbone, "last_relu": spec.last_relu}
            self.companion = copy.deepcopy(network.backbone).eval().requires_grad_(False)  # noqa: FBT003

    def features(self, out: Outputs) -> Float[Tensor, "batch features"]:
        blocks = self._pooled(out.maps, out.embedding)
        if self.companion is not None:
            blocks += self._pooled(*self.companion(out.images))
        scaled = [F.normalize(block.float()) * block.shape[1] ** 0.5 for block in blocks]
        return torch.cat([*scaled, torch.ones_like(scaled[0][:, :1])], dim=1)

    def _pooled(
        self, maps: Sequence[Float[Tensor, "batch ..."]], embedding: Float[Tensor, "batch dim"]
    ) -> list[Float[Tensor, "batch _"]]:
        """Pool the last stages; the embedding is the last of them."""
        before = maps[:-1][max(0, len(maps) - self.stages) :]
        return [(F.relu(m) if self.relu else m).float().mean(dim=(2, 3)) for m in before] + [embedding]

    def add(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Add images of one class."""
        labels = torch.full((len(features),), label)
        statistics = ClassStatistics.of(features, labels, label + 1)
        self._become(statistics if not len(self.counts) else self.statistics.plus(statistics))

    def tune(
        self,
        features: Mapping[int, ImageFeatures],
        *,
        balance: float,
        strengths: Sequence[float] = STRENGTHS,
    ) -> None:
        """Choose ρ and the sharpness on images that were just added, each scored without its group's.

        They make the images' labels the likeliest, all classes counting alike, where k s - (1 - β) log n_c
        are the logits. Later tasks keep them, so that a model does not depend on the order of its images.
        """
        labels = torch.cat([torch.full((len(f.groups),), label) for label, f in features.items()])
        values = torch.cat([f.values.cpu() for f in features.values()])
        groups = [group for f in features.values() for group in f.groups]
        gram = _normal_equations(self.statistics, balance)[0]
        ridges = [strength * float(gram.diagonal().mean()) for strength in strengths]
        scores = leave_one_group_out(self.statistics, values, labels, groups, balance=balance, ridges=ridges)
        counts = self.counts.cpu().clamp(min=1)
        prior, weights = (1 - balance) * counts.log(), 1 / counts
        losses = [F.cross_entropy(k * s - prior, labels, weights) for s in scores for k in SHARPNESSES]
        best, sharpness = divmod(int(torch.stack(losses).argmin()), len(SHARPNESSES))
        chosen = {"balance": balance, "ridge": ridges[best], "sharpness": float(SHARPNESSES[sharpness])}
        for name, value in chosen.items():
            setattr(self, name, getattr(self, name).new_tensor(value))

    def solve(self) -> None:
        """Compute the weights from the statistics."""
        weights = solve_ridge(self.statistics, balance=float(self.balance), ridge=float(self.ridge))
        self.weights = weights.float().contiguous()  # the layout of a loaded state, and its rounding

    def _become(self, statistics: "ClassStatistics") -> None:
        self.counts, self.sums, self.moments = statistics.counts, statistics.sums, statistics.moments

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
    shift = ridge * torch.eye(len(gram), dtype=gram.dtype)
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
    gram, targets, pi = _normal_equations(statistics, balance)
    variances, directions = torch.linalg.eigh(gram)
    targets = directions.T @ targets
    scores = torch.empty(len(ridges), len(features), targets.shape[1], dtype=gram.dtype)
    for members in _groups_of_one_size(groups, most_images=MOST_NUMBERS // (n_views * dim)):
        rows = (features[members].double() @ directions).flatten(1, 2)
        wanted = F.one_hot(labels[members], targets.shape[1]).double().repeat_interleave(n_views, dim=1)
        weights = pi[labels[members]].repeat_interleave(n_views, dim=1)[:, None] / n_views
        for of_ridge, ridge in zip(scores, ridges, strict=True):
            shrunk = rows / (variances.clamp(min=0) + ridge)
            left = torch.eye(rows.shape[1], dtype=gram.dtype) - shrunk @ rows.mT * weights
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
    pi = statistics.class_weights(balance)
    gram = _unpacked(pi @ statistics.moments, statistics.sums.shape[1])
    return gram, (pi[:, None] * statistics.sums).T, pi


def _packed(symmetric: Float[Tensor, "dim dim"]) -> Float[Tensor, "triangle"]:
    rows, columns = torch.tril_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def _unpacked(triangle: Float[Tensor, "triangle"], dim: int) -> Float[Tensor, "dim dim"]:
    rows, columns = torch.tril_indices(dim, dim, device=triangle.device)
    symmetric = triangle.new_zeros(dim, dim)
    symmetric[rows, columns] = triangle
    symmetric[columns, rows] = triangle
    return symmetric
