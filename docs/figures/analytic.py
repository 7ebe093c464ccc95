"""Draw docs/images/analytic.svg: accuracy against balanced accuracy on HAM10000 3-2, by β, and its relatives.

From results/analytic-ham10000/ablation.jsonl and the tables of other methods.
    python docs/figures/analytic.py
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.figure import Figure

from medcil.report.plots import SMALL, STYLE, rendered

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "images" / "analytic.svg"
ABLATION = ROOT / "results" / "analytic-ham10000" / "ablation.jsonl"
DEFAULT = "all parts, β .5"
BALANCES = ["β 0", "β 0.25", DEFAULT, "β 0.75", "β 1", "β 1.25"]
PARTS = {  # variant: (name in the figure, shift of the name in points)
    "two stages, adapted alone": ("adapted alone", (-66, -3)),
    "last stage, adapted alone": ("adapted alone, last stage", (6, -8)),
    "two stages, pretrained alone": ("pretrained alone", (6, -3)),
    "1 views": ("one view", (6, -3)),
}
RELATIVES = {
    "SLDA": ("SLDA", (5, -8)),
    "FeCAM": ("FeCAM", (6, -3)),
    "SimpleCIL": ("SimpleCIL", (6, -3)),
    "RanPAC, M 2,048": ("RanPAC", (-12, -12)),
}
# Accuracy, balanced accuracy: results/ham10000, results/README.md and results/study/ham10000-test.
TRAINED = {
    "balanced": (80.3, 72.6, (-2, -12)),
    "LO2LN, 100 epochs": (80.7, 70.9, (-70, -12)),
    "UCIR, 100 epochs": (77.7, 69.1, (6, -3)),
    "joint, all images": (88.1, 81.3, (-8, -12)),
}
PUBLISHED = 85.0
OWN = "#0072B2"


def means() -> dict[str, tuple[float, float]]:
    """Return each variant's accuracy and balanced accuracy, seeds averaged before orders."""
    of_orders: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, ABLATION.open(encoding="utf-8")):
        if line["steps"] == [3, 2, 2]:
            figures = (100 * line["acc_micro"], 100 * line["acc_balanced"])
            of_orders[line["variant"]][line["order"]].append(figures)
    return {
        variant: (
            mean(mean(acc for acc, _ in runs) for runs in orders.values()),
            mean(mean(balanced for _, balanced in runs) for runs in orders.values()),
        )
        for variant, orders in of_orders.items()
    }


def main() -> None:
    found = means()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.subplots()
        acc, balanced = zip(*(found[variant] for variant in BALANCES), strict=True)
        axes.plot(balanced, acc, "o-", color=OWN, markersize=4, label="analytic, by β")
        for variant, x, y in zip(BALANCES, balanced, acc, strict=True):
            name = "β .5, the default" if variant == DEFAULT else variant
            axes.annotate(name, (x, y), (4, 5), textcoords="offset points", fontsize=SMALL, color=OWN)
        for part, group, color, marker in (
            ("analytic with one part left out, β .5", PARTS, OWN, "x"),
            ("relatives on the same features", RELATIVES, "#009E73", "s"),
        ):
            x, y = zip(*(found[variant][::-1] for variant in group), strict=True)
            axes.scatter(x, y, color=color, marker=marker, s=22, label=part)
            for variant, (name, shift) in group.items():
                acc, balanced = found[variant]
                axes.annotate(
                    name, (balanced, acc), shift, textcoords="offset points", fontsize=SMALL, color=color
                )
        x, y = zip(*((balanced, acc) for acc, balanced, _ in TRAINED.values()), strict=True)
        axes.scatter(x, y, color="#D55E00", marker="D", s=20, label="trained in every step")
        for name, (acc, balanced, shift) in TRAINED.items():
            axes.annotate(
                name, (balanced, acc), shift, textcoords="offset points", fontsize=SMALL, color="#D55E00"
            )
        axes.axhline(PUBLISHED, color="#9ca3af", linewidth=0.8, linestyle="--")
        axes.annotate("published for the paper's method", (79.6, 85.15), fontsize=SMALL, color="#6b7280")
        axes.set(
            xlabel="balanced accuracy, %",
            ylabel="accuracy, %",
            xlim=(62, 84.5),
            title="HAM10000 3-2, test list",
        )
        axes.legend(loc="lower left", fontsize=SMALL)
        OUT.write_bytes(rendered(figure, "svg"))


if __name__ == "__main__":
    main()
