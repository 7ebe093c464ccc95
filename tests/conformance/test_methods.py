"""Every method keeps the promises the engine makes for it; a new entry of METHODS is picked up by itself."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from medcil import terms
from medcil.build import build_method
from medcil.config import LearningConfig, TrainingConfig
from medcil.data.preprocess import Preprocessing
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task, class_incremental
from medcil.engine.journal import Checkpoint, FileJournal, Progress
from medcil.engine.predict import predict_scores
from medcil.engine.state import State, initial_state, load_state, save_state
from medcil.engine.train import learn_task
from medcil.errors import InvalidInput
from medcil.method import Batch, Classification, Counts, Increment, Method, Phase, Scoring, WithTerms
from medcil.methods import METHODS
from medcil.methods.balanced import Balanced
from medcil.methods.der import DER
from medcil.methods.finetune import Finetune
from medcil.methods.icarl import ICaRL
from medcil.methods.lws import LWS
from medcil.methods.ucir import UCIR
from medcil.models.network import Network, NetworkSpec
from medcil.outline import outline
from medcil.runs import RunDir

SPEC = NetworkSpec(backbone="resnet8_cifar", last_relu=False, learn_scale=True)
PREPROCESSING = Preprocessing(side=18, crop=16)
COLORS = torch.tensor([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40], [200, 40, 200]])

COUNTS = (6, 4, 5, 3)
"""Images of the classes in the dataset's order."""
ORDER = (2, 0, 3, 1)
"""So that a label is not the dataset's own number of its class."""
QUOTA = 3

PLUGGED_IN = {
    "classification": terms.cil_balanced(alpha=0.5),
    "margin": terms.distribution_margin(weight=0.1),
}
PLAIN: dict[str, Method] = {
    **{name: method() for name, method in METHODS.items()},
    # What no default reaches.
    "ucir that fine-tunes": UCIR(finetune_share=0.5),
    "der that warms up and starts anew": DER(warm_up_share=0.5, reset_classifier=True),
    "lws around icarl": LWS(base=ICaRL()),
    "balanced that distills exemplars": Balanced(
        distillation_images="exemplars", distillation_schedule="share"
    ),
}
SUBJECTS: dict[str, Method] = {
    **PLAIN,
    **{f"{name} with terms": WithTerms(PLAIN[name], PLUGGED_IN) for name in METHODS},
}


def colored(counts: Sequence[int], *, seed: int = 0) -> Samples:
    """So many noisy images of each class, which is a color."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    noise = torch.randint(-35, 36, (len(labels), 3, 18, 18), generator=torch.Generator().manual_seed(seed))
    return Samples(TensorImages((COLORS[labels, :, None, None] + noise).to(torch.uint8)), labels)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A source that remembers which of its images were read."""

    source: TensorImages
    reads: list[int]

    @property
    def side(self) -> int:
        return self.source.side

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        self.reads.extend(indices.tolist())
        return self.source.read(indices)


def stream(
    counts: Sequence[int] = COUNTS, order: Sequence[int] = ORDER, sizes: Sequence[int] = (2, 2)
) -> Iterator[Task]:
    names = [f"color {c}" for c in range(len(counts))]
    return class_incremental(colored(counts), colored([3] * len(counts), seed=1), names, order, sizes)


def config(**sections: object) -> LearningConfig:
    defaults = {
        "memory": {"per_class": QUOTA},
        "training": {"epochs": 2, "batch_size": 8},
        "execution": {"device": "cpu", "threads": 1},
    }
    return LearningConfig.model_validate({**defaults, **sections})


def new_state() -> State:
    return initial_state(SPEC, PREPROCESSING, seed=0)


def learn(method: Method, tasks: Iterator[Task], learning: LearningConfig | None = None) -> State:
    """The state after all tasks."""
    state = new_state()
    for task in tasks:
        state = learn_task(state, task, method, learning or config())
    return state


def unseen_images(n_classes: int) -> Samples:
    return colored([3] * n_classes, seed=1)


def scores_of(state: State, samples: Samples) -> torch.Tensor:
    return predict_scores(state, samples, config().execution)


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a state, the exemplars' pixels among them."""
    network = {f"network.{name}": tensor for name, tensor in state.network.state_dict().items()}
    tensors = {
        **network,
        "pixels": state.memory.read_all(),
        "labels": state.memory.labels,
        "means": state.class_means,
        "counts": state.inherent_counts,
        "prior": state.log_prior_in_scores,
    }
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that are not equal to the last bit."""
    return (a.keys() ^ b.keys()) | {name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])}


@dataclass(frozen=True, eq=False)
class Story:
    """Two tasks, learned once for all checks that only look at the outcome."""

    method: Method
    tasks: list[Task]
    first: State
    second: State
    reads: list[list[int]]
    """The training images read while each task was learned, by their number in the dataset."""
    n_test_reads: int


@pytest.fixture(scope="module", params=SUBJECTS)
def method(request: pytest.FixtureRequest) -> Method:
    return SUBJECTS[request.param]


@pytest.fixture(scope="module", params=PLAIN)
def plain_method(request: pytest.FixtureRequest) -> Method:
    return PLAIN[request.param]


@pytest.fixture(scope="module")
def story(method: Method) -> Story:
    train, test = colored(COUNTS), unseen_images(len(COUNTS))
    train_reads: list[int] = []
    test_reads: list[int] = []
    recorded = (
        Samples(Recorded(samples.images, reads), samples.labels)
        for samples, reads in ((train, train_reads), (test, test_reads))
    )
    names = [f"color {c}" for c in range(len(COUNTS))]
    states, tasks, reads = [new_state()], [], []
    for task in class_incremental(*recorded, names, ORDER, (2, 2)):
        train_reads.clear()
        states.append(learn_task(states[-1], task, method, config(execution={"resident": "no"})))
        tasks.append(task)
        reads.append(train_reads.copy())
    return Story(method, tasks, states[1], states[2], reads, len(test_reads))


def second_task() -> Task:
    """Task two, open for reading."""
    tasks = stream()
    next(tasks)
    return next(tasks)


def test_the_network_grows_by_the_new_classes(story):
    for state, names in (
        (story.first, ("color 2", "color 0")),
        (story.second, ("color 2", "color 0", "color 3", "color 1")),
    ):
        assert state.class_names == names
        assert state.network.n_classes == len(names)
        assert scores_of(state, unseen_images(4)).shape == (12, len(names))
        assert len(state.class_means) == len(state.log_prior_in_scores) == len(names)
    assert story.second.network.spec().block_sizes == (2, 2)


def test_scores_means_and_prior_are_finite(story):
    for state in (story.first, story.second):
        assert scores_of(state, unseen_images(4)).isfinite().all()
        assert state.class_means.isfinite().all()
        assert state.log_prior_in_scores.isfinite().all()


def test_the_state_it_starts_from_is_left_as_it_is(story):
    before = tensors_of(story.first)
    frozen = [parameter.requires_grad for parameter in story.first.network.parameters()]
    after = learn_task(story.first, second_task(), story.method, config())
    assert differing(before, tensors_of(story.first)) == set()
    assert [parameter.requires_grad for parameter in story.first.network.parameters()] == frozen
    learned = differing(before, tensors_of(after))
    assert any(name.startswith(("network.backbone", "network.branches")) for name in learned), (
        "it learned nothing"
    )


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(story):
    task = second_task()
    after = []
    for disturbance, seed in ((1, 0), (2, 0), (3, 1)):
        with torch.random.fork_rng():
            torch.manual_seed(disturbance)
            after.append(tensors_of(learn_task(story.first, task, story.method, config(seed=seed))))
    assert differing(after[0], after[1]) == set()
    assert "network.classifier.blocks.1.0" in differing(after[0], after[2])


def test_saved_and_loaded_it_predicts_and_learns_the_same(story, tmp_path):
    save_state(story.first, tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert differing(tensors_of(story.first), tensors_of(loaded)) == set()
    images = unseen_images(4)
    assert torch.equal(scores_of(loaded, images), scores_of(story.first, images))
    from_memory, from_disk = (
        learn_task(state, second_task(), story.method, config()) for state in (story.first, loaded)
    )
    assert differing(tensors_of(from_memory), tensors_of(from_disk)) == set()


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        pytest.param((5, 4, 6), (2, 1), id="one new class"),
        pytest.param((5, 4, 6), (1, 1, 1), id="one class at a time"),
        pytest.param((5, 1, 6, 1), (2, 2), id="a class of one image in each task"),
        pytest.param((1, 4), (1, 1), id="one image in the first task"),
        pytest.param((5, 4, 1), (2, 1), id="one image in the second task"),
        pytest.param((1, 1, 1), (1, 1, 1), id="one image in every task"),
    ],
)
def test_it_learns_from_few_classes_and_few_images(method, counts, sizes):
    state = learn(method, stream(counts, range(len(counts)), sizes))
    assert state.network.spec().block_sizes == sizes
    assert state.inherent_counts.tolist() == list(counts)
    assert state.memory.class_counts(len(counts)).tolist() == [min(n, QUOTA) for n in counts]
    assert all(tensor.isfinite().all() for tensor in tensors_of(state).values())
    assert scores_of(state, unseen_images(len(counts))).isfinite().all()


def test_no_old_image_is_opened(story):
    labels = colored(COUNTS).labels
    opened = [{ORDER.index(int(labels[i])) for i in reads} for reads in story.reads]
    assert opened == [{0, 1}, {2, 3}]


def test_no_test_image_is_opened(story):
    assert story.n_test_reads == 0


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_task_that_is_over_cannot_be_learned(story, resident):
    tasks = stream()
    over = next(tasks)
    next(tasks)
    with pytest.raises(PermissionError, match="earlier task"):
        learn_task(new_state(), over, story.method, config(execution={"resident": resident}))


def test_the_memory_needs_no_training_image(story):
    """The stream has moved on, so a memory that reads from it would raise."""
    with pytest.raises(PermissionError):
        story.tasks[0].train.read_all()
    assert len(story.second.memory.read_all()) == len(story.second.memory)


def test_the_memory_holds_copies(story):
    train = colored(COUNTS)
    names = [f"color {c}" for c in range(len(COUNTS))]
    task = next(class_incremental(train, train, names, ORDER, (2, 2)))
    state = learn_task(new_state(), task, story.method, config())
    before = state.memory.read_all().clone()
    train.images.pixels.zero_()
    assert torch.equal(state.memory.read_all(), before)


@pytest.mark.parametrize(
    ("memory", "kept"),
    [
        ({"per_class": 3}, [[3, 3], [3, 3, 3, 3]]),
        ({"per_class": 5}, [[5, 5], [5, 5, 3, 4]]),
        ({"total": 8}, [[4, 4], [2, 2, 2, 2]]),
        ({"total": 3}, [[1, 1], [0, 0, 0, 0]]),
    ],
    ids=str,
)
def test_the_memory_keeps_to_its_quota(method, memory, kept):
    state, train = new_state(), colored(COUNTS)
    for task, expected in zip(stream(), kept, strict=True):
        state = learn_task(state, task, method, config(memory=memory))
        assert state.memory.class_counts(task.n_seen).tolist() == expected
        for label in range(task.n_seen):
            own = {image.numpy().tobytes() for image in train.of_class(ORDER[label]).read_all()}
            held = [image.numpy().tobytes() for image in state.memory.of_class(label).read_all()]
            assert set(held) <= own, "an exemplar of another class"
            assert max(Counter(held).values(), default=1) == 1, "an exemplar twice"


def test_inherent_counts_are_kept_for_life(story):
    assert story.first.inherent_counts.tolist() == [5, 6]
    assert story.second.inherent_counts.tolist() == [5, 6, 3, 4]


@dataclass(frozen=True)
class Listening:
    """A method whose phases are written down as they are yielded, each with its increment."""

    base: Method
    phases: list[tuple[Increment, Phase]]

    @property
    def scoring(self) -> Scoring:
        return self.base.scoring

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for phase in self.base.learn(network, increment):
            self.phases.append((increment, phase))
            yield phase


@pytest.fixture(scope="module")
def phases(method: Method) -> list[tuple[Increment, Phase]]:
    """Of both tasks."""
    listening = Listening(method, [])
    learn(listening, stream())
    return listening.phases


def both_turns(phases: list[tuple[Increment, Phase]]) -> list[tuple[Increment, Phase]]:
    """With what alternates with them."""
    alternates = [(increment, phase.alternate) for increment, phase in phases if phase.alternate is not None]
    return phases + alternates


def test_every_phase_has_a_classification_term(phases):
    assert {increment.n_old for increment, _ in phases} == {0, 2}
    turns = both_turns(phases)
    assert all(isinstance(phase.terms["classification"], Classification) for _, phase in turns)


def test_phases_of_a_task_are_told_apart_by_their_names_and_one_is_called_learn(phases):
    names = Counter((increment.n_old, phase.name) for increment, phase in phases)
    assert max(names.values()) == 1
    assert names.keys() >= {(0, "learn"), (2, "learn")}


def test_plugged_in_terms_reach_the_learning_phase_after_the_first_task(plain_method):
    listening = Listening(WithTerms(plain_method, PLUGGED_IN), [])
    plain = Listening(plain_method, [])
    for subject in (listening, plain):
        learn(subject, stream())
    pairs = zip(both_turns(listening.phases), both_turns(plain.phases), strict=True)
    for (increment, phase), (_, before) in pairs:
        reached = increment.n_old > 0 and phase.name == "learn"
        assert phase.terms.keys() == before.terms.keys() | (PLUGGED_IN.keys() if reached else set())
        for name, term in PLUGGED_IN.items():
            assert (phase.terms.get(name) is term) == reached


def test_no_term_looks_at_tensor_values(phases, story):
    """On fake tensors, which have none, code that depends on data raises; a CUDA graph would refuse it."""
    specs = {0: story.first.network.spec(), 2: story.second.network.spec()}
    for increment, phase in both_turns(phases):
        networks = networks_of(specs[increment.n_old], increment)
        with FakeTensorMode(allow_non_fake_inputs=True):
            batch = fake_batch(*networks, increment)
            losses = {name: term(batch) for name, term in phase.terms.items()}
            sum(losses.values()).backward()
        assert {loss.shape for loss in losses.values()} == {()}


SHARES = [
    (name, field.name)
    for name, method in METHODS.items()
    for field in fields(method)
    if field.name.endswith("_share")
]


@pytest.mark.parametrize(("name", "share"), SHARES)
def test_a_stage_with_a_share_of_no_epochs_is_left_out(name, share):
    """But for BiC's, which is what BiC is: it refuses."""
    with_stage = outline(build_method({"name": name, share: 0.25}))
    assert 25 in {phase.epochs for phase in with_stage}
    if name == "bic":
        with pytest.raises(InvalidInput, match=f"^method.{share}"):
            build_method({"name": name, share: 0})
        return
    without = outline(build_method({"name": name, share: 0}))
    assert without == [phase for phase in with_stage if phase.epochs != 25]


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
    """One of this shape, an auxiliary classifier beside it, and the one before it."""
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
        draw_noise=lambda: torch.randn(n_seen, network.classifier.dim),
    )


class Cut(Exception):
    pass


class Scissors:
    """Cuts learning once at each moment of one kind, one after the other."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.done: set[tuple[object, ...]] = set()

    def at(self, kind: str, *moment: object) -> None:
        if kind == self.kind and moment not in self.done:
            self.done.add(moment)
            raise Cut

    def watch(self, progress: Progress) -> None:
        kind = "epoch trained" if progress.losses is not None else "step done"
        self.at(kind, progress.phase, progress.epoch, progress.step)


class CutJournal(FileJournal):
    scissors: Scissors

    def log(self, record: dict) -> None:
        super().log(record)
        self.scissors.at("epoch logged", record["phase"], record["epoch"])

    def save(self, phase: int, checkpoint: Checkpoint) -> None:
        super().save(phase, checkpoint)
        self.scissors.at("checkpoint saved", phase, checkpoint.epoch)


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("step done", 1),
        ("epoch trained", 1),
        ("epoch logged", 1),
        ("epoch logged", 2),
        ("checkpoint saved", 1),
    ],
)
def test_cut_at_every_moment_it_ends_as_if_it_had_not_been(story, tmp_path, kind, every):
    training = {"epochs": 3, "batch_size": 8}
    learning = config(training=training, execution={"device": "cpu", "checkpoint_every": every})
    task, method = second_task(), story.method

    whole = RunDir(tmp_path / "whole")
    whole.root.mkdir()
    expected = learn_task(
        story.first, task, method, learning, journal=FileJournal(whole, 2, log_size_before=0)
    )

    pieces, scissors = RunDir(tmp_path / "pieces"), Scissors(kind)
    pieces.root.mkdir()
    after = None
    while after is None:
        journal = CutJournal(pieces, 2, log_size_before=0)
        journal.scissors = scissors
        try:
            after = learn_task(story.first, task, method, learning, journal=journal, watch=scissors.watch)
        except Cut:
            continue

    assert differing(tensors_of(expected), tensors_of(after)) == set()
    assert pieces.log_path.read_bytes() == whole.log_path.read_bytes()
    n_epochs = len(whole.log_path.read_text().splitlines())
    assert len(scissors.done) >= n_epochs >= training["epochs"]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_streamed_images_teach_the_same_as_resident_ones(plain_method, workers):
    tasks = stream()
    first, task = learn_task(new_state(), next(tasks), plain_method, config()), next(tasks)
    resident, streamed = (
        tensors_of(learn_task(first, task, plain_method, config(execution={"device": "cpu", **execution})))
        for execution in ({"resident": "yes"}, {"resident": "no", "workers": workers})
    )
    assert differing(resident, streamed) == set()


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
