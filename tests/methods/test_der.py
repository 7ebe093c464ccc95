"""DER: an extractor more for every task, an auxiliary classifier while it learns, a balanced one after it."""

import math

import pytest
import torch

from medcil.methods.der import DER
from medcil.models.network import NetworkSpec
from medcil.training.state import load_state, save_state

from ..small import new_state, random_images, task_of
from .by_hand import (
    DIM,
    batch_of,
    cross_entropy,
    labels_drawn_from_exemplars,
    learned,
    mean,
    names_of,
    phases_of,
    tiny_network,
    under,
)

LINEAR = NetworkSpec("resnet8_cifar", last_relu=True, learn_scale=True, classifier="linear")


def three_tasks():
    return task_of([6, 5]), task_of([7, 4], n_old=2, seed=1), task_of([5], n_old=4, seed=2)


def test_every_task_after_the_first_adds_an_extractor_that_begins_as_a_copy_of_the_newest():
    state, chapters = learned(DER(), *three_tasks())
    assert state.network.spec().n_branches == 2
    assert state.network.classifier.dim == 3 * DIM
    before = chapters["learn"].before
    newest = {name.removeprefix("branches.1."): before[name] for name in under("branches.1.", before)}
    copied = {name.removeprefix("branches.0."): before[name] for name in under("branches.0.", before)}
    assert newest.keys() == copied.keys()
    assert all(torch.equal(newest[name], copied[name]) for name in newest)
    # A whole extractor: as many tensors as the backbone, from the first convolution on.
    assert newest.keys() == {n.removeprefix("backbone.") for n in under("backbone.", before)}


def test_older_extractors_are_bit_for_bit_what_they_were():
    _, chapters = learned(DER(balance_share=1.0), *three_tasks())
    for chapter in chapters.values():
        assert under("backbone.", chapter.before) | under("branches.0.", chapter.before)
        assert not {name for name in chapter.moved if name.startswith(("backbone.", "branches.0."))}
    # The newest with its batch-norm statistics, and the whole classifier, do move.
    learn = chapters["learn"]
    assert under("branches.1.", learn.before) <= learn.moved
    assert {f"classifier.blocks.{task}.{branch}" for task in range(3) for branch in range(3)} <= learn.moved
    assert "classifier.scale" in learn.moved


def test_the_auxiliary_classifier_tells_new_classes_apart_and_old_ones_as_one():
    network = tiny_network(3)
    phase = phases_of(DER(), 3, 2, network=network)["learn"]
    assert network.auxiliary is not None
    assert network.auxiliary.weight.shape == (1 + 2, DIM)
    labels = [0, 3, 4, 1, 2, 4]
    batch = batch_of(labels, (3, 2), n_auxiliary=3)
    assert batch.out.auxiliary_logits is not None
    expected = cross_entropy(batch.out.auxiliary_logits.tolist(), [0, 1, 2, 0, 0, 2])
    assert set(phase.terms) == {"classification", "auxiliary"}
    assert phase.terms["auxiliary"](batch).item() == pytest.approx(expected, rel=1e-5)
    assert phase.classification(batch).item() == pytest.approx(
        cross_entropy(batch.out.logits.tolist(), labels), rel=1e-5
    )


def test_the_auxiliary_classifier_reads_the_newest_extractor_alone():
    network = tiny_network(3).eval()
    phases_of(DER(), 3, 2, network=network)
    images = random_images(3).float() / 255
    with torch.no_grad():
        before = network(images)
        for parameter in network.backbone.parameters():
            parameter.mul_(1.5)
        after = network(images)
    assert not torch.equal(before.embedding[:, :DIM], after.embedding[:, :DIM])
    assert torch.equal(before.auxiliary_logits, after.auxiliary_logits)


def test_the_auxiliary_classifier_moves_while_it_learns_and_is_not_kept(tmp_path):
    state, chapters = learned(DER(), *three_tasks())
    learn = chapters["learn"]
    assert under("auxiliary.", learn.before) <= learn.moved
    assert under("auxiliary.", learn.before)
    assert not under("auxiliary.", state.network.state_dict())
    save_state(state, tmp_path / "state")
    assert not under("auxiliary.", load_state(tmp_path / "state").network.state_dict())


def test_a_scale_that_is_held_is_held_in_the_auxiliary_classifier_too():
    held = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=False, scale=5.0)
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(DER(), *tasks, state=new_state(spec=held))
    assert not {name for name in chapters["learn"].moved if name.endswith("scale")}


def test_balancing_is_cross_entropy_of_cooled_logits_for_three_tenths_of_the_epochs():
    labels = [0, 3, 4, 1]
    batch = batch_of(labels, (3, 2))
    phase = phases_of(DER(), 3, 2)["balance"]
    cooled = [[z / 5 for z in row] for row in batch.out.logits.tolist()]
    assert set(phase.terms) == {"classification"}
    assert phase.classification(batch).item() == pytest.approx(cross_entropy(cooled, labels), rel=1e-5)
    assert phase.part == "exemplars"
    training = phase.training
    assert training is not None
    assert (training.epochs, phase.rates) == (30, {"classifier": 0.1})
    assert (training.schedule, training.milestones, training.decay) == ("milestones", (0.5,), 0.1)


def test_cooled_logits_carry_the_prior_times_the_temperature():
    phase = phases_of(DER(temperature=5.0), 3, 2)["balance"]
    counts = batch_of([0], (3, 2), drawn=[4, 4, 2, 8, 1]).counts
    expected = [5 * math.log(n) for n in (4, 4, 2, 8, 1)]
    assert phase.classification.log_prior(counts, 3).tolist() == pytest.approx(expected, abs=1e-5)


def test_balancing_moves_the_classifier_alone():
    _, chapters = learned(DER(balance_share=1.0), *three_tasks())
    balance = chapters["balance"]
    assert balance.moved == under("classifier.", balance.before)


@pytest.mark.parametrize("sampler", ["plain", "balanced"])
@pytest.mark.parametrize(("memory", "each"), [({"per_class": 4}, 4), ({"total": 12}, 3)])
def test_balancing_draws_as_many_exemplars_of_every_class_each_once(memory, each, sampler):
    method = DER(balance_share=1.0)
    found = labels_drawn_from_exemplars(method, "balance", memory=memory, sampler=sampler)
    assert found == sorted(each * [0, 1, 2, 3])


def test_the_first_task_is_plain_cross_entropy_on_one_extractor():
    network = tiny_network()
    phases = phases_of(DER(), 0, 3, network=network)
    assert list(phases) == ["learn"]
    assert set(phases["learn"].terms) == {"classification"}
    assert network.auxiliary is None
    assert network.spec().n_branches == 0


def test_without_a_share_of_the_epochs_there_is_no_balancing():
    assert list(phases_of(DER(balance_share=0), 3, 2)) == ["learn"]


def test_the_original_draws_the_classifier_anew_after_warming_up_and_before_balancing():
    method = DER(warm_up_share=1.0, reset_classifier=True, balance_share=1.0)
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(method, *tasks, state=new_state(spec=LINEAR))
    assert list(chapters) == ["warm-up", "learn", "balance"]
    weights = {f"classifier.blocks.{task}.{branch}" for task in range(2) for branch in range(2)}
    bound = 1 / math.sqrt(2 * DIM)
    for earlier, later in (("warm-up", "learn"), ("learn", "balance")):
        left, found = chapters[earlier].after, chapters[later].before
        # The auxiliary classifier starts anew too, once.
        anew = weights | ({"auxiliary.blocks.0.0"} if later == "learn" else set())
        assert {name for name in found if not torch.equal(left[name], found[name])} == anew
        drawn = [x for name in weights for x in found[name].flatten().tolist()]
        assert max(map(abs, drawn)) <= bound
        assert mean([x * x for x in drawn]) == pytest.approx(bound**2 / 3, rel=0.2)
    assert not torch.equal(*(chapters[name].before["classifier.blocks.0.0"] for name in ("learn", "balance")))


def test_without_the_original_settings_the_classifier_is_kept():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(DER(), *tasks)
    assert list(chapters) == ["learn", "balance"]
    left, found = chapters["learn"].after, chapters["balance"].before
    assert all(torch.equal(left[name], found[name]) for name in found)


def test_without_balancing_the_trained_classifier_is_kept_even_where_it_would_be_drawn_anew():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    state, chapters = learned(DER(reset_classifier=True, balance_share=0), *tasks)
    assert list(chapters) == ["learn"]
    left, found = chapters["learn"].after, state.network.state_dict()
    weights = under("classifier.", found)
    assert weights
    assert all(torch.equal(left[name], found[name]) for name in weights)


def test_warming_up_trains_as_learning_does_and_does_not_slow_down():
    network = tiny_network(3)
    phases = phases_of(DER(warm_up_share=0.1), 3, 2, network=network)
    warm_up, learn = phases["warm-up"], phases["learn"]
    assert dict(warm_up.terms) == dict(learn.terms)
    for rate in ("backbone", "classifier"):
        assert names_of(warm_up.params[rate], network) == names_of(learn.params[rate], network)
    assert warm_up.training is not None
    assert warm_up.training.epochs == 10
    assert warm_up.training.schedule == "milestones"
    assert all(round(m * 10) >= 10 for m in warm_up.training.milestones)
