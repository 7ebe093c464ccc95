"""An update with two classes: `medcil update` with `analytic` as it comes, with its variants, and `balanced`.

    python benchmarks/update.py [--images 250] [--pixels 64]

Every method first trains a model of two classes, which is not measured, for a few epochs. Then the whole
command is: start-up, reading, learning, the report; in as many epochs as the update chooses by itself. The
images are synthetic.
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

from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.settings import settings_to_update
from medcil.data.sources.phantom import CODES, draw, image_rng

ANALYTIC = ("--method", "analytic")
TWO_NETWORKS = ("--set", "method.pretrained=true")
EIGHT_VIEWS = ("--set", "data.views=8")
VARIANTS = {
    "analytic": ANALYTIC,
    "analytic, two networks": (*ANALYTIC, *TWO_NETWORKS),
    "analytic, 8 views": (*ANALYTIC, *EIGHT_VIEWS),
    "analytic, two networks, 8 views": (*ANALYTIC, *TWO_NETWORKS, *EIGHT_VIEWS),
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
        rows: list[Row] = [
            {"method": name, **_time_update(Path(folder), images, [*first, *VARIANTS[name]])}
            for name in options.variants
        ]
    slowest = next((row["seconds"] for row in rows if row["method"] == "balanced"), None)
    rows = [{**row, "times faster": slowest and slowest / row["seconds"]} for row in rows]
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


def _time_update(folder: Path, images: Path, options: Sequence[str]) -> Row:
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    _medcil("train", str(images / "first"), "--out", str(model), *options)
    facts = ModelFolder(model).version().provenance()
    counts = list(facts["images"].values())  # as many as of the new classes
    # The few epochs of the first classes were asked for, and an update would inherit them.
    epochs = settings_to_update(facts["settings"], (), counts, counts, {})[0].training.epochs
    began = time.perf_counter()
    _medcil("update", str(model), str(images / "second"), "--epochs", str(epochs))
    seconds = time.perf_counter() - began
    is_trained = ModelFolder(model).version().provenance()["images_per_second"] is not None
    return {"epochs": epochs if is_trained else 0, "seconds": seconds}


def _medcil(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "medcil", *words], check=True, capture_output=True)


if __name__ == "__main__":
    main()
