"""What is read out of trained networks is what the method, trained and asked as a run, says."""

import csv
import io
import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medcil.cli.main import main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs"))
import readouts

SUITE = """
title: Read-outs
metrics: {Acc: acc_micro}
orders: [seed-1]
common:
  data: {name: own, side: 32, crop: 28, split: images, augmentation: dihedral}
  scenario: {base: 2, increment: 2}
  network: {backbone: resnet8_cifar}
  memory: {per_class: 5}
  training: {epochs: 2}
settings: {2-2: {}}
rows:
  balanced: {method: &balanced {name: balanced, distillation: kl}}
  Gaussians: &gaussians {method: {name: gaussians, base: *balanced, weight: 0.5, shrinkage: 0.3, favor: 0.5}}
  Gaussians in eight views: {<<: *gaussians, data: {views: 8}}
"""


def write_images(folder: Path) -> Path:
    """Four classes that are hard to tell apart: noise, each a little brighter than the one before."""
    random = np.random.default_rng(0)
    for c, name in enumerate("abcd"):
        (folder / name).mkdir(parents=True)
        for i in range(60):
            pixels = random.normal(100 + 4 * c, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.mark.slow
def test_a_read_out_is_what_the_method_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tried in (("SHRINKAGES", (0.3,)), ("WEIGHTS", (0.5,)), ("FAVORS", (0.0, 0.5))):
        monkeypatch.setattr(readouts, name, tried)
    (tmp_path / "tiny.yaml").write_text(SUITE)
    results, images = tmp_path / "results", write_images(tmp_path / "images")
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(tmp_path / "tiny.yaml"), "--data", str(images), "--out", str(results)])
    assert not ended.value.code
    runs = json.loads((results / "tiny" / "runs.json").read_text())["runs"]
    of_rows = {run["places"][0][0]: results / "runs" / run["key"] / "metrics.json" for run in runs}
    folder = tmp_path / "collected"
    readouts.collect(Namespace(results=results, suite="tiny", folder=folder, rows=["balanced"], orders=None))
    with redirect_stdout(io.StringIO()) as printed:
        readouts.write_table(Namespace(folder=folder))
    how = ("views", "means", "shrinkage", "weight", "favor")
    table = {
        tuple(line[key] for key in how): line for line in csv.DictReader(io.StringIO(printed.getvalue()))
    }
    found = [
        ("balanced", ("1", "none", "0.0", "0.0", "0.0")),
        ("Gaussians", ("1", "carried", "0.3", "0.5", "0.5")),
        ("Gaussians in eight views", ("8", "carried", "0.3", "0.5", "0.5")),
    ]
    for row, place in found:
        metrics = json.loads(of_rows[row].read_text())
        assert {name: table[place][name] for name in readouts.METRICS} == {
            name: f"{metrics[name]:.4f}" for name in readouts.METRICS
        }
    with pytest.raises(SystemExit, match="a run is read out by its classifier in one view"):
        readouts.collect(Namespace(results=results, suite="tiny", folder=folder, rows=None, orders=None))
    assert len({tuple(table[place][name] for name in readouts.METRICS) for _, place in found}) == 3
