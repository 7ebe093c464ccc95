"""Two processes that share every batch against one, with batch norm: the metrics of whole runs.

    python proofs/processes_agree.py --out DIR           nine runs each way; half an hour on two cores

The recipe of the demonstration's third run, but for its sampler, over its class orders and three seeds. In
float64 both ways give the same network (tests/processes); in float32 the last bits differ, and training makes
points of them. How many is measured by a third way: one process with another number of threads.
"""

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from medcil.build import load_recipe
from medcil.experiments.run import run_experiment

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "phantom-balanced.yaml"
PLAIN = "method.sampler=null"
WAYS = {
    "one process": ["execution.device=cpu", "execution.threads=1"],
    "two processes": ["execution.device=cpu", "execution.threads=1", "execution.processes=2"],
    "one process, two threads": ["execution.device=cpu", "execution.threads=2"],
}
METRICS = ("acc_balanced", "last_balanced", "acc_micro", "forgetting")


def measured(way: str, seed: int, order: int, out: Path) -> list[float]:
    config = load_recipe(RECIPE, [f"seed={seed}", f"scenario.order={order}", PLAIN, *WAYS[way]])
    folder = out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}-{order}"
    metrics = run_experiment(config, folder)
    return [100 * metrics[metric] for metric in METRICS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    cases = list(product(WAYS, range(options.seeds), range(3)))
    with ProcessPoolExecutor(options.at_once, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(measured, *zip(*cases, strict=True), [options.out] * len(cases)))
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for (way, seed, order), row in zip(cases, rows, strict=True):
        found[way].append(row)
        print(f"{way}, seed {seed}, order {order}: " + ", ".join(f"{value:.1f}" for value in row))
    n = len(found["one process"])
    print(f"\n| mean over {n} runs | " + " | ".join(METRICS) + " |\n|---|" + "---|" * len(METRICS))
    for way, rows in found.items():
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        print(f"| {way} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    for way in list(WAYS)[1:]:
        cells = []
        for one, other in zip(
            zip(*found["one process"], strict=True), zip(*found[way], strict=True), strict=True
        ):
            differences = [b - a for a, b in zip(one, other, strict=True)]
            error = statistics.stdev(differences) / n**0.5
            cells.append(f"{statistics.mean(differences):+.2f} ± {error:.2f}")
        print(f"| {way}, minus one process (± standard error) | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
