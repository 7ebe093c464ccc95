"""A dataset arrives as a sequence of tasks, each with new classes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int

from medcil.data.samples import Lease, Samples
from medcil.errors import InvalidInput, nearest


@dataclass(frozen=True, eq=False)
class Task:
    """New classes and their images, and in an update more images of old ones where the method can add them.

    Labels count classes in the order of their arrival.
    """

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


@dataclass(frozen=True, eq=False)
class Stream:
    """A dataset cut into tasks."""

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    """In the dataset's own order."""
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    is_synthetic: bool
    is_cumulative: bool = False
    split: str | None = None
    """By which rule the test images were chosen, where it is known."""

    def tasks(self) -> Iterator[Task]:
        return class_incremental(
            self.train, self.test, self.class_names, self.order, self.sizes, is_cumulative=self.is_cumulative
        )


def task_sizes(n_classes: int, base: int, increment: int) -> tuple[int, ...]:
    """Return the number of new classes per task: (7, 3, 2) -> (3, 2, 2), the 3-2 protocol."""
    if base > n_classes:
        raise InvalidInput(f"scenario.base is {base}, but there are only {n_classes} classes: lower it.")
    later = n_classes - base
    full, rest = divmod(later, increment)
    return (base, *[increment] * full, *([rest] if rest else []))


def checked_steps(steps: Sequence[int], n_classes: int) -> tuple[int, ...]:
    if sum(steps) != n_classes:
        raise InvalidInput(
            f"scenario.steps {list(steps)} make {sum(steps)} classes, but there are {n_classes}: fix them."
        )
    return tuple(steps)


def class_order(
    order: int | str | Sequence[int | str], class_names: Sequence[str], published: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return a published order by its number, one drawn by `seed-N`, or the classes by number or name."""
    if isinstance(order, int):
        if not 0 <= order < len(published):
            raise InvalidInput(f"scenario.order: the data has orders 0..{len(published) - 1}, not {order}.")
        return published[order]
    if isinstance(order, str):
        seed = re.fullmatch("seed-([0-9]{1,9})", order)
        if seed is None:
            raise InvalidInput(
                f"scenario.order: {order!r} is none; write a number, `seed-1993`, or a list of all classes."
            )
        # NumPy's legacy generator never changes; with 1993 it gives the order that is usual for CIFAR-100.
        return tuple(np.random.RandomState(int(seed[1])).permutation(len(class_names)).tolist())
    numbers = tuple(c if isinstance(c, int) else _class_number(c, class_names) for c in order)
    _check_order(numbers, class_names)
    return numbers


def _class_number(name: str, class_names: Sequence[str]) -> int:
    if name not in class_names:
        raise InvalidInput(f"scenario.order: there is no class {name!r}. {nearest(name, class_names)}")
    return list(class_names).index(name)


def class_incremental(
    train: Samples,
    test: Samples,
    names: Sequence[str],
    order: Sequence[int],
    sizes: Sequence[int],
    *,
    is_cumulative: bool = False,
) -> Iterator[Task]:
    """Yield task after task; asking for the next closes the training images of the last for good.

    Cumulative tasks are the upper bound: each has all images of all classes so far, as if none were old.
    """
    check_classes(train.labels.numpy(), names, order, sizes)
    arrival = torch.empty(len(order), dtype=torch.int64)
    arrival[torch.tensor(order)] = torch.arange(len(order))
    n_seen, tested = 0, test.select(torch.empty(0, dtype=torch.int64))
    for size in sizes:
        new_test = _of_classes(test, arrival, n_seen, n_seen + size)
        # Task by task, so that a row of predictions is the same image with and without old classes.
        tested = tested + new_test if is_cumulative else new_test
        n_old = 0 if is_cumulative else n_seen
        n_seen += size
        new_train = _of_classes(train, arrival, n_old, n_seen)
        lease = Lease(new_train.images)
        class_names = tuple(names[c] for c in order[n_old:n_seen])
        yield Task(class_names, n_old, replace(new_train, images=lease), tested)
        lease.end()


def _check_order(order: Sequence[int], names: Sequence[str]) -> None:
    if sorted(order) != list(range(len(names))):
        raise InvalidInput(
            f"scenario.order {list(order)} must name each of 0..{len(names) - 1} exactly once "
            f"(or, in quotes, each of {', '.join(names[:3])}, ...)."
        )


def check_classes(
    labels: Int[np.ndarray, "n"], names: Sequence[str], order: Sequence[int], sizes: Sequence[int]
) -> None:
    """Check that every class that arrives has training images."""
    _check_order(order, names)
    if len(set(names)) != len(names):
        raise InvalidInput(f"Two classes have the same name among {list(names)}: rename one.")
    counts = np.bincount(labels, minlength=len(names))
    for c in order[: sum(sizes)]:
        if not counts[c]:
            raise InvalidInput(f"The class {names[c]!r} has no training image: add some, or leave it out.")


def _of_classes(samples: Samples, arrival: torch.Tensor, first: int, end: int) -> Samples:
    labels = arrival[samples.labels]
    chosen = torch.nonzero((labels >= first) & (labels < end)).flatten()
    return replace(samples.select(chosen), labels=labels[chosen])
