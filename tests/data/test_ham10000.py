"""HAM10000 from a folder or a tar; every image of the small one has a gray of its own."""

import io
import shutil
import tarfile

import pytest
from PIL import Image

from medcil.data.ham10000 import CLASS_NAMES, ORDERS, read_ham10000
from medcil.errors import InvalidInput

N_TRAIN, N_TEST = 9, 4
CLASSES = [0, 1, 2, 3, 4, 5, 6, 1, 1, 6, 5, 1, 0]


def name_of(i: int) -> str:
    return f"ISIC_{24306 + 7 * i:07d}"


def gray_of(i: int) -> int:
    return 40 + 15 * i


def jpeg(gray: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 15), (gray, gray, gray)).save(buffer, format="JPEG")
    return buffer.getvalue()


def one_hot(indices) -> str:
    lines = ["image," + ",".join(CLASS_NAMES)]
    for i in indices:
        lines.append(",".join([name_of(i), *("1.0" if c == CLASSES[i] else "0.0" for c in range(7))]))
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "HAM10000"
    (root / "images").mkdir(parents=True)
    for i in range(N_TRAIN + N_TEST):
        (root / "images" / f"{name_of(i)}.jpg").write_bytes(jpeg(gray_of(i)))
    (root / "split_train.csv").write_text(one_hot(range(N_TRAIN)))
    (root / "split_test.csv").write_text(one_hot(range(N_TRAIN, N_TRAIN + N_TEST)))
    return root


def packed(folder, mode="w"):
    path = folder.parent / "ham.tar"
    with tarfile.open(path, mode) as archive:
        archive.add(folder, "HAM10000")
    return path


def check(train, test):
    for samples, first, n in ((train, 0, N_TRAIN), (test, N_TRAIN, N_TEST)):
        images = samples.read_all()
        assert images.shape == (n, 3, 8, 8)
        assert samples.labels.tolist() == CLASSES[first : first + n]
        for i, image in enumerate(images, start=first):
            assert (image.float() - gray_of(i)).abs().max() <= 2


def test_a_folder_is_read(folder):
    check(*read_ham10000(folder, 8))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_is_read(folder, mode):
    check(*read_ham10000(packed(folder, mode), 8))


def test_the_order_of_the_members_of_a_tar_does_not_matter(folder):
    path = folder.parent / "reversed.tar"
    with tarfile.open(path, "w") as archive:
        for file in sorted(folder.rglob("*.*"), reverse=True):
            archive.add(file, file.relative_to(folder))
    check(*read_ham10000(path, 8))


def test_an_image_that_is_twice_in_a_tar_moves_no_other(folder):
    # As in a well-known repackaging, which holds both halves of the images in two folders.
    shutil.copytree(folder / "images", folder / "again")
    check(*read_ham10000(packed(folder), 8))


def test_orders_name_each_class_once():
    assert all(sorted(order) == list(range(len(CLASS_NAMES))) for order in ORDERS)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_absent_root_says_what_to_give(tmp_path, is_given):
    with pytest.raises(InvalidInput, match=r"^data\.root: HAM10000 is not .* Give the folder or tar"):
        read_ham10000(tmp_path / "none" if is_given else None, 8)


@pytest.mark.parametrize("is_tar", [True, False])
@pytest.mark.parametrize("missing", ["split_train.csv", "split_test.csv"])
def test_a_missing_list_is_named(folder, is_tar, missing):
    (folder / missing).unlink()
    with pytest.raises(InvalidInput, match=missing):
        read_ham10000(packed(folder) if is_tar else folder, 8)


@pytest.mark.parametrize("is_tar", [True, False])
def test_a_missing_image_is_named(folder, is_tar):
    (folder / "images" / f"{name_of(3)}.jpg").unlink()
    with pytest.raises(InvalidInput, match=rf"lacks 1 listed images, e\.g\. {name_of(3)}\.jpg"):
        read_ham10000(packed(folder) if is_tar else folder, 8)


@pytest.mark.parametrize("is_tar", [True, False])
def test_a_broken_image_is_named(folder, is_tar):
    (folder / "images" / f"{name_of(3)}.jpg").write_bytes(jpeg(0)[:100])
    with pytest.raises(InvalidInput, match=rf"{name_of(3)}\.jpg cannot be read"):
        read_ham10000(packed(folder) if is_tar else folder, 8)[0].read_all()


@pytest.mark.parametrize(
    "text", ["", "image,MEL,NV\n", "name,MEL,NV,BCC,AKIEC,BKL,DF,VASC\na,1,0,0,0,0,0,0\n"]
)
def test_a_list_without_the_columns_is_refused(folder, text):
    (folder / "split_test.csv").write_text(text)
    with pytest.raises(InvalidInput, match="has not the columns image, MEL"):
        read_ham10000(folder, 8)


@pytest.mark.parametrize("row", ["0,0,0,0,0,0,0", "1,1,0,0,0,0,0", "1,0,0,0,0,0,", "1,0", "a,0,0,0,0,0,0"])
def test_a_row_that_does_not_name_one_class_is_refused(folder, row):
    text = one_hot([9, 10]) + f"{name_of(11)},{row}\n"
    (folder / "split_test.csv").write_text(text)
    with pytest.raises(InvalidInput, match=name_of(11)):
        read_ham10000(folder, 8)


def test_a_tar_without_images_is_refused(folder):
    shutil.rmtree(folder / "images")
    with pytest.raises(InvalidInput, match="lacks images"):
        read_ham10000(packed(folder), 8)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b\x08\x00broken"])
def test_a_file_that_is_no_tar_is_refused(tmp_path, content):
    path = tmp_path / "ham.tar"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="give a folder or a tar"):
        read_ham10000(path, 8)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_that_was_not_downloaded_to_its_end_is_refused(folder, mode):
    path = packed(folder, mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InvalidInput, match=r"data\.root"):
        read_ham10000(path, 8)


@pytest.mark.slow
def test_the_real_archive_has_the_benchmarks_counts(shared_data):
    train, test = read_ham10000(shared_data / "ham10000_200x150.tar.gz", 8)
    assert train.class_counts(7).tolist() == [901, 5363, 398, 262, 875, 94, 119]
    assert test.class_counts(7).tolist() == [212, 1342, 116, 65, 224, 21, 23]
    assert train.images.side == 8
