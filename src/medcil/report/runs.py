"""Read runs as frozen records, from directories or lines of `runs.jsonl`, and write such lines.

Needs neither torch nor a drawing library.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.metrics.catalogue import METRICS, of_recalls
from medcil.recipe import leaves
from medcil.storage.atomic import read_json, write_bytes

FORMAT = 1
# How the settings begin that say where a run was computed and what it was called, not what it is.
MACHINE_KEYS = ("execution.", "data.root", "label")
ARCHIVE = "runs.jsonl"
LARGEST_CONFUSION = 20
"""In classes; larger matrices would be most of an archive."""


def _if_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


Measured = Annotated[float | None, AfterValidator(_if_finite)]
"""None: not measured."""


@validated(frozen=True)
class StepRecord:
    """Measurements after one step, in the order of `classes`."""

    step: int
    classes: tuple[str, ...]
    n_old: int = 0
    micro: Measured = None
    balanced: Measured = None
    recall: tuple[Measured, ...] = ()
    macro_f1: Measured = None
    old: Measured = None
    new: Measured = None
    kappa: Measured = None
    forgetting: Measured = None
    confusion: tuple[tuple[int, ...], ...] | None = None  # rows: true class, columns: predicted class

    def __post_init__(self) -> None:
        n = len(self.classes)
        if not self.recall:
            object.__setattr__(self, "recall", (None,) * n)
        if len(self.recall) != n:
            raise ValueError(f"step {self.step}: {len(self.recall)} recalls for {n} classes")
        if self.confusion is not None and [len(row) for row in self.confusion] != [n] * n:
            raise ValueError(f"step {self.step}: the confusion matrix is not one row and column per class")


@validated(frozen=True)
class EpochRecord:
    task: int
    epoch: int
    phase: str = ""
    phase_number: int | None = None  # phases may share a name; older logs do not number them
    losses: Mapping[str, Measured] = field(default_factory=dict)
    total: Measured = None


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

    @property
    def progress(self) -> str:
        total = f" of {len(self.task_sizes)}" if self.task_sizes else ""
        return f"{len(self.steps)}{total} steps"


@dataclass(frozen=True)
class ArchivedRun:
    """One line of `runs.jsonl`: a run's recipe, environment, data and metrics, and its places in a suite."""

    path: Path  # runs.jsonl#L7: a code host opens the line by this name
    content: Mapping[str, Any]


RunSource = Path | ArchivedRun


def read_archive(file: Path) -> list[ArchivedRun]:
    """Read every run that `medcil report SUITE --out FOLDER` stored in one file."""
    runs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise DamagedFile(
                f"Line {number} of {file} is no JSON object. Restore the file.", code="run.archive.damaged"
            )
        runs.append(ArchivedRun(file.with_name(f"{file.name}#L{number}"), content))
    return runs


def read_content(run: Path) -> dict[str, Any]:
    """Read the files of a run directory that tables are drawn from, as a line of `runs.jsonl` has them."""
    if not (run / "metrics.json").is_file():
        if (run / "config.yaml").is_file():
            raise InvalidInput(
                f"No step of {run} is finished: it has no metrics.json. Wait for its first step.",
                code="run.step.missing",
            )
        raise InvalidInput(
            f"Not a run directory: {run}. Give one that holds config.yaml and metrics.json.",
            code="run.directory.invalid",
        )
    names = ("config.yaml", "environment.json", "data.json", "metrics.json")
    return {name.partition(".")[0]: _read_mapping(run / name) for name in names}


def read_run(source: RunSource) -> RunRecord:
    """Read everything that the tables, figures and pages show of one run."""
    run = ArchivedRun(source, read_content(source)) if isinstance(source, Path) else source
    path, content = run.path, run.content
    try:
        metrics = content["metrics"]
        _check_metrics(metrics, path)
        steps = TypeAdapter(tuple[StepRecord, ...]).validate_python(metrics["steps"])
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


def _check_metrics(metrics: Mapping[str, Any], path: Path) -> None:
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


def _summary(metrics: Mapping[str, Any], steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Return the recorded metrics; compute newer ones from the recalls if they suffice."""
    written = {name: _if_finite(metrics[name]) for name in METRICS if name in metrics}
    computed: dict[str, float | None] = {}
    if len(written) < len(METRICS) and metrics.get("task_sizes"):
        computed = of_recalls([step.recall for step in steps], metrics["task_sizes"])
    return {name: written.get(name, computed.get(name)) for name in METRICS}


def _read_log(file: Path) -> tuple[EpochRecord, ...]:
    """Read one record per epoch; of an epoch that was run twice because of a stop, the last."""
    epochs: dict[tuple[int, int | None, str, int], EpochRecord] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            record = TypeAdapter(EpochRecord).validate_json(line)
        except ValidationError:
            continue  # a run that was stopped while it wrote leaves half a line
        epochs[record.task, record.phase_number, record.phase, record.epoch] = record
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


def settings_of(run: RunRecord) -> dict[str, Any]:
    """Return the recipe by dotted key, without the keys and paths of a machine."""
    settings = {key: value for key, value in leaves(run.config) if not key.startswith(MACHINE_KEYS)}
    if settings.get("network.weights"):
        settings["network.weights"] = Path(settings["network.weights"]).name
    return settings


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
    lines = [
        {"key": run["key"], "places": run["places"], "set": index["set"]}
        | _shareable(read_content(folder / run["path"]))
        for run in index["runs"]
        if run["state"] == "finished"
    ]
    taken = [place for line in lines for place in line["places"]]
    earlier = [dict(run.content) for run in read_archive(out / ARCHIVE)] if (out / ARCHIVE).is_file() else []
    for line in earlier:
        line["places"] = [place for place in line["places"] if place not in taken]
    lines = [line for line in earlier if line["places"]] + lines
    text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for line in lines)
    write_bytes(out / "suite.yaml", (folder / "suite.yaml").read_bytes())
    write_bytes(out / ARCHIVE, "".join(f"{line}\n" for line in text).encode())


def _shareable(content: dict[str, Any]) -> dict[str, Any]:
    config = content["config"]
    config["data"]["root"] = None
    if config["network"].get("weights") is not None:
        config["network"]["weights"] = Path(config["network"]["weights"]).name
    for step in content["metrics"]["steps"]:
        if len(step["classes"]) > LARGEST_CONFUSION:
            step["confusion"] = None
    return content


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the runs' labels, with the folder where two share one, marked if unfinished or not ranked."""
    shared = Counter(run.label for run in runs)
    labels = []
    for run in runs:
        label = run.label if shared[run.label] == 1 else f"{run.label} ({run.path.name})"
        if run.is_upper_bound:
            label += " (upper bound)"
        if not run.is_finished:
            label += f" (unfinished: {run.progress})"
        labels.append(label)
    return labels


def are_comparable(runs: Sequence[RunRecord]) -> bool:
    """Whether all runs have the same classes of the same data, arriving in the same steps."""
    return len({(run.dataset, run.class_names, run.task_sizes) for run in runs}) == 1
