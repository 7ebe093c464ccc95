"""Compare runs as plain strings, for the terminal and the page alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from medcil.metrics.catalogue import METRICS
from medcil.report.runs import RunRecord

METHOD = "Method"
COLUMNS = {
    "Balanced accuracy (average)": "acc_balanced",
    "Balanced accuracy (last)": "last_balanced",
    "Micro accuracy": "acc_micro",
    "Forgetting": "forgetting",
}


@dataclass(frozen=True)
class HardestHit:
    """The class that lost most since its best step."""

    class_name: str
    best: float
    last: float


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} points"


def shown(run: RunRecord, metric: str) -> str:
    return (points if METRICS[metric].is_lower_better else percent)(run.summary[metric])


def comparison_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return one row per run: its method, then the headline metrics."""
    return [
        {METHOD: label} | {column: shown(run, metric) for column, metric in COLUMNS.items()}
        for run, label in zip(runs, run_labels(runs), strict=True)
    ]


def best_rows(runs: Sequence[RunRecord]) -> dict[str, set[int]]:
    """Return the rows to print in bold for every column; none where runs cannot be compared."""
    ranked = [i for i, run in enumerate(runs) if _is_ranked(run)]
    if len(ranked) < 2 or not are_comparable(runs):
        return {column: set() for column in COLUMNS}
    best: dict[str, set[int]] = {}
    for column, metric in COLUMNS.items():
        values = {i: v for i in ranked if (v := runs[i].summary[metric]) is not None}
        target = (min if METRICS[metric].is_lower_better else max)(values.values(), default=0.0)
        # Equal to the digits shown: bold must not decide what the reader cannot see.
        best[column] = {i for i, value in values.items() if percent(value) == percent(target)}
    return best


def _is_ranked(run: RunRecord) -> bool:
    return run.is_finished and not run.is_upper_bound


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the runs' labels, with the folder where two share one, marked if unfinished or not ranked."""
    shared = Counter(run.label for run in runs)
    labels = []
    for run in runs:
        label = run.label if shared[run.label] == 1 else f"{run.label} ({run.path.name})"
        if run.is_upper_bound:
            label += " (upper bound)"
        if not run.is_finished:
            label += f" (unfinished: {progress(run)})"
        labels.append(label)
    return labels


def progress(run: RunRecord) -> str:
    total = f" of {len(run.task_sizes)}" if run.task_sizes else ""
    return f"{len(run.steps)}{total} steps"


def are_comparable(runs: Sequence[RunRecord]) -> bool:
    """Whether all runs have the same classes of the same data, arriving in the same steps."""
    return len({(run.dataset, run.class_names, run.task_sizes) for run in runs}) == 1


def findings(runs: Sequence[RunRecord]) -> list[str]:
    """Summarize the comparison in sentences."""
    best = best_rows(runs)
    labels = run_labels(runs)
    if not best["Forgetting"] or len(runs) < 2:
        return []
    sentences = [_least_forgetting(runs, labels, best["Forgetting"])]
    most_accurate = best["Balanced accuracy (last)"]
    if most_accurate:
        names = _join([labels[i] for i in sorted(most_accurate)])
        value = percent(runs[min(most_accurate)].summary["last_balanced"])
        also = "also " if most_accurate == best["Forgetting"] else ""
        verb = "is" if len(most_accurate) == 1 else "are"
        sentences.append(
            f"After the last step {names} {verb} {also}the most accurate over all classes: "
            f"{value} balanced accuracy."
        )
    return sentences


def _least_forgetting(runs: Sequence[RunRecord], labels: Sequence[str], best: set[int]) -> str:
    if len(best) > 1:
        return f"{_join([labels[i] for i in sorted(best)])} forget equally little."
    measured = sorted(
        (value, label)
        for run, label in zip(runs, labels, strict=True)
        if _is_ranked(run) and (value := run.summary["forgetting"]) is not None
    )
    (least, winner), *others = measured
    parts = [f"{points(value - least)} less than {label}" for value, label in others]
    return f"{winner} forgets {_join(parts)}." if parts else f"{winner} is the only run with a forgetting."


def hardest_hit(run: RunRecord) -> HardestHit | None:
    """Find the class with the largest loss; None if no old class got worse."""
    found: HardestHit | None = None
    for i, name in enumerate(run.last.classes[: run.last.n_old]):
        earlier = [r for step in run.steps[:-1] if i < len(step.recall) and (r := step.recall[i]) is not None]
        last = run.last.recall[i]
        if last is None or not earlier or max(earlier) <= last:
            continue
        if found is None or max(earlier) - last > found.best - found.last:
            found = HardestHit(name, max(earlier), last)
    return found


def commonest_mistake(run: RunRecord) -> tuple[str, str, int, int] | None:
    """Find the largest confused share after the last step: true, predicted, how often, out of how many."""
    if run.last.confusion is None:
        return None
    mistakes = [
        (n / sum(row), run.last.classes[t], run.last.classes[p], n, sum(row))
        for t, row in enumerate(run.last.confusion)
        for p, n in enumerate(row)
        if t != p and n
    ]
    if not mistakes:
        return None
    _, true, predicted, n, total = max(mistakes, key=lambda mistake: mistake[0])
    return true, predicted, n, total


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
