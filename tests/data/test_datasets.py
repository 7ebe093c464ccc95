"""The table of datasets, and how a folder is recognized."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from medcil.build import load_recipe
from medcil.data import splits
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.sources import DATASETS, find_dataset, list_images, medmnist, open_dataset, recognized_name
from medcil.errors import InvalidInput

from ..errors.raises import raises


def recognize(path: Path) -> tuple[str, ImageTable]:
    name = recognized_name(path)
    return name, list_images(path, name)


READ = {name: dataset for name, dataset in DATASETS.items() if dataset.read is not None}


def test_every_dataset_but_the_synthetic_one_is_read_from_files():
    assert set(DATASETS) - set(READ) == {"phantom"}
    assert [name for name, dataset in DATASETS.items() if dataset.is_synthetic] == ["phantom"]


@pytest.mark.parametrize("name", DATASETS)
def test_orders_protocols_and_counts_fit_the_classes(name):
    dataset = DATASETS[name]
    n_classes = len(dataset.class_names)
    assert len(set(dataset.class_names)) == n_classes
    assert dataset.orders
    assert all(sorted(order) == list(range(n_classes)) for order in dataset.orders)
    for protocol in dataset.protocols:
        base, increment = map(int, protocol.split("-"))
        assert base < n_classes
        assert (n_classes - base) % increment == 0
    assert all(len(counts) == n_classes for counts in dataset.published_counts.values())
    assert all(0 < value < 1 for value in (*dataset.mean, *dataset.std))


@pytest.mark.parametrize(
    ("name", "protocols", "n_orders", "n_train", "n_test"),
    [
        ("cch5000", ("4-2", "4-1"), 3, 4_000, 1_000),
        ("ham10000", ("3-2", "3-1"), 3, 8_012, 2_003),
        ("eyepacs", ("3-1",), 3, 35_125, 53_573),
        ("cifar100", ("50-10", "50-5"), 2, 50_000, 10_000),
        ("cifar100lt", ("50-10", "50-5"), 2, 10_847, 10_000),
    ],
)
def test_published_settings(name, protocols, n_orders, n_train, n_test):
    dataset = find_dataset(name)
    assert dataset.protocols == protocols
    assert len(dataset.orders) == n_orders
    assert sum(dataset.published_counts["train"]) == n_train
    assert sum(dataset.published_counts["test"]) == n_test


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_knows_its_name_and_whether_its_split_is_published(name, monkeypatch):
    dataset = find_dataset(name)
    assert dataset.name == name
    nothing = ImageTable(MemoryFiles({}), (), np.zeros(0, dtype=np.int64), dataset.class_names)
    monkeypatch.setitem(DATASETS, name, replace(dataset, read=lambda root: nothing, draw=None))
    has_split = {"train", "test"} <= set(dataset.published_counts)
    table = open_dataset(name, None, side=8)
    assert (table.published_as, table.dataset) == (name if has_split else None, name)
    assert has_split == (name in {"ham10000", "cch5000", "eyepacs", "cifar100", "cifar100lt"})


def test_ones_own_images_have_no_published_split(tmp_path):
    for i, kind in enumerate(("cat", "dog")):
        (tmp_path / kind).mkdir()
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / kind / "a.png")
    assert open_dataset("own", tmp_path, side=8).published_as is None


def test_a_published_dataset_without_its_lists_is_not_split_in_silence(tmp_path):
    (tmp_path / "images").mkdir()
    rows = [f"{i // 2},ISIC_{i},{('nv', 'mel')[i // 4]}" for i in range(8)]
    for i in range(8):
        Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(tmp_path / "images" / f"ISIC_{i}.jpg")
    (tmp_path / "HAM10000_metadata.csv").write_text("\n".join(["lesion_id,image_id,dx", *rows]))
    few = replace(open_dataset("ham10000", tmp_path, side=8), class_names=("MEL", "NV"))
    with pytest.warns(UserWarning, match="lists of ham10000's published split are not among its files"):
        assert splits.split(few, rule=None, share=0.5, seed=0)[0] == "groups"
    assert splits.split(few, rule="groups", share=0.5, seed=0)[0] == "groups"
    assert few.dataset == "ham10000"


def test_aptos_has_3_662_images_and_no_split():
    assert sum(find_dataset("aptos2019").published_counts["total"]) == 3_662


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("is_given", [True, False])
def test_absent_data_says_in_one_line_what_is_needed_and_where_it_comes_from(tmp_path, name, is_given):
    dataset = READ[name]
    root = tmp_path / "none" if is_given else None
    with pytest.raises(InvalidInput) as refusal:
        dataset.read(root)
    first = str(refusal.value).splitlines()[0]
    assert first.startswith("data.root: ")
    assert dataset.files_needed in first
    assert dataset.page in first
    assert ("is not at" if is_given else "is not given") in first


@pytest.mark.parametrize("name", READ)
def test_an_empty_folder_is_refused_by_every_reader(tmp_path, name):
    with pytest.raises(InvalidInput, match=r"^data\.root"):
        READ[name].read(tmp_path)


def test_a_mistyped_name_is_answered_with_the_right_one():
    with pytest.raises(InvalidInput, match="Did you mean 'cch5000'"):
        find_dataset("cch500")


def write_retinas(root):
    """EyePACS in Kaggle's layout, one image of each split."""
    y, x = np.mgrid[:40, :40] - 20
    disk = np.where((y**2 + x**2 < 300)[..., None], np.stack([120 + x, 100 + y, 80 + x], -1), 0).astype(
        np.uint8
    )
    for split, table, grade in (("train", "trainLabels.csv", 2), ("test", "retinopathy_solution.csv", 4)):
        (root / split).mkdir(parents=True)
        Image.fromarray(disk).save(root / split / "1_left.jpeg")
        (root / table).write_text(f"image,level\n1_left,{grade}\n")
    return root


def test_an_owners_layout_is_recognized(tmp_path):
    name, catalog = recognize(write_retinas(tmp_path))
    assert name == "eyepacs"
    assert catalog.labels.tolist() == [2, 4]


def test_a_dataset_without_files_is_drawn_and_not_listed(tmp_path):
    table = open_dataset("phantom", None, side=8)
    assert table.samples(8).read_all().shape == (len(table), 3, 8, 8)
    assert table.is_test.sum() > 100
    with raises("data.name.drawn"):
        list_images(tmp_path, "phantom")


@pytest.mark.parametrize(
    ("header", "name"), [("id_code,diagnosis", "aptos2019"), ("file,grade", "own"), ("path,label", "own")]
)
def test_a_table_of_other_columns_makes_no_aptos(tmp_path, header, name):
    (tmp_path / "train_images").mkdir()
    rows = []
    for i, kind in enumerate((0, 1)):
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / "train_images" / f"{i}.png")
        rows.append(f"{i},{kind}" if name == "aptos2019" else f"train_images/{i}.png,{kind}")
    (tmp_path / "train.csv").write_text("\n".join([header, *rows]))
    assert recognized_name(tmp_path) == name
    if header == "file,grade":
        with pytest.raises(InvalidInput, match=r"train\.csv has the columns file, grade: call"):
            recognize(tmp_path)
    else:
        assert len(recognize(tmp_path)[1]) == 2


@pytest.mark.parametrize("name", ["list.csv", "list.parquet"])
def test_a_manifest_is_recognized_as_ones_own_images(tmp_path, name):
    columns = {"path": ["0.png", "1.png"], "label": ["a", "b"]}
    for i in range(2):
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / f"{i}.png")
    if name.endswith("csv"):
        rows = zip(*columns.values(), strict=True)
        (tmp_path / name).write_text("\n".join(["path,label", *map(",".join, rows)]))
    else:
        pq.write_table(pa.table(columns), tmp_path / name)
    found, catalog = recognize(tmp_path / name)
    assert (found, catalog.names) == ("own", ("0.png", "1.png"))


@pytest.mark.parametrize("name", medmnist.KINDS)
def test_medmnists_sizes_are_numbers_and_in_words(name):
    dataset = find_dataset(name)
    assert dataset.published_sizes["train"] == sum(medmnist.KINDS[name].sizes[:2])
    assert f"{sum(medmnist.KINDS[name].sizes):,} images" in dataset.description


def test_ones_own_images_are_called_own(tmp_path):
    for i, kind in enumerate(("cat", "dog")):
        (tmp_path / kind).mkdir()
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / kind / "a.png")
    name, catalog = recognize(tmp_path)
    assert name == "own"
    assert catalog.class_names == ("cat", "dog")
    assert len(catalog) == 2


@pytest.mark.parametrize(("file", "name"), [("octmnist_64.npz", "octmnist"), ("mine.npz", "own")])
def test_an_npz_file_is_recognized(tmp_path, file, name):
    arrays = {
        f"{split}_{kind}": np.zeros((2, 28, 28) if kind == "images" else (2, 1), dtype=np.uint8)
        for split in ("train", "val", "test")
        for kind in ("images", "labels")
    }
    np.savez(tmp_path / file, **arrays)
    found, catalog = recognize(tmp_path / file)
    assert found == name
    assert len(catalog) == 6


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="none"):
        recognize(tmp_path / "none")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param("ham10000_200x150.tar.gz", "ham10000", marks=pytest.mark.slow),
        ("aptos2019_160.tar", "aptos2019"),
        (".", "cifar100lt"),
    ],
)
def test_the_real_archives_are_recognized(shared_data, file, name):
    found, catalog = recognize(shared_data / file)
    assert found == name
    dataset = find_dataset(name)
    counts = np.bincount(catalog.labels)
    published = np.sum(list(dataset.published_counts.values()), axis=0)
    assert counts.tolist() == published.tolist()


@pytest.mark.parametrize(
    ("recipe", "file", "sizes"),
    [
        pytest.param("ham10000-3-2", "ham10000_200x150.tar.gz", (8_012, 2_003), marks=pytest.mark.slow),
        ("cifar100-lt-50-10", ".", (10_847, 10_000)),
    ],
)
def test_a_recipe_behind_published_figures_runs_on_the_published_split_or_not_at_all(
    shared_data, recipe, file, sizes
):
    data = load_recipe(Path(__file__).parents[2] / "recipes" / f"{recipe}.yaml").data
    assert data.split == "benchmark"
    images = open_dataset(data.name, shared_data / file, side=data.side)
    drawn = {"rule": data.split, "share": data.split_share, "seed": data.split_seed}
    rule, train, test = splits.split(images, **drawn)
    assert (rule, len(train), len(test)) == ("benchmark", *sizes)
    with pytest.raises(InvalidInput, match="no split came with these images"):
        splits.split(replace(images, is_test=None), **drawn)
