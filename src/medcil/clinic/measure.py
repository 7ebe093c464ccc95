"""Measure recall by class, what an update cost, and write both as a page and a model card."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from medcil.clinic.holdout import Measure
from medcil.clinic.model_dir import FORMAT, VersionFolder
from medcil.config import ExecutionConfig
from medcil.data.image_table import ImageTable, Indices
from medcil.data.samples import Samples
from medcil.metrics.classification import accuracy, balanced_accuracy, confusion_matrix, defined
from medcil.metrics.intervals import Z_95, groups_at, independent_images, interval_of_mean, share_interval
from medcil.recipe import leaves
from medcil.report.evaluation import NOTICE
from medcil.report.markup import percent, render, render_text
from medcil.training.inference import predict_scores
from medcil.training.state import State

OPTIMISTIC = "measured on training exemplars: optimistic"


def predicted(state: State, samples: Samples, execution: ExecutionConfig) -> Int[np.ndarray, "n"]:
    return np.asarray(predict_scores(state, samples, execution).argmax(dim=1).numpy())


def sealed_or_exemplars(version: VersionFolder, state: State, *, n_old: int | None = None) -> Measure:
    """Return the version's hold-out; if it has no image of the (old) classes, the exemplars."""
    entries = version.holdout_entries()
    if any(entry["class"] in state.class_names[:n_old] for entry in entries):
        names = tuple(entry["file"] for entry in entries)
        return Measure(version.holdout(), names, "hold-out", version.holdout_groups())
    names = tuple(f"exemplar {number}" for number in range(1, len(state.memory) + 1))
    return Measure(state.memory, names, "exemplars")


def measured(
    measure: Measure, before: State | None, state: State, execution: ExecutionConfig
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Compute the contents of metrics.json and, after an update, of forgetting.json."""
    known = () if before is None else before.class_names
    n_old = sum(name in known for name in state.class_names)
    old = measure.samples.select(torch.nonzero(measure.samples.labels < n_old).flatten())
    was = None if before is None else predicted(before, old, execution)
    now = predicted(state, measure.samples, execution)
    cost = None
    if was is not None:
        retired = tuple(name for name in known if name not in state.class_names)
        names = (*state.class_names, *retired)
        places = np.array([names.index(name) for name in known])
        cost = forgetting(measure, places[was], now, state.class_names, n_old, retired=retired)
    return metrics(measure, now, state.class_names), cost


def metrics(
    measure: Measure, predictions: Int[np.ndarray, "n"], class_names: Sequence[str]
) -> dict[str, Any]:
    """Compute the content of metrics.json. Unknown values are null."""
    labels = measure.samples.labels.numpy()
    confusion = confusion_matrix(labels, predictions, len(class_names))
    return {
        "format": FORMAT,
        "measured_on": measure.kind,
        "images": len(measure.samples),
        "accuracy": defined(accuracy(confusion)),
        "balanced_accuracy": defined(balanced_accuracy(confusion)),
        "classes": [
            {"name": name, **share((predictions == c)[labels == c], groups_at(measure.groups, labels == c))}
            for c, name in enumerate(class_names)
        ],
        "confusion": confusion.tolist(),
    }


def share(is_right: Bool[np.ndarray, "_"], groups: Sequence[str] | None) -> dict[str, Any]:
    """Compute a recall with Wilson's 95% interval; null without images."""
    images, right = len(is_right), int(is_right.sum())
    patients = None if groups is None else len(set(groups))
    counts = {"images": images, "patients": patients, "right": right}
    if not images:
        return {**counts, "recall": None, "low": None, "high": None}
    low, high = share_interval(is_right, groups)
    return {**counts, "recall": right / images, "low": low, "high": high}


@dataclass(frozen=True)
class Change:
    """The change of a share measured twice on the same images, with its 95% interval."""

    change: float
    low: float
    high: float


def paired_change(images: float, lost: float, gained: float) -> Change:
    """Return the change if `lost` images were right only before and `gained` images only after.

    The interval is that of Agresti and Min for matched pairs: half an image is added to each of the four
    cells. It needs no resampling, and holds for few images and if nothing changed.
    """
    change, center = (gained - lost) / images, (gained - lost) / (images + 2)
    half = Z_95 * math.sqrt(lost + gained + 1 - (gained - lost) ** 2 / (images + 2)) / (images + 2)
    return Change(change, max(min(center - half, change), -1.0), min(max(center + half, change), 1.0))


def smallest_visible_loss(images: int, groups: Sequence[str] | None) -> float | None:
    """Return the smallest loss of recall whose interval is below zero; None if so few images show none.

    Some images are lost and none is gained; `groups` are their patients.
    """
    n = independent_images(images, groups)
    shares = (lost / images for lost in range(1, images + 1))
    return next((share for share in shares if paired_change(n, lost=share * n, gained=0).high < 0), None)


def visible_losses(table: ImageTable, sealed: Indices, classes: Collection[str]) -> dict[str, float | None]:
    """Return the smallest visible loss of each of the classes that has sealed images."""
    losses = {}
    for label, name in enumerate(table.class_names):
        if name in classes and len(own := sealed[table.labels[sealed] == label]):
            losses[name] = smallest_visible_loss(len(own), groups_at(table.groups, own))
    return losses


def mean_change(changes: Sequence[Change]) -> Change:
    """Average the changes of independent classes."""
    values, lows, highs = np.array([astuple(one) for one in changes]).T
    low, high = interval_of_mean(values, lows, highs)
    return Change(float(values.mean()), max(low, -1.0), min(high, 1.0))


TOLERATED = 0.05
"""A loss of mean recall up to this is called "about as well as before"."""
WIDE = 0.1
"""An interval with a larger half-width is called wide."""
CONFUSIONS = 10  # that are listed

Labels = Int[np.ndarray, "_"]


def forgetting(
    measure: Measure,
    before: Labels,
    after: Labels,
    class_names: Sequence[str],
    n_old: int,
    *,
    retired: Sequence[str] = (),
) -> dict[str, Any]:
    """Compute the content of forgetting.json.

    `after` are the new model's predictions of all images, `before` the old one's of those that are of old
    classes, in the same order. The old model may also have predicted `retired` classes, whose labels follow.
    """
    labels, groups = measure.samples.labels.numpy(), measure.groups
    old = np.flatnonzero(labels < n_old)
    was_right, is_right = before == labels[old], after[old] == labels[old]
    classes = [
        _cost_of_class(name, was_right[own], is_right[own], groups_at(measure.groups, labels == c))
        for c, name in enumerate(class_names[:n_old])
        for own in [labels[old] == c]
    ]
    new = metrics(measure, after, class_names)["classes"][n_old:]
    befores, afters = ([entry[when] for entry in classes] for when in ("before", "after"))
    recalls = {"before": _mean_recall(befores), "after": _mean_recall(afters)}
    changes = [Change(**entry["change"]) for entry in classes if entry["change"]]
    flips = [(i, labels[i], was, after[i]) for i, was in zip(old, before, strict=True) if was != after[i]]
    mistakes = [(c, answer) for c, answer in zip(labels.tolist(), after.tolist(), strict=True) if c != answer]
    content = {
        "format": FORMAT,
        "measured_on": measure.kind,
        "note": OPTIMISTIC if measure.kind == "exemplars" and len(measure.samples) else None,
        "old_patients": None if groups is None else len({groups[i] for i in old.tolist()}),
        "old_classes": classes,
        "new_classes": new,
        "mean_recall_of_old_classes": recalls | asdict(mean_change(changes)) if changes else None,
        "accuracy": {
            "old_classes_before": _mean(was_right),
            "old_classes_after": _mean(is_right),
            "all_classes_after": _mean(after == labels),
        },
        "balanced_accuracy": {
            "old_classes_before": recalls["before"],
            "old_classes_after": recalls["after"],
            "all_classes_after": _mean_recall([*afters, *new]),
        },
        "confusions": [
            {"class": class_names[c], "taken_for": class_names[answer], "images": n}
            for (c, answer), n in Counter(mistakes).most_common(CONFUSIONS)
        ],
        "flipped": [
            {"file": measure.names[i]}
            | {"class": class_names[c], "before": (*class_names, *retired)[was], "after": class_names[now]}
            for i, c, was, now in flips
        ],
        "interval": "95%: Wilson's for recalls, that of Agresti and Min for paired changes; "
        + ("patients are not known" if groups is None else "a patient's images are taken to be alike"),
    }
    return {**content, "verdict": verdict(content)}


def _cost_of_class(
    name: str, was: Bool[np.ndarray, "_"], now: Bool[np.ndarray, "_"], groups: Sequence[str] | None
) -> dict[str, Any]:
    """Compare which images of a class were recognized before the update, and which are now."""
    shares = {"before": share(was, groups), "after": share(now, groups)}
    if not len(was):
        return {"name": name, "images": 0, "change": None, **shares}
    n = independent_images(len(was), groups)
    change = paired_change(n, lost=(was & ~now).mean() * n, gained=(now & ~was).mean() * n)
    return {"name": name, "images": len(was), "change": asdict(change), **shares}


def _mean_recall(shares: Sequence[dict[str, Any]]) -> float | None:
    return _mean([entry["recall"] for entry in shares if entry["recall"] is not None])


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def verdict(content: dict[str, Any]) -> str | None:
    """Put the cost in words; None if it was measured on images that were trained on."""
    overall = content["mean_recall_of_old_classes"]
    if content["measured_on"] == "exemplars" or overall is None:
        return None
    change, low, high = (100 * overall[key] for key in ("change", "low", "high"))
    figures = (
        f"mean recall {100 * overall['before']:.1f}% before, {100 * overall['after']:.1f}% after "
        f"({change:+.1f} points, 95% interval {low:+.1f} to {high:+.1f})"
    )
    if low > -100 * TOLERATED:
        text = f"The old classes are recognized about as well as before: {figures}."
    elif high < 0:
        text = f"The update lost some of the old classes: {figures}."
    else:
        text = f"Whether the old classes were lost in part is not certain: {figures}."
    old = content["old_classes"]
    if (high - low) / 2 > 100 * WIDE:
        n_images, n_patients = sum(entry["images"] for entry in old), content["old_patients"]
        of_whom = "" if n_patients is None else f" of {n_patients} patients"
        text += f" The interval is wide, for there are only {n_images} images{of_whom} to measure on."
    worst = min((entry for entry in old if entry["change"]), key=lambda entry: entry["change"]["change"])
    if worst["change"]["change"] < 0:
        was, now = (100 * worst[when]["recall"] for when in ("before", "after"))
        text += f" Hardest hit: {worst['name']}, {was:.0f}% before, {now:.0f}% after."
    if unknown := [entry["name"] for entry in old if not entry["images"]]:
        text += f" Nothing is known of {', '.join(unknown)}, for there is no image to measure on."
    if (recall := _mean_recall(content["new_classes"])) is not None:
        text += f" The new classes are recognized in {100 * recall:.1f}% of their images on average."
    return text


def loss_in_points(content: dict[str, Any]) -> float | None:
    """Return the loss of the old classes' mean recall, which `--max-forgetting` limits."""
    overall = content["mean_recall_of_old_classes"]
    return None if overall is None else -100 * float(overall["change"])


Content = Mapping[str, Any]


def page(provenance: Content, metrics: Content, forgetting: Content | None) -> str:
    """Render report.html: the version, its recall, and what the update cost."""
    cost = forgetting or {}
    names = [entry["name"] for entry in metrics["classes"]]
    # Numbered columns: names as headings would push the last ones off the page.
    heading = ["", *map(str, range(1, len(names) + 1))]
    numbered = [f"{i} {name}" for i, name in enumerate(names, start=1)]
    return render(
        "version.html.j2",
        **_shared(provenance, metrics, forgetting),
        title=f"{provenance['version']}: {change_of(provenance)}",
        cost=cost,
        cost_columns=FORGETTING_COLUMNS,
        cost_rows=forgetting_rows(cost) if cost else (),
        taken=[(c["class"], c["taken_for"], c["images"]) for c in cost.get("confusions", ())],
        flipped=[(f["file"], f["class"], f["before"], f["after"]) for f in cost.get("flipped", ())],
        confusion=[heading, *((n, *row) for n, row in zip(numbered, metrics["confusion"], strict=True))],
        trained=[(name, n, provenance["holdout"][name]) for name, n in provenance["images"].items()],
        settings=list(leaves(provenance["settings"])),
    )


def card(provenance: Content, metrics: Content, forgetting: Content | None) -> str:
    """Render card.md: what everyone who uses the model must know."""
    return render_text("card.md.j2", **_shared(provenance, metrics, forgetting))


def _shared(provenance: Content, metrics: Content, forgetting: Content | None) -> dict[str, Any]:
    """Return what the page and the card both tell."""
    parent = provenance["parent"]
    what = f"{'Classes' if provenance['classes_added'] else 'Images'} added to {parent}"
    what = what if parent else "First classes"
    what = f"Rebalanced from {parent}" if provenance.get("rebalanced") else what
    what = f"Corrected from {parent}" if provenance.get("corrected") else what
    return {
        "facts": provenance,
        "notice": NOTICE,
        "origin": f"{what}: {change_of(provenance)}. Written {provenance['when'][:10]}.",
        "start": start_of(provenance),
        "decisions": [f"{d['key']}: {d['value']}, for {d['why']}" for d in provenance.get("decisions", ())],
        "summary": summary(metrics),
        "recalls": [(entry["name"], entry["images"], interval(entry)) for entry in metrics["classes"]],
        "verdict": verdict_or_note(forgetting) if forgetting else "",
    }


def change_of(facts: Content) -> str:
    """Say in what a version differs from its parent, and of which other models it is made."""
    more = [f"{name} (+{n:,} images)" for name, n in facts.get("more_images", {}).items()]
    added = ", ".join([*facts["classes_added"], *more])
    change = str(facts.get("rebalanced") or facts.get("corrected") or added)
    if merged := facts.get("merged_from"):
        change += f" (merged from {' and '.join(map(_source, merged))})"
    if facts["parent"] is None and (started := facts.get("started_from")):
        change += f" (with the network of {_source(started)})"
    return change


def _source(version: Content) -> str:
    return f"{version['version']} {version['sha256'][:12]}"


RANDOM = (
    "Random weights: the network learned everything from these images alone. Expect lower recall than from "
    "pretrained weights, most of all of classes with few images. To start from pretrained ones, register a "
    "file with `medcil weights add FILE` and train a new model."
)


def start_of(facts: Content) -> str:
    """Say which weights the first version of a model started from; nothing if it is not known."""
    weights = facts.get("weights")
    if not weights:
        return ""
    if weights["name"] is None:
        return RANDOM
    digest = f"sha256 {weights['sha256']}" if weights["sha256"] else "no sha256"
    said = f"source: {weights['source'] or 'not stated'}; license: {weights['license'] or 'not stated'}"
    return f"Started from the weights {weights['name']} ({digest}; {said})."


def verdict_or_note(cost: Content) -> str:
    return str(cost["verdict"] or f"No verdict: {cost['note'] or 'nothing to measure on'}.")


FORGETTING_COLUMNS = ("class", "images", "before", "after", "change in points (95% interval)")


def forgetting_rows(content: Content) -> list[tuple[str, ...]]:
    """List the old classes, then the new ones, for the page and the screen."""
    old = [
        (c["name"], str(c["images"]), interval(c["before"]), interval(c["after"]), _points(c["change"]))
        for c in content["old_classes"]
    ]
    return old + [(c["name"], str(c["images"]), "new", interval(c), "") for c in content["new_classes"]]


def _points(change: Content | None) -> str:
    if change is None:
        return "–"
    return f"{100 * change['change']:+.1f} ({100 * change['low']:+.1f} to {100 * change['high']:+.1f})"


def interval(entry: Content) -> str:
    if entry["recall"] is None:
        return "–"
    return f"{100 * entry['recall']:.1f}% ({100 * entry['low']:.0f}–{100 * entry['high']:.0f}%)"


def summary(metrics: Content) -> str:
    if not metrics["images"]:
        return "Not measured: there is no image to measure on. Use `medcil evaluate`, or give --eval."
    on = {"hold-out": "sealed images, none of them trained on", "eval": "images given with --eval"}
    where = on.get(metrics["measured_on"], "training exemplars: optimistic")
    return (
        f"Accuracy {percent(metrics['accuracy'])}, "
        f"balanced accuracy {percent(metrics['balanced_accuracy'])}, measured on {metrics['images']} {where}."
    )
