"""The two simplest methods: plain cross-entropy, with the memory and without."""

import pytest

from medcil.methods.finetune import Finetune
from medcil.methods.replay import Replay

from ..small import task_of
from .by_hand import batch_of, cross_entropy, learned, learned_watching_images, phases_of


@pytest.mark.parametrize("method", [Finetune(), Replay()])
@pytest.mark.parametrize("n_old", [0, 3])
def test_one_phase_of_plain_cross_entropy_moves_everything(method, n_old):
    labels, sizes = [n_old, n_old + 1, 0, n_old], ([n_old] if n_old else []) + [2]
    batch = batch_of(labels, sizes)
    (phase,) = phases_of(method, n_old, 2).values()
    assert set(phase.terms) == {"classification"}
    expected = cross_entropy(batch.out.logits.tolist(), labels)
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)
    _, chapters = learned(method, task_of([6, 5]))
    (chapter,) = chapters.values()
    assert chapter.moved == set(chapter.before)


@pytest.mark.parametrize(("method", "uses_memory"), [(Finetune(), False), (Replay(), True)])
def test_replay_trains_on_the_exemplars_and_fine_tuning_does_not(method, uses_memory):
    first, _ = learned(method, task_of([6, 5]))
    task = task_of([7, 3], n_old=2, seed=1)
    _, _, seen = learned_watching_images(method, first, task, training={"epochs": 1, "batch_size": 8})
    new = {image.numpy().tobytes() for image in task.train.read_all()}
    exemplars = {image.numpy().tobytes() for image in first.memory.read_all()}
    assert (len(new), len(exemplars)) == (10, 8)
    assert sorted(seen["learn"]) == sorted(new | exemplars if uses_memory else new)
