"""A whole run: learn task after task, evaluate after each, write everything down, go on where it stopped."""

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medcil.build import build_method, build_state, build_stream, resolve
from medcil.config import RunConfig
from medcil.data.samples import Samples, no_samples
from medcil.data.stream import Stream, Task
from medcil.errors import RunConflict
from medcil.experiments.data_fingerprint import Fingerprint, difference, fingerprint
from medcil.experiments.processes import is_first_process, processes
from medcil.methods.outline import try_out
from medcil.metrics.catalogue import summarize
from medcil.metrics.classification import confusion_matrix
from medcil.storage.atomic import read_json, write_csv, write_json
from medcil.storage.overwrite_guard import refuse_within_model
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import FileJournal, PeerJournal, Progress
from medcil.training.distributed import Ranks
from medcil.training.environment import environment, prepare_machine
from medcil.training.inference import predict_scores
from medcil.training.loop import learn_task, recalibrate
from medcil.training.state import State, load_state, save_state

RunWatch = Callable[[int, int, Progress], None]
"""(number of the task, number of tasks, where its training is)"""


def run_experiment(
    config: RunConfig,
    out: Path,
    *,
    stream: Stream | None = None,
    watch: RunWatch = lambda number, n_tasks, progress: None,
) -> dict[str, Any]:
    """Runs a recipe in a folder, or what of it is not done yet; returns the content of its metrics.json.

    `stream` saves reading the data again when several runs share it.
    """
    config = resolve(config)
    prepare_machine(config.execution)
    run = RunDir(out)
    # All that can be wrong with the recipe, the weights or the data shows before the folder is touched.
    refuse_within_model(out)
    run.check(config)
    initial = build_state(config)
    try_out(build_method(config.method), initial.network, crop=config.data.crop)
    same_work = partial(run_experiment, config, out, stream=stream)
    stream = stream or build_stream(config)
    _check_same_scenario(stream, config)
    if not is_first_process(config.execution):
        return _go_through(run, config, initial, stream, watch)
    with run.locked():
        mine = fingerprint(stream, config)
        _check_same_data(run, mine)
        run.claim(config)
        write_json(run.data_path, mine)
        with processes(config.execution, same_work):
            if not run.task(len(stream.sizes)).is_done:
                _note_start(run, config)
            return _go_through(run, config, initial, stream, watch)


def _go_through(
    run: RunDir, config: RunConfig, initial: State, stream: Stream, watch: RunWatch
) -> dict[str, Any]:
    """Task by task, in every process; the first one alone writes."""
    ranks = Ranks()
    if ranks.first_says(mine := fingerprint(stream, config)) != mine:
        raise RunConflict(
            "The processes that train together have other data each: give all the same data.root and weights."
        )
    metrics: dict[str, Any] = {}
    for number, task in enumerate(stream.tasks(), start=1):
        folder = run.task(number)
        if task.n_old == 0:  # the first of a stream, and each of a cumulative one
            state, seen_test = copy.deepcopy(initial), no_samples(config.data.side)
        seen_test += task.test
        if not ranks.first_says(folder.is_learned):
            _learn(run, number, state, task, config, partial(watch, number, len(stream.sizes)))
        ranks.wait()
        # Through the disk in any case, so that a resumed run cannot differ from an uninterrupted one.
        state = load_state(folder.state)
        if not ranks.first_says(folder.is_done):
            _evaluate(run, number, state, seen_test, config)
        if not ranks.is_first:
            continue
        folder.discard_progress()
        if number == len(stream.sizes) or not run.task(number + 1).is_done:
            metrics = _write_metrics(run, stream, config, state)
    return metrics


def _learn(
    run: RunDir, number: int, state: State, task: Task, config: RunConfig, watch: Callable[[Progress], None]
) -> None:
    if task.n_old == 0 and config.network.recalibrate_batch_norm:
        recalibrate(state, task.train, config)
    ranks = Ranks()
    learn = partial(learn_task, state, task, build_method(config.method), config)
    if not ranks.is_first:
        ranks.wait()
        learn(journal=PeerJournal(run, number))
        return
    before = read_json(run.task(number - 1).result_path)["log_size"] if number > 1 else 0
    journal = FileJournal(run, number, log_size_before=before)
    ranks.wait()  # until what the others read is there
    save_state(learn(journal=journal, watch=watch), run.task(number).state)


def _evaluate(run: RunDir, number: int, state: State, test: Samples, config: RunConfig) -> None:
    """Predictions and confusion over all classes seen; `result.json`, last, says the task is done."""
    folder, names = run.task(number), state.class_names
    scores = predict_scores(state, test, config.execution)
    if not Ranks().is_first:
        return
    predictions = scores.argmax(dim=1)
    write_csv(
        folder.predictions_path,
        ["index", "label", "predicted", *(f"score {name}" for name in names)],
        (
            [index, names[label], names[predicted], *(f"{score:.6g}" for score in row)]
            for index, (label, predicted, row) in enumerate(
                zip(test.labels.tolist(), predictions.tolist(), scores.tolist(), strict=True)
            )
        ),
    )
    confusion = confusion_matrix(test.labels.numpy(), predictions.numpy(), len(names))
    rows = ([name, *row] for name, row in zip(names, confusion.tolist(), strict=True))
    write_csv(folder.confusion_path, ["true \\ predicted", *names], rows)
    write_json(folder.result_path, {"confusion": confusion.tolist(), "log_size": run.log_size()})


def _write_metrics(run: RunDir, stream: Stream, config: RunConfig, state: State) -> dict[str, Any]:
    """metrics.json over the tasks done so far."""
    arrival = [stream.class_names[c] for c in stream.order]
    done = [run.task(n) for n in range(1, len(stream.sizes) + 1) if run.task(n).is_done]
    confusions = [np.array(read_json(task.result_path)["confusion"]) for task in done]
    metrics = {
        "format": 1,
        "label": config.label,
        "dataset": config.data.name,
        "synthetic": stream.is_synthetic,
        "split": stream.split,
        "method": config.method["name"],
        "finished": len(done) == len(stream.sizes),
        "class_names": arrival,
        "class_order": list(stream.order),
        "task_sizes": list(stream.sizes),
        "inherent_counts": state.inherent_counts.tolist(),
        **summarize(
            confusions, task_sizes=stream.sizes, class_names=arrival, original_labels=list(stream.order)
        ),
    }
    write_json(run.metrics_path, metrics)
    return metrics


def _note_start(run: RunDir, config: RunConfig) -> None:
    """environment.json: where the newest part of the run is computed; timings.jsonl: where each part was."""
    where = environment(config.execution)
    write_json(run.environment_path, where)
    run.append(run.timings_path, {"started": where, "unix_time": round(time.time(), 3)})


def _check_same_scenario(stream: Stream, config: RunConfig) -> None:
    """A stream shared with a run of the other kind would train something else than the recipe says."""
    if stream.is_cumulative != config.scenario.cumulative:
        raise ValueError(
            f"scenario.cumulative is {config.scenario.cumulative}, the stream's {stream.is_cumulative}"
        )


def _check_same_data(run: RunDir, now: Fingerprint) -> None:
    """Refuse to resume on other images, labels or weights than those the run was started with."""
    what = difference(read_json(run.data_path), now) if run.data_path.exists() else None
    if what is not None:
        key = {"images": "the images or labels at data.root", "weights": "the bytes of network.weights"}
        raise RunConflict(
            f"{run.root} was started with other {what}: {key[what]} are not the same. "
            f"Give another --out, or the {what} it was started with."
        )
