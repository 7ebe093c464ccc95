"""A whole run: learn task after task, evaluate after each, record everything, resume where it stopped.

A run resumes on the same images and weights only. The fingerprint of an image is the sha256 of its file: a
prepared store has recorded it; from a folder or an archive every file is read once more at each start of a
run, about as fast as the disk delivers.
"""

import copy
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Int
from torch import Tensor

from medcil.build import RunConfig, build_state, build_stream, method_settings, parse_recipe, resolve
from medcil.data.image_table import ImageTable, hash_files
from medcil.data.samples import Samples, no_samples
from medcil.data.splits import train_and_test
from medcil.data.stream import Stream, Task
from medcil.errors import InvalidInput, MedcilError, RunConflict
from medcil.experiments.processes import is_first_process, processes
from medcil.experiments.suite import Place, load_suite
from medcil.methods.outline import try_out
from medcil.metrics.catalogue import summarize
from medcil.metrics.classification import confusion_matrix
from medcil.models.weights import HUB, find_weights
from medcil.recipe import read_recipe
from medcil.storage.atomic import read_json, sha256, write_bytes, write_csv, write_json
from medcil.storage.overwrite_guard import refuse_within_model
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import FileJournal, PeerJournal, Progress
from medcil.training.distributed import Ranks
from medcil.training.environment import environment, prepare_machine
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, embed, predict_scores
from medcil.training.loop import learn_task, recalibrate
from medcil.training.state import State, load_state, save_state

RunWatch = Callable[[int, int, Progress], None]
"""(number of the task, number of tasks, progress of its training)"""
Fingerprint = dict[str, Any]
FEATURES = "features.safetensors"
FEATURES_PER_CLASS = 150


def run_experiment(
    config: RunConfig,
    out: Path,
    *,
    stream: Stream | None = None,
    watch: RunWatch = lambda number, n_tasks, progress: None,
) -> dict[str, Any]:
    """Run a recipe in a folder, or the rest of it; return the content of its metrics.json.

    `stream` saves reading the data again when several runs share it.
    """
    config = resolve(config)
    prepare_machine(config.execution)
    run = RunDir(out)
    # Errors in the recipe, the weights or the data end it before the folder is changed.
    refuse_within_model(out)
    run.check(config)
    initial = build_state(config)
    try_out(config.method, initial.network, crop=config.data.crop)
    same_work = partial(run_experiment, config, out, stream=stream)
    stream = stream or build_stream(config)
    if stream.is_cumulative != config.scenario.cumulative:
        raise ValueError("The stream and scenario.cumulative differ: the run would not be its recipe.")
    if not is_first_process(config.execution):
        return _run_tasks(run, config, initial, stream, watch)
    with run.locked():
        data = fingerprint(stream, config)
        _check_same_data(run, data)
        run.claim(config)
        write_json(run.data_path, data)
        with processes(config.execution, same_work):
            if not run.task(len(stream.sizes)).is_done:
                _note_start(run, config)
            return _run_tasks(run, config, initial, stream, watch)


def _run_tasks(
    run: RunDir, config: RunConfig, initial: State, stream: Stream, watch: RunWatch
) -> dict[str, Any]:
    """Learn task by task in every process; only the first one writes."""
    ranks = Ranks()
    data = fingerprint(stream, config)
    if ranks.from_first(data) != data:
        raise RunConflict(
            "The processes that train together have different data. Give all the same data.root and weights.",
            code="run.processes.mismatch",
        )
    metrics: dict[str, Any] = {}
    for number, task in enumerate(stream.tasks(), start=1):
        folder = run.task(number)
        if task.n_old == 0:  # the first of a stream, and each of a cumulative one
            state, seen_test = copy.deepcopy(initial), no_samples(config.data.side)
        seen_test += task.test
        if not ranks.from_first(folder.is_learned):
            _learn(run, number, state, task, config, partial(watch, number, len(stream.sizes)))
        ranks.wait()
        # Always through the disk, so that a resumed run cannot differ from an uninterrupted one.
        state = load_state(folder.state)
        if not ranks.from_first(folder.is_done):
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
    learn = partial(learn_task, state, task, config.method, config)
    if not ranks.is_first:
        ranks.wait()
        learn(journal=PeerJournal(run, number))
        return
    before = read_json(run.task(number - 1).result_path)["log_size"] if number > 1 else 0
    journal = FileJournal(run, number, log_size_before=before)
    ranks.wait()  # until what the others read is there
    save_state(learn(journal=journal, watch=watch), run.task(number).state)


def _evaluate(run: RunDir, number: int, state: State, test: Samples, config: RunConfig) -> None:
    """Evaluate on all classes seen; `result.json`, written last, marks the task done."""
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
    """Write metrics.json over the tasks done so far."""
    arrival = [stream.class_names[c] for c in stream.order]
    done = [run.task(n) for n in range(1, len(stream.sizes) + 1) if run.task(n).is_done]
    confusions = [np.array(read_json(task.result_path)["confusion"]) for task in done]
    metrics = {
        "format": 1,
        "label": config.label,
        "dataset": config.data.name,
        "synthetic": stream.is_synthetic,
        "split": stream.split,
        "method": method_settings(config.method)["name"],
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
    """Record where this part of the run is computed: environment.json (the newest), timings.jsonl (all)."""
    where = environment(config.execution)
    write_json(run.environment_path, where)
    run.append(run.timings_path, {"started": where, "unix_time": round(time.time(), 3)})


def _check_same_data(run: RunDir, now: Fingerprint) -> None:
    """Refuse to resume on other images, labels or weights than those the run was started with."""
    what = difference(read_json(run.data_path), now) if run.data_path.exists() else None
    if what is not None:
        key = {"images": "data.root", "weights": "network.weights"}
        raise RunConflict(
            f"{run.root} was started with other {what}: the content of {key[what]} has changed. "
            f"Give another --out, or the original {what}.",
            code="run.data.mismatch",
        )


def fingerprint(stream: Stream, config: RunConfig) -> Fingerprint:
    """Identify the content of a run's images, their labels, and the weights it starts from."""
    return {
        "train": _of_split(stream.train.labels.numpy(), _hashes(stream, stream.train)),
        "test": _of_split(stream.test.labels.numpy(), _hashes(stream, stream.test)),
        **fingerprint_of_weights(config),
    }


def fingerprint_of_weights(config: RunConfig) -> Fingerprint:
    weights = config.network.weights
    if weights is None or weights == HUB:
        return {"weights": weights}
    return {"weights": find_weights(weights, config.network.backbone).sha256}


def fingerprint_of_images(config: RunConfig, table: ImageTable) -> Fingerprint:
    """Compute what a run of this recipe would record of these images, without decoding them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        _, train, test = train_and_test(table, config.data, config.scenario.long_tail)
    hashes = table.sha256 or hash_files(table)
    return {
        name: _of_split(table.labels[part], [hashes[i] for i in part.tolist()])
        for name, part in (("train", train), ("test", test))
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Name what differs, `images` or `weights`; None if nothing does."""
    for what, keys in (("images", ("train", "test")), ("weights", ("weights",))):
        if any(key in before and key in now and before[key] != now[key] for key in keys):
            return what
    return None


def _hashes(stream: Stream, samples: Samples) -> Sequence[str]:
    """Return the hashes of the files; nothing for synthetic images."""
    return () if stream.is_synthetic or samples.ids is None else samples.ids.tolist()


def _of_split(labels: Int[np.ndarray, "n"], sha256s: Sequence[str | None]) -> Fingerprint:
    """Synthetic images have no files: a seed determines them."""
    content = sha256("\n".join(map(str, sha256s)).encode()) if sha256s else None
    labels_sha256 = sha256(labels.astype("<i8").tobytes())
    return {"images": len(labels), "labels_sha256": labels_sha256, "content_sha256": content}


def write_features(run_dir: Path, config: RunConfig, stream: Stream) -> Path:
    """Write the features of test images after the last step of a run, for t-SNE figures.

    features.safetensors holds `features`, `labels` in order of arrival and `images` (test indices). Runs on
    the same data use the same images in the same order, so that figures are comparable. An existing file is
    kept.
    """
    file = run_dir / FEATURES
    if file.is_file():
        return file
    last = RunDir(run_dir).task(len(stream.sizes))
    if not last.is_done:
        raise InvalidInput(f"Finish the run in {run_dir} first: features are those after its last step.")
    prepare_machine(config.execution)
    state, device = load_state(last.state), choose_device(config.execution)
    arrival = {c: i for i, c in enumerate(stream.order[: sum(stream.sizes)])}
    images = chosen_images(stream.test.labels, sorted(arrival))
    samples = stream.test.select(images)
    network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
    with Feed(samples, state.preprocessing, device, config.execution) as feed:
        features = embed(network, feed, torch.arange(len(samples))).cpu()
    tensors = {
        "features": features.to(torch.float16).contiguous(),
        "labels": torch.tensor([arrival[c] for c in samples.labels.tolist()]),
        "images": images,
    }
    # One entry: the order of several is left to chance, and equal runs should have equal files.
    about = {"class_names": list(state.class_names), "n_old": sum(stream.sizes[:-1])}
    write_bytes(file, safetensors.torch.save(tensors, {"medcil": json.dumps(about)}))
    return file


def write_features_for_figures(folder: Path) -> list[str]:
    """Write the features of the finished runs in a suite's t-SNE figures; return a sentence per failure."""
    suite, problems = load_suite(str(folder / "suite.yaml")), []
    shown = {
        suite.place_shown(figure, row.name, setting)
        for figure in suite.figures
        if figure.kind == "tsne"
        for setting in figure.settings or suite.settings
        for row in suite.expanded_rows()
        if not figure.rows or row.name in figure.rows
    }
    streams: dict[str, Stream] = {}
    for entry in read_json(folder / "runs.json")["runs"]:
        run_dir = folder / entry["path"]
        is_shown = any(Place(*place) in shown for place in entry["places"])
        if not is_shown or entry["state"] != "finished" or (run_dir / FEATURES).is_file():
            continue
        try:
            config = RunDir(run_dir).read_config(RunConfig)
            here = config.execution.model_copy(update={"device": "auto", "processes": 1})
            config = config.model_copy(update={"execution": here})  # it may have run on another machine
            data = config.model_dump_json(include={"data", "scenario"})
            streams[data] = streams.get(data) or build_stream(config)
            write_features(run_dir, config, streams[data])
        except (MedcilError, RuntimeError, OSError) as error:  # nor is a lack of memory the tables' fault
            why = next(iter(str(error).splitlines()), type(error).__name__)
            problems.append(f"No features of {run_dir}, so no t-SNE: {why}")
    return problems


def chosen_images(labels: Int[Tensor, "n"], classes: list[int]) -> Int[Tensor, "m"]:
    """Choose up to FEATURES_PER_CLASS images of each class, always the same, in the order of the test set."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for c in classes:
        own = torch.nonzero(labels == c).flatten()
        chosen.append(own[torch.randperm(len(own), generator=generator)[:FEATURES_PER_CLASS]])
    return torch.cat(chosen).sort().values


def demo_configs() -> dict[str, RunConfig]:
    """Read the runs of `medcil demo`: folder -> configuration."""
    demo = read_recipe(Path(__file__).with_name("demo.yaml"))
    return {folder: parse_recipe(demo["common"] | own) for folder, own in demo["runs"].items()}
