"""The embedded data set: what it promises about counts, seeds and difficulty."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from medcil.cli.main import main
from medcil.data.sources import phantom
from medcil.data.sources.phantom import (
    CLASS_NAMES,
    CODES,
    CONFUSED_WITH,
    TEST_COUNTS,
    TRAIN_COUNTS,
    TYPICAL,
    draw,
    image_rng,
    phantom_arrays,
    write_phantom_images,
)

HAM_TRAIN = (901, 5363, 398, 262, 875, 94, 119)
HAM_TEST = (212, 1342, 116, 65, 224, 21, 23)


@pytest.fixture(scope="module")
def train():
    return phantom_arrays("train", side=24)


@pytest.fixture(scope="module")
def test():
    return phantom_arrays("test", side=24)


def test_counts_are_a_fifth_of_ham10000():
    assert tuple(round(n / 5) for n in HAM_TRAIN) == TRAIN_COUNTS
    assert tuple(max(40, round(n / 5)) for n in HAM_TEST) == TEST_COUNTS


def test_names_say_that_nothing_is_real():
    assert len(set(CLASS_NAMES)) == 7
    assert all(name.startswith("phantom ") for name in CLASS_NAMES)


def test_every_class_has_traits_and_classes_it_is_confused_with():
    assert set(TYPICAL) == set(CONFUSED_WITH) == set(CODES)
    for code, others in CONFUSED_WITH.items():
        assert code not in others
        assert set(others) <= set(CODES)


def test_arrays_have_the_promised_form(train, test):
    for (images, labels), counts in ((train, TRAIN_COUNTS), (test, TEST_COUNTS)):
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        assert images.shape == (sum(counts), 3, 24, 24)
        assert tuple(np.bincount(labels)) == counts


def test_an_image_depends_on_seed_split_and_index_alone(test):
    images, labels = test
    for index in (400, 7, 123, 7, 514, 0):
        again = draw(int(labels[index]), image_rng("test", index, 0), 24)
        np.testing.assert_array_equal(again.transpose(2, 0, 1), images[index])


def test_same_seed_same_images_another_seed_other_images(monkeypatch):
    monkeypatch.setattr(phantom, "TEST_COUNTS", (2,) * 7)
    images, labels = phantom_arrays("test", side=24, seed=0)
    again, _ = phantom_arrays("test", side=24, seed=0)
    other, other_labels = phantom_arrays("test", side=24, seed=1)
    np.testing.assert_array_equal(again, images)
    np.testing.assert_array_equal(other_labels, labels)
    assert (other != images).any(axis=(1, 2, 3)).all()


def test_train_and_test_share_no_image(train, test):
    seen = {image.tobytes() for image in train[0]}
    assert len(seen) == sum(TRAIN_COUNTS)
    assert not any(image.tobytes() in seen for image in test[0])


@pytest.mark.parametrize("label", range(7))
def test_a_larger_side_shows_the_same_picture(label):
    small = draw(label, image_rng("train", label, 3), 32).astype(float)
    large = draw(label, image_rng("train", label, 3), 128).astype(float)
    shrunk = large.reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
    assert np.abs(shrunk - small).mean() < 1.0  # of 255 gray levels


# Mean red, green and blue per class, of 1: loose enough for another machine's rounding, tight enough for a
# changed recipe. Bytes would not survive either.
MEAN_COLORS = [
    [0.602, 0.464, 0.422],
    [0.673, 0.515, 0.474],
    [0.667, 0.524, 0.491],
    [0.692, 0.514, 0.479],
    [0.669, 0.522, 0.478],
    [0.691, 0.536, 0.497],
    [0.680, 0.518, 0.488],
]


def test_mean_color_of_each_class(test):
    images, labels = test
    means = [images[labels == label].mean(axis=(0, 2, 3)) / 255 for label in range(7)]
    np.testing.assert_allclose(means, MEAN_COLORS, atol=1e-2)


def features(images):
    """Color moments and coarse pixels: what a picture shows at a glance."""
    x = images.astype(float) / 255
    coarse = x.reshape(len(x), 3, 8, 3, 8, 3).mean(axis=(3, 5)).reshape(len(x), -1)
    quantiles = np.quantile(x.reshape(len(x), 3, -1), (0.02, 0.1, 0.3, 0.5, 0.9, 0.98), axis=-1)
    steps = np.abs(np.diff(x, axis=-1)).mean(axis=(2, 3)), np.abs(np.diff(x, axis=-2)).mean(axis=(2, 3))
    contrasts = [x[:, 0] - x[:, 1], x[:, 1] - x[:, 2]]
    moments = [m for c in contrasts for m in (c.mean(axis=(1, 2)), c.std(axis=(1, 2)), c.max(axis=(1, 2)))]
    return np.hstack([coarse, x.std(axis=(2, 3)), *quantiles, *steps, np.stack(moments, axis=1)])


def test_classes_overlap_but_can_be_told_apart(train, test):
    classifier = LogisticRegression(C=0.02, class_weight="balanced", max_iter=2000)
    model = make_pipeline(StandardScaler(), classifier)
    model.fit(features(train[0]), train[1])
    predicted = model.predict(features(test[0]))
    assert 0.45 < balanced_accuracy_score(test[1], predicted) < 0.97
    recalls = [(predicted[test[1] == label] == label).mean() for label in range(7)]
    assert min(recalls) > 1 / 7


TRAINED = ("first", "second", "third")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("phantom") / "images"
    assert exit_code("phantom", "--out", out) == 0
    return out


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "images.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_manifest_lists_what_is_in_its_folder(images):
    for name in (*TRAINED, "eval"):
        found = {path.relative_to(images / name).as_posix() for path in (images / name).glob("*/*.png")}
        assert {row["path"] for row in rows(images / name)} == found
        assert {row["path"].split("/")[0] for row in rows(images / name)} == {
            row["label"] for row in rows(images / name)
        }
    with Image.open(images / "new/001.png") as unlabeled:
        assert unlabeled.size == (64, 64)


def test_classes_arrive_one_delivery_after_another_and_are_unequal(images):
    counts = {name: Counter(row["label"] for row in rows(images / name)) for name in (*TRAINED, "eval")}
    arriving = [label for name in TRAINED for label in counts[name]]
    assert len(arriving) == len(set(arriving)) == 6
    assert set(counts["eval"]) == set(arriving)
    assert max(counts["first"].values()) >= 5 * min(counts["first"].values())


def test_patients_have_several_images_and_one_folder(images):
    of_folder = {name: Counter(row["patient"] for row in rows(images / name)) for name in (*TRAINED, "eval")}
    every = Counter(person for persons in of_folder.values() for person in persons)
    assert set(every.values()) == {1}
    assert {n for persons in of_folder.values() for n in persons.values()} == {1, 2}
    for name in (*TRAINED, "eval"):
        facts = {(row["patient"], row["age"], row["sex"]) for row in rows(images / name)}
        assert len(facts) == len(of_folder[name])
        assert {row["sex"] for row in rows(images / name)} == {"f", "m"}


def test_no_picture_is_there_twice_and_the_doctor_finds_nothing(images, tmp_path):
    drawn = [hashlib.sha256(path.read_bytes()).digest() for path in images.rglob("*.png")]
    assert len(drawn) == len(set(drawn)) == 527
    for name in ("first", "second", "eval"):  # the third is of one class, which is for an update alone
        assert exit_code("check", images / name, "--json", tmp_path / f"{name}.json") == 0


def test_what_is_there_is_left_as_it_is(images, capsys):
    assert exit_code("phantom", "--out", images) == 4
    assert "is there already" in capsys.readouterr().err


def test_interrupted_it_leaves_nothing_and_can_be_run_again(tmp_path, monkeypatch, capsys):
    few = {"first": {"NV": 6, "DF": 3}, "eval": {"NV": 2}}
    monkeypatch.setattr(phantom, "FOLDERS", few)
    with monkeypatch.context() as broken:
        broken.setattr(phantom, "write_csv", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        assert exit_code("phantom", "--out", tmp_path / "images") == 130
    assert not (tmp_path / "images").exists()
    assert write_phantom_images(tmp_path / "images") == {"first": 9, "eval": 2, "new": 12}
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    write_phantom_images(tmp_path / "again")
    for path in (tmp_path / "images").rglob("*.png"):  # the same images every time
        again = tmp_path / "again" / path.relative_to(tmp_path / "images")
        assert path.read_bytes() == again.read_bytes()
    assert exit_code("phantom", "--out", tmp_path / "images/new/001.png/x") == 2
    assert "is not a folder" in capsys.readouterr().err
