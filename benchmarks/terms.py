"""What the loss terms cost: the step of balanced with its three losses, beside one with a plain sum instead.

    python benchmarks/terms.py --out build/bench/terms.json

Both are the product's own step (captured on a GPU): images taken and cropped, both networks' forwards, loss,
whole backward, clamp, SGD. The sum reads the old and the new logits, so that nothing but the losses differs.
Epochs take turns; share = 1 - without / with, of the medians of the epochs after the second.
"""

import argparse
import statistics
from collections.abc import Sequence

from measuring import Row, by_turns, option_parser, read_options, record
from torch import Tensor
from workload import BALANCED, CAPTURING, Learning, after_first_task, learning_config, random_task

from medcil.build import build_method
from medcil.methods.protocol import Batch, Classification, Method, WithTerms
from medcil.methods.terms import cross_entropy
from medcil.training.state import State

CPU = {"batches": [32], "pixels": 64, "steps": 8}
CUDA = {"batches": [32, 128], "pixels": 224, "steps": 64}
SMALL = 1e-6  # lets the parameters move as little as the real losses do


def plain_sum(batch: Batch) -> Tensor:
    return SMALL * (batch.out.logits.sum() + batch.old.logits.sum())


def without_losses(method: Method) -> Method:
    plain = Classification(plain_sum, cross_entropy().log_prior)
    return WithTerms(method, {"classification": plain}, drop=("margin", "distillation"))


def measure(method: Method, state: State, batch: int, options: argparse.Namespace) -> Row:
    n_new = max(options.steps * batch - len(state.memory), batch)
    task = random_task(n_new, 2, side=state.preprocessing.side, n_old=len(state.class_names))
    config = learning_config(batch=batch, device=options.device)
    ways = {"with": method, "without": without_losses(method)}
    learnings = {name: Learning(state, task, way, config) for name, way in ways.items()}
    works = {name: learning.epoch for name, learning in learnings.items()}
    seconds = by_turns(works, options.rounds, skip=CAPTURING)
    n_terms = {name: len(learning.losses) for name, learning in learnings.items()}
    for learning in learnings.values():
        learning.end()
    n_steps = -(-(n_new + len(state.memory)) // batch)
    median = {name: statistics.median(taken) / n_steps for name, taken in seconds.items()}
    return {
        "method": "balanced",
        "pixels": options.pixels,
        "batch": batch,
        "losses": n_terms["with"],
        "with, ms a step": 1000 * median["with"],
        "without, ms a step": 1000 * median["without"],
        "share of the losses": 1 - median["without"] / median["with"],
    }


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = option_parser(__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--pixels", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="batches of an epoch")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--rounds", type=int, default=10)
    options = read_options(parser, arguments, cpu=CPU, cuda=CUDA)
    method = build_method(BALANCED)
    config = learning_config(batch=32, device=options.device)
    first = random_task(90, 3, side=round(options.pixels * 256 / 224))
    state = after_first_task(method, config, first, backbone=options.backbone, crop=options.pixels)
    rows = [measure(method, state, batch, options) for batch in options.batches]
    return record("terms", __doc__, options, rows)


if __name__ == "__main__":
    main()
