"""HAM10000 from a folder or a tar; every image of the small one has a gray of its own."""

import csv
import io
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.data.samples import decode_image
from medcil.data.sources.ham10000 import CLASS_NAMES, DATASET, read_table, recognizes
from medcil.data.sources.manifest import UnsoundData
from medcil.errors import InvalidInput

N_TRAIN, N_TEST = 9, 4
N = N_TRAIN + N_TEST
CLASSES = [0, 1, 2, 3, 4, 5, 6, 1, 1, 6, 5, 1, 0]
LESIONS = ["a", "b", "c", "d", "e", "f", "g", "b", "h", "i", "f", "j", "k"]


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


def metadata(separator=",", indices=range(N)) -> str:
    """The owner's table; images of one lesion stand together, as there."""
    lines = ["lesion_id image_id dx dx_type age sex localization".replace(" ", separator)]
    for i in sorted(indices, key=lambda i: LESIONS[i]):
        cells = [LESIONS[i], name_of(i), CLASS_NAMES[CLASSES[i]].lower(), "histo", "80.0", "male", "scalp"]
        lines.append(separator.join(cells))
    return "\n".join(lines) + "\n"


@pytest.fixture
def owners_folder(tmp_path):
    """As it is downloaded: two folders and the metadata; and the masks that are offered beside them."""
    root = tmp_path / "owners"
    for i in range(N):
        path = root / f"HAM10000_images_part_{1 + i % 2}" / f"{name_of(i)}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(gray_of(i)))
    (root / "HAM10000_segmentations_lesion_tschandl").mkdir()
    (root / "HAM10000_segmentations_lesion_tschandl" / f"{name_of(0)}_segmentation.png").write_bytes(b"png")
    (root / "HAM10000_metadata.csv").write_text(metadata())
    return root


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


def samples_of(root, side):
    """Training and test samples of the split."""
    images = read_table(root)
    samples = images.samples(side)
    return [
        samples.select(torch.from_numpy(np.flatnonzero(images.is_test == part))) for part in (False, True)
    ]


def test_a_folder_is_read(folder):
    check(*samples_of(folder, 8))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_is_read(folder, mode):
    check(*samples_of(packed(folder, mode), 8))


def test_the_order_of_the_members_of_a_tar_does_not_matter(folder):
    path = folder.parent / "reversed.tar"
    with tarfile.open(path, "w") as archive:
        for file in sorted(folder.rglob("*.*"), reverse=True):
            archive.add(file, file.relative_to(folder))
    check(*samples_of(path, 8))


def test_an_image_that_is_twice_in_a_tar_moves_no_other(folder):
    # As in a well-known repackaging, which holds both halves of the images in two folders.
    shutil.copytree(folder / "images", folder / "again")
    check(*samples_of(packed(folder), 8))


def test_orders_name_each_class_once():
    assert all(sorted(order) == list(range(len(CLASS_NAMES))) for order in DATASET.orders)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_absent_root_says_what_to_give(tmp_path, is_given):
    root = tmp_path / "none" if is_given else None
    with pytest.raises(
        InvalidInput, match=r"^data\.root: HAM10000 is not .* Give the folder or archive"
    ) as e:
        samples_of(root, 8)
    for needed in ("HAM10000_images_part_1", "HAM10000_metadata.csv beside", "split_train.csv", "DVN/DBW86T"):
        assert needed in str(e.value).splitlines()[0]


@pytest.mark.parametrize("is_tar", [True, False])
@pytest.mark.parametrize("missing", ["split_train.csv", "split_test.csv"])
def test_a_missing_list_is_named(folder, is_tar, missing):
    (folder / missing).unlink()
    with pytest.raises(InvalidInput, match=missing):
        samples_of(packed(folder) if is_tar else folder, 8)


@pytest.mark.parametrize("is_tar", [True, False])
def test_a_missing_image_is_named(folder, is_tar):
    (folder / "images" / f"{name_of(3)}.jpg").unlink()
    with pytest.raises(InvalidInput, match=rf"lacks 1 listed images, e\.g\. {name_of(3)}\.jpg"):
        samples_of(packed(folder) if is_tar else folder, 8)


def test_all_missing_images_are_named_below_and_a_check_gets_the_lists(folder):
    for i in (3, 5):
        (folder / "images" / f"{name_of(i)}.jpg").unlink()
    with pytest.raises(UnsoundData) as refusal:
        read_table(folder)
    first, *named = str(refusal.value).splitlines()
    assert "lacks 2 listed images" in first
    assert named == [f"  {name_of(3)}.jpg", f"  {name_of(5)}.jpg"]
    assert len(refusal.value.table) == N


@pytest.mark.parametrize("n_unpacked", [0, 1])
def test_images_that_are_still_packed_are_to_be_unpacked(owners_folder, n_unpacked):
    """As the owner's page offers them."""
    for part in (1, 2)[n_unpacked:]:
        shutil.rmtree(owners_folder / f"HAM10000_images_part_{part}")
        (owners_folder / f"HAM10000_images_part_{part}.zip").write_bytes(b"PK")
    with pytest.raises(InvalidInput, match=rf"lacks .*Unpack HAM10000_images_part_{1 + n_unpacked}\.zip"):
        read_table(owners_folder)


@pytest.mark.parametrize("is_tar", [True, False])
def test_a_broken_image_is_named(folder, is_tar):
    (folder / "images" / f"{name_of(3)}.jpg").write_bytes(jpeg(0)[:100])
    with pytest.raises(InvalidInput, match=rf"{name_of(3)}\.jpg cannot be read"):
        samples_of(packed(folder) if is_tar else folder, 8)[0].read_all()


@pytest.mark.parametrize(
    "text", ["", "image,MEL,NV\n", "name,MEL,NV,BCC,AKIEC,BKL,DF,VASC\na,1,0,0,0,0,0,0\n"]
)
def test_a_list_without_the_columns_is_refused(folder, text):
    (folder / "split_test.csv").write_text(text)
    with pytest.raises(InvalidInput, match="has not the columns image, MEL"):
        samples_of(folder, 8)


@pytest.mark.parametrize("row", ["0,0,0,0,0,0,0", "1,1,0,0,0,0,0", "1,0,0,0,0,0,", "1,0", "a,0,0,0,0,0,0"])
def test_a_row_that_does_not_name_one_class_is_refused(folder, row):
    text = one_hot([9, 10]) + f"{name_of(11)},{row}\n"
    (folder / "split_test.csv").write_text(text)
    with pytest.raises(InvalidInput, match=name_of(11)):
        samples_of(folder, 8)


def test_a_tar_without_images_is_refused(folder):
    shutil.rmtree(folder / "images")
    with pytest.raises(InvalidInput, match="lacks images"):
        samples_of(packed(folder), 8)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b\x08\x00broken"])
def test_a_file_that_is_no_tar_is_refused(tmp_path, content):
    path = tmp_path / "ham.tar"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"ham\.tar"):
        samples_of(path, 8)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_that_was_not_downloaded_to_its_end_is_refused(folder, mode):
    path = packed(folder, mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InvalidInput, match=r"ham\.tar"):
        samples_of(path, 8)


def test_without_lists_the_diagnoses_of_the_metadata_count_and_no_split_is_invented(owners_folder):
    catalog = read_table(owners_folder)
    order = sorted(range(N), key=lambda i: LESIONS[i])
    assert catalog.is_test is None
    assert [name.rpartition("/")[2] for name in catalog.names] == [f"{name_of(i)}.jpg" for i in order]
    assert catalog.labels.tolist() == [CLASSES[i] for i in order]
    assert catalog.groups == tuple(LESIONS[i] for i in order)
    grays = catalog.samples(8).read_all().float().mean(dim=(1, 2, 3))
    assert (grays - torch.tensor([float(gray_of(i)) for i in order])).abs().max() <= 2


def test_with_lists_and_metadata_the_order_is_the_lists_and_groups_are_lesions(folder):
    (folder / "HAM10000_metadata.csv").write_text(metadata())
    catalog = read_table(folder)
    assert catalog.labels.tolist() == CLASSES
    assert catalog.groups == tuple(LESIONS)
    assert catalog.columns == {"age": ("80.0",) * N, "sex": ("male",) * N, "localization": ("scalp",) * N}
    assert catalog.is_test.tolist() == [False] * N_TRAIN + [True] * N_TEST


def test_without_metadata_no_groups_are_known(folder):
    assert read_table(folder).groups is None


def test_an_image_that_the_metadata_does_not_know_is_a_group_of_its_own(folder):
    (folder / "HAM10000_metadata.csv").write_text(metadata(indices=range(N - 1)))
    assert read_table(folder).groups == (*LESIONS[:-1], name_of(N - 1))


def test_the_benchmarks_lists_are_known_under_their_first_names_too(folder):
    (folder / "split_train.csv").rename(folder / "train.csv")
    (folder / "split_test.csv").rename(folder / "val.csv")
    check(*samples_of(folder, 8))


def test_metadata_separated_by_tabs_is_read(owners_folder):
    (owners_folder / "HAM10000_metadata.csv").unlink()
    (owners_folder / "HAM10000_metadata.tab").write_text("\ufeff" + metadata("\t"))
    assert sorted(read_table(owners_folder).groups) == sorted(LESIONS)


def test_of_two_tables_of_one_name_the_uppermost_counts(owners_folder):
    (owners_folder / "HAM10000_images_part_1" / "HAM10000_metadata.csv").write_text("lesion_id,image_id,dx\n")
    (owners_folder / "A").mkdir()
    (owners_folder / "A" / "HAM10000_metadata.csv").write_text("lesion_id,image_id,dx\n")
    assert len(read_table(owners_folder)) == N


def test_an_unknown_diagnosis_is_refused(owners_folder):
    path = owners_folder / "HAM10000_metadata.csv"
    path.write_text(path.read_text().replace(",akiec,", ",scc,"))
    with pytest.raises(InvalidInput, match=rf"{name_of(3)} the diagnosis 'scc'"):
        read_table(owners_folder)


def test_neither_lists_nor_metadata_is_refused(owners_folder):
    (owners_folder / "HAM10000_metadata.csv").unlink()
    with pytest.raises(InvalidInput, match=r"lacks HAM10000_metadata\.csv.*Dataverse"):
        read_table(owners_folder)


def test_metadata_that_is_no_text_is_refused(owners_folder):
    (owners_folder / "HAM10000_metadata.csv").write_bytes(b"lesion_id,image_id,dx\n\xff\xfe,a,nv\n")
    with pytest.raises(InvalidInput, match=r"HAM10000_metadata\.csv is not UTF-8 text"):
        read_table(owners_folder)


def test_what_a_mac_adds_to_an_archive_is_no_image(folder):
    for image in sorted((folder / "images").iterdir()):
        (folder / "images" / f"._{image.name}").write_bytes(b"no image")
        extra = folder / "__MACOSX" / "images" / image.name
        extra.parent.mkdir(parents=True, exist_ok=True)
        extra.write_bytes(b"no image")
    check(*samples_of(packed(folder), 8))


def test_it_is_recognized_by_its_files():
    assert recognizes(["x/HAM10000_metadata.csv", "x/images/ISIC_0024306.jpg"])
    assert recognizes(["split_train.csv", "split_test.csv", "images/ISIC_0024306.jpg"])
    assert not recognizes(["split_train.csv", "images/cat.jpg"])
    assert not recognizes(["nevus/ISIC_0024306.jpg"])


@pytest.mark.slow
def test_the_real_archive_gives_the_benchmarks_samples_in_the_lists_order(shared_data):
    path = shared_data / "ham10000_200x150.tar.gz"
    read = samples_of(path, 8)
    with tarfile.open(path) as archive:
        for samples, name in zip(read, ("split_train.csv", "split_test.csv"), strict=True):
            rows = list(csv.reader(io.TextIOWrapper(archive.extractfile(f"ham10000/{name}"))))[1:]
            labels = torch.tensor([[float(mark) for mark in row[1:]] for row in rows]).argmax(dim=1)
            assert samples.labels.dtype == labels.dtype == torch.int64
            assert torch.equal(samples.labels, labels)
            for i in (0, 1, len(rows) // 2, len(rows) - 1):
                image = archive.extractfile(f"ham10000/images/{rows[i][0]}.jpg").read()
                assert torch.equal(samples.images.read(torch.tensor([i]))[0], decode_image(image, 8))
    assert [len(samples) for samples in read] == [8012, 2003]
    assert read[0].class_counts(7).tolist() == [901, 5363, 398, 262, 875, 94, 119]
    assert read[1].class_counts(7).tolist() == [212, 1342, 116, 65, 224, 21, 23]


@pytest.mark.slow
def test_the_real_archive_has_697_lesions_on_both_sides_of_the_benchmarks_split(shared_data):
    catalog = read_table(shared_data / "ham10000_200x150.tar.gz")
    assert len(catalog) == len(set(catalog.names)) == 10_015
    assert np.bincount(catalog.labels).tolist() == [1113, 6705, 514, 327, 1099, 115, 142]
    lesions = np.array(catalog.groups)
    assert len(set(lesions)) == 7_470
    shared = set(lesions[catalog.is_test]) & set(lesions[~catalog.is_test])
    assert len(shared) == 697
    assert sum(lesion in shared for lesion in lesions[catalog.is_test]) == 759
