"""Draw docs/images/margins.svg: where each margin loss acts on an old sample's embedding, on the unit circle.

The profiles are the losses of medcil.losses for an embedding at every angle, with one
old and two new classes in two dimensions.   python docs/figures/margins.py
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Wedge
from torch import Tensor
from torch.func import vmap

from medcil.losses import distribution_margin, margin_ranking, vanilla_margin
from medcil.report.plots import SMALL, STYLE, rendered

OUT = Path(__file__).parents[1] / "images" / "margins.svg"
ANGLES = torch.arange(0, 361, dtype=torch.float64)
OLD, MANY, FEW = 135.0, 40.0, 262.0  # degrees: an old class, a new one with many images, a new one with few
CLASSES = {  # color, name, position of the name
    OLD: ("#0072B2", "$w_y$, old", (-0.56, 0.05)),
    MANY: ("#D55E00", "$w_1$, new,\nmany images", (0.49, -0.14)),
    FEW: ("#9C4F7C", "$w_2$, new,\nfew images", (0.33, -0.5)),
}
COUNTS = torch.tensor([300, 900, 60])
SHARES = dict(zip(CLASSES, (COUNTS / COUNTS.sum()).tolist(), strict=True))
LOSS, FREE = "#f5c396", "#0072B2"
RANGE: dict[str, Any] = {"alpha": 0.25, "linewidth": 0}
ARROW: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
MARGIN = 0.4
DRAWS = 600
NEGLIGIBLE = 0.02
HEIGHT = 0.1  # radii that a loss of 1 is drawn high


def on_circle(degrees: Tensor) -> Tensor:
    radians = torch.deg2rad(degrees.double())
    return torch.stack([radians.cos(), radians.sin()], dim=-1)


WEIGHTS = on_circle(torch.tensor([OLD, MANY, FEW], dtype=torch.float64))
LABEL = torch.tensor([0])
NOISE = torch.randn(DRAWS, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def vanilla(h: Tensor) -> Tensor:
    return vanilla_margin(h[None], WEIGHTS, LABEL, n_old=1, margin=MARGIN)


def ranking(h: Tensor) -> Tensor:
    return margin_ranking(h[None] @ WEIGHTS.T, LABEL, n_old=1, n_rivals=1, margin=MARGIN)


def distribution(h: Tensor, noise: Tensor) -> Tensor:
    return distribution_margin(
        h[None],
        WEIGHTS,
        LABEL,
        COUNTS,
        n_old=1,
        margin=MARGIN,
        noise=noise,
        noise_scale="inverse_sqrt_dim",
    )


def mean_distribution(h: Tensor) -> Tensor:
    """Over draws of the noise, as training sees it batch after batch."""
    return vmap(distribution, in_dims=(None, 0))(h, NOISE).mean()


def draw(axes: Axes, title: str, loss: Callable[[Tensor], Tensor], *, shows_ranges: bool) -> None:
    losses = vmap(loss)(on_circle(ANGLES))
    circle = on_circle(ANGLES)
    outer = circle * (1.06 + HEIGHT * losses)[:, None]
    axes.fill(*torch.cat([outer, 1.06 * circle.flip(0)]).T.numpy(), color=LOSS, linewidth=0)
    axes.plot(*circle.T.numpy(), color="#9ca3af", linewidth=0.8)
    free = torch.where((losses <= NEGLIGIBLE)[:, None], circle, torch.nan)
    axes.plot(*free.T.numpy(), color=FREE, linewidth=3.4, solid_capstyle="butt")
    for angle, (color, name, place) in CLASSES.items():
        if shows_ranges:
            axes.add_patch(
                Wedge((0, 0), 0.97, angle - spread(angle), angle + spread(angle), color=color, **RANGE)
            )
        tip = 0.97 * on_circle(torch.tensor(angle))
        axes.annotate("", tip.tolist(), (0, 0), arrowprops={"color": color, **ARROW})
        axes.text(*place, name, color=color, ha="center", va="center", fontsize=SMALL)
    axes.set(title=title, aspect="equal", xlim=(-1.55, 1.6), ylim=(-1.68, 1.3))
    axes.axis("off")


def spread(angle: float) -> float:
    """One standard deviation of the noise across the class weight, as an angle."""
    return math.degrees(math.atan(SHARES[angle] / math.sqrt(2)))


def main() -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        draw(left, "Vanilla margin, $L_m$", vanilla, shows_ranges=False)
        draw(middle, "Margin ranking, one rival", ranking, shows_ranges=False)
        draw(right, "Distribution margin, $L_{dm}$", mean_distribution, shows_ranges=True)
        handles = [
            Patch(color=LOSS, label="the loss of an old sample there"),
            Line2D([], [], color=FREE, linewidth=3.4, label=f"where it is at most {NEGLIGIBLE}"),
            Patch(color="#D55E00", **RANGE, label="a class's range: wider with more images"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        OUT.write_bytes(rendered(figure, "svg"))


if __name__ == "__main__":
    main()
