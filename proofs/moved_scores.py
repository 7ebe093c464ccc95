"""Accuracy when scores are moved after training, by class frequency or for new classes alone.

    python proofs/moved_scores.py RESULTS SUITE prior > TABLE.csv
    python proofs/moved_scores.py RESULTS SUITE new > TABLE.csv

Reads the predictions that the runs of a suite wrote (`medcil bench SUITE --out RESULTS`) and predicts again
from their scores s_c, as

    argmax_c s_c + τ log q_c           `prior`: as if the clinic's class frequencies were known; q_c are the
                                       images class c was learned from
    argmax_c s_c + δ [c is new]        `new`: how a run trades classes of the last step against older ones

τ = 0 and δ = 0 are what the run predicted. The first step has no old classes, and its scores, trained with
plain cross-entropy, carry the frequencies already: it stays as it is. Reported apart from all else.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

AMOUNTS = {"prior": (0.0, 0.25, 0.5, 0.75, 1.0), "new": tuple(np.arange(-3, 3.25, 0.5).tolist())}
COLUMN = {"prior": "tau", "new": "delta"}


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", type=Path)
    parser.add_argument("suite")
    parser.add_argument("by", choices=[*AMOUNTS])
    arguments = parser.parse_args()
    runs = json.loads((arguments.results / arguments.suite / "runs.json").read_text())["runs"]
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["row", "setting", "order", COLUMN[arguments.by], "acc_micro", "acc_balanced"])
    for run in runs:
        if run["state"] != "finished":
            continue
        for amount, micro, balanced in accuracies(arguments.results / "runs" / run["key"], arguments.by):
            for place in run["places"]:
                table.writerow([*place[:3], amount, f"{micro:.4f}", f"{balanced:.4f}"])


def accuracies(run: Path, by: str) -> list[tuple[float, float, float]]:
    """How far scores are moved, and the mean over steps of micro and of balanced accuracy."""
    metrics = json.loads((run / "metrics.json").read_text())
    steps = [read_scores(path) for path in sorted(run.glob("tasks/*/predictions.csv"))]
    units = [np.zeros(steps[0][1].shape[1])]  # the first step stays
    for size, (_, scores) in zip(metrics["task_sizes"][1:], steps[1:], strict=False):
        n_classes = scores.shape[1]
        is_new = np.arange(n_classes) >= n_classes - size
        units.append(np.log(metrics["inherent_counts"][:n_classes]) if by == "prior" else is_new)
    found = []
    for amount in AMOUNTS[by]:
        each = [
            both_accuracies(labels, scores + amount * unit)
            for (labels, scores), unit in zip(steps, units, strict=True)
        ]
        micro, balanced = np.mean(each, axis=0)
        found.append((amount, float(micro), float(balanced)))
    return found


def both_accuracies(
    labels: Int[np.ndarray, "n"], scores: Float[np.ndarray, "n classes"]
) -> tuple[float, float]:
    is_right = scores.argmax(axis=1) == labels
    recalls = [is_right[labels == c].mean() for c in range(scores.shape[1])]
    return float(is_right.mean()), float(np.mean(recalls))


def read_scores(path: Path) -> tuple[Int[np.ndarray, "n"], Float[np.ndarray, "n classes"]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    names = [name.removeprefix("score ") for name in header[3:]]
    return np.array([names.index(row[1]) for row in rows]), np.array([row[3:] for row in rows], dtype=float)


if __name__ == "__main__":
    main()
