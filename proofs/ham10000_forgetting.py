"""Real HAM10000: does `balanced` forget less than cross-entropy with distillation, at no loss of balance?

    python proofs/ham10000_forgetting.py --root HAM10000.tar.gz --weights resnet18.safetensors --out DIR

The 3-2 protocol over the benchmark's three class orders at 64 px, 5 epochs a step; both methods at their
default weights, exemplars drawn like all images. Prints a Markdown table; ends with 1 where the answer is no.
Goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medcil.build import RunConfig, Stream
from medcil.data.samples import Samples
from medcil.data.sources import ham10000, list_images
from medcil.data.stream import task_sizes
from medcil.experiments.run import run_experiment

METHODS: dict[str, dict[str, Any]] = {
    "CE + distillation": {
        "name": "balanced",
        "margin_weight": 0.0,
        "sampler": None,
        "plugins": {"classification": "cross_entropy"},
    },
    "balanced": {"name": "balanced", "sampler": None},
}
COLUMNS = ("acc_micro", "acc_balanced", "last_balanced", "forgetting")


@dataclass(frozen=True)
class Size:
    side: int = 72
    crop: int = 64
    epochs: int = 5
    keep_every: int = 1
    """Train on every k-th image only."""


def compare(
    root: Path, weights: Path, out: Path, size: Size, orders: Sequence[int] = (0, 1, 2)
) -> dict[str, list[dict[str, Any]]]:
    """The metrics of both methods, order after order."""
    table = list_images(root, "ham10000")
    samples, is_test = table.loaded(size.side).samples(size.side), torch.from_numpy(table.is_test)
    train, test = (samples.select(torch.nonzero(part).flatten()) for part in (~is_test, is_test))
    train = _every(train, size.keep_every)
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in METHODS}
    for order in orders:
        stream = Stream(
            train,
            test,
            ham10000.CLASS_NAMES,
            ham10000.DATASET.orders[order],
            task_sizes(7, 3, 2),
            is_synthetic=False,
        )
        for label, method in METHODS.items():
            config = RunConfig.model_validate(
                {
                    "label": label,
                    "data": {"name": "ham10000", "side": size.side, "crop": size.crop},
                    "scenario": {"base": 3, "increment": 2, "order": order},
                    "network": {"weights": str(weights), "recalibrate_batch_norm": True},
                    "training": {
                        "epochs": size.epochs,
                        "learning_rates": {"classifier": 0.1, "backbone": 0.01},
                    },
                    "method": method,
                    "execution": {"checkpoint_every": size.epochs},  # a task is short; its weights are not
                }
            )
            folder = out / f"order-{order}" / ("balanced" if label == "balanced" else "ce-distillation")
            results[label].append(run_experiment(config, folder, stream=stream))
            print(f"order {order}, {label}: {row(results[label][-1:])}", file=sys.stderr, flush=True)
    return results


def _every(samples: Samples, k: int) -> Samples:
    """Every k-th image of each class."""
    chosen = [torch.nonzero(samples.labels == label).flatten()[::k] for label in range(7)]
    return samples.select(torch.cat(chosen))


def row(metrics: list[dict[str, Any]]) -> str:
    return " | ".join(f"{100 * mean_of(metrics, column):.1f}" for column in COLUMNS)


def mean_of(metrics: list[dict[str, Any]], column: str) -> float:
    return float(np.mean([m[column] for m in metrics]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2], help="to share the work out")
    options = parser.parse_args()
    results = compare(options.root, options.weights, options.out, Size(), options.orders)
    print("| order | method | micro accuracy | balanced accuracy | balanced, last step | forgetting |")
    print("|---|---|---|---|---|---|")
    for index, order in enumerate(options.orders):
        for label, metrics in results.items():
            print(f"| {order} | {label} | {row(metrics[index : index + 1])} |")
    for label, metrics in results.items():
        print(f"| mean | {label} | {row(metrics)} |")
    baseline, balanced = results["CE + distillation"], results["balanced"]
    forgets_less = mean_of(baseline, "forgetting") - mean_of(balanced, "forgetting")
    gains = mean_of(balanced, "acc_balanced") - mean_of(baseline, "acc_balanced")
    print(
        f"\n`balanced` forgets {100 * forgets_less:.1f} points less; "
        f"its balanced accuracy differs by {100 * gains:+.1f} points."
    )
    sys.exit(0 if forgets_less >= 0.1 and gains >= 0 else 1)


if __name__ == "__main__":
    main()
