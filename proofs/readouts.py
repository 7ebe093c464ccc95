"""Other read-outs of trained runs: classes remembered as Gaussians, the mean of several views.

    python proofs/readouts.py collect RESULTS SUITE FOLDER [--rows ROW...] [--data NAME=DIR]
    python proofs/readouts.py table FOLDER > TABLE.csv

Nothing is trained. `collect` goes through each finished run of a suite (`medcil bench SUITE --out RESULTS`)
once more, step by step. Its network h = f_t(x) / |f_t(x)| gives every class a mean μ_c, and all of them one
covariance Σ. A new class has them from its images; an old one from the step before, whose embeddings an
affine map, fitted by ridge regression on the images at hand as both networks see them, takes to where they
are now:

    h_new ≈ A h_old + b,      μ_c <- A μ_c + b,      Σ <- A Σ Aᵀ + what the map leaves unexplained

`table` then adds linear discriminants d_c(h) = μ_cᵀ S h - μ_cᵀ S μ_c / 2, S the inverse of Σ shrunk toward a
multiple of the identity, to the run's own scores, and favors old classes by δ:

    argmax_c  s_c + w d_c + δ [c is old]

averaged over 1 or 8 symmetries of the image. w = δ = 0 with one view is what the run predicted. `means` says
where those of old classes come from: "carried" as above, "stale" without the map, "exemplars" of the images
kept.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
from medcil.engine.feed import Feed
from medcil.engine.predict import choose_device, embed
from medcil.engine.state import State, load_state
from medcil.metrics import confusion_matrix, summarize
from medcil.models.network import Network
from medcil.runs import RunDir

MEANS = ("carried", "stale", "exemplars")
SHRINKAGES = (0.1, 0.3, 0.6)
VIEWS = (1, 8)
WEIGHTS = (0.03, 0.1, 0.2, 0.3, 0.5, 1.0)
FAVORS = (0.0, 0.25, 0.5, 0.75, 1.0)  # δ
RIDGE = 1e-3
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
    collecting.add_argument("--data", action="append", default=[], metavar="NAME=DIR")
    collecting.set_defaults(command=collect)
    making = commands.add_parser("table")
    making.add_argument("folder", type=Path)
    making.set_defaults(command=write_table)
    arguments = parser.parse_args()
    arguments.command(arguments)


def collect(arguments: argparse.Namespace) -> None:
    """One file a run: labels, its scores and all discriminants of the test images of each step."""
    roots = dict(entry.split("=", 1) for entry in arguments.data)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for run in json.loads((arguments.results / arguments.suite / "runs.json").read_text())["runs"]:
        row, setting, order, *_ = run["places"][0]
        is_asked_for = not arguments.rows or row in arguments.rows
        if arguments.orders and str(order) not in arguments.orders:
            continue
        if run["state"] != "finished" or not is_asked_for:
            continue
        run_dir = RunDir(arguments.results / "runs" / run["key"])
        config = run_dir.read_config()
        if config.data.name in roots:
            data = config.data.model_copy(update={"root": Path(roots[config.data.name])})
            config = config.model_copy(update={"data": data})
        tensors, about = outputs_of_run(run_dir, config)
        about |= {"row": row, "setting": setting, "order": order}
        file = arguments.folder / f"{run['key']}.safetensors"
        safetensors.torch.save_file(tensors, file, {"about": json.dumps(about)})


@dataclass(eq=False)
class Gaussians:
    """A mean for each class and one covariance for all, of `n` images."""

    means: Float[Tensor, "classes dim"]
    covariance: Float[Tensor, "dim dim"]
    n: int

    def discriminants(
        self, units: Float[Tensor, "views n dim"], shrinkage: float
    ) -> Float[Tensor, "views n classes"]:
        dim = len(self.covariance)
        sphere = self.covariance.trace() / dim * torch.eye(dim).to(self.covariance)
        inverse = torch.linalg.inv((1 - shrinkage) * self.covariance + shrinkage * sphere)
        directions = self.means @ inverse
        found: Tensor = units @ directions.T - (directions * self.means).sum(dim=1) / 2
        return found


def outputs_of_run(run: RunDir, config: RunConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    device, stream = choose_device(config.execution), build_stream(config)
    known: dict[str, Gaussians] = {}
    before: State | None = None
    test = no_samples(config.data.side)
    tensors: dict[str, Tensor] = {}
    for number, task in enumerate(stream.tasks(), start=1):
        state = load_state(run.task(number).state)
        test += task.test
        at_hand = task.train if before is None else task.train + before.memory
        feed = Feed(at_hand, state.preprocessing, device, config.execution)
        new = unit_embeddings(state.network, feed)
        old = None if before is None else unit_embeddings(before.network, feed)
        known = {kind: learned(kind, known.get(kind), new, old, feed.labels, task.n_old) for kind in MEANS}
        logits, units = both_outputs(state, test, config, device)
        found = {"scores": logits} | {
            f"{kind} {shrinkage}": gaussians.discriminants(units, shrinkage)
            for kind, gaussians in known.items()
            for shrinkage in SHRINKAGES
        }
        tensors[f"{number} labels"] = test.labels.clone()
        for name, of_views in found.items():
            for views in VIEWS:
                tensors[f"{number} {views} {name}"] = of_views[:views].mean(dim=0).float().cpu()
        before = state
    names = [stream.class_names[c] for c in stream.order]
    return tensors, {"sizes": stream.sizes, "order_of_classes": stream.order, "names": names}


def learned(
    kind: str,
    before: Gaussians | None,
    new: Float[Tensor, "n dim"],
    old: Float[Tensor, "n dim"] | None,
    labels: Int[Tensor, "n"],
    n_old: int,
) -> Gaussians:
    """The Gaussians after a step, from those before it and the images at hand as both networks see them."""
    n_seen = int(labels.max()) + 1
    own = torch.stack([new[labels == c].mean(dim=0) for c in range(n_old, n_seen)])
    is_new = labels >= n_old
    rest = new[is_new] - own[labels[is_new] - n_old]
    scatter = rest.T @ rest
    n = int(is_new.sum())
    if before is None or old is None:
        return Gaussians(own, scatter / n, n)
    if kind == "exemplars":
        means = torch.stack([new[labels == c].mean(dim=0) for c in range(n_old)])
        return Gaussians(torch.cat([means, own]), scatter / n, n)
    is_stale = kind == "stale"
    moved, covariance = (before.means, before.covariance) if is_stale else carried(before, old, new, labels)
    together = (before.n * covariance + scatter) / (before.n + n)
    return Gaussians(torch.cat([moved, own]), together, before.n + n)


def carried(
    before: Gaussians, old: Float[Tensor, "n dim"], new: Float[Tensor, "n dim"], labels: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, "dim dim"]]:
    """Means and covariance in the new network's space; every class weighs the same in the fit."""
    weights = 1 / torch.bincount(labels).to(old)[labels]
    weights = weights / weights.sum()
    center_old, center_new = weights @ old, weights @ new
    x, y = old - center_old, new - center_new
    gram = (x * weights[:, None]).T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    moving = torch.linalg.solve(gram, (x * weights[:, None]).T @ y)  # y ≈ x moving
    rest = y - x @ moving
    left = (rest * weights[:, None]).T @ rest
    return (before.means - center_old) @ moving + center_new, moving.T @ before.covariance @ moving + left


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
    for images in feed.evaluation_batches(torch.arange(len(test))):
        turned = [torch.rot90(images, turns, (2, 3)) for turns in range(4)]
        views = [*turned, *(view.flip(3) for view in turned)]
        with feed.precision():
            outputs = [network(view.contiguous(memory_format=torch.channels_last)) for view in views]
        logits.append(torch.stack([out.logits for out in outputs]))
        units.append(torch.stack([F.normalize(out.embedding) for out in outputs]))
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
    """Views, whose means, shrinkage, w, δ."""
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
        n_seen = sum(sizes[:number])
        scores = arrays[f"{number} {views} scores"].copy()
        if weight:
            scores += weight * arrays[f"{number} {views} {kind} {shrinkage}"]
        if number > 1:
            scores[:, : n_seen - size] += favor
        found.append(confusion_matrix(arrays[f"{number} labels"], scores.argmax(axis=1), n_seen))
    return found


if __name__ == "__main__":
    main()
