"""Which exemplar and which sealed image is of which patient, so that a patient can be forgotten later."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from medcil.clinic.labelled_images import Given, Indices
from medcil.clinic.model_dir import VersionFolder
from medcil.data.samples import Samples
from medcil.storage.atomic import read_json
from medcil.training.state import State

AT_ONCE = 256  # images that are read together


@dataclass(frozen=True)
class People:
    sealed: dict[str, list[str]]
    """Hold-out files of each patient."""
    owners: dict[bytes, set[str]]
    """Patients by the hash of an image's pixels: a picture filed under two patients belongs to both."""
    exemplars: list[bytes]
    """Hashes, in the order of the memory."""
    trained: list[str]
    """Whose images are trained on for the first time, exemplars or not."""

    def of(self, state: Path) -> dict[str, Any]:
        """The content of people.json, once the exemplars have their names."""
        files: dict[str, list[str]] = defaultdict(list)
        for patient, sealed in self.sealed.items():
            files[patient] += sealed
        entries = read_json(state / "manifest.json")["exemplars"]
        for entry, pixels in zip(entries, self.exemplars, strict=True):
            for patient in sorted(self.owners.get(pixels, ())):
                files[patient].append(f"state/{entry['file']}")
        return {"patients": {patient: files[patient] for patient in sorted(files)}, "trained": self.trained}


def people(
    version: VersionFolder,
    parent: VersionFolder | None,
    given: Given,
    train: Indices,
    sealed: Indices,
    samples: Samples,
    state: State,
) -> People | None:
    """None where no patient is known. `samples` are those of `train`; `state` has learned them."""
    earlier = {} if parent is None else parent.people()
    if given.patients is None and not earlier:
        return None
    owners: dict[bytes, set[str]] = defaultdict(set)
    files: dict[str, list[str]] = defaultdict(list)
    trained: set[str] = set()
    if parent is not None and earlier:
        _inherit(parent, earlier, files, owners)
    if given.patients is not None:
        for patient, pixels in zip(
            (given.patients[i] for i in train.tolist()), pixel_hashes(samples), strict=True
        ):
            if patient:
                owners[pixels].add(patient)
                trained.add(patient)
        entries = version.holdout_entries()[-len(sealed) :] if len(sealed) else []
        for entry, i in zip(entries, sealed.tolist(), strict=True):
            if given.patients[i]:
                files[given.patients[i]].append(f"holdout/{entry['file']}")
    return People(dict(files), dict(owners), list(pixel_hashes(state.memory)), sorted(trained))


def _inherit(
    parent: VersionFolder,
    earlier: dict[str, list[str]],
    files: dict[str, list[str]],
    owners: dict[bytes, set[str]],
) -> None:
    patients_of: dict[str, set[str]] = defaultdict(set)
    for patient, names in earlier.items():
        files[patient] += [name for name in names if name.startswith("holdout/")]
        for name in names:
            patients_of[name].add(patient)
    entries = read_json(parent.state_path / "manifest.json")["exemplars"]
    for entry, pixels in zip(entries, pixel_hashes(parent.load_state().memory), strict=True):
        owners[pixels] |= patients_of[f"state/{entry['file']}"]


def pixel_hashes(samples: Samples) -> Iterator[bytes]:
    """The same for the same picture, from whatever file."""
    for start in range(0, len(samples), AT_ONCE):
        indices = torch.arange(start, min(start + AT_ONCE, len(samples)))
        yield from _digests(samples.images.read(indices))


def _digests(images: UInt8[Tensor, "n 3 side side"]) -> Iterable[bytes]:
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).digest() for image in images]
