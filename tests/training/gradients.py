"""Learns a second task with every method and every loss term, in float64, without and with batch norm.

    python gradients.py FILE                                                        one process
    python -m torch.distributed.run --nproc-per-node 2 gradients.py FILE            two that share each batch

The file holds how far each parameter was moved.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from medcil.config import LearningConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.experiments.processes import join_torchrun
from medcil.methods import METHODS, terms
from medcil.methods.balanced import Balanced
from medcil.methods.icarl import ICaRL
from medcil.methods.protocol import Increment, LossTerm, Method, Phase, WithTerms
from medcil.models.network import Network, NetworkSpec
from medcil.training.distributed import Ranks
from medcil.training.feed import Feed
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

SIDE, CROP = 14, 12
TRAINING = {
    "epochs": 2,  # LO2LN trains other terms in the second
    "batch_size": 9,  # not to be shared equally by two
    "momentum": 0,
    "weight_decay": 0,
    "gradient_clamp": None,
    "learning_rates": {"classifier": 0.01, "backbone": 0.01},
}


def config(**training: object) -> LearningConfig:
    sections = {
        "memory": {"per_class": 3},
        "training": TRAINING | training,
        "execution": {"device": "cpu", "threads": 1},
    }
    return LearningConfig.model_validate(sections)


def task_of(counts: list[int], n_old: int) -> Task:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) + n_old
    shape = (len(labels), 3, SIDE, SIDE)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(n_old))
    samples = Samples(TensorImages(pixels), labels)
    names = tuple(str(n_old + i) for i in range(len(counts)))
    return Task(class_names=names, n_old=n_old, train=samples, test=samples)


def fresh_state(crop: int = CROP, *, batch_norm: bool = False) -> State:
    spec = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True)
    state = initial_state(spec, Preprocessing(side=SIDE, crop=crop), seed=0)
    for module in [] if batch_norm else list(state.network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    state.network.double()
    return state


def every_term() -> dict[str, LossTerm]:
    found: dict[str, LossTerm] = {
        name: make() for kinds in terms.PLUGINS.values() for name, make in kinds.items()
    }
    margins = terms.PLUGINS["margin"]
    found |= {f"{name}, mean": margins[name](reduction="mean") for name in ("vanilla", "distribution")}
    found |= {f"distillation {kind}": terms.distillation(kind=kind) for kind in ("l1", "l2", "mse", "kl")}
    return found | {
        "nca": terms.nca(margin=0.2),
        "separated softmax": terms.separated_softmax(),
        "one versus rest": terms.one_vs_rest(),
        "sigmoid distillation": terms.sigmoid_distillation(),
        "taskwise distillation": terms.taskwise_distillation(),
        "embedding distillation": terms.embedding_distillation(weight=2.0),
        "pod spatial": terms.pod_spatial(weight=2.0),
    }


def methods() -> dict[str, Method]:
    named: dict[str, Method] = {f"method {name}": method() for name, method in METHODS.items()}
    alone = {
        f"term {name}": WithTerms(
            Balanced(margin_weight=0.0),
            {"classification": term} if isinstance(term, terms.Classification) else {"added": term},
            drop=("distillation",),
        )
        for name, term in every_term().items()
    }
    return {**named, **alone, "method icarl, original": ICaRL(readout="nearest_mean")}


@dataclass(frozen=True)
class Shaken:
    """A method whose network differs from the old one from the start.

    Where both agree, the norms of distillation have no gradient, and rounding errors would decide.
    """

    base: Method

    @property
    def readout(self) -> str:
        return self.base.readout

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for number, phase in enumerate(self.base.learn(network, increment)):
            if number == 0 and not increment.is_first:
                with torch.no_grad():
                    for parameter in network.backbone.parameters():
                        parameter *= 1.1
            yield phase


def moves(
    method: Method,
    *,
    counts: tuple[int, int] = (9, 4),
    crop: int = CROP,
    batch_norm: bool = False,
    **training: object,
) -> dict[str, Tensor]:
    settings = config(**training)
    start = fresh_state(crop, batch_norm=batch_norm)
    first = learn_task(start, task_of([5, 8], 0), method, settings)
    second = learn_task(first, task_of(list(counts), 2), Shaken(method), settings)
    before, after = (state.network.state_dict() for state in (first, second))
    shared = {k: after[k] - before[k] for k in before if before[k].shape == after[k].shape}
    grown = {f"new {k}": after[k] for k in after if k not in shared}
    return {**shared, **grown, "class means": second.readout.class_means}


def main(file: Path) -> None:
    join_torchrun(config().execution)
    normalize = Feed._to_network
    Feed._to_network = lambda feed, crops: normalize(feed, crops).double()  # type: ignore[method-assign]
    cases = {name: moves(method) for name, method in methods().items()}
    cases["batches too small to share, a class of one image"] = moves(Balanced(), counts=(9, 1), batch_size=3)
    for name, method in METHODS.items():
        cases[f"{name} with batch norm"] = moves(method(), batch_norm=True)
    cases["old answers looked up"] = moves(Balanced(), crop=SIDE, epochs=4)
    found = {f"{name}: {k}": tensor for name, moved in cases.items() for k, tensor in moved.items()}
    if Ranks().is_first:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
