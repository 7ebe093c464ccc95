"""Other read-outs of trained runs: classes remembered as Gaussians, the mean of several views.

    python proofs/readouts.py collect RESULTS SUITE FOLDER [--rows ROW...] [--orders N...]
    python proofs/readouts.py table FOLDER > TABLE.csv

Nothing is trained. `collect` goes once more through each finished run of a suite that has no Gaussians of its
own (`medcil bench SUITE --out RESULTS`): after each step it makes those of the method `gaussians`, and keeps
what the classifier (scores s_c with the log prior π_c) and the Gaussians (discriminants d_c) say of the test
images in 1 or 8 symmetries of each. `table` then predicts

    argmax_c  log(softmax(s - π)_c + λ softmax(d)_c) + π_c + δ [c is old]

λ = δ = 0 with one view is what the run predicted. `means` says where those of old classes come from:
"carried" along with the network as the method does it, or "stale", as they were.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from medcil.build import build_stream
from medcil.config import RunConfig
from medcil.data.samples import Samples, no_samples
from medcil.data.transforms import views_of
from medcil.metrics import confusion_matrix, summarize
from medcil.models.network import Network
from medcil.readouts.gaussians import ClassGaussians
from medcil.storage.run_dir import RunDir
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, embed
from medcil.training.state import State, load_state

MEANS = ("carried", "stale")
SHRINKAGES = (0.1, 0.3, 0.6)
VIEWS = (1, 8)
WEIGHTS = (0.2, 0.3, 0.5, 0.7, 1.0)  # λ
FAVORS = (0.0, 0.25, 0.5, 0.75)  # δ
METRICS = ("acc_micro", "acc_balanced", "acc_task", "forgetting")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("results", type=Path)
    collecting.add_argument("suite")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--rows", nargs="*", help="only these")
    collecting.add_argument("--orders", nargs="*", help="only these")
    collecting.set_defaults(command=collect)
    making = commands.add_parser("table")
    making.add_argument("folder", type=Path)
    making.set_defaults(command=write_table)
    arguments = parser.parse_args()
    arguments.command(arguments)


def collect(arguments: argparse.Namespace) -> None:
    """One file a run: labels, its scores and all discriminants of the test images of each step."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for run in json.loads((arguments.results / arguments.suite / "runs.json").read_text())["runs"]:
        row, setting, order, *_ = run["places"][0]
        is_asked_for = (not arguments.rows or row in arguments.rows) and (
            not arguments.orders or str(order) in arguments.orders
        )
        if run["state"] != "finished" or not is_asked_for:
            continue
        run_dir = RunDir(arguments.results / "runs" / run["key"])
        config = run_dir.read_config()
        tensors, about = outputs_of_run(run_dir, config)
        about |= {"row": row, "setting": setting, "order": order}
        file = arguments.folder / f"{run['key']}.safetensors"
        safetensors.torch.save_file(tensors, file, {"about": json.dumps(about)})


def outputs_of_run(run: RunDir, config: RunConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    device, stream = choose_device(config.execution), build_stream(config)
    known: dict[str, ClassGaussians | None] = dict.fromkeys(MEANS)
    before: State | None = None
    test = no_samples(config.data.side)
    tensors: dict[str, Tensor] = {}
    for number, task in enumerate(stream.tasks(), start=1):
        state = load_state(run.task(number).state)
        if state.scoring != "classifier" or state.preprocessing.views != 1:
            why = "a run is read out by its classifier in one view"
            sys.exit(f"{run.root} was not scored so: {why}. Name others with --rows.")
        test += task.test
        at_hand = task.train if before is None else task.train + before.memory
        feed = Feed(at_hand, state.preprocessing, device, config.execution)
        new = unit_embeddings(state.network, feed)
        old = None if before is None else unit_embeddings(before.network, feed)
        known = {kind: learned(kind, known[kind], new, old, feed.labels, task.n_old) for kind in MEANS}
        scores, embeddings = both_outputs(state, test, config, device)
        found = {"scores": scores}
        for kind, gaussians in known.items():
            for shrinkage in SHRINKAGES:
                gaussians.prepare(weight=1.0, shrinkage=shrinkage)
                found[f"{kind} {shrinkage}"] = torch.stack([gaussians(each) for each in embeddings])
        tensors[f"{number} labels"] = test.labels.clone()
        tensors[f"{number} prior"] = state.log_prior_in_scores
        for name, of_views in found.items():
            for views in VIEWS:
                tensors[f"{number} {views} {name}"] = of_views[:views].mean(dim=0).float().cpu()
        before = state
    names = [stream.class_names[c] for c in stream.order]
    return tensors, {"sizes": stream.sizes, "order_of_classes": stream.order, "names": names}


def learned(
    kind: str,
    before: ClassGaussians | None,
    new: Float[Tensor, "n dim"],
    old: Float[Tensor, "n dim"] | None,
    labels: Int[Tensor, "n"],
    n_old: int,
) -> ClassGaussians:
    """The Gaussians after a step, from those before it and the images at hand as both networks see them."""
    is_new = labels >= n_old
    own = ClassGaussians.of(new[is_new], labels[is_new] - n_old)
    if before is None or old is None:
        return own
    return (before if kind == "stale" else before.carried(old, new, labels)).joined(own)


def unit_embeddings(network: Network, feed: Feed) -> Float[Tensor, "n dim"]:
    network = network.to(feed.device).to(memory_format=torch.channels_last)
    return F.normalize(embed(network, feed, torch.arange(len(feed.samples)))).double()


@torch.no_grad()
def both_outputs(
    state: State, test: Samples, config: RunConfig, device: torch.device
) -> tuple[Float[Tensor, "views n classes"], Float[Tensor, "views n dim"]]:
    """Logits and unit embeddings of the test images in all eight symmetries, the image as it is first."""
    network = state.network.to(device).to(memory_format=torch.channels_last).eval()
    feed = Feed(test, state.preprocessing, device, config.execution)
    logits, units = [], []
    for images in feed.evaluation_batches(torch.arange(len(test)), views=8):
        with feed.precision():
            out = network(views_of(images, 8))
        logits.append(out.logits.reshape(8, len(images), -1))
        units.append(F.normalize(out.embedding).reshape(8, len(images), -1))
    return torch.cat(logits, dim=1).double(), torch.cat(units, dim=1).double()


def write_table(arguments: argparse.Namespace) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["row", "setting", "order", "views", "means", "shrinkage", "weight", "favor", *METRICS])
    for file in sorted(arguments.folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            about = json.loads(opened.metadata()["about"])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for how in read_outs():
            each = confusions(arrays, about["sizes"], *how)
            metrics = summarize(
                each,
                task_sizes=about["sizes"],
                class_names=about["names"],
                original_labels=about["order_of_classes"],
            )
            place = (about["row"], about["setting"], about["order"])
            table.writerow([*place, *how, *(f"{metrics[name]:.4f}" for name in METRICS)])


def read_outs() -> Iterator[tuple[int, str, float, float, float]]:
    """Views, whose means, shrinkage, λ, δ."""
    for views, favor in product(VIEWS, FAVORS):
        yield views, "none", 0.0, 0.0, favor
        for kind, shrinkage, weight in product(MEANS, SHRINKAGES, WEIGHTS):
            yield views, kind, shrinkage, weight, favor


def confusions(
    arrays: dict[str, Float[np.ndarray, "..."]],
    sizes: list[int],
    views: int,
    kind: str,
    shrinkage: float,
    weight: float,
    favor: float,
) -> list[Int[np.ndarray, "_ _"]]:
    found = []
    for number, size in enumerate(sizes, start=1):
        n_seen, prior = sum(sizes[:number]), arrays[f"{number} prior"]
        mixed = softmax(arrays[f"{number} {views} scores"] - prior)
        if weight:
            mixed = mixed + weight * softmax(arrays[f"{number} {views} {kind} {shrinkage}"])
        is_old = np.arange(n_seen) < n_seen - size
        scores = np.log(mixed) + prior + favor * is_old
        found.append(confusion_matrix(arrays[f"{number} labels"], scores.argmax(axis=1), n_seen))
    return found


def softmax(scores: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    shares: Float[np.ndarray, "n classes"] = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    main()
