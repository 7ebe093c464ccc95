"""A suite's results as cells: which runs stand at a row and a setting, and what they say together."""

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
    """Why a figure cannot be drawn from what is there; the page says it in its place."""


@dataclass(frozen=True)
class PlacedRun:
    """A run at its place in the suite. `why` says why it does not count; None: it is finished."""

    order: Order
    path: str  # from the folder of the results
    record: RunRecord | None
    state: str = "finished"
    why: str | None = None
    seed: Seed | None = None
    """None where class orders alone tell the runs of a row apart."""

    @property
    def name(self) -> Order:
        """Among the runs of its row."""
        return order_and_seed(self.order, self.seed)

    @property
    def counts(self) -> bool:
        return self.state == "finished" and self.record is not None


@dataclass(frozen=True)
class Summary:
    """What the finished runs of a cell say of one metric, in percent; seeds of an order are one value."""

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
    """All that tables, figures and the page of a suite are made of."""

    name: str
    folder: Path
    suite: Suite
    runs: Mapping[tuple[str, str], tuple[PlacedRun, ...]]
    """(row, setting) -> its runs, in the suite's order of class orders and seeds."""
    changes: tuple[str, ...] = ()
    """Settings given with --set: what differs from the suite as it is written."""
    left_out: tuple[str, ...] = ()
    is_ranked: bool = False
    """A leaderboard: the rows of each setting stand best first, upper bounds below the methods; all are
    compared with the first."""
    over_seeds: tuple[str, ...] = ()
    """Settings of one class order and several seeds: there, means and intervals are over seeds."""

    @property
    def settings(self) -> list[str]:
        """Those with any run; others were not asked for, or `left_out` says why they have none."""
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
        """Values that a complete cell is the mean of."""
        if not self.is_ranked:
            return len(self.seeds(setting) if setting in self.over_seeds else self.orders(setting))
        return len({self.unit(run, setting) for run in self._runs_of(setting)})

    def n_runs(self, setting: str) -> int:
        """Runs of a complete cell; of a leaderboard nobody has said how many there should be."""
        return self.n_expected(setting) if self.is_ranked else len(self.suite.places("", setting))

    def orders(self, setting: str) -> list[Order]:
        if not self.is_ranked:
            return list(self.suite.orders_of(setting))
        found = {run.order for run in self._runs_of(setting)}
        return [order for order in map(order_name, self.suite.orders) if order in found]

    def seeds(self, setting: str) -> list[Seed]:
        """None where class orders alone tell the runs of a row apart."""
        if not self.is_ranked:
            return list(self.suite.seeds)
        return sorted({run.seed for run in self._runs_of(setting) if run.seed is not None}, key=str)

    def _runs_of(self, setting: str) -> list[PlacedRun]:
        return [run for (_, name), runs in self.runs.items() if name == setting for run in runs]

    def unit(self, run: PlacedRun, setting: str) -> Order:
        """What a run's value is part of, one of those that means and intervals are over: its class order,
        the seeds of which are averaged first; where there is but one order, the run itself."""
        return run.name if setting in self.over_seeds else run.order

    def placed(self, row: str, setting: str) -> tuple[PlacedRun, ...]:
        return self.runs.get((row, setting), ())

    def finished(self, row: str, setting: str) -> list[tuple[PlacedRun, RunRecord]]:
        return [(run, run.record) for run in self.placed(row, setting) if run.counts and run.record]

    def records(self, row: str, setting: str) -> dict[Order, RunRecord]:
        """Of the finished runs, by their names."""
        return {run.name: record for run, record in self.finished(row, setting)}

    def measured(self, row: str, setting: str, metric: str) -> list[tuple[PlacedRun, float]]:
        """In percent, of the finished runs that have it."""
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
    """Of each unit the mean: of a class order, that over its seeds."""
    found: dict[Order, list[float]] = {}
    for unit, value in values:
        found.setdefault(unit, []).append(value)
    return {unit: sum(each) / len(each) for unit, each in found.items()}


def varied_rows(suite: Suite) -> list[tuple[str, Row]]:
    """Every expanded row with the name it was expanded from."""
    rows = suite.expanded_rows()
    per_name = len(rows) // len(suite.rows)
    return [(list(suite.rows)[i // per_name], row) for i, row in enumerate(rows)]


def varied_summaries(results: Results, base: str, setting: str, metric: str) -> list[tuple[Row, Summary]]:
    """Of the rows expanded from one, those with finished runs, over the class orders all of these have.

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
    """The largest set of orders that any is over; of several, the one that most are over."""
    found = Counter(frozenset(summary.values) for summary in summaries)
    ranked = sorted(found, key=lambda orders: (len(orders), found[orders]), reverse=True)
    return set(ranked[0]) if ranked else set()


def figure_settings(results: Results, spec: FigureSpec) -> list[str]:
    return [setting for setting in results.settings if not spec.settings or setting in spec.settings]


def figure_rows(results: Results, spec: FigureSpec, setting: str) -> list[str]:
    return [row for row in results.rows(setting) if not spec.rows or row in spec.rows]


def metric_label(results: Results, metric: str) -> str:
    """As the table calls it, with its unit."""
    named = next(
        (name for name, key in results.suite.metrics.items() if key == metric), METRICS[metric].title
    )
    return f"{named} ({'points' if METRICS[metric].is_lower_better else '%'})"


def chosen_run(results: Results, spec: FigureSpec, row: str, setting: str) -> RunRecord | None:
    """The run of the order that the figure names; without one, of the first order."""
    place = results.suite.place_shown(spec, row, setting)
    return results.records(row, setting).get(place.order_and_seed)


def first_line(error: Exception, folder: Path) -> str:
    """What went wrong, with paths as the folder's pages link them: these may travel."""
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
