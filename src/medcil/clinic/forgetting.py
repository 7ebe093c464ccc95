"""What an update cost: the same images, recognized before and after."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Int

from medcil.clinic.hold_out_recall import OPTIMISTIC, Change, mean_change, paired_change, share
from medcil.clinic.labelled_images import Measure
from medcil.clinic.model_dir import FORMAT
from medcil.metrics.intervals import independent_images

TOLERATED = 0.05
"""A loss of mean recall that is still called about as well as before."""
WIDE = 0.1
"""Half an interval beyond which it is called wide."""
CONFUSIONS = 10  # that are listed

Labels = Int[np.ndarray, "_"]


def forgetting(
    measure: Measure, before: Labels, after: Labels, class_names: Sequence[str], n_old: int
) -> dict[str, Any]:
    """The content of forgetting.json. `after` are the new model's predictions of all images, `before` the old
    one's of those that are of old classes, in the same order."""
    labels = measure.samples.labels.numpy()
    old = np.flatnonzero(labels < n_old)
    was_right, is_right = before == labels[old], after[old] == labels[old]
    classes, changes = [], []
    for c in range(n_old):
        of_class = labels[old] == c
        was, now, groups = was_right[of_class], is_right[of_class], measure.groups_where(labels == c)
        entry: dict[str, Any] = {"name": class_names[c], "images": int(of_class.sum()), "change": None}
        entry |= {"before": share(was, groups), "after": share(now, groups)}
        if len(was):
            independent = independent_images(len(was), groups)
            lost, gained = ((one & ~other).mean() for one, other in ((was, now), (now, was)))
            change = paired_change(independent, lost * independent, gained * independent)
            changes.append(change)
            entry["change"] = asdict(change)
        classes.append(entry)
    overall = mean_change(changes) if changes else None
    new = [
        {"name": class_names[c], **share((after == c)[labels == c], measure.groups_where(labels == c))}
        for c in range(n_old, len(class_names))
    ]
    content = {
        "format": FORMAT,
        "measured_on": measure.kind,
        "note": OPTIMISTIC if measure.kind == "exemplars" else None,
        "old_patients": None if measure.groups is None else len({measure.groups[i] for i in old.tolist()}),
        "old_classes": classes,
        "new_classes": new,
        "mean_recall_of_old_classes": _mean_recalls(classes, overall),
        "accuracy": {
            "old_classes_before": _mean(was_right),
            "old_classes_after": _mean(is_right),
            "all_classes_after": _mean(after == labels),
        },
        "balanced_accuracy": _balanced(classes, new),
        "confusions": _confusions(labels, after, class_names),
        "flipped": _flipped(measure, old, before, after[old], class_names),
        "interval": "95%: Wilson's for recalls, that of Agresti and Min for paired changes; "
        + (
            "patients are not known" if measure.groups is None else "a patient's images are taken to be alike"
        ),
    }
    return {**content, "verdict": verdict(content)}


def _mean_recalls(classes: Sequence[dict[str, Any]], overall: Change | None) -> dict[str, Any] | None:
    if overall is None:
        return None
    before, after = (_mean_recall(entry[when] for entry in classes) for when in ("before", "after"))
    return {"before": before, "after": after, **asdict(overall)}


def _balanced(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "old_classes_before": _mean_recall(entry["before"] for entry in old),
        "old_classes_after": _mean_recall(entry["after"] for entry in old),
        "all_classes_after": _mean_recall([*(entry["after"] for entry in old), *new]),
    }


def _mean_recall(shares: Any) -> float | None:
    recalls = [entry["recall"] for entry in shares if entry["recall"] is not None]
    return sum(recalls) / len(recalls) if recalls else None


def _mean(right: Any) -> float | None:
    return float(np.mean(right)) if len(right) else None


def _confusions(labels: Labels, after: Labels, names: Sequence[str]) -> list[dict[str, Any]]:
    """What is taken for what after the update, the most frequent first."""
    wrong = Counter((t, p) for t, p in zip(labels.tolist(), after.tolist(), strict=True) if t != p)
    return [
        {"class": names[t], "taken_for": names[p], "images": n} for (t, p), n in wrong.most_common(CONFUSIONS)
    ]


def _flipped(
    measure: Measure, old: Labels, before: Labels, after: Labels, names: Sequence[str]
) -> list[dict[str, Any]]:
    labels = measure.samples.labels.tolist()
    return [
        {"file": measure.names[i], "class": names[labels[i]], "before": names[was], "after": names[now]}
        for i, was, now in zip(old.tolist(), before.tolist(), after.tolist(), strict=True)
        if was != now
    ]


def verdict(content: dict[str, Any]) -> str | None:
    """In plain words; none where it would rest on images that were trained on."""
    overall = content["mean_recall_of_old_classes"]
    if content["measured_on"] == "exemplars" or overall is None:
        return None
    change, low, high = (100 * overall[key] for key in ("change", "low", "high"))
    figures = (
        f"mean recall {100 * overall['before']:.1f}% before, {100 * overall['after']:.1f}% after "
        f"({change:+.1f} points, 95% interval {low:+.1f} to {high:+.1f})"
    )
    if low > -100 * TOLERATED:
        said = f"The old classes are recognized about as well as before: {figures}."
    elif high < 0:
        said = f"The update lost some of the old classes: {figures}."
    else:
        said = f"Whether the old classes were lost in part is not certain: {figures}."
    n_images = sum(entry["images"] for entry in content["old_classes"])
    if (high - low) / 2 > 100 * WIDE:
        of_whom = "" if (n := content["old_patients"]) is None else f" of {n} patients"
        said += f" The interval is wide, for there are only {n_images} images{of_whom} to measure on."
    worst = min(
        (entry for entry in content["old_classes"] if entry["change"]), key=lambda e: e["change"]["change"]
    )
    if worst["change"]["change"] < 0:
        was, now = (100 * worst[when]["recall"] for when in ("before", "after"))
        said += f" Hardest hit: {worst['name']}, {was:.0f}% before, {now:.0f}% after."
    if unknown := [entry["name"] for entry in content["old_classes"] if not entry["images"]]:
        said += f" Nothing is known of {', '.join(unknown)}, for there is no image to measure on."
    if (recall := _mean_recall(content["new_classes"])) is not None:
        said += f" The new classes are recognized in {100 * recall:.1f}% of their images on average."
    return said


def loss_in_points(content: dict[str, Any]) -> float | None:
    """Of the old classes' mean recall; what `--max-forgetting` limits."""
    overall = content["mean_recall_of_old_classes"]
    return None if overall is None else -100 * float(overall["change"])
