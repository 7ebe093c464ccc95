"""What each part of the analytic learner brings, computed from the networks of finished runs.

    python proofs/analytic_ablation.py RUN... --steps 3,2,2 --steps 3,1,1,1,1 --out ablation.jsonl
    python proofs/analytic_ablation.py --table ablation.jsonl

A run of `analytic` trains its network in the first task only. So the features of all its images are computed
once, and every variant (stages, copy, views, β, λ) is solved from columns of the same features, for every way
of cutting the classes into tasks. A line of the output is a variant of a run, with its confusion matrices.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medcil.build import RunConfig, build_stream
from medcil.data.samples import Samples
from medcil.data.stream import Stream
from medcil.data.transforms import views_of
from medcil.metrics.catalogue import summarize
from medcil.metrics.classification import confusion_matrix
from medcil.readouts.readout import ImageFeatures
from medcil.readouts.ridge import STRENGTHS, Ridge, solve_ridge
from medcil.readouts.statistics import ClassStatistics, StatisticsReadout
from medcil.report.results import Summary
from medcil.storage.run_dir import RunDir
from medcil.training.feed import Feed
from medcil.training.inference import choose_device
from medcil.training.state import State, load_state

VIEWS = 8
METRICS = ("acc_micro", "acc_balanced", "forgetting", "acc_task", "acc_task_balanced", "last_balanced")
SHOWN = {"Acc": "acc_micro", "Balanced": "acc_balanced", "Fgt": "forgetting"}


@dataclass(frozen=True)
class Variant:
    name: str
    stages: int = 2
    has_adapted: bool = True
    has_copy: bool = True
    views: int = VIEWS
    balance: float = 0.5
    strength: float | None = None
    n_random: int = 0


VARIANTS = [
    Variant("all parts, β .5"),
    *(Variant(f"β {balance:g}", balance=balance) for balance in (0, 0.25, 0.75, 1, 1.25)),
    *(Variant(f"λ {strength:g}", strength=strength) for strength in (1e-4, 1e-3, 1e-2)),
    *(Variant(f"{views} views", views=views) for views in (1, 2, 4)),
    Variant("last stage", stages=1),
    Variant("last stage, β 1", stages=1, balance=1),
    Variant("last three stages", stages=3),
    Variant("last stage, adapted alone", stages=1, has_copy=False),
    Variant("two stages, adapted alone", has_copy=False),
    Variant("two stages, adapted alone, 1 view", has_copy=False, views=1),
    Variant("last stage, pretrained alone", stages=1, has_adapted=False),
    Variant("two stages, pretrained alone", has_adapted=False),
    Variant("with 2,048 random features", n_random=2048),
]


@dataclass(frozen=True, eq=False)
class Features:
    """Of the images of a run; labels are in order of arrival."""

    train: torch.Tensor  # n views dim
    train_labels: torch.Tensor
    groups: list[str]
    test: torch.Tensor
    test_labels: torch.Tensor
    block_sizes: tuple[int, ...]
    """Columns of the last stage, of the first stage, the second, ...; then the same of the copy; then 1."""

    def columns(self, variant: Variant) -> torch.Tensor:
        n_stages = len(self.block_sizes)
        first = n_stages - min(variant.stages, n_stages) + 1
        starts = np.cumsum([0, *self.block_sizes]).tolist()
        chosen = [0, *range(first, n_stages)]
        own = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
        constant = torch.tensor([self.train.shape[2] - 1])
        copy = [own + starts[-1]] if variant.has_copy and self.train.shape[2] > starts[-1] + 1 else []
        return torch.cat([*([own] if variant.has_adapted else []), *copy, constant]).to(self.train.device)


def compute_features(state: State, stream: Stream, config: RunConfig) -> Features:
    """Compute the features of all stages, in eight views."""
    device, readout = choose_device(config.execution), state.readout
    assert isinstance(readout, StatisticsReadout)
    network = state.network.to(device).eval().to(memory_format=torch.channels_last)
    readout.feature_spec = replace(readout.feature_spec, stages=99, n_random=0)
    readout.to(device).eval()
    preprocessing = replace(state.preprocessing, views=VIEWS)
    block_sizes: list[tuple[int, ...]] = []

    def features_of(samples: Samples) -> torch.Tensor:
        parts = []
        with torch.no_grad(), Feed(samples, preprocessing, device, config.execution) as feed:
            for images in feed.evaluation_batches(torch.arange(len(samples)), views=VIEWS):
                with feed.precision():
                    out = network(views_of(images, VIEWS))
                features = readout.features(out)
                parts.append(features.reshape(VIEWS, -1, features.shape[1]).transpose(0, 1))
                block_sizes[:] = [(out.embedding.shape[1], *(m.shape[1] for m in out.maps[:-1]))]
        return torch.cat(parts)

    arrival = torch.full((len(stream.order),), -1)
    arrival[torch.tensor(stream.order)] = torch.arange(len(stream.order))
    names = stream.train.groups
    return Features(
        features_of(stream.train),
        arrival[stream.train.labels].to(device),
        [f"image {i}" for i in range(len(stream.train))] if names is None else names.tolist(),
        features_of(stream.test),
        arrival[stream.test.labels].to(device),
        block_sizes[0],
    )


def solve(features: Features, variant: Variant, n_first: int) -> tuple[Ridge, torch.Tensor, float]:
    """Return the readout of all classes, the test images' features, and λ."""
    columns = features.columns(variant)
    train, test = (x[:, : variant.views, columns] for x in (features.train, features.test))
    if variant.n_random:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(train.shape[2], variant.n_random, generator=generator) / train.shape[2] ** 0.5
        train, test = (torch.cat([x, torch.relu(x @ drawn.to(x))], dim=2) for x in (train, test))
    ridge, of_first, strength = Ridge(n_features=train.shape[2]).to(train.device), {}, 0.0
    ridge.balance.fill_(variant.balance)
    for label in range(int(features.train_labels.max()) + 1):
        own = torch.nonzero(features.train_labels == label).flatten()
        ridge.add(train[own], label)
        if label < n_first:
            of_first[label] = ImageFeatures(train[own], [features.groups[i] for i in own.tolist()])
        if label == n_first - 1:
            ridge.tune(of_first, strengths=STRENGTHS if variant.strength is None else (variant.strength,))
            variances = ridge.statistics.weighted_moments(variant.balance).diagonal()
            strength = float(ridge.ridge / variances.mean())
    return ridge, test, strength


def confusions_by_step(
    ridge: Ridge, test: torch.Tensor, labels: torch.Tensor, sizes: Sequence[int]
) -> Iterator[np.ndarray]:
    whole = ridge.statistics
    for n_seen in np.cumsum(sizes).tolist():
        seen = ClassStatistics(whole.counts[:n_seen], whole.sums[:n_seen], whole.moments[:n_seen])
        weights = solve_ridge(seen, balance=float(ridge.balance), ridge=float(ridge.ridge))
        is_seen = labels < n_seen
        predicted = (test[is_seen].mean(dim=1).double() @ weights).argmax(dim=1)
        yield confusion_matrix(labels[is_seen].cpu().numpy(), predicted.cpu().numpy(), n_seen)


def ablate(
    run_dir: Path, steps: Sequence[Sequence[int]], changes: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    config = RunDir(run_dir).read_config(RunConfig)
    config = config.model_copy(update={"data": config.data.model_copy(update=dict(changes))})
    stream = build_stream(config)
    features = compute_features(load_state(RunDir(run_dir).task(1).state), stream, config)
    names = [stream.class_names[c] for c in stream.order]
    for variant in VARIANTS:
        solved = {n_first: solve(features, variant, n_first) for n_first in {sizes[0] for sizes in steps}}
        for sizes in steps:
            ridge, test, strength = solved[sizes[0]]
            confusions = list(confusions_by_step(ridge, test, features.test_labels, sizes))
            metrics = summarize(
                confusions, task_sizes=sizes, class_names=names, original_labels=list(stream.order)
            )
            yield {
                "run": run_dir.name,
                "label": config.label,
                "split": stream.split,
                "held_out": config.data.held_out,
                "order": config.scenario.order,
                "seed": config.seed,
                "steps": list(sizes),
                "variant": variant.name,
                "settings": asdict(variant),
                "lambda": strength,
                **{name: metrics[name] for name in METRICS},
                "confusions": [confusion.tolist() for confusion in confusions],
            }


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One table for each label and way of cutting: mean ± deviation, then the paired difference."""
    out = []
    for group in dict.fromkeys((line["label"], line["split"], tuple(line["steps"])) for line in lines):
        own = [line for line in lines if (line["label"], line["split"], tuple(line["steps"])) == group]
        out += ["", f"{group[0]}, split {group[1]}, steps {'-'.join(map(str, group[2]))}", ""]
        out += [f"| | {' | '.join(SHOWN)} | {' | '.join(f'Δ {name}' for name in SHOWN)} |", "|---" * 7 + "|"]
        reference = [_summary(own, VARIANTS[0].name, metric) for metric in SHOWN.values()]
        for name in dict.fromkeys(line["variant"] for line in own):
            cells = [_summary(own, name, metric) for metric in SHOWN.values()]
            shown = [f"{c.mean:.1f} ± {c.deviation or 0:.1f}" for c in cells]
            less = [c.minus(r) for c, r in zip(cells, reference, strict=True)]
            shown += [f"{d.mean:+.1f} {_bounds(d)}" for d in less]
            out.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(out)


def _summary(lines: Sequence[Mapping[str, Any]], variant: str, metric: str) -> Summary:
    own = [line for line in lines if line["variant"] == variant]
    return Summary.averaged((str(line["order"]), 100 * line[metric]) for line in own)


def _bounds(difference: Summary) -> str:
    bounds = difference.interval
    return "" if bounds is None else f"[{bounds[0]:+.1f}, {bounds[1]:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--steps", action="append", help="classes of each task, such as 3,2,2")
    parser.add_argument("--root", type=Path, help="the images, where they have moved")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    steps = [[int(size) for size in cut.split(",")] for cut in options.steps or ["3,2,2"]]
    changes = {} if options.root is None else {"root": options.root}
    for run in options.runs:
        with options.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in ablate(run, steps, changes))
    if options.table:
        print(table([json.loads(line) for file in options.table for line in file.open()]))


if __name__ == "__main__":
    main()
