"""EyePACS under Kaggle's names: JPEG files of drawn retinas."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.data.decoding.fundus import fundus_pixels
from medcil.data.decoding.image import read_upright
from medcil.data.samples import decode_image
from medcil.data.sources.eyepacs import COUNTS, ORDERS, read_table, recognizes
from medcil.errors import InvalidInput

TRAIN = (("10_left", 0), ("10_right", 1), ("13_left", 4), ("1002_right", 2))
TEST = (("1_left", 3), ("1_right", 0), ("2_left", 2))


def fundus_of(content, side, name):
    return fundus_pixels(read_upright(content, name=name), side, name)


def photograph(seed: int) -> bytes:
    """A bright disk with spots on black, as a JPEG file."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:60, :80]
    inside = (y - 30) ** 2 + (x - 40) ** 2 < 27**2
    spots = rng.integers(60, 220, size=(15, 20, 3)).repeat(4, axis=0).repeat(4, axis=1)
    buffer = io.BytesIO()
    Image.fromarray(np.where(inside[..., None], spots, 0).astype(np.uint8)).save(
        buffer, format="JPEG", quality=95
    )
    return buffer.getvalue()


def write_images(folder, listed, seed=0):
    folder.mkdir(parents=True)
    for i, (image, _) in enumerate(listed):
        (folder / f"{image}.jpeg").write_bytes(photograph(seed + i))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "diabetic-retinopathy-detection"
    write_images(root / "train", TRAIN)
    write_images(root / "test", TEST, seed=100)
    write_images(root / "sample", TRAIN[:1], seed=200)
    lines = [f"{image},{level}" for image, level in TRAIN]
    (root / "trainLabels.csv").write_text("\n".join(["image,level", *lines]) + "\n")
    lines = [f"{image},{level},Private" for image, level in TEST]
    (root / "retinopathy_solution.csv").write_text("\n".join(["image,level,Usage", *lines]) + "\n")
    return root


def test_the_split_is_kaggles_and_groups_are_patients(folder):
    catalog = read_table(folder)
    assert catalog.names == (
        *(f"train/{image}.jpeg" for image, _ in TRAIN),
        *(f"test/{image}.jpeg" for image, _ in TEST),
    )
    assert catalog.labels.tolist() == [level for _, level in TRAIN + TEST]
    assert catalog.is_test.tolist() == [False] * 4 + [True] * 3
    assert catalog.groups == ("10", "10", "13", "1002", "1", "1", "2")
    assert catalog.class_names == ("No DR", "Mild", "Moderate", "Severe", "Proliferative DR")


def test_images_are_preprocessed(folder):
    catalog = read_table(folder)
    image = catalog.samples(24).images.read(torch.tensor([1]))[0]
    assert torch.equal(image, fundus_of(photograph(1), 24, "x"))
    assert not torch.equal(image, decode_image(photograph(1), 24))


def test_without_test_images_no_split_is_invented(folder):
    for path in (folder / "test").iterdir():
        path.unlink()
    catalog = read_table(folder)
    assert len(catalog) == 4
    assert catalog.is_test is None


def test_images_that_the_benchmarks_script_preprocessed_are_read_as_they_are(folder):
    for split in ("train", "test"):
        (folder / split).rename(folder / f"{split}_process")
    (folder / "trainLabels.csv").rename(folder / "trainLabels_process.csv")
    (folder / "retinopathy_solution.csv").rename(folder / "testLabels_process.csv")
    catalog = read_table(folder)
    assert catalog.labels.tolist() == [level for _, level in TRAIN + TEST]
    image = catalog.samples(24).images.read(torch.tensor([1]))[0]
    assert torch.equal(image, decode_image(photograph(1), 24))


def test_the_benchmarks_list_counts_where_it_lies_beside_kaggles(folder):
    (folder / "trainLabels_process.csv").write_text("image,level\n13_left,4\n10_left,0\n")
    catalog = read_table(folder)
    assert catalog.names[:2] == ("train/13_left.jpeg", "train/10_left.jpeg")
    assert catalog.is_test.tolist() == [False] * 2 + [True] * 3


@pytest.mark.parametrize("missing", ["trainLabels.csv", "retinopathy_solution.csv"])
def test_a_missing_list_is_named_with_what_is_needed_and_where_it_comes_from(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InvalidInput) as refusal:
        read_table(folder)
    first = str(refusal.value).splitlines()[0]
    for part in (missing, "train/*.jpeg", "lists beside the folders", "diabetic-retinopathy-detection"):
        assert part in first


def test_missing_training_images_are_named(folder):
    (folder / "train").rename(folder / "images")
    with pytest.raises(InvalidInput, match="lacks the folder train"):
        read_table(folder)


def test_an_image_that_is_listed_but_not_there_is_named(folder):
    (folder / "test" / "1_right.jpeg").unlink()
    with pytest.raises(InvalidInput, match=r"lacks 1 listed images, e\.g\. test/1_right"):
        read_table(folder)


@pytest.mark.parametrize("level", ["5", "", "-1", "0.5", "no"])
def test_what_is_no_grade_is_refused(folder, level):
    path = folder / "trainLabels.csv"
    path.write_text(path.read_text().replace("13_left,4", f"13_left,{level}"))
    with pytest.raises(InvalidInput, match=rf"13_left the grade '{level}'"):
        read_table(folder)


def test_it_is_recognized_by_its_list_and_folder():
    assert recognizes(["trainLabels.csv", "train/10_left.jpeg"])
    assert recognizes(["a/trainLabels_process.csv", "a/train_process/10_left.jpeg"])
    assert not recognizes(["trainLabels.csv", "images/10_left.jpeg"])
    assert not recognizes(["labels.csv", "train/10_left.jpeg"])


def test_the_published_counts_are_the_benchmarks():
    assert [sum(COUNTS[split]) for split in ("train", "test")] == [35_125, 53_573]
    assert all(sorted(order) == list(range(5)) for order in ORDERS)
