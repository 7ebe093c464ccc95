"""The page of a model version."""

import re

from medcil.clinic.measure import page

NAMES = [f"A class with a rather long name, the number {i}" for i in range(1, 9)]


def test_a_confusion_table_of_eight_classes_shows_every_column():
    """Long names as headings made it wider than the page, which cut off the last column."""
    provenance = {
        "version": "v1",
        "parent": None,
        "classes_added": NAMES,
        "when": "2026-11-18T12:00:00",
        "images": dict.fromkeys(NAMES, 10),
        "holdout": dict.fromkeys(NAMES, 2),
        "settings": {},
    }
    metrics = {
        "accuracy": 0.5,
        "balanced_accuracy": 0.5,
        "measured_on": "hold-out",
        "images": 16,
        "classes": [{"name": name, "images": 2, "recall": None} for name in NAMES],
        "confusion": [[10 * i + j for j in range(8)] for i in range(8)],
    }
    text = page(provenance, metrics, None)
    table = text[text.index("<h3>Confusion") :].split("</table>")[0]
    headings, *rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
    assert re.findall(r'<th scope="col".*?>(.*?)</th>', headings) == ["", *"12345678"]
    for i, row in enumerate(rows):
        assert f"{i + 1} {NAMES[i]}" in row
        assert re.findall(r'<td class="number">(\d+)</td>', row) == [str(10 * i + j) for j in range(8)]
    assert len(rows) == 8
