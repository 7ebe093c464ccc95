"""The model behind the page. One thread asks it: requests wait for each other, and memory is bounded."""

import asyncio
import base64
import importlib.util
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from medcil.clinic.inference import OpenModel, open_model
from medcil.clinic.model_dir import CARD, ModelFolder, VersionFolder
from medcil.clinic.predict import FoundImage, Prior, choose_prior, predictions
from medcil.clinic.update import read_past
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, MedcilError
from medcil.report.evaluation import NOTICE
from medcil.serving.uploads import Refused, Upload

if TYPE_CHECKING:
    from medcil.clinic.explain import ForClass

T = TypeVar("T")
FOR, AGAINST = (178, 24, 43), (33, 102, 172)
"""Red and blue, as in the figure that `medcil explain` draws."""
OPAQUE = 190
TRY_AGAIN = 5.0
"""Seconds after which a version that could not be loaded is tried again."""
UNREADABLE = "cannot be read as an image; remove or replace it."


@dataclass(frozen=True, eq=False)
class Loaded:
    """A version that answers."""

    place: VersionFolder
    sha256: str
    """Of what it was loaded from."""
    opened: OpenModel
    priors: dict[str, Prior]
    card: str | None


class ServedModel:
    """The current version. Between two requests another one is loaded, if one was promoted or gone back to,
    or the same again, if a patient was erased."""

    def __init__(
        self, model: Path, *, prior: Path | None = None, execution: ExecutionConfig | None = None
    ) -> None:
        self.folder, self.prior = ModelFolder(model), prior
        self.execution = execution or ExecutionConfig()
        self.can_explain = importlib.util.find_spec("captum") is not None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        place = self.folder.version()
        self.loaded = self._load(place, place.sha256)
        self.current = self.version
        self.behind: str | None = None
        """Why the current version does not answer."""
        self.failed: tuple[str, str] | None = None
        """Name and sha256 of what could not be loaded: it alone waits for the next try."""
        self.next_try = 0.0

    def _load(self, place: VersionFolder, found: str) -> Loaded:
        opened = open_model(self.folder.root, version=place.name, execution=self.execution)
        wanted: list[str | Path] = ["uniform", "training"]
        wanted += [] if self.prior is None else [self.prior]
        priors = {prior.name: prior for prior in (choose_prior(opened, each) for each in wanted)}
        written = place.read(CARD) if place.has(CARD) else None
        card = None if written is None else written.decode("utf-8", "replace")
        return Loaded(place, found, opened, priors, card)

    def _follow(self) -> None:
        """To what is current now; while that cannot be loaded, the last one goes on."""
        wanted = None
        try:
            place = self.folder.version()
            self.current = place.name
            wanted = (place.name, place.sha256)
            if wanted != (self.version, self.loaded.sha256):
                if wanted == self.failed and time.monotonic() < self.next_try:
                    return
                self.loaded = self._load(place, wanted[1])
            self.behind = self.failed = None
        except (MedcilError, OSError) as error:
            self.behind = told(error, self.folder.root, self.prior)
            self.failed, self.next_try = wanted, time.monotonic() + TRY_AGAIN

    @property
    def version(self) -> str:
        return self.loaded.place.name

    @property
    def opened(self) -> OpenModel:
        return self.loaded.opened

    @property
    def priors(self) -> dict[str, Prior]:
        return self.loaded.priors

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.opened.class_names

    async def ask(self, work: Callable[[], T]) -> T:
        """In the model's thread, after whatever was asked before."""

        def follow_and_work() -> T:
            self._follow()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self.thread, follow_and_work)

    def describe(self) -> dict[str, Any]:
        calibration = self.opened.calibration
        return {
            "name": self.folder.root.resolve().name,
            "version": self.version,
            "current": self.current,
            "behind": self.behind,
            "notice": NOTICE,
            "classes": list(self.class_names),
            "side": self.opened.side,
            "priors": {
                prior.name: dict(zip(self.class_names, prior.shares, strict=True))
                for prior in self.priors.values()
            },
            "unlike": asdict(calibration.unlike),
            "notes": list(calibration.notes),
            "explains": self.can_explain,
            "card": self.loaded.card,
        }

    def past(self) -> dict[str, Any]:
        """Every version, the newest first, each with what its update cost; or why it cannot be read."""
        current = self.folder.current
        return {"versions": [self._past(name, current) for name in reversed(self.folder.versions)]}

    def _past(self, name: str, current: str) -> dict[str, Any]:
        told_of_all = {"version": name, "is_current": name == current, "is_served": name == self.version}
        try:
            place = self.folder.version(name)
            past = asdict(read_past(place, is_current=name == current))
            return {**past, **told_of_all, "forgetting": place.forgetting(), "error": None}
        except (MedcilError, OSError) as error:
            return {**told_of_all, "error": told(error, self.folder.root)}

    def predict(self, files: Sequence[Upload], wanted: str) -> dict[str, Any]:
        """A row for each file, also for one that cannot be read."""
        prior, rows = self._prior(wanted), list[dict[str, Any]]()
        names = [file.name for file in files]
        for found in predictions(self.opened, names, lambda i: self._decode(files[i]), prior):
            row: dict[str, Any] = {"file": found.file, "error": found.error}
            if found.error is None:
                of_class = zip(self.class_names, found.probabilities, strict=True)
                row["classes"] = [
                    {"name": name, "probability": share}
                    for name, share in sorted(of_class, key=lambda pair: -pair[1])
                ]
                row |= {"predicted": found.predicted, "is_unlike": found.is_unlike}
                row["likeness"] = found.likeness
            rows.append(row)
        return {"version": self.version, "prior": prior.name, "rows": rows}

    def explain(self, file: Upload) -> dict[str, Any]:
        """For the most probable class under a uniform prior and the one after it."""
        import torch

        from medcil.clinic.explain import explain_state

        try:
            pixels = torch.from_numpy(self._decode(file))
        except InvalidInput as error:
            raise Refused(422, str(error).splitlines()[0]) from None
        # Read again each time: an exemplar that was removed from the folder must not live on in memory.
        state = self.loaded.place.load_state()
        found = explain_state(
            state,
            pixels,
            calibration=self.opened.calibration,
            image=file.name,
            version=self.version,
            execution=self.execution,
        )
        both = (found.predicted, found.runner_up)
        strongest = max(float(np.abs(of.saliency).max()) for of in both)
        return {
            "file": file.name,
            "version": self.version,
            "prior": "uniform",
            "is_unlike": found.is_unlike,
            "seen": _picture(found.crop.transpose(1, 2, 0)),
            "classes": [_class_for_page(of, strongest) for of in both],
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
    """The model's place is private."""
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
    """An overlay of the image: red where the place speaks for the class, blue where against, else clear."""
    colored = np.where((saliency > 0)[..., None], np.array(FOR, np.uint8), np.array(AGAINST, np.uint8))
    alpha = np.rint(OPAQUE * np.abs(saliency) / (strongest or 1.0)).astype(np.uint8)
    return np.concatenate([colored, alpha[..., None]], axis=2)


def _picture(pixels: UInt8[np.ndarray, "h w channels"]) -> str:
    """An address that holds the whole picture, so that nothing has to be stored to be fetched."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
