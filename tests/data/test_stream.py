"""A dataset in tasks: which classes, which labels, and what can still be read later."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import (
    Stream,
    check_classes,
    checked_steps,
    class_incremental,
    class_order,
    task_sizes,
)
from medcil.errors import InvalidInput

NAMES = tuple("abcdefg")
ORDER = (5, 4, 0, 1, 3, 6, 2)
cumulative = partial(class_incremental, is_cumulative=True)
WAYS = pytest.mark.parametrize("arrive", [class_incremental, cumulative])


def dataset(labels) -> Samples:
    """Image i is filled with the value i."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return Samples(TensorImages(pixels.clone()), torch.tensor(labels, dtype=torch.int64))


def values(samples) -> list[int]:
    return samples.read_all()[:, 0, 0, 0].tolist()


def seven_classes() -> tuple[Samples, Samples]:
    return dataset([c % 7 for c in range(21)]), dataset([c % 7 for c in range(14)])


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30))
def test_task_sizes_use_every_class_once(n_classes, base, increment):
    if base > n_classes:
        with pytest.raises(InvalidInput, match=f"only {n_classes} classes: lower it"):
            task_sizes(n_classes, base, increment)
        return
    first, *later = task_sizes(n_classes, base, increment)
    assert first == base
    assert first + sum(later) == n_classes
    assert all(size == increment for size in later[:-1])
    assert all(0 < size <= increment for size in later)


def test_the_published_protocols():
    assert task_sizes(7, 3, 2) == (3, 2, 2)
    assert task_sizes(7, 3, 1) == (3, 1, 1, 1, 1)
    assert task_sizes(8, 3, 2) == (3, 2, 2, 1)
    assert task_sizes(7, 7, 1) == (7,)


def test_unequal_steps_use_every_class_once():
    assert checked_steps((3, 2, 1, 1), 7) == (3, 2, 1, 1)
    for steps in ((3, 2, 1), (3, 2, 1, 1, 1), ()):
        with pytest.raises(InvalidInput, match=rf"make {sum(steps)} classes, but there are 7"):
            checked_steps(steps, 7)


@given(order=st.permutations(range(7)), named=st.lists(st.booleans(), min_size=7, max_size=7))
def test_an_order_names_classes_by_number_or_name(order, named):
    written = [NAMES[c] if is_named else c for c, is_named in zip(order, named, strict=True)]
    assert class_order(written, NAMES, (ORDER,)) == tuple(order)


def test_a_published_order_has_a_number():
    assert class_order(1, NAMES, (tuple(range(7)), ORDER)) == ORDER
    for number in (-1, 2):
        with pytest.raises(InvalidInput, match=rf"has orders 0\.\.1, not {number}"):
            class_order(number, NAMES, (tuple(range(7)), ORDER))


def test_a_drawn_order_is_the_one_others_draw():
    """The order of class-incremental CIFAR-100 begins like this wherever it is printed."""
    drawn = class_order("seed-1993", [str(i) for i in range(100)], ())
    assert drawn[:10] == (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)
    assert sorted(drawn) == list(range(100))
    assert class_order("seed-7", NAMES, ()) != class_order("seed-8", NAMES, ())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("seed", "'seed' is none"),
        ("seed--1", "'seed--1' is none"),
        ("1993", "write a number"),
        (("a", "b"), "must name each of 0..6 exactly once"),
        (("a", 0, "c", "d", "e", "f", "g"), "must name each of 0..6 exactly once"),
        ((*"abcdef", "h"), "there is no class 'h'"),
        ((*"abcdef", "6"), "there is no class '6'"),
    ],
)
def test_an_order_that_is_none_is_refused(order, words):
    with pytest.raises(InvalidInput) as error:
        class_order(order, NAMES, (ORDER,))
    assert words in str(error.value)


def test_every_class_that_arrives_needs_training_images():
    labels = torch.tensor([0, 1, 2, 3, 4, 6]).numpy()
    check_classes(labels, NAMES, (0, 1, 2, 3, 4, 6, 5), (3, 3))
    with pytest.raises(InvalidInput, match="The class 'f' has no training image"):
        check_classes(labels, NAMES, (0, 1, 2, 3, 4, 6, 5), (3, 4))


@pytest.mark.parametrize("is_cumulative", [False, True])
def test_a_stream_made_by_hand_gives_its_tasks(is_cumulative):
    stream = Stream(
        *seven_classes(), NAMES, ORDER, (3, 2, 2), is_synthetic=False, is_cumulative=is_cumulative
    )
    assert stream.split is None
    assert [task.n_seen for task in stream.tasks()] == [3, 5, 7]
    assert [task.n_old for task in stream.tasks()] == ([0, 0, 0] if is_cumulative else [0, 3, 5])


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), max_size=40),
    order=st.permutations(range(7)),
    base=st.integers(1, 7),
    increment=st.integers(1, 7),
)
def test_tasks_are_a_partition_with_labels_in_order_of_arrival(labels, order, base, increment):
    labels = [*labels, *range(7)]  # no class without an image
    sizes = task_sizes(7, base, increment)
    seen_names, seen_images = [], []
    for task in class_incremental(dataset(labels), dataset(labels), NAMES, order, sizes):
        assert (task.n_old, task.n_new) == (len(seen_names), len(task.class_names))
        seen_names += task.class_names
        assert task.n_seen == len(seen_names)
        for samples in (task.train, task.test):
            originals = [labels[i] for i in values(samples)]
            assert [seen_names[label] for label in samples.labels.tolist()] == [NAMES[c] for c in originals]
            assert all(label >= task.n_old for label in samples.labels.tolist())
            assert values(samples) == sorted(values(samples))
        seen_images += values(task.train)
    assert seen_names == [NAMES[c] for c in order]
    assert sorted(seen_images) == list(range(len(labels)))


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), max_size=40),
    order=st.permutations(range(7)),
    base=st.integers(1, 7),
    increment=st.integers(1, 7),
)
def test_a_cumulative_task_is_the_union_of_all_so_far(labels, order, base, increment):
    labels = [*labels, *range(7)]
    train, test, sizes = dataset(labels), dataset(labels[::-1]), task_sizes(7, base, increment)
    names, images, tested, test_labels = (), [], [], []
    tasks = zip(
        class_incremental(train, test, NAMES, order, sizes),
        cumulative(train, test, NAMES, order, sizes),
        strict=True,
    )
    for new, union in tasks:
        names += new.class_names
        images += values(new.train)
        tested += values(new.test)
        test_labels += new.test.labels.tolist()
        assert (union.class_names, union.n_old, union.n_new) == (names, 0, len(names))
        assert values(union.train) == sorted(images)
        originals = [NAMES[labels[i]] for i in values(union.train)]
        assert [names[label] for label in union.train.labels.tolist()] == originals
        assert values(union.test) == tested
        assert union.test.labels.tolist() == test_labels
    assert sorted(images) == sorted(tested) == list(range(len(labels)))


@WAYS
def test_a_class_without_training_images_is_refused_before_the_first_task(arrive):
    with pytest.raises(InvalidInput, match=r"The class .* has no training image"):
        next(arrive(dataset([0, 1, 2]), dataset([0, 1, 2]), NAMES, range(7), (3, 2, 2)))


def test_asking_for_the_next_task_closes_the_training_images_of_the_last():
    tasks = class_incremental(*seven_classes(), NAMES, ORDER, (3, 2, 2))
    first = next(tasks)
    held = first.train.of_class(0)
    assert len(values(held)) == 3
    second = next(tasks)
    for samples in (first.train, held):
        with pytest.raises(PermissionError, match="only its exemplars remain"):
            samples.read_all()
    assert len(values(second.train)) == 6
    assert len(values(first.test)) == 6


def test_asking_for_the_next_cumulative_task_closes_what_the_last_one_lent():
    tasks = cumulative(*seven_classes(), NAMES, ORDER, (3, 2, 2))
    first = next(tasks)
    held = first.train.of_class(0)
    assert len(values(held)) == 3
    second = next(tasks)
    for samples in (first.train, held):
        with pytest.raises(PermissionError, match="belong to an earlier task"):
            samples.read_all()
    assert len(values(second.train)) == 15
    assert len(values(first.test)) == 6


@WAYS
def test_the_end_of_the_stream_closes_the_last_task(arrive):
    tasks = list(arrive(*seven_classes(), NAMES, ORDER, (3, 2, 2)))
    for task in tasks:
        assert len(task.train)
        with pytest.raises(PermissionError):
            task.train.read_all()
        assert len(values(task.test)) == len(task.test)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 5), (1, 2, 3, 4, 5, 6, 7)])
@WAYS
def test_an_order_names_each_class_once(order, arrive):
    with pytest.raises(InvalidInput, match=r"must name each of 0\.\.6 exactly once"):
        next(arrive(*seven_classes(), NAMES, order, (3, 2, 2)))


@WAYS
def test_images_keep_their_ids_and_groups(arrive):
    train, test = seven_classes()
    ids = np.array([f"{i}.png" for i in range(len(train))])
    train = replace(train, ids=ids, groups=np.array([f"patient {i // 2}" for i in range(len(train))]))
    for task in arrive(train, test, NAMES, ORDER, (3, 2, 2)):
        numbers = task.train.read_all()[:, 0, 0, 0].tolist()  # image i is filled with the value i
        assert task.train.ids.tolist() == [f"{i}.png" for i in numbers]
        assert task.train.groups.tolist() == [f"patient {i // 2}" for i in numbers]
