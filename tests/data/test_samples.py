"""Samples against plain lists of (value, label): image i is filled with the value i."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.data.samples import Lease, Samples, TensorImages, no_samples

QUICK = settings(max_examples=60, deadline=None)
SIDE = 2
LABELS = st.lists(st.integers(0, 4), max_size=12)


def filled(values, labels) -> Samples:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)
    return Samples(TensorImages(pixels.clone()), torch.tensor(labels, dtype=torch.int64))


def pairs(samples) -> list[tuple[int, int]]:
    images = samples.read_all()
    assert images.shape == (len(samples), 3, SIDE, SIDE)
    assert bool((images == images[:, :1, :1, :1]).all())
    return list(zip(images[:, 0, 0, 0].tolist(), samples.labels.tolist(), strict=True))


@QUICK
@given(LABELS, st.data())
def test_select_takes_what_the_indices_say_in_their_order(labels, data):
    samples = filled(range(len(labels)), labels)
    indices = data.draw(st.lists(st.integers(0, len(labels) - 1), max_size=8)) if labels else []
    selected = samples.select(torch.tensor(indices, dtype=torch.int64))
    assert pairs(selected) == [(i, labels[i]) for i in indices]
    again = data.draw(st.permutations(range(len(indices))))
    assert pairs(selected.select(torch.tensor(again, dtype=torch.int64))) == [
        (indices[i], labels[indices[i]]) for i in again
    ]


@QUICK
@given(st.lists(LABELS, min_size=1, max_size=4), st.data())
def test_a_sum_is_one_after_another(parts, data):
    expected, total = [], no_samples(SIDE)
    for labels in parts:
        values = range(len(expected), len(expected) + len(labels))
        expected += zip(values, labels, strict=True)
        total += filled(values, labels)
    assert pairs(total) == expected
    mixed = data.draw(st.permutations(range(len(expected))))
    assert pairs(total.select(torch.tensor(mixed, dtype=torch.int64))) == [expected[i] for i in mixed]


@QUICK
@given(LABELS, st.integers(0, 4))
def test_of_class_keeps_the_order(labels, label):
    expected = [(i, other) for i, other in enumerate(labels) if other == label]
    assert pairs(filled(range(len(labels)), labels).of_class(label)) == expected


@QUICK
@given(LABELS, st.integers(5, 9))
def test_class_counts_count(labels, n_classes):
    counts = filled(range(len(labels)), labels).class_counts(n_classes)
    assert counts.tolist() == [labels.count(c) for c in range(n_classes)]


def test_copied_samples_outlive_their_source():
    pixels = torch.full((2, 3, SIDE, SIDE), 7, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    lease = Lease(TensorImages(pixels))
    copy = Samples(lease, labels).copied()
    lease.end()
    pixels.zero_()
    labels.zero_()
    assert pairs(copy) == [(7, 0), (7, 1)]


def test_as_many_images_as_labels():
    with pytest.raises(ValueError, match="differ in number"):
        filled([0, 1], [0])


def test_many_sources_can_be_joined():
    total = no_samples(SIDE)
    for i in range(100):
        total += filled([i], [i])
    assert pairs(total) == [(i, i) for i in range(100)]


def test_a_lease_reads_until_it_ends():
    source = TensorImages(torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 2, 2).clone())
    lease = Lease(source)
    assert torch.equal(lease.read(torch.tensor([2])), source.read(torch.tensor([2])))
    lease.end()
    assert (len(lease), lease.side) == (3, 2)
    with pytest.raises(PermissionError, match="earlier task"):
        lease.read(torch.tensor([0]))


def test_an_ended_lease_is_closed_to_all_who_hold_it():
    lease = Lease(filled([0, 1], [0, 1]).images)
    held = Samples(lease, torch.tensor([0, 1]))
    through = [held.of_class(0), held + filled([2], [2]), held.select(torch.tensor([1, 0]))]
    lease.end()
    for samples in through:
        with pytest.raises(PermissionError):
            samples.read_all()
