"""An evaluation in tables, from its JSON alone: for the terminal, for Markdown, for the page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medcil.storage.atomic import write_bytes

NOTICE = "Research use; not a medical device."
TITLE = "# Evaluation of "
"""How the tables in Markdown begin."""
OVERALL = {
    "balanced_accuracy": "Balanced accuracy",
    "accuracy": "Accuracy",
    "auroc": "AUROC, mean of the classes",
    "kappa": "Cohen's kappa",
    "quadratic_kappa": "Quadratic kappa",
    "ece": "Calibration error (ECE)",
    "brier": "Brier score",
}
PER_CLASS = {
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
    "ppv": "PPV",
    "npv": "NPV",
    "class_auroc": "AUROC",
}
PERCENT = {"balanced_accuracy", "accuracy", "sensitivity", "specificity", "ppv", "npv"}
IN_SUBGROUPS = ("balanced_accuracy", "accuracy", "auroc", "ece")

Content = Mapping[str, Any]
Rows = list[list[str]]


def number(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if name in PERCENT else f"{value:.3f}"


def with_interval(name: str, figure: Content) -> str:
    """87.5% (80.1% to 93.2%)"""
    value = number(name, figure["value"])
    if figure["value"] is None or figure["low"] is None:
        return value
    return f"{value} ({number(name, figure['low'])} to {number(name, figure['high'])})"


def overall_rows(content: Content) -> Rows:
    """A row for each figure; a column by image and, where there is one, by patient."""
    sections = [section for section in (content["by_image"], content["by_patient"]) if section]
    return [
        [title, *(with_interval(name, section[name]) for section in sections)]
        for name, title in OVERALL.items()
        if name in sections[0]
    ]


def overall_header(content: Content) -> list[str]:
    by_image, by_patient = content["by_image"], content["by_patient"]
    header = ["", f"by image ({by_image['n']:,})"]
    return [*header, f"by patient ({by_patient['n']:,})"] if by_patient else header


def class_rows(section: Content) -> Rows:
    return [
        [c["name"], f"{c['n']:,}", *(with_interval(key, c[key]) for key in PER_CLASS)]
        for c in section["classes"]
    ]


def class_header(unit: str) -> list[str]:
    return ["Class", unit, *PER_CLASS.values()]


def subgroup_rows(groups: Content) -> Rows:
    return [
        [value, f"{section['n']:,}", *(with_interval(name, section[name]) for name in IN_SUBGROUPS)]
        for value, section in groups.items()
    ]


def subgroup_header(column: str) -> list[str]:
    return [column, "Images", *(OVERALL[name] for name in IN_SUBGROUPS)]


def confusion_rows(content: Content) -> Rows:
    names = content["classes"]
    rows = zip(names, content["by_image"]["confusion"], strict=True)
    return [[name, *(f"{n:,}" for n in row)] for name, row in rows]


def unlike_sentences(content: Content) -> list[str]:
    """What became of the flag `unlike anything known`."""
    unlike = content["unlike"]
    stated = unlike["stated_false_alarms"]
    if stated is None:
        return ["Whether an image is unlike anything known was never measured for this model."]
    parts = (
        (
            "known_classes",
            f"classes it knows are falsely called unlike anything known (stated: up to {stated:.3g} of any)",
        ),
        ("other_classes", "classes it does not know are called unlike anything known"),
    )
    return [
        f"{found['flagged']:,} of {found['n']:,} images of {said}: {found['value']:.1%} "
        f"({found['low']:.1%} to {found['high']:.1%})."
        for key, said in parts
        if (found := unlike[key]) is not None
    ]


def interval_sentence(content: Content) -> str:
    intervals = content["intervals"]
    return (
        f"95% intervals: {intervals['draws']:,} bootstrap draws of {intervals['unit']}; of shares the wider "
        f"of that and Wilson's. Prior: {content['prior']['name']}."
    )


def title_of(content: Content) -> str:
    return f"{content['version']} on {content['data']}"


def write_markdown(content: Content, path: Path) -> None:
    parts = [
        f"{TITLE}{_plain(title_of(content))}",
        f"{interval_sentence(content)} {NOTICE}",
        *(f"- {_plain(note)}" for note in content["notes"]),
        "## Overall",
        table(overall_header(content), overall_rows(content)),
        "## Classes, by image",
        table(class_header("Images"), class_rows(content["by_image"])),
    ]
    if content["by_patient"]:
        parts += ["## Classes, by patient"]
        parts += [table(class_header("Patients"), class_rows(content["by_patient"]))]
    parts += ["## Confusion (rows true, columns predicted)"]
    parts += [table(["", *content["classes"]], confusion_rows(content))]
    for column, groups in content["by_subgroup"].items():
        parts += [f"## By {_plain(column)}", table(subgroup_header(column), subgroup_rows(groups))]
    parts += ["## Unlike anything known", *(f"- {line}" for line in unlike_sentences(content))]
    write_bytes(path, ("\n\n".join(parts) + "\n").encode())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """A name from someone's data is never meant as Markdown or HTML."""
    text = " ".join(text.split())
    for character in "\\|<>*_`[]":
        text = text.replace(character, f"\\{character}")
    return text
