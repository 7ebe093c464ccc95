"""Read a suite's runs into cells, one for each row and setting, and average them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput, MedcilError, nearest
from medcil.experiments.suite import (
    FigureSpec,
    Place,
    Row,
    Suite,
    checked_name,
    load_suite,
    order_and_seed,
    order_name,
)
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import mean_and_deviation
from medcil.report.runs import ARCHIVE, RunRecord, read_archive, read_run
from medcil.storage.atomic import read_json

FORMAT = 1
FILES = (("suite.yaml",), ("runs.json", ARCHIVE))
"""A suite's folder has one of each."""
Order = int | str
Seed = int | str


class NotDrawn(Exception):
    """A figure cannot be drawn; the page shows the reason instead."""


@dataclass(frozen=True)
class PlacedRun:
    """A run in its cell; `why` is the reason why it does not count, None if it is finished."""

    order: Order
    path: str  # from the folder of the results
    record: RunRecord | None
    state: str = "finished"
    why: str | None = None
    seed: Seed | None = None
    """None in a suite without seeds."""

    @property
    def name(self) -> Order:
        """Identify the run within its row."""
        return order_and_seed(self.order, self.seed)

    @property
    def counts(self) -> bool:
        return self.state == "finished" and self.record is not None


@dataclass(frozen=True)
class Summary:
    """One metric of a cell's finished runs in percent; the seeds of an order are one value."""

    values: Mapping[Order, float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return mean_and_deviation(list(self.values.values()))[0]

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None for a single value."""
        return mean_and_deviation(list(self.values.values()))[1]


@dataclass(frozen=True)
class Results:
    """The runs of a suite, from which tables, figures and the page are made."""

    name: str
    folder: Path
    suite: Suite
    runs: Mapping[tuple[str, str], tuple[PlacedRun, ...]]
    """(row, setting) -> its runs, in the suite's order of class orders and seeds."""
    changes: tuple[str, ...] = ()
    """Settings of --set, which differ from the suite as written."""
    left_out: tuple[str, ...] = ()
    is_ranked: bool = False
    """On a leaderboard rows are sorted, best first and upper bounds last, and compared with the first."""
    over_seeds: tuple[str, ...] = ()
    """Settings of one class order and several seeds; their means and intervals are over seeds."""

    @property
    def settings(self) -> list[str]:
        """The settings that have runs."""
        return [name for name in self.suite.settings if any(place[1] == name for place in self.runs)]

    def rows(self, setting: str) -> list[str]:
        rows = [row.name for row in self.suite.expanded_rows() if self.runs.get((row.name, setting))]
        if not self.is_ranked:
            return rows
        metric = next(iter(self.suite.metrics.values()))
        found = {row: summary for row in rows if (summary := self.summary(row, setting, metric)).n}
        sign = 1 if METRICS[metric].is_lower_better else -1
        methods = [summary for row, summary in found.items() if not self.is_upper_bound(row, setting)]
        complete = most_complete(methods)  # over other orders a mean is larger or smaller for their sake

        def place(row: str) -> tuple[bool, bool, float]:
            is_over_others = set(found[row].values) != complete
            return self.is_upper_bound(row, setting), is_over_others, sign * found[row].mean

        return sorted(found, key=place) + [row for row in rows if row not in found]

    def n_expected(self, setting: str) -> int:
        """Count the values of a complete cell."""
        if not self.is_ranked:
            return len(self.seeds(setting) if setting in self.over_seeds else self.orders(setting))
        return len({self.unit(run, setting) for run in self._runs_of(setting)})

    def n_runs(self, setting: str) -> int:
        """Count the runs of a complete cell."""
        return self.n_expected(setting) if self.is_ranked else len(self.suite.places("", setting))

    def orders(self, setting: str) -> list[Order]:
        if not self.is_ranked:
            return list(self.suite.orders_of(setting))
        found = {run.order for run in self._runs_of(setting)}
        return [order for order in map(order_name, self.suite.orders) if order in found]

    def seeds(self, setting: str) -> list[Seed]:
        """List the seeds; None means a suite without seeds."""
        if not self.is_ranked:
            return list(self.suite.seeds)
        return sorted({run.seed for run in self._runs_of(setting) if run.seed is not None}, key=str)

    def _runs_of(self, setting: str) -> list[PlacedRun]:
        return [run for (_, name), runs in self.runs.items() if name == setting for run in runs]

    def unit(self, run: PlacedRun, setting: str) -> Order:
        """Return what a run's value is averaged into: its class order, or itself if there is one order."""
        return run.name if setting in self.over_seeds else run.order

    def placed(self, row: str, setting: str) -> tuple[PlacedRun, ...]:
        return self.runs.get((row, setting), ())

    def finished(self, row: str, setting: str) -> list[tuple[PlacedRun, RunRecord]]:
        return [(run, run.record) for run in self.placed(row, setting) if run.counts and run.record]

    def records(self, row: str, setting: str) -> dict[Order, RunRecord]:
        """Map the names of the finished runs to their records."""
        return {run.name: record for run, record in self.finished(row, setting)}

    def measured(self, row: str, setting: str, metric: str) -> list[tuple[PlacedRun, float]]:
        """Return the metric in percent for every finished run that has it."""
        found = ((run, record.summary[metric]) for run, record in self.finished(row, setting))
        return [(run, 100 * value) for run, value in found if value is not None]

    def summary(self, row: str, setting: str, metric: str) -> Summary:
        found = self.measured(row, setting, metric)
        return Summary(averaged((self.unit(run, setting), value) for run, value in found))

    def is_upper_bound(self, row: str, setting: str) -> bool:
        return any(record.is_upper_bound for record in self.records(row, setting).values())

    def not_finished(self) -> list[tuple[str, str, PlacedRun]]:
        return [
            (row, setting, run)
            for (row, setting), placed in self.runs.items()
            for run in placed
            if not run.counts
        ]

    def finished_records(self) -> list[RunRecord]:
        return [run.record for placed in self.runs.values() for run in placed if run.counts and run.record]


def averaged(values: Iterable[tuple[Order, float]]) -> dict[Order, float]:
    """Average the values of each unit: a class order over its seeds."""
    found: dict[Order, list[float]] = {}
    for unit, value in values:
        found.setdefault(unit, []).append(value)
    return {unit: sum(each) / len(each) for unit, each in found.items()}


def varied_rows(suite: Suite) -> list[tuple[str, Row]]:
    """List every expanded row with the name it was expanded from."""
    rows = suite.expanded_rows()
    per_name = len(rows) // len(suite.rows)
    return [(list(suite.rows)[i // per_name], row) for i, row in enumerate(rows)]


def varied_summaries(results: Results, base: str, setting: str, metric: str) -> list[tuple[Row, Summary]]:
    """Summarize the rows expanded from one over the class orders that all of them have finished.

    Over other orders values would differ for the orders' sake.
    """
    rows = [row for name, row in varied_rows(results.suite) if name == base]
    found = [(row, results.summary(row.name, setting, metric)) for row in rows]
    found = [(row, summary) for row, summary in found if summary.n]
    if not found:
        return []
    shared = set.intersection(*(set(summary.values) for _, summary in found))
    if not shared:
        raise NotDrawn(f"no class order of {base}, {setting} is finished for all values that have runs")
    return [
        (row, Summary({order: value for order, value in summary.values.items() if order in shared}))
        for row, summary in found
    ]


def most_complete(summaries: Sequence[Summary]) -> set[Order]:
    """Find the largest set of orders; of several, the most frequent one."""
    found = Counter(frozenset(summary.values) for summary in summaries)
    ranked = sorted(found, key=lambda orders: (len(orders), found[orders]), reverse=True)
    return set(ranked[0]) if ranked else set()


def figure_settings(results: Results, spec: FigureSpec) -> list[str]:
    return [setting for setting in results.settings if not spec.settings or setting in spec.settings]


def figure_rows(results: Results, spec: FigureSpec, setting: str) -> list[str]:
    return [row for row in results.rows(setting) if not spec.rows or row in spec.rows]


def metric_label(results: Results, metric: str) -> str:
    """Return the column's name with its unit."""
    named = next(
        (name for name, key in results.suite.metrics.items() if key == metric), METRICS[metric].title
    )
    return f"{named} ({'points' if METRICS[metric].is_lower_better else '%'})"


def chosen_run(results: Results, spec: FigureSpec, row: str, setting: str) -> RunRecord | None:
    """Return the run of the figure's order, by default the first."""
    place = results.suite.place_shown(spec, row, setting)
    return results.records(row, setting).get(place.order_and_seed)


def first_line(error: Exception, folder: Path) -> str:
    """Return the first line of an error, with paths relative to the folder."""
    return str(error).splitlines()[0].replace(f"{folder}/", "")


def read_results(folder: Path) -> Results:
    """Read a suite's folder: suite.yaml, and runs.jsonl or the run directories that runs.json names."""
    if not all(any((folder / name).is_file() for name in names) for names in FILES):
        raise InvalidInput(
            f"No results of a suite in {folder}. Give a folder with suite.yaml and runs.json or {ARCHIVE}.",
            code="suite.results.missing",
        )
    suite = load_suite(str(folder / "suite.yaml"))
    for column, metric in suite.metrics.items():
        if metric not in METRICS:
            raise InvalidInput(
                f"Unknown metric in metrics.{column}: {metric!r}. {nearest(metric, METRICS)}",
                code="suite.metric.unknown",
            )
    try:
        content = _read_index(folder)
        if content["format"] != FORMAT:
            raise InvalidInput(
                f"Unknown format of {folder / 'runs.json'}: {content['format']}, not {FORMAT}. "
                "Use the version of medcil that wrote it.",
                code="suite.results.unsupported",
            )
        return Results(
            name=checked_name(str(content["suite"])),
            folder=folder,
            suite=suite,
            runs=_at_their_places(suite, folder, content["runs"]),
            changes=tuple(content.get("set") or ()),
            left_out=tuple(content.get("left_out") or ()),
            over_seeds=tuple(
                setting for setting in suite.settings if len(suite.orders_of(setting)) == 1 < len(suite.seeds)
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"The list of runs in {folder} is incomplete: {error!r}. Run `medcil bench` again.",
            code="suite.results.damaged",
        ) from None


def _read_index(folder: Path) -> dict[str, Any]:
    """Read runs.json, or make the same of the lines of runs.jsonl."""
    if (folder / "runs.json").is_file():
        index: dict[str, Any] = read_json(folder / "runs.json")
        return index
    runs = read_archive(folder / ARCHIVE)
    changes = dict.fromkeys(change for run in runs for change in run.content["set"])
    entries = [
        {"path": run.path.name, "places": run.content["places"], "state": "finished", "source": run}
        for run in runs
    ]
    return {"format": FORMAT, "suite": folder.resolve().name, "set": list(changes), "runs": entries}


def _at_their_places(
    suite: Suite, folder: Path, entries: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], tuple[PlacedRun, ...]]:
    runs: dict[Place, PlacedRun] = {}
    for entry in entries:
        run = _placed_run(folder, entry)
        for place in (Place(*listed) for listed in entry["places"]):
            runs[place] = replace(run, order=place.order, seed=place.seed)
    cells: dict[tuple[str, str], tuple[PlacedRun, ...]] = {}
    for setting in suite.settings:
        for row in suite.expanded_rows():
            placed = tuple(runs[place] for place in suite.places(row.name, setting) if place in runs)
            if placed:
                cells[row.name, setting] = placed
    return cells


def _placed_run(folder: Path, entry: Mapping[str, Any]) -> PlacedRun:
    path, state, why = str(entry["path"]), str(entry["state"]), entry.get("why")
    if state != "finished":
        return PlacedRun("", path, None, state, why or "it was not run yet")
    try:
        record = read_run(entry.get("source", folder / path))
    except MedcilError as error:  # one damaged run does not take the others' table with it
        return PlacedRun("", path, None, "failed", first_line(error, folder))
    if not record.is_finished:
        return PlacedRun("", path, record, "unfinished", "not all of its steps are done")
    return PlacedRun("", path, record)
