"""CIFAR-100 from the owner's files, as Python 2 wrote them byte for byte, and from tables. No pickle runs."""

import io
import json
import pickle
import struct
import tarfile
import time
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.data.sources import cifar100
from medcil.data.sources.cifar100 import (
    CIFAR100,
    CLASS_NAMES,
    LONG_TAIL_COUNTS,
    read_long_tail,
    read_plain_pickle,
    read_table,
    recognizes,
    recognizes_long_tail,
)
from medcil.errors import InvalidInput

TRAIN_LABELS, TEST_LABELS = [3, 99, 0, 42, 3], [7, 0]
RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(256, size=(n, 32, 32, 3), dtype=np.uint8) for n in (5, 2))


class Python2:
    """Writes protocol 2 as cPickle of Python 2 did: texts are byte strings, everything put is kept."""

    def __init__(self):
        self.n_kept = 0

    def keep(self) -> bytes:
        self.n_kept += 1
        number = self.n_kept
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def write(self, value) -> bytes:
        if isinstance(value, bool) or value is None:
            return {True: b"\x88", False: b"\x89", None: b"N"}[value]
        if isinstance(value, int):
            if 0 <= value < 256:
                return b"K" + bytes([value])
            return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
        if isinstance(value, str):
            return self.write(value.encode("latin-1"))
        if isinstance(value, bytes):
            head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
            return head + value + self.keep()
        if isinstance(value, Mapping):
            start = b"}" + self.keep() + b"("
            return start + b"".join(self.write(k) + self.write(v) for k, v in value.items()) + b"u"
        if isinstance(value, list):
            return b"]" + self.keep() + b"(" + b"".join(map(self.write, value)) + b"e"
        if isinstance(value, tuple):
            if 1 <= len(value) <= 3:
                return b"".join(map(self.write, value)) + b"\x85\x86\x87"[len(value) - 1 :][:1] + self.keep()
            return b"(" + b"".join(map(self.write, value)) + b"t" + self.keep()
        return self.array(value)

    def array(self, value: np.ndarray) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\n" + self.keep() + b"cnumpy\nndarray\n" + self.keep()
        made += b"K\x00\x85" + self.keep() + self.write("b") + b"\x87" + self.keep() + b"R" + self.keep()
        kind = b"cnumpy\ndtype\n" + self.keep() + self.write((value.dtype.str[1:], 0, 1)) + b"R" + self.keep()
        kind += self.write((3, "|", None, None, None, -1, -1, 0)) + b"b"
        shape, is_column_major = self.write(value.shape), self.write(False)
        return (
            made
            + b"(K\x01"
            + shape
            + kind
            + is_column_major
            + self.write(value.tobytes())
            + b"t"
            + self.keep()
            + b"b"
        )


def python2_pickle(value) -> bytes:
    return b"\x80\x02" + Python2().write(value) + b"."


def split(images: np.ndarray, labels: list[int]) -> dict:
    return {
        "filenames": [f"image_s_{i:06d}.png" for i in range(len(images))],
        "batch_label": "training batch 1 of 1",
        "fine_labels": labels,
        "coarse_labels": [label // 5 for label in labels],
        "data": np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1),
    }


META = {"fine_label_names": list(CLASS_NAMES), "coarse_label_names": ["fish"] * 20}


def write_python(root, write=python2_pickle):
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    (folder / "train").write_bytes(write(split(TRAIN, TRAIN_LABELS)))
    (folder / "test").write_bytes(write(split(TEST, TEST_LABELS)))
    (folder / "meta").write_bytes(write(META))
    (folder / "file.txt~").write_bytes(b"")
    return root


def encoded(image: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format=kind, lossless=True)
    return buffer.getvalue()


def write_table(path, images, labels, kind="WEBP", names=CLASS_NAMES):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": encoded(image, kind), "path": f"{i}.png"} for i, image in enumerate(images)]
    schema = arrow.schema(
        [
            ("img", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])),
            ("fine_label", arrow.int64()),
        ],
        metadata=None if names is None else {"class_names": json.dumps(list(names))},
    )
    parquet.write_table(arrow.table({"img": rows, "fine_label": labels}, schema=schema), path)


def write_tables(root):
    write_table(root / "cifar100-train.parquet", TRAIN, TRAIN_LABELS)
    write_table(root / "cifar100-test.parquet", TEST, TEST_LABELS)
    return root


def check(catalog):
    assert catalog.class_names == CLASS_NAMES
    assert catalog.labels.tolist() == TRAIN_LABELS + TEST_LABELS
    assert catalog.is_test.tolist() == [False] * 5 + [True] * 2
    pixels = catalog.samples(32).read_all().permute(0, 2, 3, 1).numpy()
    assert np.array_equal(pixels, np.concatenate([TRAIN, TEST]))


def test_the_files_of_this_test_are_real_pickles():
    read = pickle.loads(python2_pickle(split(TRAIN, TRAIN_LABELS)), encoding="latin-1")
    assert read["fine_labels"] == TRAIN_LABELS
    assert np.array_equal(read["data"].reshape(5, 3, 32, 32).transpose(0, 2, 3, 1), TRAIN)


def test_the_owners_folder_is_read(tmp_path):
    check(read_table(write_python(tmp_path)))
    check(read_table(tmp_path / "cifar-100-python"))


def test_the_owners_archive_is_read(tmp_path):
    path = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(write_python(tmp_path) / "cifar-100-python", "cifar-100-python")
    check(read_table(path))


@pytest.mark.parametrize("protocol", [3, 4])
def test_files_that_python_3_wrote_are_read(tmp_path, protocol):
    check(read_table(write_python(tmp_path, lambda value: pickle.dumps(value, protocol=protocol))))


def test_tables_are_read(tmp_path):
    check(read_table(write_tables(tmp_path)))


def test_numbered_parts_of_a_table_are_read_in_their_order(tmp_path):
    for part, chosen in enumerate((slice(0, 2), slice(2, 5))):
        path = tmp_path / "cifar100" / f"train-{part:05d}-of-00002.parquet"
        write_table(path, TRAIN[chosen], TRAIN_LABELS[chosen], "PNG", None)
    write_table(tmp_path / "cifar100" / "test-00000-of-00001.parquet", TEST, TEST_LABELS, "PNG", None)
    check(read_table(tmp_path))


def test_two_tables_of_training_images_are_refused(tmp_path):
    write_tables(tmp_path)
    write_table(tmp_path / "cifar100lt-train.parquet", TRAIN, TRAIN_LABELS)
    with pytest.raises(InvalidInput, match=r"several tables of train images .*cifar100lt-train\.parquet"):
        read_table(tmp_path)


def test_tables_of_other_classes_are_refused(tmp_path):
    write_tables(tmp_path)
    write_table(tmp_path / "cifar100-test.parquet", TEST, TEST_LABELS, names=CLASS_NAMES[::-1])
    with pytest.raises(InvalidInput, match=r"cifar100-test\.parquet has not CIFAR-100's class names"):
        read_table(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1 no table PAR1"])
def test_what_is_no_table_is_refused(tmp_path, content):
    write_tables(tmp_path)
    (tmp_path / "cifar100-test.parquet").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"cifar100-test\.parquet cannot be read as parquet"):
        read_table(tmp_path)


def test_without_pyarrow_a_table_says_what_to_install(tmp_path, monkeypatch):
    write_tables(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"pyarrow is not installed\. Run pip install 'medcil\[parquet\]'"):
        read_table(tmp_path)


class Trap:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(tmp_path, protocol, file):
    witness = tmp_path / "witness"
    trap = pickle.dumps(
        split(TRAIN, TRAIN_LABELS) | {"x": Trap(__import__("os").mkdir, str(witness))}, protocol
    )
    pickle.loads(trap)
    witness.rmdir()  # so the trap works
    write_python(tmp_path)
    (tmp_path / "cifar-100-python" / file).write_bytes(trap)
    with pytest.raises(InvalidInput, match=f"{file} is not one of CIFAR-100's files and was not loaded"):
        read_table(tmp_path)
    assert not witness.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'false'\ntR.",
        b"\x80\x02cos\nsystem\nU\x05false\x85R.",
        b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05false\x85R.",
        b"\x80\x02cnumpy\nndarray\nK\x01\x85R.",
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R(K\x01K\x01\x85U\x02u1\x89U\x01atb.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02(U\x05falseios\nsystem\n.",
        b"\x80\x02U\x01a0.",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02h\x05.",
        b"\x80\x02}K\x01a.",
        b"\x80\x02]]K\x01s.",
        b"\x80\x02t.",
        b"\x80\x02\x87.",
        b"\x80\x02}",
        b"",
        b"hello",
        b"\x80\x02P7\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_every_other_opcode_and_global_is_refused(content):
    with pytest.raises(ValueError, match=r"."):
        read_plain_pickle(content)


def doubled(n, start, double):
    """A value that holds its predecessor twice, n times over: 2 ** n parts in a few bytes."""
    return b"\x80\x02" + start + b"".join(double(i) for i in range(n))


HOSTILE = {
    "repeated as an argument": doubled(40, b"cnumpy\ndtype\n)", lambda i: b"q\x00h\x00\x86") + b"R.",
    "called": doubled(40, b")", lambda i: b"q\x00h\x00\x86") + b"K\x01\x85R.",
    "a key": b"\x80\x02}" + doubled(40, b")", lambda i: b"q\x00h\x00\x86")[2:] + b"K\x01s.",
    "a tuple as a key": b"\x80\x02}K\x01\x85K\x01s.",
    "a tuple kept behind another opcode": (
        b"\x80\x02})" + b"N" + b"".join(b"bq\x00h\x00h\x00\x86N" for i in range(40)) + b"bK\x01s."
    ),
    "kept under a large number": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a deep tuple": doubled(5000, b")", lambda i: b"\x85") + b".",
    "a list as an argument": doubled(40, b"cnumpy\ndtype\n]", lambda i: b"q\x00]h\x00ah\x00a") + b"\x85R.",
    "a list as a state": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R"
        + doubled(40, b"]", lambda i: b"q\x00]h\x00ah\x00a")[2:]
        + b"q\x01(h\x01h\x01h\x01h\x01h\x01tb."
    ),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_value_that_would_take_forever_to_walk_through_is_refused_at_once(content):
    started = time.monotonic()
    with pytest.raises(ValueError, match=r".") as refusal:
        read_plain_pickle(content)
    assert time.monotonic() - started < 1
    assert len(str(refusal.value)) < 200


def test_a_pickle_of_too_many_opcodes_is_refused(monkeypatch):
    monkeypatch.setattr(cifar100, "MAX_OPCODES", 50)
    assert read_plain_pickle(pickle.dumps([1] * 20, 2)) == [1] * 20
    with pytest.raises(ValueError, match="longer than any"):
        read_plain_pickle(pickle.dumps([1] * 60, 2))


def test_a_file_cut_anywhere_is_refused():
    content = python2_pickle(split(TRAIN[:1], [3]))
    for length in [*range(0, len(content), 97), len(content) - 1]:
        with pytest.raises(ValueError, match=r"."):
            read_plain_pickle(content[:length])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fine_labels": [3, 99, 0, 42]}, "one fine label"),
        ({"fine_labels": [3, 100, 0, 42, 3]}, "one fine label"),
        ({"fine_labels": [3, "x", 0, 42, 3]}, "one fine label"),
        ({"fine_labels": None}, "one fine label"),
        ({"data": np.zeros((5, 3071), dtype=np.uint8)}, "holds no images"),
        ({"data": [1, 2]}, "holds no images"),
        ({"data": np.zeros((5, 3072), dtype=np.int8)}, "was not loaded"),
    ],
)
def test_what_has_another_content_is_refused(tmp_path, change, words):
    write_python(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(python2_pickle(split(TRAIN, TRAIN_LABELS) | change))
    with pytest.raises(InvalidInput, match=words):
        read_table(tmp_path)


def test_other_class_names_are_refused(tmp_path):
    write_python(tmp_path)
    (tmp_path / "cifar-100-python" / "meta").write_bytes(python2_pickle({"fine_label_names": ["a", "b"]}))
    with pytest.raises(InvalidInput, match="meta has not CIFAR-100's class names"):
        read_table(tmp_path)


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_missing_file_is_refused_with_what_is_needed_and_where_it_comes_from(tmp_path, missing):
    write_python(tmp_path)
    (tmp_path / "cifar-100-python" / missing).unlink()
    with pytest.raises(InvalidInput) as refusal:
        read_table(tmp_path)
    first = str(refusal.value).splitlines()[0]
    for part in ("alone", "cifar-100-python with its files train, test and meta", "kriz/cifar"):
        assert part in first


def test_the_second_order_is_that_of_seed_1993():
    assert CIFAR100.orders[0] == tuple(range(100))
    assert CIFAR100.orders[1][:6] == (68, 56, 78, 8, 23, 84)
    assert sorted(CIFAR100.orders[1]) == list(range(100))


def test_class_names_are_alphabetical():
    assert len(CLASS_NAMES) == 100
    assert list(CLASS_NAMES) == sorted(CLASS_NAMES)


def test_it_is_recognized_by_its_files():
    owners = [f"cifar-100-python/{name}" for name in ("file.txt~", "meta", "test", "train")]
    tables = ["cifar100-test.parquet", "cifar100-train.parquet"]
    assert recognizes(owners)
    assert recognizes(["meta", "test", "train"])
    assert recognizes(tables)
    assert not recognizes(owners[:-1])
    assert not recognizes(tables[:1])
    assert not recognizes(["a-train.parquet", "b-train.parquet", "a-test.parquet"])
    assert recognizes_long_tail(["cifar100-test.parquet", "cifar100lt-train.parquet"])
    assert not recognizes_long_tail(tables)


def test_the_long_tail_of_a_balanced_training_set_keeps_all_test_images(tmp_path):
    images = np.zeros((50_000, 32, 32, 3), dtype=np.uint8)
    labels = [i % 100 for i in range(50_000)]
    write_python(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(pickle.dumps({"fine_labels": labels, "data": images.reshape(50_000, -1)}, protocol=4))
    catalog = read_long_tail(tmp_path)
    counts = np.bincount(catalog.labels[~catalog.is_test], minlength=100)
    assert counts.sum() == 10_847
    assert (counts[0], counts[99]) == (500, 5)
    assert catalog.labels[catalog.is_test].tolist() == TEST_LABELS


def test_the_real_tables_are_a_long_tail_and_the_whole_test_set(shared_data):
    for read in (read_table, read_long_tail):
        catalog = read(shared_data)
        train, test = (np.bincount(catalog.labels[side]) for side in (~catalog.is_test, catalog.is_test))
        assert tuple(train.tolist()) == LONG_TAIL_COUNTS["train"]
        assert test.tolist() == [100] * 100
    images = catalog.samples(32).images.read(torch.tensor([0, len(catalog) - 1])).float()
    assert images.std(dim=(1, 2, 3)).min() > 10
