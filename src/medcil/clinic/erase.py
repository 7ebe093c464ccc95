"""Erase a patient from a model folder: the images, and everything that was made of them, in all versions.

Each version concerned is written again beside its place; replacing model.json makes the new one count. The
task is written down first and removed last: killed at any moment, the same call goes on, and until then every
version loads as it was or as it will be. What the weights have learned stays in them.
"""

import copy
import datetime
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from medcil.clinic.calibration import calibrate
from medcil.clinic.holdout import Measure
from medcil.clinic.measure import (
    forgetting,
    loss_in_points,
    metrics,
    of_classes,
    predicted,
    sealed_or_exemplars,
)
from medcil.clinic.model_dir import FORMAT, MANIFEST, Draft, ModelFolder, VersionFolder
from medcil.clinic.train import describe
from medcil.config import ExecutionConfig
from medcil.data.cache import is_cache
from medcil.data.samples import Samples
from medcil.data.sources.folder import folded, names_patient
from medcil.errors import DamagedFile, InvalidInput
from medcil.storage.atomic import flush_folder, read_json, sha256, write_bytes, write_json, writing
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, class_means
from medcil.training.state import State, save_state

TOMBSTONES = "tombstones.json"
NUMBERED = r"patient \d+ of v\d+"
OF_A_DRAFT = frozenset({".part", ".copy", ".erasing", ".erased", ".standby"})
OF_A_MODEL = frozenset(
    {"model.json", "versions", "images", TOMBSTONES, ".lock", ".erasing.json", ".copying.json"}
)
NAMELESS = "name removed"
"""In place of a file name that names the patient."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Erased:
    model: Path
    images: int
    """Different pictures that were removed."""
    versions: tuple[str, ...]
    """That were written again."""
    trained: tuple[str, ...]
    """Whose weights have learned from the patient's images, themselves or through the version before them."""
    without_exemplars: dict[str, list[str]]
    """Classes that lost their last exemplar, by version."""
    thrown_away: tuple[str, ...]
    """Unfinished versions, and prepared stores and explanations in the folder."""
    left: tuple[str, ...]
    """Other things in the folder, which only their owner can judge."""


@dataclass(frozen=True)
class _Task:
    """What is to be done; on disk while it is being done, where it is all that then names the patient."""

    patient: str
    images: list[str]
    versions: list[str]
    given: list[str]
    """Versions that were made of images of the patient, and did not inherit them alone."""
    trained: list[str]
    without_exemplars: dict[str, list[str]]
    n_tombstones: int
    """Before, so that no second one is written for the same task."""

    @classmethod
    def read(cls, model: ModelFolder) -> "_Task | None":
        path = model.erasure_path
        if not path.exists():
            return None
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise DamagedFile(
                f"{path} is damaged ({error}); restore it, or delete it and begin again.",
                code="model.erase.damaged",
            ) from None


@dataclass(frozen=True)
class Erasure:
    """What has to go, in whatever version it is."""

    patient: str
    images: frozenset[str]
    """Names in the image store: the same in every version, and under every patient."""

    def is_of(self, patient: str) -> bool:
        """Compare ids as in the data: case and encoding make no difference."""
        return folded(patient) == folded(self.patient)

    def is_listed_in(self, version: VersionFolder) -> bool:
        return any(map(self.is_of, (*version.people(), *version.trained_patients())))

    def was_trained_on_in(self, version: VersionFolder) -> bool:
        return any(map(self.is_of, version.trained_patients()))

    def files_of(self, version: VersionFolder) -> list[str]:
        """List the patient's images as people.json does: `exemplars/NAME` or `holdout/NAME`."""
        return [file for patient, files in version.people().items() if self.is_of(patient) for file in files]

    def concerns(self, version: VersionFolder) -> bool:
        return self.is_known_in(version) or not self.images.isdisjoint(version.image_names())

    def is_known_in(self, version: VersionFolder) -> bool:
        return self.is_listed_in(version) or any(
            names_patient(file, self.patient) for file in names_given_with_eval(version)
        )

    def was_given(self, version: VersionFolder, parent: VersionFolder | None) -> bool:
        """Tell whether the version was made of images of the patient, and did not only inherit them. Call it
        while the parent still has them."""
        if self.was_trained_on_in(version):
            return True
        inherited = set() if parent is None else parent.image_names()
        return bool(self.images & version.image_names() - inherited)

    def emptied_classes(self, version: VersionFolder) -> list[str]:
        """List the classes that keep no exemplar."""
        of_class: dict[str, list[bool]] = {}
        for entry in version.exemplar_entries():
            of_class.setdefault(entry["class"], []).append(entry["file"] in self.images)
        return [name for name, are_gone in of_class.items() if all(are_gone)]


def erase(model: Path | str, patient: str) -> Erased:
    """Remove the images of a patient, named as in the data, and whatever was made of them.

    The model's weights are not unlearned: `trained` says in which versions they have seen the images.
    """
    folder = ModelFolder(Path(model))
    folder.version()  # a folder that is no model gets no lock file
    if not patient.strip():
        raise InvalidInput(
            "The patient's id is empty: give it as the data had it.", code="model.patient.empty"
        )
    _refuse_links(folder)
    with writing(folder.root), folder.locked():
        for name in folder.versions:  # of a call that was killed
            _settle(folder, name)
        _refuse_unlisted(folder)
        begun, asked = _Task.read(folder), Erasure(patient, frozenset())
        if begun is not None and asked.is_of(begun.patient):
            return _carry_out(folder, _task(folder, patient, begun))
        if not any(asked.is_known_in(folder.version(name)) for name in folder.versions):
            raise _nobody(folder)
        if begun is not None:
            _carry_out(folder, _task(folder, begun.patient, begun))
        return _carry_out(folder, _task(folder, patient))


def _refuse_links(folder: ModelFolder) -> None:
    """Refuse links, because deleting one leaves what it points to."""
    places = (folder.versions_path, *folder.versions_path.rglob("*"))
    if links := sorted(path for path in places if path.is_symlink()):
        raise InvalidInput(
            f"{links[0]} is a link: what it points to would keep the images, and nothing was changed. Put "
            "what it points to in its place."
        )


def _refuse_unlisted(folder: ModelFolder) -> None:
    """Refuse versions that model.json does not list, unless they are drafts: they may show the patient."""
    for name in _unlisted(folder):
        Draft(folder, name).refuse_unlisted()


def _unlisted(folder: ModelFolder) -> list[str]:
    """List the versions that model.json does not list."""
    listed = folder.versions
    names = (path.name for path in folder.versions_path.iterdir())
    return sorted(name for name in names if re.fullmatch(r"v\d+", name) and name not in listed)


def _nobody(folder: ModelFolder) -> InvalidInput:
    versions = [folder.version(name) for name in folder.versions]
    if not any(version.people() or version.trained_patients() for version in versions):
        return InvalidInput(
            f"{folder.root} knows no patients, for its images came without any: nobody can be found by "
            "an id, and nothing was changed. Train a new model without the images."
        )
    said = f"{folder.root} knows no patient of this id: nothing was changed."
    if any(re.fullmatch(NUMBERED, who) for version in versions for who in version.people()):
        return InvalidInput(
            f"{said} Images that came from a prepared store have their patients by numbers alone: give "
            "'patient N of VERSION', N as in the store's list of groups."
        )
    return InvalidInput(f"{said} Give the id as the data had it, in the column `patient` of the manifest.")


def _task(folder: ModelFolder, patient: str, begun: _Task | None = None) -> _Task:
    """Plan the task from what the versions hold now, and from what an interrupted call planned."""
    versions = [folder.version(name) for name in folder.versions]
    asked = Erasure(patient, frozenset())
    images = {file.partition("/")[2] for version in versions for file in asked.files_of(version)}
    erasure = Erasure(patient, frozenset(images.union(begun.images if begun else ())))
    earlier = begun.versions if begun else []
    concerned = [v for v in versions if v.name in earlier or erasure.concerns(v)]
    new = [version for version in concerned if version.name not in earlier]
    given = [v.name for v in new if erasure.was_given(v, _parent(folder, v))]
    emptied = {v.name: erasure.emptied_classes(v) for v in new}
    return _Task(
        patient=patient,
        images=sorted(erasure.images),
        versions=[version.name for version in concerned],
        given=[*(begun.given if begun else ()), *given],
        trained=_trained(versions, asked, begun.trained if begun else ()),
        without_exemplars={
            **(begun.without_exemplars if begun else {}),
            **{name: classes for name, classes in emptied.items() if classes},
        },
        n_tombstones=begun.n_tombstones if begun else len(_tombstones(folder)),
    )


def _trained(versions: Sequence[VersionFolder], erasure: Erasure, earlier: Sequence[str]) -> list[str]:
    """Follow training through the versions: the weights of a version begin as those of its parent."""
    trained = set(earlier)
    for version in versions:
        is_kept = any(file.startswith("exemplars/") for file in erasure.files_of(version))
        if is_kept or erasure.was_trained_on_in(version) or version.provenance()["parent"] in trained:
            trained.add(version.name)
    return [version.name for version in versions if version.name in trained]


def _parent(folder: ModelFolder, version: VersionFolder) -> VersionFolder | None:
    name = version.provenance()["parent"]
    return None if name is None else folder.version(name)


def _carry_out(folder: ModelFolder, task: _Task) -> Erased:
    for name in task.versions:  # an unreadable one raises before anything is changed
        version = folder.version(name)
        version.load_state()
        version.metrics()
    write_json(folder.erasure_path, asdict(task))
    thrown_away = _throw_away(folder)
    erasure = Erasure(task.patient, frozenset(task.images))
    for name in task.versions:  # the oldest first: what an update cost is measured against its parent
        version = folder.version(name)
        if erasure.concerns(version):
            _replace(folder, version, erasure, was_given=name in task.given)
    folder.images.remove_except(
        image for name in folder.versions for image in folder.version(name).image_names()
    )
    stone = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "images": len(task.images),
        "versions": len(task.versions),
    }
    stones = [*_tombstones(folder)[: task.n_tombstones], stone]
    write_json(folder.root / TOMBSTONES, {"format": FORMAT, "tombstones": stones})
    folder.erasure_path.unlink()
    flush_folder(folder.root)
    return Erased(
        model=folder.root,
        images=len(task.images),
        versions=tuple(task.versions),
        trained=tuple(task.trained),
        without_exemplars=task.without_exemplars,
        thrown_away=tuple(thrown_away),
        left=tuple(sorted(_left(folder))),
    )


def _replace(folder: ModelFolder, version: VersionFolder, erasure: Erasure, *, was_given: bool) -> None:
    unfinished = VersionFolder(folder.versions_path / f".{version.name}.erasing", folder.images)
    write_cleaned(version, _parent(folder, version), erasure, unfinished, was_given=was_given)
    manifest_sha256 = unfinished.seal()
    unfinished.root.rename(folder.standby(version.name))
    flush_folder(folder.versions_path)
    folder.write({**folder.hashes, version.name: manifest_sha256}, folder.current)
    _settle(folder, version.name)


def _settle(folder: ModelFolder, name: str) -> None:
    """Move a version that model.json accepts from its standby into its place."""
    standby, place = folder.standby(name), folder.versions_path / name
    if not standby.exists() or sha256((standby / MANIFEST).read_bytes()) != folder.hashes[name]:
        return
    old = folder.versions_path / f".{name}.erased"
    if place.exists():
        place.rename(old)
    standby.rename(place)
    flush_folder(folder.versions_path)
    shutil.rmtree(old, ignore_errors=True)


def _throw_away(folder: ModelFolder) -> list[str]:
    """Remove what may show the patient and no command needs: unfinished versions, and prepared stores and
    explanations that someone put into the model folder."""
    hidden = sorted(path for path in folder.versions_path.glob(".v*") if path.suffix in OF_A_DRAFT)
    unlisted = [*(folder.versions_path / name for name in _unlisted(folder)), *hidden]  # the parts last
    besides = [path for path in folder.root.iterdir() if path.name not in OF_A_MODEL and _is_ours(path)]
    for path in (*unlisted, *besides):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    own = (".erasing", ".erased", ".standby")
    named = (path for path in (*unlisted, *besides) if not path.name.endswith(own))
    return sorted(path.relative_to(folder.root).as_posix() for path in named)


def _left(folder: ModelFolder) -> list[str]:
    """List everything that is no part of a model."""
    listed = folder.versions
    strange = (path for path in folder.versions_path.iterdir() if path.name not in listed)
    besides = (path for path in folder.root.iterdir() if path.name not in OF_A_MODEL)
    return [path.relative_to(folder.root).as_posix() for path in (*strange, *besides)]


def _is_ours(path: Path) -> bool:
    is_folder = path.is_dir() and not path.is_symlink()
    return is_folder and (is_cache(path) or (path / "explanation.json").exists())


def _tombstones(folder: ModelFolder) -> list[dict[str, Any]]:
    path = folder.root / TOMBSTONES
    if not path.exists():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("tombstones"), list):
        raise DamagedFile(f"{path} is damaged; restore it.")
    return list(content["tombstones"])


def write_cleaned(
    version: VersionFolder,
    parent: VersionFolder | None,
    erasure: Erasure,
    new: VersionFolder,
    *,
    was_given: bool,
) -> None:
    """Write the version without what is erased. Nothing else in its folder is taken along."""
    execution = ExecutionConfig()
    renamed = _write_state(version, new, erasure, execution)
    if version.has(version.holdout_path):
        images = [entry for entry in version.holdout_entries() if entry["file"] not in erasure.images]
        write_json(new.holdout_path, {"format": FORMAT, "images": images})
    _write_people(version, new, erasure, renamed)
    facts: Content = {**version.provenance()}
    if was_given:
        facts["images_sha256"] = None  # a hash over all images, the patient's among them
    _write_findings(version, parent, new, facts, erasure, execution)


def _write_state(
    version: VersionFolder, new: VersionFolder, erasure: Erasure, execution: ExecutionConfig
) -> dict[str, str]:
    """Weights as they are; returns the new name of each remaining exemplar by its old one."""
    old = [entry["file"] for entry in version.exemplar_entries()]
    remaining = [place for place, file in enumerate(old) if file not in erasure.images]
    if len(remaining) == len(old):
        for path in version.state_path.iterdir():
            write_bytes(new.state_path / path.name, version.read(path))
        return {}
    state = version.load_state()
    memory = state.memory.select(torch.tensor(remaining, dtype=torch.int64))
    lost = state.memory.class_counts(len(state.class_names)) - memory.class_counts(len(state.class_names))
    readout = copy.deepcopy(state.readout)
    readout.class_means = _means(state, memory, torch.nonzero(lost).flatten(), execution)
    new.root.mkdir(parents=True, exist_ok=True)
    save_state(replace(state, memory=memory, readout=readout), new.state_path, new.images)
    names = [entry["file"] for entry in new.exemplar_entries()]
    return dict(zip((old[place] for place in remaining), names, strict=True))


def _means(
    state: State, memory: Samples, touched: Tensor, execution: ExecutionConfig
) -> Float[Tensor, "classes dim"]:
    """Compute the means of the touched classes again, from the exemplars that remain.

    A class without exemplars takes the direction of its weights in the classifier, which are part of the
    network and not unlearned.
    """
    device = choose_device(execution)
    chosen = torch.nonzero(torch.isin(memory.labels, touched)).flatten()
    means = state.readout.class_means.clone()
    with Feed(memory.select(chosen), state.preprocessing, device, execution) as feed:
        means[touched] = class_means(copy.deepcopy(state.network).to(device), feed).cpu()[touched]
    return means


def _write_people(
    version: VersionFolder, new: VersionFolder, erasure: Erasure, renamed: Mapping[str, str]
) -> None:
    """A picture that was filed under two patients is lost to both."""
    if not version.has(version.people_path):
        return
    patients: dict[str, list[str]] = {}
    for patient, files in version.people().items():
        for part, _, name in (file.partition("/") for file in files):
            if not erasure.is_of(patient) and name not in erasure.images:
                patients.setdefault(patient, []).append(f"{part}/{renamed.get(name, name)}")
    trained = [patient for patient in version.trained_patients() if not erasure.is_of(patient)]
    write_json(new.people_path, {"format": FORMAT, "patients": patients, "trained": trained})


def _write_findings(
    version: VersionFolder,
    parent: VersionFolder | None,
    new: VersionFolder,
    facts: Content,
    erasure: Erasure,
    execution: ExecutionConfig,
) -> None:
    """Measure everything again on the images that remain. What `--eval` measured stays, without the names of
    the patient's files."""
    state, found, cost = new.load_state(), dict(version.metrics()), version.forgetting()
    n_old = None if cost is None else len(state.class_names) - len(facts["classes_added"])
    is_smaller = not erasure.images.isdisjoint(version.image_names())
    was_sealed = any(entry["class"] in state.class_names[:n_old] for entry in version.holdout_entries())
    sealed = sealed_or_exemplars(new, state, n_old=n_old)
    if is_smaller and found["measured_on"] != "eval":
        after = predicted(state, sealed.samples, execution)
        found = metrics(sealed, after, state.class_names)
        if cost is not None and parent is not None:
            cost = _cost_again(cost, parent, state, sealed, after, execution)
    if cost is not None and cost["measured_on"] == "eval":
        cost["flipped"] = [
            {**entry, "file": NAMELESS} if names_patient(entry["file"], erasure.patient) else entry
            for entry in cost["flipped"]
        ]
    if is_smaller and (was_sealed or found["measured_on"] != "eval"):
        calibration = calibrate(
            state, sealed.samples, execution, groups=sealed.groups, measured_on=sealed.kind
        )
        calibration.write(new.calibration_path)
    else:
        write_bytes(new.calibration_path, version.read(version.calibration_path))
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
    # Whether the version was promoted was decided then; only the figure is measured again.
    return {**again, "gate": {**cost["gate"], "loss_in_points": loss_in_points(again)}}


def names_given_with_eval(version: VersionFolder) -> list[str]:
    """Sealed images have random names; those of `--eval` are listed as their owner named them."""
    cost = version.forgetting()
    if cost is None or cost["measured_on"] != "eval":
        return []
    return [entry["file"] for entry in cost["flipped"]]
