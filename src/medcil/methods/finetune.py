"""Fine-tuning: cross-entropy on the new images alone; the lower bound of the comparison."""

from dataclasses import dataclass
from typing import ClassVar

from medcil.methods.protocol import Part
from medcil.methods.replay import Replay


@dataclass(frozen=True)
class Finetune(Replay):
    part: ClassVar[Part] = "new"
