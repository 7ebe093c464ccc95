"""What tests of methods share: a tiny network, an increment, a batch of given numbers, a diary of training.

The arithmetic is plain Python on lists, so that it has nothing in common with the code that it checks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from medcil.config import TrainingConfig
from medcil.data.samples import Samples
from medcil.data.stream import Task
from medcil.methods.protocol import Batch, Counts, Increment, Method, Phase
from medcil.models.network import Network, NetworkSpec, Outputs
from medcil.readouts import READOUTS
from medcil.training.checkpoint import Checkpoint, Journal
from medcil.training.feed import Feed
from medcil.training.loop import learn_task
from medcil.training.state import State

from ..small import new_state, short_training, task_of

SPEC = NetworkSpec(backbone="resnet8_cifar", last_relu=False, learn_scale=True)
DIM = 64
TRAINING = TrainingConfig(epochs=100)

Rows = list[list[float]]
Content = dict[str, torch.Tensor]


def tiny_network(*block_sizes: int, n_proxies: int = 1, spec: NetworkSpec = SPEC) -> Network:
    """It knows so many classes of each task, by random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = spec.build()
        for size in block_sizes:
            network.grow(torch.randn(size, n_proxies, DIM))
    return network


def increment_of(
    network: Network,
    n_old: int,
    n_new: int,
    *,
    embeddings: Callable[[int], torch.Tensor] | None = None,
    training: TrainingConfig = TRAINING,
    seed: int = 0,
    readout: str = "classifier",
) -> Increment:
    def at_random(label: int) -> torch.Tensor:
        return torch.randn(6, network.classifier.dim, generator=torch.Generator().manual_seed(label))

    random = np.random.default_rng(seed)
    return Increment(
        n_old=n_old,
        n_new=n_new,
        training=training,
        embeddings=embeddings or at_random,
        random=random,
        readout=READOUTS[readout](),
    )


def phases_of(
    method: Method, n_old: int, n_new: int, *, network: Network | None = None, **options: Any
) -> dict[str, Phase]:
    """By name, in order; nothing is trained."""
    network = network or tiny_network(*([n_old] if n_old else []))
    increment = increment_of(network, n_old, n_new, readout=method.readout, **options)
    return {phase.name: phase for phase in method.learn(network, increment)}


def names_of(parameters: Sequence[torch.nn.Parameter], network: Network) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in network.named_parameters() if id(parameter) in wanted}


def batch_of(
    labels: Sequence[int],
    task_sizes: Sequence[int],
    *,
    dim: int = 5,
    branch_dim: int | None = None,
    seed: int = 0,
    n_auxiliary: int | None = None,
    scale: float = 3.0,
    at_hand: Sequence[int] | None = None,
    drawn: Sequence[int] | None = None,
    inherent: Sequence[int] | None = None,
) -> Batch:
    """Random outputs of the network and of the one before this task."""
    n, classes = len(labels), sum(task_sizes)
    n_old = sum(task_sizes[:-1])
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def outputs(n_classes: int, n_auxiliary: int | None) -> Outputs:
        embedding = draw(n, dim)
        cosine = draw(n, n_classes).tanh()
        return Outputs(
            maps=(draw(n, 2, 3, 4), draw(n, 3, 2, 2)),
            embedding=embedding,
            newest=embedding[:, -(branch_dim or dim) :],
            cosine=cosine,
            logits=scale * cosine,
            auxiliary_logits=None if n_auxiliary is None else draw(n, n_auxiliary),
        )

    ones = [1] * classes
    out, old = outputs(classes, n_auxiliary), outputs(n_old, None)
    weights, noise = draw(classes, dim), draw(classes, dim)
    return Batch(
        labels=torch.tensor(labels),
        out=out,
        counts=Counts(*(torch.tensor(counts or ones) for counts in (drawn, at_hand, inherent))),
        task_sizes=tuple(task_sizes),
        class_weights=weights,
        scale=torch.tensor(scale),
        run_old_network=(lambda: old) if n_old else None,
        normal=lambda shape: noise,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def log_softmax(row: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(z) for z in row))
    return [z - total for z in row]


def cross_entropy(rows: Rows, labels: Sequence[int]) -> float:
    return mean([-log_softmax(row)[label] for row, label in zip(rows, labels, strict=True)])


def binary_cross_entropy(logit: float, target: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -(target * math.log(p) + (1 - target) * math.log(1 - p))


def divergence(rows: Rows, old_rows: Rows, temperature: float) -> float:
    """KL(softmax(old / T) || softmax(new / T)), mean over the rows, without T²."""
    found = []
    for row, old in zip(rows, old_rows, strict=True):
        log_p, log_q = (log_softmax([z / temperature for z in r]) for r in (row, old))
        found.append(sum(math.exp(b) * (b - a) for a, b in zip(log_p, log_q, strict=True)))
    return mean(found)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths


def ranking(rows: Rows, labels: Sequence[int], *, n_old: int, n_rivals: int, margin: float) -> float:
    """Of unscaled cosines: old samples against the new classes that are nearest to them."""
    excesses: list[float] = []
    for row, label in zip(rows, labels, strict=True):
        if label < n_old:
            hardest = sorted(row[n_old:], reverse=True)[:n_rivals]
            excesses += [max(0.0, margin - row[label] + rival) for rival in hardest]
    return mean(excesses)


@dataclass(frozen=True)
class Chapter:
    phase: Phase
    before: Content
    epochs: list[Content] = field(default_factory=list)
    """The network after each."""

    @property
    def after(self) -> Content:
        return self.epochs[-1]

    @property
    def moved(self) -> set[str]:
        return moved(self.before, self.after)


class Diary(Journal):
    """A method, and a journal of how its phases find the network and leave it."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.chapters: list[Chapter] = []
        self.page = "between phases"

    @property
    def readout(self) -> str:
        return self.method.readout

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for phase in self.method.learn(network, increment):
            self.chapters.append(Chapter(phase, content_of(network)))
            self.page = phase.name
            yield phase
            self.page = "between phases"

    def save(self, phase: int, checkpoint: Checkpoint) -> None:
        tensors = {
            name.removeprefix("network."): tensor.clone()
            for name, tensor in checkpoint.tensors.items()
            if name.startswith("network.")
        }
        self.chapters[phase].epochs.append(tensors)


def content_of(network: Network) -> Content:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def moved(before: Content, after: Content) -> set[str]:
    """Bit for bit."""
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def under(prefix: str, content: Content) -> set[str]:
    return {name for name in content if name.startswith(prefix)}


def learned(
    method: Method, *tasks: Task, state: State | None = None, **sections: object
) -> tuple[State, dict[str, Chapter]]:
    """The tasks, one after the other; the state at the end and the chapters of the last one."""
    state = state or new_state(spec=SPEC)
    chapters: dict[str, Chapter] = {}
    for task in tasks:
        diary = Diary(method)
        state = learn_task(state, task, diary, short_training(**sections), journal=diary)
        chapters = {chapter.phase.name: chapter for chapter in diary.chapters}
    return state, chapters


def learned_watching_images(
    method: Method, state: State, task: Task, **sections: object
) -> tuple[State, Diary, dict[str, list[bytes]]]:
    """What `learn_task` makes of it, and the images drawn in each phase, in the order of their batches."""
    diary, seen = Diary(method), {}

    def recording(feed, plan, begin=Feed.begin):
        drawn = seen.setdefault(diary.page, [])
        drawn.extend(image.numpy().tobytes() for image in feed.samples.images.read(plan.order))
        begin(feed, plan)

    with mock.patch.object(Feed, "begin", recording):
        after = learn_task(state, task, diary, short_training(**sections), journal=diary)
    return after, diary, seen


def labels_by_image(*parts: Samples) -> dict[bytes, int]:
    return {
        image.numpy().tobytes(): label
        for samples in parts
        for image, label in zip(samples.read_all(), samples.labels.tolist(), strict=True)
    }


def labels_drawn_from_exemplars(
    method: Method, phase: str, *, memory: dict[str, int], sampler: str
) -> list[int]:
    """In the one epoch that this phase of a second task has; no image twice."""
    sections = {"memory": memory, "training": {"epochs": 1, "batch_size": 8, "sampler": sampler}}
    first, _ = learned(method, task_of([9, 8]), **sections)
    task = task_of([12, 7], n_old=2, seed=1)
    _, _, seen = learned_watching_images(method, first, task, **sections)
    drawn = seen[phase]
    assert len(set(drawn)) == len(drawn), "an image was drawn twice"
    label_of = labels_by_image(task.train, first.memory)
    return sorted(label_of[image] for image in drawn)
