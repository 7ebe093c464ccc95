"""MedMNIST's files, written small: two gray or colored images and more of each split."""

import io
import zipfile

import numpy as np
import pytest
import torch

from medcil.data.sources.archive import Limits
from medcil.data.sources.medmnist import KINDS, dataset, known_name, read_npz, read_table
from medcil.errors import InvalidInput

SIZES = {"train": 5, "val": 2, "test": 3}


def arrays(n_classes=8, *, channels=(3,), side=28, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    content = {}
    for split, n in SIZES.items():
        content[f"{split}_images"] = rng.integers(256, size=(n, side, side, *channels), dtype=np.uint8)
        content[f"{split}_labels"] = rng.integers(n_classes, size=(n, 1), dtype=np.uint8)
    return content


def written(folder, content, name="bloodmnist.npz"):
    np.savez_compressed(folder / name, **content)
    return folder / name


def test_the_validation_images_join_the_training_images(tmp_path):
    content = arrays()
    catalog = read_table("bloodmnist", written(tmp_path, content))
    assert catalog.is_test.tolist() == [False] * 7 + [True] * 3
    labels = np.concatenate([content[f"{split}_labels"][:, 0] for split in SIZES])
    assert catalog.labels.tolist() == labels.tolist()
    assert catalog.class_names == KINDS["bloodmnist"].class_names
    assert catalog.names[0] == "train/000000.png"
    assert catalog.names[5] == "val/000000.png"
    pixels = np.concatenate([content[f"{split}_images"] for split in SIZES])
    assert np.array_equal(catalog.samples(28).read_all().permute(0, 2, 3, 1).numpy(), pixels)


def test_gray_images_become_rgb(tmp_path):
    content = arrays(2, channels=())
    images = read_table("pneumoniamnist", written(tmp_path, content, "pneumoniamnist.npz")).samples(28)
    pixels = torch.from_numpy(np.concatenate([content[f"{split}_images"] for split in SIZES]))
    assert torch.equal(images.read_all(), pixels[:, None].expand(-1, 3, -1, -1))


def test_larger_images_and_files_in_folders_and_zips_are_read(tmp_path):
    content = arrays(side=64)
    path = written(tmp_path, content, "bloodmnist_64.npz")
    archive = tmp_path.parent / f"{tmp_path.name}.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(path, "medmnist/bloodmnist_64.npz")
    for root in (path, tmp_path, archive):
        catalog = read_table("bloodmnist", root)
        assert np.array_equal(
            catalog.samples(64).read_all()[7:].permute(0, 2, 3, 1).numpy(), content["test_images"]
        )


def test_two_sizes_in_one_folder_are_refused(tmp_path):
    written(tmp_path, arrays())
    written(tmp_path, arrays(side=64), "bloodmnist_64.npz")
    with pytest.raises(InvalidInput, match="has 2 files of bloodmnist; one is wanted"):
        read_table("bloodmnist", tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_missing_is_named_with_where_it_comes_from(tmp_path, is_there):
    written(tmp_path, arrays(), "pathmnist.npz")
    root = tmp_path if is_there else tmp_path / "none"
    with pytest.raises(InvalidInput, match=r"bloodmnist.*bloodmnist\.npz \(28 pixels\).*medmnist\.com"):
        read_table("bloodmnist", root)


def test_several_labels_for_an_image_are_refused_with_a_reason(tmp_path):
    content = arrays()
    for split, n in SIZES.items():
        content[f"{split}_labels"] = np.zeros((n, 14), dtype=np.uint8)
    with pytest.raises(InvalidInput, match=r"has 14 labels for each image\..*an image has one class"):
        read_npz(written(tmp_path, content, "chestmnist.npz"), "chestmnist.npz")


@pytest.mark.parametrize("channels", [(28,), (28, 3)])
def test_volumes_are_refused(tmp_path, channels):
    with pytest.raises(InvalidInput, match="three-dimensional"):
        read_npz(written(tmp_path, arrays(channels=channels)), "organmnist3d.npz")


def test_classes_of_an_unknown_file_are_numbered(tmp_path):
    content = arrays(3)
    content["train_labels"][0] = 2
    assert read_npz(written(tmp_path, content), "mine.npz").class_names == ("class 0", "class 1", "class 2")


def test_a_label_beyond_the_classes_is_refused(tmp_path):
    content = arrays(2)
    content["test_labels"][1] = 8
    with pytest.raises(InvalidInput, match="labels up to 8, but bloodmnist has 8 classes"):
        read_table("bloodmnist", written(tmp_path, content))


class Trap:
    """What a loaded pickle would call."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_an_array_of_objects_is_refused_and_not_unpickled(tmp_path):
    content = arrays()
    content["train_labels"] = np.array([Trap()] * 5, dtype=object)
    path = written(tmp_path, content)
    np.load(path, allow_pickle=True)["train_labels"]
    assert Trap.sprung  # so the trap works
    Trap.sprung = False
    with pytest.raises(InvalidInput, match=r"bloodmnist\.npz cannot be read"):
        read_table("bloodmnist", path)
    assert not Trap.sprung


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_labels", np.zeros((4, 1), dtype=np.uint8)),
        ("test_labels", np.zeros((3, 1), dtype=np.float32)),
        ("val_labels", np.array([[-1], [0]])),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(tmp_path, key, value):
    with pytest.raises(InvalidInput, match="has not one class number for each image"):
        read_table("bloodmnist", written(tmp_path, arrays() | {key: value}))


def test_floating_point_images_are_refused(tmp_path):
    content = arrays()
    content["val_images"] = content["val_images"].astype(np.float32)
    with pytest.raises(InvalidInput, match="float32"):
        read_table("bloodmnist", written(tmp_path, content))


def test_a_file_without_one_of_the_arrays_is_refused(tmp_path):
    content = arrays()
    del content["val_labels"]
    with pytest.raises(InvalidInput, match="has no val_labels"):
        read_table("bloodmnist", written(tmp_path, content))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = written(tmp_path, arrays())
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    damaged = {"cut": content[: len(content) // 2], "flipped": content, "empty": b"", "text": b"hello"}
    path.write_bytes(damaged[damage])
    with pytest.raises(InvalidInput, match=r"bloodmnist\.npz cannot be read.*medmnist\.com"):
        read_table("bloodmnist", path)


def test_an_array_that_promises_more_than_it_has_is_refused(tmp_path):
    content = arrays()
    path = tmp_path / "bloodmnist.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in content.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            archive.writestr(
                f"{name}.npy", buffer.getvalue()[:-1] if name == "test_images" else buffer.getvalue()
            )
    with pytest.raises(InvalidInput, match=r"bloodmnist\.npz cannot be read"):
        read_table("bloodmnist", path)


def test_files_are_known_by_name():
    assert known_name("a/pathmnist_224.npz") == "pathmnist"
    assert known_name("organsmnist.npz") == "organsmnist"
    assert known_name("chestmnist.npz") is None
    assert known_name("pathmnist.npy") is None
    assert dataset("octmnist").recognizes(["readme.txt", "octmnist_128.npz"])
    assert not dataset("octmnist").recognizes(["readme.txt", "pathmnist.npz"])


def test_every_dataset_has_its_published_number_of_classes():
    numbers = dict(zip(KINDS, (9, 7, 4, 2, 5, 2, 8, 8, 11, 11, 11), strict=True))
    assert {name: len(kind.class_names) for name, kind in KINDS.items()} == numbers
    assert all(len(set(kind.class_names)) == len(kind.class_names) for kind in KINDS.values())


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    content = arrays() | {"train_images": np.zeros((30_000, 64, 64), np.uint8)}
    content["train_labels"] = np.zeros((30_000, 1), np.uint8)
    path = written(tmp_path, content)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(np.lib.format, "read_array", lambda *a, **k: pytest.fail("it is unpacked"))
    with pytest.raises(
        InvalidInput, match=r"bloodmnist\.npz cannot be read \(it unpacks to 200 times its size"
    ):
        read_npz(path, path.name)
    with pytest.raises(InvalidInput, match=r"unpacks to more than 1,000 bytes"):
        read_npz(path, path.name, limits=Limits(ratio=10_000, total_bytes=1000))


@pytest.mark.parametrize("shape", [(1 << 41,), (5, 28, 28, 4), (-5, 28, 28, 3)])
def test_a_header_that_claims_another_size_is_refused_before_room_is_made(tmp_path, shape):
    path = tmp_path / "bloodmnist.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays().items():
            buffer = io.BytesIO()
            if name == "train_images":
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(buffer, header)
                buffer.write(array.tobytes())
            else:
                np.lib.format.write_array(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    with pytest.raises(InvalidInput, match=r"train_images is no plain array, or not as large as"):
        read_npz(path, path.name)


def test_an_encrypted_file_is_refused(tmp_path):
    path = written(tmp_path, arrays())
    content = bytearray(path.read_bytes())
    place = content.find(b"PK\x01\x02")
    while place >= 0:
        content[place + 8] |= 1
        place = content.find(b"PK\x01\x02", place + 4)
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"bloodmnist\.npz cannot be read"):
        read_npz(path, path.name)
