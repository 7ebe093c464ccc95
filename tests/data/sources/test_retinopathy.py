"""EyePACS and APTOS 2019 in Kaggle's layouts; the fundus preprocessing against scipy and plain geometry."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage

from medcil.data.decoding import read_upright
from medcil.data.samples import decode_image
from medcil.data.sources.retinopathy import (
    EYEPACS,
    cut_disk,
    find_disk,
    foreground,
    fundus_pixels,
    preprocess_fundus,
    read_aptos2019,
    read_eyepacs,
    recognizes_aptos2019,
    recognizes_eyepacs,
    resize,
)
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
    catalog = read_eyepacs(folder)
    assert catalog.names == (
        *(f"train/{image}.jpeg" for image, _ in TRAIN),
        *(f"test/{image}.jpeg" for image, _ in TEST),
    )
    assert catalog.labels.tolist() == [level for _, level in TRAIN + TEST]
    assert catalog.is_test.tolist() == [False] * 4 + [True] * 3
    assert catalog.groups == ("10", "10", "13", "1002", "1", "1", "2")
    assert catalog.class_names == ("No DR", "Mild", "Moderate", "Severe", "Proliferative DR")


def test_images_are_preprocessed(folder):
    catalog = read_eyepacs(folder)
    image = catalog.samples(24).images.read(torch.tensor([1]))[0]
    assert torch.equal(image, fundus_of(photograph(1), 24, "x"))
    assert not torch.equal(image, decode_image(photograph(1), 24))


def test_without_test_images_no_split_is_invented(folder):
    for path in (folder / "test").iterdir():
        path.unlink()
    catalog = read_eyepacs(folder)
    assert len(catalog) == 4
    assert catalog.is_test is None


def test_images_that_the_benchmarks_script_preprocessed_are_read_as_they_are(folder):
    for split in ("train", "test"):
        (folder / split).rename(folder / f"{split}_process")
    (folder / "trainLabels.csv").rename(folder / "trainLabels_process.csv")
    (folder / "retinopathy_solution.csv").rename(folder / "testLabels_process.csv")
    catalog = read_eyepacs(folder)
    assert catalog.labels.tolist() == [level for _, level in TRAIN + TEST]
    image = catalog.samples(24).images.read(torch.tensor([1]))[0]
    assert torch.equal(image, decode_image(photograph(1), 24))


def test_the_benchmarks_list_counts_where_it_lies_beside_kaggles(folder):
    (folder / "trainLabels_process.csv").write_text("image,level\n13_left,4\n10_left,0\n")
    catalog = read_eyepacs(folder)
    assert catalog.names[:2] == ("train/13_left.jpeg", "train/10_left.jpeg")
    assert catalog.is_test.tolist() == [False] * 2 + [True] * 3


@pytest.mark.parametrize("missing", ["trainLabels.csv", "retinopathy_solution.csv"])
def test_a_missing_list_is_named_with_what_is_needed_and_where_it_comes_from(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InvalidInput) as refusal:
        read_eyepacs(folder)
    first = str(refusal.value).splitlines()[0]
    for part in (missing, "train/*.jpeg", "lists beside the folders", "diabetic-retinopathy-detection"):
        assert part in first


def test_missing_training_images_are_named(folder):
    (folder / "train").rename(folder / "images")
    with pytest.raises(InvalidInput, match="lacks the folder train"):
        read_eyepacs(folder)


def test_an_image_that_is_listed_but_not_there_is_named(folder):
    (folder / "test" / "1_right.jpeg").unlink()
    with pytest.raises(InvalidInput, match=r"lacks 1 listed images, e\.g\. test/1_right"):
        read_eyepacs(folder)


@pytest.mark.parametrize("level", ["5", "", "-1", "0.5", "no"])
def test_what_is_no_grade_is_refused(folder, level):
    path = folder / "trainLabels.csv"
    path.write_text(path.read_text().replace("13_left,4", f"13_left,{level}"))
    with pytest.raises(InvalidInput, match=rf"13_left the grade '{level}'"):
        read_eyepacs(folder)


def test_it_is_recognized_by_its_list_and_folder():
    assert recognizes_eyepacs(["trainLabels.csv", "train/10_left.jpeg"])
    assert recognizes_eyepacs(["a/trainLabels_process.csv", "a/train_process/10_left.jpeg"])
    assert not recognizes_eyepacs(["trainLabels.csv", "images/10_left.jpeg"])
    assert not recognizes_eyepacs(["labels.csv", "train/10_left.jpeg"])


def test_the_published_counts_are_the_benchmarks():
    assert [sum(EYEPACS.published_counts[split]) for split in ("train", "test")] == [35_125, 53_573]
    assert all(sorted(order) == list(range(5)) for order in EYEPACS.orders)


GRADES = {"000c1434d8d7": 2, "001639a390f0": 4, "0024cdab0c1e": 1, "002c21358ce6": 0}


def aptos_photograph(seed: int, kind: str) -> bytes:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:40, :50]
    inside = (y - 20) ** 2 + (x - 25) ** 2 < 18**2
    spots = rng.integers(60, 220, size=(10, 10, 3)).repeat(4, axis=0).repeat(5, axis=1)
    buffer = io.BytesIO()
    Image.fromarray(np.where(inside[..., None], spots, 0).astype(np.uint8)).save(buffer, format=kind)
    return buffer.getvalue()


def build_aptos(root, kind="PNG", suffix="png"):
    (root / "train_images").mkdir(parents=True)
    (root / "test_images").mkdir()
    for i, code in enumerate(GRADES):
        (root / "train_images" / f"{code}.{suffix}").write_bytes(aptos_photograph(i, kind))
    (root / "test_images" / f"0005cfc8afb6.{suffix}").write_bytes(aptos_photograph(99, kind))
    lines = [f"{code},{grade}" for code, grade in GRADES.items()]
    (root / "train.csv").write_text("\n".join(["id_code,diagnosis", *lines]) + "\n")
    (root / "test.csv").write_text("id_code\n0005cfc8afb6\n")
    return root


def test_kaggles_layout_is_read_and_its_test_images_without_grades_are_not(tmp_path):
    catalog = read_aptos2019(build_aptos(tmp_path))
    assert catalog.names == tuple(f"train_images/{code}.png" for code in GRADES)
    assert catalog.labels.tolist() == list(GRADES.values())
    assert catalog.groups is None
    assert catalog.is_test is None


def test_kaggles_png_files_are_preprocessed_like_eyepacs(tmp_path):
    image = read_aptos2019(build_aptos(tmp_path)).samples(16).images.read(torch.tensor([2]))[0]
    assert torch.equal(image, fundus_of(aptos_photograph(2, "PNG"), 16, "x"))


def test_the_smaller_jpeg_form_is_read_as_it_is(tmp_path):
    image = read_aptos2019(build_aptos(tmp_path, "JPEG", "jpg")).samples(16).images.read(torch.tensor([2]))[0]
    assert torch.equal(image, decode_image(aptos_photograph(2, "JPEG"), 16))


def test_aptos_lists_give_order_and_split(tmp_path):
    root, codes = build_aptos(tmp_path), list(GRADES)
    (root / "split_train.csv").write_text(f"id_code\n{codes[3]}\n{codes[0]}\n")
    (root / "split_test.csv").write_text(f"id_code\n{codes[1]}\n")
    catalog = read_aptos2019(root)
    assert catalog.labels.tolist() == [0, 2, 4]
    assert catalog.is_test.tolist() == [False, False, True]


def test_aptos_a_listed_image_without_a_grade_is_named(tmp_path):
    root = build_aptos(tmp_path)
    (root / "split_train.csv").write_text("id_code\n0005cfc8afb6\n")
    (root / "split_test.csv").write_text("id_code\n000c1434d8d7\n")
    with pytest.raises(InvalidInput, match="has no grade for 0005cfc8afb6"):
        read_aptos2019(root)


def test_aptos_an_image_that_is_listed_but_not_there_is_named(tmp_path):
    root = build_aptos(tmp_path)
    (root / "train_images" / "001639a390f0.png").unlink()
    with pytest.raises(InvalidInput, match=r"lacks 1 listed images, e\.g\. 001639a390f0"):
        read_aptos2019(root)


@pytest.mark.parametrize("missing", ["train.csv", "train_images"])
def test_aptos_what_is_missing_is_named_with_what_is_needed_and_where_it_comes_from(tmp_path, missing):
    root = build_aptos(tmp_path)
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(InvalidInput) as refusal:
        read_aptos2019(root)
    first = str(refusal.value).splitlines()[0]
    for part in (missing, "train_images/*.png and train.csv beside it", "aptos2019-blindness-detection"):
        assert part in first


def test_aptos_it_is_recognized_by_its_table_and_folder():
    assert recognizes_aptos2019(["aptos2019/train.csv", "aptos2019/train_images/000c1434d8d7.jpg"])
    assert not recognizes_aptos2019(["train.csv", "images/000c1434d8d7.png"])
    assert not recognizes_aptos2019(["train_images/000c1434d8d7.png"])


def test_the_real_archive_has_the_published_counts(shared_data):
    catalog = read_aptos2019(shared_data / "aptos2019_160.tar")
    assert len(set(catalog.names)) == 3_662
    assert np.bincount(catalog.labels).tolist() == [1805, 370, 999, 193, 295]
    assert catalog.samples(8).images.read(torch.tensor([0, 3661])).float().std() > 1


def retina(height=300, width=400, row=150, column=200, radius=120, *, seed=0, background=3) -> np.ndarray:
    """Bright in the upper left, with vessels that are darker, on a background that is not quite black."""
    rng = np.random.default_rng(seed)
    y, x = (np.mgrid[:height, :width] - np.array([row, column])[:, None, None]) / radius
    light = 120 - 30 * x - 20 * y
    vessels = 25 * np.cos(9 * x + 4 * np.sin(5 * y)) + rng.normal(0, 4, (height, width))
    color = np.stack([light + vessels + 40, light * 0.7 + vessels, light * 0.4 + 0.5 * vessels], axis=-1)
    outside = rng.integers(0, background + 1, (height, width))[..., None]
    return np.clip(np.where((x**2 + y**2 < 1)[..., None], color, outside), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", **options)
    return buffer.getvalue()


def expected(disk: np.ndarray) -> np.ndarray:
    """The normalization of a disk that was cut and resized, written with scipy."""
    inside = foreground(disk)
    sums = 51 * 51 * ndimage.uniform_filter(disk.astype(float), size=(51, 51, 1), mode="mirror")
    number = 51 * 51 * ndimage.uniform_filter(inside.astype(float), size=51, mode="mirror")
    flat = disk - sums / np.maximum(number, 1)[..., None]
    values = flat[inside]
    z = ((flat - values.mean(axis=0)) / values.std(axis=0)).clip(-3, 3)
    levels = np.where(inside[..., None], np.floor(255 * (z + 3) / 6 + 0.5), 0)
    return ndimage.median_filter(levels, size=(3, 3, 1), mode="nearest")


def test_the_disk_is_found():
    row, column, radius = find_disk(retina(row=140, column=190, radius=110), name="x")
    assert abs(row - 140) <= 1
    assert abs(column - 190) <= 1
    assert abs(radius - 109) <= 1


def test_a_disk_that_the_frame_cuts_at_top_and_bottom_keeps_its_radius():
    row, column, radius = find_disk(retina(height=200, width=400, row=100, column=200, radius=130), name="x")
    assert abs(row - 100) <= 1
    assert abs(column - 200) <= 1
    assert abs(radius - 129) <= 1


def test_a_picture_without_background_gets_the_disk_that_fits():
    assert find_disk(np.full((100, 140, 3), 90, dtype=np.uint8), name="x") == (49, 69, 48)


def test_edges_far_from_the_center_are_no_disk():
    pixels = np.full((100, 100, 3), 90, dtype=np.uint8)
    for corner in (np.s_[:10, :10], np.s_[:10, 90:], np.s_[90:, :10], np.s_[90:, 90:]):
        pixels[corner] = 0
    assert find_disk(pixels, name="x") == (49, 49, 48)


def test_the_background_ends_where_the_histogram_is_emptiest():
    pixels = np.zeros((12, 10, 3), dtype=np.uint8)
    pixels[:, 5:] = 40
    assert foreground(pixels).sum() == 60
    pixels[:, :5] = np.arange(12)[:, None, None]  # a noisy background: grays 0 to 11, none from 12 to 39
    assert foreground(pixels).sum() == 60
    pixels[:, 5:] = (40, 8, 0)  # the mean of the channels is 16
    assert foreground(pixels).sum() == 60
    pixels[:, 5:] = (12, 12, 12)  # no gap: what follows on from the background is background
    assert not foreground(pixels).any()


def test_the_square_around_a_disk_is_black_outside_of_disk_and_picture():
    pixels = np.full((30, 30, 3), 200, dtype=np.uint8)
    square = cut_disk(pixels, 5, 15, 10)
    assert square.shape == (21, 21, 3)
    y, x = np.mgrid[-10:11, -10:11]
    bright = (y**2 + x**2 < 100) & (y + 5 >= 0)
    assert np.array_equal(square[..., 0] == 200, bright)
    assert np.array_equal(square[..., 0] == 0, ~bright)


@pytest.mark.parametrize("side", [37, 90, 200])
def test_resizing_is_bilinear_without_smoothing(side):
    pixels = np.random.default_rng(0).integers(256, size=(90, 70, 3), dtype=np.uint8)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    reference = F.interpolate(tensor, size=(side, side), mode="bilinear", align_corners=False)[0]
    difference = reference.permute(1, 2, 0).numpy() - resize(pixels, side)
    assert difference.min() > -1e-6
    assert difference.max() < 1 + 1e-6


def test_the_whole_is_what_scipy_gives():
    pixels = retina()
    disk = resize(cut_disk(pixels, *find_disk(pixels, name="x")), 512)
    difference = np.abs(preprocess_fundus(pixels).astype(int) - expected(disk))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_slow_changes_of_light_are_taken_away():
    result = preprocess_fundus(retina()).astype(float)
    y, x = np.mgrid[:512, :512] - 255.5
    inner = x**2 + y**2 < 200**2
    upper_left, lower_right = result[inner & (x < -50) & (y < -50)], result[inner & (x > 50) & (y > 50)]
    assert np.abs(upper_left.mean(axis=0) - lower_right.mean(axis=0)).max() < 6
    assert np.abs(result[inner].mean(axis=0) - 127.5).max() < 5
    assert result[x**2 + y**2 > 258**2].max() == 0


def test_brightness_and_contrast_of_the_camera_do_not_show():
    pixels = retina(background=0)
    dimmer = (pixels * 0.6).astype(np.uint8)
    difference = np.abs(preprocess_fundus(pixels).astype(float) - preprocess_fundus(dimmer))
    assert difference.mean() < 0.4 * np.abs(pixels.astype(float) - dimmer).mean()


def test_a_cameras_magenta_marks_are_left_out():
    pixels = retina()
    pixels[140:160, 190:210] = (255, 0, 255)
    assert preprocess_fundus(pixels)[250:262, 250:262].max() == 0


def test_a_channel_without_light_becomes_gray():
    pixels = retina(background=0)
    pixels[..., 2] = 0
    result = preprocess_fundus(pixels)
    assert result[200:312, 200:312, 2].min() == result[200:312, 200:312, 2].max() == 128
    assert result[200:312, 200:312, 1].std() > 10


def test_a_uniform_retina_becomes_gray():
    pixels = np.full((120, 120, 3), 90, dtype=np.uint8)
    middle = preprocess_fundus(pixels)[200:312, 200:312]
    assert 127 <= middle.min() == middle.max() <= 130  # but for the rim it would be 128


@pytest.mark.parametrize("side", [64, 512])
def test_a_file_is_decoded_preprocessed_and_resized(side):
    pixels = retina()
    result = fundus_of(encoded(pixels), side, "x")
    reference = Image.fromarray(preprocess_fundus(pixels)).resize((side, side), Image.Resampling.BILINEAR)
    assert np.array_equal(result.permute(1, 2, 0).numpy(), np.asarray(reference))


def test_a_turned_photograph_is_turned_back():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(np.rot90(retina()).copy(), exif=exif)
    assert torch.equal(fundus_of(turned, 64, "x"), fundus_of(encoded(retina()), 64, "x"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encoded(np.zeros((40, 40, 3), dtype=np.uint8)), "is black"),
        (encoded(retina())[:2000], "cannot be read as an image"),
        (b"no image", "cannot be read as an image"),
    ],
    ids=["black", "cut off", "text"],
)
def test_what_shows_no_retina_is_named(content, words):
    with pytest.raises(InvalidInput, match=rf"^10_left\.jpeg .*{words}.*remove or replace"):
        fundus_of(content, 64, "10_left.jpeg")


def test_a_single_bright_point_is_no_retina():
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[20, 20] = 255
    with pytest.raises(InvalidInput, match="shows no disk"):
        preprocess_fundus(pixels)
