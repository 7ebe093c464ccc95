"""The forgetting report against plain arithmetic, and its interval against the binomial law itself."""

import math

import numpy as np
import pytest
import torch

from medcil.clinic.holdout import Measure
from medcil.clinic.measure import (
    forgetting,
    loss_in_points,
    mean_change,
    paired_change,
    share,
    smallest_visible_loss,
)
from medcil.data.samples import Samples, TensorImages
from medcil.metrics.intervals import independent_images

NAMES = ("a", "b", "c")


def measured(labels: list[int], kind: str = "hold-out", groups: list[str] | None = None) -> Measure:
    pixels = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    names = tuple(f"{number}.png" for number in range(len(labels)))
    known = None if groups is None else tuple(groups)
    return Measure(Samples(TensorImages(pixels), torch.tensor(labels)), names, kind, known)


def report(
    labels: list[int],
    before: list[int],
    after: list[int],
    kind: str = "hold-out",
    groups: list[str] | None = None,
):
    predictions = (np.array(before, dtype=np.int64), np.array(after, dtype=np.int64))
    return forgetting(measured(labels, kind, groups), *predictions, NAMES, 2)


def test_a_report_by_hand():
    labels = [0, 0, 0, 0, 1, 1, 2, 2]
    before = [0, 0, 0, 1, 1, 0]
    after = [0, 2, 0, 0, 1, 2, 2, 1]
    found = report(labels, before, after)
    a, b = found["old_classes"]
    assert (a["before"]["right"], a["after"]["right"], a["images"]) == (3, 3, 4)  # one lost, one gained
    assert (b["before"]["right"], b["after"]["right"], b["images"]) == (1, 1, 2)
    assert a["change"]["change"] == 0
    assert found["mean_recall_of_old_classes"]["before"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert found["accuracy"] == {
        "old_classes_before": pytest.approx(4 / 6),
        "old_classes_after": pytest.approx(4 / 6),
        "all_classes_after": pytest.approx(5 / 8),
    }
    assert found["balanced_accuracy"]["all_classes_after"] == pytest.approx((3 / 4 + 1 / 2 + 1 / 2) / 3)
    assert found["new_classes"][0]["right"] == 1
    assert [(f["file"], f["before"], f["after"]) for f in found["flipped"]] == [
        ("1.png", "a", "c"),
        ("3.png", "b", "a"),
        ("5.png", "a", "c"),
    ]
    assert {(c["class"], c["taken_for"], c["images"]) for c in found["confusions"]} == {
        ("a", "c", 1),
        ("b", "c", 1),
        ("c", "b", 1),
    }
    # Wilson's interval of 3 of 4, from its quadratic: (p - x)² = z² x (1 - x) / n.
    z2 = 1.959963984540054**2 / 4
    roots = np.sort(np.roots([1 + z2, -(2 * 0.75 + z2), 0.75**2]))
    assert [a["before"]["low"], a["before"]["high"]] == pytest.approx(roots.tolist())


def test_the_verdict_says_what_the_figures_say():
    labels = [0] * 100 + [1] * 100
    right = list(labels)
    same = report(labels, right, right)["verdict"]
    assert same.startswith("The old classes are recognized about as well as before")
    assert "100.0% before, 100.0% after" in same
    assert "wide" not in same
    lost = report(labels, right, [2] * 60 + [0] * 40 + [1] * 100)
    assert lost["verdict"].startswith("The update lost some of the old classes")
    assert "Hardest hit: a, 100% before, 40% after." in lost["verdict"]
    assert loss_in_points(lost) == pytest.approx(30)
    few = report([0, 0, 1, 1], [0, 0, 1, 1], [0, 2, 1, 1])["verdict"]
    assert "not certain" in few
    assert "The interval is wide, for there are only 4 images" in few


def test_exemplars_give_no_verdict():
    found = report([0, 1, 2], [0, 1], [0, 1, 2], kind="exemplars")
    assert found["verdict"] is None
    assert found["note"] == "measured on training exemplars: optimistic"


def test_a_class_without_images_is_unknown():
    found = report([0, 0, 2], [0, 0], [0, 0, 2])
    assert found["old_classes"][1]["before"]["recall"] is None
    assert found["old_classes"][1]["change"] is None
    assert found["mean_recall_of_old_classes"]["before"] == 1
    assert "Nothing is known of b, for there is no image" in found["verdict"]
    nothing = report([2], [], [2])
    assert nothing["mean_recall_of_old_classes"] is None
    assert nothing["verdict"] is None


@pytest.mark.parametrize("images", [5, 20])
@pytest.mark.parametrize(("lost", "gained"), [(0.01, 0.01), (0.1, 0.05), (0.3, 0.1), (0.5, 0.1)])
def test_the_interval_of_a_change_holds_as_often_as_it_says(images, lost, gained):
    """Every outcome with its probability by the multinomial law."""
    held = 0.0
    for b in range(images + 1):
        for c in range(images + 1 - b):
            rest = images - b - c
            ways = math.factorial(images) / math.factorial(b) / math.factorial(c) / math.factorial(rest)
            found = paired_change(images, lost=b, gained=c)
            assert found.low <= found.change <= found.high
            held += (
                ways
                * lost**b
                * gained**c
                * (1 - lost - gained) ** rest
                * (found.low <= gained - lost <= found.high)
            )
    assert held > 0.94


@pytest.mark.parametrize("images", [5, 20])
def test_the_interval_of_the_mean_holds_as_often_as_it_says(images):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(500):
        drawn = random.multinomial(images, [0.2, 0.05, 0.75], size=7).tolist()
        found = mean_change([paired_change(images, lost=b, gained=c) for b, c, _ in drawn])
        held += found.low <= -0.15 <= found.high
    assert held / 500 > 0.92


@pytest.mark.parametrize("images", range(1, 60))
def test_the_smallest_visible_loss_is_the_first_whose_interval_is_below_zero(images):
    """Against the interval of Agresti and Min as they write it, computed here."""
    below = []
    for lost in range(images + 1):
        b, c, n = lost + 0.5, 0.5, images + 2
        below.append((c - b) / n + 1.959964 * math.sqrt(b + c - (b - c) ** 2 / n) / n < 0)
    expected = below.index(True) / images if any(below) else None
    assert smallest_visible_loss(images, None) == expected
    twins = [f"patient {i // 2}" for i in range(2 * images)]  # two images of each: worth as many patients
    seen = smallest_visible_loss(2 * images, twins)
    assert seen is None or seen >= smallest_visible_loss(2 * images, None)
    assert seen is None or expected is None or seen <= expected <= seen + 1 / images


def test_without_any_change_many_images_say_more_than_few():
    few, many = (paired_change(n, lost=0, gained=0) for n in (5, 500))
    assert few.low < -0.2 < many.low < 0 < many.high < 0.2 < few.high


def test_images_of_one_patient_say_no_more_than_one():
    """Four images of each of five patients, all four of them right or wrong together."""
    labels, groups = [0] * 20, [f"patient {i // 4}" for i in range(20)]
    before, after = [0] * 20, [0] * 16 + [2] * 4
    found = report(labels, before, after, groups=groups)
    entry, alone = found["old_classes"][0], report(labels, before, after)["old_classes"][0]
    few = report([0] * 5, [0] * 5, [0] * 4 + [2])["old_classes"][0]
    for key in ("before", "after", "change"):
        assert [entry[key][end] for end in ("low", "high")] == [few[key][end] for end in ("low", "high")]
    assert (entry["images"], entry["after"]["patients"], alone["after"]["patients"]) == (20, 5, None)
    assert entry["after"]["recall"] == alone["after"]["recall"] == 0.8
    assert entry["change"]["low"] < alone["change"]["low"]
    assert "only 20 images of 5 patients" in found["verdict"]
    single = report(labels, before, after, groups=[f"patient {i}" for i in range(20)])["old_classes"][0]
    assert single["change"] == alone["change"]


def test_patients_of_different_sizes():
    assert independent_images(6, ["a"] * 3 + ["b"] * 2 + ["c"]) == pytest.approx(36 / 14)
    assert independent_images(6, list("abcdef")) == independent_images(6, None) == 6


def test_the_interval_holds_where_patients_are_right_or_wrong_as_a_whole():
    """Every number of patients who are recognized, with its probability."""
    held = {"known": 0.0, "unknown": 0.0}
    for right in range(6):
        is_right = np.repeat(np.arange(5) < right, 4)
        for key, groups in (("known", [f"{i // 4}" for i in range(20)]), ("unknown", None)):
            found = share(is_right, groups)
            held[key] += math.comb(5, right) / 32 * (found["low"] <= 0.5 <= found["high"])
    assert held == {"known": 0.9375, "unknown": 0.625}
