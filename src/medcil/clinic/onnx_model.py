"""An exported model, run by onnxruntime: no torch. What the file holds: docs/how-to/export.md."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jaxtyping import Float, UInt8

from medcil.clinic.calibration import Calibration
from medcil.config import Views
from medcil.errors import DamagedFile, InvalidInput
from medcil.processors import usable_cores
from medcil.storage.os_errors import reading

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

# onnxruntime tells its makers about models and files it opens, unless this is set when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

FORMAT = 1
KEY = "medcil"
"""Of the entry in the file's metadata that describes it, in JSON."""
NO_SHA256 = "0" * 64
"""In the place of the file's sha256 while that is computed."""
BATCH = 64
"""Views of images that go through the network together."""


def with_sha256(content: bytes) -> bytes:
    """With the sha256 of what it is without it, so that a damaged file is known by itself."""
    return _sha256_set(content, NO_SHA256, hashlib.sha256(content).hexdigest())


def _sha256_set(content: bytes, old: str, new: str) -> bytes:
    # Quotes within a name are escaped in JSON: no class can be called like this.
    return content.replace(f'{{"sha256": "{old}"'.encode(), f'{{"sha256": "{new}"'.encode(), 1)


@dataclass(frozen=True)
class Answers:
    """What the file computes of images."""

    scores: Float[np.ndarray, "n classes"]
    embedding: Float[np.ndarray, "n dim"]
    likeness: Float[np.ndarray, "n"]
    probabilities: Float[np.ndarray, "n classes"]


class OnnxModel:
    """One file, with the method's scoring, the calibration and all of the preprocessing but the resizing."""

    def __init__(self, file: Path | bytes) -> None:
        self.name = "the exported model" if isinstance(file, bytes) else str(file)
        content = file if isinstance(file, bytes) else _read(file)
        self._session = _open(content, self.name)
        self.description = _described(self._session, self.name)
        stated = str(self.description.get("sha256"))
        if hashlib.sha256(_sha256_set(content, stated, NO_SHA256)).hexdigest() != stated:
            raise DamagedFile(f"{self.name} was changed or damaged (its sha256 differs); export it again.")

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.description["class_names"])

    @property
    def side(self) -> int:
        """Of the images it takes."""
        return int(self.description["preprocessing"]["resize"]["side"])

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration.from_json(self.description["calibration"], self.name)

    def __call__(
        self, pixels: UInt8[np.ndarray, "n 3 side side"]
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        """Scores and likeness, as from the network itself."""
        answers = self.answers(pixels)
        return answers.scores.astype(np.float64), answers.likeness.astype(np.float64)

    def answers(
        self, pixels: UInt8[np.ndarray, "n 3 side side"], prior: Sequence[float] | None = None
    ) -> Answers:
        """With probabilities under this prior; without one, every class is as frequent as any other."""
        inputs = {}
        if prior is not None:
            log_prior = [math.log(share) if share > 0 else -math.inf for share in prior]
            inputs["log_prior"] = np.array(log_prior, dtype=np.float32)
        size = BATCH // _views(self.description)
        parts = [
            self._session.run(None, {"images": pixels[start : start + size], **inputs})
            for start in range(0, max(len(pixels), 1), size)
        ]
        return Answers(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise InvalidInput(f"There is no file {file}. Give one that `medcil export` wrote.")
    with reading(file):
        return file.read_bytes()


def _open(content: bytes, name: str) -> "InferenceSession":
    try:
        import onnxruntime
    except ImportError:
        raise InvalidInput(
            "An exported model needs onnxruntime, which is not installed: pip install 'medcil[onnx]'."
        ) from None
    onnxruntime.disable_telemetry_events()  # where it was loaded before, what can still be stopped is
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    # Threads that wait should sleep: spinning is slower as soon as anything else runs on the machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors; warnings are about the file's making
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors are of many kinds, in modules of its own
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
        names = description["class_names"]
        counts = description.get("training_images", [0] * len(names))
        priors = description["calibration"]["class_prior_in_scores"]
        is_sound = (
            len(names) == len(counts) == len(priors) == session.get_outputs()[0].shape[1]
            and all(isinstance(class_name, str) for class_name in names)
            and all(isinstance(count, int) and count >= 0 for count in counts)
            and session.get_inputs()[0].shape[1:]
            == [3, *(description["preprocessing"]["resize"]["side"],) * 2]
            and _views(description) in get_args(Views)
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        is_sound = False
    if not is_sound:
        raise DamagedFile(f"{name}: its description is damaged; export it again.")
    return description


def _views(description: dict[str, Any]) -> int:
    """Of every image; files that say nothing of it have one."""
    return int(description["preprocessing"]["inside_the_graph"].get("views", 1))
