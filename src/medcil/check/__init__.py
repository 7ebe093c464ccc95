"""The data's doctor: what stands in the way of a sound experiment, said before any training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from medcil.check.classes import class_counts, class_findings, group_findings
from medcil.check.duplicates import duplicate_findings
from medcil.check.files import file_findings, size_of
from medcil.check.look import Look, Watch, look_at_all, look_at_store, unwatched
from medcil.check.published import PublishedCounts, published_findings
from medcil.check.report import SEVERITIES, ClassCounts, Finding, Report, finding
from medcil.data.catalog import Catalog
from medcil.data.files import MemoryFiles
from medcil.data.store import Store
from medcil.errors import InvalidInput

__all__ = ["ClassCounts", "Finding", "PublishedCounts", "Report", "check", "check_store"]


def check(
    catalog: Catalog,
    *,
    name: str = "own",
    published: PublishedCounts | None = None,
    duplicates: bool = True,
    watch: Watch = unwatched,
) -> Report:
    """Reads and decodes every image once, and changes nothing."""
    if not len(catalog):
        raise InvalidInput("There are no images to check: give a folder or an archive that holds some.")
    looks = look_at_all(catalog, watch)
    return _report(catalog, looks, name=name, published=published, duplicates=duplicates)


def check_store(store: Store, *, duplicates: bool = True, watch: Watch = unwatched) -> Report:
    """Of a store that is opened already, its hashes verified or not."""
    columns = (store.names, store.labels, store.class_names, store.groups, store.is_test)
    report = _report(
        Catalog(MemoryFiles({}), *columns),
        look_at_store(store, watch),
        name="store",
        published=None,
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
    published: PublishedCounts | None,
    duplicates: bool,
) -> Report:
    classes = class_counts(catalog)
    against_published = list(published_findings(classes, published)) if published else []
    found = [*file_findings(catalog.names, looks), *class_findings(classes), *group_findings(catalog)]
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
