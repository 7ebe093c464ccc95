"""The table of readouts, by the names that recipes, methods and model folders use."""

from typing import Annotated, Any

from pydantic import AfterValidator

from medcil.errors import nearest
from medcil.readouts.discriminants import CosinePrototypes, LinearDiscriminants, MahalanobisDistances
from medcil.readouts.gaussians import ClassGaussians
from medcil.readouts.readout import ClassifierReadout, NearestMean, Readout
from medcil.readouts.ridge import Ridge
from medcil.readouts.statistics import StatisticsReadout

__all__ = ["READOUTS", "Readout", "ReadoutName", "build_readout", "keeps_statistics"]

READOUTS: dict[str, type[Readout]] = {
    readout.kind: readout
    for readout in (
        ClassifierReadout,
        NearestMean,
        ClassGaussians,
        Ridge,
        CosinePrototypes,
        LinearDiscriminants,
        MahalanobisDistances,
    )
}


def build_readout(spec: dict[str, Any]) -> Readout:
    """Build a readout from what `Readout.spec` returned, with buffers of zeros."""
    sizes = {key: value for key, value in spec.items() if key != "kind"}
    return READOUTS[spec["kind"]](**sizes)


def keeps_statistics(name: str) -> bool:
    """Tell whether a readout remembers classes by statistics of all their images, and needs no exemplar."""
    return issubclass(READOUTS[name], StatisticsReadout)


def _check_name(name: str) -> str:
    selectable = [kind for kind, readout in READOUTS.items() if not readout.needs_method]
    if name not in selectable:
        raise ValueError(f"no readout {name!r}. {nearest(name, selectable)}")
    return name


ReadoutName = Annotated[str, AfterValidator(_check_name)]
"""The hyper-parameter `readout` of a method: a readout that no method needs to be made for."""
