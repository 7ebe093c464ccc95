"""Open a model for inference: a version of a model folder, or an exported file, which needs no torch."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jaxtyping import Float, Int, UInt8

from medcil.clinic.calibration import Calibration
from medcil.config import Views, usable_cores
from medcil.errors import DamagedFile, InvalidInput, needs_extra
from medcil.storage.atomic import reading, sha256

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from medcil.clinic.model_dir import VersionFolder
    from medcil.config import ExecutionConfig


# onnxruntime sends telemetry about the models it opens, unless this is set when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

FORMAT = 1
KEY = "medcil"
"""Key of the JSON description in the file's metadata."""
NO_SHA256 = "0" * 64
"""Placeholder for the file's sha256 while it is computed."""
ONNX_BATCH = 64
"""Views of images in one pass through the network."""
Pixels = UInt8[np.ndarray, "n 3 side side"]
Answer = tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]
"""Scores of every class, and likeness to the known classes."""


def with_sha256(content: bytes) -> bytes:
    """Write the file's own sha256 into it, computed with the placeholder, so that damage is detected."""
    return _sha256_set(content, NO_SHA256, sha256(content))


def _sha256_set(content: bytes, old: str, new: str) -> bytes:
    # JSON escapes quotes in names, so no class name can contain this text.
    return content.replace(f'{{"sha256": "{old}"'.encode(), f'{{"sha256": "{new}"'.encode(), 1)


@dataclass(frozen=True)
class OnnxOutputs:
    """The outputs of the exported graph."""

    scores: Float[np.ndarray, "n classes"]
    embedding: Float[np.ndarray, "n dim"]
    likeness: Float[np.ndarray, "n"]
    probabilities: Float[np.ndarray, "n classes"]


class OnnxModel:
    """An exported file: network, readout, calibration, and all preprocessing but the resizing."""

    def __init__(self, file: Path | bytes) -> None:
        self.name = "the exported model" if isinstance(file, bytes) else str(file)
        content = file if isinstance(file, bytes) else _read(file)
        self._session = _open(content, self.name)
        self.description = _described(self._session, self.name)
        stated = str(self.description.get("sha256"))
        if sha256(_sha256_set(content, stated, NO_SHA256)) != stated:
            raise DamagedFile(f"{self.name} was changed or damaged (its sha256 differs); export it again.")

    def __call__(self, pixels: Pixels) -> Answer:
        answers = self.answers(pixels)
        return answers.scores.astype(np.float64), answers.likeness.astype(np.float64)

    def answers(self, pixels: Pixels, prior: Sequence[float] | None = None) -> OnnxOutputs:
        """Return all outputs, with probabilities under this prior (default: uniform)."""
        inputs = {}
        if prior is not None:
            log_prior = [math.log(share) if share > 0 else -math.inf for share in prior]
            inputs["log_prior"] = np.array(log_prior, dtype=np.float32)
        size = ONNX_BATCH // int(self.description["preprocessing"]["inside_the_graph"]["views"])
        parts = [
            self._session.run(None, {"images": pixels[start : start + size], **inputs})
            for start in range(0, max(len(pixels), 1), size)
        ]
        return OnnxOutputs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise InvalidInput(f"There is no file {file}. Give one that `medcil export` wrote.")
    with reading(file):
        return file.read_bytes()


def _open(content: bytes, name: str) -> "InferenceSession":
    with needs_extra("onnx"):
        import onnxruntime
    onnxruntime.disable_telemetry_events()  # in case it was loaded before
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    # Waiting threads sleep: spinning is slower as soon as anything else runs on the machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors only; warnings are about the export
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises many classes of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DamagedFile(f"{name} cannot be read as an ONNX model ({reason}); export it again.") from None


def _described(session: "InferenceSession", name: str) -> dict[str, Any]:
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise InvalidInput(f"{name} was not written by medcil. Give a file that `medcil export` wrote.")
    try:
        description: dict[str, Any] = json.loads(text)
        if description["format"] > FORMAT:
            raise InvalidInput(f"{name} was written by a newer medcil: update medcil.")
        names, counts = description["class_names"], description["training_images"]
        priors = description["calibration"]["class_prior_in_scores"]
        side = description["preprocessing"]["resize"]["side"]
        views = description["preprocessing"]["inside_the_graph"]["views"]
        is_sound = (
            len(names) == len(counts) == len(priors) == session.get_outputs()[0].shape[1]
            and all(isinstance(class_name, str) for class_name in names)
            and all(isinstance(count, int) and count >= 0 for count in counts)
            and session.get_inputs()[0].shape[1:] == [3, side, side]
            and views in get_args(Views)
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        is_sound = False
    if not is_sound:
        raise DamagedFile(f"{name}: its description is damaged; export it again.")
    return description


BATCH = 128
EXPORTED = ".onnx"

Watch = Callable[[int, int], None]
"""(images done, all images)"""


@dataclass(frozen=True, eq=False)
class OpenModel:
    name: str
    """The version, or the name of the exported file."""
    class_names: tuple[str, ...]
    side: int
    calibration: Calibration
    training_counts: tuple[int, ...]
    """Number of training images of each class."""
    answer: Callable[[Pixels], Answer]
    folder: "VersionFolder | None" = None
    """None for an exported file."""
    exemplars: frozenset[bytes] = frozenset()
    """Digests of the training images that the model stores."""

    def holdout_answers(
        self,
    ) -> tuple[Float[np.ndarray, "n classes"], Int[np.ndarray, "n"], tuple[str, ...] | None]:
        """Return scores, labels and, where known, patients of the sealed images."""
        if self.folder is None:
            raise InvalidInput(f"{self.name} has no images to measure on. Give the model folder.")
        samples = self.folder.holdout()
        pixels = samples.read_all().numpy()
        starts = range(0, max(len(pixels), 1), BATCH)
        scores = np.concatenate([self.answer(pixels[i : i + BATCH])[0] for i in starts])
        return scores, samples.labels.numpy(), self.folder.holdout_groups()


def open_model(
    model: Path, *, version: str | None = None, execution: "ExecutionConfig | None" = None
) -> OpenModel:
    """Open a version of a model folder (default: the current one), or a file that `medcil export` wrote."""
    if model.suffix.lower() == EXPORTED and not model.is_dir():
        if version is not None:
            raise InvalidInput(f"{model} holds one version: leave {version!r} out, or give the model folder.")
        exported = OnnxModel(model)
        description = exported.description
        return OpenModel(
            name=model.name,
            class_names=tuple(description["class_names"]),
            side=int(description["preprocessing"]["resize"]["side"]),
            calibration=Calibration.from_json(description["calibration"], exported.name),
            training_counts=tuple(description["training_images"]),
            answer=exported,
        )
    from medcil.clinic.model_dir import File, ModelFolder
    from medcil.training.inference import Scorer

    folder = ModelFolder(model).version(version)
    calibration = folder.calibration()
    state = folder.load_state()
    if len(calibration.class_prior_in_scores) != len(state.class_names):
        raise DamagedFile(f"{folder.root / File.CALIBRATION} is not of this version's classes; restore it.")
    return OpenModel(
        name=folder.name,
        class_names=state.class_names,
        side=state.preprocessing.side,
        calibration=calibration,
        training_counts=tuple(state.inherent_counts.tolist()),
        answer=Scorer(state, execution).answer,
        folder=folder,
        exemplars=frozenset(map(digest, state.memory.read_all().numpy())),
    )


def digest(pixels: UInt8[np.ndarray, "3 side side"]) -> bytes:
    """Hash the pixels, so that the same picture in another file has the same digest."""
    return hashlib.sha256(pixels.tobytes()).digest()
