"""Which images the statistics of a version contain, as hashes under the key of the model; kept embeddings.

Statistics are sums, so an image can be subtracted if its features are known: computed from the image, given
once more, or kept as embeddings. The record says which images, of which class and patient, are in the sums.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from medcil.clinic.holdout import pixel_hashes
from medcil.clinic.model_dir import FORMAT, Delivery, LearnedImages, VersionFolder
from medcil.config import Views
from medcil.data.samples import Samples
from medcil.data.sources.folder import folded
from medcil.methods.protocol import Increment, Method, Phase
from medcil.models.network import Network
from medcil.readouts.readout import ImageFeatures
from medcil.storage.content_store import ContentStore

Features = dict[str, Float[Tensor, "views features"]]
"""Of images, by their hashes."""


@dataclass(frozen=True)
class LearnedImage:
    image: str
    """Keyed hash of the pixels, as the model sees them."""
    class_name: str
    patient: str
    """Keyed hash of the id; empty where the patient is unknown."""
    version: str
    """Which added the image."""
    views: Views


@dataclass(frozen=True)
class Learned:
    """The content of learned.json."""

    images: tuple[LearnedImage, ...] = ()
    embeddings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files of embeddings by patient, a tensor for each image."""

    @classmethod
    def read(cls, version: VersionFolder) -> "Learned":
        """Read the record of a version; empty where there is none."""
        content = version.learned()
        if content is None:
            return cls()
        images = tuple(
            LearnedImage(image, name, patient, delivery["version"], delivery["views"])
            for delivery in content["deliveries"]
            for name, of_class in delivery["images"].items()
            for patient, hashes in of_class.items()
            for image in hashes
        )
        return cls(images, content["embeddings"])

    def content(self) -> LearnedImages:
        deliveries: dict[tuple[str, int], Delivery] = {}
        for entry in self.images:
            empty = Delivery(version=entry.version, views=entry.views, images={})
            delivery = deliveries.setdefault((entry.version, entry.views), empty)
            of_class = delivery["images"].setdefault(entry.class_name, {})
            of_class.setdefault(entry.patient, []).append(entry.image)
        kept = {patient: list(files) for patient, files in self.embeddings.items() if files}
        return {"format": FORMAT, "deliveries": list(deliveries.values()), "embeddings": kept}

    def plus(self, images: Iterable[LearnedImage], embeddings: Mapping[str, Sequence[str]]) -> "Learned":
        kept = {who: [*self.embeddings.get(who, ()), *embeddings.get(who, ())] for who in embeddings}
        return Learned((*self.images, *images), {**self.embeddings, **kept})

    def counts(self) -> Counter[str]:
        """Count the images of each class."""
        return Counter(entry.class_name for entry in self.images)

    def of_patient(self, patient: str) -> list[LearnedImage]:
        """List the images of a patient, also where the same picture was filed under another one too."""
        theirs = {entry.image for entry in self.images if entry.patient == patient}
        return [entry for entry in self.images if entry.image in theirs]

    def without(self, images: set[str], store: ContentStore) -> "Learned":
        """Drop images and their embeddings; files that hold others too are written again."""
        embeddings = {
            patient: [kept for file in files if (kept := _without(file, images, store))]
            for patient, files in self.embeddings.items()
        }
        return Learned(tuple(entry for entry in self.images if entry.image not in images), embeddings)

    def features(self, images: Iterable[LearnedImage], store: ContentStore) -> Features:
        """Read the embeddings that are kept of these images."""
        wanted = {entry.image for entry in images}
        files = {file for entry in images for file in self.embeddings.get(entry.patient, ())}
        tensors = (safetensors.torch.load(store.read(file)) for file in sorted(files))
        found = {_image_of(name): values for read in tensors for name, values in read.items()}
        return {image: values for image, values in found.items() if image in wanted}

    def images_by_name(self, store: ContentStore) -> dict[str, set[str]]:
        """Find images by the hash of their file names, for those whose embeddings are kept."""
        by_name = defaultdict[str, set[str]](set)
        for file in (file for files in self.embeddings.values() for file in files):
            for key in safetensors.torch.load(store.read(file)):
                image, _, name = key.partition(".")
                by_name[name].add(image)
        return by_name

    def relabelled(self, classes: Mapping[str, str]) -> "Learned":
        """Move images, by their hashes, to other classes."""
        moved = (replace(e, class_name=classes.get(e.image, e.class_name)) for e in self.images)
        return replace(self, images=tuple(moved))


def name_key(name: str, store: ContentStore) -> str:
    """Hash a file name under the key of the model, by which an image with a kept embedding is found."""
    return store.hashed("name", name.encode())


def _without(file: str, images: set[str], store: ContentStore) -> str | None:
    tensors = safetensors.torch.load(store.read(file))
    kept = {name: values for name, values in tensors.items() if _image_of(name) not in images}
    if len(kept) == len(tensors):
        return file
    return store.put(safetensors.torch.save(kept), "safetensors") if kept else None


def _image_of(key: str) -> str:
    """Return the image's hash from the name of its tensor, IMAGE.NAME."""
    return key.partition(".")[0]


def hash_images(samples: Samples, store: ContentStore) -> list[str]:
    """Hash the pixels of images under the key of the model."""
    return [store.hashed("image", digest) for digest in pixel_hashes(samples)]


def hash_patient(patient: str, store: ContentStore) -> str:
    """Hash an id under the key of the model; ids that differ in case or encoding only are the same."""
    return store.hashed("patient", folded(patient).encode()) if patient else ""


@dataclass(frozen=True)
class KeepFeatures:
    """A method, and the features of images that it added to its statistics."""

    base: Method
    of_classes: dict[int, Float[Tensor, "n views features"]] = field(default_factory=dict)
    """By label; a method that reads features several times adds those that it reads last."""

    @property
    def readout(self) -> str:
        return self.base.readout

    def learn(self, network: Network, increment: Increment) -> Generator[Phase, None, None]:
        features = increment.features
        if features is None:
            raise TypeError("embeddings are kept of a method that reads the features of images")

        def kept(label: int) -> ImageFeatures:
            found = features(label)
            self.of_classes[label] = found.values.cpu()
            return found

        yield from self.base.learn(network, replace(increment, features=kept))


def store_embeddings(
    images: Sequence[LearnedImage],
    names: Sequence[str],
    samples: Samples,
    of_classes: Mapping[int, Float[Tensor, "n views features"]],
    store: ContentStore,
) -> dict[str, list[str]]:
    """Write the features of samples, a file for each patient; return its name by patient.

    `names` are those of the images' files.
    """
    by_patient = defaultdict[str, Features](dict)
    for label, features in of_classes.items():
        places = torch.nonzero(samples.labels == label).flatten().tolist()
        for place, values in zip(places, features, strict=True):
            key = f"{images[place].image}.{name_key(names[place], store)}"
            by_patient[images[place].patient][key] = values.clone()
    return {
        who: [store.put(safetensors.torch.save(tensors), "safetensors")]
        for who, tensors in by_patient.items()
    }
