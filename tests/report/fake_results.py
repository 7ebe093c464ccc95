"""A suite's folder as a sweep leaves it, with runs made of numbers instead of training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
SIZES = (3, 2, 2)
TEST_IMAGES = (60, 120, 40, 30, 50, 20, 20)


def quality(row: str, index: int, order: int) -> float:
    """A row further down forgets less; every order is another story."""
    return min(0.97, 0.72 + 0.03 * index + 0.02 * order + 0.01 * np.sin(7 * index + 3 * order))


def metrics_of(
    kept: float,
    order: int,
    *,
    sizes: Sequence[int] = SIZES,
    names: Sequence[str] = CLASSES,
    label: str | None = None,
    method: str = "balanced",
) -> dict[str, Any]:
    """A whole metrics.json: `kept` is the share of a class's recall that every later step leaves."""
    random = np.random.default_rng([order, int(1e6 * kept)])
    arrival = [names[c] for c in np.random.default_rng(order).permutation(len(names))]
    steps = []
    for t in range(1, len(sizes) + 1):
        n_seen, n_old = sum(sizes[:t]), sum(sizes[: t - 1])
        arrived = np.repeat(np.arange(1, len(sizes) + 1), sizes)[:n_seen]
        recall = np.clip(0.92 * kept ** (t - arrived) + 0.02 * random.standard_normal(n_seen), 0.02, 0.98)
        confusion = np.zeros((n_seen, n_seen), dtype=int)
        for c, share in enumerate(recall):
            wrong = np.full(n_seen - 1, (1 - share) / (n_seen - 1))
            confusion[c] = random.multinomial(
                TEST_IMAGES[names.index(arrival[c]) % 7], np.insert(wrong, c, share)
            )
        hits, totals = confusion.diagonal(), confusion.sum(axis=1)
        steps.append(
            {
                "step": t,
                "classes": arrival[:n_seen],
                "n_old": n_old,
                "micro": float(hits.sum() / totals.sum()),
                "balanced": float((hits / totals).mean()),
                "recall": (hits / totals).tolist(),
                "forgetting": float(0.92 - (hits / totals)[:n_old].mean()) if n_old else 0.0,
                "confusion": confusion.tolist(),
            }
        )

    def mean(key: str) -> float:
        return float(np.mean([step[key] for step in steps]))

    return {
        "format": 1,
        "label": label,
        "dataset": "phantom",
        "synthetic": True,
        "method": method,
        "finished": True,
        "class_names": arrival,
        "task_sizes": list(sizes),
        "inherent_counts": [100] * len(names),
        "acc_micro": mean("micro"),
        "acc_task": mean("micro"),
        "acc_balanced": mean("balanced"),
        "forgetting": mean("forgetting"),
        "forgetting_printed": mean("forgetting"),
        "forgetting_lo2ln": mean("forgetting"),
        "last_micro": steps[-1]["micro"],
        "last_balanced": steps[-1]["balanced"],
        "steps": steps,
    }


def write_run(path: Path, metrics: Mapping[str, Any], **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.json").write_text(json.dumps(metrics))
    content = {"seed": 0, "data": {"name": "phantom"}, "scenario": {"base": 3, "increment": 2, "order": 0}}
    (path / "config.yaml").write_text(yaml.safe_dump(content | {"method": {"name": "balanced"}} | config))
    return path


def suite_of(**changes: Any) -> dict[str, Any]:
    return {
        "title": "Made of numbers",
        "about": "Nothing was trained.",
        "number": "Table 2",
        "metrics": {"Acc": "acc_micro", "Balanced": "acc_balanced", "Fgt": "forgetting"},
        "orders": [0, 1, 2],
        "common": {"data": {"name": "phantom"}, "method": {"name": "balanced"}},
        "settings": {
            "3-2": {"scenario": {"base": 3, "increment": 2}},
            "3-1": {"scenario": {"base": 3, "increment": 1}},
        },
        "rows": {"iCaRL": {}, "iCaRL + L_dm": {}, "λ_d & 5% of #1": {}, "balanced": {}},
        "published": {
            "iCaRL": {"3-2": {"Acc": [76.2, 3.1], "Fgt": [20.1, 12.6]}},
            "balanced": {"3-2": {"Acc": [85.0], "Fgt": [8.0, 3.5]}},
        },
        "figures": [
            {"kind": "curves", "title": "Accuracy", "file": "accuracy", "metric": "micro",
             "number": "Figure 3b"},
            {"kind": "curves", "title": "Forgetting", "file": "forgetting", "metric": "forgetting"},
            {"kind": "confusion", "title": "Confusion", "file": "confusion", "rows": ["iCaRL", "balanced"],
             "settings": ["3-2"], "order": 1},
        ],
    } | changes  # fmt: skip


def write_fake_results(
    out: Path,
    suite: Mapping[str, Any] | None = None,
    *,
    metrics: Mapping[tuple[Any, ...], Mapping[str, Any]] | None = None,
    states: Mapping[tuple[Any, ...], tuple[str, str]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    name: str = "made",
    **content: Any,
) -> Path:
    """OUT/<name>/ with suite.yaml and runs.json, the runs in OUT/runs/; `states`: what did not finish."""
    from medcil.experiments.suite import Suite, cells

    suite = suite or suite_of()
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "suite.yaml").write_text(yaml.safe_dump(dict(suite), sort_keys=False, allow_unicode=True))
    entries = []
    rows = [row.name for row in Suite.model_validate(suite).expanded_rows()]
    orders = list(dict.fromkeys(place.order for place, _ in cells(Suite.model_validate(suite))))
    for number, (place, recipe) in enumerate(cells(Suite.model_validate(suite))):
        row, setting, named, *seed = place = tuple(place.as_list())
        key, (state, why) = f"{number:04x}", (states or {}).get(place, ("finished", None))
        index, order = rows.index(row), orders.index(named)
        made = (metrics or {}).get(place) or metrics_of(
            quality(row, index, order) + 0.004 * sum(seed),
            order,
            sizes=(sizes or {}).get(setting, SIZES),
            method=recipe["method"]["name"],
        )
        if state == "finished":
            write_run(out / "runs" / key, made, **recipe)
        entries.append(
            {"key": key, "path": f"../runs/{key}", "places": [list(place)], "state": state, "why": why}
        )
    runs = {"format": 1, "suite": name, "set": [], "left_out": [], "runs": entries} | content
    (folder / "runs.json").write_text(json.dumps(runs))
    return folder
