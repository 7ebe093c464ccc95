"""Random images as tasks, and learning them epoch by epoch, so that several ways can take turns."""

import threading
import time
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from medcil.config import LearningConfig
from medcil.data.samples import ImageSource, Samples, TensorImages
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.methods.protocol import Method
from medcil.models.network import NetworkSpec
from medcil.training.checkpoint import Progress
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

DIFFERENT = 512  # images; a larger number repeats them, which costs the same and is drawn faster
BALANCED: dict[str, Any] = {"name": "balanced", "sampler": None}
"""Exemplars among the new images: a batch has the size asked for, and an epoch every image once."""
CAPTURING = 2  # epochs at the beginning that are not timed


@cache
def random_pixels(n: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(256, (min(n, DIFFERENT), 3, side, side), dtype=torch.uint8, generator=generator)
    return some.repeat(-(-n // len(some)), 1, 1, 1)[:n]


def task_of(images: ImageSource, n_classes: int, *, n_old: int = 0) -> Task:
    """New classes that take turns among the images."""
    samples = Samples(images, torch.arange(len(images)) % n_classes + n_old)
    names = tuple(f"class {n_old + c}" for c in range(n_classes))
    return Task(class_names=names, n_old=n_old, train=samples, test=samples)


def random_task(n_images: int, n_classes: int, *, side: int, n_old: int = 0) -> Task:
    return task_of(TensorImages(random_pixels(n_images, side)), n_classes, n_old=n_old)


def learning_config(
    *, batch: int, device: str, memory: dict[str, int] | None = None, **execution: object
) -> LearningConfig:
    """Rates so low that random labels do not make it diverge; as many epochs as anyone will time."""
    return LearningConfig.model_validate(
        {
            "memory": memory or {"per_class": 20},
            "training": {
                "epochs": 1000,
                "batch_size": batch,
                "learning_rates": {"classifier": 1e-3, "backbone": 1e-5},
            },
            "first_task": {"epochs": 1},
            "execution": {"device": device, **execution},
        }
    )


def after_first_task(
    method: Method, config: LearningConfig, task: Task, *, backbone: str, crop: int
) -> State:
    spec = NetworkSpec(backbone=backbone, last_relu=False, learn_scale=True)
    initial = initial_state(spec, Preprocessing(side=task.train.images.side, crop=crop), seed=0)
    return learn_task(initial, task, method, config)


class _Enough(Exception):
    """Ends learning in the middle."""


class Learning:
    """`learn_task` in a thread that waits at the end of every epoch of the phase "learn".

    Only one thread computes at any time. The end of an epoch is where the loop has waited for the device, so
    the time from one end to the next is an epoch's, with everything that belongs to it.
    """

    def __init__(self, state: State, task: Task, method: Method, config: LearningConfig) -> None:
        self.losses: dict[str, float] = {}
        self._arguments = (state, task, method, config)
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._learn, daemon=True)
        self._thread.start()

    def epoch(self) -> float:
        """Trains one epoch; its seconds. The first also prepares everything."""
        began = time.perf_counter()
        self._go.release()
        self._arrived.acquire()
        if self._error is not None:
            raise self._error
        return time.perf_counter() - began

    def end(self) -> None:
        self._is_over = True
        self._go.release()
        self._thread.join()
        del self._arguments

    def _learn(self) -> None:
        self._go.acquire()
        if self._is_over:
            return
        try:
            learn_task(*self._arguments, watch=self._watch)
            raise RuntimeError("all epochs are over before the benchmark is")
        except _Enough:
            pass
        except BaseException as error:
            self._error = error
        self._arrived.release()

    def _watch(self, progress: Progress) -> None:
        if progress.losses is None or progress.phase != "learn":
            return
        self.losses = progress.losses
        self._arrived.release()
        self._go.acquire()
        if self._is_over:
            raise _Enough


def smooth_picture(width: int, height: int, number: int) -> Image.Image:
    """Random blots, as large as a lesion's parts."""
    few = np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC)


def grainy_picture(width: int, height: int, number: int) -> Image.Image:
    """The same with the grain of a photograph: a JPEG of some 150 kB at 600 x 450 and quality 95."""
    smooth = np.asarray(smooth_picture(width, height, number), dtype=np.float32)
    grain = np.random.default_rng(number).normal(0, 8, (height, width, 1))
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
