"""A dataset arrives as a sequence of tasks, each with new classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    arrival = _arrival(order)
    n_old = 0
    for size in sizes:
        yield from _lent(
            Task(
                class_names=tuple(names[c] for c in order[n_old : n_old + size]),
                n_old=n_old,
                train=_of_classes(train, arrival, n_old, size),
                test=_of_classes(test, arrival, n_old, size),
            )
        )
        n_old += size


def cumulative(
    train: Samples, test: Samples, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]
) -> Iterator[Task]:
    """The upper bound: each task has all images of all classes so far, as if none of them were old."""
    _check_classes(train, names, order, sizes)
    arrival = _arrival(order)
    n_seen, seen_test = 0, test.select(torch.empty(0, dtype=torch.int64))
    for size in sizes:
        # Task by task, so that a row of predictions is the same image as in an incremental run.
        seen_test += _of_classes(test, arrival, n_seen, size)
        n_seen += size
        yield from _lent(
            Task(
                class_names=tuple(names[c] for c in order[:n_seen]),
                n_old=0,
                train=_of_classes(train, arrival, 0, n_seen),
                test=seen_test,
            )
        )


def _lent(task: Task) -> Iterator[Task]:
    """The task, its training images readable until the next one is asked for."""
    lease = Lease(task.train.images)
    yield replace(task, train=Samples(lease, task.train.labels))
    lease.end()


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


def _arrival(order: Sequence[int]) -> torch.Tensor:
    """When each class arrives."""
    arrival = torch.empty(len(order), dtype=torch.int64)
    arrival[torch.tensor(order)] = torch.arange(len(order))
    return arrival


def _of_classes(samples: Samples, arrival: torch.Tensor, n_old: int, size: int) -> Samples:
    labels = arrival[samples.labels]
    chosen = torch.nonzero((labels >= n_old) & (labels < n_old + size)).flatten()
    return Samples(samples.select(chosen).images, labels[chosen])
