"""Read a suite's runs into cells, one for each row and setting, and average them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from medcil.errors import DamagedFile, InvalidInput, MedcilError
from medcil.experiments.suite import (
    FigureSpec,
    Place,
    Suite,
    checked_name,
    load_suite,
    order_and_seed,
)
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import mean_and_deviation
from medcil.report.runs import ARCHIVE, RunRecord, read_archive, read_run
from medcil.storage.atomic import read_json

FORMAT = 1
Order = int | str


@dataclass(frozen=True)
class PlacedRun:
    """A run in its cell; `record` is None, and `why` says the reason, where it is not finished."""

    order: Order
    path: str  # from the folder of the results
    record: RunRecord | None
    state: str = "finished"
    why: str | None = None
    seed: int | None = None
    """None in a suite without seeds."""

    @property
    def name(self) -> Order:
        """Identify the run within its row."""
        return order_and_seed(self.order, self.seed)


@dataclass(frozen=True)
class Summary:
    """One metric of a cell, or the difference of two, in percent, by class order or by run."""

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

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the mean, by Student's t; None for a single value."""
        if self.deviation is None:
            return None
        half = float(stdtrit(self.n - 1, 0.975)) * self.deviation / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @classmethod
    def averaged(cls, values: Iterable[tuple[Order, float]]) -> "Summary":
        """Average the values of each unit: a class order over its seeds."""
        by_unit: dict[Order, list[float]] = {}
        for unit, value in values:
            by_unit.setdefault(unit, []).append(value)
        return cls({unit: sum(each) / len(each) for unit, each in by_unit.items()})

    def over(self, orders: Iterable[Order]) -> "Summary":
        return Summary({order: self.values[order] for order in orders})

    def minus(self, other: "Summary") -> "Summary":
        """Subtract another row's values, order by order, where both have one."""
        return Summary({key: v - other.values[key] for key, v in self.values.items() if key in other.values})


@dataclass(frozen=True)
class Comparable:
    """Rows of a setting, each with some metrics over the same class orders."""

    rows: Mapping[str, tuple[Summary, ...]]
    orders: tuple[Order, ...]
    left_out: tuple[str, ...]
    """Rows that lack some of these orders; their means would differ for the orders' sake."""


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

    @property
    def settings(self) -> list[str]:
        """The settings that have runs."""
        return [name for name in self.suite.settings if any(place[1] == name for place in self.runs)]

    def rows(self, setting: str) -> list[str]:
        rows = [row.name for row in self.suite.expanded_rows() if self.runs.get((row.name, setting))]
        if not self.is_ranked:
            return rows
        metric = next(iter(self.suite.metrics.values()))
        sign = 1 if METRICS[metric].is_lower_better else -1
        summaries = {row: summary for row in rows if (summary := self.summary(row, setting, metric)).n}
        methods = [summary for row, summary in summaries.items() if not self.is_upper_bound(row, setting)]
        complete = most_complete(methods)  # over other orders a mean is larger or smaller for their sake

        def place(row: str) -> tuple[bool, bool, float]:
            is_over_others = set(summaries[row].values) != complete
            return self.is_upper_bound(row, setting), is_over_others, sign * summaries[row].mean

        return sorted(summaries, key=place) + [row for row in rows if row not in summaries]

    def every_run(self, *settings: str) -> Iterator[tuple[str, str, PlacedRun]]:
        """Yield (row, setting, run), in the order of the tables."""
        for setting in settings or self.settings:
            for row in self.rows(setting):
                for run in self.runs[row, setting]:
                    yield row, setting, run

    def finished_records(self) -> list[RunRecord]:
        return [run.record for _, _, run in self.every_run() if run.record]

    @cached_property
    def _placed(self) -> Mapping[str, Sequence[PlacedRun]]:
        by_setting: dict[str, list[PlacedRun]] = {}
        for (_, setting), placed in self.runs.items():
            by_setting.setdefault(setting, []).extend(placed)
        return by_setting

    def orders(self, setting: str) -> list[Order]:
        """List the suite's class orders; on a leaderboard, those that have runs."""
        present = {run.order for run in self._placed[setting]}
        return [o for o in self.suite.orders_of(setting) if o in present or not self.is_ranked]

    def seeds(self, setting: str) -> list[int]:
        """List the seeds likewise; a suite without seeds has none."""
        present = {run.seed for run in self._placed[setting]}
        return [seed for seed in self.suite.seeds if seed in present or not self.is_ranked]

    def is_over_seeds(self, setting: str) -> bool:
        """Whether there is one class order and several seeds, so that means are over seeds."""
        return len(self.orders(setting)) == 1 < len(self.seeds(setting))

    def unit(self, run: PlacedRun, setting: str) -> Order:
        """Return what a run's value is averaged into: its class order, or itself if there is one order."""
        return run.name if self.is_over_seeds(setting) else run.order

    def n_expected(self, setting: str) -> int:
        """Count the values of a complete cell."""
        return len(self.seeds(setting) if self.is_over_seeds(setting) else self.orders(setting))

    def n_runs(self, setting: str) -> int:
        """Count the runs of a complete cell; on a leaderboard a cell is complete with any seed."""
        n_seeds = 1 if self.is_ranked else max(1, len(self.seeds(setting)))
        return max(self.n_expected(setting), len(self.orders(setting)) * n_seeds)

    def records(self, row: str, setting: str) -> dict[Order, RunRecord]:
        """Map the names of the finished runs to their records."""
        return {run.name: run.record for run in self.runs.get((row, setting), ()) if run.record}

    def values(self, row: str, setting: str, metric: str) -> Summary:
        """Return the metric in percent of every finished run that has it, by the run's name."""
        records = self.records(row, setting).items()
        return Summary(
            {name: 100 * v for name, record in records if (v := record.summary[metric]) is not None}
        )

    def summary(self, row: str, setting: str, metric: str) -> Summary:
        """Return the metric in percent, by class order; the seeds of an order are averaged first."""
        values = self.values(row, setting, metric).values
        runs = [run for run in self.runs.get((row, setting), ()) if run.name in values]
        return Summary.averaged((self.unit(run, setting), values[run.name]) for run in runs)

    def is_upper_bound(self, row: str, setting: str) -> bool:
        return any(record.is_upper_bound for record in self.records(row, setting).values())

    def metric_label(self, metric: str) -> str:
        """Return the column's name with its unit."""
        columns = {key: name for name, key in self.suite.metrics.items()}
        unit = "points" if METRICS[metric].is_lower_better else "%"
        return f"{columns.get(metric, METRICS[metric].title)} ({unit})"

    def figure_metrics(self, spec: FigureSpec) -> tuple[str, ...]:
        """Return the metrics of a whole run that a figure shows."""
        columns = self.suite.metrics
        if spec.x and spec.y:
            return columns[spec.x], columns[spec.y]
        return (spec.metric or next(iter(columns.values())),)

    def figure_settings(self, spec: FigureSpec) -> list[str]:
        return [setting for setting in self.settings if not spec.settings or setting in spec.settings]

    def figure_rows(self, spec: FigureSpec, setting: str) -> list[str]:
        return [row for row in self.rows(setting) if not spec.rows or row in spec.rows]

    def figure_record(self, spec: FigureSpec, row: str, setting: str) -> RunRecord | None:
        """Return the run of the figure's order, by default the first."""
        place = self.suite.place_shown(spec, row, setting)
        return self.records(row, setting).get(place.order_and_seed)

    def comparable(self, spec: FigureSpec, setting: str) -> Comparable:
        """Select the rows of a figure over the most class orders that any of its methods has finished."""
        summaries = {}
        for row in self.figure_rows(spec, setting):
            metrics = [self.summary(row, setting, metric) for metric in self.figure_metrics(spec)]
            if shared := [o for o in metrics[0].values if all(o in each.values for each in metrics)]:
                summaries[row] = tuple(summary.over(shared) for summary in metrics)
        methods = [row for row in summaries if not self.is_upper_bound(row, setting)] or list(summaries)
        complete = most_complete([summaries[row][0] for row in methods])
        rows = {row: each for row, each in summaries.items() if complete <= set(each[0].values)}
        longest = next(iter(rows.values()))[0].values if rows else ()
        orders = tuple(order for order in longest if order in complete)
        return Comparable(
            {row: tuple(summary.over(orders) for summary in each) for row, each in rows.items()},
            orders,
            tuple(row for row in summaries if row not in rows),
        )


def most_complete(summaries: Sequence[Summary]) -> set[Order]:
    """Find the largest set of orders; of several, the most frequent one."""
    counts = Counter(frozenset(summary.values) for summary in summaries)
    return set(max(counts, key=lambda orders: (len(orders), counts[orders]), default=()))


def first_line(error: Exception, folder: Path) -> str:
    """Return the first line of an error, with paths relative to the folder."""
    return str(error).splitlines()[0].replace(f"{folder}/", "")


def read_results(folder: Path) -> Results:
    """Read a suite's folder: suite.yaml, and runs.jsonl or the run directories that runs.json names."""
    has_runs = any((folder / name).is_file() for name in ("runs.json", ARCHIVE))
    if not has_runs or not (folder / "suite.yaml").is_file():
        raise InvalidInput(
            f"No results of a suite in {folder}. Give a folder with suite.yaml and runs.json or {ARCHIVE}.",
            code="suite.results.missing",
        )
    suite = load_suite(str(folder / "suite.yaml"))
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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"The list of runs in {folder} is incomplete: {error!r}. Run `medcil bench` again.",
            code="suite.results.damaged",
        ) from None


def _read_index(folder: Path) -> dict[str, Any]:
    """Read runs.json, or make the same of the lines of runs.jsonl."""
    if (folder / "runs.json").is_file():
        return dict(read_json(folder / "runs.json"))
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
    cells = {
        (row.name, setting): tuple(runs[place] for place in suite.places(row.name, setting) if place in runs)
        for setting in suite.settings
        for row in suite.expanded_rows()
    }
    return {cell: placed for cell, placed in cells.items() if placed}


def _placed_run(folder: Path, entry: Mapping[str, Any]) -> PlacedRun:
    path, state, why = str(entry["path"]), str(entry["state"]), entry.get("why")
    if state != "finished":
        return PlacedRun("", path, None, state, why or "it was not run yet")
    try:
        record = read_run(entry.get("source", folder / path))
    except MedcilError as error:  # one damaged run does not take the others' table with it
        return PlacedRun("", path, None, "failed", first_line(error, folder))
    if not record.is_finished:
        return PlacedRun("", path, None, "unfinished", "not all of its steps are done")
    return PlacedRun("", path, record)
