"""A short seeded run logs the losses it always logged.

A difference means that a formula, a default of the loop, a random draw or the data changed. To write the
values anew, run this file's test with `-rP` and copy what it prints; legitimate only where such a change is
intended and said so in CHANGELOG.md, or where another version of numpy draws other synthetic images.
"""

import json
from pathlib import Path

import pytest

from medcil.build import RunConfig
from medcil.experiments.run import run_experiment

RECIPE = {
    "seed": 0,
    "data": {"name": "phantom", "side": 20, "crop": 16},
    "scenario": {"base": 4, "increment": 3, "order": [0, 1, 2, 3, 4, 5, 6]},
    "network": {"backbone": "resnet8_cifar", "scale": 1.0, "learn_scale": True, "last_relu": False},
    "memory": {"per_class": 20},
    "training": {
        "epochs": 2,
        "batch_size": 128,
        "learning_rates": {"classifier": 0.1, "backbone": 0.001},
        "schedule": "milestones",
        "milestones": [0.4, 0.8],
        "decay": 0.1,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "gradient_clamp": 5.0,
    },
    # Every hyper-parameter, so that a new default is not mistaken for a new formula.
    "method": {
        "name": "balanced",
        "alpha": 0.5,
        "margin_weight": 0.1,
        "margin_size": 0.4,
        "distillation": "l1",
        "distillation_weight": 0.1,
        "sampler": None,
        "first_task": "cross_entropy",
        "readout": "classifier",
    },
    "execution": {"device": "cpu", "threads": 1},
}

GOLDEN = [
    {"classification": 0.95318},
    {"classification": 0.69763},
    {"classification": 1.6966, "margin": 10.711, "distillation": 0.14763},
    {"classification": 1.4137, "margin": 4.5949, "distillation": 0.35337},
]


def test_the_losses_are_those_of_ever(tmp_path: Path) -> None:
    run_experiment(RunConfig.model_validate(RECIPE), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [record["losses"] for record in records]
    for line in losses:
        print({name: float(f"{value:.5g}") for name, value in line.items()})
    assert [(record["task"], record["epoch"]) for record in records] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    # Other processors and thread counts sum in another order: differences up to 2e-5 were seen.
    assert losses == [pytest.approx(line, rel=1e-3) for line in GOLDEN]
