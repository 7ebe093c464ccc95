"""On a GPU: captured steps train as plain ones do, streamed images as resident ones, and what cannot be
captured falls back.

    python proofs/captured_step.py                    all methods, float32 and bfloat16; a minute or two
    python proofs/captured_step.py --augmentation dihedral --methods balanced

Every method learns a second task from the same first one. Printed is the largest relative difference of any
tensor of the network, ‖a - b‖ / ‖b‖: 0 means the same bits.
"""

import argparse
import warnings
from typing import get_args

import torch

from medcil.config import Augmentation, LearningConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.methods import METHODS
from medcil.methods.protocol import Batch, Method, WithTerms
from medcil.models.network import NetworkSpec
from medcil.training import feed as feed_module
from medcil.training.environment import prepare_machine
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

SIDE, CROP = 72, 64


def random_task(n: int, n_classes: int, n_old: int) -> Task:
    random = torch.Generator().manual_seed(n_old)
    pixels = torch.randint(256, (n, 3, SIDE, SIDE), dtype=torch.uint8, generator=random)
    labels = torch.randint(n_old, n_old + n_classes, (n,), generator=random)
    samples = Samples(TensorImages(pixels), labels)
    names = tuple(str(n_old + i) for i in range(n_classes))
    return Task(class_names=names, n_old=n_old, train=samples, test=samples)


def config(epochs: int, **execution: object) -> LearningConfig:
    return LearningConfig.model_validate(
        {"training": {"epochs": epochs, "batch_size": 16}, "execution": execution}
    )


def first_task(method: Method, settings: LearningConfig, augmentation: Augmentation) -> State:
    spec = NetworkSpec("resnet18", last_relu=False, learn_scale=True)
    preprocessing = Preprocessing(side=SIDE, crop=CROP, augmentation=augmentation)
    state = initial_state(spec, preprocessing, seed=0)
    return learn_task(state, random_task(96, 3, 0), method, settings)


def second_task(state: State, method: Method, settings: LearningConfig) -> State:
    prepare_machine(settings.execution)
    return learn_task(state, random_task(100, 2, 3), method, settings)


def difference(one: State, other: State) -> float:
    pairs = zip(one.network.state_dict().values(), other.network.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs)


def asks_for_a_value(batch: Batch) -> torch.Tensor:
    """A term that no graph can capture, and that changes nothing."""
    return batch.out.logits.sum() * 0 + batch.labels.float().mean().item() * 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--augmentation", choices=get_args(Augmentation), default="crop")
    options = parser.parse_args()
    feed_module.HALF_BYTES = 40 * 3 * SIDE**2  # so that a streamed epoch passes through several chunks
    worst = 0.0
    for precision in ("float32", "auto"):
        where = {"device": options.device, "precision": precision}
        captured, plain, streamed = (
            config(options.epochs, **where, **how)
            for how in ({}, {"capture": False}, {"resident": False, "workers": 3})
        )
        for name in options.methods:
            method = METHODS[name]()
            state = first_task(method, captured, options.augmentation)
            once = second_task(state, method, captured)
            others = {
                "plain": second_task(state, method, plain),
                "again": second_task(state, method, captured),
                "streamed": second_task(state, method, streamed),
            }
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                others["fallen back"] = second_task(
                    state, WithTerms(method, {"nothing": asks_for_a_value}), captured
                )
            found = {way: difference(once, other) for way, other in others.items()}
            worst = max(worst, *found.values())
            said = ", ".join(f"{way} {value:.1e}" for way, value in found.items())
            print(f"{precision:8s} {name:10s} captured against {said}; {len(caught)} warnings", flush=True)
    print(f"Largest difference: {worst:.1e}")


if __name__ == "__main__":
    main()
