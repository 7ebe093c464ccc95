"""LO2LN: branches on shared stages, epochs in turns, weights by the number of images, and its constants."""

import math
from itertools import pairwise

import pytest
import torch

from medcil.build import parse_recipe
from medcil.methods.lo2ln import LO2LN
from medcil.models.network import NetworkSpec

from ..small import task_of
from .by_hand import (
    DIM,
    batch_of,
    cosine,
    cross_entropy,
    divergence,
    learned,
    log_softmax,
    mean,
    moved,
    names_of,
    phases_of,
    ranking,
    tiny_network,
    under,
)

LABELS, SIZES = [0, 1, 2, 3, 4, 5, 1, 3], (3, 3)
AT_HAND = [20, 20, 12, 900, 300, 4]


def three_tasks():
    return task_of([6, 5]), task_of([7, 4], n_old=2, seed=1), task_of([5, 3], n_old=4, seed=2)


def later(method: LO2LN):
    return phases_of(method, 3, 3)["learn"]


def balanced_focal(rows, labels, counts, *, beta, gamma):
    """Weights (1 - β) / (1 - β^n), scaled to sum to the number of classes; mean over the batch."""
    raw = [(1 - beta) / (1 - beta**n) for n in counts]
    weights = [w * len(raw) / sum(raw) for w in raw]
    losses = []
    for row, label in zip(rows, labels, strict=True):
        log_p = log_softmax(row)[label]
        losses.append(-weights[label] * (1 - math.exp(log_p)) ** gamma * log_p)
    return mean(losses)


def test_a_branch_is_a_copy_of_the_newest_upper_stages():
    state, chapters = learned(LO2LN(), *three_tasks())
    spec = state.network.spec()
    assert (spec.n_branches, spec.shared_stages) == (2, 1)  # three stages, the lower half of them shared
    assert state.network.classifier.dim == 3 * DIM
    before = chapters["learn"].before
    copies = [
        {name.removeprefix(f"branches.{i}."): before[name] for name in under(f"branches.{i}.", before)}
        for i in (0, 1)
    ]
    assert copies[0].keys() == copies[1].keys()
    assert all(torch.equal(copies[0][name], copies[1][name]) for name in copies[0])
    n_upper = len(under("backbone.stages.1.", before)) + len(under("backbone.stages.2.", before))
    assert len(copies[1]) == n_upper < len(under("backbone.", before))


def test_a_resnet_18_shares_the_stages_up_to_its_second_layer():
    network = NetworkSpec("resnet18", last_relu=False, learn_scale=True).build()
    network.grow(torch.randn(2, 512))
    phases_of(LO2LN(), 2, 1, network=network)
    shapes = [tuple(p.shape) for p in network.branches[0].parameters()]
    assert shapes[0] == (256, 128, 3, 3)  # the first convolution of the third
    assert len(shapes) == 2 * 15  # two layers of 15 tensors each


def test_after_the_first_task_shared_stages_and_older_branches_are_bit_for_bit_frozen():
    _, chapters = learned(LO2LN(), *three_tasks(), training={"epochs": 3, "batch_size": 8})
    learn = chapters["learn"]
    frozen = under("backbone.", learn.before) | under("branches.0.", learn.before)
    assert any("running_mean" in name for name in frozen)
    for epoch in learn.epochs:
        assert not moved(learn.before, epoch) & frozen


def test_epochs_take_turns_in_what_they_move():
    _, chapters = learned(LO2LN(), *three_tasks(), training={"epochs": 4, "batch_size": 8})
    learn = chapters["learn"]
    states = [learn.before, *learn.epochs]
    new_branch = under("branches.1.", learn.before)
    assert new_branch
    # Blocks are classes by branches: here three tasks, three branches.
    new_dims_of_old = {"classifier.blocks.0.2", "classifier.blocks.1.2"}
    new_on_old_dims = {"classifier.blocks.2.0", "classifier.blocks.2.1"}
    for epoch, (before, after) in enumerate(pairwise(states), start=1):
        if epoch % 2 == 1:
            expected = new_branch | new_dims_of_old | new_on_old_dims
            expected |= {"classifier.blocks.2.2", "classifier.scale"}
        else:
            expected = new_on_old_dims | {"classifier.scale"}
        assert moved(before, after) == expected


def test_old_classes_on_old_branches_never_move():
    _, chapters = learned(LO2LN(), *three_tasks())
    old = {f"classifier.blocks.{task}.{branch}" for task in (0, 1) for branch in (0, 1)}
    assert old <= set(chapters["learn"].before)
    assert not old & chapters["learn"].moved


def test_without_turns_every_epoch_is_one_for_new_classes():
    assert later(LO2LN(alternate=False)).alternate is None
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(LO2LN(alternate=False), *tasks)
    first, second = chapters["learn"].epochs
    assert under("branches.0.", first) <= moved(first, second)


def test_the_classification_weighs_classes_by_the_images_there_are_of_them():
    batch = batch_of(LABELS, SIZES, at_hand=AT_HAND, drawn=[20, 20, 12, 400, 400, 400])
    rows = batch.out.logits.tolist()
    phase = later(LO2LN(focusing_new=1.0, beta_new=0.9, focusing_old=0.5, beta_old=0.999))
    new = balanced_focal(rows, LABELS, AT_HAND, beta=0.9, gamma=1.0)
    old = balanced_focal(rows, LABELS, AT_HAND, beta=0.999, gamma=0.5)
    assert phase.classification(batch).item() == pytest.approx(new, rel=1e-4)
    assert phase.alternate is not None
    assert phase.alternate.classification(batch).item() == pytest.approx(old, rel=1e-4)


@pytest.mark.parametrize("sampler", ["plain", "balanced"])
def test_these_are_the_exemplars_stored_and_the_new_images_whatever_the_sampler_draws(sampler):
    seen = []

    class Listening(LO2LN):
        def learn(self, network, increment):
            for phase in super().learn(network, increment):
                term = phase.classification

                def loss(batch, term=term):
                    seen.append((batch.counts.at_hand.tolist(), batch.counts.drawn.tolist()))
                    return term(batch)

                listening = type(term)(loss, term.log_prior)
                yield type(phase)(phase.name, {"classification": listening}, phase.params)

    tasks = task_of([6, 3]), task_of([9, 2], n_old=2, seed=1)
    training = {"epochs": 1, "batch_size": 8, "sampler": sampler}
    learned(Listening(alternate=False), *tasks, training=training)
    at_hand, drawn = seen[-1]
    assert at_hand == [4, 3, 9, 2]
    assert drawn == ([4, 3, 9, 2] if sampler == "plain" else [4, 3, 6, 6])


def test_the_auxiliary_loss_sees_unscaled_cosines_of_the_new_branch_with_its_columns():
    batch = batch_of(LABELS, SIZES, dim=7, branch_dim=3, at_hand=AT_HAND, scale=9.0)
    phase = later(LO2LN(beta_auxiliary=0.99, focusing_auxiliary=2.0))
    rows = [
        [cosine(h[-3:], w[-3:]) for w in batch.class_weights.tolist()] for h in batch.out.embedding.tolist()
    ]
    expected = balanced_focal(rows, LABELS, AT_HAND, beta=0.99, gamma=2.0)
    assert phase.terms["auxiliary"](batch).item() == pytest.approx(expected, rel=1e-4)
    plain = later(LO2LN())
    assert plain.terms["auxiliary"](batch).item() == pytest.approx(cross_entropy(rows, LABELS), rel=1e-4)


def test_the_auxiliary_loss_is_for_epochs_of_new_classes():
    phase = later(LO2LN())
    assert set(phase.terms) == {"classification", "auxiliary", "distillation", "ranking"}
    assert phase.alternate is not None
    assert set(phase.alternate.terms) == {"classification", "distillation", "ranking"}
    assert "auxiliary" not in later(LO2LN(use_auxiliary=False)).terms


@pytest.mark.parametrize("turn", ["new", "old"])
def test_both_turns_remember_by_distillation_and_ranking(turn):
    batch = batch_of(LABELS, SIZES)
    phase = later(LO2LN())
    terms = (phase if turn == "new" else phase.alternate).terms
    rows = [row[:3] for row in batch.out.logits.tolist()]
    kd = 2**2 * divergence(rows, batch.old.logits.tolist(), 2.0)
    assert terms["distillation"](batch).item() == pytest.approx(kd, rel=1e-4)
    apart = 10 * ranking(batch.out.cosine.tolist(), LABELS, n_old=3, n_rivals=2, margin=0.4)
    assert apart > 0
    assert terms["ranking"](batch).item() == pytest.approx(apart, rel=1e-4)


def test_a_lone_new_class_is_the_only_rival():
    labels = [0, 1, 3, 2]
    batch = batch_of(labels, (3, 1))
    phase = phases_of(LO2LN(), 3, 1)["learn"]
    expected = 10 * ranking(batch.out.cosine.tolist(), labels, n_old=3, n_rivals=1, margin=0.4)
    assert phase.terms["ranking"](batch).item() == pytest.approx(expected, rel=1e-4)


def test_the_first_task_is_plain_cross_entropy_and_moves_everything():
    network = tiny_network()
    (phase,) = phases_of(LO2LN(), 0, 3, network=network).values()
    assert set(phase.terms) == {"classification"}
    assert phase.alternate is None
    batch = batch_of([0, 2, 1], [3])
    expected = cross_entropy(batch.out.logits.tolist(), [0, 2, 1])
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)
    every = {name for name, _ in network.named_parameters()}
    assert names_of([p for group in phase.params.values() for p in group], network) == every


def test_new_classes_are_imprinted_on_all_branches():
    _, chapters = learned(LO2LN(), *three_tasks())
    before = chapters["learn"].before
    assert [tuple(before[f"classifier.blocks.2.{branch}"].shape) for branch in range(3)] == [(2, DIM)] * 3
    rows = torch.cat([before[f"classifier.blocks.2.{branch}"] for branch in range(3)], dim=1)
    old = [
        [x for branch in range(3) for x in before[f"classifier.blocks.{task}.{branch}"][row].tolist()]
        for task in range(2)
        for row in range(2)
    ]
    average = mean([math.sqrt(sum(x * x for x in row)) for row in old])
    lengths = [math.sqrt(sum(x * x for x in row)) for row in rows.tolist()]
    assert lengths == pytest.approx([average] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "gamma_new", "beta_new", "gamma_auxiliary", "beta_auxiliary", "n_rivals"),
    [
        ("cch5000", 0, 0, 2, 0.99, 2),
        ("ham10000", 1, 0.9, 0, 0, 2),
        ("eyepacs", 1, 0.99, 1, 0.9, 1),
    ],
)
def test_the_constants_of_each_dataset(
    preset, gamma_new, beta_new, gamma_auxiliary, beta_auxiliary, n_rivals
):
    recipe = {
        "data": {"name": "phantom"},
        "scenario": {"base": 3, "increment": 2},
        "method": {"name": "lo2ln", "preset": preset},
    }
    batch = batch_of(LABELS, SIZES, dim=7, branch_dim=3, at_hand=AT_HAND)
    phase = later(parse_recipe(recipe).method)
    logits, cosines = batch.out.logits.tolist(), batch.out.cosine.tolist()
    by_new_branch = [
        [cosine(h[-3:], w[-3:]) for w in batch.class_weights.tolist()] for h in batch.out.embedding.tolist()
    ]
    expected = {
        "classification": balanced_focal(logits, LABELS, AT_HAND, beta=beta_new, gamma=gamma_new),
        "auxiliary": balanced_focal(
            by_new_branch, LABELS, AT_HAND, beta=beta_auxiliary, gamma=gamma_auxiliary
        ),
        "distillation": 4 * divergence([z[:3] for z in logits], batch.old.logits.tolist(), 2.0),
        "ranking": 10 * ranking(cosines, LABELS, n_old=3, n_rivals=n_rivals, margin=0.4),
    }
    found = {name: term(batch).item() for name, term in phase.terms.items()}
    assert found == pytest.approx(expected, rel=1e-4)
    assert phase.alternate is not None
    of_old = balanced_focal(logits, LABELS, AT_HAND, beta=0.999, gamma=0.5)
    assert phase.alternate.classification(batch).item() == pytest.approx(of_old, rel=1e-4)
