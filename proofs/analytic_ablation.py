"""What each part of the analytic learner brings, computed from the networks of finished runs.

    python proofs/analytic_ablation.py RUN... --steps 3,2,2 --steps 3,1,1,1,1 --out ablation.jsonl
    python proofs/analytic_ablation.py RUN... --only SLDA --only RanPAC --out family.jsonl
    python proofs/analytic_ablation.py --table ablation.jsonl

A run of `analytic` trains its network in the first task only. So the features of all its images are computed
once, and every variant (stages, copy, views, β, λ) is solved from columns of the same features, for every way
of cutting the classes into tasks. So is its family, SimpleCIL, SLDA, FeCAM, RanPAC, ACIL and AIR, by their
published settings. A line of the output is a variant of a run, with its confusion matrices.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medcil.build import RunConfig, build_stream
from medcil.data.samples import Samples
from medcil.data.stream import Stream
from medcil.data.transforms import views_of
from medcil.methods.acil import ACIL
from medcil.methods.ranpac import RIDGES
from medcil.metrics.catalogue import summarize
from medcil.metrics.classification import confusion_matrix
from medcil.readouts.discriminants import CosinePrototypes, LinearDiscriminants, MahalanobisDistances
from medcil.readouts.readout import ImageFeatures
from medcil.readouts.ridge import STRENGTHS, Ridge
from medcil.readouts.statistics import FeatureSpec, StatisticsReadout, draw_projection
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
    strength: float | None = 0.01
    """λ; None: chosen on the first task by leave-one-out."""
    n_random: int = 0
    solver: Literal["analytic", "simplecil", "slda", "fecam", "ranpac", "acil"] = "analytic"
    has_power: bool = False
    """Square roots of features after the last ReLU."""

    @property
    def is_alone(self) -> bool:
        """Whether the random features replace the others."""
        return self.solver in ("ranpac", "acil")


VARIANTS = [
    Variant("all parts, β .5"),
    *(Variant(f"β {balance:g}", balance=balance) for balance in (0, 0.25, 0.75, 1, 1.25)),
    Variant("λ by leave-one-out", strength=None),
    *(Variant(f"λ {strength:g}", strength=strength) for strength in (1e-3, 1e-1)),
    *(Variant(f"{views} views", views=views) for views in (1, 2, 4)),
    Variant("last stage", stages=1),
    Variant("last stage, β 1", stages=1, balance=1),
    Variant("last three stages", stages=3),
    Variant("last stage, adapted alone", stages=1, has_copy=False),
    Variant("last stage, adapted alone, β 0", stages=1, has_copy=False, balance=0),
    Variant("last stage, adapted alone, β 0, 1 view", stages=1, has_copy=False, balance=0, views=1),
    Variant("two stages, adapted alone", has_copy=False),
    Variant("two stages, adapted alone, 1 view", has_copy=False, views=1),
    Variant("last stage, pretrained alone", stages=1, has_adapted=False),
    Variant("two stages, pretrained alone", has_adapted=False),
    Variant("with 2,048 random features", n_random=2048),
]
FAMILY: dict[str, dict[str, Any]] = {
    "SimpleCIL": {"solver": "simplecil"},
    "SLDA": {"solver": "slda"},
    "FeCAM": {"solver": "fecam", "has_power": True},
    "FeCAM without power": {"solver": "fecam"},
    "RanPAC, M 2,048": {"solver": "ranpac", "n_random": 2048, "balance": 0},
    "RanPAC, M 10,000": {"solver": "ranpac", "n_random": 10_000, "balance": 0},
    "ACIL": {"solver": "acil", "n_random": 8192, "balance": 0},
    "AIR": {"solver": "acil", "n_random": 8192, "balance": 1},
}
VARIANTS += [Variant(name, **settings) for name, settings in FAMILY.items()]
VARIANTS += [
    Variant(f"{name}, last stage, adapted alone", stages=1, has_copy=False, **settings)
    for name, settings in FAMILY.items()
]
IMAGES = 256
"""Scored at a time."""


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
    roots: tuple[torch.Tensor, torch.Tensor]
    """Of training and test images: square roots, with the last stage after its ReLU; the same columns."""

    def columns(self, variant: Variant) -> torch.Tensor:
        n_stages = len(self.block_sizes)
        first = n_stages - min(variant.stages, n_stages) + 1
        starts = np.cumsum([0, *self.block_sizes]).tolist()
        chosen = [0, *range(first, n_stages)]
        own = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
        constant = torch.tensor([self.train.shape[2] - 1] if variant.solver == "analytic" else []).long()
        copy = [own + starts[-1]] if variant.has_copy and self.train.shape[2] > starts[-1] + 1 else []
        return torch.cat([*([own] if variant.has_adapted else []), *copy, constant]).to(self.train.device)


def compute_features(state: State, stream: Stream, config: RunConfig) -> Features:
    """Compute the features of all stages, in eight views."""
    device, readout = choose_device(config.execution), state.readout
    assert isinstance(readout, StatisticsReadout)
    network = state.network.to(device).eval().to(memory_format=torch.channels_last)
    every_stage = replace(readout.feature_spec, stages=99, n_random=0)
    in_stages = every_stage.relu  # other backbones have features below 0, and no roots of them
    specs = (every_stage, replace(every_stage, power=0.5) if in_stages else every_stage)
    readout.to(device).eval()
    preprocessing = replace(state.preprocessing, views=VIEWS)
    block_sizes: list[tuple[int, ...]] = []

    def features_of(samples: Samples) -> list[torch.Tensor]:
        parts: tuple[list[torch.Tensor], ...] = ([], [])
        with torch.no_grad(), Feed(samples, preprocessing, device, config.execution) as feed:
            for images in feed.evaluation_batches(torch.arange(len(samples)), views=VIEWS):
                with feed.precision():
                    out = network(views_of(images, VIEWS))
                for batches, readout.feature_spec in zip(parts, specs, strict=True):
                    features = readout.features(out)
                    batches.append(features.reshape(VIEWS, -1, features.shape[1]).transpose(0, 1))
                block_sizes[:] = [(out.embedding.shape[1], *(m.shape[1] for m in out.maps[:-1]))]
        return [torch.cat(batches) for batches in parts]

    arrival = torch.full((len(stream.order),), -1)
    arrival[torch.tensor(stream.order)] = torch.arange(len(stream.order))
    names = stream.train.groups
    train, test = features_of(stream.train), features_of(stream.test)
    return Features(
        train[0],
        arrival[stream.train.labels].to(device),
        [f"image {i}" for i in range(len(stream.train))] if names is None else names.tolist(),
        test[0],
        arrival[stream.test.labels].to(device),
        block_sizes[0],
        (train[1], test[1]),
    )


def random_features(variant: Variant, n_others: int) -> Callable[[torch.Tensor], torch.Tensor]:
    if not variant.n_random:
        return lambda rows: rows
    draw = {"ranpac": "normal", "acil": "uniform"}.get(variant.solver, "scaled_normal")
    drawn = draw_projection(FeatureSpec(n_random=variant.n_random, draw=draw), n_others, seed=0)

    def expanded(rows: torch.Tensor) -> torch.Tensor:
        random = torch.relu(rows @ drawn.to(rows))
        return random if variant.is_alone else torch.cat([rows, random], dim=2)

    return expanded


def new_readout(variant: Variant, n_features: int) -> StatisticsReadout:
    if variant.solver == "fecam":
        distances = MahalanobisDistances(n_features=n_features)
        # By a = 1 twice; the authors' settings for features that may be negative: a₁ = 1, a₂ = 0, once.
        distances.shrinkage = distances.shrinkage.new_tensor([3, 3] if variant.has_power else [1, 0])
        return distances
    kinds = {"simplecil": CosinePrototypes, "slda": LinearDiscriminants}
    readout = kinds.get(variant.solver, Ridge)(n_features=n_features, is_pooled=variant.solver != "analytic")
    if isinstance(readout, Ridge):
        readout.balance.fill_(variant.balance)
    return readout


def solve(
    readout: StatisticsReadout, variant: Variant, task: Mapping[int, ImageFeatures], *, is_first: bool
) -> None:
    if isinstance(readout, Ridge) and variant.solver == "ranpac":
        random = np.random.default_rng(0)
        readout.choose_on_part(task, ridges=RIDGES, random=random, and_sharpness=False)
    elif isinstance(readout, Ridge) and variant.solver == "acil":
        weights = readout.statistics.weights(variant.balance)
        readout.ridge.fill_(ACIL().strength * float(weights.mean()))
    elif isinstance(readout, Ridge) and is_first:
        readout.tune(task, strengths=STRENGTHS if variant.strength is None else (variant.strength,))
    readout.solve()


def confusions_by_step(
    features: Features, variant: Variant, sizes: Sequence[int]
) -> Iterator[tuple[np.ndarray, float | None]]:
    """Learn the tasks. Yield the confusions after each, and λ = ρ / mean variance where there is a ridge."""
    train, test = features.roots if variant.has_power else (features.train, features.test)
    columns = features.columns(variant)
    expand = random_features(variant, len(columns))
    readout: StatisticsReadout | None = None
    for n_old, n_seen in pairwise([0, *np.cumsum(sizes).tolist()]):
        task = {}
        for label in range(n_old, n_seen):
            own = torch.nonzero(features.train_labels == label).flatten()
            values = expand(train[own, : variant.views][:, :, columns])
            readout = readout or new_readout(variant, values.shape[2]).to(values.device)
            readout.add(values, label)
            if variant.solver == "ranpac" or n_old == 0:
                task[label] = ImageFeatures(values, [features.groups[i] for i in own.tolist()])
        assert readout is not None
        solve(readout, variant, task, is_first=n_old == 0)
        seen = torch.nonzero(features.test_labels < n_seen).flatten()
        predicted = []
        for part in seen.split(IMAGES):
            rows = expand(test[part, : variant.views][:, :, columns]).transpose(0, 1).flatten(0, 1)
            predicted.append(readout.scores_of(rows, views=variant.views).argmax(dim=1))
        confusion = confusion_matrix(
            features.test_labels[seen].cpu().numpy(), torch.cat(predicted).cpu().numpy(), n_seen
        )
        strength = None
        if isinstance(readout, Ridge):
            variances = readout.statistics.weighted_moments(variant.balance).diagonal()
            strength = float(readout.ridge / variances.mean())
        yield confusion, strength


def ablate(
    run_dir: Path, steps: Sequence[Sequence[int]], changes: Mapping[str, Any], variants: Sequence[Variant]
) -> Iterator[dict[str, Any]]:
    config = RunDir(run_dir).read_config(RunConfig)
    config = config.model_copy(update={"data": config.data.model_copy(update=dict(changes))})
    stream = build_stream(config)
    features = compute_features(load_state(RunDir(run_dir).task(1).state), stream, config)
    names = [stream.class_names[c] for c in stream.order]
    for variant in variants:
        for sizes in steps:
            confusions, strengths = zip(*confusions_by_step(features, variant, sizes), strict=True)
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
                "lambda": strengths[0],
                "lambdas": strengths,
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
        names = dict.fromkeys(line["variant"] for line in own)
        first = VARIANTS[0].name if VARIANTS[0].name in names else next(iter(names))
        reference = [_summary(own, first, metric) for metric in SHOWN.values()]
        for name in names:
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
    parser.add_argument("--only", action="append", default=[], help="variants whose names contain this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    steps = [[int(size) for size in cut.split(",")] for cut in options.steps or ["3,2,2"]]
    changes = {} if options.root is None else {"root": options.root}
    variants = [v for v in VARIANTS if not options.only or any(word in v.name for word in options.only)]
    for run in options.runs:
        with options.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in ablate(run, steps, changes, variants))
    if options.table:
        print(table([json.loads(line) for file in options.table for line in file.open()]))


if __name__ == "__main__":
    main()
