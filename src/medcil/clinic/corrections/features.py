"""Features of images that were learned: read from the embeddings that are kept, or computed once more."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medcil.clinic.corrections.learned import Features, Learned, LearnedImage, hash_images
from medcil.clinic.model_dir import VersionFolder
from medcil.clinic.predict import find_images
from medcil.config import ExecutionConfig
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.samples import Samples
from medcil.data.sources import list_images
from medcil.errors import InvalidInput, listed_below
from medcil.storage.atomic import reading
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, readout_features
from medcil.training.state import State


@dataclass(frozen=True, eq=False)
class FoundFeatures:
    values: Features
    again: Features
    """The same, computed image by image; the values themselves where they are kept."""
    is_same_device: bool
    """Whether they were added on a device of this kind; kept ones are as they were added."""


def find_features(
    versions: Sequence[VersionFolder], images: Sequence[LearnedImage], given: Samples | None
) -> FoundFeatures | None:
    """Find the features of images that these versions have learned; None if some are neither kept nor given.

    `given` has the images once more; those that are not wanted are not used.
    """
    kept: Features = {}
    for version in versions:
        kept |= Learned.read(version).features(images, version.store)
    missing = list({entry.image: entry for entry in images if entry.image not in kept}.values())
    if not missing:
        return FoundFeatures(kept, kept, is_same_device=True)
    if given is None:
        return None
    version, state = versions[-1], versions[-1].load_state()
    samples = _matched(version, missing, given)
    values, again = (_embedded(state, samples, missing, one_by_one=alone) for alone in (False, True))
    device = choose_device(ExecutionConfig()).type
    return FoundFeatures({**kept, **values}, {**kept, **again}, version.provenance()["device_kind"] == device)


def list_any(path: Path) -> ImageTable:
    """List labelled images, or the files of a folder or archive without classes."""
    with reading(path):
        try:
            return list_images(path, fewest_classes=1)
        except InvalidInput:
            if not path.exists():
                raise
            found = {image.name.removeprefix(f"{path}/"): image.read() for image in find_images([path])}
            names = tuple(sorted(found))
            return ImageTable(MemoryFiles(found), names, torch.zeros(len(names)).long().numpy(), ("",))


def _matched(version: VersionFolder, wanted: Sequence[LearnedImage], given: Samples) -> Samples:
    """Return the wanted images in their order; refuse if one is not there."""
    places = {image: place for place, image in enumerate(hash_images(given, version.store))}
    lacking = Counter(
        f"{entry.class_name}, since {entry.version}" for entry in wanted if entry.image not in places
    )
    if lacking:
        n = f"{lacking.total()} of {len(wanted)} learned images"
        first = f"--images lacks {n}. Give all of them, unchanged."
        raise InvalidInput(
            listed_below(first, [f"{what}: {n}" for what, n in lacking.items()]), code="model.images.missing"
        )
    return given.select(torch.tensor([places[entry.image] for entry in wanted]))


def _embedded(
    state: State, samples: Samples, images: Sequence[LearnedImage], *, one_by_one: bool
) -> Features:
    """Compute the features of images, each in the views that it was added in."""
    execution = ExecutionConfig()
    device = choose_device(execution)
    network, readout = copy.deepcopy(state.network).to(device), copy.deepcopy(state.readout).to(device)
    network.to(memory_format=torch.channels_last)
    found: Features = {}
    for views in sorted({entry.views for entry in images}):
        places = [place for place, entry in enumerate(images) if entry.views == views]
        for part in [[place] for place in places] if one_by_one else [places]:
            chosen = samples.select(torch.tensor(part))
            chosen = replace(chosen, labels=torch.zeros_like(chosen.labels))
            with Feed(chosen, replace(state.preprocessing, views=views), device, execution) as feed:
                values = readout_features(network, readout, feed, len(part), 0).values.cpu()
            found |= {images[place].image: of_image for place, of_image in zip(part, values, strict=True)}
    return found
