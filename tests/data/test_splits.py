"""Held-out images: no group on both sides, every class with its share, the same draw everywhere."""

import csv
import hashlib
import io
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from medcil.build import RunConfig, build_stream, parse_recipe
from medcil.data.cache import prepare
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.sources import phantom
from medcil.data.sources.folder import read_own
from medcil.data.splits import (
    group_split,
    long_tail,
    long_tail_counts,
    split,
)
from medcil.data.stream import Stream
from medcil.errors import InvalidInput
from medcil.experiments.run import run_experiment
from medcil.storage.atomic import read_json

LABELS = np.array([0, 0, 0, 1, 1, 1])
GROUPS = ("p", "p", "q", "r", "s", "s")


def table_of(*, is_test=None, groups=GROUPS, published_as=None) -> ImageTable:
    return ImageTable(
        MemoryFiles({}),
        tuple(map(str, range(6))),
        LABELS,
        ("a", "b"),
        groups=groups,
        is_test=None if is_test is None else np.array(is_test, dtype=bool),
        published_as=published_as,
    )


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
        ("given", [0, 0, 1, 0, 0, 1]),
        ("benchmark", [0, 0, 1, 0, 0, 1]),
        ("groups", [0, 0, 1, 1, 0, 0]),
    ],
)
def test_a_rule_says_which_images_are_held_out(rule, held):
    table = table_of(is_test=[0, 0, 1, 0, 0, 1])
    with pytest.warns(UserWarning, match="appear on both sides") if rule == "given" else nullcontext():
        found, _, test = split(table, rule=rule, share=0.2, seed=0)
    assert found == rule
    assert np.isin(np.arange(6), test).astype(int).tolist() == held


def test_images_are_held_out_one_by_one_though_groups_are_known():
    split_groups = 0
    for seed in range(30):
        _, train, test = split(table_of(), rule="images", share=0.34, seed=seed)
        assert np.bincount(LABELS[test]).tolist() == [1, 1]
        split_groups += len({0, 1} & set(test.tolist())) == 1
        assert len(train) == 4
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
        split(table_of(groups=None), rule=rule, share=0.2, seed=0)


OWN_SPLIT = [0, 0, 1, 0, 1, 1]  # with no group on both sides


@pytest.mark.parametrize(
    ("table", "rule", "warning"),
    [
        (table_of(is_test=OWN_SPLIT), "given", None),
        (table_of(is_test=OWN_SPLIT, groups=None), "given", None),
        (table_of(is_test=OWN_SPLIT, published_as="ham10000"), "given", None),
        (table_of(), "groups", None),
        (table_of(groups=None), "images", "No split and no patients came with these images"),
        (
            table_of(published_as="ham10000"),
            "groups",
            "lists of ham10000's published split are not among its files",
        ),
    ],
)
def test_without_a_rule_the_data_decides_and_another_than_the_published_split_is_never_drawn_in_silence(
    table, rule, warning
):
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        assert split(table, rule=None, share=0.4, seed=0)[0] == rule
    assert split(table, rule="images", share=0.4, seed=0)[0] == "images"


@pytest.mark.parametrize(
    ("is_test", "warning"),
    [
        ([0, 1, 1, 1, 0, 0], "2 patients or lesions appear on both sides .* 3 of 3 test images"),
        ([0, 1, 0, 0, 0, 1], "1 patients or lesions .* 1 of 2 test images"),
        ([1, 1, 0, 0, 0, 1], None),
    ],
)
def test_patients_on_both_sides_of_a_split_are_counted_aloud(is_test, warning):
    table = table_of(is_test=is_test, groups=("ann", "ann", "bob", "bob", "bob", "eve"))
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        split(table, rule="given", share=0.2, seed=0)


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


def test_a_class_smaller_than_its_share_stays_whole():
    labels = np.repeat([0, 1, 2], [100, 3, 50])
    assert np.bincount(labels[long_tail(labels, ratio=0.25, seed=0)]).tolist() == [100, 3, 25]


def test_one_class_alone_stays_whole():
    assert len(long_tail(np.zeros(5, dtype=np.int64), ratio=0.1, seed=0)) == 5


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, float("nan")])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio is"):
        long_tail(BALANCED, ratio=ratio, seed=0)


CLASSES = ("eczema", "nevus", "wart")
Patient = Callable[[str, int], str]


def gray(c: int, i: int, *, is_test: bool) -> int:
    """Every image has a level of its own, by which it is known later."""
    return 40 * c + 2 * i + (120 if is_test else 0)


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 6), level).save(buffer, format="PNG")
    return buffer.getvalue()


def write_images(root: Path, *, n: int = 10, patient: Patient | None = None, can_test: bool = True) -> Path:
    """n training and 4 test images a class; where they cannot be read, the test images are damaged."""
    rows = ["path,label,split" + (",patient" if patient else "")]
    for part, n_images in (("train", n), ("test", 4)):
        for c, name in enumerate(CLASSES):
            for i in range(n_images):
                path = root / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                is_test = part == "test"
                whole = png(gray(c, i, is_test=is_test))
                path.write_bytes(whole if can_test or not is_test else whole[:40])
                # A patient of the test is one of training: only training images are asked whose they are.
                who = f",{patient(name, i)}" if patient else ""
                rows.append(f"{part}/{name}/{i}.png,{name},{part}{who}")
    if patient:
        (root / "list.csv").write_text("\n".join(rows))
    return root / "list.csv" if patient else root


def config(root: Path | None, *settings: str, name: str = "own", side: int = 6) -> RunConfig:
    content = {
        "data": {"name": name, "side": side, "crop": side, "held_out": 0.3},
        "scenario": {"base": 2, "increment": 1},
        "network": {"backbone": "resnet8_cifar"},
        "memory": {"per_class": 2},
        "training": {"epochs": 1, "batch_size": 8},
        "method": {"name": "balanced"},
        "execution": {"device": "cpu", "threads": 1},
    }
    return parse_recipe(content, [f"data.root={root}", *settings] if root else settings)


def levels(samples) -> list[int]:
    return samples.read_all()[:, 0, 0, 0].tolist()


def known_levels(*, is_test: bool, n: int) -> set[int]:
    return {gray(c, i, is_test=is_test) for c in range(3) for i in range(n)}


def assert_held_out_of_training(stream: Stream, *, n: int = 10) -> None:
    train, held = levels(stream.train), levels(stream.test)
    assert not set(train) & set(held)
    assert {*train, *held} == known_levels(is_test=False, n=n)
    assert len(train) + len(held) == 3 * n


def test_a_share_of_every_class_is_held_out_and_the_test_images_are_not_read(tmp_path):
    stream = build_stream(config(write_images(tmp_path, can_test=False)))
    assert_held_out_of_training(stream)
    assert stream.test.class_counts(3).tolist() == [3, 3, 3]
    assert stream.split == "0.3 of the training images, held out by images (given test not read)"


def test_without_it_the_test_images_are_read(tmp_path):
    """So that the test above can fail."""
    with pytest.raises(Exception, match="test"):
        build_stream(config(write_images(tmp_path, can_test=False), "data.held_out=null"))


@pytest.mark.parametrize("rule", ["given", "images", "groups"])
def test_patients_stay_whole_however_the_test_was_split_off(tmp_path, rule):
    """Three images of every patient; a split by images tears them apart from the test, and no further."""
    path = write_images(tmp_path, patient=lambda name, i: f"{name} {i // 3}")
    with pytest.warns(UserWarning, match="appear on both sides") if rule == "given" else nullcontext():
        stream = build_stream(config(path, f"data.split={rule}", "data.split_seed=3"))
    patient_of = {
        gray(c, i, is_test=is_test): (c, i // 3)
        for c in range(3)
        for i in range(10)
        for is_test in (False, True)
    }
    train, held = levels(stream.train), levels(stream.test)
    assert held
    assert not {patient_of[level] for level in train} & {patient_of[level] for level in held}
    assert stream.split.startswith("0.3 of the training images, held out by groups")
    # What the split set apart for the test is on neither side.
    there = config(path, f"data.split={rule}", "data.split_seed=3", "data.held_out=null")
    with pytest.warns(UserWarning, match="appear on both sides") if rule == "given" else nullcontext():
        whole = build_stream(there)
    assert Counter(train) + Counter(held) == Counter(levels(whole.train))
    assert not set(held) & set(levels(whole.test))


def test_a_prepared_store_holds_out_the_same_images(tmp_path):
    path = write_images(tmp_path / "images", patient=lambda name, i: f"{name} {i // 2}")
    prepare(read_own(path), tmp_path / "store", side=6)
    with pytest.warns(UserWarning, match="appear on both sides"):
        one, other = (build_stream(config(root)) for root in (path, tmp_path / "store"))
    assert_held_out_of_training(one)
    assert levels(one.test) == levels(other.test)
    assert levels(one.train) == levels(other.train)


def test_a_long_tail_is_cut_first_and_what_it_leaves_out_is_not_held_out(tmp_path):
    """Ten images of the first class, five of the second, two of the last; a share of these is held out."""
    root = write_images(tmp_path)
    tail = "scenario.long_tail={ratio: 0.25}"
    stream = build_stream(config(root, tail))
    whole = build_stream(config(root, tail, "data.held_out=null"))
    assert whole.train.class_counts(3).tolist() == [10, 5, 2]
    assert Counter(levels(stream.train) + levels(stream.test)) == Counter(levels(whole.train))
    counts = stream.test.class_counts(3).tolist()
    assert counts[0] == 3
    assert counts[1] in (1, 2)
    assert counts[2] == 1


def test_phantom_holds_out_of_its_training_images():
    stream = build_stream(config(None, name="phantom", side=16))
    whole = build_stream(config(None, "data.held_out=null", name="phantom", side=16))
    n = len(whole.train)
    assert len(stream.train) + len(stream.test) == n
    shares = stream.test.class_counts(7) / whole.train.class_counts(7)
    assert torch.allclose(shares, torch.tensor(0.3), atol=0.03)
    pixels, _ = phantom.phantom_arrays("test", side=16)
    tested = {image.tobytes() for image in pixels}
    assert not tested & {image.numpy().tobytes() for image in stream.test.read_all()}


def test_another_seed_holds_out_other_images(tmp_path):
    root = write_images(tmp_path)
    drawn = [levels(build_stream(config(root, f"data.split_seed={seed}")).test) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) != set(drawn[2])


@pytest.mark.parametrize("patient", [None, lambda name, i: "Jo" if name == "wart" else f"{name} {i}"])
def test_a_class_that_cannot_be_held_out_is_named(tmp_path, patient):
    root = write_images(tmp_path, patient=patient)
    settings = ["data.split=images"] if patient else ["scenario.long_tail={ratio: 0.1}"]
    what = "patient or lesion" if patient else "image"
    with pytest.warns(UserWarning, match=f"no more than one {what} of wart to train on"):
        stream = build_stream(config(root, *settings))
    assert stream.train.class_counts(3)[2] > 0
    assert stream.test.class_counts(3).tolist()[2] == 0


def test_a_run_records_what_it_was_tested_on_and_is_another_run_without(tmp_path):
    recipe = config(write_images(tmp_path / "images", can_test=False))
    metrics = run_experiment(recipe, tmp_path / "run")
    assert metrics["split"] == "0.3 of the training images, held out by images (given test not read)"
    assert metrics["inherent_counts"] == [7, 7, 7]
    assert [sum(map(sum, step["confusion"])) for step in metrics["steps"]] == [6, 9]
    assert read_json(tmp_path / "run/data.json")["test"]["images"] == 9
    assert np.isfinite(metrics["acc_balanced"])
