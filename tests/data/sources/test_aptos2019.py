"""APTOS 2019: Kaggle's PNG files, and the real smaller form."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.data.decoding.fundus import fundus_pixels
from medcil.data.decoding.image import read_upright
from medcil.data.samples import decode_image
from medcil.data.sources.aptos2019 import read_table, recognizes
from medcil.errors import InvalidInput

GRADES = {"000c1434d8d7": 2, "001639a390f0": 4, "0024cdab0c1e": 1, "002c21358ce6": 0}


def fundus_of(content, side, name):
    return fundus_pixels(read_upright(content, name=name), side, name)


def photograph(seed: int, kind: str) -> bytes:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:40, :50]
    inside = (y - 20) ** 2 + (x - 25) ** 2 < 18**2
    spots = rng.integers(60, 220, size=(10, 10, 3)).repeat(4, axis=0).repeat(5, axis=1)
    buffer = io.BytesIO()
    Image.fromarray(np.where(inside[..., None], spots, 0).astype(np.uint8)).save(buffer, format=kind)
    return buffer.getvalue()


def build(root, kind="PNG", suffix="png"):
    (root / "train_images").mkdir(parents=True)
    (root / "test_images").mkdir()
    for i, code in enumerate(GRADES):
        (root / "train_images" / f"{code}.{suffix}").write_bytes(photograph(i, kind))
    (root / "test_images" / f"0005cfc8afb6.{suffix}").write_bytes(photograph(99, kind))
    lines = [f"{code},{grade}" for code, grade in GRADES.items()]
    (root / "train.csv").write_text("\n".join(["id_code,diagnosis", *lines]) + "\n")
    (root / "test.csv").write_text("id_code\n0005cfc8afb6\n")
    return root


def test_kaggles_layout_is_read_and_its_test_images_without_grades_are_not(tmp_path):
    catalog = read_table(build(tmp_path))
    assert catalog.names == tuple(f"train_images/{code}.png" for code in GRADES)
    assert catalog.labels.tolist() == list(GRADES.values())
    assert catalog.groups is None
    assert catalog.is_test is None


def test_kaggles_png_files_are_preprocessed_like_eyepacs(tmp_path):
    image = read_table(build(tmp_path)).samples(16).images.read(torch.tensor([2]))[0]
    assert torch.equal(image, fundus_of(photograph(2, "PNG"), 16, "x"))


def test_the_smaller_jpeg_form_is_read_as_it_is(tmp_path):
    image = read_table(build(tmp_path, "JPEG", "jpg")).samples(16).images.read(torch.tensor([2]))[0]
    assert torch.equal(image, decode_image(photograph(2, "JPEG"), 16))


def test_lists_give_order_and_split(tmp_path):
    root, codes = build(tmp_path), list(GRADES)
    (root / "split_train.csv").write_text(f"id_code\n{codes[3]}\n{codes[0]}\n")
    (root / "split_test.csv").write_text(f"id_code\n{codes[1]}\n")
    catalog = read_table(root)
    assert catalog.labels.tolist() == [0, 2, 4]
    assert catalog.is_test.tolist() == [False, False, True]


def test_a_listed_image_without_a_grade_is_named(tmp_path):
    root = build(tmp_path)
    (root / "split_train.csv").write_text("id_code\n0005cfc8afb6\n")
    (root / "split_test.csv").write_text("id_code\n000c1434d8d7\n")
    with pytest.raises(InvalidInput, match="has no grade for 0005cfc8afb6"):
        read_table(root)


def test_an_image_that_is_listed_but_not_there_is_named(tmp_path):
    root = build(tmp_path)
    (root / "train_images" / "001639a390f0.png").unlink()
    with pytest.raises(InvalidInput, match=r"lacks 1 listed images, e\.g\. 001639a390f0"):
        read_table(root)


@pytest.mark.parametrize("missing", ["train.csv", "train_images"])
def test_what_is_missing_is_named_with_what_is_needed_and_where_it_comes_from(tmp_path, missing):
    root = build(tmp_path)
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(InvalidInput) as refusal:
        read_table(root)
    first = str(refusal.value).splitlines()[0]
    for part in (missing, "train_images/*.png and train.csv beside it", "aptos2019-blindness-detection"):
        assert part in first


def test_it_is_recognized_by_its_table_and_folder():
    assert recognizes(["aptos2019/train.csv", "aptos2019/train_images/000c1434d8d7.jpg"])
    assert not recognizes(["train.csv", "images/000c1434d8d7.png"])
    assert not recognizes(["train_images/000c1434d8d7.png"])


def test_the_real_archive_has_the_published_counts(shared_data):
    catalog = read_table(shared_data / "aptos2019_160.tar")
    assert len(set(catalog.names)) == 3_662
    assert np.bincount(catalog.labels).tolist() == [1805, 370, 999, 193, 295]
    assert catalog.samples(8).images.read(torch.tensor([0, 3661])).float().std() > 1
