"""How the default weights of `balanced` were chosen: on HAM10000 lesions held out of training.

    python proofs/choose_defaults.py --root HAM10000.tar.gz --weights resnet18.safetensors --out DIR

Every setting runs over the three class orders of the 3-2 protocol at 64 px, 5 epochs a step. A fifth of the
training images, whole lesions, is held out to choose on (`data.held_out`); test images are not read. Prints a
Markdown table of means over the orders; DIR keeps every run.
"""

import argparse
import multiprocessing
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medcil.build import build_stream
from medcil.config import RunConfig
from medcil.data.stream import Stream
from medcil.experiments.run import run_experiment

SIDE, CROP = 72, 64
STREAMS: dict[int, Stream] = {}
"""By class order: a process reads the images once for each."""
BALANCED: dict[str, Any] = {"name": "balanced", "sampler": None}  # before exemplars were in every batch
CE_KD = BALANCED | {"classification": "cross_entropy", "margin": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"name": "finetune"},
    **{f"CE + distillation {k}": {**CE_KD, "distillation_weight": k} for k in (0.1, 0.25, 0.5, 1.0)},
    **{
        f"balanced, distillation {k}, margin {d}": BALANCED | {"distillation_weight": k, "margin_weight": d}
        for k in (0.1, 0.5)
        for d in (0.0, 0.03, 0.1, 0.3)
    },
    "balanced as printed (distillation 0.5, margin 0.3)": BALANCED
    | {"distillation_weight": 0.5, "margin_weight": 0.3, "detach_range": False},
}


def run_one(job: tuple[str, int, argparse.Namespace]) -> tuple[str, dict[str, Any]]:
    variant, order, options = job
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "label": variant,
            "data": {
                "name": "ham10000",
                "root": str(options.root),
                "side": SIDE,
                "crop": CROP,
                "split": "benchmark",
                "held_out": 0.2,
            },
            "scenario": {"base": 3, "increment": 2, "order": order},
            "network": {"weights": options.weights, "recalibrate_batch_norm": True},
            "training": {"epochs": 5, "learning_rates": {"classifier": 0.1, "backbone": 0.01}},
            "method": VARIANTS[variant],
            "execution": {"checkpoint_every": 100},
        }
    )
    if order not in STREAMS:
        STREAMS[order] = build_stream(config)
    folder = f"{list(VARIANTS).index(variant):02d}-order-{order}"
    return variant, run_experiment(config, options.out / folder, stream=STREAMS[order])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(variant, order, options) for variant in VARIANTS for order in range(3)]
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
