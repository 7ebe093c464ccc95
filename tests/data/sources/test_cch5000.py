"""CCH5000 under its official names: real TIFF files, each with a gray of its own."""

import io
import zipfile

import pytest
from PIL import Image

from medcil.data.sources.cch5000 import CLASS_NAMES, DATASET, FOLDERS, read_table, recognizes
from medcil.errors import InvalidInput

# Names as they are published: some slides' parts have a letter, some have no number at all.
TILES = (
    ("01_TUMOR", "10009_CRC-Prim-HE-03_009.tif_Row_301_Col_151.tif", "CRC-Prim-HE-03"),
    ("01_TUMOR", "475C_CRC-Prim-HE-02_007b.tif_Row_301_Col_151.tif", "CRC-Prim-HE-02"),
    ("02_STROMA", "68F1_CRC-Prim-HE-07.tif_Row_451_Col_901.tif", "CRC-Prim-HE-07"),
    ("03_COMPLEX", "12AA9_CRC-Prim-HE-10_029.tif_Row_1_Col_601.tif", "CRC-Prim-HE-10"),
    ("04_LYMPHO", "A26A_CRC-Prim-HE-05_008.tif_Row_151_Col_1.tif", "CRC-Prim-HE-05"),
    ("05_DEBRIS", "762E_CRC-Prim-HE-04_034.tif_Row_1_Col_1051.tif", "CRC-Prim-HE-04"),
    ("06_MUCOSA", "6491_CRC-Prim-HE-06_016.tif_Row_151_Col_751.tif", "CRC-Prim-HE-06"),
    ("07_ADIPOSE", "11114_CRC-Prim-HE-02_026.tif_Row_1_Col_1.tif", "CRC-Prim-HE-02"),
    ("08_EMPTY", "15E06_CRC-Prim-HE-01_015.tif_Row_151_Col_151.tif", "CRC-Prim-HE-01"),
)
GRAYS = [20 * i for i in range(len(TILES))]
LABELS = [0, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "cch"
    for (kind, tile, _), gray in zip(TILES, GRAYS, strict=True):
        path = root / "Kather_texture_2016_image_tiles_5000" / kind / tile
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (150, 150), (gray, gray, gray)).save(path, format="TIFF")
    return root


def write_lists(root, train, test, second="test.csv"):
    for name, chosen in (("train.csv", train), (second, test)):
        lines = [f"{TILES[i][0]}/{TILES[i][1]},{LABELS[i]}" for i in chosen]
        (root / name).write_text("\n".join(["image,label", *lines]) + "\n")


def grays(catalog):
    return catalog.samples(4).read_all()[:, 0, 0, 0].tolist()


def test_classes_are_folders_and_groups_are_slides(folder):
    catalog = read_table(folder)
    assert catalog.class_names == CLASS_NAMES
    assert catalog.labels.tolist() == LABELS
    assert catalog.groups == tuple(slide for _, _, slide in TILES)
    assert catalog.is_test is None
    assert grays(catalog) == GRAYS


@pytest.mark.parametrize("second", ["test.csv", "val.csv"])
def test_the_benchmarks_lists_give_order_and_split(folder, second):
    train, test = [8, 0, 3, 2], [4, 1]
    write_lists(folder, train, test, second)
    catalog = read_table(folder)
    assert grays(catalog) == [GRAYS[i] for i in train + test]
    assert catalog.labels.tolist() == [LABELS[i] for i in train + test]
    assert catalog.groups == tuple(TILES[i][2] for i in train + test)
    assert catalog.is_test.tolist() == [False] * 4 + [True] * 2


def test_the_owners_zip_is_read_as_it_is(folder, tmp_path):
    path = tmp_path / "Kather_texture_2016_image_tiles_5000.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.tif")):
            archive.write(file, file.relative_to(folder))
    assert grays(read_table(path)) == GRAYS


def test_a_tile_that_is_listed_but_not_there_is_named(folder):
    write_lists(folder, [0, 1], [2])
    (folder / "Kather_texture_2016_image_tiles_5000" / TILES[1][0] / TILES[1][1]).unlink()
    with pytest.raises(InvalidInput, match=rf"lacks 1 listed images, e\.g\. 01_TUMOR/{TILES[1][1]}"):
        read_table(folder)


def test_a_label_that_is_not_the_folders_is_refused(folder):
    write_lists(folder, [0, 1], [2])
    path = folder / "train.csv"
    path.write_text(path.read_text().replace(".tif,0", ".tif,1", 1))
    with pytest.raises(InvalidInput, match=rf"{TILES[0][1]} the label '1'"):
        read_table(folder)


def test_one_list_without_the_other_is_refused(folder):
    write_lists(folder, [0, 1], [2])
    (folder / "test.csv").unlink()
    with pytest.raises(InvalidInput, match=r"has train\.csv, but no test\.csv"):
        read_table(folder)


def test_a_missing_class_is_named_with_what_is_needed_and_where_it_comes_from(folder):
    tile = folder / "Kather_texture_2016_image_tiles_5000" / TILES[-1][0] / TILES[-1][1]
    tile.rename(folder / "tile.tif")
    with pytest.raises(InvalidInput) as refusal:
        read_table(folder)
    first = str(refusal.value).splitlines()[0]
    for part in ("08_EMPTY", "Kather_texture_2016_image_tiles_5000", "train.csv and test.csv", "53169"):
        assert part in first


def test_it_is_recognized_by_all_eight_folders():
    names = [f"a/{folder}/x.tif" for folder in FOLDERS]
    assert recognizes(names)
    assert not recognizes(names[1:])


def test_orders_name_each_class_once():
    assert all(sorted(order) == list(range(8)) for order in DATASET.orders)
    assert len(set(DATASET.orders)) == 3


def test_a_broken_tile_is_named(folder):
    path = folder / "Kather_texture_2016_image_tiles_5000" / TILES[2][0] / TILES[2][1]
    path.write_bytes(io.BytesIO(path.read_bytes()).read(300))
    with pytest.raises(InvalidInput, match=r"68F1_CRC-Prim-HE-07\.tif_Row_451_Col_901\.tif cannot be read"):
        read_table(folder).samples(4).read_all()
