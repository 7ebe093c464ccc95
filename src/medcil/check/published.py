"""Is this copy of a dataset complete? Its counts against those its owners or the benchmark published."""

from collections.abc import Iterator, Mapping, Sequence

from medcil.check.report import ClassCounts, Finding, finding

PublishedCounts = Mapping[str, Sequence[int]]
"""`train` and `test`, or `total`: images of each class."""


def published_findings(classes: Sequence[ClassCounts], published: PublishedCounts) -> Iterator[Finding]:
    missing, surplus = [], []
    n_missing = n_surplus = 0
    for name, part, here, there in _compared(classes, published):
        line = f"{name}{part}: {here:,} of {there:,}"
        if here < there:
            missing.append(line)
            n_missing += there - here
        elif here > there:
            surplus.append(line)
            n_surplus += here - there
    advice = f"{n_missing:,} images fewer than published: complete the copy, or results cannot be compared."
    yield from finding("error", "incomplete", missing, advice, {"images": n_missing})
    advice = f"{n_surplus:,} images more than published: find out where they come from."
    yield from finding("warning", "surplus", surplus, advice, {"images": n_surplus})


def _compared(
    classes: Sequence[ClassCounts], published: PublishedCounts
) -> Iterator[tuple[str, str, int, int]]:
    """(class, part, images here, images published), by parts where both sides have them."""
    for label, counts in enumerate(classes):
        if counts.train is not None and counts.test is not None and {"train", "test"} <= set(published):
            yield counts.name, " (train)", counts.train, published["train"][label]
            yield counts.name, " (test)", counts.test, published["test"][label]
        else:
            total = sum(part[label] for part in published.values())
            yield counts.name, "", counts.images, total
