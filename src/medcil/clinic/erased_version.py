"""A version without some of its images: whatever was made of them is made anew, of those that remain."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from medcil.clinic.calibrate import calibrate
from medcil.clinic.forgetting import forgetting, loss_in_points
from medcil.clinic.hold_out_recall import metrics, of_classes, predicted, sealed_or_exemplars
from medcil.clinic.labelled_images import Measure
from medcil.clinic.model_dir import FORMAT, VersionFolder
from medcil.clinic.model_files import copy_files
from medcil.clinic.train import describe
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples
from medcil.data.sources.folder import folded, names_patient
from medcil.storage.atomic import read_json, read_verified, write_bytes, write_json
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, class_means
from medcil.training.state import State, save_state

NAMELESS = "name removed"
"""In place of a file name with the patient's id in it."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Erasure:
    """What has to go, in whatever version it is."""

    patient: str
    sha256s: frozenset[str]
    """Of the image files. The same picture has the same one in every version and under every name."""

    def is_of(self, patient: str) -> bool:
        """As in the data, case and encoding make no difference: versions may have other spellings."""
        return folded(patient) == folded(self.patient)

    def is_listed_in(self, version: VersionFolder) -> bool:
        return any(map(self.is_of, (*version.people(), *version.trained_patients())))

    def was_trained_on_in(self, version: VersionFolder) -> bool:
        return any(map(self.is_of, version.trained_patients()))

    def listed_files(self, version: VersionFolder) -> list[str]:
        return [file for patient, files in version.people().items() if self.is_of(patient) for file in files]

    def files_of(self, version: VersionFolder) -> frozenset[str]:
        return frozenset(file for file, found in image_files(version).items() if found in self.sha256s)

    def concerns(self, version: VersionFolder) -> bool:
        return (
            self.is_listed_in(version)
            or bool(self.files_of(version))
            or any(self.is_named_in(file) for file in names_given_with_eval(version))
        )

    def is_known_to(self, version: VersionFolder) -> bool:
        return self.is_listed_in(version) or any(map(self.is_named_in, names_given_with_eval(version)))

    def is_named_in(self, file: str) -> bool:
        return names_patient(file, self.patient)

    def was_given(self, version: VersionFolder, parent: VersionFolder | None) -> bool:
        """Whether images of the patient were among those the version was made of, not inherited alone; to be
        asked while the parent still has them."""
        if self.was_trained_on_in(version):
            return True
        inherited = set() if parent is None else set(image_files(parent).values())
        return bool(self.sha256s & set(image_files(version).values()) - inherited)


def image_files(version: VersionFolder) -> dict[str, str]:
    """sha256 of every exemplar and sealed image, by its place in the version, as people.json writes it."""
    exemplars = {f"state/{entry['file']}": entry["sha256"] for entry in exemplar_entries(version)}
    return exemplars | {f"holdout/{entry['file']}": entry["sha256"] for entry in version.holdout_entries()}


def exemplar_entries(version: VersionFolder) -> list[Content]:
    return version.exemplar_entries()


def emptied_classes(version: VersionFolder, gone: Iterable[str]) -> list[str]:
    """Classes that keep no exemplar without these files."""
    gone = set(gone)
    of_class: dict[str, list[bool]] = {}
    for entry in exemplar_entries(version):
        of_class.setdefault(entry["class"], []).append(f"state/{entry['file']}" in gone)
    return [name for name, are_gone in of_class.items() if all(are_gone)]


def write_cleaned(
    version: VersionFolder, parent: VersionFolder | None, erasure: Erasure, folder: Path, *, was_given: bool
) -> None:
    """The version without what is erased, into a new folder. Nothing else that lies there is taken along."""
    execution, gone, new = ExecutionConfig(), erasure.files_of(version), VersionFolder(folder)
    renamed = _write_state(version, new, gone, execution)
    _write_holdout(version, new, gone)
    _write_people(version, new, erasure, gone, renamed)
    facts = version.provenance()
    if was_given:
        facts["images_sha256"] = None  # a hash over all images, the patient's among them
    _write_findings(version, parent, new, facts, erasure, execution)


def _write_state(
    version: VersionFolder, new: VersionFolder, gone: frozenset[str], execution: ExecutionConfig
) -> dict[str, str]:
    """Weights as they are; returns the new place of each exemplar by its old one."""
    old = [f"state/{entry['file']}" for entry in exemplar_entries(version)]
    kept = [place for place, file in enumerate(old) if file not in gone]
    if len(kept) == len(old):
        copy_files(version.state_path, new.state_path)
        return dict(zip(old, old, strict=True))
    state = version.load_state()
    memory = state.memory.select(torch.tensor(kept, dtype=torch.int64))
    lost = state.memory.class_counts(len(state.class_names)) - memory.class_counts(len(state.class_names))
    readout = copy.deepcopy(state.readout)
    readout.class_means = _means(state, memory, torch.nonzero(lost).flatten(), execution)
    new.root.mkdir(parents=True, exist_ok=True)
    save_state(replace(state, memory=memory, readout=readout), new.state_path)
    names = [f"state/{entry['file']}" for entry in exemplar_entries(new)]
    return dict(zip((old[place] for place in kept), names, strict=True))


def _means(
    state: State, memory: Samples, touched: Tensor, execution: ExecutionConfig
) -> Float[Tensor, "classes dim"]:
    """Of the touched classes anew, from the exemplars that remain.

    A class without any is left with what its weights in the classifier say: part of the network, which is not
    unlearned, and so nothing that was not there before.
    """
    device = choose_device(execution)
    chosen = torch.nonzero(torch.isin(memory.labels, touched)).flatten()
    means = state.readout.class_means.clone()
    with Feed(memory.select(chosen), state.preprocessing, device, execution) as feed:
        means[touched] = class_means(copy.deepcopy(state.network).to(device), feed).cpu()[touched]
    return means


def _write_holdout(version: VersionFolder, new: VersionFolder, gone: frozenset[str]) -> None:
    if not (version.holdout_path / "manifest.json").exists():
        return
    kept = [entry for entry in version.holdout_entries() if f"holdout/{entry['file']}" not in gone]
    for entry in kept:
        content = read_verified(version.holdout_path / entry["file"], entry["sha256"])
        write_bytes(new.holdout_path / entry["file"], content)
    write_json(new.holdout_path / "manifest.json", {"format": FORMAT, "images": kept})


def _write_people(
    version: VersionFolder,
    new: VersionFolder,
    erasure: Erasure,
    gone: frozenset[str],
    renamed: Mapping[str, str],
) -> None:
    """A picture that was filed under two patients is lost to both."""
    if not version.people_path.exists():
        return
    kept = {
        patient: [renamed.get(file, file) for file in files if file not in gone]
        for patient, files in version.people().items()
        if not erasure.is_of(patient)
    }
    content = {
        "format": FORMAT,
        "patients": {patient: files for patient, files in kept.items() if files},
        "trained": [patient for patient in version.trained_patients() if not erasure.is_of(patient)],
    }
    write_json(new.people_path, content)


def _write_findings(
    version: VersionFolder,
    parent: VersionFolder | None,
    new: VersionFolder,
    facts: Content,
    erasure: Erasure,
    execution: ExecutionConfig,
) -> None:
    """Everything that was measured, on the images that remain; what `--eval` said stays, without the names of
    the patient's files."""
    state, found = new.load_state(), version.metrics()
    cost = read_json(version.forgetting_path) if version.forgetting_path.exists() else None
    n_old = None if cost is None else len(state.class_names) - len(facts["classes_added"])
    is_smaller = bool(erasure.files_of(version))
    was_sealed = any(entry["class"] in state.class_names[:n_old] for entry in version.holdout_entries())
    sealed = sealed_or_exemplars(new, state, n_old=n_old)
    if is_smaller and found["measured_on"] != "eval":
        after = predicted(state, sealed.samples, execution)
        found = metrics(sealed, after, state.class_names)
        if cost is not None and parent is not None:
            cost = _cost_again(cost, parent, state, sealed, after, execution)
    if cost is not None and cost["measured_on"] == "eval":
        cost["flipped"] = [
            {**entry, "file": NAMELESS} if erasure.is_named_in(entry["file"]) else entry
            for entry in cost["flipped"]
        ]
    if is_smaller and (was_sealed or found["measured_on"] != "eval"):
        calibration = calibrate(
            state, sealed.samples, execution, groups=sealed.groups, measured_on=sealed.kind
        )
        calibration.write(new.calibration_path)
    else:
        write_bytes(new.calibration_path, version.calibration_path.read_bytes())
    describe(new, facts, found, cost, state.class_names)


def _cost_again(
    cost: Content,
    parent: VersionFolder,
    state: State,
    measure: Measure,
    after: Any,
    execution: ExecutionConfig,
) -> Content:
    before_state = parent.load_state()
    n_old = len(before_state.class_names)
    before = predicted(before_state, of_classes(measure, n_old).samples, execution)
    again = forgetting(measure, before, after, state.class_names, n_old)
    # Whether the version was promoted was decided then; only the figure is measured anew.
    return {**again, "gate": {**cost["gate"], "loss_in_points": loss_in_points(again)}}


def names_given_with_eval(version: VersionFolder) -> list[str]:
    """Sealed images have random names; those of `--eval` are listed as their owner named them."""
    cost = read_json(version.forgetting_path) if version.forgetting_path.exists() else None
    if cost is None or cost["measured_on"] != "eval":
        return []
    return [entry["file"] for entry in cost["flipped"]]
