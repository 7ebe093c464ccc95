"""How the default weights of `balanced` were chosen: on HAM10000 lesions held out of training.

    python proofs/choose_defaults.py --root HAM10000.tar.gz --weights resnet18.safetensors --out DIR

Every setting runs over the three class orders of the 3-2 protocol at 64 px, 5 epochs a step. A fifth of the
training lesions (with all their images) is the validation set; the test list is not touched. Prints a
Markdown table of means over the orders; DIR keeps every run.
"""

import argparse
import csv
import io
import multiprocessing
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from medcil.bench.experiment import run_experiment
from medcil.build import Stream
from medcil.config import RunConfig
from medcil.data import ham10000
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import task_sizes

SIDE, CROP = 72, 64
CE_KD = {"name": "balanced", "classification": "cross_entropy", "margin": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"name": "finetune"},
    **{f"CE + distillation {k}": {**CE_KD, "distillation_weight": k} for k in (0.1, 0.25, 0.5, 1.0)},
    **{
        f"balanced, distillation {k}, margin {d}": {
            "name": "balanced",
            "distillation_weight": k,
            "margin_weight": d,
        }
        for k in (0.1, 0.5)
        for d in (0.0, 0.03, 0.1, 0.3)
    },
    "balanced as printed (distillation 0.5, margin 0.3)": {
        "name": "balanced",
        "distillation_weight": 0.5,
        "margin_weight": 0.3,
        "detach_range": False,
    },
}


def read_lesions(root: Path) -> list[str]:
    """The lesion of every image of the training list, in the list's order."""
    with tarfile.open(root) as archive:
        texts = {
            Path(member.name).name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
            if member.name.endswith(".csv")
        }
    lesion_of = {
        row["image_id"]: row["lesion_id"]
        for row in csv.DictReader(io.StringIO(texts["HAM10000_metadata.csv"]))
    }
    return [lesion_of[row["image"]] for row in csv.DictReader(io.StringIO(texts["split_train.csv"]))]


def save_split(root: Path, out: Path) -> None:
    train, _ = ham10000.read_ham10000(root, SIDE)
    lesions = np.array(read_lesions(root))
    names = np.random.default_rng(0).permutation(np.unique(lesions))
    is_held_out = torch.from_numpy(np.isin(lesions, names[: len(names) // 5]))
    split = {"pixels": train.read_all(), "labels": train.labels, "is_held_out": is_held_out}
    save_file(split, out / "split.safetensors")


def run_one(job: tuple[str, int, str, Path]) -> tuple[str, dict[str, Any]]:
    variant, order, weights, out = job
    torch.set_num_threads(1)
    split = load_file(out / "split.safetensors")
    train, validation = (
        Samples(TensorImages(split["pixels"][chosen]), split["labels"][chosen])
        for chosen in (~split["is_held_out"], split["is_held_out"])
    )
    stream = Stream(
        train,
        validation,
        ham10000.CLASS_NAMES,
        ham10000.ORDERS[order],
        task_sizes(7, 3, 2),
        is_synthetic=False,
    )
    config = RunConfig.model_validate(
        {
            "label": variant,
            "data": {"name": "ham10000", "side": SIDE, "crop": CROP},
            "scenario": {"base": 3, "increment": 2, "order": order},
            "network": {"weights": weights, "recalibrate_batch_norm": True},
            "training": {"epochs": 5, "learning_rates": {"classifier": 0.1, "backbone": 0.01}},
            "method": VARIANTS[variant],
            "execution": {"checkpoint_every": 100},
        }
    )
    folder = f"{list(VARIANTS).index(variant):02d}-order-{order}"
    return variant, run_experiment(config, out / folder, stream=stream)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    save_split(options.root, options.out)
    jobs = [(variant, order, options.weights, options.out) for variant in VARIANTS for order in range(3)]
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for variant, metrics in pool.imap_unordered(run_one, jobs):
            results[variant].append(metrics)
    print("| setting | micro accuracy | balanced accuracy | balanced, last step | forgetting |")
    print("|---|---|---|---|---|")
    for variant in VARIANTS:
        keys = ("acc_micro", "acc_balanced", "last_balanced", "forgetting")
        means = [100 * float(np.mean([metrics[key] for metrics in results[variant]])) for key in keys]
        print(f"| {variant} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
