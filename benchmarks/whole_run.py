"""A whole run in a new process, from prepared images to metrics.json: seconds, and the share outside epochs.

    python benchmarks/whole_run.py --root HAM10000.tar.gz --weights resnet18.safetensors --out run.json

The recipe recipes/ham10000-3-2.yaml (160 px) as `medcil run` computes it; the store is prepared before. The
time inside epochs is taken from the run's timings.jsonl: the differences between successive ends of epochs
within a phase, and for each phase's first epoch, whose beginning is not recorded, the median of these.
Writing a checkpoint after an epoch counts to the next epoch (--checkpoint-every). Everything else from the
record "started" to the last metrics.json is "outside": capturing, imprinting, herding, states, evaluation.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import Row, option_parser, read_options, record

from medcil.build import load_recipe
from medcil.data.cache import is_cache, prepare
from medcil.data.sources import find_dataset

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "ham10000-3-2.yaml"
CPU = {"epochs": 2, "set": ["data.side=72", "data.crop=64", "method.sampler=null"]}
CUDA = {"epochs": 20, "set": ["data.side=184", "data.crop=160", "method.sampler=null"]}
WITHOUT_CLI = """
import sys
from pathlib import Path
from medcil.experiments.run import run_experiment
from medcil.build import load_recipe
run_experiment(load_recipe(Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2]))
"""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=None, help="a prepared store, or the dataset's files")
    parser.add_argument("--weights", type=Path, default=None, help="of the backbone; none: random")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--set", nargs="*", default=None, help="other settings of the recipe, key=value")
    parser.add_argument(
        "--checkpoint-every", type=int, default=None, help="epochs; unset: as the product does"
    )


def settings_of_runs(options: argparse.Namespace, folder: Path) -> list[str]:
    """What all runs of a benchmark have in common; prepares their store in the folder."""
    settings = [f"training.epochs={options.epochs}", f"execution.device={options.device}", *options.set]
    if options.checkpoint_every is not None:
        settings.append(f"execution.checkpoint_every={options.checkpoint_every}")
    settings += [f"network.weights={options.weights.resolve()}"] if options.weights is not None else []
    config = load_recipe(options.recipe, settings)
    read_images = find_dataset(config.data.name).read
    store = options.root
    if read_images is not None and not is_cache(options.root):
        store = folder / "store"
        prepare(read_images(options.root), store, side=config.data.side)
    return settings + ([f"data.root={store.resolve()}"] if store is not None else [])


def start_run(
    recipe: Path, out: Path, settings: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    out.parent.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("typer") is not None:
        options = [word for setting in settings for word in ("--set", setting)]
        command = ["-m", "medcil", "run", str(recipe), "--out", str(out), *options]
    else:
        command = ["-c", WITHOUT_CLI, str(recipe), str(out), *settings]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, env={**os.environ, **(environment or {})}
        )


def finish(run: subprocess.Popen[bytes], out: Path) -> None:
    if run.wait() != 0:
        raise SystemExit(f"The run failed:\n{out.with_suffix('.log').read_text()[-2000:]}")


def seconds_inside_epochs(timings: Sequence[Mapping[str, Any]]) -> float:
    phases: dict[tuple[int, str], list[float]] = {}
    for line in timings:
        if "epoch" in line:
            phases.setdefault((line["task"], line["phase"]), []).append(line["unix_time"])
    total = 0.0
    for ends in phases.values():
        between = [b - a for a, b in pairwise(ends)]
        total += sum(between) + (statistics.median(between) if between else 0.0)
    return total


def trained_images(out: Path, epochs: int, per_class: int) -> int:
    """Over all epochs of a run of balanced with a plain sampler: the new images and the exemplars."""
    metrics = json.loads((out / "metrics.json").read_text())
    counts, total, start = metrics["inherent_counts"], 0, 0
    for size in metrics["task_sizes"]:
        exemplars = sum(min(per_class, n) for n in counts[:start])
        total += epochs * (sum(counts[start : start + size]) + exemplars)
        start += size
    return total


def measure(options: argparse.Namespace, folder: Path) -> Row:
    settings, out = settings_of_runs(options, folder), folder / "run"
    began = time.time()
    finish(start_run(options.recipe, out, settings), out)
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    started, ended = timings[0]["unix_time"], (out / "metrics.json").stat().st_mtime
    inside = seconds_inside_epochs(timings)
    metrics = json.loads((out / "metrics.json").read_text())
    config = load_recipe(options.recipe, settings)
    images = trained_images(out, options.epochs, config.memory.quota(len(metrics["class_names"])))
    return {
        "pixels": config.data.crop,
        "epochs": options.epochs,
        "wall, s": ended - began,
        "start, s": started - began,
        "learning and evaluation, s": ended - started,
        "inside epochs, s": inside if options.epochs > 1 else None,
        "share outside epochs": 1 - inside / (ended - started) if options.epochs > 1 else None,
        "images/s inside": images / inside if inside else None,
        "acc_micro": metrics["acc_micro"],
        "acc_balanced": metrics["acc_balanced"],
        "forgetting": metrics["forgetting"],
    }


def needs_root(options: argparse.Namespace) -> str | None:
    """Why there is nothing to run on, if so."""
    reads_files = find_dataset(load_recipe(options.recipe).data.name).read is not None
    if reads_files and (options.root is None or not options.root.exists()):
        return f"left out: there is no dataset at {options.root} (--root)"
    return None


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    add_run_options(parser)
    options = read_options(parser, arguments, cpu=CPU, cuda=CUDA)
    reason = needs_root(options)
    if reason is not None:
        return record("whole_run", __doc__, options, [], [reason])
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(options, Path(folder))]
    return record("whole_run", __doc__, options, rows)


if __name__ == "__main__":
    main()
