"""From outside the package, a dataset, method, loss, readout or metric costs one thing and one line."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import medcil
from medcil import build
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.samples import TensorImages
from medcil.data.sources import DATASETS, Dataset
from medcil.errors import InvalidInput
from medcil.experiments.run import run_experiment
from medcil.methods import METHODS, terms
from medcil.methods.protocol import Classification, Increment, Phase, new_class_weights
from medcil.metrics.catalogue import METRICS, Metric
from medcil.metrics.incremental import AccuracyMatrix
from medcil.models.network import Network
from medcil.readouts import READOUTS, Readout, ReadoutName
from medcil.report.runs import read_run

CLASSES = ("dark", "dim", "bright", "white")
RECIPE = """
data: {name: grays, side: 12, crop: 10}
scenario: {base: 2, increment: 2}
network: {backbone: resnet8_cifar}
memory: {per_class: 4}
training: {epochs: 2, batch_size: 16}
method:
  name: newcomer
  readout: reversed
  plugins: {classification: {kind: gentle, weight: 0.0}}
execution: {device: cpu, threads: 1}
"""


def draw_grays(side: int) -> ImageTable:
    """Draw eight images of each class for training and four for the test."""
    labels = np.tile(np.repeat(np.arange(4), 4), 3)
    pixels = torch.from_numpy(60 * labels + 20).to(torch.uint8)[:, None, None, None].expand(-1, 3, side, side)
    return ImageTable(
        files=MemoryFiles({}),
        names=tuple(f"{i}.png" for i in range(len(labels))),
        labels=labels,
        class_names=CLASSES,
        is_test=np.arange(len(labels)) >= 32,
        pixels=TensorImages(pixels.clone()),
    )


@dataclass(frozen=True)
class Newcomer:
    """Cross-entropy on the new images and the exemplars."""

    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        yield Phase("learn", {"classification": terms.cross_entropy()}, network.every_parameter())


def gentle(*, weight: float = 1.0) -> Classification:
    """Weigh the cross-entropy."""
    return Classification(
        lambda batch: weight * F.cross_entropy(batch.out.logits, batch.labels),
        terms.cross_entropy().log_prior,
    )


class Reversed(Readout):
    """The negative logits: the class that the classifier holds least likely."""

    kind = "reversed"

    def scores(self, out, *, views=1):
        return -out.logits


def weighted_misses(matrix: AccuracyMatrix) -> float:
    return float(sum(place * (1 - recall) for place, recall in enumerate(matrix.recall[-1], 1)))


THINGS: dict[str, tuple[str, Any]] = {
    "dataset": ("grays", Dataset("Gray squares", CLASSES, ((0, 1, 2, 3),), ("2-2",), draw=draw_grays)),
    "method": ("newcomer", Newcomer),
    "loss": ("classification.gentle", gentle),
    "readout": ("reversed", Reversed),
    "metric": ("misses", Metric(weighted_misses, "Weighted misses", "later classes count more")),
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test add to the tables, and forget it."""
    tables: list[Mapping[str, Any]] = [DATASETS, METHODS, READOUTS, METRICS, *build.PLUGINS.values()]
    for table in tables:
        for name in table:
            monkeypatch.setitem(table, name, table[name])
    yield
    for table in tables:
        for name, _ in THINGS.values():
            table.pop(name.rpartition(".")[2], None)


def test_a_run_uses_one_of_each_from_outside_the_package(tmp_path: Path) -> None:
    for kind, (name, thing) in THINGS.items():
        medcil.register(kind, name, thing)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    metrics = run_experiment(build.load_recipe(tmp_path / "recipe.yaml"), tmp_path / "run")
    assert metrics["class_names"] == list(CLASSES)
    assert metrics["method"] == "newcomer"
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    recalls = [row[c] / sum(row) for c, row in enumerate(written["steps"][-1]["confusion"])]
    expected = sum(place * (1 - recall) for place, recall in enumerate(recalls, 1))
    assert expected > 1
    assert metrics["misses"] == written["misses"] == pytest.approx(expected)
    assert read_run(tmp_path / "run").summary["misses"] == pytest.approx(expected)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    reached = [record["losses"]["classification"] for record in log if record["task"] == 2]
    assert reached == [0, 0]  # the plug-in weighs it with 0
    state = medcil.load_state(tmp_path / "run" / "tasks" / "02" / "state")
    assert type(state.readout) is Reversed
    page = (tmp_path / "run" / "config.yaml").read_text()
    assert "kind: gentle" in page


@pytest.mark.parametrize("kind", THINGS)
def test_a_name_that_exists_is_refused(kind: str) -> None:
    name, thing = THINGS[kind]
    medcil.register(kind, name, thing)
    with pytest.raises(InvalidInput) as refused:
        medcil.register(kind, name, thing)
    assert refused.value.code == "config.registry.exists"
