"""The methods, one file each. A new one is a file and a line here."""

from medcil.method import Method
from medcil.methods.balanced import Balanced
from medcil.methods.finetune import Finetune

METHODS: dict[str, type[Method]] = {
    "balanced": Balanced,
    "finetune": Finetune,
}
