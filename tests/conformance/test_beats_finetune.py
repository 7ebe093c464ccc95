"""Two steps of `phantom`: every method remembers more than fine-tuning does."""

from functools import cache

import pytest
import torch

from medcil.build import RunConfig, Stream, build_state, build_stream, parse_recipe
from medcil.methods import METHODS
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task

RECIPE = {
    "data": {"name": "phantom", "side": 36, "crop": 32},
    "scenario": {"base": 3, "increment": 2, "order": 0},
    "network": {"backbone": "resnet8_cifar"},
    "memory": {"per_class": 10},
    "training": {"epochs": 16, "learning_rates": {"classifier": 0.1, "backbone": 0.05}},
    "execution": {"device": "cpu", "threads": 1},
}


@cache
def stream() -> Stream:
    return build_stream(config("finetune"))


def config(name: str) -> RunConfig:
    return parse_recipe({**RECIPE, "method": {"name": name}})


@cache
def recalls_after_two_steps(name: str) -> tuple[float, ...]:
    """Of the five classes, the three old ones first."""
    settings = config(name)
    state, tasks = build_state(settings), stream().tasks()
    test = None
    for _ in range(2):
        task = next(tasks)
        test = task.test if test is None else test + task.test
        state = learn_task(state, task, settings.method, settings)
    is_right = predict_scores(state, test, settings.execution).argmax(dim=1) == test.labels
    return tuple(is_right[test.labels == label].float().mean().item() for label in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "finetune"])
def test_a_method_beats_fine_tuning_on_balanced_accuracy_and_on_old_classes(name):
    recalls, finetuned = recalls_after_two_steps(name), recalls_after_two_steps("finetune")
    assert sum(recalls) / 5 > sum(finetuned) / 5 + 0.05, (recalls, finetuned)
    assert sum(recalls[:3]) > sum(finetuned[:3])


@pytest.mark.slow
def test_fine_tuning_learns_the_new_classes_and_forgets_the_old_ones():
    """Otherwise it would be no opponent."""
    *old, _, _ = recalls = recalls_after_two_steps("finetune")
    assert max(old) < 0.1 < 0.5 < max(recalls)
    assert torch.tensor(recalls).isfinite().all()
