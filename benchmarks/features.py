"""Features of the analytic learner, in several views and of one or two networks, beside the networks alone.

    python benchmarks/features.py --device cuda [--images 10015] [--pixels 160]

"embedding" reads resident images, crops, views, runs the networks, pools, scales and returns the features of
every class, which an update does once. "prediction" scores all images. "ceiling" is the forward pass of the
same networks alone, on one batch that stays where it is; on a GPU a captured graph. "statistics" adds the
features to counts, sums and second moments.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from measuring import Row, by_turns, captured, option_parser, read_options, record, seconds_of

from medcil.config import ExecutionConfig, Views
from medcil.data.samples import Samples, TensorImages
from medcil.data.transforms import Preprocessing
from medcil.models.network import Network, NetworkSpec
from medcil.readouts.ridge import Ridge
from medcil.readouts.statistics import FeatureSpec
from medcil.training.feed import EVALUATION_BATCH, Feed
from medcil.training.inference import Scorer, readout_features
from medcil.training.state import State

CLASSES = 7


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--images", type=int)
    parser.add_argument("--pixels", type=int, nargs="+")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="so many of the last ones")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(
        parser, arguments, cpu={"images": 280, "pixels": [64]}, cuda={"images": 10_015, "pixels": [160]}
    )
    cases = product(options.pixels, (False, True), options.stages, options.views)
    rows = [
        _measure(options, pixels=pixels, views=views, stages=stages, two=two)
        for pixels, two, stages, views in cases
    ]
    record("features", __doc__, options, rows)


def _measure(options: argparse.Namespace, *, pixels: int, views: Views, stages: int, two: bool) -> Row:
    n_images = options.images
    device, side = torch.device(options.device), pixels + pixels // 8
    network = NetworkSpec(options.backbone, last_relu=False, learn_scale=True).build()
    network.grow(torch.randn(CLASSES, network.classifier.dim))
    readout = Ridge()
    readout.choose_features(network, FeatureSpec(stages=stages), with_companion=two)
    network = network.to(device).eval().to(memory_format=torch.channels_last)
    readout = readout.to(device).eval()
    pixels_of_all = torch.randint(256, (n_images, 3, side, side), dtype=torch.uint8)
    samples = Samples(TensorImages(pixels_of_all), torch.arange(n_images) % CLASSES)
    preprocessing = Preprocessing(side=side, crop=pixels, views=views)
    with Feed(samples, preprocessing, device, ExecutionConfig(device=options.device)) as feed:
        compute = partial(_features, network, readout, feed, n_images)
        alone, batch = _forward_alone(network, readout, feed, n_images * views)
        features = compute()

        def add() -> None:
            for label, values in enumerate(features):
                readout.add(values, label)

        statistics = seconds_of(add, device)
        readout.solve()
        readout.finish_task(torch.zeros(CLASSES, network.classifier.dim, device=device), torch.zeros(CLASSES))
        state = State(
            network=network,
            memory=samples.select(torch.arange(0)),
            class_names=tuple(map(str, range(CLASSES))),
            readout=readout,
            inherent_counts=samples.class_counts(CLASSES),
            preprocessing=preprocessing,
        )
        scorer = Scorer(state, ExecutionConfig(device=options.device))
        works = {
            "embedding": partial(seconds_of, compute, device),
            "prediction": partial(seconds_of, partial(scorer.scores_and_likeness, samples), device),
            "ceiling": partial(seconds_of, alone, device),
        }
        seconds = {name: min(taken) for name, taken in by_turns(works, options.rounds, skip=1).items()}
    return {
        "pixels": pixels,
        "networks": 1 + two,
        "stages": stages,
        "views": views,
        "features": readout.sums.shape[1],
        **{f"{name}, ms an image": 1000 * taken / n_images for name, taken in seconds.items()},
        "statistics, ms an image": 1000 * statistics / n_images,
        "embedding/ceiling": seconds["ceiling"] / seconds["embedding"],
        "batch": batch,
    }


def _features(network: Network, readout: Ridge, feed: Feed, n_images: int) -> list[torch.Tensor]:
    return [readout_features(network, readout, feed, n_images, label).values for label in range(CLASSES)]


def _forward_alone(network: Network, readout: Ridge, feed: Feed, n: int) -> tuple[partial[None], int]:
    """Return a work that runs the networks on n images, in batches of one tensor."""
    size = min(EVALUATION_BATCH, n)
    crop = feed.preprocessing.crop
    images = torch.randn(size, 3, crop, crop, device=feed.device).contiguous(
        memory_format=torch.channels_last
    )

    @torch.no_grad()
    def once() -> None:
        with feed.precision():
            network.backbone(images)
            if readout.companion is not None:
                readout.companion(images)

    replay = captured(once, feed.device)

    def all_of_them() -> None:
        for _ in range(-(-n // size)):
            replay()

    return partial(all_of_them), size


if __name__ == "__main__":
    main()
