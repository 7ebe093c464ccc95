"""One's own images: every layout that is accepted, and the words for every one that is not."""

import io
import sys
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from medcil.check.findings import class_counts
from medcil.clinic.holdout import set_aside
from medcil.data.cache import open_cache, prepare
from medcil.data.sources.archive import FolderFiles
from medcil.data.sources.folder import Ignored, ignored_files, names_patient, read_own
from medcil.data.sources.manifest import UnsoundData, part_of
from medcil.data.splits import split
from medcil.errors import InvalidInput

IMAGES = {  # path -> gray
    "nevus/1.png": 10,
    "nevus/2.png": 20,
    "nevus/visit 2/3.png": 30,
    "melanoma/1.png": 40,
    "melanoma/2.PNG": 50,
}
LABELS = {path: path.split("/")[0] for path in IMAGES}


def png(gray: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (gray, gray, gray)).save(buffer, format="PNG")
    return buffer.getvalue()


def dicom(gray: int, patient: str | None, *, marked: bool = True) -> bytes:
    """A file of one gray, which the window 0..255 leaves as it is."""
    dataset = Dataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", generate_uid()
    if patient is not None:
        dataset.PatientID = patient
    dataset.Rows, dataset.Columns, dataset.SamplesPerPixel = 4, 4, 1
    dataset.PhotometricInterpretation, dataset.PixelRepresentation = "MONOCHROME2", 0
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 8, 8, 7
    dataset.WindowCenter, dataset.WindowWidth = 128, 256
    dataset.PixelData = bytes([gray]) * 16
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=marked)
    return buffer.getvalue()


def write(root: Path, files) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def images(paths=IMAGES) -> dict[str, bytes]:
    return {path: png(gray) for path, gray in paths.items()}


def manifest(rows, header="path,label") -> str:
    return "\n".join([header, *rows]) + "\n"


def with_manifest(root: Path, text: str | bytes, name="list.csv") -> Path:
    """The images of IMAGES below images/, and a manifest beside that folder."""
    write(root, {f"images/{path}": content for path, content in images().items()} | {name: text})
    return root / name


def rows_of(paths=IMAGES) -> list[str]:
    return [f"images/{path},{LABELS[path]}" for path in paths]


def labels_by_name(catalog) -> dict[str, str]:
    return {
        name: catalog.class_names[label] for name, label in zip(catalog.names, catalog.labels, strict=True)
    }


def grays(catalog) -> list[int]:
    return catalog.samples(4).read_all()[:, 0, 0, 0].tolist()


def refused(path: Path) -> str:
    with pytest.raises(InvalidInput) as error:
        read_own(path)
    return str(error.value)


def test_a_folder_per_class_is_read(tmp_path):
    catalog = read_own(write(tmp_path, images()))
    assert catalog.class_names == ("melanoma", "nevus")
    assert labels_by_name(catalog) == LABELS
    assert list(catalog.names) == sorted(IMAGES)
    assert grays(catalog) == [IMAGES[name] for name in catalog.names]
    assert catalog.groups is None
    assert catalog.is_test is None


def test_what_is_no_image_is_left_alone(tmp_path):
    others = {"nevus/notes.txt": "x", "README": "x", "nevus/.hidden.png": b"x", "melanoma/Thumbs.db": b"x"}
    tables = {"patients.csv": "name;age\n", "nevus/measures.csv": "path,label\n", "odd.csv": b"caf\xe9,x\n"}
    assert labels_by_name(read_own(write(tmp_path, images() | others | tables))) == LABELS


@pytest.mark.parametrize("test", ["test", "Testing", "val", "valid", "validation"])
def test_folders_above_the_classes_are_the_split(tmp_path, test):
    train = {f"Train/{path}": content for path, content in images().items()}
    held_out = {f"{test}/nevus/9.png": png(90), f"{test}/melanoma/8.png": png(80)}
    catalog = read_own(write(tmp_path, train | held_out))
    assert catalog.class_names == ("melanoma", "nevus")
    assert {name for name, is_test in zip(catalog.names, catalog.is_test, strict=True) if is_test} == set(
        held_out
    )


@pytest.mark.parametrize("name", ["val", "Valid", "validation"])
def test_where_there_is_a_test_part_validation_images_are_neither_trained_nor_tested_on(tmp_path, name):
    names = [f"{part}/{label}/1.png" for part in ("train", name, "test") for label in "ab"]
    catalog = read_own(write(tmp_path, {name: png(i) for i, name in enumerate(names)}))
    for part, is_part in (("test", catalog.is_test), (name, catalog.is_validation)):
        chosen = [file for file, is_in in zip(catalog.names, is_part, strict=True) if is_in]
        assert chosen == [f"{part}/a/1.png", f"{part}/b/1.png"]
    assert catalog.remarks == (
        "split: train 2, val 2 (measured on, not trained on), test 2 (for `medcil evaluate`, not trained on)",
    )
    rule, train, test = split(catalog, rule=None, share=0.5, seed=0)
    assert rule == "given"
    assert {catalog.names[i].split("/")[0] for i in train} == {"train"}
    assert {catalog.names[i].split("/")[0] for i in test} == {"test"}
    learned, sealed = set_aside(catalog.loaded(8), 20, seed=0)
    assert {catalog.names[i].split("/")[0] for i in learned} == {"train"}
    assert {catalog.names[i].split("/")[0] for i in sealed} == {name}
    prepared = prepare(catalog, tmp_path / "store", side=8)
    np.testing.assert_array_equal(prepared.is_validation, catalog.is_validation)
    np.testing.assert_array_equal(open_cache(tmp_path / "store").is_validation, catalog.is_validation)
    assert [counts.train for counts in class_counts(catalog)] == [1, 1]


def test_training_images_alone_have_no_split(tmp_path):
    catalog = read_own(write(tmp_path, {f"train/{path}": content for path, content in images().items()}))
    assert catalog.is_test is None
    assert set(catalog.class_names) == {"melanoma", "nevus"}


def test_classes_are_in_natural_order(tmp_path):
    names = ["grade 10", "grade 2", "Grade 1", "other"]
    catalog = read_own(write(tmp_path, {f"{name}/1.png": png(1) for name in names}))
    assert catalog.class_names == ("Grade 1", "grade 2", "grade 10", "other")


def test_a_class_name_is_composed(tmp_path):
    decomposed = unicodedata.normalize("NFD", "nävus")
    catalog = read_own(write(tmp_path, {f"{decomposed}/1.png": png(1), "b/1.png": png(2)}))
    assert set(catalog.class_names) == {unicodedata.normalize("NFC", "nävus"), "b"}
    assert decomposed not in catalog.class_names
    assert len(grays(catalog)) == 2


@pytest.mark.parametrize(("one", "other"), [("Nevus", "nevus"), ("STRASSE", "straße")])
def test_two_classes_that_differ_in_case_only_are_refused(tmp_path, one, other):
    message = refused(write(tmp_path, {f"{one}/1.png": png(1), f"{other}/2.png": png(2)}))
    assert ascii(one) in message
    assert ascii(other) in message
    assert "rename one of them" in message


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no images"),
        ({"nevus/notes.txt": b"x"}, "holds no images"),
        ({"a/1.png": png(1), "a/2.png": png(2)}, "has only one class, 'a'"),
        (
            {"images/1.png": png(1), "labels.csv": b"name,kind\n1.png,a\n"},
            "labels.csv has the columns name, kind",
        ),
        ({"1.png": png(1), "labels.csv": b"name,kind\n"}, "call those of image and class path and label"),
        ({"test/a/1.png": png(1), "test/b/1.png": png(2), "val/a/2.png": png(3)}, "has test images only"),
        ({"val/a/1.png": png(1), "val/b/1.png": png(2)}, "has validation images only"),
        ({"test/a/1.png": png(1), "validation/b/1.png": png(2)}, "add the training images"),
        ({"a/1.png": png(1), "b/1.png": png(1), "2.png": png(2)}, "1 of 3 images"),
        ({"1.png": png(1), "2.png": png(2)}, "2 of 2 images"),
        ({"train/a/1.png": png(1), "train/b/1.png": png(1), "test/1.png": png(1)}, "are in no class folder"),
        ({"train/a/1.png": png(1), "train/b/1.png": png(1), "more/a/1.png": png(1)}, "folder 'more'"),
    ],
)
def test_a_folder_without_classes_is_refused(tmp_path, files, words):
    (tmp_path / "root").mkdir()
    message = refused(write(tmp_path / "root", files))
    assert words in message
    assert message.startswith("data.root: ")


def test_nothing_there_is_said_with_what_to_give(tmp_path):
    assert "there is nothing at" in refused(tmp_path / "none")
    assert "Give a folder with one subfolder per class" in refused(tmp_path / "none.csv")


def in_zip(path: Path, files) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def in_tar(path: Path, files) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("pack", "name"), [(in_zip, "a.zip"), (in_tar, "a.tar"), (in_tar, "a.tar.gz"), (write, "folder")]
)
@pytest.mark.parametrize("wrapper", ["", "my images/", "export/2024/"])
@pytest.mark.parametrize("listed", [False, True])
def test_the_same_images_packed_or_not_are_the_same_data(tmp_path, pack, name, wrapper, listed):
    files = {f"{wrapper}{path}": content for path, content in images().items()}
    if listed:
        text = manifest([f"{path},class {LABELS[path]}" for path in reversed(IMAGES)])
        files[f"{wrapper}list.csv"] = text.encode()
    catalog = read_own(pack(tmp_path / name, files))
    assert catalog.names == tuple(f"{wrapper}{path}" for path in sorted(IMAGES))
    prefix = "class " if listed else ""
    assert labels_by_name(catalog) == {f"{wrapper}{path}": prefix + LABELS[path] for path in IMAGES}
    assert grays(catalog) == [IMAGES[path] for path in sorted(IMAGES)]


def test_a_manifest_names_images_classes_patients_and_split(tmp_path):
    rows = [
        "images/nevus/1.png,x,ann,train,7",
        "images/nevus/2.png,y,ann,train,8",
        "images/melanoma/1.png,y,bob,test,9",
        "images/nevus/visit 2/3.png,x,,Train,10",
    ]
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header="path,label,Patient , split,thickness")))
    assert catalog.class_names == ("x", "y")
    assert dict(zip(catalog.names, catalog.groups, strict=True)) == {
        "images/melanoma/1.png": "patient 2",
        "images/nevus/1.png": "patient 1",
        "images/nevus/2.png": "patient 1",
        "images/nevus/visit 2/3.png": "image images/nevus/visit 2/3.png",
    }
    assert catalog.is_test.tolist() == [True, False, False, False]
    assert catalog.labels.tolist() == [1, 0, 1, 0]
    assert grays(catalog) == [40, 10, 20, 30]


@pytest.mark.parametrize(
    "column",
    [
        *("patient", "group", "lesion", "patient_id", "lesion_id"),
        *("PATIENT", "Patient ID", "PatientID", "patient-id", " Patient.Id ", "Patient__ID", "Lesion ID"),
        *("subject", "Subject ID"),
    ],
)
def test_a_group_has_several_names(tmp_path, column):
    rows = [f"{row},{i // 2}" for i, row in enumerate(rows_of())]
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header=f"path,label,{column}")))
    assert sorted(catalog.groups) == [f"patient {n}" for n in (1, 1, 2, 2, 3)]
    assert not catalog.columns  # no subgroups are made of patients


@pytest.mark.parametrize(
    "image", ["filename", "File Name", "image", "image_id", "FILE", "img", "Img-Path", "id_code"]
)
@pytest.mark.parametrize("label", ["class", "Diagnosis", "dx", "TARGET", "category"])
def test_a_column_has_several_names(tmp_path, image, label):
    rows = [
        f"{row},{part}"
        for row, part in zip(rows_of(), ["Train", "val", "train", "TEST", "train"], strict=True)
    ]
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header=f"{image},{label},set")))
    assert labels_by_name(catalog) == {f"images/{path}": LABELS[path] for path in IMAGES}
    assert [name for name, is_test in zip(catalog.names, catalog.is_test, strict=True) if is_test] == [
        "images/melanoma/1.png"
    ]
    assert catalog.remarks == (
        f"columns: image ← {image}, class ← {label}, split ← set",
        "split: train 3, val 1 (measured on, not trained on), test 1 (for `medcil evaluate`, not trained on)",
    )
    assert labels_by_name(read_own(tmp_path)) == labels_by_name(
        catalog
    )  # the folder: the table in it is found


def test_the_names_path_and_label_count_before_all_others(tmp_path):
    rows = [f"{row},x{i % 2},y,{i}" for i, row in enumerate(rows_of())]
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header="path,label,diagnosis,set,image_id")))
    assert labels_by_name(catalog) == {f"images/{path}": LABELS[path] for path in IMAGES}
    assert set(catalog.columns) == {"diagnosis", "set", "image_id"}
    assert catalog.is_test is None  # no cell of `set` is a part of a split
    assert catalog.remarks == ("columns: image ← path, class ← label",)


@pytest.mark.parametrize(("pack", "name"), [(write, "folder"), (in_zip, "a.zip")])
@pytest.mark.parametrize("wrapper", ["", "export/"])
def test_images_are_found_by_the_end_of_their_path_without_an_extension(tmp_path, pack, name, wrapper):
    files = {
        "part 1/ISIC_1.jpg": 10,
        "part 2/ISIC_2.JPG": 20,
        "part 2/v1.2.png": 30,
        "part 2/deep/ISIC_11.jpg": 40,
    }
    rows = {"ISIC_1": "part 1/ISIC_1.jpg", "ISIC_2": "part 2/ISIC_2.JPG", "v1.2": "part 2/v1.2.png"}
    rows |= {"deep/ISIC_11": "part 2/deep/ISIC_11.jpg"}
    text = manifest([f"{written},{'ab'[i % 2]}" for i, written in enumerate(rows)], header="image_id,dx")
    contents = {f"{wrapper}{path}": png(gray) for path, gray in files.items()}
    contents[f"{wrapper}metadata.csv"] = text.encode()
    contents[f"{wrapper}part 1/ISIC_1.txt"] = b"no image"
    catalog = read_own(pack(tmp_path / name, contents))
    assert labels_by_name(catalog) == {
        f"{wrapper}{path}": "ab"[i % 2] for i, path in enumerate(rows.values())
    }
    assert sorted(grays(catalog)) == [10, 20, 30, 40]


def test_a_name_of_several_images_is_refused(tmp_path):
    files = {"a/1.png": png(1), "b/1.jpg": png(2), "b/2.png": png(3)}
    first = refused(write(tmp_path, files | {"list.csv": manifest(["2,x", "1,y"], "image,class")}))
    assert "row 3 of" in first
    assert "names 1, which is a/1.png and b/1.jpg: write the path" in first
    (tmp_path / "list.csv").write_text(manifest(["2,x", "a/1,y", "b/2.png,y"], "image,class"))
    assert "row 4" in refused(tmp_path)  # b/2.png again, under another name
    (tmp_path / "list.csv").write_text(manifest(["2,x", "c/1,y", "1.png,y"], "image,class"))
    assert "1 of 3 files" in refused(tmp_path)
    assert "row 3: c/1" in refused(tmp_path)


def test_other_columns_keep_their_names_and_one_patient_has_one_column(tmp_path):
    rows = [f"{row},p{i // 2},a,b" for i, row in enumerate(rows_of())]
    catalog = read_own(
        with_manifest(tmp_path, manifest(rows, header="PATH,Label,patient,Patient ID no,Site-Code"))
    )
    assert set(catalog.columns) == {"patient id no", "site-code"}
    twice = with_manifest(tmp_path, manifest(rows, header="path,label,patient_id,Patient ID,site"))
    with pytest.raises(InvalidInput, match="2 columns of the patient, 'patient_id' and 'Patient ID'"):
        read_own(twice)


def test_the_patient_counts_before_the_lesion(tmp_path):
    rows = [f"{row},l{i},p{i // 3}" for i, row in enumerate(rows_of())]
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header="path,label,lesion,patient")))
    assert set(catalog.groups) == {"patient 1", "patient 2"}


def test_a_patient_column_without_a_patient_knows_no_groups(tmp_path):
    rows = [f"{row}," for row in rows_of()]
    assert read_own(with_manifest(tmp_path, manifest(rows, header="path,label,patient"))).groups is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: ("\ufeff" + text).encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", "\t").encode(),
        lambda text: ("\ufeff" + text.replace(",", ";").replace("\n", "\r\n")).encode(),
        lambda text: text.replace("path,label", "PATH, Label").encode(),
        lambda text: text.replace("/", "\\").encode(),
        lambda text: text.replace("images/", "./images/../images/").encode(),
        lambda text: (text + "\n,\n\n").encode(),
        lambda text: "\n".join(",".join(f'"{c}"' for c in line.split(",")) for line in text.split()).encode(),
        lambda text: text.strip().encode(),
    ],
)
def test_a_table_may_be_written_in_many_ways(tmp_path, change):
    paths = [path for path in IMAGES if " " not in path]
    catalog = read_own(with_manifest(tmp_path, change(manifest(rows_of(paths)))))
    assert labels_by_name(catalog) == {f"images/{path}": LABELS[path] for path in paths}


def test_a_quoted_field_may_hold_separators_and_line_breaks(tmp_path):
    rows = [f"{row},fine" for row in rows_of()]
    rows[0] = f'images/{next(iter(IMAGES))},"naevus, ""common""","two\nlines"'
    catalog = read_own(with_manifest(tmp_path, manifest(rows, header="path,label,note")))
    assert 'naevus, "common"' in catalog.class_names


def parquet(columns) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def test_a_manifest_in_parquet_is_one_in_csv(tmp_path):
    rows = [f"{row},{i // 2},{'test' if i < 2 else 'train'}" for i, row in enumerate(rows_of())]
    as_csv = read_own(with_manifest(tmp_path, manifest(rows, header="path,label,patient,split")))
    columns = dict(
        zip(
            ("path", "label", "patient", "split"),
            zip(*(row.split(",") for row in rows), strict=True),
            strict=True,
        )
    )
    table = parquet({**columns, "patient": [i // 2 for i in range(5)], "embedding": [[0.5]] * 5})
    (tmp_path / "list.csv").unlink()
    for path in (with_manifest(tmp_path, table, name="list.parquet"), tmp_path):
        as_parquet = read_own(path)
        assert as_parquet.names == as_csv.names
        assert as_parquet.groups == as_csv.groups
        assert as_parquet.class_names == as_csv.class_names
        np.testing.assert_array_equal(as_parquet.labels, as_csv.labels)
        np.testing.assert_array_equal(as_parquet.is_test, as_csv.is_test)


@pytest.mark.parametrize(
    ("module", "name", "content"),
    [("pyarrow", "list.parquet", b"PAR1"), ("pydicom", "a/1.dcm", b"x")],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, name, content):
    monkeypatch.setitem(sys.modules, module, None)
    write(tmp_path, images() | {name: content})
    path = tmp_path / name if name.endswith("parquet") else tmp_path
    assert f"{module} is not installed. Run pip install" in refused(path)


GOOD = rows_of()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (manifest(["images/gone.png,a", *GOOD, "nowhere/x.png,b"]), "2 of 7 files"),
        (manifest(["images/gone.png,a", *GOOD]), "row 2: images/gone.png"),
        (manifest([*GOOD, GOOD[0]]), "row 7 of "),
        (manifest([*GOOD, GOOD[0]]), "again, after row 2: keep one"),
        (manifest([*GOOD, "images/nevus/1.png,wart"]), "again, as 'wart', row 2 as 'nevus': keep one"),
        (manifest([*GOOD, "images/./nevus/1.png,wart"]), "row 7 of "),
        (manifest([GOOD[0], "images/nevus/2.png, ", *GOOD[2:]]), "row 3 of "),
        (manifest([GOOD[0], "images/nevus/2.png, ", *GOOD[2:]]), "has no label: fill it in"),
        (manifest([*GOOD, ",nevus"]), "has no path: fill it in"),
        (manifest([*GOOD, "../1.png,nevus"]), "row 7 of "),
        (manifest([*GOOD, "../1.png,nevus"]), "leads out of the manifest's folder (../1.png)"),
        (manifest([*GOOD, "images/../../1.png,nevus"]), "leads out of the manifest's folder"),
        (manifest([*GOOD, "/etc/1.png,nevus"]), "absolute path (/etc/1.png): write it relative"),
        (manifest([*GOOD, "C:\\images\\1.png,nevus"]), "write it relative to the manifest's folder"),
        (manifest([*GOOD, "x\x1b[2J.png,nevus"]), "control characters in its path (x\\x1b[2J.png): remove"),
        (manifest([*GOOD, "x.png,ne\x1b[2Jvus"]), "control characters in its label"),
        (manifest([*GOOD, "gone\u202e.png,nevus"]), "row 7: gone\\u202e.png"),
        (manifest([f"{row},train" for row in GOOD] + ["x.png,a,testid"], "path,label,split"), "'testid'"),
        (manifest([*GOOD, "..\\1.png,nevus"]), "leads out of the manifest's folder"),
        (manifest([*GOOD, "images,a,b"]), "row 7 of "),
        (manifest([*GOOD, "images,a,b"]), "has 3 fields, the header 2"),
        (manifest([f"{row},train" for row in GOOD] + ["x.png,a,dev"], "path,label,split"), "split 'dev'"),
        (manifest([f"{row},train" for row in GOOD[1:]] + [f"{GOOD[0]},"], "path,label,split"), "split ''"),
        (manifest([f"{row},test" for row in GOOD], "path,label,split"), "has test images only"),
        (manifest(GOOD, "Name,label"), "has no column of the image (found: Name, label). Call it path."),
        (manifest(GOOD, "path,kind"), "has no column of the class (found: path, kind). Call it label."),
        (
            manifest([f"{row},a" for row in GOOD], "path,label,label"),
            "has 2 columns of the class, 'label' and 'label'. Call one label.",
        ),
        (
            manifest([f"{row},a" for row in GOOD], "file,label,Image ID"),
            "has 2 columns of the image, 'file' and 'Image ID'. Call one path.",
        ),
        (
            manifest([f"{row},a" for row in GOOD], "file,dx,target"),
            "the class, 'dx' and 'target'. Call one label.",
        ),
        (manifest([f"{row},a,b" for row in GOOD], "path,label,age,Age"), "has two columns 'age'"),
        (manifest([f"{row},train" for row in GOOD] + ["x.png,a,dev"], "path,label,set"), "split 'dev'"),
        (manifest([]), "lists no images"),
        ("", "has no column of the image (found: none)"),
        (manifest(GOOD[:3]), "has only one class, 'nevus'"),
        (manifest([*GOOD[:4], "images/melanoma/2.PNG,Nevus"]), "differ in case or encoding only"),
        (
            manifest(GOOD).replace("melanoma/1.png,melanoma", 'melanoma/1.png,"mel').encode(),
            "fix its quotes",
        ),
        (manifest([*GOOD, "x.png,n\xe4vus"]).encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_row(tmp_path, text, words):
    message = refused(with_manifest(tmp_path, text))
    assert words in message
    assert "list.csv" in message


def test_only_the_first_missing_files_are_named(tmp_path):
    message = refused(with_manifest(tmp_path, manifest([*GOOD, *(f"gone {i}.png,a" for i in range(40))])))
    first, *named = message.splitlines()
    assert "40 of 45 files" in first
    assert named[:2] == ["  row 7: gone 0.png", "  row 8: gone 1.png"]
    assert named[20:] == ["  and 20 more"]


def test_a_manifest_cannot_reach_beyond_its_folder_by_a_link(tmp_path):
    write(tmp_path / "secret", {"1.png": png(1)})
    path = with_manifest(tmp_path / "data", manifest([*GOOD, "link/1.png,a"]))
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput):
        read_own(path)


def test_two_manifests_in_a_folder_are_refused(tmp_path):
    with_manifest(tmp_path, manifest(GOOD))
    path = with_manifest(tmp_path, manifest(GOOD), name="list 2.csv")
    message = refused(tmp_path)
    assert "two manifests, list 2.csv and list.csv" in message
    assert len(read_own(path)) == 5


@pytest.mark.parametrize("header", ["path,label", "path,label,gr\xf6\xdfe"])
def test_a_manifest_in_another_encoding_is_not_mistaken_for_none(tmp_path, header):
    with_manifest(tmp_path, manifest([*GOOD, "x.png,n\xe4vus"], header).encode("latin-1"))
    assert "is not UTF-8 text" in refused(tmp_path)


def test_dicom_and_plain_images_are_read_side_by_side(tmp_path):
    files = {
        "a/1.dcm": dicom(100, "77"),
        "a/2": dicom(110, "12"),
        "a/1.2.840.3": dicom(120, "77"),
        "b/3.DCM": dicom(130, None),
        "b/4.png": png(140),
        "b/notes": b"no image",
        "b/5": png(150),
    }
    catalog = read_own(write(tmp_path, files))
    assert catalog.names == ("a/1.2.840.3", "a/1.dcm", "a/2", "b/3.DCM", "b/4.png")
    assert grays(catalog) == [120, 100, 110, 130, 140]
    assert catalog.groups == ("patient 2", "patient 2", "patient 1", "image b/3.DCM", "image b/4.png")
    assert catalog.patients == ("77", "77", "12", "", "")


def test_dicom_without_its_marker_is_known_by_its_extension(tmp_path):
    files = {"a/1.dcm": dicom(100, "p", marked=False), "b/1.dcm": dicom(110, "q")}
    catalog = read_own(write(tmp_path, files))
    assert catalog.groups == ("patient 1", "patient 2")
    with pytest.raises(InvalidInput, match=r"a/1\.dcm cannot be read as an image .*DICOM"):
        grays(catalog)


@pytest.mark.parametrize("pack", [in_zip, write])
def test_a_manifest_of_dicom_files_takes_patients_from_headers_unless_it_has_them(tmp_path, pack):
    files = {f"{i}.dcm": dicom(10 * i, "p" if i < 3 else "q") for i in range(4)}
    plain = manifest([f"{i}.dcm,{'ab'[i % 2]}" for i in range(4)])
    named = manifest([f"{i}.dcm,{'ab'[i % 2]},{i}" for i in range(4)], header="path,label,patient")
    by_header = read_own(pack(tmp_path / "header", files | {"list.csv": plain.encode()}))
    assert by_header.groups == ("patient 1", "patient 1", "patient 1", "patient 2")
    by_column = read_own(pack(tmp_path / "column", files | {"list.csv": named.encode()}))
    assert by_column.groups == ("patient 1", "patient 2", "patient 3", "patient 4")


def test_a_damaged_dicom_header_is_left_to_the_decoder(tmp_path):
    content = dicom(9, "p")
    files = {"a/1.dcm": content[:140] + b"\xff" * 40, "a/2.dcm": content, "b/1.dcm": b""}
    catalog = read_own(write(tmp_path, files))
    assert catalog.groups == ("image a/1.dcm", "patient 1", "image b/1.dcm")
    with pytest.raises(InvalidInput, match=r"b/1\.dcm"):
        catalog.samples(4).images.read(torch.tensor([2]))


@pytest.mark.parametrize("word", ["testid", "trainidation", "valing", "trained", "tests", ""])
def test_what_only_resembles_a_part_of_a_split_is_none(word):
    assert part_of(word) == ""


def test_a_missing_patient_in_parquet_is_unknown(tmp_path):
    columns = {"path": [f"images/{path}" for path in IMAGES], "label": list(LABELS.values())}
    table = parquet({**columns, "patient": [1.0, 1.0, float("nan"), float("nan"), None]})
    catalog = read_own(with_manifest(tmp_path, table, name="list.parquet"))
    groups = dict(zip(catalog.names, catalog.groups, strict=True))
    assert groups["images/nevus/1.png"] == groups["images/nevus/2.png"] == "patient 1"
    unknown = ["images/nevus/visit 2/3.png", "images/melanoma/1.png", "images/melanoma/2.PNG"]
    assert [groups[name] for name in unknown] == [f"image {name}" for name in unknown]


def test_a_patient_written_in_two_ways_is_one(tmp_path):
    spellings = ["M\xdcLLER", unicodedata.normalize("NFD", "m\xfcller"), "m\xfcller", "p2", "P2"]
    rows = [f"{row},{patient}" for row, patient in zip(rows_of(), spellings, strict=True)]
    for order in (rows, rows[::-1]):
        catalog = read_own(with_manifest(tmp_path, manifest(order, header="path,label,patient")))
        groups = [catalog.groups[catalog.names.index(f"images/{path}")] for path in IMAGES]
        assert groups == ["patient 2"] * 3 + ["patient 1"] * 2


def test_a_check_gets_the_lists_of_data_that_training_refuses(tmp_path):
    with pytest.raises(UnsoundData) as refusal:
        read_own(with_manifest(tmp_path, manifest([*GOOD, "gone.png,nevus"])))
    catalog = refusal.value.table
    assert "gone.png" in catalog.names
    assert len(catalog) == 6
    with pytest.raises(UnsoundData) as refusal:
        read_own(with_manifest(tmp_path, manifest([*GOOD[:4], "images/melanoma/2.PNG,Nevus", "x.dcm,nevus"])))
    assert set(refusal.value.table.class_names) == {"melanoma", "nevus", "Nevus"}
    assert len(refusal.value.table) == 6


def test_a_dicomdir_is_no_image(tmp_path):
    files = {"a/1.dcm": dicom(1, "p"), "b/2.dcm": dicom(2, "q"), "DICOMDIR": dicom(3, None)}
    files["a/dicomdir"] = dicom(4, None)
    assert read_own(write(tmp_path, files)).names == ("a/1.dcm", "b/2.dcm")


def test_of_a_large_file_only_the_header_is_read(tmp_path, monkeypatch):
    write(tmp_path, images() | {"nevus/4": dicom(5, "p"), "nevus/scan": b"x"})
    with (tmp_path / "nevus/scan").open("r+b") as file:
        file.truncate(300 << 20)  # a hole in the file, which takes no room
    monkeypatch.setattr(FolderFiles, "read", lambda self, name: pytest.fail(f"{name} is read as a whole"))
    catalog = read_own(tmp_path)
    assert "nevus/scan" not in catalog.names
    assert catalog.groups[catalog.names.index("nevus/4")] == "patient 1"


def test_an_npz_file_is_ones_own_data_too(tmp_path):
    parts = {"train": 4, "val": 2, "test": 2}
    np.savez(
        tmp_path / "mine.npz",
        **{f"{part}_images": np.zeros((n, 28, 28), np.uint8) for part, n in parts.items()},
        **{f"{part}_labels": np.arange(n)[:, None] % 2 for part, n in parts.items()},
    )
    catalog = read_own(tmp_path / "mine.npz")
    assert catalog.class_names == ("class 0", "class 1")
    assert catalog.is_test.sum() == 2


@pytest.mark.parametrize(("pack", "name"), [(write, "folder"), (in_zip, "a.zip")])
@pytest.mark.parametrize("wrapper", ["", "export/"])
@pytest.mark.parametrize("part", ["", "train/"])
def test_what_is_not_read_is_counted_by_extension(tmp_path, pack, name, wrapper, part):
    others = {
        **{f"{part}nevus/{i}.HEIC": b"x" for i in range(3)},
        f"{part}wart/1.gif": b"x",
        f"{part}nevus/scan": b"x",
        f"{part}notes/read me.txt": b"x",
        f"{part}melanoma/Thumbs.db": b"x",
        f"{part}nevus/desktop.ini": b"x",
        "README.md": b"x",
    }
    files = {f"{part}{path}": content for path, content in images().items()} | others
    if part:
        files |= {"test/nevus/9.png": png(9), "test/melanoma/9.png": png(8)}
    found = ignored_files(read_own(pack(tmp_path / name, {f"{wrapper}{n}": c for n, c in files.items()})))
    counts = {extension: len(names) for extension, names in found.files.items()}
    assert counts == {".heic": 3, ".gif": 1, ".txt": 1, "no extension": 1}
    assert next(iter(counts)) == ".heic"
    assert found.folders == [f"{wrapper}{part}wart"]


def test_empty_class_folders_are_found_and_a_manifest_overlooks_nothing(tmp_path):
    write(tmp_path / "data", images())
    (tmp_path / "data" / "wart" / "visit 1").mkdir(parents=True)
    (tmp_path / "data" / ".cache").mkdir()
    assert ignored_files(read_own(tmp_path / "data")).folders == ["wart"]
    path = with_manifest(tmp_path / "listed", manifest(GOOD))
    write(tmp_path / "listed", {"images/nevus/9.heic": b"x"})
    (tmp_path / "listed" / "images" / "wart").mkdir()
    assert ignored_files(read_own(path)) == ignored_files(read_own(path.parent)) == Ignored({}, [])


def test_other_columns_of_a_manifest_go_with_their_images(tmp_path):
    rows = [f"{row},{60 - i},{'fm'[i % 2]}" for i, row in enumerate(rows_of())]
    root = with_manifest(tmp_path, manifest(rows, "path,label,Age, sex"))
    catalog = read_own(root)
    listed = {row.split(",")[0]: row.split(",")[2:] for row in rows}
    assert list(catalog.columns) == ["age", "sex"]
    found = zip(catalog.names, catalog.columns["age"], catalog.columns["sex"], strict=True)
    assert {name: [age, sex] for name, age, sex in found} == listed
    chosen = catalog.select(np.array([2, 0]))
    assert chosen.columns["age"] == (catalog.columns["age"][2], catalog.columns["age"][0])


@pytest.mark.parametrize(
    ("patient", "named"),
    [
        ("1", ["1.png", "a/1_left.png", "patient-1.png", "patient1.png", "x 1 y"]),
        ("4711", ["IMG_4711.png", "IMG4711_a.png", "4711/0.png"]),
        ("MUELLER HANS 1", ["Mueller_Hans_1_a.png", "mueller-hans-1.png", "MuellerHans1.png"]),
        ("Müller", ["mu\u0308ller_3.png", "MÜLLER.png"]),
        ("P 1 2", ["p1_2.png", "P-1-2.png"]),
        ("%&", ["a%&b"]),
    ],
)
def test_a_text_names_a_patient_whatever_separates_the_words(patient, named):
    assert [text for text in named if not names_patient(text, patient)] == []


@pytest.mark.parametrize(
    ("patient", "others"),
    [
        ("1", ["11.png", "4711.png", "a/10_left.png", "x/0.png"]),
        ("4711", ["47110.png", "14711.png", "47_11.png"]),
        ("MUELLER HANS 1", ["Mueller_Hans_11.png", "Schmueller_Hans_1.png", "Mueller_1.png"]),
        ("some", ["somebody.png", "handsome.png"]),
        ("P 1 2", ["p12.png"]),
        ("", ["a.png"]),
    ],
)
def test_within_a_longer_number_or_word_an_id_names_nobody(patient, others):
    assert [text for text in others if names_patient(text, patient)] == []
