"""Held-out images: no group on both sides, every class with its share, the same draw everywhere."""

import csv
import hashlib
import io
import tarfile
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from medcil.data.splits import choose_rule, group_split, held_out, warn_of_shared_groups
from medcil.errors import InvalidInput

LABELS = np.array([0, 0, 0, 1, 1, 1])
GROUPS = ("p", "p", "q", "r", "s", "s")
# Together 10,000 random cases.
CASES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
SHARES = st.sampled_from([0.2, 0.1, 0.25, 1 / 3, 0.5, 0.05, 0.9]) | st.floats(0.01, 0.99)
SEEDS = st.integers(0, 10_000)


@st.composite
def pure_groups(draw):
    """Labels and groups where a group has images of one class, as lesions have, in any order of images."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=25))
    images = [(label, f"lesion {i}") for i, (label, size) in enumerate(sizes) for _ in range(size)]
    draw(st.randoms(use_true_random=False)).shuffle(images)
    return np.array([label for label, _ in images]), [group for _, group in images]


@st.composite
def any_groups(draw):
    """Labels and groups without any rule, as the two eyes of patients."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=40))
    return np.array([label for label, _ in pairs]), [f"patient {group}" for _, group in pairs]


def sides(labels, groups, held):
    """For each class: its groups with their sizes, held out and left for training."""
    found = {int(c): (Counter(), Counter()) for c in np.unique(labels)}
    for label, group, is_held in zip(labels.tolist(), groups, held.tolist(), strict=True):
        found[label][0 if is_held else 1][group] += 1
    return found


def assert_whole(groups, held):
    by_group = defaultdict(set)
    for group, is_held in zip(groups, held.tolist(), strict=True):
        by_group[group].add(is_held)
    assert all(len(both) == 1 for both in by_group.values())


@pytest.mark.slow
@settings(max_examples=3500, **CASES)
@given(pure_groups(), SHARES, SEEDS)
def test_each_class_is_within_its_largest_group_of_its_share(case, share, seed):
    labels, groups = case
    held = group_split(labels, groups, share=share, seed=seed)
    assert_whole(groups, held)
    for tested, trained in sides(labels, groups, held).values():
        sizes = [*tested.values(), *trained.values()]
        assert abs(sum(tested.values()) - share * sum(sizes)) <= max(sizes) + 1e-9
        assert trained
        assert tested or len(sizes) == 1


@pytest.mark.slow
@settings(max_examples=2500, **CASES)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), SHARES, SEEDS, st.booleans())
def test_single_images_are_split_within_one_image_of_the_share(labels, share, seed, is_named):
    names = [f"image {i}" for i in range(len(labels))]
    labels = np.array(labels)
    held = group_split(labels, names if is_named else None, share=share, seed=seed)
    for c, n in Counter(labels.tolist()).items():
        n_held = int(held[labels == c].sum())
        assert abs(n_held - share * n) <= 1 + 1e-9
        assert n_held <= n - 1
        assert n_held >= 1 or n == 1
        if 1 <= share * n <= n - 1:
            assert abs(n_held - share * n) <= 0.5 + 1e-9


@pytest.mark.slow
@settings(max_examples=3000, **CASES)
@given(any_groups(), SHARES, SEEDS)
@example(  # where moving groups makes room for a test image that there was none for before
    (np.array([2, 0, 1, 1, 0, 2, 0, 0]), ["p0", "p0", "p1", "p4", "p1", "p4", "p1", "p3"]), 0.1, 73
)
def test_groups_of_several_classes_stay_whole_and_no_class_loses_its_training(case, share, seed):
    labels, groups = case
    held = group_split(labels, groups, share=share, seed=seed)
    assert_whole(groups, held)
    found = sides(labels, groups, held)
    assert all(trained for _, trained in found.values())
    last = {next(iter(trained)) for _, trained in found.values() if len(trained) == 1}
    for tested, trained in found.values():
        # Without a test image only where each of its groups is all that some class has left.
        assert tested or len(trained) == 1 or set(trained) <= last


@pytest.mark.slow
@settings(max_examples=1000, **CASES)
@given(st.one_of(pure_groups(), any_groups()), SEEDS, st.randoms(use_true_random=False))
def test_the_order_of_the_images_does_not_matter(case, seed, random):
    labels, groups = case
    held = group_split(labels, groups, seed=seed)
    again = group_split(labels, groups, seed=seed)
    np.testing.assert_array_equal(held, again)
    order = list(range(len(labels)))
    random.shuffle(order)
    shuffled = group_split(labels[order], [groups[i] for i in order], seed=seed)
    np.testing.assert_array_equal(shuffled, held[order])


def test_the_draw_is_the_same_forever():
    """A run that draws its split must find the same one with any later version."""
    held = group_split(np.repeat([0, 1], 10), None, share=0.3, seed=7)
    by_digest = sorted(range(20), key=lambda i: hashlib.sha256(f"7 {i}".encode()).hexdigest())
    first_three = [[i for i in by_digest if i // 10 == c][:3] for c in (0, 1)]
    assert (
        np.flatnonzero(held).tolist() == sorted([*first_three[0], *first_three[1]]) == [3, 7, 8, 10, 14, 19]
    )


def test_another_seed_draws_another_split_without_favorites():
    labels = np.repeat([0, 1], 50)
    draws = np.array([group_split(labels, None, share=0.2, seed=seed) for seed in range(400)])
    assert (draws.reshape(400, 2, 50).sum(axis=2) == 10).all()
    assert len({draw.tobytes() for draw in draws}) == 400
    # Each image's count is binomial(400, 0.2): mean 80, deviation 8; five deviations around it.
    assert 40 <= draws.sum(axis=0).min() <= draws.sum(axis=0).max() <= 120


@pytest.mark.parametrize(("n_small", "share"), [(1, 0.2), (30, 0.1)])
def test_a_class_of_one_large_and_one_small_group_tests_on_the_small_one(n_small, share):
    """Also where both are larger than the share."""
    groups = np.array(["large"] * 50 + ["small"] * n_small)
    for seed in range(20):
        held = group_split(np.zeros(len(groups), dtype=int), groups.tolist(), share=share, seed=seed)
        assert set(groups[held]) == {"small"}


def test_three_classes_that_share_three_groups_pairwise_all_keep_training_images():
    """No split gives all three a test image too: two groups would have to be on different sides thrice."""
    labels, groups = np.array([0, 0, 1, 1, 2, 2]), ["a", "b", "b", "c", "c", "a"]
    for seed in range(20):
        found = sides(labels, groups, group_split(labels, groups, seed=seed))
        assert all(trained for _, trained in found.values())
        assert sum(bool(tested) for tested, _ in found.values()) == 2


def test_patients_with_images_of_several_classes_keep_the_shares_close():
    """Like eyes: two images a patient, mostly of the same grade."""
    rng = np.random.default_rng(0)
    left = rng.choice(5, size=3000, p=(0.73, 0.07, 0.15, 0.03, 0.02))
    right = np.where(rng.random(3000) < 0.8, left, rng.choice(5, size=3000))
    labels, groups = np.concatenate([left, right]), [f"{i % 3000}" for i in range(6000)]
    held = group_split(labels, groups, seed=0)
    assert_whole(groups, held)
    for c in range(5):
        assert abs(held[labels == c].sum() - 0.2 * (labels == c).sum()) <= 2


def test_patients_with_images_of_all_classes_keep_the_shares_close_too():
    """Six images of each, hardly two alike: class after class alone would leave some up to 36 images off."""
    rng = np.random.default_rng(0)
    usual = rng.choice(5, size=200, p=(0.73, 0.07, 0.15, 0.03, 0.02))
    labels = np.where(rng.random((200, 6)) < 0.2, usual[:, None], rng.integers(5, size=(200, 6))).flatten()
    groups = [f"patient {i // 6}" for i in range(1200)]
    for seed in range(10):
        held = group_split(labels, groups, seed=seed)
        assert_whole(groups, held)
        for c in range(5):
            assert abs(held[labels == c].sum() - 0.2 * (labels == c).sum()) <= 2.5


def test_what_is_settled_is_not_drawn():
    """Ten groups of two: whichever side they would be drawn to, two are held, two kept, and they count."""
    labels, groups = np.zeros(20, dtype=int), [f"group {i // 2}" for i in range(20)]
    for seed in range(20):
        held = group_split(
            labels,
            groups,
            share=0.3,
            held={"group 1", "group 2"},
            kept={"group 3", "group 4"},
            seed=seed,
        )
        assert_whole(groups, held)
        found = {group for group, is_held in zip(groups, held.tolist(), strict=True) if is_held}
        assert {"group 1", "group 2"} < found
        assert not {"group 3", "group 4"} & found
        assert held.sum() == 6


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_outside_of_zero_and_one_is_refused(share):
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        group_split(LABELS, None, share=share, seed=0)


def test_the_lesions_of_ham10000_stay_whole_and_every_class_keeps_its_share(shared_data):
    with tarfile.open(shared_data / "ham10000_200x150.tar.gz") as archive:
        name = next(name for name in archive.getnames() if name.endswith("HAM10000_metadata.csv"))
        rows = list(csv.DictReader(io.StringIO(archive.extractfile(name).read().decode())))
    labels = np.unique([row["dx"] for row in rows], return_inverse=True)[1]
    lesions = np.array([row["lesion_id"] for row in rows])
    assert (len(rows), len(set(lesions))) == (10_015, 7_470)
    held = group_split(labels, lesions.tolist(), seed=0)
    assert set(lesions[held]) & set(lesions[~held]) == set()
    for c in range(7):
        n = int((labels == c).sum())
        assert abs(held[labels == c].sum() - 0.2 * n) <= 1


@pytest.mark.parametrize(
    ("rule", "held"),
    [
        ("given", [0, 0, 1, 0, 0, 0]),
        ("benchmark", [0, 0, 1, 0, 0, 0]),
        ("groups", [0, 0, 1, 1, 0, 0]),
    ],
)
def test_a_rule_says_which_images_are_held_out(rule, held):
    is_test = np.array([0, 0, 1, 0, 0, 0], dtype=bool)
    found = held_out(LABELS, GROUPS, is_test, rule=rule, share=0.2, seed=0)
    assert found.astype(int).tolist() == held


def test_images_are_held_out_one_by_one_though_groups_are_known():
    split_groups = 0
    for seed in range(30):
        held = held_out(LABELS, GROUPS, None, rule="images", share=0.34, seed=seed)
        assert [held[:3].sum(), held[3:].sum()] == [1, 1]
        split_groups += int(held[0] != held[1])
    assert split_groups > 5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("given", "data.split is given, but no split came with these images"),
        ("benchmark", "data.split is benchmark, but no split came"),
        ("groups", "data.split is groups, but nothing says which patient"),
    ],
)
def test_a_rule_that_the_data_does_not_allow_is_refused(rule, message):
    with pytest.raises(InvalidInput, match=message):
        held_out(LABELS, None, None, rule=rule, share=0.2, seed=0)


def test_without_a_rule_the_data_decides():
    assert choose_rule(None, has_split=True, has_groups=True) == "given"
    assert choose_rule(None, has_split=True, has_groups=False) == "given"
    assert choose_rule(None, has_split=False, has_groups=True) == "groups"
    with pytest.warns(UserWarning, match="No split and no patients came with these images"):
        assert choose_rule(None, has_split=False, has_groups=False) == "images"


def test_another_split_than_the_published_one_is_never_drawn_in_silence():
    with pytest.warns(UserWarning, match="lists of ham10000's published split are not among its files"):
        assert choose_rule(None, has_split=False, has_groups=True, published_as="ham10000") == "groups"
    assert choose_rule(None, has_split=True, has_groups=True, published_as="ham10000") == "given"
    assert choose_rule("groups", has_split=False, has_groups=True, published_as="ham10000") == "groups"


def test_patients_on_both_sides_of_a_split_are_counted_aloud():
    groups = ["ann", "ann", "bob", "bob", "bob", "eve"]
    with pytest.warns(UserWarning, match="2 patients or lesions appear on both sides .* 3 of 3 test images"):
        warn_of_shared_groups(groups, np.array([False, True, True, True, False, False]))
    with pytest.warns(UserWarning, match="1 patients or lesions .* 1 of 2 test images"):
        warn_of_shared_groups(groups, np.array([False, True, False, False, False, True]))
    warn_of_shared_groups(groups, np.array([True, True, False, False, False, True]))


@pytest.mark.parametrize("rule", ["given", "benchmark", "groups", "images"])
def test_a_rule_asked_for_is_the_rule(rule):
    assert choose_rule(rule, has_split=True, has_groups=True) == rule
    assert choose_rule(rule, has_split=False, has_groups=False) == rule
