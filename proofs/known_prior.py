"""Accuracy if the clinic's class frequencies were known at prediction: scores plus τ log(frequency).

    python proofs/known_prior.py RESULTS SUITE > TABLE.csv

Reads the predictions that the runs of a suite wrote (`medcil bench SUITE --out RESULTS`) and predicts anew
from their scores s_c as argmax_c s_c + τ log q_c, q_c being the images class c was learned from; τ = 0 is
what the run predicted. The first step, trained with plain cross-entropy, carries the frequencies already and
stays as it is. A decision about where a model is used, made after training: reported apart from all else.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

TAUS = (0.0, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", type=Path)
    parser.add_argument("suite")
    arguments = parser.parse_args()
    runs = json.loads((arguments.results / arguments.suite / "runs.json").read_text())["runs"]
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["row", "setting", "order", "tau", "acc_micro", "acc_balanced"])
    for run in runs:
        if run["state"] != "finished":
            continue
        for tau, micro, balanced in accuracies(arguments.results / "runs" / run["key"]):
            for place in run["places"]:
                table.writerow([*place[:3], tau, f"{micro:.4f}", f"{balanced:.4f}"])


def accuracies(run: Path) -> list[tuple[float, float, float]]:
    """τ and the mean over steps of micro and of balanced accuracy."""
    counts = json.loads((run / "metrics.json").read_text())["inherent_counts"]
    steps = [read_scores(path) for path in sorted(run.glob("tasks/*/predictions.csv"))]
    found = []
    for tau in TAUS:
        each = []
        for i, (labels, scores) in enumerate(steps):
            n_classes = scores.shape[1]
            offset = tau * np.log(counts[:n_classes]) if i > 0 else np.zeros(n_classes)
            is_right = (scores + offset).argmax(axis=1) == labels
            recalls = [is_right[labels == c].mean() for c in range(n_classes)]
            each.append((is_right.mean(), np.mean(recalls)))
        micro, balanced = np.mean(each, axis=0)
        found.append((tau, float(micro), float(balanced)))
    return found


def read_scores(path: Path) -> tuple[Int[np.ndarray, "n"], Float[np.ndarray, "n classes"]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    names = [name.removeprefix("score ") for name in header[3:]]
    return np.array([names.index(row[1]) for row in rows]), np.array([row[3:] for row in rows], dtype=float)


if __name__ == "__main__":
    main()
