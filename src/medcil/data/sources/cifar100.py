"""CIFAR-100 (Krizhevsky 2009): the owner's Python files, or a table of encoded images.

The owner's files are pickles, which can run code when they are loaded; here nothing is imported or called.
"""

import io
import json
import pickle
import pickletools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from medcil.data.image_table import Dataset, Files, ImageTable, MemoryFiles
from medcil.data.sources.manifest import find_file, open_parquet, open_root
from medcil.data.sources.medmnist import ArrayFiles
from medcil.data.splits import long_tail, long_tail_counts
from medcil.errors import InvalidInput

NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CLASS_NAMES = tuple(NAMES.split())
LONG_TAIL_RATIO, LONG_TAIL_SEED = 0.01, 0
LONG_TAIL_COUNTS = {"train": long_tail_counts(500, 100, ratio=LONG_TAIL_RATIO), "test": (100,) * 100}
SHARD = re.compile(r"-\d+-of-\d+(?=\.parquet$)")
MAX_OPCODES = 1_000_000  # the owner's files have a few for each of 50,000 images
TEXTS = {
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "GLOBAL", "STACK_GLOBAL"),
}
OPCODES = TEXTS | {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE"),
    *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "REDUCE", "BUILD"),
}


def read_table(root: Path | None) -> ImageTable:
    """List training images, then test images, in the order of the files, with their fine labels."""
    files = open_root(root, "CIFAR-100", CIFAR100)
    names = files.names()
    python_files = [find_file(names, split) for split in ("train", "test")]
    tables = [_tables(names, split) for split in ("train", "test")]
    try:
        if all(python_files):
            return _read_python(files, [name for name in python_files if name], find_file(names, "meta"))
        if all(tables):
            return _read_tables(files, tables)
    except ValueError as error:
        raise InvalidInput(f"data.root: {error}. {CIFAR100.hint}") from None
    have = [name for name in (*python_files, *(name for part in tables for name in part)) if name]
    problem = f"has {have[0]} alone" if have else "holds no CIFAR-100"
    raise InvalidInput(f"data.root: {root} {problem}. {CIFAR100.hint}")


def read_long_tail(root: Path | None) -> ImageTable:
    """List CIFAR100-LT: 500 training images of the first class down to 5 of the last; all test images.

    Training images that have these counts already are taken as they are.
    """
    table = read_table(root)
    if table.is_test is None:
        raise ValueError("CIFAR-100 comes with its split")
    train, test = np.flatnonzero(~table.is_test), np.flatnonzero(table.is_test)
    labels = table.labels[train]
    if tuple(np.bincount(labels, minlength=100).tolist()) != LONG_TAIL_COUNTS["train"]:
        train = train[long_tail(labels, ratio=LONG_TAIL_RATIO, seed=LONG_TAIL_SEED)]
    return table.select(np.concatenate([train, test]))


def recognizes(names: Sequence[str]) -> bool:
    own = {PurePosixPath(name).name for name in names if name.count("/") == 0 or "cifar-100-python/" in name}
    return {"train", "test", "meta"} <= own or all(
        any("cifar100" in table for table in _tables(names, split)) for split in ("train", "test")
    )


def recognizes_long_tail(names: Sequence[str]) -> bool:
    return recognizes(names) and any("cifar100lt" in table for table in _tables(names, "train"))


def _read_python(files: Files, names: Sequence[str], meta: str | None) -> ImageTable:
    if meta is not None:
        known = _read_pickle(files, meta)
        if not isinstance(known, dict) or known.get("fine_label_names") != list(CLASS_NAMES):
            raise ValueError(f"{meta} has not CIFAR-100's class names")
    train, test = (_python_split(files, name) for name in names)
    return ImageTable(
        images := ArrayFiles({"train": train[0], "test": test[0]}),
        tuple(images.names()),
        np.concatenate([train[1], test[1]]),
        CLASS_NAMES,
        is_test=np.repeat([False, True], [len(train[1]), len(test[1])]),
    )


def _read_pickle(files: Files, name: str) -> Any:
    try:
        return read_plain_pickle(files.read(name))
    except ValueError as error:
        raise ValueError(f"{name} is not one of CIFAR-100's files and was not loaded ({error})") from None


def _python_split(files: Files, name: str) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int[np.ndarray, "n"]]:
    content = _read_pickle(files, name)
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, PlainArray) or data.values is None or data.values.shape[1:] != (3072,):
        raise ValueError(f"{name} holds no images of CIFAR-100")
    labels = _checked_labels(content.get("fine_labels"), len(data.values), name)
    return np.ascontiguousarray(data.values.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def _checked_labels(labels: Any, n: int, name: str) -> Int[np.ndarray, "n"]:
    is_whole = isinstance(labels, list) and len(labels) == n
    if not is_whole or not all(type(c) is int and 0 <= c < 100 for c in labels):
        raise ValueError(f"{name} has not one fine label 0..99 for each image")
    return np.array(labels, dtype=np.int64)


def _tables(names: Sequence[str], split: str) -> list[str]:
    """Return the parquet files of a split: one, or the numbered parts of one."""
    return sorted(
        name for name in names if name.endswith(".parquet") and split in PurePosixPath(name).name.lower()
    )


def _read_tables(files: Files, tables: Sequence[Sequence[str]]) -> ImageTable:
    contents: dict[str, bytes] = {}
    labels: list[int] = []
    for split, parts in zip(("train", "test"), tables, strict=True):
        if len({SHARD.sub("", name) for name in parts}) > 1:
            raise InvalidInput(f"data.root has several tables of {split} images ({', '.join(parts)}).")
        rows = [row for name in parts for row in _read_table(files.read(name), name)]
        contents |= {f"{split}/{i:05d}": image for i, (image, _) in enumerate(rows)}
        labels += [label for _, label in rows]
    is_test = np.array([name.startswith("test/") for name in contents])
    return ImageTable(MemoryFiles(contents), tuple(contents), np.array(labels), CLASS_NAMES, is_test=is_test)


def _read_table(content: bytes, name: str) -> list[tuple[bytes, int]]:
    try:
        with open_parquet(content, name) as file:
            table = file.read(columns=["img", "fine_label"])
        images = [image["bytes"] for image in table["img"].to_pylist()]
        labels = table["fine_label"].to_pylist()
        named = (table.schema.metadata or {}).get(b"class_names")
        class_names = CLASS_NAMES if named is None else tuple(json.loads(named))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as a table of CIFAR-100 ({error})") from None
    if class_names != CLASS_NAMES:
        raise ValueError(f"{name} has not CIFAR-100's class names")
    if not all(isinstance(image, bytes) for image in images):
        raise ValueError(f"{name} has rows without an image")
    return list(zip(images, _checked_labels(labels, len(images), name).tolist(), strict=True))


def read_plain_pickle(content: bytes) -> dict[Any, Any] | list[Any]:
    """Read a dictionary or list of texts, numbers and arrays of bytes; ValueError for anything else."""
    try:
        _check_opcodes(content)
        value = _PlainUnpickler(io.BytesIO(content), encoding="latin-1").load()
    except Exception as error:  # a damaged stream fails in as many ways as it has opcodes
        raise ValueError(f"{str(error) or type(error).__name__:.150}") from None
    keys = value if isinstance(value, dict) else ()
    if not isinstance(value, dict | list) or not all(isinstance(key, str | bytes) for key in keys):
        raise ValueError("it holds neither a dictionary with texts as keys nor a list")
    return value


def _check_opcodes(content: bytes) -> None:
    """Refuse what takes forever, or more room than the content is worth.

    The unpickler makes room for every number up to the largest under which a value is kept. A few opcodes
    make a tuple that holds another twice, and so on, whose hash is never done: only texts and names may be
    used twice.
    """
    reusable, n_kept, before = set[int](), 0, ""
    for n, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if n >= MAX_OPCODES:
            raise ValueError("it is longer than any of these files")
        if opcode.name not in OPCODES:
            raise ValueError(f"it has the opcode {opcode.name}")
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            place = n_kept if argument is None else argument
            n_kept += 1
            if place > n:
                raise ValueError("it keeps a value under too large a number")
            (reusable.add if before in TEXTS else reusable.discard)(place)
        if opcode.name in ("BINGET", "LONG_BINGET") and argument not in reusable:
            raise ValueError("it uses a value twice that is neither a text nor a name")
        before = opcode.name


class _ByteType:
    """NumPy's type of single bytes."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name != "u1":
            raise ValueError("it has an array of other than bytes")

    def __setstate__(self, state: Any) -> None:
        """Ignore the byte order and the like, which have no effect on single bytes."""


class PlainArray:
    """An array of bytes; empty until the pickle has told its content."""

    values: UInt8[np.ndarray, "..."] | None = None

    def __init__(self, *_: Any) -> None:
        """Ignore the class and the shape that an array begins with."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_column_major, content = state
        if not isinstance(kind, _ByteType) or not all(type(n) is int for n in shape):
            raise ValueError("it has an array of other than bytes")
        raw = content.encode("latin-1") if isinstance(content, str) else content
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if is_column_major else "C")


PLAIN_TYPES: dict[str, type[PlainArray | _ByteType]] = {
    "numpy dtype": _ByteType,
    "numpy ndarray": PlainArray,
    "numpy.core.multiarray _reconstruct": PlainArray,
    "numpy._core.multiarray _reconstruct": PlainArray,
}
"""What a name in a pickle becomes in place of the thing itself."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[PlainArray | _ByteType]:
        if (full_name := f"{module} {name}") not in PLAIN_TYPES:
            raise ValueError(f"it refers to {full_name!r:.80}")
        return PLAIN_TYPES[full_name]


CIFAR100 = Dataset(
    description="Natural images of 100 classes, 60,000 of 32 x 32 pixels",
    class_names=CLASS_NAMES,
    orders=(tuple(range(100)), tuple(np.random.RandomState(1993).permutation(100).tolist())),
    protocols=("50-10", "50-5"),
    read=read_table,
    recognizes=recognizes,
    published_counts={"train": (500,) * 100, "test": (100,) * 100},
    page="Alex Krizhevsky's CIFAR page at the University of Toronto (www.cs.toronto.edu/~kriz/cifar.html)",
    files_needed="cifar-100-python with its files train, test and meta, or one parquet table each of "
    "training and test images, named *train*.parquet and *test*.parquet, with the columns img (bytes) and "
    "fine_label",
    mean=(0.5071, 0.4866, 0.4409),
    std=(0.2009, 0.1984, 0.2023),
    augmentation="resized_crop",
)
CIFAR100LT = replace(
    CIFAR100,
    description="CIFAR-100 with a long tail: 500 training images of the first class, 5 of the last",
    read=read_long_tail,
    recognizes=recognizes_long_tail,
    published_counts=LONG_TAIL_COUNTS,
)
