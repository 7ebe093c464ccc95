"""The datasets medcil knows by name. A new one is a reader and an entry here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from medcil.config import Augmentation
from medcil.data.catalog import OWN as OWN
from medcil.data.catalog import Catalog, Files
from medcil.data.samples import Samples, TensorImages
from medcil.data.sources import aptos2019, cch5000, cifar100, eyepacs, ham10000, medmnist, phantom
from medcil.data.sources.archive import open_files
from medcil.data.sources.folder import read_own
from medcil.data.sources.manifest import TABLES
from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from medcil.errors import InvalidInput, nearest

ReadCatalog = Callable[[Path | None], Catalog]
OWN_DESCRIPTION = "One's own images: a folder per class, or a manifest"
Read = Callable[[Path | None, int], tuple[Samples, Samples]]


def _never(names: Sequence[str]) -> bool:
    return False


def _always(files: Files) -> bool:
    return True


def _from_files(root: Path | None, side: int) -> tuple[Samples, Samples]:
    raise ValueError("this dataset is read by its catalog")


@dataclass(frozen=True)
class Dataset:
    description: str
    class_names: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]
    """The class orders of published experiments."""
    protocols: tuple[str, ...]
    """base-increment"""
    read: Read = _from_files
    """(root, side) -> training and test samples of a dataset without files; labels count `class_names`"""
    is_synthetic: bool = False
    read_catalog: ReadCatalog | None = None
    """From the owner's layout; None where there are no files."""
    recognizes: Callable[[Sequence[str]], bool] = _never
    """Whether a folder or archive with these file names is this dataset."""
    confirms: Callable[[Files], bool] = _always
    """Whether it is by the content of its lists as well; for names that others use too."""
    published_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Images per class of `train` and `test`, or in `total`; empty where nobody published them."""
    published_sizes: Mapping[str, int] = field(default_factory=dict)
    """Images of `train` and `test` over all classes, where no more than that is published."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Images of `train` and `test` that the owner has beyond the published counts: no surplus."""
    page: str = ""
    """The owner's page, in words."""
    files_needed: str = ""
    """Which files, and where they belong below data.root."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    augmentation: Augmentation = "crop"
    """Of training images, where a recipe says nothing."""
    name: str = OWN


def _read_phantom(root: Path | None, side: int) -> tuple[Samples, Samples]:
    splits = (phantom.phantom_arrays(split, side=side) for split in ("train", "test"))
    train, test = (Samples(TensorImages(torch.from_numpy(x)), torch.from_numpy(y)) for x, y in splits)
    return train, test


def _medmnist(name: str) -> Dataset:
    read_catalog, sizes = medmnist.reader_of(name), medmnist.sizes(name)
    return Dataset(
        description=f"MedMNIST: {medmnist.SOURCES[name]}, {sum(sizes.values()):,} images, 28 to 224 pixels",
        class_names=medmnist.CLASS_NAMES[name],
        orders=(tuple(range(len(medmnist.CLASS_NAMES[name]))),),
        protocols=(),
        read_catalog=read_catalog,
        recognizes=medmnist.recognizer_of(name),
        published_sizes=sizes,
        left_out=medmnist.TAKEN_OUT.get(name, {}),
        page=medmnist.PAGE,
        files_needed=medmnist.files_needed(name),
    )


def _named(name: str, dataset: Dataset) -> Dataset:
    """It knows its name, and so does every catalog that it reads."""
    read = dataset.read_catalog
    if read is None:
        return replace(dataset, name=name)
    return replace(dataset, name=name, read_catalog=lambda root: replace(read(root), dataset=name))


_DATASETS = {
    "phantom": Dataset(
        description="Synthetic lesion-like drawings with HAM10000's imbalance; nothing to download",
        class_names=phantom.CLASS_NAMES,
        orders=ham10000.ORDERS,
        protocols=("3-2", "3-1"),
        read=_read_phantom,
        is_synthetic=True,
    ),
    "ham10000": Dataset(
        description="Skin lesions, 10,015 dermatoscopic images, the benchmark's split",
        class_names=ham10000.CLASS_NAMES,
        orders=ham10000.ORDERS,
        protocols=("3-2", "3-1"),
        read_catalog=ham10000.read_catalog,
        recognizes=ham10000.recognizes,
        published_counts=ham10000.COUNTS,
        page=ham10000.PAGE,
        files_needed=ham10000.FILES_NEEDED,
    ),
    "cch5000": Dataset(
        description="Colorectal cancer histology, 5,000 tiles of ten slides",
        class_names=cch5000.CLASS_NAMES,
        orders=cch5000.ORDERS,
        protocols=("4-2", "4-1"),
        read_catalog=cch5000.read_catalog,
        recognizes=cch5000.recognizes,
        published_counts=cch5000.COUNTS,
        page=cch5000.PAGE,
        files_needed=cch5000.FILES_NEEDED,
    ),
    "eyepacs": Dataset(
        description="Diabetic retinopathy, 88,698 fundus photographs in five grades",
        class_names=eyepacs.CLASS_NAMES,
        orders=eyepacs.ORDERS,
        protocols=("3-1",),
        read_catalog=eyepacs.read_catalog,
        recognizes=eyepacs.recognizes,
        published_counts=eyepacs.COUNTS,
        left_out=eyepacs.LEFT_OUT,
        page=eyepacs.PAGE,
        files_needed=eyepacs.FILES_NEEDED,
        mean=eyepacs.MEAN,
        std=eyepacs.STD,
        augmentation="fundus",
    ),
    "aptos2019": Dataset(
        description="Diabetic retinopathy, 3,662 fundus photographs in EyePACS's five grades",
        class_names=aptos2019.CLASS_NAMES,
        orders=aptos2019.ORDERS,
        protocols=("3-1",),
        read_catalog=aptos2019.read_catalog,
        recognizes=aptos2019.recognizes,
        confirms=aptos2019.confirms,
        published_counts=aptos2019.COUNTS,
        page=aptos2019.PAGE,
        files_needed=aptos2019.FILES_NEEDED,
        mean=eyepacs.MEAN,
        std=eyepacs.STD,
        augmentation="fundus",
    ),
    "cifar100lt": Dataset(
        description="CIFAR-100 with a long tail: 500 training images of the first class, 5 of the last",
        class_names=cifar100.CLASS_NAMES,
        orders=cifar100.ORDERS,
        protocols=("50-10", "50-5"),
        read_catalog=cifar100.read_long_tail,
        recognizes=cifar100.recognizes_long_tail,
        published_counts=cifar100.LONG_TAIL_COUNTS,
        page=cifar100.PAGE,
        files_needed=cifar100.FILES_NEEDED,
        mean=cifar100.MEAN,
        std=cifar100.STD,
        augmentation="resized_crop",
    ),
    "cifar100": Dataset(
        description="Natural images of 100 classes, 60,000 of 32 x 32 pixels",
        class_names=cifar100.CLASS_NAMES,
        orders=cifar100.ORDERS,
        protocols=("50-10", "50-5"),
        read_catalog=cifar100.read_catalog,
        recognizes=cifar100.recognizes,
        published_counts=cifar100.COUNTS,
        page=cifar100.PAGE,
        files_needed=cifar100.FILES_NEEDED,
        mean=cifar100.MEAN,
        std=cifar100.STD,
        augmentation="resized_crop",
    ),
    **{name: _medmnist(name) for name in medmnist.CLASS_NAMES},
}
DATASETS: dict[str, Dataset] = {name: _named(name, dataset) for name, dataset in _DATASETS.items()}


def find_dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise InvalidInput(f"data.name: there is no dataset {name!r}. {nearest(name, DATASETS)}")
    return DATASETS[name]


def recognized_name(path: Path) -> str:
    """The dataset a folder, an archive or an .npz file holds; one's own images are called `own`."""
    if path.suffix.lower() == ".npz" and path.is_file():
        return medmnist.known_name(path.name) or OWN
    if not path.exists() or (path.suffix.lower() in TABLES and path.is_file()):
        return OWN
    files = open_files(path)
    names = files.names()
    for name, dataset in DATASETS.items():
        if dataset.read_catalog is not None and dataset.recognizes(names) and dataset.confirms(files):
            return name
    return OWN


def read_by_name(name: str, path: Path) -> Catalog:
    """Of a dataset that is read from files, or of one's own images."""
    read_catalog = None if name == OWN else find_dataset(name).read_catalog
    return read_own(path) if read_catalog is None else read_catalog(path)
