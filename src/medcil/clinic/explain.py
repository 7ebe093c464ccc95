"""Explain an answer: saliency by occlusion, and the nearest exemplars. See docs/how-to/explain.md."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from medcil.clinic.calibration import Calibration
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.predict import find_images
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.errors import InvalidInput, needs_extra, printable
from medcil.report.evaluation import NOTICE
from medcil.report.markup import data_uri, render
from medcil.storage.atomic import write_bytes, write_json, writing
from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder
from medcil.training.inference import Scorer
from medcil.training.state import State

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

FORMAT = 1
PAGE, NUMBERS, FIGURE = "index.html", "explanation.json", "explanation.png"
WINDOW_SHARE = 5
"""The occluding window is a fifth as wide as the image."""
STEPS_PER_WINDOW = 4
NEAREST = 4
AT_ONCE = 32
"""Occluded images in one pass through the network."""


@dataclass(frozen=True)
class Neighbor:
    pixels: UInt8[np.ndarray, "3 side side"]
    file: str | None
    """Name in the image store of the model, if known."""
    cosine: float
    """Between the embeddings; 1 is the same direction."""


@dataclass(frozen=True)
class ForClass:
    """The evidence for and against one class."""

    name: str
    probability: float
    saliency: Float[np.ndarray, "crop crop"]
    """The fall of the class's log odds when a place is covered; negative where they rise."""
    neighbors: tuple[Neighbor, ...]
    """The nearest exemplars of the class, nearest first."""


@dataclass(frozen=True)
class Explanation:
    image: str
    version: str
    crop: UInt8[np.ndarray, "3 crop crop"]
    """The pixels that the network saw."""
    probabilities: dict[str, float]
    """By class, under a uniform prior."""
    is_unlike: bool
    classes: tuple[ForClass, ...]
    """The predicted one and the runner-up."""
    window: int

    @property
    def strongest(self) -> float:
        return max(float(np.abs(of.saliency).max()) for of in self.classes) or 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "image": self.image,
            "version": self.version,
            "prior": "uniform",
            "probabilities": self.probabilities,
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
                for role, of in zip(("predicted", "runner-up"), self.classes, strict=True)
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
    """Explain the answer for one image; write explanation.png, explanation.json and index.html into `out`."""
    with needs_extra("explain"):
        import matplotlib  # noqa: F401  # before any work

    found = find_images([image])
    if len(found) != 1:
        raise InvalidInput(f"{image} holds {len(found)} images: name the one to explain.")
    folder = ModelFolder(Path(model)).version(version)
    check_output_folder(Path(out), "explain")
    state, calibration = folder.load_state(), folder.calibration()
    pixels = torch.from_numpy(found[0].decode(state.preprocessing.side))
    files = [entry["file"] for entry in folder.exemplar_entries()]
    explanation = explain_state(
        state,
        pixels,
        calibration=calibration,
        image=printable(Path(found[0].name).name),
        version=folder.name,
        files=files,
        execution=execution,
    )
    with writing(Path(out)):
        claim_output_folder(Path(out), "explain")
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
    """Explain the two most probable classes of one image; `files` names the exemplars."""
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
    maps = _occlusion(best, scorer, calibration, seen, window)
    embedding = _embeddings(scorer, state, pixels[None])[0]
    classes = tuple(
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
        probabilities=dict(zip(state.class_names, probabilities.tolist(), strict=True)),
        is_unlike=bool(calibration.is_unlike(likeness)[0]),
        classes=classes,
        window=window,
    )


def _occlusion(
    classes: list[int],
    scorer: Scorer,
    calibration: Calibration,
    seen: Float[Tensor, "1 3 crop crop"],
    window: int,
) -> Float[np.ndarray, "2 crop crop"]:
    """Average the fall of each log odds, under a uniform prior, over all windows that cover a place."""
    with needs_extra("explain"):
        from captum.attr import Occlusion
    prior = torch.tensor(calibration.class_prior_in_scores, device=scorer.device)
    own = torch.eye(len(prior), dtype=torch.bool, device=scorer.device)

    def log_odds(images: Tensor) -> Tensor:
        scores: Tensor = scorer.model(images)[0]
        evidence = (scores - prior) / calibration.temperature
        others = evidence[:, None, :].masked_fill(own, -torch.inf).logsumexp(dim=2)
        return (evidence - others)[:, classes]

    step = max(1, window // STEPS_PER_WINDOW)
    with torch.no_grad():
        falls = Occlusion(log_odds).attribute(
            seen,
            sliding_window_shapes=(3, window, window),
            strides=(3, step, step),
            baselines=_blurred(seen),
            perturbations_per_eval=AT_ONCE,
        )
    return np.asarray(falls[:, 0].cpu().numpy())  # the same in every channel


def _blurred(images: Float[Tensor, "1 3 crop crop"]) -> Float[Tensor, "1 3 crop crop"]:
    """Blur strongly: the colors of the surroundings without structure, and without new edges."""
    reach = images.shape[-1] // 4
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    return F.avg_pool2d(padded, 2 * reach + 1, stride=1)


def _nearest(
    scorer: Scorer, state: State, embedding: Float[Tensor, "dim"], c: int, files: list[str] | None
) -> tuple[Neighbor, ...]:
    places = torch.nonzero(state.memory.labels == c).flatten()
    if not len(places):  # erased
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
    """Embed images as unit vectors."""
    network, crops = scorer.model.network, _center(pixels, state).to(scorer.device)
    batches = torch.split(crops, AT_ONCE)
    return F.normalize(torch.cat([network(state.preprocessing.normalize(b)).embedding for b in batches]))


def _center(pixels: UInt8[Tensor, "*n 3 side side"], state: State) -> UInt8[Tensor, "*n 3 crop crop"]:
    start = state.preprocessing.slack // 2
    end = start + state.preprocessing.crop
    return pixels[..., start:end, start:end]


COLORS = "RdBu_r"
DOTS_PER_INCH = 160
CAPTION = (
    "Red: covering this place takes from the class, blue: it adds to it, in units of its log odds. This is "
    "what this network's answer depends on, and no proof that it is right."
)


def write_explanation(explanation: Explanation, out: Path) -> Path:
    """Write the numbers, the figure and the page, in this order."""
    picture = draw(explanation)
    write_json(out / NUMBERS, explanation.to_json())
    write_bytes(out / FIGURE, picture)
    write_bytes(out / PAGE, render_page(explanation, picture).encode())
    return out / PAGE


def draw(explanation: Explanation) -> bytes:
    """Draw the image and the maps of both classes, and below them the nearest exemplars, if there are any."""
    import matplotlib
    from matplotlib.figure import Figure

    from medcil.report.plots import STYLE, rendered

    gray, strongest = explanation.crop.mean(axis=0), explanation.strongest
    brightest = 400 if gray.mean() > 128 else 255  # a bright image is dimmed, so that colors show on it
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.titlesize": 8, "text.parse_math": False}):
        has_neighbors = any(of.neighbors for of in explanation.classes)
        figure = Figure(figsize=(7.0, 5.0 if has_neighbors else 2.5), layout="constrained")
        above: FigureBase = figure
        if has_neighbors:
            above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1.25, 1)))
            _draw_neighbors(explanation, below)
        first, *maps = above.subplots(1, 3)
        first.imshow(explanation.crop.transpose(1, 2, 0))
        first.set_title("as the network sees it")
        for axes, of in zip(maps, explanation.classes, strict=True):
            axes.imshow(gray, cmap="gray", vmin=0, vmax=brightest)
            scale = {"cmap": COLORS, "vmin": -strongest, "vmax": strongest}
            drawn = axes.imshow(of.saliency, alpha=0.55, interpolation="bilinear", **scale)
            axes.set_title(f"speaks for {_short(of.name)} ({of.probability:.1%})")
        above.colorbar(drawn, ax=maps, shrink=0.8, label="fall of the log odds")
        for axes in (first, *maps):
            axes.axis("off")
        return rendered(figure, "png", dpi=DOTS_PER_INCH)


def _draw_neighbors(explanation: Explanation, figure: "FigureBase") -> None:
    rows = figure.subplots(2, NEAREST + 1, width_ratios=(1.6, *(1,) * NEAREST))
    for (label, *places), of in zip(rows, explanation.classes, strict=True):
        text = f"{'nearest' if of.neighbors else 'no'} exemplars of\n{_short(of.name)}"
        label.text(0.95, 0.5, text, ha="right", va="center")
        for axes, neighbor in zip(places, of.neighbors, strict=False):
            axes.imshow(neighbor.pixels.transpose(1, 2, 0))
            axes.set_title(f"cosine {neighbor.cosine:.2f}")
    for axes in rows.flat:
        axes.axis("off")


def _short(name: str) -> str:
    return textwrap.shorten(name, 28, placeholder="…") or "…"


def render_page(explanation: Explanation, picture: bytes) -> str:
    both = " and ".join(of.name for of in explanation.classes)
    ranked = sorted(explanation.probabilities.items(), key=lambda pair: -pair[1])
    return render(
        "explanation.html.j2",
        title=f"{explanation.image}: {explanation.classes[0].name}",
        version=explanation.version,
        notice=NOTICE,
        is_unlike=explanation.is_unlike,
        picture=data_uri("png", picture),
        without_exemplars=" and ".join(of.name for of in explanation.classes if not of.neighbors),
        alternative=f"Where {both} come from in the image, and the nearest exemplars of both",
        caption=CAPTION,
        probabilities=[(name, f"{p:.1%}") for name, p in ranked],
    )
