"""The datasets medcil knows by name. A new one is a reader and an entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from medcil.data import ham10000, phantom
from medcil.data.samples import Samples, TensorImages
from medcil.errors import InvalidInput, nearest


@dataclass(frozen=True)
class Dataset:
    description: str
    class_names: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]
    """The class orders of published experiments."""
    protocols: tuple[str, ...]
    """base-increment"""
    read: Callable[[Path | None, int], tuple[Samples, Samples]]
    """(root, side) -> training and test samples, labels counting `class_names`"""
    is_synthetic: bool = False


def _read_phantom(root: Path | None, side: int) -> tuple[Samples, Samples]:
    splits = (phantom.phantom_arrays(split, side=side) for split in ("train", "test"))
    train, test = (Samples(TensorImages(torch.from_numpy(x)), torch.from_numpy(y)) for x, y in splits)
    return train, test


DATASETS: dict[str, Dataset] = {
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
        read=ham10000.read_ham10000,
    ),
}


def find_dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise InvalidInput(f"data.name: there is no dataset {name!r}. {nearest(name, DATASETS)}")
    return DATASETS[name]
