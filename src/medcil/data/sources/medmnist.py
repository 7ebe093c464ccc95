"""MedMNIST (Yang et al. 2023): any of its two-dimensional, single-label `.npz` files, of every image size.

The validation images join the training images; the published test images stay the test.
"""

import io
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from medcil.data.image_table import Dataset, ImageTable
from medcil.data.sources.archive import DAMAGED, LIMITS, Limits
from medcil.data.sources.manifest import open_root
from medcil.data.sources.retinopathy import GRADES
from medcil.errors import InvalidInput


class Kind(NamedTuple):
    source: str
    sizes: tuple[int, int, int]
    """Images of training, validation and test."""
    class_names: tuple[str, ...]
    left_out: Mapping[str, int] = {}
    """What the owners took out of later releases: a file of an earlier one is no worse for having them."""


ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)
KINDS = {
    "pathmnist": Kind(
        "colon pathology",
        (89_996, 10_004, 7_180),
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
            *("normal colon mucosa", "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
    ),
    "dermamnist": Kind(
        "HAM10000 made small",
        (7_007, 1_003, 2_005),
        (
            *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
            *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi"),
            "vascular lesions",
        ),
    ),
    "octmnist": Kind(
        "retinal OCT",
        (97_477, 10_832, 1_000),
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": Kind("chest X-rays of children", (4_708, 524, 624), ("normal", "pneumonia")),
    "retinamnist": Kind("fundus photographs", (1_080, 120, 400), GRADES),
    "breastmnist": Kind("breast ultrasound", (546, 78, 156), ("malignant", "normal, benign")),
    "bloodmnist": Kind(
        "blood cells under the microscope",
        (11_959, 1_712, 3_421),
        (
            *("basophil", "eosinophil", "erythroblast", "immature granulocytes"),
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
    ),
    "tissuemnist": Kind(
        "kidney cortex cells",
        (165_466, 23_640, 47_280),
        (
            *("collecting duct, connecting tubule", "distal convoluted tubule"),
            *("glomerular endothelial cells", "interstitial endothelial cells", "leukocytes", "podocytes"),
            *("proximal tubule segments", "thick ascending limb"),
        ),
    ),
    "organamnist": Kind("abdominal CT, axial", (34_561, 6_491, 17_778), ORGANS, {"train": 20}),
    "organcmnist": Kind("abdominal CT, coronal", (12_975, 2_392, 8_216), ORGANS, {"train": 25, "test": 52}),
    "organsmnist": Kind("abdominal CT, sagittal", (13_932, 2_452, 8_827), ORGANS, {"train": 8, "test": 2}),
}
PAGE = "medmnist.com"
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class ArrayFiles:
    """Images in arrays, as files: `train/000007.png` is encoded, without loss, when it is read."""

    arrays: Mapping[str, UInt8[np.ndarray, "n ..."]]

    def names(self) -> Sequence[str]:
        return [f"{part}/{i:06d}.png" for part, images in self.arrays.items() for i in range(len(images))]

    def read(self, name: str) -> bytes:
        path, buffer = PurePosixPath(name), io.BytesIO()
        pixels = self.arrays[path.parent.name][int(path.stem)]
        # Without compression it is fast, and the bytes do not depend on the version of a compressor.
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
        return buffer.getvalue()


def dataset(name: str) -> Dataset:
    source, (train, val, test), class_names, left_out = KINDS[name]
    return Dataset(
        description=f"MedMNIST: {source}, {train + val + test:,} images, 28 to 224 pixels",
        class_names=class_names,
        orders=(tuple(range(len(class_names))),),
        protocols=(),
        read=partial(read_table, name),
        recognizes=lambda names: any(known_name(file) == name for file in names),
        published_sizes={"train": train + val, "test": test},
        left_out=left_out,
        page=PAGE,
        files_needed=f"{name}.npz (28 pixels) or one of {name}_64.npz, {name}_128.npz, {name}_224.npz",
    )


def read_table(name: str, root: Path | None) -> ImageTable:
    """List the images of an .npz file, or of the one in a folder or archive."""
    if root is not None and root.is_file() and root.suffix == ".npz":
        return read_npz(root, root.name)
    files = open_root(root, name, dataset(name))
    found = [file for file in files.names() if known_name(file) == name]
    if len(found) != 1:
        problem = f"has {len(found)} files of {name}" if found else f"has no {name}.npz"
        raise InvalidInput(f"data.root: {root} {problem}; one is wanted. {dataset(name).hint}")
    # From a folder not as a whole: the larger ones have gigabytes.
    source = root / found[0] if root is not None and root.is_dir() else io.BytesIO(files.read(found[0]))
    return read_npz(source, found[0])


def known_name(file: str) -> str | None:
    """Return `pathmnist` for pathmnist.npz and pathmnist_224.npz."""
    found = re.fullmatch(r"([a-z]+)(?:_\d+)?\.npz", PurePosixPath(file).name)
    return found[1] if found and found[1] in KINDS else None


def read_npz(source: Path | io.BytesIO, name: str, *, limits: Limits = LIMITS) -> ImageTable:
    """List the images of a file. Its classes are called by number where MedMNIST does not name the file."""
    arrays = _read_arrays(source, name, limits)
    images = {split: _checked_images(arrays[f"{split}_images"], name) for split in SPLITS}
    labels = [_checked_labels(arrays[f"{split}_labels"], len(images[split]), name) for split in SPLITS]
    together = np.concatenate(labels)
    known = known_name(name)
    n_classes = int(together.max()) + 1 if len(together) else 0
    class_names = KINDS[known].class_names if known else tuple(f"class {c}" for c in range(n_classes))
    if n_classes > len(class_names):
        problem = f"has labels up to {n_classes - 1}, but {known} has {len(class_names)} classes"
        raise InvalidInput(f"data.root: {name} {problem}; get it again from {PAGE}.")
    files = ArrayFiles(images)
    is_test = np.repeat([False, False, True], [len(part) for part in labels])
    return ImageTable(files, tuple(files.names()), together, class_names, is_test=is_test)


def _read_arrays(source: Path | io.BytesIO, name: str, limits: Limits) -> dict[str, np.ndarray]:
    """Read the images and labels of every split; sizes are checked before anything is unpacked."""
    members = [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels")]
    try:
        packed = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
        with zipfile.ZipFile(source) as archive:
            absent = [member for member in members if f"{member}.npy" not in archive.namelist()]
            if absent:
                raise InvalidInput(f"data.root: {name} has no {absent[0]}: not MedMNIST's. See {PAGE}.")
            unpacked = sum(archive.getinfo(f"{member}.npy").file_size for member in members)
            if unpacked > max(limits.ratio_from_bytes, limits.ratio * packed):
                raise ValueError(f"it unpacks to {limits.ratio} times its size, as no images do")
            if unpacked > limits.total_bytes:
                raise ValueError(f"it unpacks to more than {limits.total_bytes:,} bytes")
            return {member: _read_array(archive, member) for member in members}
    except MemoryError:
        raise InvalidInput(f"data.root: {name} does not fit into memory: take smaller images.") from None
    except (*DAMAGED, RuntimeError) as error:  # RuntimeError: encrypted
        raise InvalidInput(f"data.root: {name} cannot be read ({error}); get it again from {PAGE}.") from None


def _read_array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """Read an array. Room is made only for a shape that fits the size in the archive's directory."""
    with archive.open(f"{member}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{member} is an array in another version of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        promised = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or promised != archive.getinfo(f"{member}.npy").file_size:
        raise ValueError(f"{member} is no plain array, or not as large as its header says")
    with archive.open(f"{member}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked_images(images: np.ndarray, name: str) -> UInt8[np.ndarray, "n ..."]:
    is_flat = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] == 3)
    if images.dtype != np.uint8 or not is_flat:
        problem = f"has arrays of {images.dtype} {images.shape}, not gray or RGB images"
        raise InvalidInput(f"data.root: {name} {problem}. Give no three-dimensional MedMNIST.")
    return images


def _checked_labels(labels: np.ndarray, n: int, name: str) -> Int[np.ndarray, "n"]:
    if labels.ndim == 2 and labels.shape[1] > 1:
        problem = f"has {labels.shape[1]} labels for each image"
        raise InvalidInput(f"data.root: {name} {problem}. Give a dataset in which an image has one class.")
    if len(labels) != n or labels.size != n or labels.dtype.kind not in "iu" or (n and labels.min() < 0):
        raise InvalidInput(
            f"data.root: {name} has not one class number for each image; get it again from {PAGE}."
        )
    return labels.reshape(n).astype(np.int64)
