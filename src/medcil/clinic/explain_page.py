"""An explanation to look at: a figure, its numbers, and a page that needs no network."""

import base64
import io
import textwrap
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medcil.clinic.explain import FIGURE, NEAREST, NUMBERS, PAGE, Explanation, ForClass
from medcil.clinic.version_page import STYLE as PAGE_STYLE
from medcil.report.evaluation import NOTICE
from medcil.report.plots import METADATA, STYLE
from medcil.storage.atomic import write_bytes, write_json

COLORS = "RdBu_r"
DOTS_PER_INCH = 160
CAPTION = (
    "Red: covering this place takes from the class, blue: it adds to it, in units of its log odds. This is "
    "what this network's answer depends on, and no proof that it is right."
)


def write_explanation(explanation: Explanation, out: Path) -> Path:
    """The numbers, by which the figure is known to be ours, come first; the page comes last."""
    picture = draw(explanation)
    write_json(out / NUMBERS, explanation.to_json())
    write_bytes(out / FIGURE, picture)
    write_bytes(out / PAGE, render(explanation, picture).encode())
    return out / PAGE


def draw(explanation: Explanation) -> bytes:
    """The image and both classes' maps; below them each class's nearest exemplars."""
    both = (explanation.predicted, explanation.runner_up)
    strongest = max(float(np.abs(of.saliency).max()) for of in both) or 1.0
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.0, 5.0), layout="constrained")
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1.25, 1)))
        first, *maps = above.subplots(1, 3)
        _show(first, explanation.crop, "as the network sees it")
        for axes, of in zip(maps, both, strict=True):
            gray = explanation.crop.mean(axis=0)
            axes.imshow(gray, cmap="gray", vmin=0, vmax=400 if gray.mean() > 128 else 255)
            drawn = axes.imshow(
                of.saliency,
                cmap=COLORS,
                vmin=-strongest,
                vmax=strongest,
                alpha=0.55,
                interpolation="bilinear",
            )
            _name(axes, f"speaks for {_short(of.name)} ({of.probability:.1%})")
        above.colorbar(drawn, ax=maps, shrink=0.8, label="fall of the log odds")
        rows = below.subplots(2, NEAREST + 1, width_ratios=(1.6, *(1,) * NEAREST))
        for axes_of_row, of in zip(rows, both, strict=True):
            _shelf(list(axes_of_row), of)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata=METADATA["png"])
    return buffer.getvalue()


def render(explanation: Explanation, picture: bytes) -> str:
    ranked = sorted(
        zip(explanation.class_names, explanation.probabilities, strict=True), key=lambda pair: -pair[1]
    )
    rows = "".join(f"<tr><td class='text'>{escape(n)}</td><td>{p:.1%}</td></tr>" for n, p in ranked)
    unlike = (
        "<p class='verdict'>This image is unlike anything the model knows: do not rely on its answer.</p>"
        if explanation.is_unlike
        else ""
    )
    title = f"{explanation.image}: {explanation.predicted.name}"
    alternative = (
        f"Where {explanation.predicted.name} and {explanation.runner_up.name} come from in the image, and "
        "the nearest exemplars of both"
    )
    source = base64.b64encode(picture).decode()
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        '<meta name="generator" content="medcil explain">\n'
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}img {{ max-width: 100% }}</style>\n"
        "</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"<p class='quiet'>Model version {escape(explanation.version)}. {NOTICE}</p>\n{unlike}\n"
        f"<img src='data:image/png;base64,{source}' alt='{escape(alternative)}'>\n"
        f"<p>{CAPTION}</p>\n"
        f"<h2>Probabilities</h2>\n<table><tr><th>class</th><th>probability</th></tr>{rows}</table>\n"
        "<p class='quiet'>Calibrated, every class taken to be as frequent as any other.</p>\n"
        "</body>\n</html>\n"
    )


def _shelf(row: list[Axes], of: ForClass) -> None:
    label, *places = row
    label.axis("off")
    said = (
        f"nearest exemplars of\n{_short(of.name)}" if of.neighbors else f"no exemplars of\n{_short(of.name)}"
    )
    label.text(0.95, 0.5, said, ha="right", va="center")
    for axes in places:
        axes.axis("off")
    for axes, neighbor in zip(places, of.neighbors, strict=False):
        _show(axes, neighbor.pixels, f"cosine {neighbor.cosine:.2f}")


def _show(axes: Axes, pixels: UInt8[np.ndarray, "3 height width"], title: str) -> None:
    axes.imshow(pixels.transpose(1, 2, 0))
    _name(axes, title)


def _name(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.axis("off")


def _short(name: str) -> str:
    return textwrap.shorten(name, 28, placeholder="…") or "…"
