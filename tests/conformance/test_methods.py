"""What every method must do. A new entry of METHODS is tested without a change here.

What depends on the engine alone is tested in test_engine.py, for three methods.
"""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from medcil.build import build_method
from medcil.config import TrainingConfig
from medcil.errors import InvalidInput
from medcil.methods import METHODS
from medcil.methods.balanced import Balanced
from medcil.methods.finetune import Finetune
from medcil.methods.outline import outline
from medcil.methods.protocol import Batch, Classification, Counts, Increment
from medcil.models.network import Network, NetworkSpec
from medcil.training.loop import learn_task
from medcil.training.state import load_state, save_state

from .subjects import (
    COUNTS,
    ORDER,
    PLAIN,
    PLUGGED_IN,
    QUOTA,
    SPEC,
    SUBJECTS,
    colored,
    config,
    differing,
    learn,
    learns_never,
    learns_once,
    scores_of,
    second_task,
    story_of,
    stream,
    tensors_of,
    unseen_images,
)

plain = pytest.mark.parametrize("name", PLAIN)
with_and_without_terms = pytest.mark.parametrize("name", SUBJECTS)


@with_and_without_terms
def test_the_network_grows_by_the_new_classes(name):
    story = story_of(name)
    for state, names in (
        (story.first, ("color 2", "color 0")),
        (story.second, ("color 2", "color 0", "color 3", "color 1")),
    ):
        assert state.class_names == names
        assert state.network.n_classes == len(names)
        scores = scores_of(state, unseen_images(4))
        assert scores.shape == (12, len(names))
        assert scores.isfinite().all()
        assert len(state.readout.class_means) == len(state.readout.log_prior) == len(names)
        assert state.readout.class_means.isfinite().all()
        assert state.readout.log_prior.isfinite().all()
    assert story.second.network.spec().block_sizes == (2, 2)


@plain
def test_a_task_leaves_the_earlier_state_as_it_is(name):
    story = story_of(name)
    assert differing(story.first_tensors, tensors_of(story.first)) == set()
    requires_grad = [parameter.requires_grad for parameter in story.first.network.parameters()]
    assert requires_grad == story.first_requires_grad
    learned = differing(story.first_tensors, tensors_of(story.second))
    moves_features = any(tensor.startswith(("network.backbone", "network.branches")) for tensor in learned)
    assert moves_features == (not learns_once(name))
    assert moves_features or {"readout.weights", "readout.means"} & learned


@plain
def test_a_loaded_state_learns_the_same_whatever_the_global_seed_and_where_images_are(name, tmp_path):
    """The story streams its images; here they are resident."""
    story = story_of(name)
    save_state(story.first, tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert differing(tensors_of(story.first), tensors_of(loaded)) == set()
    assert torch.equal(scores_of(loaded, unseen_images(4)), scores_of(story.first, unseen_images(4)))
    execution = {"device": "cpu", "threads": 1, "resident": "yes"}
    with torch.random.fork_rng():
        torch.manual_seed(99)
        after = learn_task(loaded, second_task(), story.method, config(execution=execution))
    assert differing(tensors_of(after), tensors_of(story.second)) == set()


@plain
def test_another_seed_gives_other_weights(name):
    story = story_of(name)
    other = tensors_of(learn_task(story.first, second_task(), story.method, config(seed=1)))
    differs = "network.classifier.blocks.1.0" in differing(other, tensors_of(story.second))
    assert differs == (not learns_once(name))  # a readout in closed form draws nothing


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        pytest.param((5, 4, 6), (2, 1), id="one new class"),
        pytest.param((5, 1, 6, 1), (2, 2), id="a class of one image in each task"),
        pytest.param((1, 1, 1), (1, 1, 1), id="one image in every task"),
    ],
)
@plain
def test_it_learns_from_few_classes_and_few_images(name, counts, sizes):
    state = learn(PLAIN[name], stream(counts, range(len(counts)), sizes))
    assert state.network.spec().block_sizes == sizes
    assert state.inherent_counts.tolist() == list(counts)
    assert state.memory.class_counts(len(counts)).tolist() == [min(n, QUOTA) for n in counts]
    assert all(tensor.isfinite().all() for tensor in tensors_of(state).values())
    assert scores_of(state, unseen_images(len(counts))).isfinite().all()


@plain
def test_only_training_images_of_the_task_are_read(name):
    story = story_of(name)
    labels = colored(COUNTS).labels
    assert [{ORDER.index(int(labels[i])) for i in reads} for reads in story.reads] == [{0, 1}, {2, 3}]
    assert story.n_test_reads == 0


@plain
def test_the_memory_needs_no_training_image(name):
    """A memory that reads from a closed task would raise."""
    story = story_of(name)
    with pytest.raises(PermissionError):
        story.tasks[0].train.read_all()
    assert len(story.second.memory.read_all()) == len(story.second.memory) == QUOTA * len(COUNTS)


def tasks_trained(name: str) -> set[int]:
    """Return how many classes are old in the tasks that train the network."""
    if learns_never(name):
        return set()
    return {0} if learns_once(name) else {0, 2}


@with_and_without_terms
def test_every_phase_has_a_classification_term(name):
    turns = story_of(name).turns()
    assert {increment.n_old for increment, _ in turns} == tasks_trained(name)
    assert all(isinstance(phase.terms["classification"], Classification) for _, phase in turns)


@plain
def test_phase_names_are_unique_within_a_task_and_one_is_learn(name):
    names = Counter((increment.n_old, phase.name) for increment, phase in story_of(name).phases)
    assert set(names.values()) <= {1}
    assert {n_old for n_old, phase in names if phase == "learn"} == tasks_trained(name)


@pytest.mark.parametrize("name", METHODS)
def test_plugged_in_terms_reach_the_learning_phase_after_the_first_task(name):
    pairs = zip(story_of(f"{name} with terms").turns(), story_of(name).turns(), strict=True)
    for (increment, phase), (_, before) in pairs:
        reached = increment.n_old > 0 and phase.name == "learn"
        assert phase.terms.keys() == before.terms.keys() | (PLUGGED_IN.keys() if reached else set())
        for term_name, term in PLUGGED_IN.items():
            assert (phase.terms.get(term_name) is term) == reached


@pytest.mark.parametrize("name", [*PLAIN, "icarl with terms"])
def test_no_term_looks_at_tensor_values(name):
    """On fake tensors, which have none, code that depends on data raises; a CUDA graph would refuse it."""
    story = story_of(name)
    specs = {0: story.first.network.spec(), 2: story.second.network.spec()}
    for increment, phase in story.turns():
        networks = networks_of(specs[increment.n_old], increment)
        with FakeTensorMode(allow_non_fake_inputs=True):
            batch = fake_batch(*networks, increment)
            losses = {name: term(batch) for name, term in phase.terms.items()}
            sum(losses.values()).backward()
        assert {loss.shape for loss in losses.values()} == {()}


def test_the_check_of_terms_finds_data_dependent_code():
    increment = an_increment(n_old=2, n_new=2)
    networks = networks_of(replace(SPEC, block_sizes=(2, 2)), increment)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = fake_batch(*networks, increment)
        with pytest.raises(DynamicOutputShapeException):
            batch.out.logits[batch.labels < 2].sum()


def an_increment(n_old: int, n_new: int) -> Increment:
    random = np.random.default_rng(0)
    return Increment(n_old, n_new, TrainingConfig(), lambda label: torch.randn(3, 64), random)


def networks_of(spec: NetworkSpec, increment: Increment) -> tuple[Network, Network]:
    """Build a network of this shape with an auxiliary classifier, and the network of the task before."""
    network = spec.build()
    network.add_auxiliary(torch.randn(1 + increment.n_new, 64))
    n_branches = max(0, spec.n_branches - 1)
    before = replace(spec, block_sizes=(increment.n_old,), calibration_sizes=(), n_branches=n_branches)
    return network.eval(), before.build().eval()


def fake_batch(network: Network, old_network: Network, increment: Increment) -> Batch:
    n_old, n_seen = increment.n_old, increment.n_seen
    images = torch.rand(6, 3, 16, 16)
    ones = torch.ones(n_seen, dtype=torch.int64)
    return Batch(
        labels=torch.zeros(6, dtype=torch.int64),
        out=network(images),
        counts=Counts(ones, ones, ones),
        task_sizes=network.classifier.block_sizes,
        class_weights=network.classifier.class_weights,
        scale=network.classifier.scale,
        run_old_network=(lambda: old_network(images)) if n_old else None,
        normal=torch.randn,
        turns=torch.zeros(6, dtype=torch.int64),
    )


SHARES = [
    (name, field.name)
    for name, method in METHODS.items()
    for field in fields(method)
    if field.name.endswith("_share")
]


@pytest.mark.parametrize(("name", "share"), SHARES)
def test_a_stage_with_a_share_of_no_epochs_is_left_out(name, share):
    """BiC is nothing without its stage: it refuses."""
    with_stage = outline(build_method({"name": name, share: 0.25}))
    assert 25 in {phase.epochs for phase in with_stage}
    if name == "bic":
        with pytest.raises(InvalidInput, match=f"^method.{share}"):
            build_method({"name": name, share: 0})
        return
    without = outline(build_method({"name": name, share: 0}))
    assert without == [phase for phase in with_stage if phase.epochs != 25]


def test_the_papers_method_forgets_less_than_fine_tuning():
    rates = {"classifier": 0.1, "backbone": 0.05}
    learning = config(training={"epochs": 12, "batch_size": 8, "learning_rates": rates})
    images = unseen_images(4)
    balanced_accuracy = {}
    for method in (Balanced(), Finetune()):
        state = learn(method, stream((12, 10, 12, 8), range(4), (2, 2)), learning)
        correct = scores_of(state, images).argmax(dim=1) == images.labels
        recalls = [correct[images.labels == label].float().mean() for label in range(4)]
        balanced_accuracy[type(method)] = torch.stack(recalls).mean().item()
    assert balanced_accuracy[Balanced] > balanced_accuracy[Finetune] + 0.2
    assert balanced_accuracy[Balanced] > 0.7
