"""The datasets by name, and how any images are opened. A new dataset is a reader and an entry in DATASETS."""

from dataclasses import replace
from pathlib import Path

from medcil.data.cache import is_cache, is_unfinished_cache, open_cache
from medcil.data.image_table import OWN as OWN
from medcil.data.image_table import Dataset as Dataset
from medcil.data.image_table import ImageTable
from medcil.data.sources import cch5000, cifar100, ham10000, medmnist, phantom, retinopathy
from medcil.data.sources.archive import open_files
from medcil.data.sources.folder import read_own
from medcil.data.sources.manifest import TABLES, UnsoundData
from medcil.errors import InvalidInput, nearest

OWN_DESCRIPTION = "Your own images: a folder per class, or a manifest"
DATASETS: dict[str, Dataset] = {
    "phantom": phantom.DATASET,
    "ham10000": ham10000.DATASET,
    "cch5000": cch5000.DATASET,
    "eyepacs": retinopathy.EYEPACS,
    "aptos2019": retinopathy.APTOS2019,
    "cifar100lt": cifar100.CIFAR100LT,
    "cifar100": cifar100.CIFAR100,
    **{name: medmnist.dataset(name) for name in medmnist.KINDS},
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
        problem = f"was prepared as {table.dataset}, but data.name is {dataset.name}"
    elif dataset.class_names and table.class_names != dataset.class_names:
        problem = f"has other classes ({', '.join(table.class_names[:3])}, ...) than {dataset.name}"
    else:
        return table
    raise InvalidInput(
        f"data.root: {root} {problem}. Write `data.name: {table.dataset}`, or prepare the images again.",
        code="data.prepared.mismatch",
    )
