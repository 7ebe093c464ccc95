"""How fast a store is prepared, beside a plain single-threaded Pillow loop that decodes and keeps nothing.

    python benchmarks/prepare.py --root HAM10000.tar.gz

Both take the same files, which an archive has been read into, in short rounds by turns; the ratio is the
median of the rounds' ratios. A round in which other processes took more than `--others` of the cores is
thrown away. Prepared images are hashed, written and flushed to the disk; the plain loop opens, converts,
resizes and turns into an array, once with our filter and once with the one Pillow takes where none is named.
"""

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from medcil.data.catalog import Catalog
from medcil.data.ham10000 import read_catalog
from medcil.data.store import prepare

ROOT = Path(__file__).resolve().parents[2] / "shared" / "data" / "ham10000_200x150.tar.gz"
FILTERS = ("bilinear, as ours", "Pillow's default")
Round = dict[str, tuple[float, float]]


def plain_loop(catalog: Catalog, side: int, resample: Image.Resampling | None) -> None:
    for index in range(len(catalog)):
        with Image.open(io.BytesIO(catalog.read(index))) as image:
            np.asarray(image.convert("RGB").resize((side, side), resample))


def prepare_anew(catalog: Catalog, side: int, workers: int | None, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as store:
        prepare(catalog, Path(store) / "store", side=side, workers=workers)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of computing."""
    began, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - computed


def busy_seconds() -> float:
    """Of all cores and all processes since the machine started."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def one_round(catalog: Catalog, options: argparse.Namespace, number: int) -> tuple[Round, float]:
    """And the share of the cores that others took."""
    chosen = np.random.default_rng(number).permutation(len(catalog))[: options.images]
    part, side = catalog.select(chosen), options.side
    works: dict[str, Callable[[], object]] = {
        "bilinear, as ours": lambda: plain_loop(part, side, Image.Resampling.BILINEAR),
        "Pillow's default": lambda: plain_loop(part, side, None),
        "prepare": lambda: prepare_anew(part, side, options.workers, options.folder),
    }
    names = list(works) if number % 2 else list(works)[::-1]
    began, busy = time.perf_counter(), busy_seconds()
    seconds = {name: timed(works[name]) for name in names}
    own = sum(computed for _, computed in seconds.values())
    cores = (time.perf_counter() - began) * (os.cpu_count() or 1)
    return seconds, max(0.0, busy_seconds() - busy - own) / cores


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def summary(rounds: list[Round], options: argparse.Namespace) -> dict[str, Any]:
    def rate(name: str) -> int:
        return int(options.images / statistics.median(seconds[name][0] for seconds in rounds))

    def computing(name: str) -> float:
        seconds = statistics.median(one[name][1] for one in rounds)
        return round(1000 * seconds / float(options.images), 3)

    plain = {}
    for name in FILTERS:
        ratios = [round(seconds[name][0] / seconds["prepare"][0], 2) for seconds in rounds]
        plain[name] = {
            "images_per_second": rate(name),
            "computing_ms_per_image": computing(name),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return {
        "side": options.side,
        "images_per_round": options.images,
        "rounds": len(rounds),
        "images_per_second": rate("prepare"),
        "computing_ms_per_image": computing("prepare"),
        "plain": plain,
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "pillow": PIL.__version__,
        "torch": torch.__version__,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    catalog = read_catalog(options.root)
    one_round(catalog, options, 0)  # warms up
    rounds: list[Round] = []
    others: list[float] = []
    for number in range(1, options.attempts + 1):
        seconds, share = one_round(catalog, options, number)
        if share <= options.others:
            rounds.append(seconds)
            others.append(share)
        if len(rounds) == options.rounds:
            break
    if not rounds:
        raise SystemExit("Others were too busy on this machine in every round: try later, or raise --others.")
    return summary(rounds, options) | {"others": round(statistics.median(others), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="HAM10000, a folder or an archive")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where stores are written and deleted again"
    )
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--images", type=int, default=2720, help="in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--attempts", type=int, default=50, help="rounds at most, those thrown away counted in"
    )
    parser.add_argument("--others", type=float, default=0.05, help="share of the cores that others may take")
    parser.add_argument("--workers", type=int, default=None)
    found = measure(parser.parse_args())
    print("| side | prepare, images/s | plain loop, images/s | its filter | ratio | machine |")
    print("|---|---|---|---|---|---|")
    for name, plain in found["plain"].items():
        row = (found["side"], found["images_per_second"], plain["images_per_second"], name, plain["ratio"])
        print("| " + " | ".join(str(cell) for cell in (*row, found["machine"])) + " |")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
