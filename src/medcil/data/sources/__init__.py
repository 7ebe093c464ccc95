"""The datasets by name, and how any images are opened. A new dataset is a reader and an entry in DATASETS."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from medcil.config import Augmentation
from medcil.data.cache import is_cache, is_unfinished_cache, open_cache
from medcil.data.image_table import OWN as OWN
from medcil.data.image_table import Files, ImageTable
from medcil.data.sources import aptos2019, cch5000, cifar100, eyepacs, ham10000, medmnist, phantom
from medcil.data.sources.archive import open_files
from medcil.data.sources.folder import read_own
from medcil.data.sources.layouts import UnsoundData
from medcil.data.sources.manifest import TABLES
from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from medcil.errors import InvalidInput, nearest

ReadTable = Callable[[Path | None], ImageTable]
OWN_DESCRIPTION = "Your own images: a folder per class, or a manifest"


def _never(names: Sequence[str]) -> bool:
    return False


def _always(files: Files) -> bool:
    return True


@dataclass(frozen=True)
class Dataset:
    description: str
    class_names: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]
    """The class orders of published experiments."""
    protocols: tuple[str, ...]
    """base-increment"""
    read: ReadTable | None = None
    """List the images in the owner's layout; None where there are no files."""
    draw: Callable[[int], ImageTable] | None = None
    """Draw synthetic images of a side."""
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

    @property
    def is_synthetic(self) -> bool:
        return self.draw is not None

    @property
    def has_published_split(self) -> bool:
        return {"train", "test"} <= set(self.published_counts)


def _medmnist(name: str) -> Dataset:
    sizes = medmnist.sizes(name)
    return Dataset(
        description=f"MedMNIST: {medmnist.SOURCES[name]}, {sum(sizes.values()):,} images, 28 to 224 pixels",
        class_names=medmnist.CLASS_NAMES[name],
        orders=(tuple(range(len(medmnist.CLASS_NAMES[name]))),),
        protocols=(),
        read=medmnist.reader_of(name),
        recognizes=medmnist.recognizer_of(name),
        published_sizes=sizes,
        left_out=medmnist.TAKEN_OUT.get(name, {}),
        page=medmnist.PAGE,
        files_needed=medmnist.files_needed(name),
    )


DATASETS: dict[str, Dataset] = {
    "phantom": Dataset(
        description="Synthetic lesion-like drawings with HAM10000's imbalance; nothing to download",
        class_names=phantom.CLASS_NAMES,
        orders=ham10000.ORDERS,
        protocols=("3-2", "3-1"),
        draw=phantom.draw_images,
    ),
    "ham10000": Dataset(
        description="Skin lesions, 10,015 dermatoscopic images, the benchmark's split",
        class_names=ham10000.CLASS_NAMES,
        orders=ham10000.ORDERS,
        protocols=("3-2", "3-1"),
        read=ham10000.read_table,
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
        read=cch5000.read_table,
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
        read=eyepacs.read_table,
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
        read=aptos2019.read_table,
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
        read=cifar100.read_long_tail,
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
        read=cifar100.read_table,
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
OWN_IMAGES = Dataset(OWN_DESCRIPTION, class_names=(), orders=(), protocols=())


def find_dataset(name: str) -> Dataset:
    """Return a dataset by name; `own` has neither classes nor orders until its images are listed."""
    if name == OWN:
        return OWN_IMAGES
    if name not in DATASETS:
        raise InvalidInput(
            f"data.name: there is no dataset {name!r}. {nearest(name, DATASETS)}", code="data.name.unknown"
        )
    return replace(DATASETS[name], name=name)


def recognized_name(path: Path) -> str:
    """Return the dataset that a folder, an archive or an .npz file holds; `own` for any other images."""
    if path.suffix.lower() == ".npz" and path.is_file():
        return medmnist.known_name(path.name) or OWN
    if not path.exists() or (path.suffix.lower() in TABLES and path.is_file()):
        return OWN
    files = open_files(path)
    names = files.names()
    for name, dataset in DATASETS.items():
        if dataset.read is not None and dataset.recognizes(names) and dataset.confirms(files):
            return name
    return OWN


def list_images(path: Path, name: str | None = None, *, fewest_classes: int = 2) -> ImageTable:
    """List the images at a path: a folder, an archive, a manifest, a known dataset or prepared images.

    Without a name, the dataset is recognized by its files, and classes without an image are dropped.
    """
    if name is None and (is_cache(path) or is_unfinished_cache(path)):
        return open_cache(path)
    dataset = find_dataset(recognized_name(path) if name is None else name)
    if dataset.name == OWN:
        return read_own(path, fewest_classes=fewest_classes)
    if dataset.read is None:
        raise InvalidInput(
            f"{dataset.name} is drawn, not read from files. Name another dataset.", code="data.name.drawn"
        )
    try:
        table = replace(dataset.read(path), dataset=dataset.name)
    except UnsoundData as error:
        error.table = replace(error.table, dataset=dataset.name)
        raise
    if name is not None:
        return table
    table = table.without_empty_classes()
    if len(table.class_names) < fewest_classes:
        raise InvalidInput(
            f"{path} has images of {len(table.class_names)} classes of {dataset.name}. Give at least two.",
            code="data.classes.too_few",
        )
    return table


def open_dataset(name: str, root: Path | None, *, side: int) -> ImageTable:
    """List the images that a recipe names, none of them decoded yet unless they were prepared."""
    dataset = find_dataset(name)
    if dataset.draw is not None:
        return replace(dataset.draw(side), dataset=name)
    if root is not None and (is_cache(root) or is_unfinished_cache(root)):
        table = _prepared(root, dataset)
    elif dataset.read is not None:
        table = replace(dataset.read(root), dataset=name)
    elif root is None:
        raise InvalidInput(
            "data.root is missing. Give the folder, manifest or archive of your images.",
            code="data.root.missing",
        )
    else:
        table = read_own(root)
    return replace(table, published_as=name if dataset.has_published_split else None)


def _prepared(root: Path, dataset: Dataset) -> ImageTable:
    table = open_cache(root)
    if dataset.name not in (OWN, table.dataset):
        raise InvalidInput(
            f"data.root: {root} was prepared as {table.dataset}, but data.name is {dataset.name}. Prepare "
            f"the images with --dataset {dataset.name}, or write `data.name: {table.dataset}`.",
            code="data.prepared.mismatch",
        )
    if dataset.class_names and table.class_names != dataset.class_names:
        raise InvalidInput(
            f"data.root: {root} has other classes ({', '.join(table.class_names[:3])}, ...) than "
            f"{dataset.name}. Write `data.name: own`, or prepare the images again.",
            code="data.prepared.mismatch",
        )
    return table
