"""The model folder: versions that never change once they are written, and the images and tensors they list.

`model.json` names the current version and holds the hash of every version's manifest; a manifest holds the
hash of every file of its version. So one write of model.json promotes a version, goes back to one, or accepts
an erased version in the place of another, and no file changes unnoticed. See docs/reference/model-folder.md.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from medcil.config import Views
from medcil.errors import DamagedFile, InvalidInput, RunConflict, nearest
from medcil.recipe import differences
from medcil.storage.atomic import (
    TEMPORARY,
    flush_folder,
    locked_folder,
    read_json,
    read_verified,
    reading,
    sha256,
    write_json,
    writing,
)
from medcil.storage.content_store import ContentStore
from medcil.storage.run_dir import RunDir

if TYPE_CHECKING:
    from medcil.clinic.calibration import Calibration
    from medcil.data.samples import Samples
    from medcil.training.state import State


FORMAT = 3
STANDBY = ".standby"
Schema = TypeVar("Schema")
MeasuredOn = Literal["hold-out", "eval", "exemplars"]


class File(StrEnum):
    """The files of a version."""

    MANIFEST = "manifest.json"
    STATE = "state/manifest.json"
    HOLDOUT = "holdout.json"
    PEOPLE = "people.json"
    LEARNED = "learned.json"
    CALIBRATION = "calibration.json"
    PROVENANCE = "provenance.json"
    METRICS = "metrics.json"
    FORGETTING = "forgetting.json"
    REPORT = "report.html"
    CARD = "card.md"


class ModelIndex(TypedDict):
    """model.json; `sha256` is that of the other keys."""

    format: int
    current: str
    versions: dict[str, str]
    sha256: str


class VersionManifest(TypedDict):
    format: int
    files: dict[str, str]


LabelledImage = TypedDict("LabelledImage", {"file": str, "class": str})


class Holdout(TypedDict):
    format: int
    images: list[LabelledImage]


class StateFacts(TypedDict):
    """What is read of a state without loading the network."""

    class_names: list[str]
    tensors: dict[str, list[str]]
    exemplars: list[LabelledImage]
    preprocessing: dict[str, Any]
    readout: dict[str, Any]


class People(TypedDict):
    format: int
    patients: dict[str, list[str]]
    trained: list[str]


class Delivery(TypedDict):
    """Images that one version added to the statistics of its classes."""

    version: str
    views: Views
    images: dict[str, dict[str, list[str]]]
    """Keyed hashes by class and patient."""


class LearnedImages(TypedDict):
    format: int
    deliveries: list[Delivery]
    embeddings: dict[str, list[str]]
    """Files of embeddings by patient."""


class Source(TypedDict):
    """A version of another model; `sha256` is that of its manifest."""

    version: str
    sha256: str


class Provenance(TypedDict):
    format: int
    version: str
    when: str
    medcil: str
    packages: dict[str, str | None]
    device: str
    device_kind: str
    parent: str | None
    promoted: bool
    classes_added: list[str]
    more_images: NotRequired[dict[str, int]]
    images: dict[str, int]
    holdout: dict[str, int]
    holdout_per_class: int
    images_sha256: str | None
    asked: list[str]
    settings: dict[str, Any]
    images_per_second: float | None
    images_embedded_per_second: NotRequired[float | None]
    rebalanced: NotRequired[str | None]
    corrected: NotRequired[str | None]
    started_from: NotRequired[Source | None]
    merged_from: NotRequired[list[Source]]
    decisions: NotRequired[list[dict[str, str]]]
    weights: NotRequired[dict[str, str | None] | None]


class Recall(TypedDict):
    name: str
    images: int
    patients: int | None
    right: int
    recall: float | None
    low: float | None
    high: float | None


class Metrics(TypedDict):
    format: int
    measured_on: MeasuredOn
    images: int
    accuracy: float | None
    balanced_accuracy: float | None
    classes: list[Recall]
    confusion: list[list[int]]


class Forgetting(TypedDict):
    """Of an update; the tables in it are checked by the hash alone."""

    format: int
    measured_on: MeasuredOn
    note: str | None
    verdict: str | None
    interval: str
    old_patients: int | None
    old_classes: list[dict[str, Any]]
    new_classes: list[Recall]
    mean_recall_of_old_classes: dict[str, float] | None
    accuracy: dict[str, float | None]
    balanced_accuracy: dict[str, float | None]
    confusions: list[dict[str, Any]]
    flipped: list[dict[str, str]]
    gate: dict[str, Any]


@dataclass(frozen=True)
class VersionFolder:
    """One version of a model: a folder that appeared whole, or one that is still growing."""

    root: Path
    store: ContentStore
    files: Mapping[str, str] | None = None
    """Hashes by name, from the manifest; None while the version is growing."""
    sha256: str = ""
    """Of the manifest."""

    def seal(self) -> str:
        """Write the manifest of all files; return its hash."""
        paths = sorted(path for path in self.root.rglob("*") if path.is_file() and path.name[:1] != ".")
        names = {path.relative_to(self.root).as_posix(): path for path in paths}
        names.pop(File.MANIFEST, None)
        hashes = {name: sha256(path.read_bytes()) for name, path in names.items()}
        write_json(self.root / File.MANIFEST, {"format": FORMAT, "files": hashes})
        return manifest_sha256(self.root)

    def publish(self, place: Path) -> str:
        """Put the whole version in its place; return the hash that model.json lists it by."""
        manifest_sha256 = self.seal()
        self.root.rename(place)
        flush_folder(place.parent)
        return manifest_sha256

    @property
    def name(self) -> str:
        return self.root.name.removeprefix(".").removesuffix(STANDBY)

    @property
    def source(self) -> Source:
        """How other models refer to this version."""
        return {"version": self.name, "sha256": self.sha256}

    @property
    def state_path(self) -> Path:
        return self.root / "state"

    def has(self, name: str) -> bool:
        return (self.root / name).exists() if self.files is None else name in self.files

    def read(self, name: str) -> bytes:
        """Return the verified content of a file."""
        path = self.root / name
        with reading(self.root):
            if self.files is None:
                return path.read_bytes()
            if name not in self.files:
                raise DamagedFile(f"{path} is not in its manifest; restore it.", code="model.file.unlisted")
            return read_verified(path, self.files[name])

    def _document(self, name: str, schema: type[Schema]) -> Schema:
        return _parsed(self.read(name), schema, self.root / name)

    def load_state(self) -> "State":
        from medcil.training.state import load_state

        with reading(self.root):
            self.read(File.STATE)
            return load_state(self.state_path, self.store)

    def exemplar_entries(self) -> list[LabelledImage]:
        """List the exemplars in the order of the memory, without loading the network."""
        return self._document(File.STATE, StateFacts)["exemplars"]

    def class_names(self) -> tuple[str, ...]:
        """Return the names without loading the network."""
        return tuple(self._document(File.STATE, StateFacts)["class_names"])

    def side(self) -> int:
        """Return the pixels on a side of the images."""
        return int(self._document(File.STATE, StateFacts)["preprocessing"]["side"])

    def readout_name(self) -> str:
        return str(self._document(File.STATE, StateFacts)["readout"]["kind"])

    def holdout(self) -> "Samples":
        """Read the sealed images; labels count the state's classes."""
        import torch

        from medcil.data.samples import Samples, TensorImages, decode_image, no_samples

        facts, entries = self._document(File.STATE, StateFacts), self.holdout_entries()
        names, side = facts["class_names"], facts["preprocessing"]["side"]
        if not entries:
            return no_samples(side)
        labels = torch.tensor([names.index(entry["class"]) for entry in entries])
        with reading(self.root):
            contents = [self.store.read(entry["file"]) for entry in entries]
        pixels = torch.stack([decode_image(content, side) for content in contents])
        return Samples(TensorImages(pixels), labels)

    def holdout_entries(self) -> list[LabelledImage]:
        return self._document(File.HOLDOUT, Holdout)["images"] if self.has(File.HOLDOUT) else []

    def holdout_groups(self) -> tuple[str, ...] | None:
        """Return the patient of every sealed image, or its own name; None if no patient is known."""
        people = self.people()
        owner = {file: patient for patient, files in people.items() for file in files}
        files = [f"holdout/{entry['file']}" for entry in self.holdout_entries()]
        return tuple(owner.get(file, file) for file in files) if people else None

    def image_names(self) -> set[str]:
        """Name every image that the version lists."""
        exemplars = self.exemplar_entries() if self.has(File.STATE) else []
        return {entry["file"] for entry in (*exemplars, *self.holdout_entries())}

    def tensors(self) -> dict[str, list[str]]:
        """Name the files of tensors by part. Equal names are equal tensors, also in different models."""
        return self._document(File.STATE, StateFacts)["tensors"] if self.has(File.STATE) else {}

    def tensor_names(self) -> set[str]:
        """Name every file of tensors that the version lists."""
        learned = self.learned()
        kept = {} if learned is None else learned["embeddings"]
        return {name for files in (*self.tensors().values(), *kept.values()) for name in files}

    def people(self) -> dict[str, list[str]]:
        """List the images of each known patient, as `exemplars/NAME` or `holdout/NAME`."""
        return self._document(File.PEOPLE, People)["patients"] if self.has(File.PEOPLE) else {}

    def trained_patients(self) -> list[str]:
        """List the patients whose images this version was the first to be trained on."""
        return self._document(File.PEOPLE, People)["trained"] if self.has(File.PEOPLE) else []

    def learned(self) -> LearnedImages | None:
        """Return which images the statistics contain; None where that is not recorded."""
        return self._document(File.LEARNED, LearnedImages) if self.has(File.LEARNED) else None

    def provenance(self) -> dict[str, Any]:
        return {**self._document(File.PROVENANCE, Provenance)}

    def metrics(self) -> dict[str, Any]:
        return {**self._document(File.METRICS, Metrics)}

    def forgetting(self) -> dict[str, Any] | None:
        """Return what the update cost; None for the first version."""
        return {**self._document(File.FORGETTING, Forgetting)} if self.has(File.FORGETTING) else None

    def calibration(self) -> "Calibration":
        from medcil.clinic.calibration import Calibration

        path = self.root / File.CALIBRATION
        return Calibration.from_json(json.loads(self.read(path.name)), str(path))


def manifest_sha256(version: Path) -> str:
    """Hash the manifest of a version's folder; empty where there is none."""
    path = version / File.MANIFEST
    return sha256(path.read_bytes()) if path.is_file() else ""


def _parsed(content: bytes, schema: type[Schema], path: Path) -> Schema:
    try:
        return TypeAdapter(schema).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{path} is damaged ({where}: {first['msg']}); restore it."
        raise DamagedFile(problem, code="model.file.damaged") from None


class ModelFolder:
    """A model with its versions. Nothing is read before it is needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest_path = root / "model.json"
        self.versions_path = root / "versions"
        self.store = ContentStore(root)
        self.erasure_path = root / ".erasing.json"  # exists while a patient is being erased
        self.erased_features_path = root / ".erasing.safetensors"  # what is subtracted then

    @property
    def exists(self) -> bool:
        with reading(self.root):
            return self.manifest_path.is_file()

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each version's manifest, oldest version first."""
        return self._read()["versions"]

    @property
    def versions(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(self.hashes)

    @property
    def current(self) -> str:
        return self._read()["current"]

    def version(self, name: str | None = None) -> VersionFolder:
        """Open the current version, or the one of this name."""
        content = self._read()
        name = name or content["current"]
        if name not in content["versions"]:
            raise InvalidInput(
                f"{self.root} has no version {name!r}. {nearest(name, content['versions'])}\n"
                f"`medcil history {self.root}` lists them.",
                code="model.version.unknown",
            )
        expected, standby = content["versions"][name], self.standby(name)
        with reading(self.root):
            folder = standby if manifest_sha256(standby) == expected else self.versions_path / name
            if not folder.is_dir():
                raise DamagedFile(
                    f"{folder} is missing, though model.json lists it; restore it.",
                    code="model.version.missing",
                )
            path = folder / File.MANIFEST
            files = _parsed(read_verified(path, expected), VersionManifest, path)["files"]
            return VersionFolder(folder, self.store, files, expected)

    def unlisted(self) -> list[str]:
        """List the finished versions that model.json does not list."""
        listed = self.versions if self.exists else ()
        names = (path.name for path in self.versions_path.glob("v*"))
        return sorted(name for name in names if re.fullmatch(r"v\d+", name) and name not in listed)

    def remove_unlisted(self) -> None:
        """Delete the images and tensors that no version lists."""
        versions = [self.version(name) for name in self.versions] if self.exists else []
        self.store.remove_except(
            name for version in versions for name in version.image_names() | version.tensor_names()
        )

    def refuse_half_erased(self) -> None:
        with reading(self.root):
            is_unfinished = self.erasure_path.exists()
        if is_unfinished:
            raise RunConflict(
                f"A patient is being erased from {self.root}. Wait, or finish it with `medcil erase`.",
                code="model.erase.unfinished",
            )

    def standby(self, name: str) -> Path:
        """The place of an erased version until model.json accepts it."""
        return self.versions_path / f".{name}{STANDBY}"

    def first(self) -> str:
        """Name the version that learned the first task."""
        return next(name for name in self.versions if self.version(name).provenance()["parent"] is None)

    def next_name(self) -> str:
        return f"v{1 + max(int(name[1:]) for name in self.versions)}"

    def write(self, hashes: Mapping[str, str], current: str) -> None:
        """Replace model.json: the one write that changes what the model is."""
        content = {"format": FORMAT, "current": current, "versions": dict(hashes)}
        with writing(self.root):
            write_json(self.manifest_path, {**content, "sha256": _checksum(content)})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writing processes out, and remove what one that was killed has left."""
        with locked_folder(self.root):
            for folder in (self.root, *self.store.folders):
                for unfinished in folder.glob(f".*{TEMPORARY}"):
                    unfinished.unlink(missing_ok=True)
            yield

    def _what_instead(self) -> str:
        if any(self.versions_path.glob(".v*.part")):
            return "is a model whose training is not finished: run the same `medcil train` command again."
        if self.root.is_dir():
            return "is no model folder (no model.json). Give the folder that `medcil train` wrote."
        if self.root.exists():
            return "is a file: this needs the model folder that `medcil train` wrote."
        return "does not exist. Give the folder that `medcil train` wrote."

    def _read(self) -> ModelIndex:
        if not self.exists:
            raise InvalidInput(f"{self.root} {self._what_instead()}", code="model.missing")
        with reading(self.root):
            content = self.manifest_path.read_bytes()
        _refuse_other_format(content, self.manifest_path)
        index: ModelIndex = _parsed(content, ModelIndex, self.manifest_path)
        stated = {key: index[key] for key in ("format", "current", "versions")}
        is_sound = all(re.fullmatch(r"v\d+", name) for name in index["versions"])
        if not is_sound or index["current"] not in index["versions"] or _checksum(stated) != index["sha256"]:
            raise DamagedFile(
                f"{self.manifest_path} was changed or damaged (its sha256 differs); restore it.",
                code="model.index.damaged",
            )
        return index


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content).encode())


def _refuse_other_format(content: bytes, path: Path) -> None:
    try:
        written = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        return  # the schema says what is wrong
    if isinstance(written, int) and written != FORMAT:
        age, way = ("a newer", "update medcil") if written > FORMAT else ("an older", "train the model again")
        raise InvalidInput(
            f"{path} was written by {age} medcil (format {written}, this one reads {FORMAT}): {way}.",
            code="model.format.unsupported",
        )


class Draft:
    """A version that is being made, and what is needed to continue it."""

    def __init__(self, model: ModelFolder, name: str) -> None:
        self.model, self.name = model, name
        self.place = model.versions_path / name  # of the finished version
        self.part = model.versions_path / f".{name}.part"
        self.request_path = self.part / "request.json"  # images and settings: no other command continues it
        self.training = RunDir(self.part / "training")  # log and checkpoints
        self.version = VersionFolder(self.part / "version", model.store)

    @property
    def is_begun(self) -> bool:
        """Whether the draft is not cleaned up yet: the same command continues it."""
        return self.request_path.exists()

    def is_of(self, request: dict[str, Any]) -> bool:
        """Compare the requests; unset settings do not count, because a newer medcil may have more of them."""
        return self.is_begun and not any(differences(read_json(self.request_path), request))

    def refuse_unlisted(self) -> None:
        """Refuse to replace a finished version: an older model.json may have been restored, or a command was
        killed before it listed the version."""
        if self.place.exists():
            raise RunConflict(
                f"{self.place} exists, but model.json does not list it. Restore model.json, run the same "
                "command again if it was killed, or move that folder.",
                code="model.version.unlisted",
            )

    def begin(self, request: dict[str, Any]) -> None:
        """Continue what the same command left; remove what another one left, if it never became a version."""
        if self.is_of(request):
            for unfinished in self.part.rglob(f".*{TEMPORARY}"):
                unfinished.unlink(missing_ok=True)
            if self.place.exists():  # not listed yet: it is measured again, perhaps on other images
                self.place.rename(self.version.root)
            return
        self.refuse_unlisted()
        if self.is_begun:
            warnings.warn(f"An unfinished {self.name} of another request is thrown away.", stacklevel=2)
            write_json(self.request_path, {})  # first, so that no command continues the rest
            if not self.model.unlisted():
                self.model.remove_unlisted()
        elif self.part.is_file() or any(not path.match(f".*{TEMPORARY}") for path in self.part.glob("*")):
            raise RunConflict(
                f"{self.part} holds no draft of a version. Move it away.", code="model.draft.foreign"
            )
        self.clean()
        write_json(self.request_path, request)

    def clean(self) -> None:
        """Remove the request last: it says that the rest is a draft, and whose."""
        for path in self.part.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.part, ignore_errors=True)
