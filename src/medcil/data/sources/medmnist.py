"""MedMNIST (Yang et al. 2023): any of its two-dimensional, single-label `.npz` files, of every image size.

The validation images join the training images; the published test images stay the test.
"""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int, UInt8

from medcil.data.decoding.fundus import GRADES
from medcil.data.image_table import ImageTable
from medcil.data.sources.array_files import ArrayFiles
from medcil.data.sources.layouts import give, open_root
from medcil.data.sources.npz import read_arrays
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
    "pathmnist": "colon pathology",
    "dermamnist": "HAM10000 made small",
    "octmnist": "retinal OCT",
    "pneumoniamnist": "chest X-rays of children",
    "retinamnist": "fundus photographs",
    "breastmnist": "breast ultrasound",
    "bloodmnist": "blood cells under the microscope",
    "tissuemnist": "kidney cortex cells",
    "organamnist": "abdominal CT, axial",
    "organcmnist": "abdominal CT, coronal",
    "organsmnist": "abdominal CT, sagittal",
}
SIZES = {  # images of training, validation and test
    "pathmnist": (89_996, 10_004, 7_180),
    "dermamnist": (7_007, 1_003, 2_005),
    "octmnist": (97_477, 10_832, 1_000),
    "pneumoniamnist": (4_708, 524, 624),
    "retinamnist": (1_080, 120, 400),
    "breastmnist": (546, 78, 156),
    "bloodmnist": (11_959, 1_712, 3_421),
    "tissuemnist": (165_466, 23_640, 47_280),
    "organamnist": (34_561, 6_491, 17_778),
    "organcmnist": (12_975, 2_392, 8_216),
    "organsmnist": (13_932, 2_452, 8_827),
}
# The owners took these out of later releases: a file of an earlier one is no worse for having them.
TAKEN_OUT = {
    "organamnist": {"train": 20},
    "organcmnist": {"train": 25, "test": 52},
    "organsmnist": {"train": 8, "test": 2},
}
PAGE = "medmnist.com"
SPLITS = ("train", "val", "test")
MEMBERS = tuple(f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels"))


def files_needed(name: str) -> str:
    return f"{name}.npz (28 pixels) or one of {name}_64.npz, {name}_128.npz, {name}_224.npz"


def sizes(name: str) -> dict[str, int]:
    """As they are read here: validation images are trained on."""
    train, val, test = SIZES[name]
    return {"train": train + val, "test": test}


def reader_of(name: str) -> Callable[[Path | None], ImageTable]:
    def read_table(root: Path | None) -> ImageTable:
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

    return read_table


def recognizer_of(name: str) -> Callable[[Sequence[str]], bool]:
    return lambda names: any(known_name(file) == name for file in names)


def known_name(file: str) -> str | None:
    """`pathmnist` for pathmnist.npz and pathmnist_224.npz."""
    found = re.fullmatch(r"([a-z]+)(?:_\d+)?\.npz", PurePosixPath(file).name)
    return found[1] if found and found[1] in CLASS_NAMES else None


def read_npz(source: Path | io.BytesIO, name: str) -> ImageTable:
    """Classes of a file that MedMNIST does not name are called by their number."""
    arrays = read_arrays(source, name, MEMBERS, page=PAGE)
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
    return ImageTable(files, tuple(files.names()), together, class_names, is_test=is_test)


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
