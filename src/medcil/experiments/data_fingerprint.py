"""Fingerprints of a run's images and weights, kept in its data.json: a run resumes on the same content only.

The content of an image is the sha256 of its file. A prepared store has recorded it; from a folder or an
archive every file is read once at each start of a run, about as fast as the disk delivers.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from medcil.config import RunConfig
from medcil.data.cache import Store, is_store, open_store
from medcil.data.cache_plan import without_ids
from medcil.data.cache_writing import hash_sources
from medcil.data.catalog import Catalog
from medcil.data.datasets import read_by_name
from medcil.data.samples import Samples
from medcil.data.source import Source, find_source, train_and_test
from medcil.data.stream import Stream
from medcil.errors import InvalidInput
from medcil.storage.atomic import sha256

Fingerprint = dict[str, Any]


def fingerprint(stream: Stream, config: RunConfig) -> Fingerprint:
    """Identify the content of a run's images, their labels, and the weights it starts from."""
    return {
        "train": _of_split(stream.train.labels.numpy(), stream.train_sha256s),
        "test": _of_split(stream.test.labels.numpy(), stream.test_sha256s),
        **fingerprint_of_weights(config),
    }


def fingerprint_of_weights(config: RunConfig) -> Fingerprint:
    weights = config.network.weights
    if weights is None or weights == "hub":
        return {"weights": weights}
    if not Path(weights).is_file():
        raise InvalidInput(f"network.weights: there is no file {weights}. Give a safetensors file, or `hub`.")
    with Path(weights).open("rb") as file:
        return {"weights": hashlib.file_digest(file, "sha256").hexdigest()}


def list_images(name: str, root: Path) -> Source:
    """List a dataset's images without decoding them; their files are read once, when a hash is asked for."""
    dataset = find_source(name)
    published_as = name if {"train", "test"} <= set(dataset.published_counts) else None
    if is_store(root):
        store = open_store(root, verify="sizes")
        return _undecoded(store, lambda: store.sha256s, published_as)
    # A run reads the prepared store, in which patients have numbers.
    catalog = without_ids(read_by_name(name, root))
    return _undecoded(catalog, cache(partial(hash_sources, catalog)), published_as)


def _undecoded(
    images: Store | Catalog, sha256s: Callable[[], Sequence[str | None]], published_as: str | None
) -> Source:
    return Source(
        labels=images.labels,
        class_names=images.class_names,
        groups=images.groups,
        is_test=images.is_test,
        samples_of=_not_read,
        sha256s=sha256s,
        published_as=published_as,
    )


def fingerprint_of_images(config: RunConfig, source: Source) -> Fingerprint:
    """Compute what a run of this recipe would record of these images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        _, train, test = train_and_test(source, config.data, config.scenario.long_tail)
    sha256s = [] if source.sha256s is None else source.sha256s()
    return {
        name: _of_split(source.labels[part], [sha256s[i] for i in part.tolist()])
        for name, part in (("train", train), ("test", test))
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Name what differs, `images` or `weights`; None where nothing does."""
    for what, keys in (("images", ("train", "test")), ("weights", ("weights",))):
        if any(key in before and key in now and before[key] != now[key] for key in keys):
            return what
    return None


def _not_read(chosen: Int[np.ndarray, "m"]) -> Samples:
    raise NotImplementedError("images are listed here, not read")


def _of_split(labels: Int[np.ndarray, "n"], sha256s: Sequence[str | None]) -> Fingerprint:
    """Without files (phantom) there is no content: the images are drawn from a seed."""
    content = sha256("\n".join(map(str, sha256s)).encode()) if sha256s else None
    labels_sha256 = sha256(labels.astype("<i8").tobytes())
    return {"images": len(labels), "labels_sha256": labels_sha256, "content_sha256": content}
