"""The model behind the page. One thread uses it: requests wait for each other, and memory is bounded."""

import asyncio
import importlib.util
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from medcil.clinic.inference import open_model
from medcil.clinic.model_dir import File, ModelFolder, VersionFolder
from medcil.clinic.predict import FoundImage, Prior, choose_prior, predictions
from medcil.clinic.update import read_past
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, MedcilError
from medcil.report.evaluation import NOTICE
from medcil.report.markup import data_uri
from medcil.serving.uploads import Refused, Upload

if TYPE_CHECKING:
    from medcil.clinic.explain import ForClass

T = TypeVar("T")
FOR, AGAINST = (178, 24, 43), (33, 102, 172)
"""Red and blue, as in the figure that `medcil explain` draws."""
OPAQUE = 190
UNREADABLE = "cannot be read as an image; remove or replace it."


class ServedModel:
    """The current version, loaded again between two requests if model.json names another one, or if a patient
    was erased from it."""

    def __init__(
        self, model: Path, *, prior: Path | None = None, execution: ExecutionConfig | None = None
    ) -> None:
        self.folder, self.prior = ModelFolder(model), prior
        self.execution = execution or ExecutionConfig()
        self.can_explain = importlib.util.find_spec("captum") is not None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._load(self.folder.version())
        self.current = self.place.name
        self.behind: str | None = None
        """Why the current version does not answer."""

    def _load(self, place: VersionFolder) -> None:
        opened = open_model(self.folder.root, version=place.name, execution=self.execution)
        wanted: list[str | Path] = ["uniform", "training", *([] if self.prior is None else [self.prior])]
        priors = {prior.name: prior for prior in (choose_prior(opened, each) for each in wanted)}
        card = place.read(File.CARD).decode("utf-8", "replace") if place.has(File.CARD) else None
        # Together, once all of it could be read: else the last version goes on.
        self.place, self.opened, self.priors, self.card = place, opened, priors, card

    def _follow(self) -> None:
        """Load the version that is current now; while that cannot be loaded, the last one goes on."""
        try:
            place = self.folder.version()
            self.current = place.name
            if (place.name, place.sha256) != (self.place.name, self.place.sha256):
                self._load(place)
            self.behind = None
        except (MedcilError, OSError) as error:
            self.behind = told(error, self.folder.root, self.prior)

    async def ask(self, work: Callable[[], T]) -> T:
        """Call it in the model's thread, after all earlier calls."""

        def follow_and_work() -> T:
            self._follow()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self.thread, follow_and_work)

    def describe(self) -> dict[str, Any]:
        calibration = self.opened.calibration
        return {
            "name": self.folder.root.resolve().name,
            "version": self.place.name,
            "current": self.current,
            "behind": self.behind,
            "notice": NOTICE,
            "classes": list(self.opened.class_names),
            "side": self.opened.side,
            "priors": {
                prior.name: dict(zip(self.opened.class_names, prior.shares, strict=True))
                for prior in self.priors.values()
            },
            "unlike": asdict(calibration.unlike),
            "notes": list(calibration.notes),
            "explains": self.can_explain,
            "card": self.card,
        }

    def past(self) -> dict[str, Any]:
        """Describe every version, the newest first, with what its update cost; or why it cannot be read."""
        current = self.folder.current
        return {"versions": [self._past(name, current) for name in reversed(self.folder.versions)]}

    def _past(self, name: str, current: str) -> dict[str, Any]:
        facts = {"version": name, "is_current": name == current, "is_served": name == self.place.name}
        try:
            place = self.folder.version(name)
            past = read_past(place, is_current=name == current)
            return {**past, **facts, "forgetting": place.forgetting(), "error": None}
        except (MedcilError, OSError) as error:
            return {**facts, "error": told(error, self.folder.root)}

    def predict(self, files: Sequence[Upload], wanted: str) -> dict[str, Any]:
        """Answer with a row for each file, also for one that cannot be read."""
        prior, rows = self._prior(wanted), list[dict[str, Any]]()
        names = [file.name for file in files]
        for found in predictions(self.opened, names, lambda i: self._decode(files[i]), prior):
            row: dict[str, Any] = {"file": found.file, "error": found.error}
            if found.error is None:
                shares = zip(self.opened.class_names, found.probabilities, strict=True)
                ranked = sorted(shares, key=lambda pair: -pair[1])
                row["classes"] = [{"name": name, "probability": share} for name, share in ranked]
                row |= {"predicted": found.predicted, "is_unlike": found.is_unlike}
                row["likeness"] = found.likeness
            rows.append(row)
        return {"version": self.place.name, "prior": prior.name, "rows": rows}

    def explain(self, file: Upload) -> dict[str, Any]:
        """Explain the two most probable classes under a uniform prior."""
        import torch

        from medcil.clinic.explain import explain_state

        try:
            pixels = torch.from_numpy(self._decode(file))
        except InvalidInput as error:
            raise Refused(422, str(error).splitlines()[0]) from None
        # Read again each time: an exemplar that was removed from the folder must not live on in memory.
        state, calibration = self.place.load_state(), self.opened.calibration
        found = explain_state(state, pixels, calibration=calibration, execution=self.execution)
        return {
            "file": file.name,
            "version": self.place.name,
            "prior": "uniform",
            "is_unlike": found.is_unlike,
            "seen": _picture(found.crop.transpose(1, 2, 0)),
            "classes": [_class_for_page(of, found.strongest) for of in found.classes],
        }

    def _prior(self, wanted: str) -> Prior:
        if wanted not in self.priors:  # a name, never looked up as a file
            raise Refused(400, f"There is no such prior here: choose {' or '.join(self.priors)}.")
        return self.priors[wanted]

    def _decode(self, file: Upload) -> UInt8[np.ndarray, "3 side side"]:
        if file.error is not None:
            raise InvalidInput(f"{file.name}: {file.error}", code="image.too_large")
        try:
            return FoundImage(file.name, lambda: file.content).decode(self.opened.side)
        except (InvalidInput, MemoryError):
            raise
        except Exception:  # whatever a decoder does with a file that was made to break it
            raise InvalidInput(f"{file.name} {UNREADABLE}", code="image.unreadable") from None


def told(error: MedcilError | OSError, *hidden: Path | None) -> str:
    """Return the first line of an error without the paths of this machine."""
    if isinstance(error, OSError):
        return "The model folder cannot be read just now."
    text = str(error).splitlines()[0]
    for path in filter(None, hidden):
        text = text.replace(str(path), path.name)
    return text


def _class_for_page(of: "ForClass", strongest: float) -> dict[str, Any]:
    return {
        "name": of.name,
        "probability": of.probability,
        "saliency": _picture(overlay(of.saliency, strongest)),
        "nearest": [
            {"image": _picture(n.pixels.transpose(1, 2, 0)), "cosine": n.cosine} for n in of.neighbors
        ],
    }


def overlay(saliency: Float[np.ndarray, "h w"], strongest: float) -> UInt8[np.ndarray, "h w 4"]:
    """Color the places that speak for the class red and those against it blue; leave the others clear."""
    colored = np.where((saliency > 0)[..., None], np.array(FOR, np.uint8), np.array(AGAINST, np.uint8))
    alpha = np.rint(OPAQUE * np.abs(saliency) / (strongest or 1.0)).astype(np.uint8)
    return np.concatenate([colored, alpha[..., None]], axis=2)


def _picture(pixels: UInt8[np.ndarray, "h w channels"]) -> str:
    """Write the picture as a data address, so that no file has to be stored."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return data_uri("png", buffer.getvalue())
