"""A version's page and model card: plain HTML and Markdown, nothing loaded from elsewhere, no picture."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from medcil.recipe import leaves
from medcil.report.evaluation import NOTICE
from medcil.report.tables import percent

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2rem } .quiet { color: #59636e }
.verdict { border-left: 4px solid #0969da; padding: .6rem 1rem; background: #f3f7fc }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #d8dee4 }
th { text-align: left; font-weight: 600 } td { text-align: right; font-variant-numeric: tabular-nums }
th + th { text-align: right } .text, th + th.text { text-align: left }
th[scope=row] { overflow-wrap: anywhere } .scroll { overflow-x: auto }
@media print { .scroll { overflow: visible } }
"""
Content = Mapping[str, Any]


def page(provenance: Content, metrics: Content, forgetting: Content | None) -> str:
    """report.html: what the version is, how well it recognizes, what the update cost."""
    title = f"{provenance['version']}: {', '.join(provenance['classes_added'])}"
    parts = [
        f"<h1>Model version {escape(str(provenance['version']))}</h1>",
        f"<p class='quiet'>{escape(origin(provenance))} {NOTICE}</p>",
    ]
    if forgetting is not None:
        parts += ["<h2>What the update cost</h2>", *_forgetting_parts(forgetting)]
    parts += ["<h2>How well it recognizes</h2>", f"<p>{escape(summary(metrics))}</p>"]
    rows = [(c["name"], c["images"], interval(c)) for c in metrics["classes"]]
    parts.append(_table(("class", "images", "recognized (95% interval)"), rows))
    names = [c["name"] for c in metrics["classes"]]
    parts += ["<h3>Confusion (rows true, columns predicted)</h3>", _confusion(names, metrics["confusion"])]
    parts += ["<h2>Trained on</h2>", _table(("class", "images", "sealed"), _trained_rows(provenance))]
    parts += ["<h2>Settings</h2>", _table(("setting", "value"), leaves(provenance["settings"]), text=True)]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _forgetting_parts(content: Content) -> list[str]:
    said = content["verdict"] or f"No verdict: {content['note'] or 'nothing to measure on'}."
    parts = [f"<p class='verdict'>{escape(said)}</p>"]
    parts.append(_table(FORGETTING_COLUMNS, forgetting_rows(content)))
    parts.append(f"<p class='quiet'>Intervals of {escape(content['interval'])}.</p>")
    taken = [(c["class"], c["taken_for"], c["images"]) for c in content["confusions"]]
    if taken:
        parts += [
            "<h3>What is taken for what</h3>",
            _table(("class", "taken for", "images"), taken, text=True),
        ]
    flipped = [(f["file"], f["class"], f["before"], f["after"]) for f in content["flipped"]]
    parts.append(f"<h3>Images whose prediction changed: {len(flipped)}</h3>")
    if flipped:
        parts.append(_table(("image", "class", "before", "after"), flipped, text=True))
    return parts


FORGETTING_COLUMNS = ("class", "images", "before", "after", "change in points (95% interval)")


def forgetting_rows(content: Content) -> list[tuple[str, ...]]:
    """For the page and for the screen: the old classes, then the new ones."""
    rows = []
    for entry in content["old_classes"]:
        change = entry["change"]
        said = "–" if change is None else points(change)
        shown = (interval(entry["before"]), interval(entry["after"]), said)
        rows.append((entry["name"], str(entry["images"]), *shown))
    return rows + [(c["name"], str(c["images"]), "new", interval(c), "") for c in content["new_classes"]]


def points(change: Content) -> str:
    low, high = 100 * change["low"], 100 * change["high"]
    return f"{100 * change['change']:+.1f} ({low:+.1f} to {high:+.1f})"


def interval(entry: Content) -> str:
    if entry["recall"] is None:
        return "–"
    return f"{100 * entry['recall']:.1f}% ({100 * entry['low']:.0f}–{100 * entry['high']:.0f}%)"


def summary(metrics: Content) -> str:
    on = {"hold-out": "sealed images, none of them trained on", "eval": "images given with --eval"}
    where = on.get(metrics["measured_on"], "training exemplars: optimistic")
    return (
        f"Accuracy {percent(metrics['accuracy'])}, "
        f"balanced accuracy {percent(metrics['balanced_accuracy'])}, measured on {metrics['images']} {where}."
    )


def origin(provenance: Content) -> str:
    parent = provenance["parent"]
    what = f"Classes added to {parent}" if parent else "First classes"
    return f"{what}: {', '.join(provenance['classes_added'])}. Written {provenance['when'][:10]}."


def _trained_rows(provenance: Content) -> list[tuple[str, int, int]]:
    sealed = provenance["holdout"]
    return [(name, n, sealed[name]) for name, n in provenance["images"].items()]


def _confusion(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Number the columns like the rows: names as headings would push the last columns off the page."""
    numbered = [f"{i} {name}" for i, name in enumerate(names, start=1)]
    columns = ["", *(str(i) for i in range(1, len(names) + 1))]
    return _table(columns, [(name, *row) for name, row in zip(numbered, counts, strict=True)])


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, text: bool = False) -> str:
    kind = " class='text'" if text else ""
    head = "".join(f"<th scope='col'{kind}>{escape(column)}</th>" for column in columns)
    body = "\n".join(
        f"<tr><th scope='row'>{escape(str(row[0]))}</th>"
        + "".join(f"<td{kind}>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table>\n<tr>{head}</tr>\n{body}\n</table></div>"


def card(
    provenance: Content, metrics: Content, forgetting: Content | None, class_names: Sequence[str]
) -> str:
    """card.md: what a person who is handed the model must know."""
    settings = provenance["settings"]
    side, crop = settings["data"]["side"], settings["data"]["crop"]
    lines = [
        f"# Model card: version {provenance['version']}",
        "",
        f"**{NOTICE}** Nobody has shown that it is fit for any clinical decision.",
        "",
        "## What it is",
        f"- An image classifier for {len(class_names)} classes: {', '.join(map(_plain, class_names))}.",
        f"- {_plain(origin(provenance))} medcil {provenance['medcil']}.",
        f"- Network {settings['network']['backbone']}, method {settings['method']['name']}, images resized "
        f"to {side} x {side}, of which the middle {crop} x {crop} are seen.",
        "",
        "## How well it does",
        f"- {summary(metrics)}",
        *(f"- {_plain(c['name'])}: {interval(c)} of {c['images']} images" for c in metrics["classes"]),
    ]
    if forgetting is not None:
        said = forgetting["verdict"] or f"No verdict: {forgetting['note'] or 'nothing to measure on'}."
        lines += ["", "## What the last update cost", f"- {_plain(said)}"]
    lines += [
        "",
        "## What to keep in mind",
        "- It knows its classes alone; an image of anything else still gets one of them.",
        "- It was measured on images from where the training images came from; elsewhere it may do worse.",
        "- The folder holds images: exemplars in state/ and sealed ones in holdout/. Protect it like them.",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A class may be called anything, also what Markdown or a browser would obey."""
    marked: dict[str, str | int | None] = {c: f"\\{c}" for c in "\\`*_[]#|~"}
    marked |= {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
    return " ".join(text.split()).translate(str.maketrans(marked))
