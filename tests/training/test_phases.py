"""What a phase may change of the loop: its images, its sampler, its training, every other epoch."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch

from medcil.methods import terms
from medcil.methods.protocol import Classification, Phase
from medcil.methods.replay import Replay
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import FileJournal
from medcil.training.feed import Feed
from medcil.training.loop import learn_task

from ..small import (
    SMALLEST,
    Interrupted,
    Scripted,
    changed_names,
    content_of,
    herd_by_hand,
    new_state,
    short_training,
    steep,
    task_of,
)

PLAIN = {"classification": terms.cross_entropy()}
FULL_RATE = {"milestones": (1.0,), "momentum": 0.0, "weight_decay": 0.0}


def learned(script, config, *, new=(7,), **options):
    """Two old classes of six and five images, then new ones, as the script says."""
    first = learn_task(new_state(spec=SMALLEST), task_of([6, 5]), Replay(), config)
    return learn_task(first, task_of(list(new), n_old=2, seed=1), Scripted(script), config, **options)


def spied(seen, note, classification=None) -> dict[str, Classification]:
    """Cross-entropy that adds to a list what is noted of every batch."""
    classification = classification or terms.cross_entropy()

    def loss(batch):
        seen.append(note(batch))
        return classification(batch)

    return {"classification": Classification(loss, classification.log_prior)}


@pytest.fixture
def drawn_orders(monkeypatch) -> list[list[int]]:
    """The samples that each epoch of training took, by their places among new images and memory."""
    orders = []

    def recording(feed, plan, begin=Feed.begin):
        orders.append(plan.order.tolist())
        begin(feed, plan)

    monkeypatch.setattr(Feed, "begin", recording)
    return orders


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("all", {0: 4, 1: 4, 2: 9, 3: 3}),
        ("new", {2: 9, 3: 3}),
        ("exemplars", {0: 4, 1: 4, 2: 4, 3: 3}),
        ("kept_back", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("rest", {0: 3, 1: 3, 2: 8, 3: 2}),
    ],
)
def test_a_phase_trains_on_its_part_of_the_images(part, expected, drawn_orders):
    labels, counts = [], []

    def script(network, increment):
        note = spied(labels, lambda batch: batch.labels.tolist())
        yield Phase("learn", note, network.every_parameter(), part=part)
        note = spied(counts, lambda batch: (batch.counts.drawn.tolist(), batch.counts.at_hand.tolist()))
        yield Phase("again", note, network.every_parameter(), part=part)

    state = learned(script, short_training(), new=[9, 3])
    assert Counter(label for batch in labels for label in batch) == {c: 2 * n for c, n in expected.items()}
    first, second, *again = drawn_orders[-4:]
    assert len({tuple(order) for order in (first, second, *again)}) == 4  # in another order each time
    assert set(first) == set(second)
    # The same images in a later phase, but for a herd, which the network has other thoughts about by now.
    assert [set(order) for order in again] == [set(again[0] if part == "exemplars" else first)] * 2
    drawn = [expected.get(c, 0) for c in range(4)]
    assert all(seen == (drawn, [4, 4, 9, 3]) for seen in counts)
    prior = [math.log(max(n, 1)) for n in drawn]
    assert state.readout.log_prior.tolist() == pytest.approx(prior)


def test_exemplars_are_herded_by_the_network_as_the_phase_finds_it(drawn_orders):
    """Not as it was before the phase that went before, which learned other features."""
    herds = []

    def script(network, increment):
        herds.append(herd_by_hand(increment.embeddings(2), 4))
        yield Phase("learn", PLAIN, network.every_parameter())
        herds.append(herd_by_hand(increment.embeddings(2), 4))
        yield Phase("balance", PLAIN, network.every_parameter(), part="exemplars")

    rates = {"backbone": 0.1}
    learned(script, short_training(training={"epochs": 2, "learning_rates": rates}), new=[40])
    before, after = herds
    assert set(before) != set(after)  # else this test would say nothing
    # New images come first, then the memory of four exemplars of each of two classes.
    assert [sorted(order) for order in drawn_orders[-2:]] == [sorted([*after, *range(40, 48)])] * 2


def test_a_phase_may_have_a_training_of_its_own():
    watched = []

    def script(network, increment):
        weights = {"classifier": list(network.classifier.blocks[1])}
        given.append(network.classifier.blocks[1][0].detach().clone())
        yield Phase("learn", {"classification": steep(1.0)}, weights)
        own = increment.training.changed(
            epochs=4, batch_size=4, learning_rates={"classifier": 1.0}, milestones=(0.5,), decay=0.1
        )
        yield Phase("balance", {"classification": steep(1.0)}, weights, training=own)
        yield Phase("end", {"classification": steep(1.0)}, weights)

    given = []
    rates = {"classifier": 0.25, "backbone": 0.0}
    config = short_training(training={"epochs": 2, "batch_size": 64, "learning_rates": rates, **FULL_RATE})
    after = learned(script, config, new=[8], watch=watched.append).network.classifier.blocks[1][0]
    # 16 images: one batch under the recipe; four under the phase's own, half of the epochs at a tenth.
    moved = 2 * 0.25 + 4 * (1.0 + 1.0 + 0.1 + 0.1) + 2 * 0.25
    torch.testing.assert_close(given[0] - after, torch.full_like(after, moved), atol=1e-4, rtol=1e-4)
    steps = [(w.phase, w.epoch, w.epochs, w.steps) for w in watched if w.losses]
    assert steps == [
        ("learn", 0, 2, 1),
        ("learn", 1, 2, 1),
        ("balance", 0, 4, 4),
        ("balance", 1, 4, 4),
        ("balance", 2, 4, 4),
        ("balance", 3, 4, 4),
        ("end", 0, 2, 1),
        ("end", 1, 2, 1),
    ]


def test_a_phase_may_have_rates_of_its_own_and_groups_that_no_recipe_knows():
    given = []

    def script(network, increment):
        old, new = (block[0] for block in network.classifier.blocks)
        given.extend(weights.detach().clone() for weights in (old, new))
        params = {"classifier": [old], "newest": [new]}
        yield Phase("learn", {"classification": steep(1.0)}, params, rates={"newest": 0.75})
        params = {"classifier": [old]}
        yield Phase("end", {"classification": steep(1.0)}, params, rates={"classifier": 0.5})

    rates = {"classifier": 0.25, "backbone": 0.0}
    config = short_training(training={"epochs": 2, "batch_size": 64, "learning_rates": rates, **FULL_RATE})
    blocks = learned(script, config).network.classifier.blocks
    for before, after, moved in zip(given, blocks, (2 * 0.25 + 2 * 0.5, 2 * 0.75), strict=True):
        torch.testing.assert_close(before - after[0], torch.full_like(before, moved))


def test_weights_multiply_the_losses_and_their_gradients_in_alternate_epochs_too():
    given, losses = [], []

    def script(network, increment):
        given.append(network.classifier.blocks[1][0].detach().clone())
        params = {"classifier": [network.classifier.blocks[1][0]]}
        parts = {"classification": steep(1.0), "margin": lambda batch: 0 * batch.out.logits.sum() + 8.0}
        alternate = Phase("learn", {**parts, "classification": steep(2.0)}, params)
        yield Phase(
            "learn", parts, params, weights={"classification": 0.25, "margin": 0.5}, alternate=alternate
        )

    def watch(progress):
        if progress.losses is not None and given:
            losses.append(progress.losses["margin"])

    rates = {"classifier": 1.0, "backbone": 0.0}
    config = short_training(training={"epochs": 2, "batch_size": 64, "learning_rates": rates, **FULL_RATE})
    after = learned(script, config, watch=watch).network.classifier.blocks[1][0]
    torch.testing.assert_close(given[0] - after, torch.full_like(after, 0.25 * 1.0 + 0.25 * 2.0))
    assert losses == [4.0, 4.0]


def test_a_method_knows_the_training_of_its_task():
    seen = []

    def script(network, increment):
        seen.append(increment.training)
        yield Phase("learn", PLAIN, network.every_parameter())

    config = short_training(training={"epochs": 1}, first_task={"epochs": 2})
    first = learn_task(new_state(spec=SMALLEST), task_of([6, 5]), Scripted(script), config)
    learn_task(first, task_of([7], n_old=2), Scripted(script), config)
    assert [training.epochs for training in seen] == [2, 1]
    assert seen[1] == config.training


def alternating(weight_decay=0.0, factor=1.0):
    """A script that moves old classes' weights, then new ones'; the scale in every epoch."""

    def script(network, increment):
        old, new = (list(block) for block in network.classifier.blocks)
        scale = network.classifier.scale
        # A gradient of `factor` everywhere, in the alternate epochs of twice that.
        terms_of = [
            {
                "classification": Classification(
                    lambda batch, f=f: f * (batch.class_weights.sum() + batch.scale),
                    terms.cross_entropy().log_prior,
                )
            }
            for f in (factor, 2 * factor)
        ]
        alternate = Phase("alternate", terms_of[1], {"classifier": [*new, scale]})
        yield Phase("learn", terms_of[0], {"classifier": [*old, scale]}, alternate=alternate)

    training = {"epochs": 5, "batch_size": 64, "learning_rates": {"classifier": 1.0, "backbone": 0.0}}
    return script, {**training, **FULL_RATE, "weight_decay": weight_decay, "gradient_clamp": None}


def change_of_weights(script, training):
    """Of old classes' weights, new ones' and the scale: before and after the second task."""
    found = []

    def reading(network, increment):
        found.append([block[0].detach().clone() for block in network.classifier.blocks])
        found[0].append(network.classifier.scale.detach().clone())
        yield from script(network, increment)

    classifier = learned(reading, short_training(training=training)).network.classifier
    return zip(found[0], [block[0] for block in classifier.blocks] + [classifier.scale], strict=True)


def test_every_other_epoch_trains_the_alternate_under_the_same_optimizer():
    """With momentum 0.5: of each parameter its own, untouched by the epochs in which it rests."""
    script, training = alternating()
    old, new, scale = change_of_weights(script, {**training, "momentum": 0.5})
    expected, velocity = {"old": 0.0, "new": 0.0, "scale": 0.0}, {"old": 0.0, "new": 0.0, "scale": 0.0}
    for epoch in range(5):
        for name in ("new", "scale") if epoch % 2 else ("old", "scale"):
            velocity[name] = 0.5 * velocity[name] + (2.0 if epoch % 2 else 1.0)
            expected[name] += velocity[name]
    assert expected["old"] == 1 + 1.5 + 1.75
    for (before, after), moved in zip((old, new, scale), expected.values(), strict=True):
        torch.testing.assert_close(before - after, torch.full_like(after, moved))


def test_what_rests_in_an_epoch_does_not_decay_in_it():
    script, training = alternating(weight_decay=0.1, factor=0.0)
    shares = [0.9**3, 0.9**2, 0.9**5]
    for (before, after), share in zip(change_of_weights(script, training), shares, strict=True):
        torch.testing.assert_close(after, share * before)


def with_a_branch(network, increment):
    """As LO2LN does it, with an auxiliary classifier, calibrations and a phase at the end besides."""
    network.add_branch(shared_stages=1)
    auxiliary = network.add_auxiliary(torch.full((2, 64), 0.1) + torch.eye(2, 64))
    calibration = network.classifier.calibrate(1, size=1)
    columns = [column for block in network.classifier.blocks for column in block]
    on_old_branches = {"classifier": [network.classifier.blocks[-1][0]]}
    remembering = {**PLAIN, "distillation": terms.distillation(weight=0.5, kind="kl")}
    yield Phase(
        "learn",
        {**PLAIN, "auxiliary": terms.auxiliary_cross_entropy()},
        {
            "backbone": list(network.newest_branch.parameters()),
            "classifier": [*columns, *auxiliary.parameters()],
        },
        alternate=Phase("learn", remembering, on_old_branches),
    )
    params = {"calibration": list(calibration.parameters())}
    yield Phase("correct", PLAIN, params, part="exemplars", rates={"calibration": 0.01})


def test_in_the_alternate_epochs_only_its_parameters_move_and_no_statistics():
    networks, snapshots, losses = [], [], []

    def script(network, increment):
        networks.append(network)
        for phase in with_a_branch(network, increment):
            snapshots.append(content_of(network))
            yield phase

    def watch(progress):
        if progress.losses is not None and progress.phase == "learn":
            losses.append(set(progress.losses))
            snapshots.append(content_of(networks[0]))

    rates = {"backbone": 0.01}
    config = short_training(training={"epochs": 5, "batch_size": 8, "learning_rates": rates})
    learned(script, config, watch=watch)
    changes = [changed_names(*pair) for pair in pairwise(snapshots)]
    branch = {name for name in snapshots[0] if name.startswith("branches.0.")}
    classifier = {f"classifier.blocks.{block}.{column}" for block in range(2) for column in range(2)}
    normal = branch | classifier | {"auxiliary.blocks.0.0", "auxiliary.scale"}
    assert any(name.endswith("running_mean") for name in branch)
    assert changes[:5] == [normal, {"classifier.blocks.1.0"}, normal, {"classifier.blocks.1.0"}, normal]
    auxiliary = {"classification", "auxiliary"}
    assert losses[:5] == [auxiliary, {"classification", "distillation"}] * 2 + [auxiliary]


def test_the_auxiliary_classifier_does_not_outlive_the_task():
    state = learned(with_a_branch, short_training())
    assert state.network.auxiliary is None
    assert not any(name.startswith("auxiliary") for name in state.network.state_dict())
    assert state.readout.class_means.shape == (3, 128)


class Runs:
    """Learns the same second task in new folders, interrupted where asked."""

    def __init__(self, folder, script, config) -> None:
        self.folder, self.method, self.config = folder, Scripted(script), config
        self.first = learn_task(new_state(spec=SMALLEST), task_of([6, 5]), Replay(), config)
        self.task = task_of([7], n_old=2, seed=1)

    def learned(self, name, stop_at=None):
        def watch(progress):
            if stop_at == (progress.phase, progress.epoch, progress.step):
                raise Interrupted

        run = RunDir(self.folder / name)
        run.root.mkdir(exist_ok=True)
        journal = FileJournal(run, 2, log_size_before=0)
        state = learn_task(self.first, self.task, self.method, self.config, journal=journal, watch=watch)
        return state, run.log_path.read_bytes()

    def check_resumed(self, stops):
        whole, log = self.learned("whole")
        for stop_at in stops:
            name = "-".join(map(str, stop_at))
            with pytest.raises(Interrupted):
                self.learned(name, stop_at)
            resumed, log_again = self.learned(name)
            assert changed_names(content_of(whole.network), content_of(resumed.network)) == set()
            assert torch.equal(resumed.memory.read_all(), whole.memory.read_all())
            assert torch.equal(resumed.readout.class_means, whole.readout.class_means)
            assert torch.equal(resumed.readout.log_prior, whole.readout.log_prior)
            assert log_again == log


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_learning_goes_on_after_an_interruption_in_either_kind_of_epoch(tmp_path, checkpoint_every):
    config = short_training(
        training={"epochs": 4, "batch_size": 8, "learning_rates": {"backbone": 0.01}},
        execution={"device": "cpu", "checkpoint_every": checkpoint_every},
    )
    runs = Runs(tmp_path, with_a_branch, config)
    runs.check_resumed([("learn", epoch, 2) for epoch in range(4)] + [("correct", 0, 1), ("correct", 2, 1)])


def with_an_empty_phase(network, increment):
    """There is no room for exemplars: the second phase has no image to train on."""
    yield Phase("learn", PLAIN, network.every_parameter())
    with torch.no_grad():
        network.classifier.blocks[-1][0].mul_(0.9)
    balanced = {"classification": terms.cil_balanced(alpha=0.25)}
    yield Phase("balance", balanced, network.every_parameter(), part="exemplars")
    with torch.no_grad():
        network.classifier.blocks[-1][0].add_(increment.embeddings(2).mean(dim=0))
    yield Phase("end", balanced, network.every_parameter(), part="new")


NO_MEMORY = {"memory": {"total": 1}, "training": {"epochs": 2, "batch_size": 4}}


def test_after_a_phase_without_images_learning_goes_on_after_an_interruption(tmp_path):
    runs = Runs(tmp_path, with_an_empty_phase, short_training(**NO_MEMORY))
    runs.check_resumed([("learn", 1, 1), ("end", 0, 1), ("end", 1, 1)])
    phases = {line.split(b'"phase": ')[1].split(b",")[0] for line in runs.learned("whole")[1].splitlines()}
    assert phases == {b'"learn"', b'"end"'}


def twice_of_one_name(network, increment):
    for _ in range(2):
        yield Phase("learn", PLAIN, network.every_parameter())


def test_phases_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    runs, seen = Runs(tmp_path, twice_of_one_name, short_training(**NO_MEMORY)), []
    lines = [json.loads(line) for line in runs.learned("whole")[1].splitlines()]
    expected = [("learn", 1, 1), ("learn", 1, 2), ("learn", 2, 1), ("learn", 2, 2)]
    assert [(line["phase"], line["phase_number"], line["epoch"]) for line in lines] == expected
    learned(twice_of_one_name, short_training(**NO_MEMORY), watch=seen.append)
    assert list(dict.fromkeys((at.phase, at.number, at.epoch + 1) for at in seen)) == expected


def test_a_phase_without_images_changes_nothing():
    def script(network, increment, n_phases):
        yield from islice(with_an_empty_phase(network, increment), n_phases)

    config = short_training(**NO_MEMORY)
    one, two, three = (
        learned(lambda network, increment, n=n: script(network, increment, n), config) for n in (1, 2, 3)
    )
    # All but what the code between the phases does.
    assert changed_names(content_of(one.network), content_of(two.network)) == {"classifier.blocks.1.0"}
    torch.testing.assert_close(
        two.network.classifier.blocks[1][0], 0.9 * one.network.classifier.blocks[1][0], atol=0, rtol=0
    )
    # The prior is that of the last phase that trained.
    assert one.readout.log_prior.tolist() == pytest.approx([0.0, 0.0, math.log(7)])
    assert two.readout.log_prior.tolist() == one.readout.log_prior.tolist()
    assert three.readout.log_prior.tolist() == pytest.approx([math.log(4), math.log(4), 0.0])


def test_a_phase_without_images_must_still_be_one_that_can_serve():
    def script(network, increment):
        yield Phase("learn", {"loss": terms.cross_entropy()}, network.every_parameter(), part="exemplars")

    with pytest.raises(TypeError, match='needs a term "classification"'):
        learned(script, short_training(**NO_MEMORY))


@pytest.mark.parametrize("by", ["phase", "recipe"])
@pytest.mark.parametrize("sampler", ["plain", "balanced", "class_aware", "two_stream"])
def test_counts_are_of_what_the_sampler_draws_in_an_epoch_on_average(sampler, by, drawn_orders):
    seen = []

    def script(network, increment):
        note = spied(seen, lambda batch: (batch.labels.tolist(), batch.counts))
        phase = Phase("learn", note, network.every_parameter(), sampler=sampler if by == "phase" else None)
        starts.append(len(drawn_orders))
        yield phase

    starts = []
    # The phase's word outweighs the recipe's.
    of_recipe = sampler if by == "recipe" else "balanced" if sampler != "balanced" else "plain"
    config = short_training(training={"epochs": 2, "batch_size": 8, "sampler": of_recipe})
    state = learned(script, config, new=[20, 4])

    labels = [2] * 20 + [3] * 4 + [0] * 4 + [1] * 4
    drawn = [Counter(labels[i] for i in order) for order in drawn_orders[starts[0] :]]
    of_batches = Counter(label for batch, _ in seen for label in batch)
    assert of_batches == drawn[0] + drawn[1]
    expected = [(drawn[0][c] + drawn[1][c]) / 2 for c in range(4)]
    assert all(counts.drawn.tolist() == expected for _, counts in seen)
    assert all(counts.at_hand.tolist() == [4, 4, 20, 4] for _, counts in seen)
    assert all(counts.inherent.tolist() == [6, 5, 20, 4] for _, counts in seen)
    assert state.readout.log_prior.tolist() == pytest.approx([math.log(n) for n in expected])
    if sampler == "two_stream":
        # Three of the eight exemplars beside eight new images: a quarter would not show all.
        assert [sum(label < 2 for label in batch) for batch, _ in seen] == [3] * 6
    else:
        wanted = {"plain": [4, 4, 20, 4], "balanced": [4, 4, 12, 12], "class_aware": [8, 8, 8, 8]}
        assert expected == wanted[sampler]


def test_a_class_that_the_first_epoch_passes_over_is_counted():
    """As many old classes as an epoch has exemplars in its only batch: it cannot draw all of them."""
    seen = []

    def script(network, increment):
        note = spied(seen, lambda batch: (batch.labels.tolist(), batch.counts.drawn.tolist()))
        yield Phase("learn", note, network.every_parameter(), sampler="two_stream")

    training = {"epochs": 12, "batch_size": 4, "exemplar_share": 0.25}
    learned(script, short_training(training=training), new=[2, 2])
    (first, counts), *_ = seen
    assert sum(label < 2 for label in first) == 1
    assert min(counts[:2]) > 0
    assert counts == pytest.approx([sum(batch.count(c) for batch, _ in seen) / 12 for c in range(4)])


def test_counts_at_hand_are_of_all_images_whatever_the_part():
    seen = []

    def script(network, increment):
        note = spied(seen, lambda batch: batch.counts)
        phase = Phase("learn", note, network.every_parameter())
        yield replace(phase, part="new", sampler="balanced")

    learned(script, short_training(training={"epochs": 1, "batch_size": 64}), new=[20, 4])
    (counts,) = seen
    assert counts.drawn.tolist() == [0, 0, 12, 12]
    assert counts.at_hand.tolist() == [4, 4, 20, 4]


def test_terms_know_the_sizes_of_all_tasks():
    seen = []

    def script(network, increment):
        note = spied(seen, lambda batch: (batch.task_sizes, batch.n_old, batch.class_weights.shape[0]))
        yield Phase("learn", note, network.every_parameter())

    learned(script, short_training(training={"epochs": 1, "batch_size": 64}), new=[7, 3, 2])
    assert seen == [((2, 3), 2, 5)]


def test_the_old_outputs_of_a_phase_are_those_of_its_teacher(tmp_path):
    seen = []

    def script(network, increment):
        yield Phase("learn", PLAIN, network.every_parameter())
        teacher = copy.deepcopy(network)

        def distance(batch):
            with torch.no_grad():
                seen.append((batch.old.logits.shape[1], (batch.old.logits - batch.out.logits).abs().max()))
            return batch.out.logits.sum() * 0 + batch.old.logits.sum() * 0

        terms_of = {**PLAIN, "distance": distance}
        yield Phase("again", terms_of, {"classifier": network.classifier_parameters()}, teacher=teacher)

    config = short_training(training={"epochs": 2, "batch_size": 64, "learning_rates": {"classifier": 0.5}})
    learned(script, config)
    assert {n_classes for n_classes, _ in seen} == {3}  # the network before this task knows two
    first, *_, last = [float(difference) for _, difference in seen[-2:]]
    assert first < 1e-4 < last


def test_adamw_moves_each_weight_by_the_rate_and_goes_on_after_an_interruption(tmp_path):
    before = []

    def script(network, increment):
        before.append(network.classifier.blocks[1][0].detach().clone())
        weights = {"classifier": list(network.classifier.blocks[1])}
        yield Phase("learn", {"classification": steep(3.0)}, weights, optimizer="adamw")

    rates = {"classifier": 0.25, "backbone": 0.0}
    config = short_training(training={"epochs": 2, "batch_size": 64, "learning_rates": rates, **FULL_RATE})
    after = learned(script, config).network.classifier.blocks[1][0]
    # A constant gradient g moves by the rate times g / |g|, whatever its size.
    torch.testing.assert_close(before[0] - after, torch.full_like(after, 2 * 0.25), atol=1e-4, rtol=1e-4)
    Runs(tmp_path, script, config).check_resumed([("learn", 1, 1)])


@pytest.mark.parametrize(("angle", "expected"), [(1.0, (1.0, 0.0)), (-1.0, (0.5, 0.5))])
def test_projected_gradients_lose_what_points_against_the_reference(angle, expected):
    """g = (1, 0) on halves of the weights; r = (±1, 1): ⟨g, r⟩ / ‖r‖² is ±1/2."""
    before = []

    def halves(batch):
        new = batch.class_weights[2:]
        return new[:, :32].sum(), new[:, 32:].sum()

    def script(network, increment):
        before.append(network.classifier.blocks[1][0].detach().clone())
        parts = {
            "classification": Classification(lambda batch: halves(batch)[0], terms.cross_entropy().log_prior),
            "reference": lambda batch: angle * halves(batch)[0] + halves(batch)[1],
        }
        weights = {"classifier": list(network.classifier.blocks[1])}
        yield Phase("learn", parts, weights, gradients="projected")

    rates = {"classifier": 1.0, "backbone": 0.0}
    config = short_training(training={"epochs": 1, "batch_size": 64, "learning_rates": rates, **FULL_RATE})
    after = learned(script, config).network.classifier.blocks[1][0]
    moved = before[0] - after
    assert moved[:, :32].mean().item() == pytest.approx(expected[0], abs=1e-4)
    assert moved[:, 32:].mean().item() == pytest.approx(expected[1], abs=1e-4)


def test_a_phase_that_projects_gradients_needs_a_reference():
    def script(network, increment):
        yield Phase("learn", PLAIN, network.every_parameter(), gradients="projected")

    with pytest.raises(TypeError, match="reference"):
        learned(script, short_training())
