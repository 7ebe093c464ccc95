"""The methods under test, four classes of colored noise, and one training of each method."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from medcil.config import LearningConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task, class_incremental
from medcil.data.transforms import Preprocessing
from medcil.methods import METHODS, terms
from medcil.methods.acil import ACIL
from medcil.methods.analytic import Analytic
from medcil.methods.der import DER
from medcil.methods.icarl import ICaRL
from medcil.methods.lws import LWS
from medcil.methods.protocol import Increment, Method, Phase, WithTerms
from medcil.methods.ranpac import RanPAC
from medcil.methods.simplecil import SimpleCIL
from medcil.methods.slda import SLDA
from medcil.methods.ucir import UCIR
from medcil.models.network import Network, NetworkSpec
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

SPEC = NetworkSpec(backbone="resnet8_cifar", last_relu=False, learn_scale=True)
PREPROCESSING = Preprocessing(side=18, crop=16)
COLORS = torch.tensor([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40], [200, 40, 200]])

COUNTS = (6, 4, 5, 3)
"""Images of each class, by the dataset's numbers."""
ORDER = (2, 0, 3, 1)
"""A label in the stream differs from the dataset's number of the class."""
QUOTA = 3

PLUGGED_IN = {
    "classification": terms.cil_balanced(alpha=0.5),
    "margin": terms.distribution_margin(weight=0.1),
}
PLAIN: dict[str, Method] = {
    **{name: method() for name, method in METHODS.items()},
    # Thousands of random features would take most of the time.
    "ranpac": RanPAC(random_features=100),
    "acil": ACIL(random_features=100),
    # Paths that no default takes.
    "ucir with fine-tuning": UCIR(finetune_share=0.5),
    "der with warm-up": DER(warm_up_share=0.5, reset_classifier=True),
    "lws around icarl": LWS(base=ICaRL()),
    "analytic on turned mixtures": Analytic(turned_labels="beside", mixup=0.4),
    "simplecil with adaptation": SimpleCIL(adapt="always", pretrained=True),
    "slda with adaptation": SLDA(adapt="always", stages=2, scaled=True),
    "ranpac with adaptation": RanPAC(adapt="always", random_features=100),
    "acil with balance": ACIL(random_features=100, balance=1.0, pooled=False),
    "analytic after a trial": Analytic(adapt="auto"),
}
FROZEN = {"analytic", "simplecil", "slda", "fecam", "ranpac", "acil"}
"""Methods whose network learns the first task at most: later classes change the readout."""
UNTRAINED = {"simplecil", "slda", "ranpac"}
"""Methods whose network stays as it came, unless they adapt it."""


def learns_once(name: str) -> bool:
    """Whether the network of a subject, in any variant, learns the first task at most."""
    return name.split()[0] in FROZEN


def learns_never(name: str) -> bool:
    return name.split()[0] in UNTRAINED and "with adaptation" not in name


SUBJECTS: dict[str, Method] = {
    **PLAIN,
    **{f"{name} with terms": WithTerms(PLAIN[name], PLUGGED_IN) for name in METHODS},
}


@dataclass(frozen=True, eq=False)
class RecordedImages:
    """An image source that records which images were read."""

    source: TensorImages
    reads: list[int]

    @property
    def side(self) -> int:
        return self.source.side

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        self.reads.extend(indices.tolist())
        return self.source.read(indices)


@dataclass(frozen=True)
class RecordedMethod:
    """A method that records its phases, each with its increment."""

    base: Method
    phases: list[tuple[Increment, Phase]]

    @property
    def readout(self) -> str:
        return self.base.readout

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for phase in self.base.learn(network, increment):
            self.phases.append((increment, phase))
            yield phase


def colored(counts: Sequence[int], *, seed: int = 0) -> Samples:
    """Make noisy images of one color for each class."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    noise = torch.randint(-35, 36, (len(labels), 3, 18, 18), generator=torch.Generator().manual_seed(seed))
    return Samples(TensorImages((COLORS[labels, :, None, None] + noise).to(torch.uint8)), labels)


def unseen_images(n_classes: int) -> Samples:
    return colored([3] * n_classes, seed=1)


def class_names(counts: Sequence[int]) -> list[str]:
    return [f"color {c}" for c in range(len(counts))]


def stream(
    counts: Sequence[int] = COUNTS, order: Sequence[int] = ORDER, sizes: Sequence[int] = (2, 2)
) -> Iterator[Task]:
    return class_incremental(colored(counts), unseen_images(len(counts)), class_names(counts), order, sizes)


def second_task() -> Task:
    """Return task two of a new stream, so that its images can still be read."""
    tasks = stream()
    next(tasks)
    return next(tasks)


def config(**sections: object) -> LearningConfig:
    defaults = {
        "memory": {"per_class": QUOTA},
        "training": {"epochs": 2, "batch_size": 8},
        "execution": {"device": "cpu", "threads": 1},
    }
    return LearningConfig.model_validate({**defaults, **sections})


def new_state() -> State:
    return initial_state(SPEC, PREPROCESSING, seed=0)


def learn(method: Method, tasks: Iterator[Task], learning: LearningConfig | None = None) -> State:
    """Learn all tasks and return the last state."""
    state = new_state()
    for task in tasks:
        state = learn_task(state, task, method, learning or config())
    return state


def scores_of(state: State, samples: Samples) -> torch.Tensor:
    return predict_scores(state, samples, config().execution)


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Copy all tensors of a state, including the exemplars' pixels."""
    network = {f"network.{name}": tensor for name, tensor in state.network.state_dict().items()}
    tensors = {
        **network,
        "pixels": state.memory.read_all(),
        "labels": state.memory.labels,
        "means": state.readout.class_means,
        "counts": state.inherent_counts,
        "prior": state.readout.log_prior,
    }
    tensors |= {f"readout.{name}": tensor for name, tensor in state.readout.state_dict().items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the tensors that are not equal to the last bit."""
    return (a.keys() ^ b.keys()) | {name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])}


@dataclass(frozen=True, eq=False)
class Story:
    """Two tasks, learned once for every test that only looks at the outcome."""

    method: Method
    tasks: list[Task]
    first: State
    second: State
    first_tensors: dict[str, torch.Tensor]
    """Copied before the second task was learned."""
    first_requires_grad: list[bool]
    phases: list[tuple[Increment, Phase]]
    reads: list[list[int]]
    """The training images read during each task, by the dataset's numbers."""
    n_test_reads: int

    def turns(self) -> list[tuple[Increment, Phase]]:
        """Return the phases and the phases that alternate with them."""
        alternates = [(i, phase.alternate) for i, phase in self.phases if phase.alternate is not None]
        return self.phases + alternates


@cache
def story_of(name: str) -> Story:
    """Learn two tasks with streamed images."""
    method = RecordedMethod(SUBJECTS[name], [])
    train_reads: list[int] = []
    test_reads: list[int] = []
    train, test = colored(COUNTS), unseen_images(len(COUNTS))
    recorded = (
        Samples(RecordedImages(samples.images, reads), samples.labels)
        for samples, reads in ((train, train_reads), (test, test_reads))
    )
    states, tensors, requires_grad, tasks, reads = [new_state()], [], [], [], []
    for task in class_incremental(*recorded, class_names(COUNTS), ORDER, (2, 2)):
        train_reads.clear()
        states.append(learn_task(states[-1], task, method, config(execution={"resident": "no"})))
        tensors.append(tensors_of(states[-1]))
        requires_grad.append([parameter.requires_grad for parameter in states[-1].network.parameters()])
        tasks.append(task)
        reads.append(train_reads.copy())
    return Story(
        method=SUBJECTS[name],
        tasks=tasks,
        first=states[1],
        second=states[2],
        first_tensors=tensors[0],
        first_requires_grad=requires_grad[0],
        phases=method.phases,
        reads=reads,
        n_test_reads=len(test_reads),
    )
