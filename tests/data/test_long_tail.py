"""The long tail: class sizes from independent arithmetic and from the published CIFAR100-LT."""

import numpy as np
import pytest

from medcil.data.splits import long_tail, long_tail_counts

BALANCED = np.tile(np.arange(100), 500)


def test_cifar100_keeps_10_847_images_from_500_down_to_5():
    counts = np.bincount(BALANCED[long_tail(BALANCED, ratio=0.01, seed=0)])
    assert counts.sum() == 10_847
    assert counts[:4].tolist() == [500, 477, 455, 434]
    assert counts[-1] == 5
    assert (counts <= 20).sum() == 31
    assert np.array_equal(counts, np.floor(500 * np.exp(np.log(0.01) * np.arange(100) / 99) + 1e-9))


def test_the_published_table_has_these_counts(shared_data):
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = parquet.read_table(shared_data / "cifar100lt-train.parquet")["fine_label"].to_numpy()
    assert np.bincount(labels).tolist() == list(long_tail_counts(500, 100, ratio=0.01))


def test_indices_ascend_and_name_each_image_once():
    kept = long_tail(BALANCED, ratio=0.1, seed=3)
    assert (np.diff(kept) > 0).all()


def test_the_seed_chooses_other_images_of_the_same_number():
    first, again, other = (long_tail(BALANCED, ratio=0.1, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(np.bincount(BALANCED[first]), np.bincount(BALANCED[other]))


def test_the_choice_is_the_usual_one_class_after_class():
    labels = np.array([1, 0, 1, 0, 1, 0, 1, 0])
    state = np.random.RandomState(7)
    zeros, ones = np.array([1, 3, 5, 7]), np.array([0, 2, 4, 6])
    state.shuffle(zeros)
    state.shuffle(ones)
    assert long_tail(labels, ratio=0.5, seed=7).tolist() == sorted([*zeros, *ones[:2]])


def test_classes_shrink_in_the_order_given():
    labels = np.repeat([0, 1, 2], 100)
    kept = long_tail(labels, ratio=0.04, seed=0, order=[2, 0, 1])
    assert np.bincount(labels[kept]).tolist() == [20, 4, 100]


def test_a_class_smaller_than_its_share_stays_whole():
    labels = np.repeat([0, 1, 2], [100, 3, 50])
    assert np.bincount(labels[long_tail(labels, ratio=0.25, seed=0)]).tolist() == [100, 3, 25]


def test_one_class_alone_stays_whole():
    assert len(long_tail(np.zeros(5, dtype=np.int64), ratio=0.1, seed=0)) == 5


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, float("nan")])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio is"):
        long_tail(BALANCED, ratio=ratio, seed=0)


def test_an_order_that_is_none_is_refused():
    with pytest.raises(ValueError, match="exactly once"):
        long_tail(BALANCED, ratio=0.1, seed=0, order=[0] * 100)
