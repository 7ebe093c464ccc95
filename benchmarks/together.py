"""Several runs on one GPU: one after the other, at once, and at once under CUDA MPS; images/s in all.

    python benchmarks/together.py --root HAM10000.tar.gz --weights resnet18.safetensors --out together.json

The recipe of whole_run.py with the three published class orders, `--at-once 6` with two seeds each. Seconds
go from the first process's start to the last one's end, start-up, capturing and evaluation included; images
are those trained on. MPS gets a private daemon, ended afterwards; without the program it is left out.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import whole_run
from measuring import Row, option_parser, read_options, record

from medcil.build import load_recipe

CONTROL = "nvidia-cuda-mps-control"
N_ORDERS = 3


@contextmanager
def mps_daemon(folder: Path) -> Iterator[Mapping[str, str]]:
    """What a process must have in its environment to compute under it."""
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for place in environment.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    everything = {**os.environ, **environment}
    # Its output goes nowhere: the daemon would hold a pipe open for ever.
    run = partial(
        subprocess.run, env=everything, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    run([CONTROL, "-d"], check=True)
    try:
        yield environment
    finally:
        run([CONTROL], input=b"quit\n")


def run_all(
    options: argparse.Namespace,
    settings: Sequence[str],
    folder: Path,
    *,
    at_once: bool,
    environment: Mapping[str, str] | None = None,
) -> tuple[float, int]:
    """Seconds, and the images trained on."""
    outs, running = [], []
    began = time.perf_counter()
    for number in range(options.at_once):
        outs.append(folder / f"run-{number}")
        own = [f"scenario.order={number % N_ORDERS}", f"seed={number // N_ORDERS}"]
        own += [f"execution.threads={options.threads}"]
        run = whole_run.start_run(options.recipe, outs[-1], [*settings, *own], environment)
        running.append(run)
        if not at_once:
            whole_run.finish(run, outs[-1])
    for run, out in zip(running, outs, strict=True):
        whole_run.finish(run, out)
    seconds = time.perf_counter() - began
    per_class = load_recipe(options.recipe, settings).memory.quota(1)
    return seconds, sum(whole_run.trained_images(out, options.epochs, per_class) for out in outs)


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    settings = whole_run.settings_of_runs(options, folder)
    found: dict[str, list[tuple[float, int]]] = {}
    notes = []
    for number in range(options.rounds):
        for way in ("one after the other", "at once"):
            place = folder / f"{way}-{number}"
            result = run_all(options, settings, place, at_once=way == "at once")
            found.setdefault(way, []).append(result)
        if options.device != "cuda" or shutil.which(CONTROL) is None:
            notes = [f"at once under MPS is left out: no GPU, or no {CONTROL}"]
            continue
        try:
            with mps_daemon(folder / f"mps-{number}") as environment:
                place = folder / f"under-mps-{number}"
                result = run_all(options, settings, place, at_once=True, environment=environment)
            found.setdefault("at once under MPS", []).append(result)
        except (OSError, subprocess.SubprocessError, SystemExit) as error:
            notes = [f"at once under MPS failed: {error}"]
    rates = {way: statistics.median(images / s for s, images in results) for way, results in found.items()}
    rows: list[Row] = [
        {
            "way": way,
            "runs": options.at_once,
            "epochs": options.epochs,
            "seconds": statistics.median(seconds for seconds, _ in results),
            "images/s": rates[way],
            "ratio": rates[way] / rates["one after the other"],
        }
        for way, results in found.items()
    ]
    return rows, notes


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    whole_run.add_run_options(parser)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of each process")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--on-cpu-too", action="store_true", help="measure also where there is no GPU")
    options = read_options(
        parser, arguments, cpu={**whole_run.CPU, "epochs": 1}, cuda={**whole_run.CUDA, "epochs": 4}
    )
    if options.threads is None:
        options.threads = max(1, (os.cpu_count() or 1) // options.at_once)
    reason = whole_run.needs_root(options)
    if options.device != "cuda" and not options.on_cpu_too:
        reason = "left out: there is no GPU (--on-cpu-too)"
    if reason is not None:
        return record("together", __doc__, options, [], [reason])
    with tempfile.TemporaryDirectory() as folder:
        rows, notes = measure(options, Path(folder))
    return record("together", __doc__, options, rows, notes)


if __name__ == "__main__":
    main()
