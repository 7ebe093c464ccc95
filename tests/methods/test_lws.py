"""LWS: a second stage around other methods that learns the newest head and a scale for each class."""

import pytest

from medcil.build import build_method
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput
from medcil.methods import METHODS
from medcil.methods.lws import LWS
from medcil.methods.podnet import PODNet
from medcil.methods.replay import Replay
from medcil.methods.ucir import UCIR
from medcil.training.inference import predict_scores

from ..small import task_of
from .by_hand import (
    batch_of,
    content_of,
    cross_entropy,
    labels_by_image,
    learned,
    learned_watching_images,
    moved,
    phases_of,
    tiny_network,
    under,
)

AROUND = {
    "podnet": {"name": "podnet", "n_proxies": 3, "finetune_share": 0.0},
    "ucir": {"name": "ucir"},
}


def around(base: str) -> LWS:
    """Two epochs of scaling after two of learning."""
    return build_method({"name": "lws", "base": AROUND[base], "scaling_share": 1.0})


def two_tasks():
    return task_of([6, 5]), task_of([7, 4, 3], n_old=2, seed=1)


def test_a_recipe_says_what_it_stands_around():
    podnet, ucir = around("podnet"), around("ucir")
    assert podnet.base == PODNet(n_proxies=3, finetune_share=0.0)
    assert ucir.base == UCIR()
    assert build_method({"name": "lws", "base": "replay"}).base == Replay()
    assert LWS().base == PODNet(classification="cross_entropy", spatial=3, flat=1, finetune_share=0)


@pytest.mark.parametrize("base", ["bic", "lws"])
def test_a_method_that_calibrates_the_logits_itself_is_refused(base):
    with pytest.raises(ValueError, match="base calibrates the logits itself"):
        LWS(METHODS[base]())
    with pytest.raises(InvalidInput, match=r"^method: base calibrates the logits itself"):
        build_method({"name": "lws", "base": base})


def test_gaussians_that_nobody_would_ask_are_refused():
    with pytest.raises(InvalidInput, match=r"^method: base has Gaussians, which LWS would not ask"):
        build_method({"name": "lws", "base": "gaussians"})
    assert build_method({"name": "gaussians", "base": "lws"}).base == LWS()


def test_the_second_stage_follows_all_phases_of_the_method_within_in_every_task():
    method = LWS(PODNet(n_proxies=3, finetune_share=0.5))
    assert list(phases_of(method, 0, 2)) == ["learn", "scale"]
    network = tiny_network(2, n_proxies=3)
    assert list(phases_of(method, 2, 2, network=network)) == ["learn", "fine-tune", "scale"]


def test_without_a_second_stage_it_is_the_method_within():
    method = LWS(UCIR(), scaling_share=0)
    assert list(phases_of(method, 0, 2)) == list(phases_of(method, 3, 2)) == ["learn"]
    without, within = (learned(which, *two_tasks())[0].network for which in (method, UCIR()))
    assert moved(content_of(without), content_of(within)) == set()


def test_scales_of_a_task_before_do_not_outlive_the_second_stage():
    scaled, _ = learned(around("ucir"), task_of([6, 5]))
    state, _ = learned(LWS(UCIR(), scaling_share=0), task_of([7], n_old=2, seed=1), state=scaled)
    assert len(scaled.network.classifier.calibrations) == 1
    assert len(state.network.classifier.calibrations) == 0


@pytest.mark.parametrize("base", AROUND)
def test_in_the_second_stage_only_the_newest_head_eta_and_all_scales_move(base):
    _, chapters = learned(around(base), *two_tasks())
    scale = chapters["scale"]
    gains = {"classifier.calibrations.0.gain", "classifier.calibrations.1.gain"}
    assert scale.moved == {"classifier.blocks.1.0", "classifier.scale"} | gains
    assert any("running_mean" in name for name in under("backbone.", scale.before))
    assert len(scale.epochs) == 2


@pytest.mark.parametrize("base", AROUND)
def test_the_first_task_has_its_second_stage_too(base):
    _, chapters = learned(around(base), task_of([6, 5]))
    assert list(chapters) == ["learn", "scale"]
    expected = {"classifier.blocks.0.0", "classifier.scale", "classifier.calibrations.0.gain"}
    assert chapters["scale"].moved == expected


def test_the_first_stage_has_no_scales_and_the_second_goes_on_from_those_of_the_task_before():
    tasks = (*two_tasks(), task_of([5], n_old=5, seed=2))
    earlier, _ = learned(around("ucir"), *tasks[:2])
    state, chapters = learned(around("ucir"), *tasks)
    assert not under("classifier.calibrations.", chapters["learn"].before)
    found = [chapters["scale"].before[f"classifier.calibrations.{block}.gain"].tolist() for block in range(3)]
    gains = [earlier.network.classifier.calibrations[str(block)].gain.tolist() for block in range(2)]
    assert found == [*gains, [1.0]]
    assert len({gain for block in gains for gain in block}) == 5  # learned, not ones
    assert state.network.spec().calibration_sizes == (2, 3, 1)


def test_a_correction_of_another_kind_is_no_start_for_scales():
    network = tiny_network(3)
    network.classifier.calibrate(0, size=1).gain.data.fill_(2.0)  # one for all classes of a task, as BiC has
    phases_of(LWS(UCIR()), 3, 2, network=network)
    assert network.classifier.calibrations["0"].gain.tolist() == [1.0] * 3


def test_scores_are_each_classs_scale_times_its_logit():
    state, _ = learned(around("podnet"), *two_tasks())
    images, on_cpu = task_of([3, 3], seed=8).train, ExecutionConfig(device="cpu")
    found = predict_scores(state, images, on_cpu).tolist()
    calibrations = state.network.classifier.calibrations
    scales = [s for block in ("0", "1") for s in calibrations[block].gain.tolist()]
    assert len(set(scales)) == 5
    calibrations.clear()
    for row, z in zip(found, predict_scores(state, images, on_cpu).tolist(), strict=True):
        assert row == pytest.approx([s * x for s, x in zip(scales, z, strict=True)], abs=1e-5)


def test_it_is_cross_entropy_at_rates_of_its_own_decaying_along_a_cosine():
    phase = phases_of(LWS(UCIR()), 3, 2)["scale"]
    labels = [0, 3, 4, 1]
    batch = batch_of(labels, (3, 2))
    assert set(phase.terms) == {"classification"}
    expected = cross_entropy(batch.out.logits.tolist(), labels)
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)
    training = phase.training
    assert training is not None
    assert phase.rates == pytest.approx({"classifier": 0.1, "scales": 0.01})
    assert training.schedule == "cosine"
    assert {name: len(params) for name, params in phase.params.items()} == {"classifier": 2, "scales": 2}


def test_it_has_30_epochs_where_the_first_stage_has_160():
    training = phases_of(LWS(UCIR()), 3, 2)["scale"].training
    assert training is not None
    assert training.epochs == round(100 * 30 / 160)
    longer = training.changed(epochs=160)
    assert phases_of(LWS(UCIR()), 3, 2, training=longer)["scale"].training.epochs == 30


def test_classes_take_turns_in_its_batches():
    method = LWS(UCIR(), scaling_share=0.5)
    first, _ = learned(method, task_of([6, 5]))
    task = task_of([12, 2], n_old=2, seed=1)
    _, diary, seen = learned_watching_images(method, first, task)
    assert diary.chapters[-1].phase.sampler == "class_aware"
    label_of = labels_by_image(task.train, first.memory)
    drawn = [label_of[image] for image in seen["scale"]]
    assert len(drawn) == len(label_of) == 22
    visits = [drawn[i : i + 4] for i in range(0, 22, 4)]
    assert all(len(set(visit)) == 1 for visit in visits)
    assert sorted(visit[0] for visit in visits[:4]) == [0, 1, 2, 3]
