"""Erase a patient from all versions of a model folder: the images, and everything that was made of them.

Each version concerned is written again beside its place, and model.json then accepts it. The erasure is
written down first and removed last, so a call that was killed continues; every version loads as it was or as
it will be. What the weights of a network have learned stays in them. From statistics images are subtracted.
"""

import copy
import datetime
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from medcil.clinic.calibration import calibrate
from medcil.clinic.corrections.features import find_features, list_any
from medcil.clinic.corrections.learned import Learned, LearnedImage, hash_patient
from medcil.clinic.corrections.revise import (
    deviation,
    digits,
    first_task,
    first_task_trains,
    is_revisable,
    moves_of,
    revise,
)
from medcil.clinic.measure import loss_in_points, measured, sealed_or_exemplars
from medcil.clinic.model_dir import FORMAT, Draft, File, ModelFolder, VersionFolder, manifest_sha256
from medcil.clinic.train import describe
from medcil.config import ExecutionConfig
from medcil.data.cache import is_cache
from medcil.data.samples import Samples
from medcil.data.sources.folder import folded, names_patient
from medcil.errors import DamagedFile, InvalidInput
from medcil.readouts import keeps_statistics
from medcil.storage.atomic import (
    flush_folder,
    read_json,
    read_verified,
    sha256,
    write_bytes,
    write_json,
    writing,
)
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, class_means
from medcil.training.state import State, save_state

TOMBSTONES = "tombstones.json"
NUMBERED = r"patient \d+ of v\d+"
OF_AN_ERASURE = frozenset({".erasing", ".erased", ".standby"})
OF_A_DRAFT = OF_AN_ERASURE | {".part"}
OF_A_MODEL = frozenset({"model.json", "versions", "images", "tensors", TOMBSTONES, ".lock", ".erasing.json"})
OF_A_MODEL |= {".erasing.safetensors"}
NAMELESS = "name removed"
"""In place of a file name that names the patient."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Erased:
    model: Path
    images: int
    versions: tuple[str, ...]
    trained: tuple[str, ...]
    """Versions whose weights have learned from the patient's images, directly or through their parent."""
    summed_up: tuple[str, ...]
    """Versions whose statistics still contain the patient's images: give the images once more."""
    is_recorded: bool
    """Whether the model knows which images these are, so that they can be given."""
    subtracted: int
    """Images that were subtracted from statistics."""
    digits: int | None
    """To how many digits the classifier then equals one that never had them; None if not known."""
    without_exemplars: dict[str, list[str]]
    """Classes that lost their last exemplar, by version."""
    thrown_away: tuple[str, ...]
    """Unfinished versions, and prepared stores and explanations in the folder."""
    left: tuple[str, ...]
    """Other things in the folder, which only their owner can judge."""


@dataclass(frozen=True)
class Erasure:
    """What to remove from every version. It is on disk until that is done."""

    patient: str
    images: list[str] = field(default_factory=list)
    """Names in the image store: the same in every version, and under every patient."""
    versions: list[str] = field(default_factory=list)
    made_of: list[str] = field(default_factory=list)
    """Versions that were made of images of the patient, and did not inherit them alone."""
    trained: list[str] = field(default_factory=list)
    summed_up: list[str] = field(default_factory=list)
    """Versions whose statistics contain images of the patient, and keep them."""
    is_recorded: bool = True
    revised: list[str] = field(default_factory=list)
    """Versions from whose statistics they are subtracted."""
    subtracted: int = 0
    digits: int | None = None
    features_sha256: str = ""
    """Of the file with the features that are subtracted."""
    without_exemplars: dict[str, list[str]] = field(default_factory=dict)
    n_tombstones: int = 0
    """Number of earlier ones, so that no second one is written for the same erasure."""

    @classmethod
    def begun(cls, model: ModelFolder) -> "Erasure | None":
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

    @classmethod
    def planned(cls, model: ModelFolder, patient: str, given: Path | None = None) -> "Erasure":
        versions, asked = [model.version(name) for name in model.versions], cls(patient)
        images = {file.partition("/")[2] for version in versions for file in asked.files_of(version)}
        erasure = cls(patient, sorted(images), n_tombstones=len(_tombstones(model)))
        is_recorded = [erasure._plan(version, _parent(model, version)) for version in versions]
        if not all(is_recorded):
            return replace(erasure, is_recorded=False)
        return erasure._with_subtraction(model, given)

    def _plan(self, version: VersionFolder, parent: VersionFolder | None) -> bool:
        """Note what to do with a version, after its parent; return whether its statistics can be cleaned."""
        files, learned = self.files_of(version), self.learned_in(version)
        is_trained_on = any(map(self.is_of, version.trained_patients())) or any(
            entry.version == version.name for entry in learned
        )
        is_summing_up = keeps_statistics(version.readout_name())
        can_revise = is_summing_up and is_revisable(version)
        inherits = parent is not None and parent.name in self.summed_up
        is_contained = bool(learned) if can_revise else is_trained_on or inherits
        if is_summing_up and is_contained:
            self.summed_up.append(version.name)
        has_taught = is_trained_on or any(file.startswith("exemplars/") for file in files)
        if is_summing_up:  # only the first task trains the network
            has_taught = is_trained_on and parent is None and first_task_trains(version)
        # The weights of a version begin as those of its parent.
        if has_taught or (parent is not None and parent.name in self.trained):
            self.trained.append(version.name)
        is_clean = can_revise or not (is_summing_up and is_contained)
        if not self.concerns(version):
            return is_clean
        self.versions.append(version.name)
        own = version.image_names() - (set() if parent is None else parent.image_names())
        if is_trained_on or not own.isdisjoint(self.images):
            self.made_of.append(version.name)
        entries = version.exemplar_entries()
        remaining = {entry["class"] for entry in entries if entry["file"] not in self.images}
        if emptied := list(dict.fromkeys(e["class"] for e in entries if e["class"] not in remaining)):
            self.without_exemplars[version.name] = emptied
        return is_clean

    def _with_subtraction(self, model: ModelFolder, given: Path | None) -> "Erasure":
        """Find the features to subtract, and write them beside the model until that is done."""
        if not self.summed_up:
            return self
        versions = [model.version(name) for name in self.summed_up]
        images = list({entry: None for version in versions for entry in self.learned_in(version)})
        samples = None
        if given is not None:
            side = versions[-1].side()
            samples = list_any(given).loaded(side).samples(side)
        found = find_features(versions, images, samples)
        if found is None:
            return self
        state, theirs = versions[-1].load_state(), self.learned_in(versions[-1])
        first = first_task(versions[-1], model.first())
        moves, again = (
            moves_of(theirs, values, state, first=model.first()) for values in (found.values, found.again)
        )
        content = safetensors.torch.save(found.values)
        write_bytes(model.erased_features_path, content)
        return replace(
            self,
            summed_up=[],
            revised=self.summed_up,
            subtracted=len(found.values),
            digits=digits(deviation(state, moves, again, first)) if found.is_same_device else None,
            features_sha256=sha256(content),
        )

    def learned_in(self, version: VersionFolder) -> list[LearnedImage]:
        """List the patient's images in the statistics of a version."""
        learned = Learned.read(version)
        if not learned.images:
            return []
        return learned.of_patient(hash_patient(self.patient, version.store))

    def is_of(self, patient: str) -> bool:
        """Compare ids as in the data: case and encoding make no difference."""
        return folded(patient) == folded(self.patient)

    def files_of(self, version: VersionFolder) -> list[str]:
        """List the patient's images as people.json does: `exemplars/NAME` or `holdout/NAME`."""
        return [file for patient, files in version.people().items() if self.is_of(patient) for file in files]

    def is_known_in(self, version: VersionFolder) -> bool:
        return (
            any(map(self.is_of, (*version.people(), *version.trained_patients())))
            or any(names_patient(file, self.patient) for file in names_given_with_eval(version))
            or bool(self.learned_in(version))
        )

    def has_images_in(self, version: VersionFolder) -> bool:
        return not version.image_names().isdisjoint(self.images)

    def concerns(self, version: VersionFolder) -> bool:
        return self.is_known_in(version) or self.has_images_in(version)


def erase(model: Path | str, patient: str, *, images: Path | str | None = None) -> Erased:
    """Remove the images of a patient and everything that was made of them; the id is that of the data.

    From statistics they are subtracted, if their embeddings are kept or `images` has them once more. The
    weights of a network are not unlearned: `trained` says in which versions they have seen the images.
    """
    folder = ModelFolder(Path(model))
    folder.version()  # a folder that is no model gets no lock file
    if not patient.strip():
        raise InvalidInput("The patient's id is empty. Give it as in the data.", code="model.patient.empty")
    _refuse_links(folder)
    with writing(folder.root), folder.locked():
        for name in folder.versions:  # of a call that was killed
            _settle(folder, name)
        for name in folder.unlisted():  # it may show the patient
            Draft(folder, name).refuse_unlisted()
        begun, asked = Erasure.begun(folder), Erasure(patient)
        if begun is not None and asked.is_of(begun.patient):
            return _carry_out(folder, begun)
        if not any(asked.is_known_in(folder.version(name)) for name in folder.versions):
            raise _nobody(folder)
        if begun is not None:
            _carry_out(folder, begun)
        folder.erased_features_path.unlink(missing_ok=True)  # of a call that was killed while it planned
        return _carry_out(folder, Erasure.planned(folder, patient, None if images is None else Path(images)))


def _refuse_links(folder: ModelFolder) -> None:
    """Refuse links, because deleting one leaves what it points to."""
    places = (folder.versions_path, *folder.versions_path.rglob("*"))
    if links := sorted(path for path in places if path.is_symlink()):
        raise InvalidInput(f"{links[0]} is a link. Replace it by what it points to. Nothing was changed.")


def _nobody(folder: ModelFolder) -> InvalidInput:
    versions = [folder.version(name) for name in folder.versions]
    if versions[0].provenance().get("merged_from"):
        return InvalidInput(
            f"{folder.root} knows no patient of this id: it was merged. Erase in those models, merge again.\n"
            "Nothing was changed. The statistics may contain images of the patient all the same: only the "
            "models that\nwere merged know their patients.",
            code="model.patient.merged",
        )
    ids = {who for version in versions for who in (*version.people(), *version.trained_patients())}
    advice = "Give the id as in the data: the column `patient` of the manifest."
    if not ids:
        advice = "Its images came without patients: train a new model without the images."
    elif any(re.fullmatch(NUMBERED, who) for who in ids):
        advice = "Patients of a prepared store are numbers in its list `groups`: give 'patient N of VERSION'."
    return InvalidInput(f"{folder.root} knows no patient of this id; nothing was changed. {advice}")


def _parent(folder: ModelFolder, version: VersionFolder) -> VersionFolder | None:
    name = version.provenance()["parent"]
    return None if name is None else folder.version(name)


def _carry_out(folder: ModelFolder, erasure: Erasure) -> Erased:
    names = [name for name in erasure.versions if name in folder.versions]
    for name in names:  # an unreadable one raises before anything is changed
        version = folder.version(name)
        version.load_state()
        version.metrics()
    write_json(folder.erasure_path, asdict(erasure))
    removed = _remove_drafts(folder)
    for name in names:  # the oldest first: what an update cost is measured against its parent
        version = folder.version(name)
        if erasure.concerns(version):
            _replace(folder, version, erasure)
    folder.remove_unlisted()
    n_images, n_versions = len(erasure.images), len(erasure.versions)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    stone = {"date": date, "images": n_images, "versions": n_versions}
    if erasure.revised:
        stone |= {"subtracted": erasure.subtracted, "digits": erasure.digits}
    stones = [*_tombstones(folder)[: erasure.n_tombstones], stone]
    write_json(folder.root / TOMBSTONES, {"format": FORMAT, "tombstones": stones})
    folder.erased_features_path.unlink(missing_ok=True)
    folder.erasure_path.unlink()
    flush_folder(folder.root)
    return Erased(
        model=folder.root,
        images=n_images,
        versions=tuple(erasure.versions),
        trained=tuple(erasure.trained),
        summed_up=tuple(erasure.summed_up),
        is_recorded=erasure.is_recorded,
        subtracted=erasure.subtracted,
        digits=erasure.digits,
        without_exemplars=erasure.without_exemplars,
        thrown_away=tuple(removed),
        left=tuple(_strangers(folder)),
    )


def _replace(folder: ModelFolder, version: VersionFolder, erasure: Erasure) -> None:
    unfinished = VersionFolder(folder.versions_path / f".{version.name}.erasing", folder.store)
    write_cleaned(folder, version, erasure, unfinished)
    new_hash = unfinished.publish(folder.standby(version.name))
    folder.write({**folder.hashes, version.name: new_hash}, folder.current)
    _settle(folder, version.name)


def _settle(folder: ModelFolder, name: str) -> None:
    """Move a version that model.json accepts from its standby into its place."""
    standby, place = folder.standby(name), folder.versions_path / name
    if manifest_sha256(standby) != folder.hashes[name]:
        return
    old = folder.versions_path / f".{name}.erased"
    if place.exists():
        place.rename(old)
    standby.rename(place)
    flush_folder(folder.versions_path)
    shutil.rmtree(old, ignore_errors=True)


def _remove_drafts(folder: ModelFolder) -> list[str]:
    """Remove what may show the patient: unfinished versions, and prepared stores and explanations."""
    hidden = sorted(
        path for path in folder.versions_path.glob(".v*") if path.suffix in OF_A_DRAFT and path.is_dir()
    )
    ours = [
        path
        for path in folder.root.iterdir()
        if path.name not in OF_A_MODEL and path.is_dir() and not path.is_symlink()
        if is_cache(path) or (path / "explanation.json").exists()
    ]
    for path in (*hidden, *ours):
        shutil.rmtree(path)
    named = (path for path in (*hidden, *ours) if path.suffix not in OF_AN_ERASURE)
    return sorted(path.relative_to(folder.root).as_posix() for path in named)


def _strangers(folder: ModelFolder) -> list[str]:
    """List everything that is no part of a model."""
    listed = folder.versions
    strange = (path for path in folder.versions_path.iterdir() if path.name not in listed)
    besides = (path for path in folder.root.iterdir() if path.name not in OF_A_MODEL)
    return sorted(path.relative_to(folder.root).as_posix() for path in (*strange, *besides))


def _tombstones(folder: ModelFolder) -> list[dict[str, Any]]:
    path = folder.root / TOMBSTONES
    if not path.exists():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("tombstones"), list):
        raise DamagedFile(f"{path} is damaged; restore it.")
    return list(content["tombstones"])


def write_cleaned(folder: ModelFolder, version: VersionFolder, erasure: Erasure, new: VersionFolder) -> None:
    """Write the version without what is erased. Nothing else in its folder is taken along."""
    renamed = _write_state(folder, version, new, erasure)
    if version.has(File.HOLDOUT):
        images = [entry for entry in version.holdout_entries() if entry["file"] not in erasure.images]
        write_json(new.root / File.HOLDOUT, {"format": FORMAT, "images": images})
    if version.has(File.PEOPLE):
        write_json(new.root / File.PEOPLE, _people(version, erasure, renamed))
    if version.has(File.LEARNED):
        theirs = {entry.image for entry in erasure.learned_in(version)} if erasure.revised else set()
        write_json(new.root / File.LEARNED, Learned.read(version).without(theirs, new.store).content())
    facts = version.provenance()
    if version.name in erasure.made_of:
        facts["images_sha256"] = None  # a hash over all images, the patient's among them
    _write_measurements(version, _parent(folder, version), new, facts, erasure)


def _write_state(
    folder: ModelFolder, version: VersionFolder, new: VersionFolder, erasure: Erasure
) -> dict[str, str]:
    """Write the state with the same weights; map the old name of each remaining exemplar to the new one."""
    old = [entry["file"] for entry in version.exemplar_entries()]
    remaining = [place for place, file in enumerate(old) if file not in erasure.images]
    is_revised = version.name in erasure.revised
    if len(remaining) == len(old) and not is_revised:
        write_bytes(new.root / File.STATE, version.read(File.STATE))
        return {}
    state = version.load_state()
    memory = state.memory.select(torch.tensor(remaining, dtype=torch.int64))
    lost = state.memory.class_counts(len(state.class_names)) - memory.class_counts(len(state.class_names))
    readout = copy.deepcopy(state.readout)
    if not is_revised:
        readout.class_means = _means(state, memory, torch.nonzero(lost).flatten())
    state = replace(state, memory=memory, readout=readout)
    if is_revised:
        content = read_verified(folder.erased_features_path, erasure.features_sha256)
        features, images = safetensors.torch.load(content), erasure.learned_in(version)
        moves = moves_of(images, features, state, first=folder.first())
        first = first_task(version, folder.first())
        state = revise(state, moves, first=first, is_trained=first_task_trains(version))
    new.root.mkdir(parents=True, exist_ok=True)
    save_state(state, new.state_path, new.store)
    names = [entry["file"] for entry in new.exemplar_entries()]
    return dict(zip((old[place] for place in remaining), names, strict=True))


def _means(state: State, memory: Samples, touched: Tensor) -> Float[Tensor, "classes dim"]:
    """Compute the means of the touched classes again, from the exemplars that remain.

    A class without exemplars takes the direction of its weights in the classifier, which are part of the
    network and not unlearned.
    """
    execution = ExecutionConfig()
    device = choose_device(execution)
    chosen = torch.nonzero(torch.isin(memory.labels, touched)).flatten()
    means = state.readout.class_means.clone()
    with Feed(memory.select(chosen), state.preprocessing, device, execution) as feed:
        means[touched] = class_means(copy.deepcopy(state.network).to(device), feed).cpu()[touched]
    return means


def _people(version: VersionFolder, erasure: Erasure, renamed: Mapping[str, str]) -> Content:
    """Compute the new people.json. A picture that was filed under two patients is lost to both."""
    patients: dict[str, list[str]] = {}
    for patient, files in version.people().items():
        for part, _, name in (file.partition("/") for file in files):
            if not erasure.is_of(patient) and name not in erasure.images:
                patients.setdefault(patient, []).append(f"{part}/{renamed.get(name, name)}")
    trained = [patient for patient in version.trained_patients() if not erasure.is_of(patient)]
    return {"format": FORMAT, "patients": patients, "trained": trained}


def _write_measurements(
    version: VersionFolder, parent: VersionFolder | None, new: VersionFolder, facts: Content, erasure: Erasure
) -> None:
    """Measure everything again on the images that remain. What `--eval` measured stays, without the names of
    the patient's files."""
    state, figures, cost = new.load_state(), version.metrics(), version.forgetting()
    n_old = None if cost is None else len(state.class_names) - len(facts["classes_added"])
    was_sealed = any(entry["class"] in state.class_names[:n_old] for entry in version.holdout_entries())
    sealed = sealed_or_exemplars(new, state, n_old=n_old)
    is_changed = erasure.has_images_in(version) or version.name in erasure.revised
    is_of_eval = figures["measured_on"] == "eval"
    if is_changed and not is_of_eval:
        before = None if parent is None else parent.load_state()
        figures, again = measured(sealed, before, state, ExecutionConfig())
        if cost is not None and again is not None:
            # Whether the version was promoted was decided then; only the figure is measured again.
            cost = {**again, "gate": {**cost["gate"], "loss_in_points": loss_in_points(again)}}
    if cost is not None and cost["measured_on"] == "eval":
        cost["flipped"] = [
            {**entry, "file": NAMELESS} if names_patient(entry["file"], erasure.patient) else entry
            for entry in cost["flipped"]
        ]
    if is_changed and (was_sealed or not is_of_eval):
        calibration = calibrate(state, sealed.samples, groups=sealed.groups, measured_on=sealed.kind)
        calibration.write(new.root / File.CALIBRATION)
    else:
        write_bytes(new.root / File.CALIBRATION, version.read(File.CALIBRATION))
    describe(new, facts, figures, cost)


def names_given_with_eval(version: VersionFolder) -> list[str]:
    """List the file names of `--eval`, which are the owner's; sealed images have random names."""
    cost = version.forgetting()
    if cost is None or cost["measured_on"] != "eval":
        return []
    return [entry["file"] for entry in cost["flipped"]]
