"""Check images before training: what would make an experiment unsound."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medcil.check import findings as find
from medcil.check.findings import SEVERITIES, ClassCounts, Finding, Published, PublishedCounts, Severity
from medcil.check.scan import Look, Watch, scan, unwatched
from medcil.data.cache import is_cache, skipped_images
from medcil.data.image_table import OWN, ImageTable
from medcil.data.sources.folder import Ignored, ignored_files
from medcil.errors import InvalidInput

__all__ = ["ClassCounts", "Finding", "Published", "PublishedCounts", "Report", "check", "report_on"]


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


def check(
    table: ImageTable,
    *,
    published: Published | PublishedCounts | None = None,
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
    looks = scan(table, watch=watch).looks
    return report_on(table, looks, published=published, duplicates=duplicates, folder=folder)


def report_on(
    table: ImageTable,
    looks: Sequence[Look],
    *,
    published: Published | PublishedCounts | None = None,
    duplicates: bool = True,
    folder: Path | None = None,
) -> Report:
    """Report on images that were scanned."""
    whole = published if isinstance(published, Published) else Published(published or {})
    is_own = table.dataset == OWN and table.pixels is None
    ignored = ignored_files(table) if is_own else Ignored({}, [])
    classes = find.class_counts(table)
    against_published = list(find.published_findings(classes, whole))
    skipped = skipped_images(folder) if folder is not None and is_cache(folder) else []
    advice = "Images that were left out when they were prepared: fix them and prepare them again."
    found = [
        *find.file_findings(table.names, looks, may_be_tiny=bool(whole)),
        *find.ignored_findings(ignored.files),
        *find.class_findings(classes, ignored.folders),
        *find.group_findings(table),
        *(find.duplicate_findings(table, looks) if duplicates else ()),
        *against_published,
        *find.finding("warning", "skipped", skipped, advice),
    ]
    sound = [look.facts for look in looks if not look.problems]
    return Report(
        dataset=table.dataset,
        n_images=len(table),
        n_groups=None if table.groups is None else len(set(table.groups)),
        classes=classes,
        formats=dict(Counter(facts.format for facts in sound).most_common()),
        modes=dict(Counter(facts.mode for facts in sound).most_common()),
        sizes=dict(Counter(map(find.size_of, sound)).most_common(10)),
        agrees_with_published=not against_published if whole else None,
        searched_duplicates=duplicates,
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )
