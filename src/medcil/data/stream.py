"""A dataset arrives as a sequence of tasks, each with new classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from medcil.data.samples import Lease, Samples
from medcil.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Task:
    """New classes and images of these classes only. Labels count classes in the order of their arrival."""

    class_names: tuple[str, ...]
    n_old: int
    train: Samples
    test: Samples

    @property
    def n_new(self) -> int:
        return len(self.class_names)

    @property
    def n_seen(self) -> int:
        return self.n_old + self.n_new


def task_sizes(n_classes: int, base: int, increment: int) -> tuple[int, ...]:
    """(7, 3, 2) -> (3, 2, 2): the 3-2 protocol on seven classes."""
    if base > n_classes:
        raise InvalidInput(f"scenario.base is {base}, but there are only {n_classes} classes: lower it.")
    later = n_classes - base
    full, rest = divmod(later, increment)
    return (base, *[increment] * full, *([rest] if rest else []))


def class_incremental(
    train: Samples, test: Samples, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]
) -> Iterator[Task]:
    """Yields task after task; asking for the next closes the training images of the last for good."""
    _check_classes(train, names, order, sizes)
    arrival = torch.empty(len(names), dtype=torch.int64)
    arrival[torch.tensor(order)] = torch.arange(len(names))
    n_old = 0
    for size in sizes:
        new_train = _of_classes(train, arrival, n_old, size)
        lease = Lease(new_train.images)
        yield Task(
            class_names=tuple(names[c] for c in order[n_old : n_old + size]),
            n_old=n_old,
            train=Samples(lease, new_train.labels),
            test=_of_classes(test, arrival, n_old, size),
        )
        lease.end()
        n_old += size


def _check_classes(train: Samples, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]) -> None:
    if sorted(order) != list(range(len(names))):
        raise InvalidInput(
            f"scenario.order {list(order)} must name each of 0..{len(names) - 1} exactly once."
        )
    if len(set(names)) != len(names):
        raise InvalidInput(f"Two classes have the same name among {list(names)}: rename one.")
    counts = train.class_counts(len(names))
    for c in order[: sum(sizes)]:
        if not counts[c]:
            raise InvalidInput(f"The class {names[c]!r} has no training image: add some, or leave it out.")


def _of_classes(samples: Samples, arrival: torch.Tensor, n_old: int, size: int) -> Samples:
    labels = arrival[samples.labels]
    chosen = torch.nonzero((labels >= n_old) & (labels < n_old + size)).flatten()
    return Samples(samples.select(chosen).images, labels[chosen])
