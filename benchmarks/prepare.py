"""How fast a store is prepared, beside a plain Pillow loop of one thread that packs the same images.

    python benchmarks/prepare.py --root HAM10000.tar.gz

The plain loop opens each file, converts it to RGB, resizes it and writes the array at the end of one file,
the fastest way to keep it: a memory map is as fast, an array that is saved at the end takes half as long
again. It checks, hashes and flushes nothing. Its filter is once bilinear, as ours, and once bicubic, the one
that Pillow takes where none is named. Preparing checks and hashes every image and flushes it to the disk.

Both take the same images, which an archive has been read into, in short rounds by turns; the ratio is the
median of the rounds' ratios. A round in which other processes took more than `--others` of the cores is
thrown away. Files are deleted while the clock is stopped.
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

from medcil.data.cache import prepare
from medcil.data.sources.ham10000 import read_table

ROOT = Path(__file__).resolve().parents[2] / "shared" / "data" / "ham10000_200x150.tar.gz"
FILTERS = ("bilinear, as ours", "bicubic, Pillow's default")
Round = dict[str, tuple[float, float]]


def plain_loop(catalog: ImageTable, side: int, resample: Image.Resampling | None, folder: Path) -> None:
    with (folder / "pixels.u8").open("wb") as file:
        for index in range(len(catalog)):
            with Image.open(io.BytesIO(catalog.read(index))) as image:
                file.write(np.asarray(image.convert("RGB").resize((side, side), resample)))


def timed(work: Callable[[Path], object], folder: Path | None) -> tuple[float, float]:
    """Seconds by the clock and of computing; the work gets an empty folder that lives no longer."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        began, computed = time.perf_counter(), time.process_time()
        work(Path(own))
        return time.perf_counter() - began, time.process_time() - computed


def busy_seconds() -> float:
    """Of all cores and all processes since the machine started."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def one_round(catalog: ImageTable, options: argparse.Namespace, number: int) -> tuple[Round, float]:
    """And the share of the cores that others took."""
    chosen = np.random.default_rng(number).permutation(len(catalog))[: options.images]
    part, side = catalog.select(chosen), options.side
    works: dict[str, Callable[[Path], object]] = {
        FILTERS[0]: lambda folder: plain_loop(part, side, Image.Resampling.BILINEAR, folder),
        FILTERS[1]: lambda folder: plain_loop(part, side, None, folder),
        "prepare": lambda folder: prepare(part, folder / "store", side=side, workers=options.workers),
    }
    names = list(works) if number % 2 else list(works)[::-1]
    began, busy = time.perf_counter(), busy_seconds()
    seconds = {name: timed(works[name], options.folder) for name in names}
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
            "ratio": round(statistics.median(ratios), 2),
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
    catalog = read_table(options.root)
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
    parser.add_argument("--folder", type=Path, default=None, help="where files are written and deleted again")
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
