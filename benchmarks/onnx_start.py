"""How long `medcil predict` takes with an exported file, from nothing to its table, beside what it builds on.

    python benchmarks/onnx_start.py MODEL.onnx IMAGE [--rounds 15]

Every round starts each process once, one after the other, so that whatever else the machine does meets all
of them. Medians of the seconds on the clock and of the processor, which other work changes less.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

EMPTY, LIBRARIES, PREDICT = "an empty Python", "import onnxruntime, numpy, PIL", "medcil predict"


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds on the clock and of the processor, of each command."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            before, started = _processor_seconds(), time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds = (time.perf_counter() - started, _processor_seconds() - before)
            if number:  # the first round brings the files into memory
                taken[name].append(seconds)
    return {
        name: (statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times))
        for name, times in taken.items()
    }


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a file that `medcil export` wrote")
    parser.add_argument("image", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        table = str(Path(folder) / "predictions.csv")
        predict = ["-m", "medcil", "predict", str(options.model), str(options.image), "--out", table]
        commands = {EMPTY: ["-c", "pass"], LIBRARIES: ["-c", LIBRARIES], PREDICT: predict}
        found = measure({name: [sys.executable, *rest] for name, rest in commands.items()}, options.rounds)
    loads = f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{options.rounds} rounds on {os.cpu_count()} cores, {loads}")
    print("| process | seconds | of the processor | beside the libraries alone |\n|---|---|---|---|")
    for name, (wall, cpu) in found.items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {cpu / found[LIBRARIES][1]:.1f} |")


if __name__ == "__main__":
    main()
