"""What a run's data.json says of its images and weights: enough to notice that others were given."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from medcil.config import RunConfig
from medcil.data.datasets import read_by_name
from medcil.data.samples import Samples
from medcil.data.source import Source, find_source, train_and_test
from medcil.data.store import is_store, open_store
from medcil.data.store_plan import without_ids
from medcil.data.stream import Stream
from medcil.errors import InvalidInput

Fingerprint = dict[str, Any]


def fingerprint(stream: Stream, config: RunConfig) -> Fingerprint:
    """How many images with which labels, and the sha256 of the weights."""
    labels = _of_labels(stream.train.labels.numpy(), stream.test.labels.numpy())
    return {**labels, **fingerprint_of_weights(config)}


def fingerprint_of_weights(config: RunConfig) -> Fingerprint:
    weights = config.network.weights
    if weights is None or weights == "hub":
        return {"weights": weights}
    if not Path(weights).is_file():
        raise InvalidInput(f"network.weights: there is no file {weights}. Give a safetensors file, or `hub`.")
    with Path(weights).open("rb") as file:
        return {"weights": hashlib.file_digest(file, "sha256").hexdigest()}


def fingerprint_of_images(config: RunConfig, root: Path) -> Fingerprint:
    """What a run of this recipe would say of the images at `root`, which are listed, not decoded."""
    dataset, data = find_source(config.data.name), config.data
    # A run reads the prepared store, in which patients have numbers.
    found = open_store(root, verify="sizes") if is_store(root) else without_ids(read_by_name(data.name, root))
    source = Source(
        labels=found.labels,
        class_names=found.class_names,
        groups=found.groups,
        is_test=found.is_test,
        samples_of=_not_read,
        published_as=data.name if {"train", "test"} <= set(dataset.published_counts) else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself says what is to be said of them
        _, train, test = train_and_test(source, data, config.scenario.long_tail)
    return _of_labels(source.labels[train], source.labels[test])


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """`images` or `weights`, whichever are others now; a run of old says nothing of its weights."""
    for what, keys in (("images", ("train", "test")), ("weights", ("weights",))):
        if any(key in before and key in now and before[key] != now[key] for key in keys):
            return what
    return None


def _not_read(chosen: Int[np.ndarray, "m"]) -> Samples:
    raise NotImplementedError("images are listed here, not read")


def _of_labels(train: Int[np.ndarray, "n"], test: Int[np.ndarray, "m"]) -> Fingerprint:
    return {
        name: {
            "images": len(labels),
            "labels_sha256": hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest(),
        }
        for name, labels in (("train", train), ("test", test))
    }
