"""A model that is ready to answer: a version of a model folder, or an exported file, which needs no torch.

Images go through it in batches: read and decoded by threads while the batch before is computed, never more
than two batches in memory. One that cannot be read is an error beside its place, and changes no other image.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, UInt8

from medcil.clinic.calibration import Calibration
from medcil.errors import DamagedFile, InvalidInput
from medcil.processors import usable_cores

if TYPE_CHECKING:
    from medcil.config import ExecutionConfig

BATCH = 128
EXPORTED = ".onnx"

Pixels = UInt8[np.ndarray, "n 3 side side"]
Answer = tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]
"""The scores of every class, and the likeness to what is known."""
Groups = tuple[str, ...] | None
"""Whose image each is; None where no patient is known."""
Watch = Callable[[int, int], None]
"""(images done, all images)"""


@dataclass(frozen=True, eq=False)
class OpenModel:
    name: str
    """What it is called in what is written: the version, or the exported file."""
    class_names: tuple[str, ...]
    side: int
    calibration: Calibration
    training_counts: tuple[int, ...] | None
    """Images that each class was learned from."""
    answer: Callable[[Pixels], Answer]
    read_holdout: Callable[[], tuple[Pixels, Int[np.ndarray, "n"], Groups]] | None
    """Pixels, labels and patients of the sealed images; an exported file has none."""
    exemplars: frozenset[bytes] = frozenset()
    """Digests of images that it was trained on and still keeps."""

    def holdout_answers(self) -> tuple[Float[np.ndarray, "n classes"], Int[np.ndarray, "n"], Groups]:
        """Scores, labels and patients of the sealed images."""
        if self.read_holdout is None:
            raise InvalidInput(
                f"{self.name} is an exported file and holds no images to measure on: give the model folder."
            )
        pixels, labels, groups = self.read_holdout()
        parts = [
            self.answer(pixels[start : start + BATCH])[0] for start in range(0, max(len(pixels), 1), BATCH)
        ]
        return np.concatenate(parts), labels, groups


@dataclass(frozen=True, eq=False)
class Answers:
    """Of a batch of images that follow each other; meaningless where there is an error."""

    first: int
    scores: Float[np.ndarray, "n classes"]
    likeness: Float[np.ndarray, "n"]
    errors: tuple[str | None, ...]


def open_model(
    model: Path, *, version: str | None = None, execution: "ExecutionConfig | None" = None
) -> OpenModel:
    """The current version of a model folder or another one; or a file that `medcil export` wrote."""
    if model.suffix.lower() == EXPORTED and not model.is_dir():
        if version is not None:
            raise InvalidInput(f"{model} holds one version: leave {version!r} out, or give the model folder.")
        return _open_exported(model)
    from medcil.clinic.model_dir import ModelFolder

    folder = ModelFolder(model).version(version)
    calibration = folder.calibration()
    state = folder.load_state()
    if len(calibration.class_prior_in_scores) != len(state.class_names):
        raise DamagedFile(f"{folder.calibration_path} is not of this version's classes; restore it.")

    import torch

    from medcil.clinic.scoring import Scorer
    from medcil.data.samples import Samples, TensorImages

    scorer = Scorer(state, execution)

    def answer(pixels: Pixels) -> Answer:
        unlabeled = torch.zeros(len(pixels), dtype=torch.int64)
        return scorer(Samples(TensorImages(torch.from_numpy(pixels)), unlabeled))

    def read_holdout() -> tuple[Pixels, Int[np.ndarray, "n"], Groups]:
        samples = folder.holdout()
        return samples.read_all().numpy(), samples.labels.numpy(), folder.holdout_groups()

    return OpenModel(
        name=folder.name,
        class_names=state.class_names,
        side=state.preprocessing.side,
        calibration=calibration,
        training_counts=tuple(state.inherent_counts.tolist()),
        answer=answer,
        read_holdout=read_holdout,
        exemplars=frozenset(map(digest, state.memory.read_all().numpy())),
    )


def digest(pixels: UInt8[np.ndarray, "3 side side"]) -> bytes:
    """The same for the same pixels, whatever file they came from."""
    return hashlib.sha256(pixels.tobytes()).digest()


def _open_exported(file: Path) -> OpenModel:
    from medcil.clinic.onnx_model import OnnxModel

    exported = OnnxModel(file)
    counts = exported.description.get("training_images")
    return OpenModel(
        name=file.name,
        class_names=exported.class_names,
        side=exported.side,
        calibration=exported.calibration,
        training_counts=None if counts is None else tuple(counts),
        answer=exported,
        read_holdout=None,
    )


def answers(
    model: OpenModel,
    n_images: int,
    decode: Callable[[int], UInt8[np.ndarray, "3 side side"]],
    watch: Watch = lambda done, total: None,
) -> Iterator[Answers]:
    """Of n images, batch after batch; `decode` gives the pixels of one, or raises InvalidInput."""
    firsts = range(0, n_images, BATCH)
    with ThreadPoolExecutor(usable_cores()) as pool:
        coming = _begin(pool, firsts[:1], n_images, decode)
        for first in firsts:
            now, coming = coming, _begin(pool, range(first + BATCH, n_images, BATCH)[:1], n_images, decode)
            # A black image in the place of one that cannot be read: sums depend on a batch's size.
            pixels = np.zeros((len(now), 3, model.side, model.side), dtype=np.uint8)
            errors: list[str | None] = [None] * len(now)
            for place, reading in enumerate(now):
                try:
                    pixels[place] = reading.result()
                except (InvalidInput, OSError, MemoryError) as error:
                    errors[place] = (str(error).splitlines() or [type(error).__name__])[0]
            scores, likeness = model.answer(pixels)
            for place in np.flatnonzero(~np.isfinite(scores).all(axis=1)).tolist():
                errors[place] = errors[place] or "The model's scores for it are no numbers; train it again."
            watch(first + len(now), n_images)
            yield Answers(first, scores, likeness, tuple(errors))


def _begin(
    pool: ThreadPoolExecutor,
    firsts: range,
    n_images: int,
    decode: Callable[[int], UInt8[np.ndarray, "3 side side"]],
) -> list[Future[UInt8[np.ndarray, "3 side side"]]]:
    return [pool.submit(decode, i) for first in firsts for i in range(first, min(first + BATCH, n_images))]
