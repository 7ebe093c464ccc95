"""An update with two classes: `medcil update` with the default method, with its variants, and with balanced.

    python benchmarks/update.py [--images 250] [--pixels 64]

Every method first trains a model of two classes, which is not measured. Then the whole command is: start-up,
reading, learning, the report. The images are synthetic.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import Row, option_parser, read_options, record
from PIL import Image

from medcil.data.sources.phantom import CODES, draw, image_rng

ANALYTIC = ("--method", "analytic")
VARIANTS = {
    "analytic": ANALYTIC,
    "analytic, one network": (*ANALYTIC, "--set", "method.pretrained=false"),
    "analytic, 8 views": (*ANALYTIC, "--set", "data.views=8"),
    "analytic, one network, 8 views": (
        *ANALYTIC,
        "--set",
        "method.pretrained=false",
        "--set",
        "data.views=8",
    ),
    "balanced": ("--method", "balanced"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--images", type=int, default=250, help="of each new class")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2, help="of the first classes, which are not measured")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = read_options(parser, arguments)
    with tempfile.TemporaryDirectory() as folder:
        images = _images(Path(folder), per_class=options.images, pixels=options.pixels)
        first = ["--backbone", options.backbone, "--epochs", str(options.epochs)]
        seconds = {
            name: _seconds_of_update(Path(folder), images, [*first, *VARIANTS[name]])
            for name in options.variants
        }
    slowest = seconds.get("balanced")
    rows: list[Row] = [
        {"method": name, "seconds": taken, "times faster": slowest and slowest / taken}
        for name, taken in seconds.items()
    ]
    record("update", __doc__, options, rows)


def _images(folder: Path, *, per_class: int, pixels: int) -> Path:
    """Draw a folder of two classes, and one of two more."""
    for label, code in enumerate(CODES[:4]):
        of_class = folder / "images" / ("first" if label < 2 else "second") / code
        of_class.mkdir(parents=True)
        for number in range(per_class):
            picture = draw(label, image_rng("train", label * per_class + number, 0), pixels)
            Image.fromarray(picture).save(of_class / f"{number}.png")
    return folder / "images"


def _seconds_of_update(folder: Path, images: Path, options: Sequence[str]) -> float:
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    _medcil("train", str(images / "first"), "--out", str(model), *options)
    began = time.perf_counter()
    _medcil("update", str(model), str(images / "second"))  # it inherits the options
    return time.perf_counter() - began


def _medcil(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "medcil", *words], check=True, capture_output=True)


if __name__ == "__main__":
    main()
