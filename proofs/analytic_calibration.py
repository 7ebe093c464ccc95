"""How well probabilities of `analytic` are calibrated, under two priors and three β, beside `balanced`.

    python proofs/analytic_calibration.py HAM10000.tar.gz --weights resnet18.safetensors --out calibration

It trains model folders on a random part of HAM10000's training list, of other lesions than the test list:
MEL, NV, BCC and BKL first, then AKIEC and DF, then VASC. β is changed by `medcil rebalance`. A probability is
calibrated for a prior only where classes are as frequent as it says: so the training prior is measured on the
whole test list, and the uniform prior on at most `--each` of its images of each class.
"""

import argparse
import csv
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import medcil
from medcil.clinic.model_dir import ModelFolder
from medcil.data.image_table import ImageTable
from medcil.data.sources import list_images

DELIVERIES = (("MEL", "NV", "BCC", "BKL"), ("AKIEC", "DF"), ("VASC",))
BALANCES = (0.5, 0.75, 1.0)
MODELS = {
    "balanced": ("balanced", ()),
    "analytic, frozen": ("analytic", ("method.adapt=never",)),
    "analytic": ("analytic", ()),
}
COLUMNS = ("model", "prior", "ECE", "95% interval by lesion", "balanced accuracy")


def write(table: ImageTable, places: Sequence[int], folder: Path) -> Path:
    """Write images in a folder per class, with their lesions as patients."""
    rows = []
    for i in places:
        label, name = table.class_names[table.labels[i]], Path(table.names[i]).name
        path = folder / label / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(table.read(i))
        rows.append((f"{label}/{name}", label, table.groups[i] if table.groups else ""))
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "patient"), *rows])
    return folder


def prepare(archive: Path, out: Path, *, n_train: int, each: int) -> tuple[list[Path], dict[str, Path]]:
    """Write the deliveries, and the test list of each prior."""
    table, random = list_images(archive), np.random.default_rng(0)
    assert table.is_test is not None
    assert table.groups is not None
    tested = {table.groups[i] for i in np.flatnonzero(table.is_test)}
    free = [i for i in np.flatnonzero(~table.is_test) if table.groups[i] not in tested]
    drawn, test = random.permutation(free)[:n_train], random.permutation(np.flatnonzero(table.is_test))
    name_of = [table.class_names[label].upper() for label in table.labels]
    even = [i for c in DELIVERIES for name in c for i in [i for i in test if name_of[i] == name][:each]]
    deliveries = [
        write(table, [i for i in drawn if name_of[i] in names], out / f"delivery-{number}")
        for number, names in enumerate(DELIVERIES, start=1)
    ]
    return deliveries, {
        "training": write(table, test, out / "test"),
        "uniform": write(table, even, out / "even"),
    }


def learn(name: str, out: Path, deliveries: Sequence[Path], weights: Path, *, epochs: int) -> Path:
    method, settings = MODELS[name]
    model, first, later = out / name.replace(", ", "-"), deliveries[0], deliveries[1:]
    options = {"method": method, "epochs": epochs, "side": 64, "weights": str(weights)}
    medcil.train(first, model, settings=("execution.device=cpu", *settings), **options)
    for delivery in later:
        medcil.update(model, delivery, settings=("execution.device=cpu",))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    shutil.rmtree(given.out, ignore_errors=True)
    deliveries, tests = prepare(given.archive, given.out, n_train=given.train, each=given.each)
    print("| " + " | ".join(COLUMNS) + " |\n|---|---|---|---|---|")
    for name in MODELS:
        model = learn(name, given.out, deliveries, given.weights, epochs=given.epochs)
        versions = {name: ModelFolder(model).current}
        if name != "balanced":
            versions = {f"{name}, β {BALANCES[0]:g}": ModelFolder(model).current}
            for balance in BALANCES[1:]:
                versions[f"{name}, β {balance:g}"] = medcil.rebalance(model, balance=balance).version
        for label, version in versions.items():
            for prior, data in tests.items():
                found = medcil.evaluate(model, data, prior=prior, version=version).content["by_image"]
                ece, balanced = found["ece"], found["balanced_accuracy"]["value"]
                interval = f"{ece['low']:.3f} to {ece['high']:.3f}"
                print(f"| {label} | {prior} | {ece['value']:.3f} | {interval} | {balanced:.1%} |", flush=True)


if __name__ == "__main__":
    main()
