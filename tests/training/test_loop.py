"""The loop: what moves, how fast, in which mode, and that an interruption changes nothing."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from medcil.config import TrainingConfig
from medcil.errors import MedcilError
from medcil.methods import terms
from medcil.methods.balanced import Balanced
from medcil.methods.finetune import Finetune
from medcil.methods.protocol import Classification, Increment, Phase, WithTerms, new_class_weights
from medcil.models.backbones import Backbone
from medcil.models.network import Network, NetworkSpec
from medcil.storage.run_dir import RunDir
from medcil.training import feed as feed_module
from medcil.training.checkpoint import FileJournal, Progress
from medcil.training.inference import class_means
from medcil.training.loop import learn_task, recalibrate
from medcil.training.sampling import Key, Purpose
from medcil.training.step import learning_rate_factor, set_moving

from ..small import (
    PREPROCESSING,
    SPEC,
    Interrupted,
    changed_names,
    content_of,
    new_state,
    plain_epoch,
    random_samples,
    short_training,
    steep,
    task_of,
    training_batches,
)

FULL_RATE = {"milestones": (1.0,), "momentum": 0.0, "weight_decay": 0.0}


@dataclass(frozen=True)
class Moving:
    """Moves only the parameters whose names begin with one of the prefixes."""

    prefixes: tuple[str, ...]
    loss: Classification
    readout: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        params = {
            part: [
                p
                for name, p in network.named_parameters()
                if name.startswith(part) and name.startswith(self.prefixes)
            ]
            for part in ("backbone", "classifier")
        }
        yield Phase("learn", {"classification": self.loss}, {name: ps for name, ps in params.items() if ps})


@dataclass(frozen=True)
class TwoPhases:
    """Learns everything, imprints the new classes once more, then learns the classifier alone."""

    readout: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        params = network.every_parameter()
        yield Phase("learn", {"classification": terms.cross_entropy()}, params)
        with torch.no_grad():
            network.classifier.blocks[-1][0].add_(increment.embeddings(increment.n_old).mean(dim=0))
        yield Phase(
            "balance", {"classification": terms.cil_balanced(alpha=0.5)}, {"classifier": params["classifier"]}
        )


def first_weights() -> torch.Tensor:
    """Of two classes in a first task with seed 0, before training."""
    random = Key(0).generator(Purpose.NEW_CLASSES)
    increment = Increment(0, 2, TrainingConfig(), lambda label: None, random)
    return new_class_weights(new_state().network, increment)


def two_tasks(config, method=None):
    first = learn_task(new_state(), task_of([6, 5]), Balanced(), config)
    task = task_of([7], n_old=2, seed=1)
    return first, task, learn_task(first, task, method or Balanced(), config)


def test_a_frozen_backbone_keeps_its_statistics_while_the_classifier_learns():
    state = new_state()
    before = content_of(state.network)
    after = learn_task(
        state, task_of([6, 5]), Moving(("classifier",), terms.cross_entropy()), short_training()
    )
    assert changed_names(before, content_of(after.network)) == {"classifier.scale"}
    assert not torch.equal(after.network.classifier.blocks[0][0], first_weights())


def test_only_the_parameters_of_the_phase_move():
    config = short_training()
    first, task, _ = two_tasks(config)
    prefixes = ("backbone.stages.0.0.0", "backbone.stages.1.0.bn1.weight", "classifier.blocks.1")
    before = content_of(first.network)
    after = learn_task(first, task, Moving(prefixes, terms.cross_entropy()), config)
    changed = changed_names(before, content_of(after.network))
    bn = "backbone.stages.1.0.bn1"
    assert changed == {
        "backbone.stages.0.0.0.weight",
        f"{bn}.weight",
        # In training mode since one of its parameters moves.
        *(f"{bn}.{buffer}" for buffer in ("running_mean", "running_var", "num_batches_tracked")),
    }


def test_the_given_state_is_left_as_it_is():
    first, task, after = two_tasks(short_training())
    before = content_of(first.network), first.memory.read_all().clone()
    learn_task(first, task, Balanced(), short_training())
    assert changed_names(before[0], content_of(first.network)) == set()
    assert torch.equal(first.memory.read_all(), before[1])
    assert after.class_names == ("class 0", "class 1", "class 2")


def two_stages() -> Backbone:
    stages = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.ReLU()))
        for _ in range(2)
    )
    return Backbone(stages, nn.BatchNorm1d(4, affine=False), num_features=4, last_relu=False)


def test_a_module_is_in_training_mode_when_one_of_its_parameters_moves():
    network = Network(NetworkSpec("custom", last_relu=False, learn_scale=True), two_stages())
    network.grow(torch.randn(2, 4))
    moving = [network.backbone.stages[1][0].weight]
    set_moving(network, Phase("p", {"classification": terms.cross_entropy()}, {"backbone": moving}))
    in_training = {name for name, module in network.named_modules() if module.training}
    assert in_training == {
        "",  # the network itself
        "backbone",
        "branches",  # without parameters: follows what it stands in
        "backbone.stages",
        "backbone.pool",
        "backbone.stages.1",
        "backbone.stages.1.0",
        "backbone.stages.1.2",
        "backbone.stages.1.2.0",
        "backbone.stages.1.2.1",
    }
    assert [p for p in network.parameters() if p.requires_grad] == moving

    everything = Phase("p", {"classification": terms.cross_entropy()}, network.every_parameter())
    set_moving(network, everything)
    assert all(module.training for module in network.modules())
    assert all(parameter.requires_grad for parameter in network.parameters())

    classifier = {"classifier": [network.classifier.scale]}
    set_moving(network, Phase("p", {"classification": terms.cross_entropy()}, classifier))
    assert not any(module.training for module in network.backbone.modules())


@settings(deadline=None)
@given(
    epochs=st.integers(1, 40),
    milestones=st.lists(st.floats(0.05, 1), max_size=3),
    decay=st.floats(0.05, 1),
)
def test_milestones_multiply_by_the_decay(epochs, milestones, decay):
    training = TrainingConfig(epochs=epochs, milestones=tuple(milestones), decay=decay)
    for epoch in range(epochs):
        expected = 1.0
        for milestone in milestones:
            if epoch >= 1 and epoch >= round(milestone * epochs):  # an epoch at the full rate comes first
                expected *= decay
        assert learning_rate_factor(training, epoch) == pytest.approx(expected)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_even_a_short_training_begins_at_the_full_rate(epochs):
    assert learning_rate_factor(TrainingConfig(epochs=epochs, milestones=(0.1, 0.4)), 0) == 1


def test_the_published_schedule():
    training = TrainingConfig(epochs=100, milestones=(0.4, 0.8), decay=0.1)
    factors = [learning_rate_factor(training, epoch) for epoch in range(100)]
    assert factors == pytest.approx([1.0] * 40 + [0.1] * 40 + [0.01] * 20)


def test_a_cosine_falls_from_one_to_almost_zero():
    training = TrainingConfig(epochs=10, schedule="cosine")
    factors = [learning_rate_factor(training, epoch) for epoch in range(10)]
    assert factors == pytest.approx([(1 + math.cos(math.pi * e / 10)) / 2 for e in range(10)])
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)


def one_step(loss, **training) -> tuple[torch.Tensor, torch.Tensor]:
    """The class weights before and after one step on one batch."""
    rates = {"classifier": 1.0, "backbone": 0.0}
    config = short_training(
        training={"epochs": 1, "batch_size": 64, "learning_rates": rates, **FULL_RATE, **training}
    )
    after = learn_task(new_state(), task_of([6, 5]), Moving(("classifier.blocks",), loss), config)
    return first_weights(), after.network.classifier.blocks[0][0].detach()


@pytest.mark.parametrize(
    ("factor", "clamp", "step"), [(3.0, 5.0, 3.0), (1e4, 5.0, 5.0), (-1e4, 0.5, -0.5), (1e4, None, 1e4)]
)
def test_gradients_are_clamped(factor, clamp, step):
    before, after = one_step(steep(factor), gradient_clamp=clamp)
    torch.testing.assert_close(before - after, torch.full_like(before, step), atol=1e-2, rtol=1e-4)


def test_the_learning_rate_scales_a_step():
    before, after = one_step(steep(1.0), learning_rates={"classifier": 0.25, "backbone": 0.0})
    torch.testing.assert_close(before - after, torch.full_like(before, 0.25))


def test_weight_decay_shrinks_weights():
    before, after = one_step(steep(0.0), weight_decay=0.1)
    torch.testing.assert_close(after, 0.9 * before)


def test_momentum_adds_up():
    before, after = one_step(steep(1.0), epochs=3, momentum=0.5, learning_rates={"classifier": 1.0})
    torch.testing.assert_close(before - after, torch.full_like(before, 1 + 1.5 + 1.75))


@pytest.mark.parametrize("cause", ["rate", "loss"])
def test_divergence_says_to_lower_the_learning_rate(cause):
    rates = {"classifier": 1e38, "backbone": 1e38} if cause == "rate" else {}
    loss = terms.cross_entropy() if cause == "rate" else steep(math.nan)
    config = short_training(training={"epochs": 3, "batch_size": 4, "learning_rates": rates})
    with pytest.raises(MedcilError, match=r"diverged in epoch \d.* Lower training\.learning_rates"):
        learn_task(new_state(), task_of([6, 5]), Moving(("backbone", "classifier"), loss), config)


def test_a_network_that_is_not_finite_is_divergence_although_every_loss_is_finite():
    """Batch norm normalizes the huge activations away; its running variance overflows."""
    training = {"epochs": 1, "batch_size": 6, "learning_rates": {"backbone": 1e12}}
    with pytest.raises(MedcilError, match=r"diverged: network\.\S+running_var .*Lower training"):
        learn_task(new_state(), task_of([6, 5]), Balanced(), short_training(training=training))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Balanced(alpha=0.25), [math.log(4), math.log(4), 0.0]),
        (
            WithTerms(Balanced(sampler=None), {"classification": terms.cross_entropy()}),
            [math.log(4), math.log(3), math.log(7)],
        ),
        (Finetune(), [0.0, 0.0, math.log(7)]),
        (Balanced(readout="nearest_mean"), [0.0, 0.0, 0.0]),
    ],
    ids=["balanced", "cross-entropy", "finetune", "nearest mean"],
)
def test_the_prior_left_in_the_scores(method, expected):
    config = short_training(training={"epochs": 1, "batch_size": 16})
    first = learn_task(new_state(), task_of([6, 3]), Balanced(), config)
    assert first.readout.log_prior.tolist() == pytest.approx([math.log(6), math.log(3)])
    second = learn_task(first, task_of([7], n_old=2), method, config)
    assert second.readout.log_prior.tolist() == pytest.approx(expected)
    assert second.inherent_counts.tolist() == [6, 3, 7]


def test_terms_see_the_counts_of_the_images_drawn():
    seen = []

    def spy(batch):
        seen.append(
            (batch.counts.drawn.tolist(), batch.counts.inherent.tolist(), batch.n_old, len(batch.labels))
        )
        return terms.cross_entropy()(batch)

    config = short_training(training={"epochs": 1, "batch_size": 16})
    first = learn_task(new_state(), task_of([6, 3]), Balanced(), config)
    spying = Moving(("classifier",), Classification(spy, terms.cross_entropy().log_prior))
    learn_task(first, task_of([7], n_old=2), spying, config)
    assert seen == [([4, 3, 7], [6, 3, 7], 2, 14)]


def test_the_old_network_says_what_it_said():
    config = short_training(training={"epochs": 2, "batch_size": 16})
    first = learn_task(new_state(), task_of([6, 3]), Balanced(), config)
    expected = copy.deepcopy(first.network).eval()
    seen = []

    def spy(batch):
        seen.append((batch.old.logits, batch.old.embedding, batch.labels))
        return terms.cross_entropy()(batch)

    task = task_of([7], n_old=2)
    learn_task(
        first,
        task,
        Moving(("backbone", "classifier"), Classification(spy, terms.cross_entropy().log_prior)),
        config,
    )
    samples = task.train + first.memory
    plan = plain_epoch(14, Key(0, task=2, epoch=1), batch_size=16)
    feed = feed_module.Feed(samples, PREPROCESSING, torch.device("cpu"), config.execution)
    ((images, labels),) = training_batches(feed, plan)
    logits, embedding, seen_labels = seen[1]
    assert torch.equal(seen_labels, labels)
    with torch.no_grad():
        out = expected(images)
    torch.testing.assert_close(logits, out.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(embedding, out.embedding, atol=1e-5, rtol=1e-4)
    assert not logits.requires_grad


def test_the_first_task_has_no_old_network():
    loss = Classification(lambda batch: batch.old.logits.sum(), terms.cross_entropy().log_prior)
    with pytest.raises(LookupError, match="no old network in the first task"):
        learn_task(new_state(), task_of([6, 3]), Moving(("classifier",), loss), short_training())


def test_losses_are_means_over_the_images():
    seen, watched = [], []

    def spy(batch):
        loss = terms.cross_entropy()(batch)
        seen.append((loss.item(), len(batch.labels)))
        return loss

    config = short_training(training={"epochs": 1, "batch_size": 4})
    method = Moving(("classifier",), Classification(spy, terms.cross_entropy().log_prior))
    learn_task(new_state(), task_of([6, 3]), method, config, watch=watched.append)
    total = sum(loss * n for loss, n in seen) / sum(n for _, n in seen)
    assert sum(n for _, n in seen) == 9
    assert watched[-1].losses == pytest.approx({"classification": total}, rel=1e-5)
    assert [(w.step, w.steps) for w in watched] == [(1, 3), (2, 3), (3, 3), (3, 3)]


def test_the_memory_and_its_means_are_those_of_the_new_network():
    _, _, after = two_tasks(short_training())
    assert after.memory.class_counts(3).tolist() == [4, 4, 4]
    feed = feed_module.Feed(after.memory, PREPROCESSING, torch.device("cpu"), short_training().execution)
    expected = class_means(after.network, feed)
    torch.testing.assert_close(after.readout.class_means, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_memory_too_small_for_its_classes_is_empty(resident):
    config = short_training(memory={"total": 1}, execution={"device": "cpu", "resident": resident})
    first, _, second = two_tasks(config)
    assert len(first.memory) == len(second.memory) == 0


@pytest.mark.parametrize(("n", "batch_size"), [(1, 4), (3, 2), (5, 2), (9, 4)])
def test_no_batch_is_too_small_for_batch_norm(n, batch_size):
    # At 8 pixels the last maps of this network are 1 x 1: a batch of one image has no variance.
    spec = NetworkSpec("test_resnet", last_relu=False, learn_scale=True)
    config = short_training(training={"epochs": 1, "batch_size": batch_size})
    state = learn_task(new_state(spec=spec), task_of([n]), Balanced(), config)
    assert state.inherent_counts.tolist() == [n]


def test_recalibration_needs_no_full_last_batch(monkeypatch):
    monkeypatch.setattr(feed_module, "EVALUATION_BATCH", 4)
    state = new_state(spec=NetworkSpec("test_resnet", last_relu=False, learn_scale=True))
    recalibrate(state, random_samples([5]), short_training())
    norms = [module for module in state.network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.running_mean.any() and norm.running_mean.isfinite().all() for norm in norms)


@pytest.mark.parametrize("batch_norm", [None, "frozen"])
def test_frozen_statistics_are_learned_in_the_first_task_and_kept_from_then_on(batch_norm):
    spec = NetworkSpec("test_resnet", last_relu=False, learn_scale=True)
    config = short_training(training={"epochs": 1, "batch_size": 4, "batch_norm": batch_norm})
    fresh = new_state(spec=spec)
    first = learn_task(fresh, task_of([6, 6]), Balanced(), config)
    second = learn_task(first, task_of([6], n_old=2), Balanced(), config)

    def changed(before, after, kind):
        pairs = zip(kind(before.network.backbone), kind(after.network.backbone), strict=True)
        return [not torch.equal(old, new) for old, new in pairs]

    assert all(changed(fresh, first, nn.Module.buffers))
    assert set(changed(first, second, nn.Module.buffers)) == {batch_norm is None}
    assert all(changed(first, second, nn.Module.parameters))


@pytest.mark.parametrize(("momentum", "checkpoint_every"), [(0.9, 1), (0.0, 2)])
def test_an_interrupted_task_ends_like_an_uninterrupted_one(tmp_path, momentum, checkpoint_every):
    config = short_training(
        training={"epochs": 3, "batch_size": 8, "momentum": momentum},
        execution={"device": "cpu", "checkpoint_every": checkpoint_every},
    )
    first, task, _ = two_tasks(config)

    def learned(run, stop_at=None):
        def watch(progress: Progress) -> None:
            if stop_at == (progress.phase, progress.epoch, progress.step):
                raise Interrupted

        journal = FileJournal(run, 2, log_size_before=0)
        return learn_task(first, task, TwoPhases(), config, journal=journal, watch=watch)

    whole_run = RunDir(tmp_path / "whole")
    whole_run.root.mkdir()
    whole = learned(whole_run)
    assert len(whole_run.log_path.read_text().splitlines()) == 6
    for i, stop_at in enumerate([("learn", 0, 1), ("learn", 2, 2), ("balance", 0, 1), ("balance", 2, 1)]):
        run = RunDir(tmp_path / str(i))
        run.root.mkdir()
        with pytest.raises(Interrupted):
            learned(run, stop_at)
        resumed = learned(run)
        assert changed_names(content_of(whole.network), content_of(resumed.network)) == set()
        assert torch.equal(resumed.memory.read_all(), whole.memory.read_all())
        assert torch.equal(resumed.readout.class_means, whole.readout.class_means)
        assert run.log_path.read_bytes() == whole_run.log_path.read_bytes()


def test_streaming_learns_the_same():
    results = [
        two_tasks(short_training(execution={"device": "cpu", "resident": resident}))[-1]
        for resident in ("yes", "no")
    ]
    assert changed_names(*(content_of(state.network) for state in results)) == set()


def test_the_seed_matters():
    networks = [
        learn_task(new_state(), task_of([6, 3]), Balanced(), short_training(seed=seed)).network
        for seed in (0, 0, 1)
    ]
    contents = [content_of(network) for network in networks]
    assert changed_names(contents[0], contents[1]) == set()
    assert changed_names(contents[0], contents[2])


def test_learning_leaves_pytorchs_random_state_alone():
    before = torch.random.get_rng_state()
    learn_task(new_state(), task_of([6, 3]), Balanced(), short_training())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_held_scale_is_held():
    spec = NetworkSpec(SPEC.backbone, last_relu=False, learn_scale=False, scale=7.0)
    after = learn_task(new_state(spec=spec), task_of([6, 3]), Balanced(), short_training())
    assert after.network.classifier.scale.item() == 7.0


def test_views_leave_training_as_it_is():
    one = new_state()
    eight = replace(one, preprocessing=replace(one.preprocessing, views=8))
    for task in (task_of([6, 5, 4]), task_of([5, 4], n_old=3)):
        one, eight = (learn_task(state, task, Balanced(), short_training()) for state in (one, eight))
        assert changed_names(content_of(one.network), content_of(eight.network)) == set()
        assert torch.equal(one.readout.class_means, eight.readout.class_means)
        assert torch.equal(one.memory.read_all(), eight.memory.read_all())
