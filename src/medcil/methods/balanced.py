"""The paper's method: L_all = L_cbc + λ_d L_dm + λ_k L_kd (Eq. 12), every part of it switchable.

Hao et al., "Addressing Imbalance for Class Incremental Learning in Medical Image Classification", 2024.
Cross-entropy with distillation, its ablation baseline, is `classification="cross_entropy", margin="none"`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medcil.config import Fraction, NonNegative, Positive, PositiveInt, Sampler
from medcil.methods import terms
from medcil.methods.protocol import Classification, Increment, LossTerm, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class Balanced:
    classification: Literal["cil_balanced", "cross_entropy", "focal", "class_balanced_focal"] = "cil_balanced"
    alpha: Fraction = 0.5  # α, Eq. 6
    focusing: NonNegative = 1.0  # γ of the focal losses
    beta: terms.Beta = 0.999  # β of the class-balanced focal loss

    margin: Literal["distribution", "vanilla", "ranking", "none"] = "distribution"
    margin_weight: NonNegative = 0.1  # λ_d
    margin_size: NonNegative = 0.4  # m of Eq. 9
    margin_reduction: terms.Reduction = "sum"
    normalize_weights: bool = False  # of ŵ, before the noise is added
    noise_scale: NonNegative | Literal["inverse_sqrt_dim"] = 1.0
    detach_range: bool = True  # Differs from the paper: see docs/reference/methods.md
    n_rivals: PositiveInt = 2  # K of margin ranking

    distillation: terms.DistillationKind | Literal["none"] = "l1"
    distillation_weight: NonNegative = 0.1  # λ_k
    temperature: Positive = 2.0  # of the distillation "kl"
    distillation_images: Literal["exemplars"] | None = None  # None: the whole batch
    distillation_schedule: Literal["share"] | None = None  # None: λ_k in every task
    embedding_weight: NonNegative | None = None  # of UCIR's: embeddings may not turn. Not in the paper

    # Of later tasks; None: the recipe's. The paper does not say how batches are drawn; drawn like all images,
    # there is often less than one exemplar in a batch for the loss to weigh.
    sampler: Sampler | None = "two_stream"

    first_task: Literal["cross_entropy", "logit_balanced"] = "cross_entropy"
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        if increment.is_first:
            # Algorithm 1 covers t >= 2 only; the benchmark's first step is plain cross-entropy.
            plain = self.first_task == "cross_entropy"
            first = terms.cross_entropy() if plain else terms.logit_balanced()
            yield Phase("learn", {"classification": first}, network.every_parameter())
            return
        parts: dict[str, LossTerm] = {"classification": self._classification_term()}
        if self.margin != "none" and self.margin_weight > 0:
            parts["margin"] = self._margin_term()
        if self.distillation != "none" and self.distillation_weight > 0:
            # BiC's mix: what is old weighs as much as it is of all there is to tell apart.
            share = increment.n_old / increment.n_seen if self.distillation_schedule == "share" else 1.0
            parts["distillation"] = terms.distillation(  # Eq. 11
                weight=self.distillation_weight * share,
                kind=self.distillation,
                temperature=self.temperature,
                images=self.distillation_images,
            )
        if self.embedding_weight:
            parts["embedding"] = terms.embedding_distillation(weight=self.embedding_weight)
        yield Phase("learn", parts, network.every_parameter(), sampler=self.sampler)

    def _classification_term(self) -> Classification:
        match self.classification:
            case "cil_balanced":
                return terms.cil_balanced(alpha=self.alpha)  # Eq. 7
            case "cross_entropy":
                return terms.cross_entropy()
            case "focal":
                return terms.focal(focusing=self.focusing)
            case "class_balanced_focal":
                return terms.class_balanced_focal(beta=self.beta, focusing=self.focusing)

    def _margin_term(self) -> LossTerm:
        if self.margin == "ranking":
            return terms.margin_ranking(
                weight=self.margin_weight, margin=self.margin_size, n_rivals=self.n_rivals
            )
        if self.margin == "vanilla":
            return terms.vanilla_margin(
                weight=self.margin_weight, margin=self.margin_size, reduction=self.margin_reduction
            )
        return terms.distribution_margin(  # Eq. 9
            weight=self.margin_weight,
            margin=self.margin_size,
            normalize_weights=self.normalize_weights,
            noise_scale=self.noise_scale,
            reduction=self.margin_reduction,
            detach_range=self.detach_range,
        )
