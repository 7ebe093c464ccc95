"""LO2LN: a branch for every task on shared lower stages; epochs for old and for new classes take turns.

Chee et al., "Leveraging Old Knowledge to Continually Learn New Classes in Medical Images", AAAI 2023: the
benchmark of the published tables. The defaults are its constants for HAM10000.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from medcil.config import NonNegative, Positive, PositiveInt
from medcil.methods import terms
from medcil.methods.protocol import Increment, LossTerm, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class LO2LN:
    focusing_new: NonNegative = 1.0  # γ of L_new
    beta_new: terms.Beta = 0.9  # β of L_new
    focusing_old: NonNegative = 0.5  # γ of L_old
    beta_old: terms.Beta = 0.999  # β of L_old
    use_auxiliary: bool = True
    focusing_auxiliary: NonNegative = 0.0
    beta_auxiliary: terms.Beta = 0.0
    alternate: bool = True
    distillation_weight: NonNegative = 1.0
    temperature: Positive = 2.0
    ranking_weight: NonNegative = 10.0
    ranking_margin: NonNegative = 0.4
    n_rivals: PositiveInt = 2
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        shared_stages = network.require_stages() // 2  # conv1 to layer2 of a ResNet-18
        if increment.is_first:
            network.grow(new_class_weights(network, increment))
            yield Phase("learn", {"classification": terms.cross_entropy()}, network.every_parameter())
            return
        network.add_branch(shared_stages=shared_stages)
        network.grow(new_class_weights(network, increment))
        yield self._phase_new(network)

    def _phase_new(self, network: Network) -> Phase:
        """L_new: the new branch, what reads it, and the new classes' weights."""
        parts: dict[str, LossTerm] = {
            "classification": terms.class_balanced_focal(beta=self.beta_new, focusing=self.focusing_new)
        }
        if self.use_auxiliary:
            parts["auxiliary"] = terms.newest_branch(
                beta=self.beta_auxiliary, focusing=self.focusing_auxiliary
            )
        *old_classes, new_classes = network.classifier.columns_of_blocks()
        reads_new_branch = [columns[-1] for columns in old_classes]
        return Phase(
            "learn",
            parts | self._remembering(),
            {
                "backbone": list(network.newest_branch.parameters()),
                "classifier": reads_new_branch + new_classes + network.scale_parameters(),
            },
            alternate=self._phase_old(network) if self.alternate else None,
        )

    def _phase_old(self, network: Network) -> Phase:
        """L_old: on the old branches, the new classes' weights alone."""
        *on_old_branches, _ = network.classifier.columns_of_blocks()[-1]
        balanced = terms.class_balanced_focal(beta=self.beta_old, focusing=self.focusing_old)
        return Phase(
            "learn",
            {"classification": balanced} | self._remembering(),
            {"classifier": on_old_branches + network.scale_parameters()},
        )

    def _remembering(self) -> dict[str, LossTerm]:
        return {
            "distillation": terms.distillation(
                weight=self.distillation_weight, kind="kl", temperature=self.temperature
            ),
            "ranking": terms.margin_ranking(
                weight=self.ranking_weight, margin=self.ranking_margin, n_rivals=self.n_rivals
            ),
        }
