"""The data's doctor: every finding on small catalogs, and what it says of real datasets."""

import dataclasses
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.check import Finding, Report, check, near_duplicates
from medcil.check.findings import group_findings
from medcil.check.near_duplicates import close_hashes, difference_hashes, near_pairs
from medcil.check.scan import scan
from medcil.data.cache import open_cache, prepare
from medcil.data.image_table import Dataset, ImageTable, MemoryFiles
from medcil.data.sources import find_dataset
from medcil.data.sources.folder import read_own
from medcil.data.splits import group_split
from medcil.errors import InvalidInput


def picture(seed: int, *, width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    """Soft random spots: no two seeds look alike."""
    spots = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, image_format: str = "PNG", **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=image_format, **options)
    return buffer.getvalue()


def catalog_of(
    contents: Sequence[bytes],
    labels: Sequence[int] | None = None,
    *,
    class_names: Sequence[str] = ("MEL", "NV"),
    groups: Sequence[str] | None = None,
    is_test: Sequence[bool] | None = None,
) -> ImageTable:
    """Files 0.png, 1.png, ...; without labels, the classes take turns."""
    names = tuple(f"{i}.png" for i in range(len(contents)))
    turns = [i % len(class_names) for i in range(len(contents))]
    return ImageTable(
        MemoryFiles(dict(zip(names, contents, strict=True))),
        names,
        np.array(turns if labels is None else labels, dtype=np.int64),
        tuple(class_names),
        None if groups is None else tuple(groups),
        None if is_test is None else np.array(is_test, dtype=bool),
    )


def published_with(
    counts: Mapping[str, tuple[int, ...]] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    left_out: Mapping[str, int] | None = None,
) -> Dataset:
    """A dataset of which only the number of images is known."""
    return Dataset(
        "", (), (), (), published_counts=counts or {}, published_sizes=sizes or {}, left_out=left_out or {}
    )


def sound(n: int = 40, *, first: int = 0) -> list[bytes]:
    """So many different pictures, all alike in kind."""
    return [encoded(picture(first + i)) for i in range(n)]


def found(report: Report, code: str) -> Finding:
    matching = [finding for finding in report.findings if finding.code == code]
    assert len(matching) == 1, [finding.code for finding in report.findings]
    return matching[0]


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_sound_data_has_no_findings_and_is_counted():
    groups = [f"patient {i // 2}" for i in range(50)]
    is_test = [i // 2 >= 20 for i in range(50)]
    report = check(catalog_of(sound(50), groups=groups, is_test=is_test))
    assert report.findings == ()
    assert report.worst is None
    assert [(c.name, c.images, c.train, c.test, c.groups) for c in report.classes] == [
        ("MEL", 25, 20, 5, 25),
        ("NV", 25, 20, 5, 25),
    ]
    assert (report.n_images, report.n_train, report.n_test, report.n_groups) == (50, 40, 10, 25)
    assert report.imbalance == 1.0
    assert (report.formats, report.modes, report.sizes) == ({"PNG": 50}, {"RGB": 50}, {"64 x 48": 50})
    assert report.agrees_with_published is None


def test_the_imbalance_is_that_of_the_training_images():
    labels = [0] * 60 + [1] * 25
    report = check(catalog_of(sound(85), labels, is_test=[False] * 60 + [True] * 5 + [False] * 20))
    assert report.imbalance == 60 / 20
    assert check(catalog_of(sound(85), labels)).imbalance == 60 / 25


def test_every_damaged_file_is_named_with_its_reason():
    contents = sound()
    contents[3] = contents[3][: len(contents[3]) // 2]
    contents[5] = b"no image at all"
    jpeg = encoded(picture(99), "JPEG")
    contents[7] = jpeg[:-40]
    catalog = catalog_of(contents)
    gone = MemoryFiles({name: catalog.files.read(name) for name in catalog.names if name != "9.png"})
    report = check(ImageTable(gone, catalog.names, catalog.labels, catalog.class_names))
    finding = found(report, "unreadable")
    assert (finding.severity, finding.count) == ("error", 4)
    reasons = dict(example.split(": ", 1) for example in finding.examples)
    assert list(reasons) == ["3.png", "5.png", "7.png", "9.png"]
    assert all(reasons.values())
    assert report.worst == "error"
    assert sum(report.formats.values()) == 36


def test_a_cut_off_picture_is_found_though_its_small_version_decodes():
    """A progressive JPEG's first scan shows the whole picture, only coarsely."""
    whole = encoded(picture(1, width=400, height=300), "JPEG", progressive=True, quality=90)
    report = check(catalog_of([*sound(), whole[: len(whole) * 2 // 3]]))
    assert found(report, "unreadable").examples[0].startswith("40.png: ")


def test_all_pixels_are_decoded():
    """This file's checksums are right, but its pixels cannot be unpacked."""
    rows = zlib.compress(bytes(48 * (1 + 3 * 64)))[2:]
    size = struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", rows), (b"IEND", b"")]
    cut = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    assert found(check(catalog_of([*sound(), cut])), "unreadable").examples[0].startswith("40.png: ")


def test_a_datasets_preprocessing_is_not_applied_to_look_at_its_files():
    """That of the fundus datasets takes ten times as long as decoding."""

    def preprocess(picture: Image.Image, side: int, name: str) -> torch.Tensor:
        raise AssertionError("the check preprocessed an image")

    catalog = dataclasses.replace(catalog_of(sound()), preprocess=preprocess)
    assert check(catalog).findings == ()


def test_kinds_unlike_the_majority_are_found():
    contents = sound()
    contents[0] = encoded(picture(0), "JPEG")
    contents[1] = encoded(picture(1, mode="L"))
    contents[2] = encoded(picture(2, width=48, height=48))
    report = check(catalog_of(contents))
    assert found(report, "odd-format").examples == ("0.png: JPEG",)
    assert found(report, "odd-mode").examples == ("1.png: L",)
    assert found(report, "odd-size").examples == ("2.png: 48 x 48",)
    assert [f.severity for f in report.findings] == ["warning", "note", "note"]


def test_where_no_kind_is_that_of_most_the_kinds_are_counted():
    contents = sound(20) + [encoded(picture(20 + i, width=80)) for i in range(20)]
    finding = found(check(catalog_of(contents)), "odd-size")
    assert set(finding.examples) == {"64 x 48: 20 images", "80 x 48: 20 images"}


def test_extreme_tiny_and_blank_pictures_are_found():
    contents = sound()
    contents[0] = encoded(picture(0, width=145, height=48))
    contents[1] = encoded(picture(1, width=144, height=48))
    contents[2] = encoded(picture(2, width=31, height=40))
    contents[3] = encoded(picture(3, width=32, height=40))
    contents[4] = encoded(Image.new("RGB", (64, 48), (200, 180, 170)))
    contents[5] = encoded(Image.new("RGB", (64, 48)))
    report = check(catalog_of(contents))
    assert found(report, "extreme-aspect").examples == ("0.png: 145 x 48",)
    assert found(report, "tiny").examples == ("2.png: 31 x 40",)
    assert found(report, "blank").examples == ("4.png", "5.png")
    assert {f.severity for f in report.findings if f.code != "odd-size"} == {"warning", "note"}
    assert found(report, "near-duplicates-unsearched").examples == ("2.png",)
    assert "near-duplicates" not in codes(report)
    assert not {"two-labels", "near-two-labels"} & set(codes(report))


def test_exact_duplicates_are_found_and_counted_once_each():
    contents = sound()
    contents[10] = contents[12] = contents[0]
    finding = found(check(catalog_of(contents)), "exact-duplicates")
    assert (finding.severity, finding.count) == ("warning", 2)
    assert finding.examples == ("0.png, 10.png", "0.png, 12.png")


@pytest.mark.parametrize("change", ["saved again", "resized", "brighter"])
def test_near_duplicates_are_found(change):
    original = picture(0, width=300, height=225)
    copies = {
        "saved again": encoded(original, "JPEG", quality=40),
        "resized": encoded(original.resize((120, 90), Image.Resampling.LANCZOS)),
        "brighter": encoded(original.point(lambda value: min(255, 20 + value * 0.8))),
    }
    contents = sound()
    contents[0], contents[6] = encoded(original), copies[change]
    contents[1] = encoded(Image.new("RGB", (64, 48)))
    report = check(catalog_of(contents))
    finding = found(report, "near-duplicates")
    assert (finding.severity, finding.count) == ("note", 1)
    assert finding.examples == ("0.png, 6.png",)
    assert "exact-duplicates" not in codes(report)
    assert not {"two-labels", "near-two-labels"} & set(codes(report))


def test_pictures_framed_alike_are_no_duplicates():
    """Disks on black in the same light, as fundus pictures are: most of a thumbnail is what they share."""
    rows, columns = np.mgrid[:32, :32] - 15.5
    frame = (np.hypot(rows, columns) < 14) * (120 + 4 * columns)
    spots = np.random.default_rng(0).integers(-6, 7, (40, 32, 32))
    thumbnails = np.clip(frame + spots, 0, 255).astype(np.uint8)
    hashes = difference_hashes(thumbnails)
    assert np.triu(close_hashes(hashes, hashes), 1).sum() > 20
    assert len(near_pairs(thumbnails).pairs) == 0
    copied = np.concatenate([thumbnails, np.clip(thumbnails.astype(int) + 3, 0, 255).astype(np.uint8)])
    assert near_pairs(copied).pairs.tolist() == [[i, i + 40] for i in range(40)]


def test_pictures_too_small_to_tell_apart_are_no_near_duplicates():
    """Soft spots with a little noise, at 24 pixels: enlarged to a thumbnail, some agree by chance."""
    rng, (rows, columns) = np.random.default_rng(0), np.mgrid[:24, :24] / 24
    contents = []
    for _ in range(400):
        row, column = rng.uniform(0.35, 0.65, 2)
        distances = (rows - row) ** 2 + (columns - column) ** 2
        spot = 220 - rng.integers(40, 200) * np.exp(-distances / (2 * rng.uniform(0.12, 0.3) ** 2))
        noisy = np.clip(spot + rng.normal(0, 1, spot.shape), 0, 255).astype(np.uint8)
        contents.append(encoded(Image.fromarray(noisy)))
    contents.append(contents[0])
    report = check(catalog_of(contents))
    assert found(report, "near-duplicates-unsearched").count == 401
    assert found(report, "exact-duplicates").count == 1
    assert not {"near-duplicates", "near-two-labels", "duplicates-across-split"} & set(codes(report))


def test_damaged_files_are_nobodys_duplicates():
    contents = sound()
    contents[2] = contents[5] = b""
    assert codes(check(catalog_of(contents))) == ["unreadable"]


def test_one_picture_under_two_labels_is_an_error():
    contents = sound()
    contents[11] = contents[0]
    contents[13] = encoded(picture(2), "JPEG", quality=60)
    report = check(catalog_of(contents))
    exact, near = found(report, "two-labels"), found(report, "near-two-labels")
    assert (exact.severity, exact.examples) == ("error", ("0.png (MEL), 11.png (NV)",))
    assert (near.severity, near.examples) == ("warning", ("2.png (MEL), 13.png (NV)",))


def test_duplicates_on_both_sides_of_the_split_are_found():
    contents = sound(60)
    contents[50] = contents[52] = contents[0]  # two test images of one training image
    contents[54] = encoded(picture(4), "JPEG", quality=60)
    contents[8] = contents[6]  # both in training
    contents[10] = encoded(picture(12), "JPEG", quality=60)  # and these
    is_test = [i >= 50 for i in range(60)]
    finding = found(check(catalog_of(contents, is_test=is_test)), "duplicates-across-split")
    assert (finding.severity, finding.count, finding.details) == ("warning", 3, {"exact": 2, "near": 1})
    assert finding.examples == (
        "0.png (train), 50.png (test)",
        "0.png (train), 52.png (test)",
        "4.png (train), 54.png (test)",
    )


def test_a_copy_of_a_near_duplicate_is_a_near_duplicate():
    """Only one of several equal files is compared with others, and it may be one of the test."""
    again = encoded(picture(0), "JPEG", quality=60)
    contents = [again, *sound(58, first=1), again, encoded(picture(0))]
    is_test = [False, *[False] * 49, *[True] * 9, True, True]
    contents[0], contents[59] = contents[59], contents[0]
    labels = [0] * 59 + [0, 1]
    is_test[0], is_test[59], is_test[60] = True, False, True  # the copy that is compared is a test image
    report = check(catalog_of(contents, labels, is_test=is_test))
    finding = found(report, "duplicates-across-split")
    assert finding.details == {"exact": 1, "near": 1}
    assert finding.examples == ("59.png (train), 0.png (test)", "59.png (train), 60.png (test)")
    labels[0], labels[59] = 1, 0  # and it has the label of its neighbor, which the other copy has not
    report = check(catalog_of(contents, labels, is_test=is_test))
    assert found(report, "two-labels").count == 1
    assert found(report, "near-two-labels").examples == ("59.png (MEL), 60.png (NV)",)


def test_duplicates_are_searched_only_where_asked():
    contents = sound()
    contents[11] = contents[0]
    report = check(catalog_of(contents), duplicates=False)
    assert report.findings == ()
    assert not report.searched_duplicates


def test_groups_on_both_sides_of_the_split_are_counted_and_not_named():
    groups = [f"Jane Doe {i // 3}" for i in range(60)]
    is_test = [i % 3 == 2 and i < 30 for i in range(60)]
    report = check(catalog_of(sound(60), groups=groups, is_test=is_test))
    finding = found(report, "groups-across-split")
    assert (finding.severity, finding.count) == ("warning", 10)
    assert finding.details == {"groups": 10, "images": 30, "test_images": 10}
    assert finding.examples[0] == "0.png (train), 2.png (test)"
    assert "Jane" not in json.dumps(report.to_json())


def test_class_names_that_look_alike_are_an_error():
    names = ("Melanoma", "MELANOMA ", "café", "cafe\N{COMBINING ACUTE ACCENT}", "basal  cell", "basal cell")
    names += ("\N{LATIN SMALL LIGATURE FI}ne", "fine", "Straße", "STRASSE", "nevus")
    contents = sound(20 * len(names))
    finding = found(check(catalog_of(contents, class_names=names)), "class-names-collide")
    assert (finding.severity, finding.count) == ("error", 5)
    assert finding.examples[0] == "'Melanoma' and 'MELANOMA '"


def test_classes_too_small_to_learn_are_found():
    labels = [0] * 20 + [1] * 19 + [2] * 1
    report = check(catalog_of(sound(40), labels, class_names=("many", "few", "one", "none")))
    too_small, small = found(report, "class-too-small"), found(report, "class-small")
    assert (too_small.severity, too_small.examples) == ("error", ("one: 1", "none: 0"))
    assert (small.severity, small.examples) == ("warning", ("few: 19",))
    assert report.imbalance is None


def test_a_class_is_as_small_as_its_training_images():
    is_test = [i < 42 for i in range(60)]
    assert found(check(catalog_of(sound(60), is_test=is_test)), "class-small").examples == ("MEL: 9", "NV: 9")


def test_a_class_without_test_images_is_found():
    is_test = [i % 2 == 0 and i < 10 for i in range(60)]
    finding = found(check(catalog_of(sound(60), is_test=is_test)), "class-untested")
    assert (finding.severity, finding.examples) == ("warning", ("NV",))


def test_a_class_of_one_patient_is_found():
    groups = ["one" if i % 2 else f"patient {i}" for i in range(40)]
    finding = found(check(catalog_of(sound(40), groups=groups)), "class-few-groups")
    assert (finding.severity, finding.examples) == ("warning", ("NV",))


def test_an_incomplete_copy_is_an_error_and_a_surplus_a_warning():
    is_test = [i >= 40 for i in range(50)]
    catalog = catalog_of(sound(50), is_test=is_test)
    complete = check(catalog, published=published_with({"train": (20, 20), "test": (5, 5)}))
    assert complete.agrees_with_published
    assert complete.findings == ()
    report = check(catalog, published=published_with({"train": (23, 20), "test": (5, 4)}))
    missing, surplus = found(report, "incomplete"), found(report, "surplus")
    assert (missing.severity, missing.examples) == ("error", ("MEL (train): 20 of 23",))
    assert missing.details == {"images": 3}
    assert (surplus.severity, surplus.examples) == ("warning", ("NV (test): 5 of 4",))
    assert report.agrees_with_published is False


def test_without_a_split_the_published_parts_are_added_up():
    catalog = catalog_of(sound(50))
    assert check(catalog, published=published_with({"train": (20, 20), "test": (5, 5)})).agrees_with_published
    assert check(catalog, published=published_with({"total": (25, 25)})).agrees_with_published
    report = check(catalog, published=published_with({"total": (25, 26)}))
    assert found(report, "incomplete").examples == ("NV: 25 of 26",)


def test_images_that_the_published_count_left_out_are_no_surplus():
    catalog = catalog_of(sound(50), is_test=[i >= 40 for i in range(50)])
    counts = {"train": (20, 19), "test": (4, 4)}
    published = published_with(counts, left_out={"train": 1, "test": 2})
    assert check(catalog, published=published).agrees_with_published
    for left_out in ({}, {"train": 1}, {"train": 3, "test": 1}):
        report = check(catalog, published=published_with(counts, left_out=left_out))
        assert found(report, "surplus").details == {"images": 3}
    assert found(check(catalog, published=published_with(counts)), "surplus").count == 3


def test_sizes_of_the_parts_are_compared_where_no_more_is_published():
    catalog = catalog_of(sound(50), is_test=[i >= 40 for i in range(50)])
    assert check(catalog, published=published_with(sizes={"train": 40, "test": 10})).agrees_with_published
    report = check(catalog, published=published_with(sizes={"train": 41, "test": 9}))
    assert found(report, "incomplete").examples == ("all classes (train): 40 of 41",)
    assert found(report, "surplus").examples == ("all classes (test): 10 of 9",)
    assert report.agrees_with_published is False


def test_small_images_of_a_known_dataset_are_as_small_as_they_should_be():
    contents = [encoded(picture(i, width=28, height=28)) for i in range(40)]
    assert "tiny" in codes(check(catalog_of(contents)))
    published = published_with(sizes={"train": 0, "test": 0})
    assert "tiny" not in codes(check(catalog_of(contents), published=published))


def test_files_that_are_not_read_and_empty_class_folders_are_reported(tmp_path: Path):
    for i, content in enumerate(sound()):
        path = tmp_path / ("mole", "scar")[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "wart").mkdir()
    for name in ("1.heic", "2.HEIC", "movie.mp4", "Thumbs.db", "desktop.ini"):
        (tmp_path / "mole" / name).write_bytes(b"x")
    report = check(read_own(tmp_path))
    ignored = found(report, "ignored-files")
    assert (ignored.severity, ignored.count, ignored.details) == ("warning", 2, {"files": 3})
    assert ignored.examples == (".heic: 2, e.g. mole/1.heic", ".mp4: 1, e.g. mole/movie.mp4")
    empty = found(report, "class-too-small")
    assert (empty.severity, empty.examples) == ("error", ("wart: 0, a folder without images",))
    assert "ignored-files" not in codes(check(dataclasses.replace(read_own(tmp_path), dataset="ham10000")))


def test_errors_come_first_and_the_report_is_plain_json():
    contents = sound()
    contents[1] = encoded(picture(1, mode="L"))
    contents[3] = b""
    contents[5] = encoded(picture(5), "JPEG")
    report = check(dataclasses.replace(catalog_of(contents), dataset="mine"))
    assert codes(report) == ["unreadable", "odd-mode", "odd-format"]
    assert [f.severity for f in report.findings] == ["error", "warning", "note"]
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["dataset"] == "mine"
    assert content["worst"] == "error"
    assert content["classes"][0] == {"name": "MEL", "images": 20, "train": None, "test": None, "groups": None}
    assert [finding["code"] for finding in content["findings"]] == ["unreadable", "odd-mode", "odd-format"]


def test_examples_are_bounded_and_counts_are_not():
    finding = found(check(catalog_of([*sound(), *[b""] * 150])), "unreadable")
    assert (finding.count, len(finding.examples)) == (150, 100)


def test_the_looks_keep_the_catalogs_order_and_progress_is_told():
    contents = sound(30)
    plain = catalog_of(contents)
    chosen = np.array([7, 29, 3])
    told: list[tuple[int, int]] = []
    _, looks = scan(plain.select(chosen), watch=lambda done, total: told.append((done, total)))
    hashes = [hashlib.sha256(plain.read(i)).hexdigest() for i in chosen.tolist()]
    assert [look.sha256 for look in looks] == hashes
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_nothing_to_check_is_refused():
    with pytest.raises(InvalidInput, match="no images"):
        check(catalog_of([]))


def test_a_store_is_checked_like_its_images(tmp_path: Path):
    contents = sound(60)
    contents[9] = contents[0]
    contents[13] = encoded(picture(2), "JPEG", quality=60)
    contents[20] = b"damaged"
    is_test = [i >= 40 for i in range(60)]
    catalog = catalog_of(contents, is_test=is_test)
    prepare(catalog, tmp_path / "store", side=48, skip_bad=True)
    report = check(open_cache(tmp_path / "store"), folder=tmp_path / "store")
    assert report.n_images == 59
    assert (report.n_train, report.n_test) == (39, 20)
    assert found(report, "skipped").examples[0].startswith("20.png ")
    assert found(report, "two-labels").count == found(report, "near-two-labels").count == 1
    assert report.sizes == {"48 x 48": 59}


def test_hashes_are_close_that_differ_in_at_most_four_bits():
    rng = np.random.default_rng(0)
    hashes = np.repeat(rng.integers(0, 2**63, 20, dtype=np.uint64), 5)
    flipped = [sum(1 << int(bit) for bit in rng.choice(64, rng.integers(0, 5), False)) for _ in hashes]
    hashes = rng.permutation(hashes ^ np.array(flipped, dtype=np.uint64))
    by_hand = [[bin(int(i) ^ int(j)).count("1") <= 4 for j in hashes] for i in hashes]
    assert close_hashes(hashes, hashes).tolist() == by_hand
    assert 150 < np.sum(by_hand) < 600


def test_near_duplicates_are_found_across_blocks(monkeypatch):
    contents = sound(40)
    contents[2], contents[30] = (encoded(picture(1), "JPEG", quality=quality) for quality in (60, 70))
    monkeypatch.setattr(near_duplicates, "BLOCK", 7)
    report = check(catalog_of(contents, [0] * 40, class_names=("MEL",)))
    assert found(report, "near-duplicates").examples == ("1.png, 2.png", "1.png, 30.png", "2.png, 30.png")


def test_of_no_pictures_none_are_alike():
    assert near_pairs(np.empty((0, 32, 32), np.uint8)).pairs.shape == (0, 2)
    assert near_pairs(np.zeros((5, 32, 32), np.uint8)).pairs.shape == (0, 2)


def test_the_search_ends_at_a_million_pairs_and_says_so(monkeypatch):
    spots = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    thumbnails = np.repeat(spots[None], 20, axis=0)
    every = [[i, j] for i in range(20) for j in range(i + 1, 20)]
    assert near_pairs(thumbnails).pairs.tolist() == every
    assert len(near_pairs(thumbnails).cut_short) == 0
    monkeypatch.setattr(near_duplicates, "BLOCK", 5)
    assert near_pairs(thumbnails).pairs.tolist() == every
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS", 80)
    few = near_pairs(thumbnails)
    assert 80 <= len(few.pairs) < 120
    assert few.cut_short.tolist() == list(range(5, 20))


def test_a_search_that_ended_early_is_reported(monkeypatch):
    monkeypatch.setattr(near_duplicates, "BLOCK", 2)
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS", 2)
    contents = sound()
    for i in (1, 2, 3):
        contents[i] = encoded(picture(0), "PNG", compress_level=i)
    report = check(catalog_of(contents, [0] * 40, class_names=("MEL",)))
    bounded = found(report, "near-duplicates-bounded")
    assert (bounded.severity, bounded.count) == ("note", 40)
    assert found(report, "near-duplicates").count == 5


@pytest.fixture(scope="module")
def ham10000(shared_data: Path) -> ImageTable:
    return find_dataset("ham10000").read(shared_data / "ham10000_200x150.tar.gz")


@pytest.fixture(scope="module")
def ham10000_report(ham10000: ImageTable) -> Report:
    return check(ham10000, published=find_dataset("ham10000"))


@pytest.mark.slow
def test_ham10000_is_complete_and_its_benchmark_split_shares_lesions(ham10000_report: Report):
    report = ham10000_report
    assert report.n_images == 10015
    assert [c.images for c in report.classes] == [1113, 6705, 514, 327, 1099, 115, 142]
    assert report.agrees_with_published
    assert report.n_groups == 7470
    shared = found(report, "groups-across-split")
    assert (shared.count, shared.details["test_images"]) == (697, 759)
    assert found(report, "exact-duplicates").count == 2
    assert report.worst == "warning"


def test_near_duplicates_of_ham10000_are_of_one_lesion(ham10000: ImageTable, ham10000_report: Report):
    """What the owners call one lesion is the truth that the search did not see."""
    lesion_of = dict(zip(ham10000.names, ham10000.groups, strict=True))
    pairs = [example.split(", ") for example in found(ham10000_report, "near-duplicates").examples]
    assert 50 <= len(pairs) <= 90
    assert sum(lesion_of[first] == lesion_of[second] for first, second in pairs) > 0.95 * len(pairs)


def test_a_split_of_ham10000_by_lesions_shares_none(ham10000: ImageTable):
    is_test = group_split(ham10000.labels, ham10000.groups, share=0.2, seed=0)
    by_lesions = dataclasses.replace(ham10000, is_test=is_test)
    assert 1900 < is_test.sum() < 2100
    assert [finding.count for finding in group_findings(by_lesions)] == [0]
    assert [finding.count for finding in group_findings(ham10000)] == [697]


@pytest.mark.slow
def test_aptos2019_has_pictures_under_two_grades(shared_data: Path):
    """128 of its files are copies; the owners graded some pictures twice, and not alike."""
    dataset = find_dataset("aptos2019")
    report = check(dataset.read(shared_data / "aptos2019_160.tar"), published=dataset)
    assert [c.images for c in report.classes] == [1805, 370, 999, 193, 295]
    assert found(report, "exact-duplicates").count == 128
    assert found(report, "two-labels").count > 20
    assert report.worst == "error"
