"""Statistics of features as a memory: counts, sums and second moments of each class, and what reads them.

Features φ of an image are stages of the network, pooled and side by side; the same stages of a companion, a
second frozen backbone; and random features of all these. For an image in v views, class c keeps n_c,
s_c = Σ_i mean_v φ and A_c = Σ_i mean_v φ φᵀ. These are sums, so that the order of the images makes no
difference, two hospitals may add theirs, and what was added can be subtracted again.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from medcil.errors import InvalidInput
from medcil.models.backbones import Backbone, create_backbone
from medcil.models.network import Network, Outputs
from medcil.readouts.readout import Readout


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """Sums over the images of each class, in float64."""

    counts: Float[Tensor, "classes"]
    """n_c"""
    sums: Float[Tensor, "classes dim"]
    """s_c"""
    moments: Float[Tensor, "classes triangle"] | Float[Tensor, "1 triangle"]
    """A_c, a symmetric matrix: its lower triangle, row by row. Pooled: Σ_c π_c A_c in one row."""
    balance: float | None = None
    """β of pooled moments; None: a row for each class."""

    @classmethod
    def empty(cls, n_classes: int, dim: int, *, balance: float | None = None) -> "ClassStatistics":
        rows = n_classes if balance is None else 1
        return cls(
            torch.zeros(n_classes, dtype=torch.float64),
            torch.zeros(n_classes, dim, dtype=torch.float64),
            torch.zeros(rows, dim * (dim + 1) // 2, dtype=torch.float64),
            balance,
        )

    @classmethod
    def of(
        cls, features: Float[Tensor, "n views dim"], label: int = 0, *, balance: float | None = None
    ) -> "ClassStatistics":
        """Sum up the features of one class; the classes before it have no image."""
        features = features.double()
        n_views, dim = features.shape[1:]
        rows = features.flatten(0, 1)
        statistics = cls.empty(label + 1, dim, balance=balance).to(features.device)
        statistics.counts[label] = len(features)
        statistics.sums[label] = features.mean(dim=1).sum(dim=0)
        weight = 1 if balance is None else statistics.weights(balance)[label]
        statistics.moments[-1] = weight * packed(rows.T @ rows / n_views)
        return statistics

    def plus(self, other: "ClassStatistics", *, sign: Literal[1, -1] = 1) -> "ClassStatistics":
        """Add the images of another; it may know more classes, whose labels continue these."""
        n_classes = max(len(self.counts), len(other.counts))
        ours, theirs = self.padded(n_classes), other.to(self.counts.device).padded(n_classes)
        if ours.balance != theirs.balance:
            raise ValueError("statistics that are pooled differently cannot be added")
        if ours.balance and (ours.counts * theirs.counts).any():
            raise InvalidInput(
                "Pooled statistics cannot add or remove images of a known class. "
                "Train with method.pooled: false.",
                code="readout.statistics.pooled",
            )
        counts = ours.counts + sign * theirs.counts
        if (counts < 0).any():
            raise ValueError("more images of a class are removed than were added")
        left = (counts > 0).double()[:, None]  # a class without images has no rounding errors either
        sums, moments = ours.sums + sign * theirs.sums, ours.moments + sign * theirs.moments
        moments = moments if self.balance is not None else moments * left
        return replace(ours, counts=counts, sums=sums * left, moments=moments)

    def minus(self, other: "ClassStatistics") -> "ClassStatistics":
        """Remove images that were added before."""
        return self.plus(other, sign=-1)

    def padded(self, n_classes: int) -> "ClassStatistics":
        """Append classes without images."""
        n_more = n_classes - len(self.counts)
        return replace(
            self,
            counts=F.pad(self.counts, (0, n_more)),
            sums=F.pad(self.sums, (0, 0, 0, n_more)),
            moments=F.pad(self.moments, (0, 0, 0, n_more if self.balance is None else 0)),
        )

    def weights(self, balance: float) -> Float[Tensor, "classes"]:
        """π_c = n_c^(-β), 0 for a class without images."""
        return torch.where(self.counts > 0, self.counts.clamp(min=1) ** -balance, 0.0)

    def weighted_moments(self, balance: float) -> Float[Tensor, "dim dim"]:
        """Σ_c π_c A_c"""
        if self.balance is None:
            return unpacked(self.weights(balance) @ self.moments, self.sums.shape[1])
        if balance != self.balance:
            raise ValueError(f"pooled moments were weighted with β = {self.balance}, not {balance}")
        return unpacked(self.moments[0], self.sums.shape[1])

    def to(self, device: torch.device) -> "ClassStatistics":
        counts, sums, moments = (tensor.to(device) for tensor in (self.counts, self.sums, self.moments))
        return ClassStatistics(counts, sums, moments, self.balance)


def packed(symmetric: Float[Tensor, "dim dim"]) -> Float[Tensor, "triangle"]:
    rows, columns = torch.tril_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def unpacked(triangle: Float[Tensor, "triangle"], dim: int) -> Float[Tensor, "dim dim"]:
    rows, columns = torch.tril_indices(dim, dim, device=triangle.device)
    symmetric = triangle.new_zeros(dim, dim)
    symmetric[rows, columns] = triangle
    symmetric[columns, rows] = triangle
    return symmetric


@dataclass(frozen=True)
class FeatureSpec:
    """What an image's features are made of; JSON in a model folder."""

    stages: int = 1
    """So many of the last stages, the embedding among them."""
    relu: bool = True
    """The stages end before a ReLU, which is applied first; the embedding stays as it is."""
    n_random: int = 0
    """Random features beside these, ReLU(φ P) with P drawn once."""
    companion: str | None = None
    """Name of the companion's backbone."""
    companion_last_relu: bool = False


class StatisticsReadout(Readout):
    """Keeps statistics of features, and scores by weights that are solved from them."""

    needs_method = True

    counts: Float[Tensor, "classes"]
    sums: Float[Tensor, "classes features"]
    moments: Float[Tensor, "rows triangle"]
    balance: Float[Tensor, ""]
    """β: what weighs the classes when the weights are solved, and moments that are pooled."""
    projection: Float[Tensor, "others random"]
    """P"""

    def __init__(
        self,
        n_classes: int = 0,
        dim: int = 0,
        *,
        n_features: int = 0,
        n_projected: int = 0,
        is_pooled: bool = False,
        features: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(n_classes, dim)
        self.feature_spec = FeatureSpec(**(features or {}))
        self.is_pooled = is_pooled
        name, last_relu = self.feature_spec.companion, self.feature_spec.companion_last_relu
        self.companion: Backbone | None = None if name is None else create_backbone(name, last_relu=last_relu)
        statistics = ClassStatistics.empty(n_classes, n_features, balance=0.0 if is_pooled else None)
        for part in ("counts", "sums", "moments"):
            self.register_buffer(part, getattr(statistics, part))
        self.register_buffer("balance", torch.zeros((), dtype=torch.float64))
        self.register_buffer("projection", torch.zeros(n_projected, self.feature_spec.n_random))

    def spec(self) -> dict[str, Any]:
        own = {
            "n_features": self.sums.shape[1],
            "n_projected": len(self.projection),
            "is_pooled": self.is_pooled,
            "features": asdict(self.feature_spec),
        }
        return {**super().spec(), **own}

    @property
    def statistics(self) -> ClassStatistics:
        balance = float(self.balance) if self.is_pooled else None
        return ClassStatistics(self.counts, self.sums, self.moments, balance)

    def choose_features(
        self,
        network: Network,
        spec: FeatureSpec,
        *,
        with_companion: bool = False,
        seed: int = 0,
        balance: float = 0.0,
        is_pooled: bool = False,
    ) -> None:
        """Decide what is kept, before the network learns its first classes.

        The companion is a copy of the backbone as it is now.
        """
        self.balance, self.is_pooled = self.balance.new_tensor(balance), is_pooled
        spec = replace(spec, relu=network.backbone.is_staged)
        if with_companion:
            self.companion = copy.deepcopy(network.backbone).eval().requires_grad_(requires_grad=False)
            of_network = network.spec()
            spec = replace(spec, companion=of_network.backbone, companion_last_relu=of_network.last_relu)
        self.feature_spec = spec
        self.projection = torch.zeros(0, spec.n_random)
        self._seed = seed

    def features(self, out: Outputs) -> Float[Tensor, "batch features"]:
        """Compute blocks of length √dim, the embedding first, then random features and a constant 1."""
        blocks = self._pooled(out.maps, out.embedding)
        if self.companion is not None:
            if out.images is None:
                raise LookupError("a companion reads the images, which these outputs do not have")
            blocks += self._pooled(*self.companion(out.images))
        others = torch.cat([F.normalize(block) * block.shape[1] ** 0.5 for block in blocks], dim=1)
        parts = [others]
        if self.feature_spec.n_random:
            parts.append(F.relu(others @ self._projection_of(others.shape[1]).to(others)))
        return torch.cat([*parts, torch.ones_like(others[:, :1])], dim=1)

    def _projection_of(self, n_others: int) -> Float[Tensor, "others random"]:
        """Draw P when the number of features is first known: N(0, 1), scaled as a sum of so many needs."""
        if not len(self.projection):
            generator = torch.Generator().manual_seed(self._seed)
            drawn = torch.randn(n_others, self.feature_spec.n_random, generator=generator)
            self.projection = (drawn / n_others**0.5).to(self.projection.device)
        return self.projection

    def _pooled(
        self, maps: Sequence[Float[Tensor, "batch ..."]], embedding: Float[Tensor, "batch dim"]
    ) -> list[Float[Tensor, "batch _"]]:
        """Pool the last stages over the image, after the ReLU that a ResNet's stage ends before."""
        before = maps[:-1][max(0, len(maps) - self.feature_spec.stages) :]
        activated = [F.relu(m) if self.feature_spec.relu else m for m in before]
        return [embedding.float(), *(m.float().mean(dim=(2, 3)) for m in activated)]

    def add(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Add images of one class, known or new."""
        more = ClassStatistics.of(features, label, balance=self.statistics.balance)
        self._become(self.statistics.plus(more) if len(self.counts) else more)

    def remove(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Subtract images that were added to this class before."""
        self._become(self.statistics.minus(ClassStatistics.of(features, label)))

    def merge(self, other: "StatisticsReadout") -> None:
        """Add the images of another readout of the same network, whose classes have the same labels."""
        self._become(self.statistics.plus(other.statistics))

    def _become(self, statistics: ClassStatistics) -> None:
        self.counts, self.sums, self.moments = statistics.counts, statistics.sums, statistics.moments

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        means = F.normalize(self.sums[:, : class_means.shape[1]])  # of all images instead of exemplars
        super().finish_task(means.to(class_means), log_prior)
