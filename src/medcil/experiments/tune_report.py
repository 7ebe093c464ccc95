"""What a search leaves for people: a table of its trials, and the words above the recipe it chose."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

Record = Mapping[str, Any]
ABOVE_THE_RECIPE, ABOVE_THE_TABLE = "Chosen by medcil tune.", "# Tuning"


def how_chosen(record: Record) -> str:
    """In sentences."""
    search, chosen = record["search"], record["chosen"]
    values = ", ".join(f"{symbol} = {chosen[key]:g}" for key, symbol in record["parameters"].items())
    if search["sampler"] == "counts":
        mean = sum(record["class_counts"]) / len(record["class_counts"])
        return (
            f"{values}: α by the rule of thumb 2 (m / q)^(1/3), with m = {record['exemplars_per_class']} "
            f"exemplars and on average q = {mean:,.0f} training images a class; the weights are the "
            "recipe's. Nothing was trained."
        )
    trials = record["trials"]
    best, own = trials[record["best"]], trials[0]
    done = sum(trial["state"] != "unfinished" for trial in trials)
    orders = ", ".join(str(order) for order in search["orders"])
    beside = "" if own["score"] is None else f" (the recipe's own values: {100 * own['score']:.1f}%)"
    return (
        f"{values}: the best of {done} trials ({search['sampler']}, seed {search['seed']}) by "
        f"{search['objective']} on {100 * search['held_out']:g}% of the training images, held out; class "
        f"order {orders}: {100 * best['score']:.1f}%{beside}. The test images were not read. The best of "
        "many is too good a figure: run this recipe for an honest one."
    )


def recipe_text(record: Record) -> str:
    lines = wrap(f"{ABOVE_THE_RECIPE} {how_chosen(record)}", width=116, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines)


def table_text(record: Record) -> str:
    """Markdown; the best trial in bold."""
    search = record["search"]
    lines = [ABOVE_THE_TABLE, ""]
    if record["chosen"] is not None:
        lines += [*wrap(how_chosen(record), width=118), ""]
    if not record["trials"]:
        return "\n".join(lines)
    orders = [f"order {order}" for order in search["orders"]]
    columns = ["trial", *record["parameters"].values(), *orders, search["objective"], "runs"]
    lines += [_row(columns), "|" + "---|" * len(columns)]
    lines += [_row(_cells(trial, record)) for trial in record["trials"]]
    return "\n".join(lines) + "\n"


def _cells(trial: Mapping[str, Any], record: Record) -> list[str]:
    values = [f"{trial['values'][key]:g}" for key in record["parameters"]]
    cells = [str(trial["number"]), *values]
    runs = trial.get("runs") or []
    scores = [f"{100 * run['score']:.1f}" for run in runs]
    scores += [""] * (len(record["search"]["orders"]) - len(scores))
    if trial["state"] == "finished":
        cells += [*scores, f"{100 * trial['score']:.1f}"]
    else:
        cells += [*scores, trial["state"] if trial["state"] == "unfinished" else f"failed: {trial['why']}"]
    if trial["number"] == record["best"]:
        cells = [f"**{cell}**" for cell in cells]
    return [*cells, " ".join(f"[{run['key']}]({run['path']})" for run in runs)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
