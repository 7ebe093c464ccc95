"""What the engine promises whatever the method is, tested for three methods that use it differently.

`balanced` draws noise in each step and distills from the old network; `lo2ln` adds a branch for each task and
alternates two phases; `lws around icarl` trains in two stages with different samplers.
"""

from collections import Counter

import pytest

from medcil.data.stream import class_incremental
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import Checkpoint, FileJournal, Progress
from medcil.training.loop import learn_task

from .subjects import (
    COUNTS,
    ORDER,
    PLAIN,
    class_names,
    colored,
    config,
    differing,
    learns_once,
    new_state,
    second_task,
    story_of,
    stream,
    tensors_of,
)

THREE = ("balanced", "lo2ln", "lws around icarl")
three_methods = pytest.mark.parametrize("name", THREE)


@pytest.mark.parametrize("resident", ["yes", "no"])
@three_methods
def test_a_closed_task_cannot_be_learned(name, resident):
    tasks = stream()
    closed = next(tasks)
    next(tasks)
    with pytest.raises(PermissionError, match="earlier task"):
        learn_task(new_state(), closed, PLAIN[name], config(execution={"resident": resident}))


@three_methods
def test_the_memory_holds_copies(name):
    train = colored(COUNTS)
    task = next(class_incremental(train, train, class_names(COUNTS), ORDER, (2, 2)))
    state = learn_task(new_state(), task, PLAIN[name], config())
    before = state.memory.read_all().clone()
    train.images.pixels.zero_()
    assert state.memory.read_all().equal(before)


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        ({"per_class": 3}, [[3, 3], [3, 3, 3, 3]]),
        ({"per_class": 5}, [[5, 5], [5, 5, 3, 4]]),
        ({"total": 8}, [[4, 4], [2, 2, 2, 2]]),
        ({"total": 3}, [[1, 1], [0, 0, 0, 0]]),
    ],
    ids=str,
)
@three_methods
def test_the_memory_keeps_to_its_quota(name, memory, sizes):
    state, train = new_state(), colored(COUNTS)
    for task, expected in zip(stream(), sizes, strict=True):
        state = learn_task(state, task, PLAIN[name], config(memory=memory))
        assert state.memory.class_counts(task.n_seen).tolist() == expected
        for label in range(task.n_seen):
            own = {image.numpy().tobytes() for image in train.of_class(ORDER[label]).read_all()}
            held = [image.numpy().tobytes() for image in state.memory.of_class(label).read_all()]
            assert set(held) <= own, "an exemplar of another class"
            assert max(Counter(held).values(), default=1) == 1, "an exemplar twice"


@three_methods
def test_inherent_counts_never_change(name):
    story = story_of(name)
    assert story.first.inherent_counts.tolist() == [5, 6]
    assert story.second.inherent_counts.tolist() == [5, 6, 3, 4]


@pytest.mark.parametrize("workers", [1, 2, 5])
@three_methods
def test_any_number_of_workers_streams_the_same_images(name, workers):
    execution = {"device": "cpu", "threads": 1, "resident": "no", "workers": workers}
    story = story_of(name)
    streamed = learn_task(story.first, second_task(), story.method, config(execution=execution))
    assert differing(tensors_of(story.second), tensors_of(streamed)) == set()


class Cut(Exception):
    pass


class Scissors:
    """Cut learning once at each moment of one kind, one after the other."""

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


MOMENTS = [
    ("step done", 1),
    ("epoch trained", 1),
    ("epoch logged", 1),
    ("epoch logged", 2),
    ("checkpoint saved", 1),
]


@pytest.mark.parametrize(
    ("name", "kind", "every"),
    # Resuming replays the code between two phases, which is the method's own: one kind runs for every method.
    [(name, *moment) for name in PLAIN for moment in (MOMENTS if name in THREE else MOMENTS[-1:])],
)
def test_cut_at_every_moment_it_ends_as_if_uninterrupted(name, kind, every, tmp_path):
    training = {"epochs": 3, "batch_size": 8}
    learning = config(training=training, execution={"device": "cpu", "checkpoint_every": every})
    story = story_of(name)
    before, task = (new_state(), next(stream())) if learns_once(name) else (story.first, second_task())

    whole = RunDir(tmp_path / "whole")
    whole.root.mkdir()
    journal = FileJournal(whole, 2, log_size_before=0)
    expected = learn_task(before, task, story.method, learning, journal=journal)

    pieces, scissors = RunDir(tmp_path / "pieces"), Scissors(kind)
    pieces.root.mkdir()
    after = None
    while after is None:
        journal = CutJournal(pieces, 2, log_size_before=0)
        journal.scissors = scissors
        try:
            after = learn_task(before, task, story.method, learning, journal=journal, watch=scissors.watch)
        except Cut:
            continue

    assert differing(tensors_of(expected), tensors_of(after)) == set()
    if not story.phases:  # of a network that stays as it came
        assert not scissors.done
        assert not whole.log_path.exists()
        return
    assert pieces.log_path.read_bytes() == whole.log_path.read_bytes()
    n_epochs = sum('"epoch"' in line for line in whole.log_path.read_text().splitlines())
    assert len(scissors.done) >= n_epochs >= training["epochs"]
