"""Batches are what the plan says, and the same to the last bit however the images are kept."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch

from medcil.config import Augmentation, ExecutionConfig
from medcil.data.samples import encode_png
from medcil.data.sources.folder import read_own
from medcil.data.transforms import transformed
from medcil.methods.finetune import Finetune
from medcil.training import feed as feed_module
from medcil.training.feed import Feed
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task
from medcil.training.sampling import Key

from ..small import (
    CROP,
    PREPROCESSING,
    SMALLEST,
    new_state,
    plain_epoch,
    random_images,
    random_samples,
    short_training,
    task_of,
    training_batches,
)

CPU = torch.device("cpu")
WAYS = {
    "resident": ExecutionConfig(resident="yes"),
    "streamed": ExecutionConfig(resident="no", workers=1),
    "by several": ExecutionConfig(resident="no", workers=3),
    "as it fits": ExecutionConfig(),
}


def feed_of(samples, execution) -> Feed:
    return Feed(samples, PREPROCESSING, CPU, execution)


def plan(n, augmentation="crop", epoch=0):
    return plain_epoch(n, Key(3, epoch=epoch), batch_size=6, augmentation=augmentation)


def written(folder, n):
    """Files of one class."""
    (folder / "class").mkdir()
    paths = [folder / "class" / f"{number}.png" for number in range(n)]
    for path, pixels in zip(paths, random_images(n), strict=True):
        path.write_bytes(encode_png(pixels))
    return paths


@pytest.fixture
def samples():
    return random_samples([7, 4, 9])


@pytest.mark.parametrize("augmentation", ["crop", "dihedral"])
def test_training_batches_are_what_the_plan_says(samples, augmentation):
    epoch_plan, pixels = plan(20, augmentation), samples.read_all()
    feed = feed_of(samples, WAYS["resident"])
    list(training_batches(feed, plan(20, augmentation, epoch=1)))  # whose numbers must not remain
    batches = list(training_batches(feed, epoch_plan))
    turns = torch.zeros(20, dtype=torch.int64) if epoch_plan.turns is None else epoch_plan.turns
    drawn = zip(
        *(t.tolist() for t in (epoch_plan.order, epoch_plan.top, epoch_plan.left, epoch_plan.flip, turns)),
        strict=True,
    )
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == len(epoch_plan.sizes) == 4
    for image, label, (i, top, left, is_flipped, n_turns) in zip(images, labels, drawn, strict=True):
        crop = pixels[i, :, top : top + CROP, left : left + CROP]
        turned = torch.rot90(crop.flip(-1) if is_flipped else crop, n_turns, (1, 2))
        expected = PREPROCESSING.normalize(turned[None])[0]
        assert torch.equal(image, expected)
        assert label == samples.labels[i]


@pytest.mark.parametrize("augmentation", ["resized_crop", "fundus", "strong"])
def test_training_batches_are_transformed_as_the_plan_says(samples, augmentation):
    epoch_plan, pixels = plan(20, augmentation), samples.read_all()
    feed = feed_of(samples, WAYS["resident"])
    list(training_batches(feed, plan(20, augmentation, epoch=1)))  # whose numbers must not remain
    images = torch.cat([images for images, _ in training_batches(feed, epoch_plan)])
    for row, image in enumerate(images):
        index, transform = epoch_plan.order[row : row + 1], epoch_plan.transforms[row : row + 1]
        tones = epoch_plan.tones[row : row + 1] if augmentation == "strong" else None
        seen = transformed(pixels, index, transform, crop=CROP, tones=tones)
        assert torch.equal(image, PREPROCESSING.normalize(seen)[0])


@pytest.mark.parametrize("augmentation", ["crop", "resized_crop", "dihedral"])
def test_a_turned_epoch_says_how_each_image_was_turned(samples, augmentation):
    place, whole = Key(3), {"batch_size": 6, "augmentation": augmentation}
    turned, feed = plain_epoch(20, place, **whole, is_turned=True), feed_of(samples, WAYS["resident"])
    assert set(turned.turns.tolist()) == {0, 1, 2, 3}
    if augmentation != "dihedral":  # which turns its images anyway
        upright = torch.cat([images for images, _ in training_batches(feed, plain_epoch(20, place, **whole))])
        shown = torch.cat([images for images, _ in training_batches(feed, turned)])
        for image, expected, turns in zip(shown, upright, turned.turns.tolist(), strict=True):
            assert torch.equal(image, torch.rot90(expected, turns, (1, 2)))
    feed.begin(turned)
    assert feed.take(6).turns.equal(turned.turns[:6])


def test_a_mixed_epoch_mixes_each_image_with_the_one_before_it(samples):
    feed, place = feed_of(samples, WAYS["resident"]), Key(3)
    plain = [images for images, _ in training_batches(feed, plain_epoch(20, place, batch_size=6))]
    mixed = plain_epoch(20, place, batch_size=6, mixup=0.4)
    assert len(set(mixed.shares.tolist())) == len(mixed.sizes)
    feed.begin(mixed)
    for images, size, first in zip(plain, mixed.sizes, [0, 5, 10, 15], strict=True):
        drawn = feed.take(size)
        assert drawn.share == mixed.shares[first]
        expected = torch.stack(
            [drawn.share * images[i] + (1 - drawn.share) * images[i - 1] for i in range(size)]
        )
        torch.testing.assert_close(drawn.images, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("augmentation", get_args(Augmentation))
@pytest.mark.parametrize("way", [way for way in WAYS if way != "resident"])
def test_every_way_gives_the_same_batches(samples, way, augmentation):
    epoch_plan = plan(20, augmentation)
    expected = list(training_batches(feed_of(samples, WAYS["resident"]), epoch_plan))
    actual = list(training_batches(feed_of(samples, WAYS[way]), epoch_plan))
    for (images, labels), (wanted_images, wanted_labels) in zip(actual, expected, strict=True):
        assert torch.equal(images, wanted_images)
        assert torch.equal(labels, wanted_labels)
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flip", [True, False])
def test_evaluation_takes_center_crops_in_the_order_given(samples, way, flip, monkeypatch):
    monkeypatch.setattr(feed_module, "EVALUATION_BATCH", 4)
    indices = torch.tensor([3, 19, 3, 0, 8, 11])
    batches = list(feed_of(samples, WAYS[way]).evaluation_batches(indices, flip=flip))
    assert max(len(batch) for batch in batches) <= 4
    margin = PREPROCESSING.slack // 2
    crops = samples.read_all()[indices][:, :, margin : margin + CROP, margin : margin + CROP]
    expected = PREPROCESSING.normalize(crops.flip(-1) if flip else crops)
    assert torch.equal(torch.cat(batches), expected)


@pytest.mark.parametrize("way", WAYS)
def test_no_images_make_no_batch_with_images(samples, way):
    none = torch.empty(0, dtype=torch.int64)
    assert sum(len(batch) for batch in feed_of(samples, WAYS[way]).evaluation_batches(none)) == 0


def test_streaming_opens_a_file_only_when_its_turn_comes(tmp_path):
    paths = written(tmp_path, 2)
    feed = feed_of(read_own(tmp_path, fewest_classes=1).samples(PREPROCESSING.side), WAYS["streamed"])
    paths[1].unlink()
    assert len(next(feed.evaluation_batches(torch.tensor([0])))) == 1
    with pytest.raises(Exception, match=r"1\.png"):
        next(feed.evaluation_batches(torch.tensor([1])))


def test_a_window_that_moves_many_times_gives_the_same_batches(monkeypatch):
    samples = random_samples([40, 31, 29])
    monkeypatch.setattr(feed_module, "HALF_BYTES", 13 * 3 * PREPROCESSING.side**2)
    resident, moving = (feed_of(samples, WAYS[way]) for way in ("resident", "by several"))
    assert moving.window.half == 13
    for epoch in range(6):
        now = plain_epoch(100, Key(3, epoch=epoch), batch_size=6)
        if epoch % 2:  # broken off, and an evaluation in between
            batches = training_batches(moving, now)
            next(batches), next(batches)
            next(moving.evaluation_batches(torch.arange(100)))
        pairs = zip(training_batches(resident, now), training_batches(moving, now), strict=True)
        for (expected, expected_labels), (images, labels) in pairs:
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)


def test_an_error_while_reading_ahead_is_raised_and_the_feed_can_be_used_again(tmp_path, monkeypatch):
    paths = written(tmp_path, 30)
    files = read_own(tmp_path, fewest_classes=1).samples(PREPROCESSING.side)
    monkeypatch.setattr(feed_module, "HALF_BYTES", 6 * 3 * PREPROCESSING.side**2)
    feed = feed_of(files, WAYS["by several"])
    lost, content = paths[17], paths[17].read_bytes()
    lost.unlink()
    with pytest.raises(Exception, match=r"17\.png"):
        list(feed.evaluation_batches(torch.arange(30)))
    lost.write_bytes(content)
    found, expected = (
        torch.cat(list(source.evaluation_batches(torch.arange(30))))
        for source in (feed, feed_of(files, WAYS["resident"]))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_reading_leaves_pytorchs_random_state_alone(samples, way):
    before = torch.random.get_rng_state()
    list(training_batches(feed_of(samples, WAYS[way]), plan(20)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_threads_that_read_images_end_with_the_feed(samples):
    before = set(threading.enumerate())
    with feed_of(samples, WAYS["by several"]) as feed:
        list(training_batches(feed, plan(20)))
        feed.begin(plan(20))  # an epoch that is broken off
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before  # feeds of earlier tests may end meanwhile


def test_training_and_prediction_end_every_thread_pool(monkeypatch):
    pools = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, *args):
            super().__init__(*args)
            pools.append(self)

    monkeypatch.setattr(feed_module, "ThreadPoolExecutor", Pool)
    config = short_training(execution=WAYS["by several"].model_dump())
    after = learn_task(new_state(spec=SMALLEST), task_of([7, 4]), Finetune(), config)
    predict_scores(after, after.memory, config.execution)
    assert len(pools) >= 6  # of training, of the class means, of prediction
    assert all(pool._shutdown for pool in pools)
