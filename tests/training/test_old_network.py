"""The old network's answers: looked up where an image has only two views, and the same as computed anew."""

from dataclasses import replace

import pytest
import torch

from medcil.data.transforms import Preprocessing
from medcil.methods import METHODS, terms
from medcil.methods.balanced import Balanced
from medcil.methods.protocol import WithTerms
from medcil.models.network import Network
from medcil.training import old_network as module
from medcil.training.loop import learn_task
from medcil.training.state import State

from ..small import SIDE, SMALLEST, new_state, short_training, task_of

N_IMAGES = 7 + 4 + 2 * 4  # of the second task, exemplars included
IMPRINTED = N_IMAGES  # new classes' weights come from the network as it is then, still frozen
EXAMPLE = 2
WHOLE = Preprocessing(side=SIDE, crop=SIDE)
EACH_ONCE = Balanced(sampler=None)  # the recipe's: an epoch has all N_IMAGES


def second_task(method, *, epochs: int, preprocessing=WHOLE) -> tuple[State, int]:
    """After learning it, and how many images went through the old network's features meanwhile."""
    config = short_training(training={"epochs": epochs, "batch_size": 8})
    start = replace(new_state(spec=SMALLEST), preprocessing=preprocessing)
    first = learn_task(start, task_of([6, 5]), method, config)
    n_seen = 0
    original = Network.features

    def counting(network, images):
        nonlocal n_seen
        is_frozen = not any(parameter.requires_grad for parameter in network.parameters())
        n_seen += len(images) if is_frozen else 0
        return original(network, images)

    Network.features = counting
    try:
        after = learn_task(first, task_of([7, 4], n_old=2), method, config)
        return after, n_seen - IMPRINTED
    finally:
        Network.features = original


def difference(one: State, other: State) -> float:
    pairs = zip(one.network.state_dict().values(), other.network.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())


@pytest.mark.parametrize("name", ["balanced", "icarl", "ucir", "lo2ln", "bic", "ssil"])
def test_answers_looked_up_are_those_computed(name, monkeypatch):
    method = METHODS[name]()
    remembered, n_seen = second_task(method, epochs=6)
    monkeypatch.setattr(module, "LEAST_EPOCHS", 10**6)
    computed, n_computed = second_task(method, epochs=6)
    assert n_seen < n_computed
    assert difference(remembered, computed) < 1e-5


def test_every_image_is_asked_about_twice_in_all_epochs_together():
    _, n_seen = second_task(Balanced(), epochs=8)
    assert n_seen == 2 * N_IMAGES + EXAMPLE


@pytest.mark.parametrize(
    ("method", "epochs", "preprocessing"),
    [
        (EACH_ONCE, 3, WHOLE),  # too few epochs to be worth it
        (EACH_ONCE, 6, Preprocessing(side=SIDE, crop=SIDE - 1)),  # crops move
        (EACH_ONCE, 6, Preprocessing(side=SIDE, crop=SIDE, augmentation="resized_crop")),
        (EACH_ONCE, 6, Preprocessing(side=SIDE, crop=SIDE, augmentation="dihedral")),  # eight views
        (WithTerms(EACH_ONCE, {"pod": terms.pod_spatial(weight=1.0)}), 6, WHOLE),  # maps are not remembered
    ],
)
def test_otherwise_it_runs_in_every_epoch(method, epochs, preprocessing):
    _, n_seen = second_task(method, epochs=epochs, preprocessing=preprocessing)
    assert n_seen - epochs * N_IMAGES in (0, EXAMPLE)


def test_a_method_that_asks_nothing_of_it_never_runs_it():
    assert second_task(METHODS["replay"](), epochs=6)[1] == 0


def test_looking_at_what_terms_read_leaves_training_as_it_is(monkeypatch):
    method = WithTerms(Balanced(), {"pod": terms.pod_spatial(weight=1.0)})
    looked_at, _ = second_task(method, epochs=6)
    monkeypatch.setattr(module, "LEAST_EPOCHS", 10**6)
    not_looked_at, _ = second_task(method, epochs=6)
    assert difference(looked_at, not_looked_at) == 0
    assert torch.equal(looked_at.readout.class_means, not_looked_at.readout.class_means)
