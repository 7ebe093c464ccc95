"""What a check of the data says: counts and findings, as values and as JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

MAX_EXAMPLES = 100  # of one finding; the count is always the whole


@dataclass(frozen=True)
class Finding:
    severity: Severity
    code: str
    """Stable, for programs; docs/how-to/check-images.md explains each."""
    count: int
    advice: str
    """What was found and what to do about it."""
    examples: tuple[str, ...] = ()
    """File names and class names, nothing else that could point to a patient."""
    details: dict[str, int] = field(default_factory=dict)
    """Further counts by name."""


def finding(
    severity: Severity,
    code: str,
    found: Sequence[str],
    advice: str,
    details: Mapping[str, int] | None = None,
) -> Iterator[Finding]:
    """One finding, or none where nothing was found."""
    if found:
        yield Finding(severity, code, len(found), advice, tuple(found[:MAX_EXAMPLES]), dict(details or {}))


@dataclass(frozen=True)
class ClassCounts:
    name: str
    images: int
    train: int | None
    test: int | None
    groups: int | None


@dataclass(frozen=True)
class Report:
    dataset: str
    """The name of the layout; `own` for one's own images."""
    n_images: int
    n_groups: int | None
    classes: tuple[ClassCounts, ...]
    formats: dict[str, int]
    modes: dict[str, int]
    sizes: dict[str, int]
    """Most frequent first, as `width x height`; at most ten."""
    agrees_with_published: bool | None
    """None where nothing is published, or nothing was compared."""
    searched_duplicates: bool
    findings: tuple[Finding, ...]
    """Errors first."""

    @property
    def n_train(self) -> int | None:
        return _total([c.train for c in self.classes])

    @property
    def n_test(self) -> int | None:
        return _total([c.test for c in self.classes])

    @property
    def imbalance(self) -> float | None:
        """Largest class over smallest, in training where there is a split; None if one is empty."""
        counts = [c.images if c.train is None else c.train for c in self.classes]
        return max(counts) / min(counts) if min(counts, default=0) else None

    @property
    def worst(self) -> Severity | None:
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in SEVERITIES if severity in found), None)

    def counts_by_severity(self) -> dict[Severity, int]:
        found = Counter(finding.severity for finding in self.findings)
        return {severity: found[severity] for severity in SEVERITIES}

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        summary = {"n_train": self.n_train, "n_test": self.n_test, "imbalance": self.imbalance}
        return {"schema": 1, "worst": self.worst, **summary, **asdict(self)}


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
