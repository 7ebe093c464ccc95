"""Run directories as an experiment leaves them, made of numbers instead of training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

CLASS_NAMES = ("nevus", "melanoma", "keratosis", "basal cell", "vascular", "actinic", "fibroma")
COUNTS = (900, 160, 150, 70, 60, 30, 12)
TASK_SIZES = (3, 2, 2)
ENVIRONMENT = {"python": "3.12.1", "torch": "2.11.0", "medcil": "0.1.0", "device": "cpu", "git_commit": None}
TEST_IMAGES = (120, 60, 60, 40, 40, 30, 20)
# Recall of a class in the step it arrives, and the factor every later step leaves of it.
METHODS = {
    "finetune": ("finetune", 0.93, 0.25),
    "distill": ("cross-entropy + distillation", 0.90, 0.72),
    "balanced": ("balanced", 0.88, 0.93),
}


def write_run(
    path: Path,
    method: str = "balanced",
    *,
    n_steps: int = 3,
    class_names: tuple[str, ...] = CLASS_NAMES,
    **changes: Any,
) -> Path:
    """`changes` replace entries of metrics.json."""
    label, arrival, kept = METHODS[method]
    random = np.random.default_rng(sorted(METHODS).index(method))
    steps = [_step(t, arrival, kept, class_names, random) for t in range(1, n_steps + 1)]
    metrics = _metrics(method, label, class_names, steps) | changes
    path.mkdir(parents=True)
    (path / "metrics.json").write_text(json.dumps(metrics))
    (path / "config.yaml").write_text(yaml.safe_dump(_config(method)))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    _write_log(path / "log.jsonl", method, n_steps, random)
    _write_memory(path / "tasks" / f"{n_steps:02d}" / "state", steps[-1]["classes"], random)
    return path


def write_three(folder: Path) -> list[Path]:
    return [write_run(folder / method, method) for method in METHODS]


def _step(
    t: int, arrival: float, kept: float, names: tuple[str, ...], random: np.random.Generator
) -> dict[str, Any]:
    n_seen, n_old = sum(TASK_SIZES[:t]), sum(TASK_SIZES[: t - 1])
    arrived = np.repeat(np.arange(1, len(TASK_SIZES) + 1), TASK_SIZES)[:n_seen]
    aim = (arrival - 0.012 * np.arange(n_seen)) * kept ** ((t - arrived) * (0.8 + 0.1 * np.arange(n_seen)))
    confusion = np.zeros((n_seen, n_seen), dtype=int)
    # Mistakes go to the newest classes: the recency bias that forgetting is.
    pull = np.where(np.arange(n_seen) >= n_old, 3.0, 1.0)
    for c, share in enumerate(aim):
        wrong = np.delete(pull, c) / np.delete(pull, c).sum() * (1 - share)
        confusion[c] = random.multinomial(TEST_IMAGES[c], np.insert(wrong, c, share))
    hits, totals = confusion.diagonal(), confusion.sum(axis=1)
    recall = hits / totals
    return {
        "step": t,
        "classes": list(names[:n_seen]),
        "n_old": n_old,
        "micro": float(hits.sum() / totals.sum()),
        "balanced": float(recall.mean()),
        "recall": recall.tolist(),
        "macro_f1": float((2 * hits / np.maximum(1, totals + confusion.sum(axis=0))).mean()),
        "old": float(recall[:n_old].mean()) if n_old else None,
        "new": float(recall[n_old:].mean()),
        "kappa": None,
        "forgetting": float(arrival - recall[:n_old].mean()) if n_old else 0.0,
        "confusion": confusion.tolist(),
    }


def _metrics(method: str, label: str, names: tuple[str, ...], steps: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float:
        return float(np.mean([step[key] for step in steps]))

    return {
        "format": 1,
        "dataset": "phantom",
        "synthetic": True,
        "method": method,
        "label": label,
        "finished": len(steps) == len(TASK_SIZES),
        "class_names": list(names),
        "class_order": list(range(len(names))),
        "task_sizes": list(TASK_SIZES),
        "inherent_counts": list(COUNTS),
        "acc_micro": mean("micro"),
        "acc_task": mean("balanced"),
        "acc_balanced": mean("balanced"),
        "forgetting": mean("forgetting"),
        "forgetting_printed": 1.5 * mean("forgetting"),
        "forgetting_lo2ln": None,
        "last_micro": steps[-1]["micro"],
        "last_balanced": steps[-1]["balanced"],
        "steps": steps,
    }


def _config(method: str) -> dict[str, Any]:
    return {
        "data": {"name": "phantom", "image_size": 28},
        "method": {"name": method, "alpha": 0.5},
        "scenario": {"base": 3, "increment": 2},
        "memory": {"per_class": 5},
        "training": {"epochs": 20, "milestones": [10, 16]},
        "seed": 1,
    }


def _write_log(file: Path, method: str, n_steps: int, random: np.random.Generator) -> None:
    lines = []
    for task in range(1, n_steps + 1):
        for epoch in range(1, 21):
            losses = {"classification": 1.6 * float(np.exp(-epoch / 6)) + 0.05 * random.random()}
            if method != "finetune" and task > 1:
                losses["distillation"] = 0.05 + 0.2 * float(np.exp(-epoch / 4)) + 0.01 * random.random()
            if method == "balanced" and task > 1:
                losses["margin"] = 0.02 * float(np.exp(-epoch / 9)) + 0.002 * random.random()
            entry = {
                "task": task,
                "phase": "learn",
                "epoch": epoch,
                "epochs": 20,
                "learning_rates": {"classifier": 0.1},
            }
            lines.append(json.dumps(entry | {"losses": losses, "total": sum(losses.values())}))
    file.write_text("\n".join(lines) + "\n")


def _write_memory(state: Path, names: list[str], random: np.random.Generator) -> None:
    (state / "exemplars").mkdir(parents=True)
    exemplars = []
    for c, name in enumerate(names):
        for rank in range(5):
            coarse = random.integers(60, 200, (7, 7, 3), dtype=np.uint8)
            pixels = np.kron(coarse, np.ones((4, 4, 1), dtype=np.uint8))
            file = f"exemplars/{c:02x}{rank:02x}.png"
            Image.fromarray(pixels).save(state / file)
            exemplars.append({"file": file, "class": name, "rank": rank, "sha256": ""})
    (state / "manifest.json").write_text(json.dumps({"class_names": names, "exemplars": exemplars}))
