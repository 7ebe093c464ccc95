"""The upper bound: every step learns all classes so far from scratch, and nothing passes between steps."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medcil.build import RunConfig, Stream, build_state, build_stream, resolve
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.experiments import run
from medcil.experiments.run import run_experiment
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import Progress
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task, recalibrate
from medcil.training.state import State, load_state

ORDER = (5, 4, 0, 1, 3, 6, 2)
SIZES = (3, 2, 2)
SEEN = (3, 5, 7)
COUNTS = (12, 9, 6, 14, 8, 11, 7)
"""Training images of each class, in the dataset's own order."""


def recipe(*, is_cumulative: bool = True, is_recalibrated: bool = False) -> RunConfig:
    content = {
        "data": {"name": "phantom", "side": 20, "crop": 16},
        "scenario": {"base": 3, "increment": 2, "order": ORDER, "cumulative": is_cumulative},
        "network": {"backbone": "resnet8_cifar", "recalibrate_batch_norm": is_recalibrated},
        "memory": {"per_class": 3},
        "training": {"epochs": 2, "batch_size": 16},
        "method": {"name": "balanced"},
        "execution": {"device": "cpu", "threads": 1},
    }
    return resolve(RunConfig.model_validate(content))


@pytest.fixture(scope="module")
def stream() -> Stream:
    """A few images of each class."""
    whole = build_stream(recipe())
    assert (whole.order, whole.sizes, whole.is_cumulative) == (ORDER, SIZES, True)
    return replace(whole, train=first_of(whole.train, COUNTS), test=first_of(whole.test, (5,) * 7))


@pytest.fixture(scope="module")
def finished(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("joint") / "run"
    run_experiment(recipe(), out, stream=stream)
    return out


def first_of(samples: Samples, counts: tuple[int, ...]) -> Samples:
    chosen = [torch.nonzero(samples.labels == c).flatten()[:n] for c, n in enumerate(counts)]
    return samples.select(torch.cat(chosen).sort().values).copied()


def union(samples: Samples, n_seen: int) -> Samples:
    """All samples of the classes that have arrived, one by one."""
    chosen = [i for i, label in enumerate(samples.labels.tolist()) if label in ORDER[:n_seen]]
    pixels = torch.stack([samples.read_all()[i] for i in chosen])
    return Samples(TensorImages(pixels), torch.tensor([ORDER.index(int(samples.labels[i])) for i in chosen]))


def learned_alone(stream: Stream, n_seen: int, config: RunConfig) -> State:
    names = tuple(stream.class_names[c] for c in ORDER[:n_seen])
    task = Task(names, n_old=0, train=union(stream.train, n_seen), test=union(stream.test, n_seen))
    state = build_state(config)
    if config.network.recalibrate_batch_norm:
        recalibrate(state, task.train, config)
    return learn_task(state, task, config.method, config)


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    return {
        **state.network.state_dict(),
        "class means": state.readout.class_means,
        "inherent counts": state.inherent_counts,
        "log prior": state.readout.log_prior,
        "exemplars": state.memory.read_all(),
        "exemplars' labels": state.memory.labels,
    }


def assert_same(state: State, expected: State) -> None:
    assert state.class_names == expected.class_names
    tensors, expected_tensors = tensors_of(state), tensors_of(expected)
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected_tensors[name])] == []


def test_every_step_is_what_learning_the_union_from_scratch_gives(stream: Stream, finished: Path) -> None:
    for number, n_seen in enumerate(SEEN, start=1):
        expected = learned_alone(stream, n_seen, recipe())
        assert_same(load_state(RunDir(finished).task(number).state), expected)
        assert expected.inherent_counts.tolist() == [COUNTS[c] for c in ORDER[:n_seen]]


def test_every_step_recalibrates_the_initial_network_on_its_own_images(
    stream: Stream, finished: Path, tmp_path: Path
) -> None:
    config = recipe(is_recalibrated=True)
    run_experiment(config, tmp_path / "run", stream=stream)
    for number, n_seen in enumerate(SEEN, start=1):
        state = load_state(RunDir(tmp_path / "run").task(number).state)
        assert_same(state, learned_alone(stream, n_seen, config))
        plain = load_state(RunDir(finished).task(number).state)
        assert any(
            not torch.equal(tensor, plain.network.state_dict()[name])
            for name, tensor in state.network.state_dict().items()
            if name.endswith("running_mean")
        )


def test_every_step_is_tested_on_all_classes_so_far_in_order_of_arrival(
    stream: Stream, finished: Path
) -> None:
    names = [stream.class_names[c] for c in ORDER]
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["finished"]
    assert metrics["task_sizes"] == list(SIZES)
    assert metrics["class_names"] == names
    assert metrics["inherent_counts"] == [COUNTS[c] for c in ORDER]
    task_of_class = [task for task, size in enumerate(SIZES) for _ in range(size)]
    for number, n_seen in enumerate(SEEN, start=1):
        folder = RunDir(finished).task(number)
        test = union(stream.test, n_seen)
        # Stable: within a task as in the dataset, as in an incremental run.
        rows = sorted(range(len(test)), key=lambda row: task_of_class[test.labels[row]])
        scores = predict_scores(load_state(folder.state), test, recipe().execution)[rows]
        with folder.predictions_path.open(newline="") as file:
            predictions = list(csv.DictReader(file))
        assert [row["label"] for row in predictions] == [names[test.labels[row]] for row in rows]
        assert [row["predicted"] for row in predictions] == [names[c] for c in scores.argmax(dim=1)]
        step = metrics["steps"][number - 1]
        assert step["classes"] == names[:n_seen]
        assert [sum(row) for row in step["confusion"]] == [5] * n_seen


class Interrupted(Exception):
    pass


def during(number: int, epoch: int, *, is_finished: bool) -> Callable[[int, int, Progress], None]:
    def watch(task: int, n_tasks: int, progress: Progress) -> None:
        if (task, progress.epoch, progress.losses is not None) == (number, epoch, is_finished):
            raise Interrupted

    return watch


@pytest.mark.parametrize(
    "moments",
    [
        [during(1, 0, is_finished=True), during(2, 1, is_finished=False)],
        [during(2, 0, is_finished=False), during(3, 1, is_finished=True)],
    ],
    ids=["in the first two steps", "in the last two steps"],
)
def test_interrupted_and_resumed_it_ends_the_same(
    stream: Stream, finished: Path, tmp_path: Path, moments: list[Callable[[int, int, Progress], None]]
) -> None:
    out = tmp_path / "run"
    for watch in moments:
        with pytest.raises(Interrupted):
            run_experiment(recipe(), out, stream=stream, watch=watch)
    run_experiment(recipe(), out, stream=stream)
    assert_same_results(out, finished)


def test_interrupted_before_its_evaluation_a_step_ends_the_same(
    stream: Stream, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(run, "_evaluate", interrupt)
        with pytest.raises(Interrupted):
            run_experiment(recipe(), tmp_path / "run", stream=stream)
    run_experiment(recipe(), tmp_path / "run", stream=stream)
    assert_same_results(tmp_path / "run", finished)


def assert_same_results(run: Path, expected: Path) -> None:
    files = ["log.jsonl", "metrics.json"]
    files += [str(path.relative_to(expected)) for path in expected.glob("tasks/*/state/tensors/*")]
    for number in range(1, len(SIZES) + 1):
        state, expected_state = (load_state(RunDir(root).task(number).state) for root in (run, expected))
        assert_same(state, expected_state)
        files += [f"tasks/0{number}/{name}" for name in ("confusion.csv", "predictions.csv", "result.json")]
    assert [name for name in files if (run / name).read_bytes() != (expected / name).read_bytes()] == []


def test_a_step_gets_no_earlier_state_and_loses_its_images_when_it_is_over(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Task] = []

    def spy(state: State, task: Task, *arguments: object, **options: object) -> State:
        assert state.class_names == ()
        assert len(state.memory) == len(state.inherent_counts) == 0
        assert len(task.train.read_all()) == sum(COUNTS[c] for c in ORDER[: task.n_seen])
        assert_closed(tasks)
        tasks.append(task)
        return learn_task(state, task, *arguments, **options)

    monkeypatch.setattr(run, "learn_task", spy)
    run_experiment(recipe(), tmp_path / "run", stream=stream)
    assert len(tasks) == len(SIZES)
    assert_closed(tasks)


def assert_closed(tasks: list[Task]) -> None:
    for task in tasks:
        with pytest.raises(PermissionError, match="belong to an earlier task"):
            task.train.read_all()


def test_a_stream_of_the_other_kind_is_refused(stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scenario\.cumulative differ"):
        run_experiment(recipe(is_cumulative=False), tmp_path / "run", stream=stream)
    assert not (tmp_path / "run").exists()
