"""Is this copy of a dataset complete? Its counts against those its owners or the benchmark published."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from medcil.check.report import ClassCounts, Finding, finding

PublishedCounts = Mapping[str, Sequence[int]]
"""`train` and `test`, or `total`: images of each class."""


@dataclass(frozen=True)
class Published:
    """What a whole copy has; empty where nobody says."""

    counts: PublishedCounts = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """`train` and `test`: images of all classes together."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """So many more of `train` and `test` are no surplus: the published count left them out."""

    def __bool__(self) -> bool:
        return bool(self.counts or self.sizes)


def published_findings(classes: Sequence[ClassCounts], published: Published) -> Iterator[Finding]:
    missing, surplus = [], []
    n_missing, n_surplus = 0, Counter[str]()
    for name, part, here, there in (
        *_compared(classes, published.counts),
        *_totals(classes, published.sizes),
    ):
        line = f"{name}{part and f' ({part})'}: {here:,} of {there:,}"
        if here < there:
            missing.append(line)
            n_missing += there - here
        elif here > there:
            surplus.append(line)
            n_surplus[part] += here - there
    advice = f"{n_missing:,} images fewer than published: complete the copy, or results cannot be compared."
    yield from finding("error", "incomplete", missing, advice, {"images": n_missing})
    spare = {**published.left_out, "": sum(published.left_out.values())}
    if any(n > spare.get(part, 0) for part, n in n_surplus.items()):
        advice = f"{n_surplus.total():,} images more than published: find out where they come from."
        yield from finding("warning", "surplus", surplus, advice, {"images": n_surplus.total()})


def _compared(
    classes: Sequence[ClassCounts], published: PublishedCounts
) -> Iterator[tuple[str, str, int, int]]:
    """(class, part, images here, images published), by parts where both sides have them."""
    for label, counts in enumerate(classes if published else ()):
        if counts.train is not None and counts.test is not None and {"train", "test"} <= set(published):
            yield counts.name, "train", counts.train, published["train"][label]
            yield counts.name, "test", counts.test, published["test"][label]
        else:
            total = sum(part[label] for part in published.values())
            yield counts.name, "", counts.images, total


def _totals(classes: Sequence[ClassCounts], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, int, int]]:
    here = {"train": sum(c.train or 0 for c in classes), "test": sum(c.test or 0 for c in classes)}
    for part, there in sizes.items():
        yield "all classes", part, here[part], there
