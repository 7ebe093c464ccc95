"""What `train` and `update` print about the images and settings."""

import shutil
import time
from pathlib import Path

import pytest
import torch

import medcil
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.settings import Plan
from medcil.config import ExecutionConfig
from medcil.models.network import NetworkSpec
from medcil.recipe import leaves
from medcil.training.pace import STEPS, measure_pace

from .commands import run
from .generated import QUICK, write_counts, write_folder


def test_an_update_says_which_columns_it_recognized(of_patients, tmp_path, capsys):
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    new = write_folder(tmp_path / "new", "delta")
    rows = [f"{path.name},delta,{int(path.stem) // 3}" for path in new.glob("*/*.png")]
    (new / "delta.csv").write_text("\n".join(["Filename,Diagnosis,Patient-ID", *rows]))
    said = run(capsys, "update", model, new, "--dry-run")
    assert said.code == 0
    assert "columns: image ← Filename, class ← Diagnosis, patient ← Patient-ID" in said.out.splitlines()


def test_a_fifth_of_each_class_is_sealed_and_at_most_two_hundred(tmp_path, capsys):
    data = write_counts(tmp_path / "data", {"delta": 1010, "epsilon": 130, "zeta": 25})
    dry = ("train", data, "--out", tmp_path / "model", "--backbone", "resnet8_cifar", "--dry-run")
    said = run(capsys, *dry)
    assert said.code == 0
    counted = {line.split()[0]: line.split()[1:] for line in said.out.splitlines()[2:5]}
    assert counted == {"delta": ["810", "200"], "epsilon": ["104", "26"], "zeta": ["20", "5"]}
    warning = "A loss of less cannot be seen: 80 points of zeta (5 sealed). Add images, or give --eval."
    assert warning in said.out.splitlines()
    assert not (tmp_path / "model").exists()
    said = run(capsys, *dry, "--holdout", "10")
    assert "40 points of epsilon (10 sealed), 40 points of delta (10 sealed)" in said.out


@pytest.mark.parametrize("method", ["balanced", "analytic"])
def test_a_dry_run_of_training_says_what_training_does_and_writes_nothing(tmp_path, monkeypatch, method):
    """The time is that of given paces: in a second 100 images trained on, 1,000 embedded."""
    data = write_folder(tmp_path / "data", "alpha", "beta")
    monkeypatch.setattr("medcil.clinic.train.measure_pace", lambda network, **_: (100.0, 1000.0))
    plan = medcil.train(data, tmp_path / "model", **QUICK, method=method, dry_run=True)
    assert isinstance(plan, Plan)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    done = medcil.train(data, tmp_path / "model", **QUICK, method=method).provenance
    assert (plan.images, plan.holdout) == (done["images"], done["holdout"])
    settings = dict(leaves(done["settings"]))
    assert len(plan.choices) > 5
    for choice in plan.choices:
        if not isinstance(choice.value, dict) and not choice.key.startswith("execution."):
            assert settings[choice.key] == choice.value
    assert (plan.epochs, plan.images_per_epoch) == (2, 40)
    assert plan.seconds == pytest.approx(2 * 40 / 100 + (40 / 1000 if method == "analytic" else 0))


def test_a_pace_is_what_a_clock_says_and_the_network_stays_as_it_is(monkeypatch):
    network = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True).build()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    ticks = iter([10.0, 12.0, 20.0, 20.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    paces = measure_pace(network, crop=16, batch_size=4, execution=ExecutionConfig(device="cpu"))
    assert paces == (STEPS * 4 / 2.0, STEPS * 4 / 0.5)
    assert network.training
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_an_update_shows_what_it_inherits(of_patients, tmp_path, delta, capsys):
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    settings = ModelFolder(model).version().provenance()["settings"]

    def told(*options: object) -> dict[str, str]:
        said = run(capsys, "update", model, delta, "--dry-run", *options)
        rows = [line.strip().split(maxsplit=2) for line in said.out.splitlines()]
        return {row[0]: " ".join(row[1:]) for row in rows if len(row) == 3}

    shown = told()
    for key in ("data.side", "network.backbone", "memory.per_class", "method.name"):
        part, name = key.split(".")
        assert shown[key].startswith(f"{settings[part][name]} ")
        assert shown[key].endswith("inherited from v2")
    assert shown["--holdout"].endswith("inherited from v2")
    changed = told("--exemplars", "7", "--holdout", "3")
    assert changed["memory.per_class"].split() == ["7", "asked", "for"]
    assert "--holdout" not in changed
