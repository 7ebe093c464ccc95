"""MedMNIST (Yang et al. 2023): any of its two-dimensional, single-label `.npz` files, of every image size.

The validation images join the training images; the published test images stay the test.
"""

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from medcil.data.catalog import Catalog
from medcil.data.fundus import GRADES
from medcil.data.ham10000 import give, open_root
from medcil.errors import InvalidInput

_ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
        *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    ),
    "dermamnist": (
        *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
        *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi"),
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": GRADES,
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocytes"),
        *("lymphocyte", "monocyte", "neutrophil", "platelet"),
    ),
    "tissuemnist": (
        *("collecting duct, connecting tubule", "distal convoluted tubule", "glomerular endothelial cells"),
        *("interstitial endothelial cells", "leukocytes", "podocytes", "proximal tubule segments"),
        "thick ascending limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}
SOURCES = {
    "pathmnist": "colon pathology, 107,180 images",
    "dermamnist": "HAM10000 made small, 10,015 images",
    "octmnist": "retinal OCT, 109,309 images",
    "pneumoniamnist": "chest X-rays of children, 5,856 images",
    "retinamnist": "fundus photographs, 1,600 images",
    "breastmnist": "breast ultrasound, 780 images",
    "bloodmnist": "blood cells under the microscope, 17,092 images",
    "tissuemnist": "kidney cortex cells, 236,386 images",
    "organamnist": "abdominal CT, axial, 58,830 images",
    "organcmnist": "abdominal CT, coronal, 23,583 images",
    "organsmnist": "abdominal CT, sagittal, 25,211 images",
}
PAGE = "medmnist.com"
SPLITS = ("train", "val", "test")
MEMBERS = tuple(f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels"))


def files_needed(name: str) -> str:
    return f"{name}.npz (28 pixels) or one of {name}_64.npz, {name}_128.npz, {name}_224.npz"


def reader_of(name: str) -> Callable[[Path | None], Catalog]:
    def read_catalog(root: Path | None) -> Catalog:
        """The root is the .npz file itself, or a folder or archive that holds one."""
        needed, page = files_needed(name), PAGE
        if root is not None and root.is_file() and root.suffix == ".npz":
            return read_npz(root, root.name)
        files = open_root(root, name, needed, page)
        found = [n for n in files.names() if known_name(n) == name]
        if len(found) != 1:
            problem = f"has {len(found)} files of {name}" if found else f"has no {name}.npz"
            raise InvalidInput(f"data.root: {root} {problem}; one is wanted. {give(needed, page)}")
        # From a folder not as a whole: the larger ones have gigabytes.
        source = root / found[0] if root is not None and root.is_dir() else io.BytesIO(files.read(found[0]))
        return read_npz(source, found[0])

    return read_catalog


def recognizer_of(name: str) -> Callable[[Sequence[str]], bool]:
    return lambda names: any(known_name(file) == name for file in names)


def known_name(file: str) -> str | None:
    """`pathmnist` for pathmnist.npz and pathmnist_224.npz."""
    found = re.fullmatch(r"([a-z]+)(?:_\d+)?\.npz", PurePosixPath(file).name)
    return found[1] if found and found[1] in CLASS_NAMES else None


def read_npz(source: Path | io.BytesIO, name: str) -> Catalog:
    """Classes of a file that MedMNIST does not name are called by their number."""
    arrays = _arrays(source, name)
    images = {split: _checked_images(arrays[f"{split}_images"], name) for split in SPLITS}
    labels = {split: _checked_labels(arrays[f"{split}_labels"], len(images[split]), name) for split in SPLITS}
    together = np.concatenate([labels[split] for split in SPLITS])
    known = known_name(name)
    n_classes = int(together.max()) + 1 if len(together) else 0
    class_names = CLASS_NAMES[known] if known else tuple(f"class {c}" for c in range(n_classes))
    if n_classes > len(class_names):
        raise InvalidInput(
            f"data.root: {name} has labels up to {n_classes - 1}, but {known} has {len(class_names)} "
            f"classes; get it again from {PAGE}."
        )
    files = ArrayFiles(images)
    is_test = np.repeat([False, False, True], [len(labels[split]) for split in SPLITS])
    return Catalog(files, tuple(files.names()), together, class_names, is_test=is_test)


def _arrays(source: Path | io.BytesIO, name: str) -> Mapping[str, np.ndarray]:
    try:
        with zipfile.ZipFile(source) as archive:
            absent = [member for member in MEMBERS if f"{member}.npy" not in archive.namelist()]
            if absent:
                raise InvalidInput(
                    f"data.root: {name} has no {absent[0]}, so it is not MedMNIST's. See {PAGE}."
                )
            return {member: _array(archive, member) for member in MEMBERS}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise InvalidInput(f"data.root: {name} cannot be read ({error}); get it again from {PAGE}.") from None


def _array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    with archive.open(f"{member}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked_images(images: np.ndarray, name: str) -> UInt8[np.ndarray, "n ..."]:
    is_flat = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] == 3)
    if images.dtype != np.uint8 or not is_flat:
        raise InvalidInput(
            f"data.root: {name} holds arrays of {images.dtype} {images.shape}, not gray or RGB images; "
            "three-dimensional MedMNIST cannot be used here."
        )
    return images


def _checked_labels(labels: np.ndarray, n: int, name: str) -> Int[np.ndarray, "n"]:
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise InvalidInput(
            f"data.root: {name} has {labels.shape[1]} labels for each image. Classes can arrive one after "
            "the other only where an image has one class: give a single-label dataset."
        )
    if len(labels) != n or labels.size != n or labels.dtype.kind not in "iu" or (n and labels.min() < 0):
        raise InvalidInput(
            f"data.root: {name} has not one class number for each image; get it again from {PAGE}."
        )
    return labels.reshape(n).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ArrayFiles:
    """Images in memory as files: `train/000007.png` is encoded, without loss, when it is read."""

    arrays: Mapping[str, UInt8[np.ndarray, "n ..."]]

    def names(self) -> Sequence[str]:
        return [f"{part}/{i:06d}.png" for part, images in self.arrays.items() for i in range(len(images))]

    def read(self, name: str) -> bytes:
        path, buffer = PurePosixPath(name), io.BytesIO()
        pixels = self.arrays[path.parent.name][int(path.stem)]
        # Without compression it is fast, and the bytes do not depend on the version of a compressor.
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
        return buffer.getvalue()
