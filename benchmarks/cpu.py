"""Training on two CPU cores: the product beside a bare PyTorch loop that does the same work.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu.py --out build/bench/cpu.json

The work: the second task of balanced (two classes after three), ResNet-18, images held in memory as bytes,
a crop and a flip of its own for each, both networks' forwards, the three losses, clamp, SGD. The bare loop
calls medcil.losses directly, once in each of PyTorch's memory layouts. Epochs take turns.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from measuring import Row, by_turns, option_parser, read_options, record
from torch import nn
from workload import BALANCED, CAPTURING, Learning, after_first_task, learning_config, random_task

from medcil import losses
from medcil.build import build_method
from medcil.data.stream import Task
from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from medcil.training.state import State

LAYOUTS = {"usual": torch.contiguous_format, "channels last": torch.channels_last}


class BareLoop:
    def __init__(self, state: State, task: Task, batch: int, layout: torch.memory_format) -> None:
        self.crop, self.batch, self.layout, self.n_old = state.preprocessing.crop, batch, layout, task.n_old
        samples = task.train + state.memory
        self.pixels, self.labels = samples.read_all(), samples.labels
        self.old = copy.deepcopy(state.network).eval().to(memory_format=layout)
        self.network = copy.deepcopy(state.network).requires_grad_()
        self.network.grow(torch.randn(task.n_new, self.network.classifier.dim))
        self.network.to(memory_format=layout)
        self.drawn = samples.class_counts(task.n_seen)
        new_counts = task.train.class_counts(task.n_seen)[task.n_old :]
        self.inherent = torch.cat([state.inherent_counts, new_counts])
        self.parameters = [p for group in self.network.every_parameter().values() for p in group]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-5, momentum=0.9, weight_decay=5e-4)
        self.mean, self.std = (torch.tensor(v).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))

    def epoch(self) -> float:
        began, total = time.perf_counter(), 0.0
        self.network.train()
        for chosen in torch.randperm(len(self.pixels)).split(self.batch):
            loss = self._loss(self._images(chosen), self.labels[chosen])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(self.parameters, 5.0)
            self.optimizer.step()
            total += loss.item()
        return time.perf_counter() - began

    def _images(self, chosen: torch.Tensor) -> torch.Tensor:
        slack = self.pixels.shape[-1] - self.crop
        corners = torch.randint(slack + 1, (len(chosen), 2)).tolist()
        flips = (torch.rand(len(chosen)) < 0.5).tolist()
        crops = []
        for index, (top, left), flip in zip(chosen.tolist(), corners, flips, strict=True):
            crop = self.pixels[index, :, top : top + self.crop, left : left + self.crop]
            crops.append(crop.flip(2) if flip else crop)
        images = (torch.stack(crops).float() / 255 - self.mean) / self.std
        return images.contiguous(memory_format=self.layout)

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out, weights = self.network(images), self.network.classifier.class_weights
        with torch.no_grad():
            old_logits = self.old(images).logits
        return (
            losses.cil_balanced_cross_entropy(out.logits, labels, self.drawn, n_old=self.n_old, alpha=0.5)
            + 0.1
            * losses.distribution_margin(
                out.embedding,
                weights,
                labels,
                self.inherent,
                n_old=self.n_old,
                margin=0.4,
                noise=torch.randn_like(weights),
            )
            + 0.1 * losses.logit_distillation(out.logits, old_logits, kind="l1")
        )


def in_a_thread(work: Callable[[], float]) -> Callable[[], float]:
    """Of its own, as `Learning` has one: a thread has its own helpers to compute with."""
    thread = ThreadPoolExecutor(1)
    return lambda: thread.submit(work).result()


def measure(options: argparse.Namespace) -> list[Row]:
    method = build_method(BALANCED)
    config = learning_config(batch=options.batch, device="cpu", threads=options.threads)
    side = round(options.pixels * 9 / 8)
    size = {"backbone": options.backbone, "crop": options.pixels}
    state = after_first_task(method, config, random_task(90, 3, side=side), **size)
    n_new = max(options.steps * options.batch - len(state.memory), options.batch)
    task = random_task(n_new, 2, side=side, n_old=3)
    learning = Learning(state, task, method, config)
    works: dict[str, Callable[[], float]] = {"medcil": learning.epoch}
    for name, layout in LAYOUTS.items():
        works[name] = in_a_thread(BareLoop(state, task, options.batch, layout).epoch)
    seconds = by_turns(works, options.rounds, skip=CAPTURING)
    learning.end()
    n_images = n_new + len(state.memory)
    rates = {name: n_images / statistics.median(taken) for name, taken in seconds.items()}
    return [
        {
            "layout of the bare loop": name,
            "threads": torch.get_num_threads(),
            "images an epoch": n_images,
            "medcil": rates["medcil"],
            "bare loop": rates[name],
            "medcil/bare": statistics.median(
                bare / own for bare, own in zip(seconds[name], seconds["medcil"], strict=True)
            ),
        }
        for name in LAYOUTS
    ]


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="batches of an epoch")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--rounds", type=int, default=5)
    options = read_options(parser, arguments)
    options.device = "cpu"
    return record("cpu", __doc__, options, measure(options))


if __name__ == "__main__":
    main()
