"""The versions of a model, and the way back to one of them."""

from dataclasses import dataclass
from pathlib import Path

from medcil.clinic.model_dir import ModelFolder, VersionFolder


@dataclass(frozen=True)
class Past:
    """One version, as it was written."""

    version: str
    when: str
    parent: str | None
    classes_added: tuple[str, ...]
    n_classes: int
    images: int
    """That were trained on for it."""
    images_sha256: str | None
    """Of all images together; None where some had to be forgotten."""
    method: str
    measured_on: str
    accuracy: float | None
    balanced_accuracy: float | None
    change_of_old_recall: float | None
    """What its update cost the old classes' mean recall; None for the first version."""
    is_promoted: bool
    """Whether it became current when it was written."""
    is_current: bool


def history(model: Path | str) -> tuple[Past, ...]:
    """Oldest first."""
    folder = ModelFolder(Path(model))
    current = folder.current
    return tuple(read_past(folder.version(name), is_current=name == current) for name in folder.versions)


def read_past(version: VersionFolder, *, is_current: bool) -> Past:
    facts, found = version.provenance(), version.metrics()
    cost = version.forgetting() or {}
    mean = cost.get("mean_recall_of_old_classes")
    return Past(
        version=version.name,
        when=facts["when"],
        parent=facts["parent"],
        classes_added=tuple(facts["classes_added"]),
        n_classes=len(version.class_names()),
        images=sum(facts["images"].values()),
        images_sha256=facts["images_sha256"],
        method=facts["settings"]["method"]["name"],
        measured_on=found["measured_on"],
        accuracy=found["accuracy"],
        balanced_accuracy=found["balanced_accuracy"],
        change_of_old_recall=None if mean is None else mean["change"],
        is_promoted=facts["promoted"],
        is_current=is_current,
    )


def rollback(model: Path | str, version: str) -> str:
    """Makes a version current, an older or a newer one; returns which was. Nothing is deleted."""
    folder = ModelFolder(Path(model))
    chosen, before = folder.version(version), folder.current
    chosen.load_state()  # a version that cannot be loaded is no place to go back to
    with folder.locked():
        folder.write(folder.versions, chosen.name)
    return before
