"""What learning one task works with, and what it tells whoever watches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from medcil.config import TrainingConfig
from medcil.engine.draws import Key
from medcil.engine.feed import Feed
from medcil.engine.journal import Journal
from medcil.engine.old_network import OldNetwork


@dataclass(frozen=True)
class Progress:
    """Where training is, for whoever watches."""

    phase: str
    number: int
    """Of the phase in its task, from 1 on: phases may share a name."""
    epoch: int
    epochs: int
    step: int
    steps: int
    losses: dict[str, float] | None = None
    """Of the whole epoch, once it is finished."""


Watch = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Lesson:
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

    def in_phase(self, index: int) -> "Lesson":
        return replace(self, key=replace(self.key, phase=index))

    def in_epoch(self, index: int) -> "Lesson":
        return replace(self, key=replace(self.key, epoch=index))
