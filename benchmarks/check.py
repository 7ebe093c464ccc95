"""How long `medcil check` takes: images per second and seconds, with and without the search for duplicates.

    python benchmarks/check.py DATA [--dataset NAME]

DATA is a folder or an archive that medcil reads; the numbers depend on what else the machine does.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path

from medcil.check import check
from medcil.data.sources import DATASETS, list_images, recognized_name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--dataset", choices=[name for name, d in DATASETS.items() if d.read])
    arguments = parser.parse_args()

    started = time.perf_counter()
    catalog = list_images(arguments.data, arguments.dataset or recognized_name(arguments.data))
    listed = time.perf_counter() - started
    machine = f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f} before"
    print(f"{len(catalog):,} images, {machine}; listed in {listed:.1f} s")
    for duplicates in (False, True):
        started = time.perf_counter()
        report = check(catalog, duplicates=duplicates)
        seconds = time.perf_counter() - started
        found = ", ".join(
            f"{n} {severity}s" for severity, n in Counter(f.severity for f in report.findings).items()
        )
        what = "with duplicates" if duplicates else "without duplicates"
        print(f"{what}: {seconds:.1f} s, {len(catalog) / seconds:,.0f} images/s ({found})")


if __name__ == "__main__":
    main()
