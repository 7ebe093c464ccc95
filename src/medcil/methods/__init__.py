"""The methods, one file each. A new one is a file and a line here."""

from medcil.methods.acil import ACIL
from medcil.methods.analytic import Analytic
from medcil.methods.balanced import Balanced
from medcil.methods.bic import BiC
from medcil.methods.der import DER
from medcil.methods.fecam import FeCAM
from medcil.methods.finetune import Finetune
from medcil.methods.gaussians import Gaussians
from medcil.methods.icarl import ICaRL
from medcil.methods.lo2ln import LO2LN
from medcil.methods.lws import LWS
from medcil.methods.podnet import PODNet
from medcil.methods.presets import PRESETS
from medcil.methods.protocol import Method
from medcil.methods.ranpac import RanPAC
from medcil.methods.replay import Replay
from medcil.methods.simplecil import SimpleCIL
from medcil.methods.slda import SLDA
from medcil.methods.ssil import SSIL
from medcil.methods.ucir import UCIR

__all__ = ["METHODS", "PRESETS"]

METHODS: dict[str, type[Method]] = {
    "finetune": Finetune,
    "replay": Replay,
    "icarl": ICaRL,
    "ucir": UCIR,
    "podnet": PODNet,
    "der": DER,
    "lo2ln": LO2LN,
    "bic": BiC,
    "ssil": SSIL,
    "lws": LWS,
    "balanced": Balanced,
    "gaussians": Gaussians,
    "analytic": Analytic,
    "simplecil": SimpleCIL,
    "slda": SLDA,
    "fecam": FeCAM,
    "ranpac": RanPAC,
    "acil": ACIL,
}
