"""Every method on the real HAM10000, side by side: a table with its run records.

    python proofs/compare_methods.py --root HAM10000.tar.gz --weights resnet18.safetensors --out DIR
    python proofs/compare_methods.py --records docs/results/records/methods-20-epochs.jsonl  # the table only

The 3-2 protocol over the benchmark's three class orders, each method with its preset `ham10000`, but fewer
epochs and smaller images (the options); balanced as its preset was before the study
(docs/explanation/reproduce.md). Goes on where it was stopped; runs already there are only read.
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
import yaml

from medcil.build import Stream, parse_recipe
from medcil.data.samples import Samples
from medcil.data.sources import ham10000
from medcil.data.stream import task_sizes
from medcil.experiments.run import run_experiment

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
    "balanced": {"name": "balanced", "sampler": None},
    "joint": {"name": "finetune", "preset": "joint"},
    **{
        f"{name} + {plugged}": {"name": name, "preset": "ham10000", "plugins": plugins}
        for name in ("icarl", "ucir")
        for plugged, plugins in PLUGINS.items()
    },
}
PUBLISHED = {
    "icarl": ("76.3", "20.1 (23.4)"),
    "ucir": ("79.1", "16.8 (20.1)"),
    "podnet": ("75.6", "20.5 (20.8)"),
    "der": ("76.2", "24.8 (28.0)"),
    "lo2ln": ("82.0", "12.8 (13.8)"),
    "balanced": ("85.0", "8.0"),
}
"""100 epochs, 224 px of the full images; in brackets true-task forgetting (docs/reference/metrics.md)."""
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
    """As many at once as told; `record.json` in a run's folder says that it is finished."""
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(run, options, label, order): (label, order)
            for label in options.methods
            for order in options.orders
            if not (folder(options.out, label, order) / "record.json").exists()
        }
        for job in as_completed(jobs):
            label, order = jobs[job]
            if job.exception() is not None:
                print(f"{label}, order {order} failed: {job.exception()!r}", file=sys.stderr, flush=True)
                continue
            place = folder(options.out, label, order)
            record = {"label": label, "order": order, "seconds": round(job.result(), 1)}
            record |= {"at_once": options.at_once} | content(place)
            (place / "record.json").write_text(json.dumps(record))
            print(f"{label}, order {order}: {job.result():.0f} s", file=sys.stderr, flush=True)


def content(place: Path) -> dict[str, Any]:
    """What a run's files say, without where the data lay."""
    config = yaml.safe_load((place / "config.yaml").read_text())
    config["data"]["root"] = Path(config["data"]["root"]).name
    config["network"]["weights"] = Path(config["network"]["weights"]).name
    files = {name: json.loads((place / f"{name}.json").read_text()) for name in ("environment", "metrics")}
    return {"config": config, **files}


def table(records: list[dict[str, Any]]) -> list[str]:
    """Mean and sample standard deviation over the class orders."""
    lines = [
        "| method | orders | acc_micro | acc_balanced | forgetting | s | at once | published Acc | Fgt |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label in METHODS:
        runs = sorted((r for r in records if r["label"] == label), key=lambda r: r["order"])
        if not runs:
            continue
        orders = ", ".join(str(r["order"]) for r in runs)
        cells = [_mean_and_spread([100 * r["metrics"][column] for r in runs]) for column in COLUMNS]
        seconds = f"{np.mean([r['seconds'] for r in runs]):.0f}"
        at_once = ", ".join(str(n) for n in sorted({r["at_once"] for r in runs}))
        published = PUBLISHED.get(label, ("", ""))
        lines.append(f"| {' | '.join([label, orders, *cells, seconds, at_once, *published])} |")
    return lines


def _mean_and_spread(values: list[float]) -> str:
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--side", type=int, default=184)
    parser.add_argument("--crop", type=int, default=160)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the device")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--records", type=Path, help="print the table of earlier runs instead")
    options = parser.parse_args()
    if options.records is None:
        if None in (options.root, options.weights, options.out):
            parser.error("give --root, --weights and --out, or --records")
        run_all(options)
        lines = [path.read_text() for path in sorted(options.out.glob("*/order-*/record.json"))]
        (options.out / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    else:
        lines = options.records.read_text().splitlines()
    print("\n".join(table([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main()
