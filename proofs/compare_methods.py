"""Every method on the real HAM10000, side by side: a table with its run records.

    python proofs/compare_methods.py --root HAM10000.tar.gz --weights resnet18.safetensors --out DIR

The 3-2 protocol over the benchmark's three class orders, each method with its preset `ham10000`, but fewer
epochs and smaller images (the options). Goes on where it was stopped; runs already there are only read.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from medcil.bench.experiment import run_experiment
from medcil.build import Stream, parse_recipe
from medcil.data import ham10000
from medcil.data.samples import Samples
from medcil.data.stream import task_sizes

PLUGINS: dict[str, dict[str, Any]] = {
    "L_cbc": {"classification": "cil_balanced"},
    "L_dm": {"margin": "distribution"},
    "L_cbc + L_dm": {"classification": "cil_balanced", "margin": "distribution"},
}
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {"name": "finetune", "preset": "ham10000"},
    "replay": {"name": "replay", "preset": "ham10000"},
    "icarl": {"name": "icarl", "preset": "ham10000"},
    "ucir": {"name": "ucir", "preset": "ham10000"},
    "podnet": {"name": "podnet", "preset": "ham10000"},
    "der": {"name": "der", "preset": "ham10000"},
    "lo2ln": {"name": "lo2ln", "preset": "ham10000"},
    "bic": {"name": "bic", "preset": "ham10000"},
    "ssil": {"name": "ssil", "preset": "ham10000"},
    "lws": {"name": "lws", "preset": "ham10000"},
    "balanced": {"name": "balanced", "preset": "ham10000"},
    "joint": {"name": "finetune", "preset": "joint"},
    **{
        f"{name} + {plugged}": {"name": name, "preset": "ham10000", "plugins": plugins}
        for name in ("icarl", "ucir")
        for plugged, plugins in PLUGINS.items()
    },
}
COLUMNS = ("acc_micro", "acc_balanced", "forgetting")


def run(options: argparse.Namespace, label: str, order: int) -> float:
    """One run; returns its seconds. The process reads the images for its first run and keeps them."""
    recipe = {
        "label": label,
        "data": {"name": "ham10000", "root": str(options.root), "side": options.side, "crop": options.crop},
        "scenario": {"base": 3, "increment": 2, "order": order},
        "network": {"weights": str(options.weights), "recalibrate_batch_norm": True},
        "training": {"epochs": options.epochs},
        "method": METHODS[label],
        "execution": {"checkpoint_every": options.epochs},
    }
    config = parse_recipe(recipe, source=label)
    train, test = images(options.root, options.side)
    stream = Stream(
        train=train,
        test=test,
        class_names=ham10000.CLASS_NAMES,
        order=ham10000.ORDERS[order],
        sizes=task_sizes(7, 3, 2),
        is_synthetic=False,
        is_cumulative=config.scenario.cumulative,
    )
    began = time.monotonic()
    run_experiment(config, folder(options.out, label, order), stream=stream)
    return time.monotonic() - began


@cache
def images(root: Path, side: int) -> tuple[Samples, Samples]:
    train, test = ham10000.read_ham10000(root, side)
    return train.copied(), test.copied()


def folder(out: Path, label: str, order: int) -> Path:
    return out / label.replace(" + ", "+") / f"order-{order}"


def run_all(options: argparse.Namespace) -> None:
    """As many at once as told; the seconds of each are kept beside its run."""
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(run, options, label, order): (label, order)
            for label in options.methods
            for order in options.orders
            if not (folder(options.out, label, order) / "seconds.json").exists()
        }
        for job in as_completed(jobs):
            label, order = jobs[job]
            if job.exception() is not None:
                print(f"{label}, order {order} failed: {job.exception()!r}", file=sys.stderr, flush=True)
                continue
            record = {"seconds": round(job.result(), 1), "at_once": options.at_once}
            (folder(options.out, label, order) / "seconds.json").write_text(json.dumps(record))
            print(f"{label}, order {order}: {job.result():.0f} s", file=sys.stderr, flush=True)


def table(options: argparse.Namespace) -> list[str]:
    """Mean and sample standard deviation over the orders."""
    lines = ["| method | acc_micro | acc_balanced | forgetting | seconds |", "|---|---|---|---|---|"]
    for label in options.methods:
        places = [folder(options.out, label, order) for order in options.orders]
        if not all((place / "seconds.json").exists() for place in places):
            lines.append(f"| {label} | not finished | | | |")
            continue
        metrics = [json.loads((place / "metrics.json").read_text()) for place in places]
        cells = []
        for column in COLUMNS:
            values = [100 * m[column] for m in metrics]
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.1f}{spread}")
        seconds = np.mean([json.loads((place / "seconds.json").read_text())["seconds"] for place in places])
        lines.append(f"| {label} | {' | '.join(cells)} | {seconds:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--side", type=int, default=184)
    parser.add_argument("--crop", type=int, default=160)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the device")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    run_all(options)
    print("\n".join(table(options)))


if __name__ == "__main__":
    main()
