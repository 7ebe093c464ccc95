"""How time grows with images, classes, tasks and exemplars; anything faster than linear is flagged.

    python benchmarks/growth.py --out build/bench/growth.json

herding     20 of n embeddings of 512 numbers
classes     an epoch of balanced's second task, the whole task with one epoch, class means and evaluation,
            for the same number of images of 10, 100 and 1,000 classes, half of them old
tasks       `learn_task` with one epoch, ten tasks of equal size (the first has no old network: the second
            is what others are compared with)
exemplars   renewing the memory and the class means with 20 and 200 exemplars of each class

Each row: how much larger what must be touched is than in the first row of its kind, and how much longer it
takes. Sizes of one kind take turns (tasks follow each other); medians. Where the first size fits into the
processor's cache and the next does not, the step between these two is steeper than any later one.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from measuring import Row, by_turns, option_parser, read_options, record
from workload import BALANCED, CAPTURING, Learning, after_first_task, learning_config, random_task

from medcil.build import build_method
from medcil.methods.memory import herd, renew_memory
from medcil.training.feed import Feed
from medcil.training.inference import class_means, predict_scores
from medcil.training.loop import learn_task

DIM = 512
TOLERANCE = 1.25  # measured ratios scatter
CPU = {"backbone": "resnet8_cifar", "pixels": 32, "images": 2000}
CUDA = {"backbone": "resnet18", "pixels": 64, "images": 8000}


def timed(work: Callable[[], object], device: torch.device) -> float:
    """By the clock: what the CPU does between the kernels counts too."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compared(what: str, touched: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    median = {size: statistics.median(taken) for size, taken in seconds.items()}
    first = next(iter(touched))
    rows: list[Row] = []
    for size, much in touched.items():
        larger, longer = much / touched[first], median[size] / median[first]
        is_flagged = longer > TOLERANCE * larger
        rows.append({"what": what, "size": size, "seconds": median[size], "touched": larger, "time": longer})
        rows[-1]["faster than linear"] = is_flagged
    return rows


def herding(options: argparse.Namespace, device: torch.device) -> list[Row]:
    works = {}
    for n in options.herd:
        embeddings = torch.randn(n, DIM, device=device)
        works[f"{n:,}"] = partial(timed, partial(herd, embeddings, 20), device)
    touched = dict(zip(works, options.herd, strict=True))
    return compared("herding 20", touched, by_turns(works, options.rounds, skip=1))


def classes(options: argparse.Namespace, device: torch.device) -> list[Row]:
    side, method = options.pixels + 4, build_method(BALANCED)
    half = options.images // 2  # in memory, and as many new ones
    learnings = {}
    works: dict[str, dict[str, Callable[[], float]]] = {
        "epoch": {},
        "learn_task": {},
        "class means": {},
        "evaluation": {},
    }
    for n in options.classes:
        config = learning_config(batch=32, device=options.device, memory={"total": half})
        short = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 1})})
        first = random_task(half, n // 2, side=side)
        state = after_first_task(method, config, first, backbone=options.backbone, crop=options.pixels)
        task = random_task(half, n - n // 2, side=side, n_old=n // 2)
        size = f"{n:,} classes"
        learnings[size] = Learning(state, task, method, config)
        works["epoch"][size] = learnings[size].epoch
        after = learn_task(state, task, method, short)
        learn = partial(learn_task, state, task, method, short)
        works["learn_task"][size] = partial(timed, learn, device)
        network = after.network.to(device).to(memory_format=torch.channels_last)
        memory = Feed(after.memory, after.preprocessing, device, config.execution)
        means = partial(class_means, network, memory)
        works["class means"][size] = partial(timed, means, device)
        scores = partial(predict_scores, after, first.test, config.execution)
        works["evaluation"][size] = partial(timed, scores, device)
    touched = {f"{n:,} classes": options.images for n in options.classes}
    rows = []
    for what, sizes in works.items():
        seconds = by_turns(sizes, options.rounds, skip=CAPTURING if what == "epoch" else 1)
        rows += compared(f"{what}, equal number of images", touched, seconds)
    for learning in learnings.values():
        learning.end()
    return rows


def tasks(options: argparse.Namespace) -> list[Row]:
    side, method = options.pixels + 4, build_method(BALANCED)
    config = learning_config(batch=32, device=options.device)
    config = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 1})})
    n_images = options.images // 4
    first = random_task(n_images, 2, side=side)
    state = after_first_task(method, config, first, backbone=options.backbone, crop=options.pixels)
    seconds, touched = {}, {}
    learn_task(state, random_task(n_images, 2, side=side, n_old=2), method, config)  # warms up
    for number in range(2, options.tasks + 1):
        task = random_task(n_images, 2, side=side, n_old=len(state.class_names))
        touched[f"task {number}"] = n_images + len(state.memory)
        began = time.perf_counter()
        state = learn_task(state, task, method, config)
        seconds[f"task {number}"] = [time.perf_counter() - began]
    return compared("learn_task", touched, seconds)


def exemplars(options: argparse.Namespace, device: torch.device) -> list[Row]:
    side, n_classes = options.pixels + 4, 4
    method, config = build_method(BALANCED), learning_config(batch=32, device=options.device)
    few = random_task(90, n_classes, side=side)
    state = after_first_task(method, config, few, backbone=options.backbone, crop=options.pixels)
    network = state.network.to(device).to(memory_format=torch.channels_last)
    new = random_task(n_classes * max(options.quotas), n_classes, side=side).train
    embeddings = torch.randn(max(options.quotas), DIM, device=device)

    def renew(quota: int) -> object:
        no_memory = new.select(torch.empty(0, dtype=torch.int64))
        return renew_memory(no_memory, new, lambda label: embeddings, n_old=0, n_new=n_classes, quota=quota)

    def mean(quota: int) -> object:
        some = new.select(torch.arange(n_classes * quota))
        feed = Feed(some, state.preprocessing, device, config.execution)
        return class_means(network, feed)

    rows = []
    touched = {f"{quota} of each class": quota for quota in options.quotas}
    for what, work in (("renewing the memory", renew), ("class means", mean)):
        works = {
            size: partial(timed, partial(work, q), device)
            for size, q in zip(touched, options.quotas, strict=True)
        }
        rows += compared(what, touched, by_turns(works, options.rounds, skip=1))
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    parser.add_argument("--herd", nargs="+", type=int, default=[2_581, 25_809, 258_090])
    parser.add_argument("--classes", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--quotas", nargs="+", type=int, default=[20, 200])
    parser.add_argument("--images", type=int, default=None, help="of an epoch with 10 to 1,000 classes")
    parser.add_argument("--pixels", type=int, default=None)
    parser.add_argument("--backbone", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, arguments, cpu=CPU, cuda=CUDA)
    device = torch.device(options.device)
    rows = herding(options, device) + classes(options, device) + tasks(options) + exemplars(options, device)
    return record("growth", __doc__, options, rows)


if __name__ == "__main__":
    main()
