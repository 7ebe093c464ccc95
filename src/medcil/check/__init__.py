"""The data's doctor: what stands in the way of a sound experiment, said before any training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from medcil.check.class_findings import class_counts, class_findings, group_findings
from medcil.check.duplicate_findings import duplicate_findings
from medcil.check.file_findings import file_findings, ignored_findings, size_of
from medcil.check.published_counts import Published, PublishedCounts, published_findings
from medcil.check.report import SEVERITIES, ClassCounts, Finding, Report, finding
from medcil.check.scan import Look, Watch, look_at_all, look_at_store, unwatched
from medcil.data.cache import Store
from medcil.data.catalog import Catalog
from medcil.data.datasets import OWN
from medcil.data.sources.archive import MemoryFiles
from medcil.data.sources.ignored_files import Overlooked, overlooked
from medcil.errors import InvalidInput

NOTHING = Overlooked({}, [])

__all__ = ["ClassCounts", "Finding", "Published", "PublishedCounts", "Report", "check", "check_store"]


def check(
    catalog: Catalog,
    *,
    name: str = OWN,
    published: Published | PublishedCounts | None = None,
    duplicates: bool = True,
    watch: Watch = unwatched,
) -> Report:
    """Reads every image once, decodes all of its pixels, and changes nothing."""
    if not len(catalog):
        raise InvalidInput("There are no images to check: give a folder or an archive that holds some.")
    looks = look_at_all(catalog, watch)
    whole = published if isinstance(published, Published) else Published(published or {})
    unread = overlooked(catalog) if name == OWN else NOTHING
    return _report(catalog, looks, name=name, published=whole, unread=unread, duplicates=duplicates)


def check_store(store: Store, *, duplicates: bool = True, watch: Watch = unwatched) -> Report:
    """Of a store that is opened already, its hashes verified or not."""
    columns = (store.names, store.labels, store.class_names, store.groups, store.is_test)
    report = _report(
        Catalog(MemoryFiles({}), *columns),
        look_at_store(store, watch),
        name="store",
        published=Published(),
        unread=NOTHING,
        duplicates=duplicates,
    )
    skipped = [f"{image.name}: {image.problem}" for image in store.skipped]
    advice = "Images that were left out when the store was prepared: mend them and prepare it again."
    found = [*report.findings, *finding("warning", "skipped", skipped, advice)]
    return replace(report, findings=_sorted(found))


def _report(
    catalog: Catalog,
    looks: Sequence[Look],
    *,
    name: str,
    published: Published,
    unread: Overlooked,
    duplicates: bool,
) -> Report:
    classes = class_counts(catalog)
    against_published = list(published_findings(classes, published))
    found = [
        *file_findings(catalog.names, looks, may_be_tiny=bool(published)),
        *ignored_findings(unread.files),
        *class_findings(classes, unread.folders),
        *group_findings(catalog),
    ]
    found += duplicate_findings(catalog, looks) if duplicates else ()
    sound = [look.facts for look in looks if not look.problems]
    return Report(
        dataset=name,
        n_images=len(catalog),
        n_groups=None if catalog.groups is None else len(set(catalog.groups)),
        classes=classes,
        formats=dict(Counter(facts.format for facts in sound).most_common()),
        modes=dict(Counter(facts.mode for facts in sound).most_common()),
        sizes=dict(Counter(map(size_of, sound)).most_common(10)),
        agrees_with_published=not against_published if published else None,
        searched_duplicates=duplicates,
        findings=_sorted([*found, *against_published]),
    )


def _sorted(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: SEVERITIES.index(found.severity)))
