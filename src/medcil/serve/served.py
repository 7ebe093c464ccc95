"""The model behind the page. One thread asks it: requests wait for each other, and memory is bounded."""

import asyncio
import base64
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

from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput
from medcil.runs import read_json
from medcil.serve.uploads import Refused, Upload
from medcil.workflow.folder import ModelFolder, VersionFolder
from medcil.workflow.found_images import FoundImage
from medcil.workflow.history import history
from medcil.workflow.opened import answers, open_model
from medcil.workflow.page import NOT_A_DEVICE
from medcil.workflow.priors import choose_prior

if TYPE_CHECKING:
    from medcil.workflow.explain import ForClass

T = TypeVar("T")
FOR, AGAINST = (178, 24, 43), (33, 102, 172)
"""Red and blue, as in the figure that `medcil explain` draws."""
OPAQUE = 190
UNREADABLE = "cannot be read as an image; remove or replace it."


class ServedModel:
    """The version that is current when it is opened; it stays with that one."""

    def __init__(
        self, model: Path, *, prior: Path | None = None, execution: ExecutionConfig | None = None
    ) -> None:
        self.folder = ModelFolder(model)
        self.execution = execution or ExecutionConfig()
        self.version = self.folder.version().name
        self.opened = open_model(model, version=self.version, execution=self.execution)
        self.can_explain = importlib.util.find_spec("captum") is not None and len(self.class_names) > 1
        chosen = [choose_prior(self.opened, name) for name in ("uniform", "training")]
        chosen += [] if prior is None else [choose_prior(self.opened, prior)]
        self.priors = {each.name: each for each in chosen}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.opened.class_names

    async def ask(self, work: Callable[[], T]) -> T:
        """In the model's thread, after whatever was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def describe(self) -> dict[str, Any]:
        place, calibration = self._place(), self.opened.calibration
        card = place.card_path
        return {
            "name": self.folder.root.resolve().name,
            "version": self.version,
            "current": self.folder.current,
            "notice": NOT_A_DEVICE,
            "classes": list(self.class_names),
            "side": self.opened.side,
            "priors": {
                prior.name: dict(zip(self.class_names, prior.shares, strict=True))
                for prior in self.priors.values()
            },
            "unlike": asdict(calibration.unlike),
            "notes": list(calibration.notes),
            "explains": self.can_explain,
            "card": card.read_text(encoding="utf-8") if card.is_file() else None,
        }

    def past(self) -> dict[str, Any]:
        """Every version, the newest first, each with what its update cost."""
        versions = []
        for past in reversed(history(self.folder.root)):
            place = self.folder.version(past.version).forgetting_path
            cost = read_json(place) if place.is_file() else None
            versions.append({**asdict(past), "is_served": past.version == self.version, "forgetting": cost})
        return {"versions": versions}

    def predict(self, files: Sequence[Upload], wanted: str) -> dict[str, Any]:
        """A row for each file, also for one that cannot be read."""
        prior = self._prior(wanted)
        rows: list[dict[str, Any]] = []
        for batch in answers(self.opened, len(files), lambda i: self._decode(files[i])):
            probabilities = self.opened.calibration.probabilities(batch.scores, prior.shares)
            is_unlike = self.opened.calibration.is_unlike(batch.likeness)
            for place, error in enumerate(batch.errors):
                row: dict[str, Any] = {"file": files[batch.first + place].name, "error": error}
                if error is None:
                    ranked = np.argsort(-probabilities[place], kind="stable").tolist()
                    row["classes"] = [
                        {"name": self.class_names[c], "probability": float(probabilities[place][c])}
                        for c in ranked
                    ]
                    row |= {"predicted": row["classes"][0]["name"], "is_unlike": bool(is_unlike[place])}
                    row["likeness"] = float(batch.likeness[place])
                rows.append(row)
        return {"version": self.version, "prior": prior.name, "rows": rows}

    def explain(self, file: Upload) -> dict[str, Any]:
        """For the most probable class under a uniform prior and the one after it."""
        import torch

        from medcil.workflow.explain import explain_state

        try:
            pixels = torch.from_numpy(self._decode(file))
        except InvalidInput as error:
            raise Refused(422, str(error).splitlines()[0]) from None
        # Read anew each time: an exemplar that was removed from the folder must not live on in memory.
        state = self._place().load_state()
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

    def _place(self) -> VersionFolder:
        return self.folder.version(self.version)

    def _prior(self, wanted: str) -> Any:
        if wanted not in self.priors:  # a name, never looked up as a file
            raise Refused(400, f"There is no such prior here: choose {' or '.join(self.priors)}.")
        return self.priors[wanted]

    def _decode(self, file: Upload) -> UInt8[np.ndarray, "3 side side"]:
        if file.error is not None:
            raise InvalidInput(f"{file.name}: {file.error}")
        try:
            return FoundImage(file.name, lambda: file.content).decode(self.opened.side)
        except (InvalidInput, MemoryError):
            raise
        except Exception:  # whatever a decoder does with a file that was made to break it
            raise InvalidInput(f"{file.name} {UNREADABLE}") from None


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
    """To lay over the image: red where the place speaks for the class, blue where against, else clear."""
    colored = np.where((saliency > 0)[..., None], np.array(FOR, np.uint8), np.array(AGAINST, np.uint8))
    alpha = np.rint(OPAQUE * np.abs(saliency) / (strongest or 1.0)).astype(np.uint8)
    return np.concatenate([colored, alpha[..., None]], axis=2)


def _picture(pixels: UInt8[np.ndarray, "h w channels"]) -> str:
    """An address that holds the whole picture, so that nothing has to be stored to be fetched."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
