"""Check images before training: what would make an experiment unsound."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medcil.check import findings as find
from medcil.check.findings import SEVERITY, ClassCounts, Finding, Severity
from medcil.check.scan import Look, Watch, scan, unwatched
from medcil.data.cache import is_cache, skipped_images
from medcil.data.image_table import OWN, Dataset, ImageTable
from medcil.data.sources.folder import Ignored, ignored_files
from medcil.errors import InvalidInput

__all__ = ["ClassCounts", "Finding", "Report", "check", "report_on"]


@dataclass(frozen=True)
class Report:
    dataset: str
    """The layout that was read; `own` for your own images."""
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
        counts = [c.learned for c in self.classes]
        return max(counts) / min(counts) if min(counts, default=0) else None

    @property
    def worst(self) -> Severity | None:
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        summary = {"n_train": self.n_train, "n_test": self.n_test, "imbalance": self.imbalance}
        return {"schema": 1, "worst": self.worst, **summary, **asdict(self)}


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def check(
    table: ImageTable,
    *,
    published: Dataset | None = None,
    duplicates: bool = True,
    folder: Path | None = None,
    watch: Watch = unwatched,
) -> Report:
    """Read every image once, decode all of its pixels, and change nothing.

    `folder` is that of prepared images: what was left out there is reported.
    """
    if not len(table):
        raise InvalidInput(
            "There are no images to check. Give a folder or an archive with images.",
            code="check.images.empty",
        )
    _, looks = scan(table, watch=watch)
    return report_on(table, looks, published=published, duplicates=duplicates, folder=folder)


def report_on(
    table: ImageTable,
    looks: Sequence[Look],
    *,
    published: Dataset | None = None,
    duplicates: bool = True,
    folder: Path | None = None,
    known_classes: Collection[str] = (),
) -> Report:
    """Report on images that were scanned. Of `known_classes` a model has others, so that one is enough."""
    is_own = table.dataset == OWN and table.pixels is None
    ignored = ignored_files(table) if is_own else Ignored({}, [])
    classes = find.class_counts(table)
    findings = [
        *find.file_findings(table.names, looks, may_be_tiny=published is not None),
        find.ignored_finding(ignored.files),
        *find.class_findings([c for c in classes if c.name not in known_classes], ignored.folders),
        *find.group_findings(table),
        *(find.duplicate_findings(table, looks) if duplicates else ()),
        *(() if published is None else find.published_findings(classes, published)),
        find.finding("skipped", skipped_images(folder) if folder is not None and is_cache(folder) else []),
    ]
    order = list(SEVERITY)
    findings = sorted((f for f in findings if f.count), key=lambda f: order.index(f.code))
    codes = {finding.code for finding in findings}
    sound = [look.facts for look in looks if not look.problems]
    return Report(
        dataset=table.dataset,
        n_images=len(table),
        n_groups=None if table.groups is None else len(set(table.groups)),
        classes=classes,
        formats=dict(Counter(facts.format for facts in sound).most_common()),
        modes=dict(Counter(facts.mode for facts in sound).most_common()),
        sizes=dict(Counter(map(find.size_of, sound)).most_common(10)),
        agrees_with_published=not codes & {"incomplete", "surplus"} if published is not None else None,
        searched_duplicates=duplicates,
        findings=tuple(findings),
    )
