"""Where in an image the answer comes from, and which exemplars are nearest. See docs/how-to/explain.md."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from medcil.clinic.calibration import Calibration
from medcil.clinic.image_paths import find_images
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.scoring import Scorer
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.wording import printable
from medcil.errors import InvalidInput
from medcil.storage.atomic import read_json
from medcil.storage.os_errors import writing
from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder
from medcil.training.state import State

FORMAT = 1
PAGE, NUMBERS, FIGURE = "index.html", "explanation.json", "explanation.png"
WINDOW_SHARE = 5
"""The window that covers a part of the image is a fifth as wide."""
STEPS_PER_WINDOW = 4
NEAREST = 4
AT_ONCE = 32
"""Covered images that go through the network together."""


@dataclass(frozen=True)
class Neighbor:
    pixels: UInt8[np.ndarray, "3 side side"]
    file: str | None
    """In the version's state, where that is known."""
    cosine: float
    """Between the embeddings; 1 is the same direction."""


@dataclass(frozen=True)
class ForClass:
    """What speaks for one class, and what against."""

    name: str
    probability: float
    saliency: Float[np.ndarray, "crop crop"]
    """By how much the log odds of the class fall when the place is covered; negative where they rise."""
    neighbors: tuple[Neighbor, ...]
    """The nearest exemplars of the class, nearest first."""


@dataclass(frozen=True)
class Explanation:
    image: str
    version: str
    crop: UInt8[np.ndarray, "3 crop crop"]
    """What the network saw."""
    class_names: tuple[str, ...]
    probabilities: tuple[float, ...]
    """Under a uniform prior."""
    is_unlike: bool
    predicted: ForClass
    runner_up: ForClass
    window: int

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "image": self.image,
            "version": self.version,
            "prior": "uniform",
            "probabilities": dict(zip(self.class_names, self.probabilities, strict=True)),
            "unlike_anything_known": self.is_unlike,
            "saliency": {
                "method": "occlusion",
                "window": self.window,
                "covered_by": "the image itself, blurred",
                "value": "fall of the class's log odds when the place is covered",
            },
            "classes": [
                {
                    "role": role,
                    "name": of.name,
                    "probability": of.probability,
                    "saliency": [[round(float(value), 4) for value in row] for row in of.saliency],
                    "nearest_exemplars": [{"file": n.file, "cosine": n.cosine} for n in of.neighbors],
                }
                for role, of in (("predicted", self.predicted), ("runner-up", self.runner_up))
            ],
        }


def explain(
    model: Path | str,
    image: Path | str,
    out: Path | str,
    *,
    version: str | None = None,
    execution: ExecutionConfig | None = None,
) -> Explanation:
    """Writes explanation.png, explanation.json and index.html into `out`."""
    with _needing_extras():
        from medcil.clinic.explain_page import write_explanation

    found = find_images([image])
    if len(found) != 1:
        raise InvalidInput(f"{image} holds {len(found)} images: name the one to explain.")
    folder = ModelFolder(Path(model)).version(version)
    check_output_folder(Path(out), "explain")
    state, calibration = folder.load_state(), folder.calibration()
    pixels = torch.from_numpy(found[0].decode(state.preprocessing.side))
    files = [str(entry["file"]) for entry in read_json(folder.state_path / "manifest.json")["exemplars"]]
    explanation = explain_state(
        state,
        pixels,
        calibration=calibration,
        image=printable(Path(found[0].name).name),
        version=folder.name,
        files=files,
        execution=execution,
    )
    claim_output_folder(Path(out), "explain")
    with writing(Path(out)):
        write_explanation(explanation, Path(out))
    return explanation


def explain_state(
    state: State,
    pixels: UInt8[Tensor, "3 side side"],
    *,
    calibration: Calibration,
    image: str = "",
    version: str = "",
    files: list[str] | None = None,
    execution: ExecutionConfig | None = None,
) -> Explanation:
    """Of one image, for the most probable class and the one after it; `files` names the exemplars."""
    n = len(state.class_names)
    if n < 2:
        raise InvalidInput("An explanation compares two classes, and this model knows fewer: add one.")
    scorer = Scorer(state, execution or ExecutionConfig())
    scores, likeness = scorer(Samples(TensorImages(pixels[None]), torch.zeros(1, dtype=torch.int64)))
    probabilities = calibration.probabilities(scores, [1 / n] * n)[0]
    crop = _center(pixels, state)
    seen = state.preprocessing.normalize(crop[None].to(scorer.device))
    window = max(1, state.preprocessing.crop // WINDOW_SHARE)
    best = np.argsort(-probabilities, kind="stable")[:2].tolist()
    maps = _occlusion(_log_odds_of(best, scorer, calibration), seen, window)
    embedding = _embeddings(scorer, state, pixels[None])[0]
    predicted, runner_up = (
        ForClass(
            name=state.class_names[c],
            probability=float(probabilities[c]),
            saliency=saliency,
            neighbors=_nearest(scorer, state, embedding, c, files),
        )
        for c, saliency in zip(best, maps, strict=True)
    )
    return Explanation(
        image=image,
        version=version,
        crop=crop.numpy(),
        class_names=state.class_names,
        probabilities=tuple(probabilities.tolist()),
        is_unlike=bool(calibration.is_unlike(likeness)[0]),
        predicted=predicted,
        runner_up=runner_up,
        window=window,
    )


def _log_odds_of(classes: list[int], scorer: Scorer, calibration: Calibration) -> Callable[[Tensor], Tensor]:
    """Of each of these classes against all others, calibrated and under a uniform prior."""
    prior = torch.tensor(calibration.class_prior_in_scores, device=scorer.device)

    def log_odds(images: Tensor) -> Tensor:
        scores: Tensor = scorer.model(images)[0]
        evidence = (scores - prior) / calibration.temperature
        own = torch.eye(len(prior), dtype=torch.bool, device=scorer.device)
        others = evidence[:, None, :].masked_fill(own, -torch.inf).logsumexp(dim=2)
        return (evidence - others)[:, classes]

    return log_odds


def _occlusion(
    log_odds: Callable[[Tensor], Tensor], seen: Float[Tensor, "1 3 crop crop"], window: int
) -> Float[np.ndarray, "2 crop crop"]:
    """Of all windows that cover a place, the mean fall of each class's log odds."""
    step = max(1, window // STEPS_PER_WINDOW)
    with torch.no_grad():
        falls = _captum()(log_odds).attribute(
            seen,
            sliding_window_shapes=(3, window, window),
            strides=(3, step, step),
            baselines=_blurred(seen),
            perturbations_per_eval=AT_ONCE,
        )
    return np.asarray(falls[:, 0].cpu().numpy())  # the same in every channel


def _captum() -> Any:
    with _needing_extras():
        from captum.attr import Occlusion
    return Occlusion


@contextmanager
def _needing_extras() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise InvalidInput(
            f"Explaining needs {error.name}, which is not installed: pip install 'medcil[explain]'."
        ) from None


def _blurred(images: Float[Tensor, "1 3 crop crop"]) -> Float[Tensor, "1 3 crop crop"]:
    """So that what is covered is gone and yet no edge is new: colors of the surroundings, no structure."""
    reach = images.shape[-1] // 4
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    return F.avg_pool2d(padded, 2 * reach + 1, stride=1)


def _nearest(
    scorer: Scorer, state: State, embedding: Float[Tensor, "dim"], c: int, files: list[str] | None
) -> tuple[Neighbor, ...]:
    places = torch.nonzero(state.memory.labels == c).flatten()
    if not len(places):  # a class may have lost its exemplars
        return ()
    pixels = state.memory.select(places).read_all()
    cosines = (_embeddings(scorer, state, pixels) @ embedding).cpu()
    best = torch.argsort(cosines, descending=True, stable=True)[:NEAREST].tolist()
    return tuple(
        Neighbor(pixels[i].numpy(), files[int(places[i])] if files else None, float(cosines[i])) for i in best
    )


@torch.no_grad()
def _embeddings(
    scorer: Scorer, state: State, pixels: UInt8[Tensor, "n 3 side side"]
) -> Float[Tensor, "n dim"]:
    """Unit vectors."""
    network, crops = scorer.model.network, _center(pixels, state).to(scorer.device)
    batches = torch.split(crops, AT_ONCE)
    return F.normalize(torch.cat([network(state.preprocessing.normalize(b)).embedding for b in batches]))


def _center(pixels: UInt8[Tensor, "*n 3 side side"], state: State) -> UInt8[Tensor, "*n 3 crop crop"]:
    start = state.preprocessing.slack // 2
    end = start + state.preprocessing.crop
    return pixels[..., start:end, start:end]
