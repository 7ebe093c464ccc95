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
from jaxtyping import Float, Int
from torch import Tensor

from medcil.errors import InvalidInput
from medcil.models.backbones import Backbone, create_backbone
from medcil.models.network import Network, Outputs
from medcil.readouts.readout import Readout

STATISTICS = ("counts", "sums", "moments")
MOST_NUMBERS = 2**28
"""Of features whose second moments are computed at a time."""


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
        n_views, dim = features.shape[1:]
        statistics = cls.empty(label + 1, dim, balance=balance).to(features.device)
        statistics.counts[label] = len(features)
        moments = torch.zeros(dim, dim, dtype=torch.float64, device=features.device)
        for part in torch.split(features, max(1, MOST_NUMBERS // (n_views * dim))):
            part = part.double()
            rows = part.flatten(0, 1)
            statistics.sums[label] += part.mean(dim=1).sum(dim=0)
            moments += rows.T @ rows / n_views
        weight = 1 if balance is None else statistics.weights(balance)[label]
        statistics.moments[-1] = weight * packed(moments)
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

    def relabelled(self, labels: Sequence[int], n_classes: int) -> "ClassStatistics":
        """Give class i the label `labels[i]`, among so many classes."""
        wide = ClassStatistics.empty(n_classes, self.sums.shape[1], balance=self.balance)
        wide = wide.to(self.counts.device)
        wide.counts[labels], wide.sums[labels] = self.counts, self.sums
        if self.balance is not None:
            return replace(wide, moments=self.moments)
        wide.moments[labels] = self.moments
        return wide

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

    def means(self) -> Float[Tensor, "classes dim"]:
        """μ_c, 0 for a class without images."""
        return self.sums / self.counts.clamp(min=1)[:, None]

    def covariance(self, label: int) -> Float[Tensor, "dim dim"]:
        """Return Σ_c of one class, over n_c - 1; 0 for a class of one image in one view."""
        mean, n = self.means()[label], self.counts[label]
        scatter = unpacked(self.moments[label], len(mean)) - n * torch.outer(mean, mean)
        return scatter / (n - 1).clamp(min=1)

    def within_covariance(self) -> Float[Tensor, "dim dim"]:
        """Return the covariance of all images around the means of their classes, over Σ_c n_c."""
        means = self.means()
        scatter = self.weighted_moments(0.0) - (self.counts[:, None] * means).T @ means
        return scatter / self.counts.sum().clamp(min=1)

    def to(self, device: torch.device) -> "ClassStatistics":
        counts, sums, moments = (tensor.to(device) for tensor in (self.counts, self.sums, self.moments))
        return ClassStatistics(counts, sums, moments, self.balance)


def _is_half(map_of_network: Tensor) -> bool:
    """Whether the network ran in bfloat16; its companion then does too."""
    return map_of_network.dtype == torch.bfloat16


def packed(symmetric: Float[Tensor, "dim dim"]) -> Float[Tensor, "triangle"]:
    return symmetric.masked_select(torch.ones_like(symmetric, dtype=torch.bool).tril())


def unpacked(triangle: Float[Tensor, "triangle"], dim: int) -> Float[Tensor, "dim dim"]:
    below = torch.ones(dim, dim, dtype=torch.bool, device=triangle.device).tril()
    lower = triangle.new_zeros(dim, dim).masked_scatter_(below, triangle)
    return lower + lower.tril(-1).T


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
    scaled: bool = True
    """Scale every stage's features to length √dim."""
    power: float = 1.0
    """Raise features to this power (Tukey). If it is not 1, a ResNet's embedding is pooled after the last
    ReLU. Features of other backbones, which may be negative, stay as they are."""
    constant: bool = True
    """A constant 1 at the end."""
    random_alone: bool = False
    """The random features without those that they are projected from."""
    draw: Literal["scaled_normal", "normal", "uniform"] = "scaled_normal"
    """P of d rows: N(0, 1) / √d, N(0, 1) or U(±1 / √d)."""

    @property
    def has_embedding(self) -> bool:
        """Whether the features begin with the embedding, of any length."""
        return self.power == 1 and not (self.n_random and self.random_alone)

    def stored(self) -> dict[str, Any]:
        """Return the JSON of a model folder, in which the later options appear where they are used."""
        later = ("scaled", "power", "constant", "random_alone", "draw")
        return {k: v for k, v in asdict(self).items() if k not in later or v != getattr(FeatureSpec, k)}


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
        for name in STATISTICS:
            self.register_buffer(name, getattr(statistics, name))
        self.register_buffer("balance", torch.zeros((), dtype=torch.float64))
        self.register_buffer("projection", torch.zeros(n_projected, self.feature_spec.n_random))

    def spec(self) -> dict[str, Any]:
        own = {
            "n_features": self.sums.shape[1],
            "n_projected": len(self.projection),
            "is_pooled": self.is_pooled,
            "features": self.feature_spec.stored(),
        }
        return {**super().spec(), **own}

    @property
    def has_features(self) -> bool:
        return self.sums.shape[1] > 0

    @property
    def statistics(self) -> ClassStatistics:
        balance = float(self.balance) if self.is_pooled else None
        return ClassStatistics(self.counts, self.sums, self.moments, balance)

    def statistics_by_class(self) -> list[dict[str, Float[Tensor, "rows ..."]]]:
        """Split the statistics into the rows of each class; pooled ones stay together."""
        rows = max(1, len(self.counts)) if self.is_pooled else 1
        parts = {name: getattr(self, name).split(rows) for name in STATISTICS}
        return [dict(zip(parts, of_class, strict=True)) for of_class in zip(*parts.values(), strict=True)]

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
        is_staged = network.backbone.is_staged
        spec = replace(spec, relu=is_staged, power=spec.power if is_staged else 1.0)
        self.companion = None
        if with_companion:
            self.companion = copy.deepcopy(network.backbone).eval().requires_grad_(requires_grad=False)
            of_network = network.spec()
            spec = replace(spec, companion=of_network.backbone, companion_last_relu=of_network.last_relu)
        self.feature_spec = spec
        self.projection = torch.zeros(0, spec.n_random)
        self._seed = seed

    def features(self, out: Outputs) -> Float[Tensor, "batch features"]:
        """Compute the stages' features, the embedding first, then random features and a constant 1."""
        spec, blocks = self.feature_spec, self._pooled(out.maps, out.embedding)
        if self.companion is not None:
            if out.images is None:
                raise LookupError("a companion reads the images, which these outputs do not have")
            with torch.autocast(out.images.device.type, torch.bfloat16, enabled=_is_half(out.maps[-1])):
                beside = self.companion(out.images)
            blocks += self._pooled(*beside)
        if spec.scaled:
            blocks = [F.normalize(block) * block.shape[1] ** 0.5 for block in blocks]
        others = torch.cat(blocks, dim=1)
        if spec.power != 1:
            others = others**spec.power
        parts = [] if spec.n_random and spec.random_alone else [others]
        if spec.n_random:
            parts.append(F.relu(others @ self._projection_of(others.shape[1]).to(others)))
        if spec.constant:
            parts.append(torch.ones_like(others[:, :1]))
        return torch.cat(parts, dim=1)

    def _projection_of(self, n_others: int) -> Float[Tensor, "others random"]:
        """Draw P when the number of features is first known."""
        if not len(self.projection):
            drawn = draw_projection(self.feature_spec, n_others, seed=self._seed)
            self.projection = drawn.to(self.projection.device)
        return self.projection

    def _pooled(
        self, maps: Sequence[Float[Tensor, "batch ..."]], embedding: Float[Tensor, "batch dim"]
    ) -> list[Float[Tensor, "batch _"]]:
        """Pool the last stages over the image, after the ReLU that a ResNet's stage ends before."""
        spec = self.feature_spec
        before = maps[:-1][max(0, len(maps) - spec.stages) :]
        activated = [F.relu(m) if spec.relu else m for m in before]
        if spec.power != 1:
            embedding = F.relu(maps[-1]).float().mean(dim=(2, 3))
        return [embedding.float(), *(m.float().mean(dim=(2, 3)) for m in activated)]

    def add(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Add images of one class, known or new."""
        more = ClassStatistics.of(features, label, balance=self.statistics.balance)
        self._become(self.statistics.plus(more) if len(self.counts) else more)

    def remove(self, features: Float[Tensor, "n views features"], label: int) -> None:
        """Subtract images that were added to this class before."""
        less = ClassStatistics.of(features, label, balance=self.statistics.balance)
        self._become(self.statistics.minus(less))

    def merge(self, other: "StatisticsReadout", labels: Sequence[int] | None = None) -> None:
        """Add the images of another readout of the same network.

        Its class i has the label `labels[i]` here, by default i. The result is the same in any order.
        """
        theirs = other.statistics
        if labels is not None:
            theirs = theirs.relabelled(labels, max(len(self.counts), *(label + 1 for label in labels)))
        self._become(self.statistics.plus(theirs))

    def clear(self) -> None:
        """Forget all classes. What the features are, and how classes are weighed, stays."""
        self._become(ClassStatistics.empty(0, self.sums.shape[1], balance=self.statistics.balance))
        self.class_means, self.log_prior = self.class_means[:0], self.log_prior[:0]

    def _become(self, statistics: ClassStatistics) -> None:
        self.counts, self.sums, self.moments = statistics.counts, statistics.sums, statistics.moments

    def keep_classes(self, labels: Int[Tensor, "kept"]) -> None:
        """Drop the other classes; the scores have to be solved again."""
        statistics = self.statistics
        if statistics.balance is not None:
            raise ValueError("pooled statistics have no rows of classes")
        self._become(
            ClassStatistics(statistics.counts[labels], statistics.sums[labels], statistics.moments[labels])
        )
        self.class_means, self.log_prior = self.class_means[labels], self.log_prior[labels]

    def solve(self) -> None:
        """Compute the scores' parameters from the statistics."""
        raise NotImplementedError

    def prior_in_scores(self) -> Float[Tensor, "classes"]:
        """Return the log prior that the scores carry: by default none."""
        return torch.zeros(len(self.counts))

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        if self.feature_spec.has_embedding:  # of all images instead of exemplars
            class_means = F.normalize(self.sums[:, : class_means.shape[1]]).to(class_means)
        super().finish_task(class_means, self.prior_in_scores())

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        return self.scores_of(self.features(out), views=views)

    def scores_of(
        self, features: Float[Tensor, "n features"], *, views: int = 1
    ) -> Float[Tensor, "_ classes"]:
        """Score rows of features: those of all images in the first view, then in the next."""
        raise NotImplementedError


def draw_projection(spec: FeatureSpec, n_others: int, *, seed: int) -> Float[Tensor, "others random"]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(n_others, spec.n_random)
    if spec.draw == "uniform":
        return drawn.uniform_(-1, 1, generator=generator).div_(n_others**0.5)
    drawn.normal_(generator=generator)
    return drawn if spec.draw == "normal" else drawn.div_(n_others**0.5)
