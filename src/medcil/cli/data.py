"""The commands about images: datasets, check, prepare, phantom."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text
from typer import Argument, Option

from medcil.cli.console import (
    START_OVER,
    DatasetName,
    can_be_interrupted,
    image_progress,
    out_option,
    printable,
    screen,
    show,
    show_remarks,
    show_table,
)

if TYPE_CHECKING:
    from medcil.check import Finding, Report
    from medcil.data.image_table import Dataset, ImageTable

EXIT_CODES = {None: 0, "note": 0, "warning": 10, "error": 11}
"""The exit code of `medcil check` by its worst finding."""
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
SHOWN = 3  # examples of a finding on the screen


def datasets() -> None:
    """List the known datasets, their sizes, and the pages where their owners offer them."""
    from medcil.data.sources import DATASETS, OWN, OWN_DESCRIPTION

    rows = []
    for name, dataset in DATASETS.items():
        n_images = sum(map(sum, dataset.published_counts.values())) + sum(dataset.published_sizes.values())
        counts = (str(len(dataset.class_names)), f"{n_images:,}" if n_images else "")
        rows.append((Text(name, "bold"), *counts, ", ".join(dataset.protocols), dataset.page))
    rows.append((Text(OWN, "bold"), "", "", "", OWN_DESCRIPTION))
    show_table(("dataset", "classes", "images", "protocols", "owner's page"), rows, right=(1, 2))


def check(
    path: Annotated[Path, Argument(help="A folder, archive or manifest of images, or a prepared store.")],
    dataset: DatasetName = None,
    json: Annotated[Path, Option("--json", help="File for the report.")] = Path("check.json"),
    *,
    duplicates: Annotated[bool, Option(help="Search for pictures that appear twice.")] = True,
) -> None:
    """Read every image and report what would make an experiment unsound."""
    from medcil.check import check as check_images
    from medcil.storage.atomic import reading, write_json, writing
    from medcil.storage.overwrite_guard import check_output_file, refuse_within_data

    refuse_within_data(json, path)
    check_output_file(json, b'"worst":')
    with can_be_interrupted(START_OVER), reading(path):
        table = _list_for_check(path, dataset)
        published = _published(table)
        with image_progress("checking") as watch:
            report = check_images(table, published=published, duplicates=duplicates, folder=path, watch=watch)
    show_remarks(table.remarks)
    _show_report(report, json)
    with writing(json):
        write_json(json, report.to_json())
    show(f"\nReport: [bold]{escape(str(json))}[/]")
    raise typer.Exit(EXIT_CODES[report.worst])


def _list_for_check(path: Path, dataset: str | None) -> "ImageTable":
    from medcil.data.cache import is_cache, is_unfinished_cache, open_cache
    from medcil.data.sources import list_images, recognized_name
    from medcil.data.sources.manifest import UnsoundData

    if dataset is None and (is_cache(path) or is_unfinished_cache(path)):
        return open_cache(path)
    try:
        return list_images(path, dataset or recognized_name(path))
    except UnsoundData as error:  # the report says all that the message says, and what else there is
        return error.table


def _published(table: "ImageTable") -> "Dataset | None":
    """Return the dataset with the number of its images; None where it has none or classes are missing."""
    from medcil.data.sources import DATASETS

    known = DATASETS.get(table.dataset)
    if known is None or table.class_names != known.class_names:
        return None
    return known if known.published_counts or known.published_sizes else None


def _show_report(report: "Report", json: Path) -> None:
    from medcil.data.splits import NO_PATIENTS

    facts = [f"{report.n_images:,} images", f"{len(report.classes)} classes"]
    if report.n_groups is not None:
        facts.append(f"{report.n_groups:,} patients or lesions")
    if report.imbalance is not None:
        facts.append(f"imbalance {report.imbalance:.1f} : 1")
    show(f"[bold]{escape(report.dataset)}[/]  {' · '.join(facts)}")
    for title, counts in (("format", report.formats), ("pixels", report.modes), ("size", report.sizes)):
        several = [f"{escape(kind)} {n:,}" for kind, n in counts.items()]
        rest = " …" if len(several) > SHOWN else ""
        show(f"[dim]{title:8}[/]{' · '.join(several[:SHOWN])}{rest}")
    show()
    _show_classes(report)
    if report.agrees_with_published:
        show("[green]As many images as published.[/]")
    if report.n_groups is None and report.agrees_with_published is None:
        show(f"[dim]{escape(NO_PATIENTS)}[/]")
    if not report.searched_duplicates:
        show("[dim]Duplicates were not searched for.[/]")
    if not report.findings:
        show("\n[bold green]Nothing found.[/]")
        return
    found = [
        f"[{STYLES[s]}]{n} {s}{'' if n == 1 else 's'}[/]"
        for s, n in Counter(finding.severity for finding in report.findings).items()
    ]
    show(f"\nFound {', '.join(found)}:")
    for finding in report.findings:
        _show_finding(finding, json)


def _show_classes(report: "Report") -> None:
    titles = ["class", "images"]
    titles += ["train", "test"] if report.n_test is not None else []
    titles += ["groups"] if report.n_groups is not None else []
    most = max(c.images for c in report.classes)
    rows: list[tuple[str | Text, ...]] = []
    for c in report.classes:
        counts = [f"{n:,}" for n in (c.images, c.train, c.test, c.groups) if n is not None]
        bar = "█" * round(24 * c.images / most) or "▏"
        share = f"{100 * c.images / report.n_images:.1f} %"
        rows.append((c.name, *counts, Text.assemble((bar, "blue"), " ", (share, "dim"))))
    show_table([*titles, "share"], rows, right=range(1, len(titles)))


def _show_finding(finding: "Finding", json: Path) -> None:
    style = STYLES[finding.severity]
    show(f"\n[{style}]{finding.severity:9}[/][bold]{finding.code}[/] · {finding.count:,}")
    lines = [escape(finding.advice)]
    lines += [f"[dim]{printable(example)}[/]" for example in finding.examples[:SHOWN]]
    if finding.count > SHOWN:
        where = f" in {escape(json.name)}" if len(finding.examples) == finding.count else ""
        lines.append(f"[dim]and {finding.count - SHOWN:,} more{where}[/]")
    for line in lines:
        screen.print(Padding.indent(line, 9))


def prepare(
    path: Annotated[Path, Argument(help="A folder, archive or manifest of images.")],
    out: Annotated[Path, out_option("Folder for the prepared images. An unfinished one is continued.")],
    side: Annotated[int, Option(min=1, help="Pixels on a side of the prepared images.")] = 256,
    dataset: DatasetName = None,
    *,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out images that cannot be read.")] = False,
) -> None:
    """Decode and resize all images once, into files that training reads at the disk's speed."""
    from medcil.data.cache import prepare as prepare_images
    from medcil.data.cache import skipped_images
    from medcil.data.sources import list_images, recognized_name
    from medcil.storage.atomic import reading
    from medcil.storage.overwrite_guard import refuse_within_data

    refuse_within_data(out, path)
    advice = "Run the same command again to continue: what is prepared so far is kept."
    with can_be_interrupted(advice), reading(path):
        table = list_images(path, dataset or recognized_name(path))
        show_remarks(table.remarks)
        with image_progress("preparing") as watch:
            prepared = prepare_images(table, out, side=side, skip_bad=skip_bad, watch=watch)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    facts = [f"{len(prepared):,} images of {side} x {side}", f"{len(prepared.class_names)} classes"]
    facts += [f"{size / 1e6:,.0f} MB"]
    skipped = skipped_images(out)
    facts += [f"{len(skipped):,} bad files left out"] if skipped else []
    show(f"Prepared: [bold]{escape(str(out))}[/]  {' · '.join(facts)}")


def phantom(
    out: Annotated[Path, out_option("The new folder.")] = Path("images"),
) -> None:
    """Draw synthetic images of invented patients, to try the other commands on."""
    from medcil.data.sources.phantom import write_phantom_images

    with can_be_interrupted(START_OVER):
        counts = write_phantom_images(out)
    for folder, n_images in counts.items():
        show(f"[bold]{escape(str(out / folder))}[/]  {n_images} images")
    show("Synthetic: no picture shows a patient, and no class is a disease.")
