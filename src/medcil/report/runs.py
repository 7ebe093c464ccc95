"""Read a run as one frozen record, from its directory or from a line of `runs.jsonl`; write such lines."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.metrics.catalogue import METRICS, of_recalls
from medcil.storage.atomic import read_json, write_bytes

FORMAT = 1
# How the settings begin that say where a run was computed and what it was called, not what it is.
MACHINE_KEYS = ("execution.", "data.root", "label")


@dataclass(frozen=True)
class StepRecord:
    """Measurements after one step, in the order of `classes`; None means not measured."""

    step: int
    classes: tuple[str, ...]
    n_old: int
    micro: float | None
    balanced: float | None
    recall: tuple[float | None, ...]
    macro_f1: float | None
    old: float | None
    new: float | None
    kappa: float | None
    forgetting: float | None
    confusion: tuple[tuple[int, ...], ...] | None  # rows: true class, columns: predicted class


@dataclass(frozen=True)
class EpochRecord:
    task: int
    phase: str
    epoch: int
    losses: Mapping[str, float | None]
    total: float | None


@dataclass(frozen=True)
class Exemplar:
    path: Path
    class_name: str
    rank: int


@dataclass(frozen=True)
class RunRecord:
    path: Path
    label: str
    dataset: str
    is_synthetic: bool
    is_finished: bool
    class_names: tuple[str, ...]  # in order of arrival
    task_sizes: tuple[int, ...]
    inherent_counts: tuple[int | None, ...]
    summary: Mapping[str, float | None]
    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    exemplars: tuple[Exemplar, ...]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def last(self) -> StepRecord:
        return self.steps[-1]

    @property
    def is_upper_bound(self) -> bool:
        """Whether each step was trained on all images so far; such runs are shown, but not ranked."""
        return bool((self.config.get("scenario") or {}).get("cumulative"))


@dataclass(frozen=True)
class ArchivedRun:
    """One line of `runs.jsonl`: a run's recipe, environment, data and metrics, and its places in a suite."""

    path: Path  # runs.jsonl#L7: a code host opens the line by this name
    content: Mapping[str, Any]


RunSource = Path | ArchivedRun
ARCHIVE = "runs.jsonl"


def read_archive(file: Path) -> list[ArchivedRun]:
    """Read every run that `medcil report SUITE --out FOLDER` stored in one file."""
    runs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        path = file.with_name(f"{file.name}#L{number}")
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DamagedFile(
                f"Line {number} of {file} is not JSON: {error}. Restore the file.",
                code="run.archive.damaged",
            ) from None
        if not isinstance(content, dict):
            raise DamagedFile(
                f"Line {number} of {file} has no keys and values. Restore the file.",
                code="run.archive.damaged",
            )
        runs.append(ArchivedRun(path, content))
    return runs


def read_content(run: Path) -> dict[str, Any]:
    """Read the files of a run directory that tables are drawn from, as a line of `runs.jsonl` has them."""
    names = {"config": "config.yaml", "environment": "environment.json", "data": "data.json"}
    content: dict[str, Any] = {key: _read_mapping(run / name) for key, name in names.items()}
    return {**content, "metrics": _read_metrics(run)}


def read_run(source: RunSource) -> RunRecord:
    """Read everything that the tables, figures and pages show of one run."""
    path, content = (
        (source, read_content(source)) if isinstance(source, Path) else (source.path, source.content)
    )
    try:
        metrics = _checked_metrics(content["metrics"], path)
        steps = tuple(_step(entry) for entry in metrics["steps"])
        class_names = tuple(str(name) for name in metrics["class_names"])
        counts = tuple(metrics.get("inherent_counts") or ())
        return RunRecord(
            path=path,
            label=str(metrics.get("label") or metrics.get("method") or path.name),
            dataset=str(metrics.get("dataset") or "unnamed data"),
            is_synthetic=bool(metrics.get("synthetic")),
            is_finished=bool(metrics.get("finished")),
            class_names=class_names,
            task_sizes=tuple(metrics.get("task_sizes") or ()),
            inherent_counts=counts if len(counts) == len(class_names) else (None,) * len(class_names),
            summary=_summary(metrics, steps),
            steps=steps,
            epochs=_read_log(path / "log.jsonl"),
            exemplars=_read_exemplars(path),
            config=content["config"],
            environment=content["environment"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(
            f"The files of {path} are incomplete. Run it again.\n{type(error).__name__}: {error}",
            code="run.content.damaged",
        ) from error


def _read_metrics(path: Path) -> dict[str, Any]:
    file = path / "metrics.json"
    if not file.is_file():
        if (path / "config.yaml").is_file():
            raise InvalidInput(
                f"No step of {path} is finished: it has no metrics.json. Wait for its first step.",
                code="run.step.missing",
            )
        raise InvalidInput(
            f"Not a run directory: {path}. Give one that holds config.yaml and metrics.json.",
            code="run.directory.invalid",
        )
    return _read_mapping(file)


def _checked_metrics(metrics: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    if metrics.get("format") != FORMAT:
        raise InvalidInput(
            f"Unknown format of the metrics of {path}: {metrics.get('format')}, not {FORMAT}. "
            "Use the version of medcil that wrote them.",
            code="run.format.unsupported",
        )
    if not metrics.get("steps"):
        raise InvalidInput(
            f"No step of {path} is finished. Wait for its first step.", code="run.step.missing"
        )
    return metrics


def _read_mapping(file: Path) -> dict[str, Any]:
    """Read a YAML or JSON file; an absent one is an empty mapping."""
    if not file.is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise DamagedFile(
            f"Restore {file} or run the experiment again: it cannot be read.\n{error}"
        ) from error
    if not isinstance(content, dict):
        raise DamagedFile(f"Restore {file} or run the experiment again: it has no keys and values.")
    return content


def _step(entry: Mapping[str, Any]) -> StepRecord:
    classes = tuple(str(name) for name in entry["classes"])
    recall = tuple(_number(value) for value in entry.get("recall") or [None] * len(classes))
    confusion = entry.get("confusion")
    rows = None if confusion is None else tuple(tuple(int(n) for n in row) for row in confusion)
    if len(recall) != len(classes):
        raise ValueError(f"step {entry['step']}: {len(recall)} recalls for {len(classes)} classes")
    if rows is not None and [len(row) for row in rows] != [len(classes)] * len(classes):
        raise ValueError(f"step {entry['step']}: the confusion matrix is not one row and column per class")
    return StepRecord(
        step=int(entry["step"]),
        classes=classes,
        n_old=int(entry.get("n_old") or 0),
        micro=_number(entry.get("micro")),
        balanced=_number(entry.get("balanced")),
        recall=recall,
        macro_f1=_number(entry.get("macro_f1")),
        old=_number(entry.get("old")),
        new=_number(entry.get("new")),
        kappa=_number(entry.get("kappa")),
        forgetting=_number(entry.get("forgetting")),
        confusion=rows,
    )


def _summary(metrics: Mapping[str, Any], steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Return the recorded metrics; compute newer ones from the recalls if they suffice."""
    written = {name: _number(metrics[name]) for name in METRICS if name in metrics}
    if len(written) == len(METRICS) or not metrics.get("task_sizes"):
        return {name: written.get(name) for name in METRICS}
    computed = of_recalls([step.recall for step in steps], metrics["task_sizes"])
    return {name: written.get(name, computed.get(name)) for name in METRICS}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _read_log(file: Path) -> tuple[EpochRecord, ...]:
    """Read one record per epoch; of an epoch that was run twice because of a stop, the last."""
    if not file.is_file():
        return ()
    epochs: dict[tuple[int, int | None, str, int], EpochRecord] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a run that was stopped while it wrote leaves half a line
        record = EpochRecord(
            task=int(entry["task"]),
            phase=str(entry.get("phase", "")),
            epoch=int(entry["epoch"]),
            losses={str(name): _number(value) for name, value in (entry.get("losses") or {}).items()},
            total=_number(entry.get("total")),
        )
        number = entry.get("phase_number")  # phases may share a name; older logs do not number them
        epochs[record.task, number, record.phase, record.epoch] = record
    return tuple(epochs.values())


def _read_exemplars(path: Path) -> tuple[Exemplar, ...]:
    """List the exemplars after the newest task that has some."""
    manifests: Sequence[Path] = sorted(path.glob("tasks/*/state/manifest.json"))
    if not manifests:
        return ()
    state = manifests[-1].parent.resolve()
    exemplars = []
    for entry in _read_mapping(manifests[-1]).get("exemplars") or []:
        file = (state / str(entry["file"])).resolve()
        if file.is_relative_to(state):  # a page that is passed on must not carry any other file out
            exemplars.append(Exemplar(file, str(entry["class"]), int(entry.get("rank") or 0)))
    return tuple(exemplars)


LARGEST_CONFUSION = 20
"""In classes; larger matrices would be most of the file."""


def write_archive(folder: Path, out: Path) -> None:
    """Write suite.yaml and runs.jsonl, a line a run, into `out`.

    Runs that `out` has already stay there, unless `folder` has one of the same row, setting, order and seed.
    Weights, predictions, logs and the paths of this machine are left out.
    """
    if not (folder / "runs.json").is_file():
        raise InvalidInput(
            f"No runs.json in {folder}. Give the suite's folder that `medcil bench` wrote.",
            code="suite.results.missing",
        )
    if out.exists() and any(out.iterdir()) and not (out / ARCHIVE).is_file():
        raise RunConflict(
            f"{out} holds other files. Give a new folder as --out.", code="output.folder.exists"
        )
    index = read_json(folder / "runs.json")
    finished = [run for run in index["runs"] if run["state"] == "finished"]
    lines = [
        {"key": run["key"], "places": run["places"], "set": index["set"]}
        | _shareable(read_content(folder / run["path"]))
        for run in finished
    ]
    taken = [place for line in lines for place in line["places"]]
    earlier = [dict(run.content) for run in read_archive(out / ARCHIVE)] if (out / ARCHIVE).is_file() else []
    for line in earlier:
        line["places"] = [place for place in line["places"] if place not in taken]
    lines = [line for line in earlier if line["places"]] + lines
    text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for line in lines)
    write_bytes(out / "suite.yaml", (folder / "suite.yaml").read_bytes())
    write_bytes(out / ARCHIVE, "".join(f"{line}\n" for line in text).encode())


def _shareable(content: Mapping[str, Any]) -> dict[str, Any]:
    config, metrics = content["config"], content["metrics"]
    config["data"]["root"] = None
    if config["network"].get("weights") is not None:
        config["network"]["weights"] = Path(config["network"]["weights"]).name
    for step in metrics["steps"]:
        if len(step["classes"]) > LARGEST_CONFUSION:
            step["confusion"] = None
    return {**content, "config": config, "metrics": metrics}
