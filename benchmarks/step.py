"""An incremental step, images/s: the product beside itself uncaptured, the network alone, and a usual loop.

    python benchmarks/step.py --out build/bench/step.json

medcil     `learn_task` on the second task (two classes after three), random images held in memory
plain      the same with execution.capture=false
ceiling    forward, cross-entropy and backward of the parameters that the method moves, and the old network's
           forward where the method needs it: resident images, one captured graph, nothing else
reference  JPEG files of 600 x 450, DataLoader, Pillow, torchvision.transforms, float32, SGD, loss.item();
           cross-entropy and distillation, beside the method balanced at the smallest batch; by its number of
           workers, of which the published benchmark's code has 4

All of them take turns, an epoch each; the medians of the epochs after the second count. Where a method's
epochs alternate (lo2ln), the mean of both kinds. All ResNet-18 with the same cuDNN settings.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from ceiling import Ceiling
from measuring import Row, by_turns, markdown_table, option_parser, read_options, record
from reference import ReferenceLoop, write_pictures
from workload import BALANCED, CAPTURING, Learning, after_first_task, learning_config, random_task

from medcil.build import build_method
from medcil.methods.protocol import Method
from medcil.training.state import State

N_FIRST, N_NEW = 3, 2
METHODS = ("balanced", "ucir", "podnet", "der", "lo2ln", "icarl", "finetune")
CPU = {"methods": ["balanced"], "batches": [32], "pixels": 64, "steps": 8, "files": 128, "workers": [2]}
CUDA = {
    "methods": METHODS,
    "batches": [32, 128, 512],
    "pixels": 224,
    "steps": 64,
    "files": 1500,
    "workers": [4, 8],
}


def stored_side(pixels: int) -> int:
    return round(pixels * 256 / 224)


def epoch_seconds(seconds: Sequence[float], kinds: int) -> float:
    return statistics.mean(statistics.median(seconds[kind::kinds]) for kind in range(kinds))


def measure(
    name: str, method: Method, state: State, batch: int, options: argparse.Namespace, jpegs: list[Path]
) -> Row:
    device = torch.device(options.device)
    n_steps = max(1, min(options.steps, options.most_images // batch))
    n_new = max(n_steps * batch - len(state.memory), batch)
    task = random_task(n_new, N_NEW, side=state.preprocessing.side, n_old=N_FIRST)
    ceiling = Ceiling(state, method, N_NEW, batch=batch, device=device)
    n_images = n_new if ceiling.phase.part == "new" else n_new + len(state.memory)
    kinds = len(ceiling.passes)
    with ExitStack() as ends:

        def learning(*, capture: bool) -> Callable[[], float]:
            config = learning_config(batch=batch, device=options.device, capture=capture)
            started = Learning(state, task, method, config)
            ends.callback(started.end)
            return started.epoch

        works: dict[str, Callable[[], float]] = {"medcil": learning(capture=True)}
        if device.type == "cuda":
            works["plain"] = learning(capture=False)
        works["ceiling"] = lambda: ceiling.pass_seconds(n_steps) / batch
        for workers in options.workers if jpegs else ():
            loop = ReferenceLoop(state, jpegs, batch=batch, workers=workers, device=device)
            works[f"reference ({workers})"] = loop.epoch
        rounds = -(-options.rounds // kinds) * kinds
        seconds = by_turns(works, rounds, skip=CAPTURING)
    rates = {
        way: n_images / epoch_seconds(taken, kinds)
        for way, taken in seconds.items()
        if way in ("medcil", "plain")
    }
    rates["ceiling"] = 1 / statistics.median(seconds["ceiling"])
    references = [f"reference ({workers})" for workers in options.workers]
    rates |= {way: len(jpegs) / statistics.median(seconds[way]) for way in references if way in seconds}
    row: Row = {"method": name, "pixels": options.pixels, "batch": batch, "images an epoch": n_images}
    for way in ("medcil", "plain", "ceiling", *references):
        row[way] = rates.get(way)
        if way != "medcil":
            row[f"medcil/{way}"] = rates["medcil"] / rates[way] if way in rates else None
    return row


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    parser.add_argument("--methods", nargs="+", default=None, choices=METHODS)
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument(
        "--pixels", type=int, default=None, help="of the crop; stored images are 8/7 as large"
    )
    parser.add_argument("--steps", type=int, default=None, help="batches of an epoch")
    parser.add_argument(
        "--most-images", type=int, default=4096, help="of an epoch, however large its batches"
    )
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--files", type=int, default=None, help="JPEG files of the reference; 0: leave it out"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=None, help="of the reference's DataLoader")
    options = read_options(parser, arguments, cpu=CPU, cuda=CUDA)
    notes = [] if options.device == "cuda" else ["no GPU: nothing is captured, and plain is left out"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        jpegs = write_pictures(Path(folder), options.files) if "balanced" in options.methods else []
        for name in options.methods:
            method = build_method(BALANCED if name == "balanced" else {"name": name})
            config = learning_config(batch=32, device=options.device)
            first = random_task(30 * N_FIRST, N_FIRST, side=stored_side(options.pixels))
            state = after_first_task(method, config, first, backbone=options.backbone, crop=options.pixels)
            for batch in options.batches:
                is_beside = name == "balanced" and batch == min(options.batches)
                rows.append(measure(name, method, state, batch, options, jpegs if is_beside else []))
                print(markdown_table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    return record("step", __doc__, options, rows, notes)


if __name__ == "__main__":
    main()
