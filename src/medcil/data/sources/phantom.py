"""The embedded data set: seven synthetic, lesion-like classes, drawn from a seed in seconds.

No picture shows a patient and no class is a disease. The classes only borrow the codes, the order and the
imbalance of HAM10000 (MEL NV BCC AKIEC BKL DF VASC), so that examples, tests and smoke recipes run with
nothing to download. What a method scores here says nothing about skin lesions.

A class is a point in a space of visual traits (size, border, pigment, vessels, ...). An image draws its
traits around that point, pulled part of the way toward a class it is easily confused with: the overlap
keeps even joint training from perfect scores. Traits absorb light as pigments do (Beer-Lambert), hence
plausible colors.

Every random draw is made in picture units, never in pixels: a larger side shows the same picture sharper.
The same seed gives the same bytes under one version of numpy, and the same distribution under any.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image

from medcil.data.image_table import Dataset, ImageTable, MemoryFiles
from medcil.data.samples import TensorImages
from medcil.data.sources import ham10000
from medcil.errors import RunConflict
from medcil.storage.atomic import write_csv, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_model

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

CODES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
CLASS_NAMES = tuple(f"phantom {code}" for code in CODES)

# HAM10000's training counts 901/5363/398/262/875/94/119 over 5: the same imbalance, 57 to 1.
TRAIN_COUNTS = (180, 1073, 80, 52, 175, 19, 24)
# HAM10000's test counts 212/1342/116/65/224/21/23 over 5, but at least 40 of each class: with 4 images
# of a class, one of them would move the balanced accuracy by almost 4 points.
TEST_COUNTS = (42, 268, 40, 40, 45, 40, 40)

FOLDERS: Mapping[str, Mapping[str, int]] = {
    "first": {"NV": 150, "BKL": 70, "DF": 25},
    "second": {"AKIEC": 60, "VASC": 40},
    "third": {"BCC": 50},
    "eval": dict.fromkeys(("NV", "BKL", "DF", "AKIEC", "VASC", "BCC"), 20),
}
"""Images of each class; what is in a folder has its own patients."""
UNLABELED = 12
SIDE = 64
MANIFEST = "images.csv"


class Traits(NamedTuple):
    """What a lesion looks like; lengths in half picture widths, pigments in optical depth."""

    size: float
    elongation: float
    irregularity: float  # of the border
    softness: float  # of the border
    asymmetry: float  # pigment on one side
    variegation: float  # pigment in patches
    melanin: float
    blood: float
    deep: float  # pigment seen through tissue: blue-gray
    scar: float  # white center
    network: float  # pigment in a mesh
    cysts: float  # small white dots
    scale: float  # white crust
    vessels: float  # thin red lines
    lacunes: float  # red lakes


TYPICAL = {
    "MEL": Traits(0.61, 1.24, 0.23, 0.09, 0.38, 0.45, 1.18, 0.12, 0.24, 0.05, 0.25, 0.10, 0.05, 0.08, 0.0),
    "NV": Traits(0.50, 1.12, 0.09, 0.09, 0.12, 0.15, 0.95, 0.12, 0.03, 0.00, 0.30, 0.03, 0.00, 0.00, 0.0),
    "BCC": Traits(0.52, 1.20, 0.14, 0.14, 0.20, 0.25, 0.18, 0.28, 0.22, 0.12, 0.00, 0.10, 0.12, 0.75, 0.0),
    "AKIEC": Traits(0.56, 1.20, 0.24, 0.22, 0.20, 0.35, 0.28, 0.55, 0.00, 0.05, 0.00, 0.10, 0.60, 0.20, 0.0),
    "BKL": Traits(0.56, 1.22, 0.17, 0.05, 0.22, 0.30, 0.80, 0.12, 0.05, 0.00, 0.05, 0.65, 0.20, 0.00, 0.0),
    "DF": Traits(0.46, 1.10, 0.09, 0.18, 0.10, 0.12, 0.52, 0.26, 0.00, 0.90, 0.30, 0.05, 0.00, 0.05, 0.0),
    "VASC": Traits(0.44, 1.10, 0.12, 0.07, 0.15, 0.20, 0.12, 0.70, 0.15, 0.00, 0.00, 0.00, 0.05, 0.05, 0.9),
}
SPREAD = Traits(0.08, 0.09, 0.05, 0.03, 0.09, 0.09, 0.20, 0.07, 0.06, 0.07, 0.09, 0.09, 0.07, 0.09, 0.1)
LEAST = Traits(0.28, 1.00, 0.02, 0.03, 0.00, 0.00, 0.02, 0.02, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.0)

CONFUSED_WITH = {
    "MEL": ("NV", "BKL"),
    "NV": ("MEL", "DF"),
    "BCC": ("AKIEC", "VASC"),
    "AKIEC": ("BCC", "BKL"),
    "BKL": ("MEL", "AKIEC"),
    "DF": ("NV", "BCC"),
    "VASC": ("BCC", "MEL"),
}
MAX_PULL = 0.42  # of the way to the other class; past 0.5 some images would look more like that one

# Optical depth per unit of melanin, blood and deep pigment, in red, green and blue.
PIGMENTS = np.array([[0.55, 0.95, 1.30], [0.15, 1.05, 0.90], [1.15, 0.80, 0.45]], np.float32)
WHITE = np.array([0.95, 0.90, 0.88], np.float32)
HAIR = np.array([0.16, 0.11, 0.09], np.float32)

Axis = Float32[np.ndarray, "height"]
Plane = Float32[np.ndarray, "height height"]
Color = Float32[np.ndarray, "height height 3"]


def phantom_arrays(
    split: Split, *, side: int = 32, seed: int = 0
) -> tuple[UInt8[np.ndarray, "n 3 side side"], Int64[np.ndarray, " n"]]:
    """Draw all images of a split, class after class; image i depends on (seed, split, i) alone."""
    counts = {"train": TRAIN_COUNTS, "test": TEST_COUNTS}[split]
    labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    images = np.empty((len(labels), 3, side, side), np.uint8)
    for index, label in enumerate(labels):
        images[index] = draw(int(label), image_rng(split, index, seed), side).transpose(2, 0, 1)
    return images, labels


def draw_images(side: int) -> ImageTable:
    """Draw all training and test images."""
    images, labels = zip(*(phantom_arrays(split, side=side) for split in SPLITS), strict=True)
    names = [f"{split}/{i:06d}" for split, part in zip(SPLITS, labels, strict=True) for i in range(len(part))]
    return ImageTable(
        files=MemoryFiles({}),
        names=tuple(names),
        labels=np.concatenate(labels),
        class_names=CLASS_NAMES,
        is_test=np.repeat([False, True], [len(part) for part in labels]),
        pixels=TensorImages(torch.from_numpy(np.concatenate(images))),
    )


def image_rng(split: Split, index: int, seed: int) -> np.random.Generator:
    key = [SPLITS.index(split), index, seed]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def draw(label: int, rng: np.random.Generator, side: int) -> UInt8[np.ndarray, "side side 3"]:
    """Draw one picture of the class; the generator decides everything else."""
    traits = _draw_traits(CODES[label], rng)
    # Two samples per pixel: hairs and vessels are thinner than a pixel of a small picture.
    axis = ((np.arange(2 * side) + 0.5) / side - 1).astype(np.float32)
    outline = _outline(traits, rng, axis)
    color = np.exp(-_skin(rng, axis) - _absorption(traits, outline, rng, axis))
    color = color + _white(traits, outline, rng, axis)[..., None] * (WHITE - color)
    color = _bubbles(_hairs(color, rng, axis), rng, axis) * _light(rng, axis)
    pixels: Color = color.reshape(side, 2, side, 2, 3).mean(axis=(1, 3)).clip(0, 1)
    return (255 * pixels + 0.5).astype(np.uint8)


def _draw_traits(code: str, rng: np.random.Generator) -> Traits:
    other = CONFUSED_WITH[code][rng.integers(2)]
    pull = MAX_PULL * rng.beta(1, 2)
    center = (1 - pull) * np.array(TYPICAL[code]) + pull * np.array(TYPICAL[other])
    drawn = center + np.array(SPREAD) * rng.standard_normal(len(SPREAD))
    return Traits(*np.maximum(drawn, LEAST).tolist())


class _Outline(NamedTuple):
    x: float
    y: float
    along: Plane  # distance from the center along the long axis, in lesion sizes
    radius: Plane  # of the ellipse through each point, in lesion sizes
    inside: Plane  # 1 in the lesion, 0 on the skin


def _outline(traits: Traits, rng: np.random.Generator, axis: Axis) -> _Outline:
    x, y = rng.uniform(-0.22, 0.22), rng.uniform(-0.22, 0.22)
    u, v = _rotated(rng.uniform(0, 1), axis - x, axis - y)
    stretch = math.sqrt(traits.elongation)
    radius = np.hypot(u / stretch, v * stretch) / traits.size
    border = 1 + traits.irregularity * _field(rng, axis, 4.5)
    return _Outline(x, y, u / traits.size, radius, _step((border - radius) / traits.softness))


def _absorption(traits: Traits, outline: _Outline, rng: np.random.Generator, axis: Axis) -> Color:
    patches = 1 + traits.variegation * _field(rng, axis, 5.0) + traits.asymmetry * outline.along
    mesh = 1 + 1.5 * traits.network * (_ridges(_field(rng, axis, 21.0), 0.7) - 0.5)
    veil = traits.deep * (0.4 + 1.6 * _step(2 * _field(rng, axis, 4.0)))
    vessels = traits.vessels * _ridges(_field(rng, axis, 7.0), 0.18)
    lakes = traits.lacunes * _dots(traits, outline, rng, axis, n_dots=8, radius=0.12)
    melanin = traits.melanin * np.maximum(patches, 0.12) * mesh
    blood = traits.blood * (1 + 0.3 * _field(rng, axis, 6.0)) + 1.3 * vessels + 1.5 * lakes
    layers = np.stack([melanin, blood, veil + 0.35 * lakes], axis=-1)
    return (outline.inside[..., None] * layers) @ PIGMENTS


def _white(traits: Traits, outline: _Outline, rng: np.random.Generator, axis: Axis) -> Plane:
    """The share of each point that reflects light before any pigment sees it."""
    scar = traits.scar * np.exp(-((outline.radius / 0.48) ** 2))
    cysts = traits.cysts * _dots(traits, outline, rng, axis, n_dots=11, radius=0.06)
    flakes = _field(rng, axis, 11.0) + 0.8 * _field(rng, axis, 24.0)
    crust = traits.scale * _step(1.8 * (flakes - 0.6))
    return outline.inside * np.minimum(0.8 * (scar + cysts + crust), 0.9)


def _field(rng: np.random.Generator, axis: Axis, frequency: float, n_waves: int = 10) -> Plane:
    """A smooth random surface of unit variance; cos(a+b) splits it into two small matrix products."""
    direction, phase = rng.uniform(0, 2 * np.pi, (2, n_waves))
    k = frequency * rng.uniform(0.7, 1.3, n_waves)
    across = (np.outer(axis, k * np.cos(direction)) + phase).astype(np.float32)
    down = np.outer(axis, k * np.sin(direction)).astype(np.float32)
    waves: Plane = np.cos(down) @ np.cos(across).T - np.sin(down) @ np.sin(across).T
    return waves * math.sqrt(2 / n_waves)


def _step(x: Plane) -> Plane:
    slope: Plane = np.tanh(x)
    return 0.5 + 0.5 * slope


def _ridges(field: Plane, width: float) -> Plane:
    return np.exp(-((field / width) ** 2))


def _rotated(turn: float, x: Axis, y: Axis) -> tuple[Plane, Plane]:
    c, s = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
    return c * x[None, :] + s * y[:, None], c * y[:, None] - s * x[None, :]


def _dots(
    traits: Traits, outline: _Outline, rng: np.random.Generator, axis: Axis, *, n_dots: int, radius: float
) -> Plane:
    reach = traits.size * np.sqrt(rng.uniform(0, 0.8, n_dots))
    direction = rng.uniform(0, 2 * np.pi, n_dots)
    size = radius * rng.uniform(0.6, 1.3, n_dots)
    x = (axis[:, None] - outline.x - reach * np.cos(direction)) / size
    y = (axis[:, None] - outline.y - reach * np.sin(direction)) / size
    return np.minimum(1.4 * np.exp(-(y**2)) @ np.exp(-(x**2)).T, 1).astype(np.float32)


def _skin(rng: np.random.Generator, axis: Axis) -> Color:
    tone, flush = rng.uniform(0.10, 0.42), rng.uniform(0.05, 0.20)
    melanin = tone * (1 + 0.10 * _field(rng, axis, 3.0) + 0.06 * _field(rng, axis, 30.0))
    blood = flush * (1 + 0.22 * _field(rng, axis, 4.0))
    return np.stack([melanin, blood], axis=-1) @ PIGMENTS[:2] + 0.06


def _hairs(color: Color, rng: np.random.Generator, axis: Axis) -> Color:
    n_hairs = min(rng.poisson(0.9), 5)
    for turn, shift, bend, thickness, shade in rng.uniform(size=(n_hairs, 5)).tolist():
        u, v = _rotated(turn, axis, axis)
        line = v - (1.8 * shift - 0.9) - (0.5 * bend - 0.25) * u**2
        cover = 0.85 * _ridges(line, 0.014 + 0.016 * thickness)
        color = color + cover[..., None] * (HAIR * (1 + 2 * shade) - color)
    return color


def _bubbles(color: Color, rng: np.random.Generator, axis: Axis) -> Color:
    n_bubbles = min(rng.poisson(0.6), 4)
    for x, y, size in rng.uniform(size=(n_bubbles, 3)).tolist():
        radius = 0.05 + 0.10 * size
        distance = np.hypot(axis[None, :] - (2 * x - 1), axis[:, None] - (2 * y - 1))
        rim = _ridges(distance - radius, 0.025) + 0.25 * _step((radius - distance) / 0.02)
        color = color + (0.45 * rim)[..., None] * (WHITE - color)
    return color


def _light(rng: np.random.Generator, axis: Axis) -> Color:
    exposure, vignette = rng.uniform(0.88, 1.08), rng.uniform(0, 0.16)
    slope_x, slope_y = rng.normal(0, 0.05, 2).tolist()
    cast = rng.normal(1, 0.025, 3).astype(np.float32)
    across, down = slope_x * axis - vignette * axis**2, slope_y * axis - vignette * axis**2
    shade: Plane = exposure + across[None, :] + down[:, None]
    return shade[..., None] * cast


def write_phantom_images(out: Path, *, seed: int = 0) -> dict[str, int]:
    """Write folders of images with a manifest each, and `new` without labels; return how many are in each.

    They appear all at once: a call that is interrupted leaves nothing at `out`.
    """
    refuse_within_model(out)
    if out.exists():
        raise RunConflict(f"{out} is there already and is left as it is. Give another --out.")
    check_writable(out.parent)
    part = out.with_name(f".{out.name}.part")
    with writing(out):
        shutil.rmtree(part, ignore_errors=True)
        counts = _write(part, seed)
        part.rename(out)
    return counts


def _write(root: Path, seed: int) -> dict[str, int]:
    """Draw one or two images of each patient. Names of files tell nothing about patients."""
    rng = np.random.default_rng(seed)
    counts, n_drawn, n_patients = {}, 0, 0
    for folder, classes in FOLDERS.items():
        rows = list[tuple[object, ...]]()
        for label, n_images in classes.items():
            left, age, sex = 0, 0, ""
            for number in range(1, n_images + 1):
                if not left:
                    n_patients += 1
                    left, age, sex = int(rng.integers(1, 3)), int(rng.integers(18, 90)), "fm"[rng.integers(2)]
                left -= 1
                rows.append((f"{label}/{number:03d}.png", label, f"P{n_patients:03d}", age, sex))
                _save(root / folder / f"{label}/{number:03d}.png", label, n_drawn, seed)
                n_drawn += 1
        write_csv(root / folder / MANIFEST, ("path", "label", "patient", "age", "sex"), rows)
        counts[folder] = len(rows)
    learned = [label for folder, classes in FOLDERS.items() if folder != "eval" for label in classes]
    for number in range(UNLABELED):
        label = learned[number % len(learned)]
        _save(root / "new" / f"{number + 1:03d}.png", label, n_drawn + number, seed)
    return {**counts, "new": UNLABELED}


def _save(path: Path, label: str, index: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw(CODES.index(label), image_rng("train", index, seed), SIDE)).save(path)


DATASET = Dataset(
    description="Synthetic lesion-like drawings with HAM10000's imbalance; nothing to download",
    class_names=CLASS_NAMES,
    orders=ham10000.DATASET.orders,
    protocols=("3-2", "3-1"),
    draw=draw_images,
)
