"""What learning one task works with."""

from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from medcil.config import TrainingConfig
from medcil.training.checkpoint import Journal, Watch
from medcil.training.feed import Feed
from medcil.training.old_network import OldNetwork
from medcil.training.sampling import Key


@dataclass(frozen=True, eq=False)
class Assignment:
    """What stays the same while one task is learned; `key` says where in it we are."""

    key: Key
    n_old: int
    old_network: OldNetwork | None
    feed: Feed
    inherent_counts: Int[Tensor, "classes"]
    quota: int
    """Exemplars of each class that the memory will keep."""
    training: TrainingConfig
    checkpoint_every: int | None
    journal: Journal
    watch: Watch

    def in_phase(self, index: int) -> "Assignment":
        return replace(self, key=replace(self.key, phase=index))

    def in_epoch(self, index: int) -> "Assignment":
        return replace(self, key=replace(self.key, epoch=index))
