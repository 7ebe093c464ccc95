"""Everything of one patient is removed from a model folder, in all versions, and nothing is refilled.

Each version that holds something is written anew beside its place and put there by renaming. What is to be
done is written down first and taken away last: killed at any moment, the same call goes on, and until then
each version loads as it was or as it will be. What the weights have learned stays in them.
"""

import datetime
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medcil.clinic.draft import Draft
from medcil.clinic.erased_version import Erasure, emptied_classes, image_files, write_cleaned
from medcil.clinic.model_dir import FORMAT, ModelFolder, VersionFolder
from medcil.data.cache import is_store
from medcil.errors import DamagedFile, InvalidInput
from medcil.storage.atomic import flush_folder, read_json, write_json
from medcil.storage.os_errors import writing

TOMBSTONES = "tombstones.json"
NUMBERED = r"patient \d+ of v\d+"
OF_A_DRAFT = frozenset({".part", ".copy", ".erasing", ".erased", ".cleaned"})
OF_A_MODEL = frozenset({"model.json", "versions", TOMBSTONES, ".lock", ".erasing.json", ".copying.json"})


@dataclass(frozen=True)
class Erased:
    model: Path
    images: int
    """Different pictures that were removed."""
    versions: tuple[str, ...]
    """That were written anew."""
    trained: tuple[str, ...]
    """Whose weights have learned from the patient's images, themselves or through the version before them."""
    without_exemplars: dict[str, list[str]]
    """Classes that lost their last exemplar, by version."""
    thrown_away: tuple[str, ...]
    """Unfinished versions, prepared stores and explanations that lay in the folder."""
    left: tuple[str, ...]
    """Other things in the folder, which only their owner can judge."""


@dataclass(frozen=True)
class _Task:
    """What is to be done, on disk while it is being done: the only place that then names the patient."""

    patient: str
    sha256s: list[str]
    versions: list[str]
    given: list[str]
    """Versions that were made of images of the patient, and did not inherit them alone."""
    trained: list[str]
    without_exemplars: dict[str, list[str]]
    n_tombstones: int
    """Before, so that no second one is set for the same task."""

    @classmethod
    def read(cls, model: ModelFolder) -> "_Task | None":
        path = model.erasure_path
        if not path.exists():
            return None
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise DamagedFile(
                f"{path} is damaged ({error}); restore it, or delete it and begin anew."
            ) from None


def erase(model: Path | str, patient: str) -> Erased:
    """Removes the images of a patient, named as in the data, and whatever was made of them.

    The model's weights are not unlearned: `trained` says in which versions they have seen the images.
    """
    folder = ModelFolder(Path(model))
    folder.version()  # a folder that is no model gets no lock file
    if not patient.strip():
        raise InvalidInput("The patient's id is empty: give it as the data had it.")
    _refuse_links(folder)
    with writing(folder.root), folder.locked():
        _finish_renaming(folder)
        _refuse_unlisted(folder)
        begun, asked = _Task.read(folder), Erasure(patient, frozenset())
        if begun is not None and asked.is_of(begun.patient):
            return _carry_out(folder, _task(folder, patient, begun))
        if not any(asked.is_known_to(folder.version(name)) for name in folder.versions):
            raise _nobody(folder)
        if begun is not None:
            _carry_out(folder, _task(folder, begun.patient, begun))
        return _carry_out(folder, _task(folder, patient))


def _refuse_links(folder: ModelFolder) -> None:
    """Deleting a link leaves what it points to."""
    places = (folder.versions_path, *folder.versions_path.rglob("*"))
    if links := sorted(path for path in places if path.is_symlink()):
        raise InvalidInput(
            f"{links[0]} is a link: what it points to would keep the images, and nothing was changed. Put "
            "what it points to in its place."
        )


def _refuse_unlisted(folder: ModelFolder) -> None:
    """Such a version may hold the patient's images, and is removed only where it is known to be a draft."""
    for name in _unlisted(folder):
        Draft(folder, name).refuse_unlisted()


def _unlisted(folder: ModelFolder) -> list[str]:
    """Versions in their place that model.json does not list."""
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
    """From what the versions hold now, and from what was found when the task was begun."""
    versions = [folder.version(name) for name in folder.versions]
    asked = Erasure(patient, frozenset())
    found = {sha for version in versions for sha in _hashes(version, asked)}
    erasure = Erasure(patient, frozenset(found.union(begun.sha256s if begun else ())))
    known = begun.versions if begun else []
    concerned = [v for v in versions if v.name in known or erasure.concerns(v)]
    new = [version for version in concerned if version.name not in known]
    given = [v.name for v in new if erasure.was_given(v, _parent(folder, v))]
    emptied = {v.name: emptied_classes(v, erasure.files_of(v)) for v in new}
    return _Task(
        patient=patient,
        sha256s=sorted(erasure.sha256s),
        versions=[version.name for version in concerned],
        given=[*(begun.given if begun else ()), *given],
        trained=_trained(versions, asked, begun.trained if begun else ()),
        without_exemplars={
            **(begun.without_exemplars if begun else {}),
            **{name: classes for name, classes in emptied.items() if classes},
        },
        n_tombstones=begun.n_tombstones if begun else len(_tombstones(folder)),
    )


def _hashes(version: VersionFolder, erasure: Erasure) -> list[str]:
    hashes = image_files(version)
    try:
        return [hashes[file] for file in erasure.listed_files(version)]
    except KeyError as error:
        raise DamagedFile(
            f"{version.people_path} is damaged (no manifest lists {error}); restore it."
        ) from None


def _trained(versions: Sequence[VersionFolder], erasure: Erasure, known: Sequence[str]) -> list[str]:
    """A version's weights begin as those of its parent, which comes before it."""
    trained = set(known)
    for version in versions:
        kept = any(file.startswith("state/") for file in erasure.listed_files(version))
        if kept or erasure.was_trained_on_in(version) or version.provenance()["parent"] in trained:
            trained.add(version.name)
    return [version.name for version in versions if version.name in trained]


def _parent(folder: ModelFolder, version: VersionFolder) -> VersionFolder | None:
    name = version.provenance()["parent"]
    return None if name is None else folder.version(name)


def _carry_out(folder: ModelFolder, task: _Task) -> Erased:
    for name in task.versions:  # one that cannot be read is said before anything is changed
        version = folder.version(name)
        version.load_state()
        version.metrics()
    write_json(folder.erasure_path, asdict(task))
    thrown_away = _throw_away(folder)
    erasure = Erasure(task.patient, frozenset(task.sha256s))
    for name in task.versions:  # the oldest first: what an update cost is measured against its parent
        version = folder.version(name)
        if erasure.concerns(version):
            _replace(folder, version, erasure, was_given=name in task.given)
    stone = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "images": len(task.sha256s),
        "versions": len(task.versions),
    }
    stones = [*_tombstones(folder)[: task.n_tombstones], stone]
    write_json(folder.root / TOMBSTONES, {"format": FORMAT, "tombstones": stones})
    folder.erasure_path.unlink()
    flush_folder(folder.root)
    return Erased(
        model=folder.root,
        images=len(task.sha256s),
        versions=tuple(task.versions),
        trained=tuple(task.trained),
        without_exemplars=task.without_exemplars,
        thrown_away=tuple(thrown_away),
        left=tuple(sorted(_left(folder))),
    )


def _replace(folder: ModelFolder, version: VersionFolder, erasure: Erasure, *, was_given: bool) -> None:
    """For a moment nothing lies in the version's place; whoever opens it then finds the new one beside it."""
    unfinished = folder.versions_path / f".{version.name}.erasing"
    write_cleaned(version, _parent(folder, version), erasure, unfinished, was_given=was_given)
    unfinished.rename(folder.standby(version.name))
    flush_folder(folder.versions_path)
    old = folder.versions_path / f".{version.name}.erased"
    version.root.rename(old)
    folder.standby(version.name).rename(version.root)
    flush_folder(folder.versions_path)
    shutil.rmtree(old)


def _finish_renaming(folder: ModelFolder) -> None:
    """Of a call that was killed between two names."""
    for name in folder.versions:
        place = folder.versions_path / name
        if not place.exists() and folder.standby(name).exists():
            folder.standby(name).rename(place)
    flush_folder(folder.versions_path)


def _throw_away(folder: ModelFolder) -> list[str]:
    """What no later command needs and may hold the patient's images: unfinished versions, whether of an
    update or of an earlier call, and stores and explanations that someone put into the model folder."""
    hidden = sorted(path for path in folder.versions_path.glob(".v*") if path.suffix in OF_A_DRAFT)
    unlisted = [*(folder.versions_path / name for name in _unlisted(folder)), *hidden]  # the parts last
    besides = [path for path in folder.root.iterdir() if path.name not in OF_A_MODEL and _is_ours(path)]
    for path in (*unlisted, *besides):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    own = (".erasing", ".erased", ".cleaned")
    named = (path for path in (*unlisted, *besides) if not path.name.endswith(own))
    return sorted(path.relative_to(folder.root).as_posix() for path in named)


def _left(folder: ModelFolder) -> list[str]:
    """Everything that is no part of a model."""
    listed = folder.versions
    strange = (path for path in folder.versions_path.iterdir() if path.name not in listed)
    besides = (path for path in folder.root.iterdir() if path.name not in OF_A_MODEL)
    return [path.relative_to(folder.root).as_posix() for path in (*strange, *besides)]


def _is_ours(path: Path) -> bool:
    is_folder = path.is_dir() and not path.is_symlink()
    return is_folder and (is_store(path) or (path / "explanation.json").exists())


def _tombstones(folder: ModelFolder) -> list[dict[str, Any]]:
    path = folder.root / TOMBSTONES
    if not path.exists():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("tombstones"), list):
        raise DamagedFile(f"{path} is damaged; restore it.")
    return list(content["tombstones"])
