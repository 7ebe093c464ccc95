"""Streaming images through a moving window beside holding them all on the device, images/s of an epoch.

    python benchmarks/streaming.py --root HAM10000.tar.gz --out build/bench/streaming.json

`execution.resident=false` beside `true`, the same batches, once with images in memory and once with a real
prepared store, read by memory map: of HAM10000 where a root is given, else of pictures drawn and written as
PNG. There are more images than the window holds at once. The store's files have just been written, so the
system may still have them in its memory. Epochs take turns; "same losses" compares the last epochs' losses.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from measuring import Row, by_turns, option_parser, read_options, record
from reference import write_pictures
from workload import BALANCED, CAPTURING, Learning, after_first_task, learning_config, random_pixels, task_of

from medcil.build import build_method
from medcil.data.cache import is_cache, open_cache, prepare
from medcil.data.samples import ImageSource, Selection, TensorImages
from medcil.data.sources.folder import read_own
from medcil.data.sources.ham10000 import read_table
from medcil.training import feed as feed_module
from medcil.training.state import State

CPU = {"pixels": 32, "images": 384, "window_mb": 0.25, "backbone": "resnet8_cifar"}
CUDA = {"pixels": 224, "images": 6000, "backbone": "resnet18"}


def stored_images(options: argparse.Namespace, side: int, folder: Path) -> ImageSource:
    """Of a prepared store; as many as told, or all there are."""
    if options.root is not None and is_cache(options.root):
        images = open_cache(options.root).pixels
    else:
        if options.root is not None:
            catalog = read_table(options.root)
        else:
            for name in ("a", "b"):
                write_pictures(folder / "png" / name, options.images // 2, size=(side, side), kind="png")
            catalog = read_own(folder / "png")
        prepare(catalog, folder / "store", side=side)
        images = open_cache(folder / "store").pixels
    return Selection(images, torch.arange(min(options.images, len(images))))


def measure(source: str, images: ImageSource, state: State, batch: int, options: argparse.Namespace) -> Row:
    task = task_of(images, 2, n_old=len(state.class_names))
    method = build_method(BALANCED)
    learnings = {}
    for way, resident in (("resident", True), ("streamed", False)):
        config = learning_config(
            batch=batch, device=options.device, resident=resident, workers=options.workers
        )
        learnings[way] = Learning(state, task, method, config)
    works = {way: learning.epoch for way, learning in learnings.items()}
    seconds = by_turns(works, options.rounds, skip=CAPTURING)
    losses = [learning.losses for learning in learnings.values()]
    for learning in learnings.values():
        learning.end()
    n_images = len(images) + len(state.memory)
    megabytes = len(images) * 3 * images.side**2 / 2**20
    rates = {way: n_images / statistics.median(taken) for way, taken in seconds.items()}
    return {
        "images from": source,
        "pixels": options.pixels,
        "batch": batch,
        "images an epoch": n_images,
        "MiB": round(megabytes),
        "windows full": megabytes * 2**20 / (2 * feed_module.HALF_BYTES),
        "resident": rates["resident"],
        "streamed": rates["streamed"],
        "streamed/resident": rates["streamed"] / rates["resident"],
        "same losses": losses[0] == losses[1],
    }


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    parser.add_argument("--root", type=Path, default=None, help="a prepared store, or HAM10000")
    parser.add_argument("--pixels", type=int, default=None)
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--images", type=int, default=None, help="new ones of an epoch")
    parser.add_argument(
        "--window-mb", type=float, default=None, help="of half a window; unset: the product's"
    )
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--backbone", default=None)
    parser.add_argument("--rounds", type=int, default=4)
    options = read_options(parser, arguments, cpu=CPU, cuda=CUDA)
    usual = feed_module.HALF_BYTES
    if options.window_mb is not None:
        feed_module.HALF_BYTES = int(options.window_mb * 2**20)
    side = round(options.pixels * 256 / 224)
    method, config = build_method(BALANCED), learning_config(batch=32, device=options.device)
    first = task_of(TensorImages(random_pixels(90, side)), 3)
    state = after_first_task(method, config, first, backbone=options.backbone, crop=options.pixels)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sources = {
                "memory": TensorImages(random_pixels(options.images, side)),
                "prepared store": stored_images(options, side, Path(folder)),
            }
            rows = [
                measure(name, images, state, batch, options)
                for batch in options.batches
                for name, images in sources.items()
            ]
    finally:
        feed_module.HALF_BYTES = usual
    return record("streaming", __doc__, options, rows)


if __name__ == "__main__":
    main()
