"""Batches are what the plan says, and the same to the last bit however the images are kept."""

import pytest
import torch

from medcil.config import ExecutionConfig
from medcil.data.samples import FileImages, Samples
from medcil.engine import feed as feed_module
from medcil.engine.draws import Key
from medcil.engine.feed import Feed

from ..small import CROP, PREPROCESSING, plain_epoch, random_samples

CPU = torch.device("cpu")
WAYS = {
    "resident": ExecutionConfig(resident="yes"),
    "streamed": ExecutionConfig(resident="no", workers=1),
    "by several": ExecutionConfig(resident="no", workers=3),
    "as it fits": ExecutionConfig(),
}


def feed_of(samples, execution) -> Feed:
    return Feed(samples, PREPROCESSING, CPU, execution)


def plan(n):
    return plain_epoch(n, Key(3), batch_size=6)


@pytest.fixture
def samples():
    return random_samples([7, 4, 9])


def test_training_batches_are_what_the_plan_says(samples):
    epoch_plan, pixels = plan(20), samples.read_all()
    batches = list(feed_of(samples, WAYS["resident"]).training_batches(epoch_plan))
    drawn = zip(
        *(t.tolist() for t in (epoch_plan.order, epoch_plan.top, epoch_plan.left, epoch_plan.flip)),
        strict=True,
    )
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == epoch_plan.n_batches == 4
    for image, label, (i, top, left, is_flipped) in zip(images, labels, drawn, strict=True):
        crop = pixels[i, :, top : top + CROP, left : left + CROP]
        expected = PREPROCESSING.normalize((crop.flip(-1) if is_flipped else crop)[None])[0]
        assert torch.equal(image, expected)
        assert label == samples.labels[i]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "resident"])
def test_every_way_gives_the_same_batches(samples, way):
    epoch_plan = plan(20)
    expected = list(feed_of(samples, WAYS["resident"]).training_batches(epoch_plan))
    actual = list(feed_of(samples, WAYS[way]).training_batches(epoch_plan))
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
    absent = Samples(FileImages([tmp_path / "none.png"], PREPROCESSING.side), torch.tensor([0]))
    feed = feed_of(absent, WAYS["streamed"])
    with pytest.raises(Exception, match=r"none\.png"):
        next(feed.evaluation_batches(torch.tensor([0])))


@pytest.mark.parametrize("way", WAYS)
def test_reading_leaves_pytorchs_random_state_alone(samples, way):
    before = torch.random.get_rng_state()
    list(feed_of(samples, WAYS[way]).training_batches(plan(20)))
    assert torch.equal(torch.random.get_rng_state(), before)
