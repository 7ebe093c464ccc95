"""The model folder: all that any command needs, in versions that are never changed once they are written.

`model.json` says which version is current and is replaced as a whole, last: promoting a version and going
back to one are this single write. docs/reference/model-folder.md describes the files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from medcil.clinic.model_files import is_sealed_image, read_object
from medcil.errors import DamagedFile, InvalidInput, RunConflict, RunLocked, nearest
from medcil.storage.atomic import TEMPORARY, read_verified, sha256, write_json
from medcil.storage.os_errors import reading, writing

if TYPE_CHECKING:  # torch only where images or weights are read: `medcil history` is quick
    from medcil.clinic.calibration import Calibration
    from medcil.data.samples import Samples
    from medcil.training.state import State

FORMAT = 1
STANDBY = ".cleaned"
PROVENANCE = (
    *("when", "parent", "promoted", "classes_added", "images", "images_sha256"),
    *("holdout_per_class", "asked", "settings"),
)
METRICS = ("measured_on", "accuracy", "balanced_accuracy", "classes")


@dataclass(frozen=True)
class VersionFolder:
    """One version of a model: a folder that appeared whole."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name.removeprefix(".").removesuffix(STANDBY)

    @property
    def state_path(self) -> Path:
        return self.root / "state"

    @property
    def holdout_path(self) -> Path:
        return self.root / "holdout"

    @property
    def people_path(self) -> Path:
        return self.root / "people.json"

    @property
    def calibration_path(self) -> Path:
        return self.root / "calibration.json"

    @property
    def provenance_path(self) -> Path:
        return self.root / "provenance.json"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.json"

    @property
    def forgetting_path(self) -> Path:
        """Of versions that an update wrote."""
        return self.root / "forgetting.json"

    @property
    def report_path(self) -> Path:
        return self.root / "report.html"

    @property
    def card_path(self) -> Path:
        return self.root / "card.md"

    def load_state(self) -> "State":
        from medcil.training.state import load_state

        with reading(self.root):
            return load_state(self.state_path)

    def sha256(self) -> str:
        """Of the manifests, and so of all that an update reads."""
        with reading(self.root):
            manifests = (
                self.state_path / "manifest.json",
                self.holdout_path / "manifest.json",
                self.people_path,
            )
            contents = [path.read_bytes() if path.exists() else b"" for path in manifests]
        return sha256(b"\0".join(contents))

    def exemplar_entries(self) -> list[dict[str, Any]]:
        """file, sha256 and class of every exemplar, without loading the network."""
        return list(read_object(self.state_path / "manifest.json", "exemplars")["exemplars"])

    def class_names(self) -> tuple[str, ...]:
        """Without loading the network."""
        content = read_object(self.state_path / "manifest.json", "class_names")
        return tuple(content["class_names"])

    def holdout(self) -> "Samples":
        """The sealed images; labels count the state's classes. None where none were set aside."""
        import torch

        from medcil.data.decoding.tensors import decode_image
        from medcil.data.samples import Samples, TensorImages, no_samples

        manifest = self.state_path / "manifest.json"
        names, side = self.class_names(), read_object(manifest, "preprocessing")["preprocessing"]["side"]
        entries = self.holdout_entries()
        if not entries:
            return no_samples(side)
        try:
            labels = torch.tensor([names.index(entry["class"]) for entry in entries])
            with reading(self.root):
                contents = [
                    read_verified(self.holdout_path / entry["file"], entry["sha256"]) for entry in entries
                ]
        except ValueError as error:
            raise DamagedFile(
                f"{self.holdout_path / 'manifest.json'} is damaged ({error!r}); restore it."
            ) from None
        return Samples(
            TensorImages(torch.stack([decode_image(content, side) for content in contents])), labels
        )

    def holdout_entries(self) -> list[dict[str, Any]]:
        """file, sha256 and class of every sealed image."""
        manifest = self.holdout_path / "manifest.json"
        if not manifest.exists():
            return []
        entries = read_object(manifest, "images", newest_format=FORMAT)["images"]
        if not isinstance(entries, list) or not all(map(is_sealed_image, entries)):
            raise DamagedFile(f"{manifest} is damaged (its images make no sense); restore it.")
        return entries

    def holdout_groups(self) -> tuple[str, ...] | None:
        """Of every sealed image its patient, or its own name; None where no patient is known."""
        people = self.people()
        owner = {file: patient for patient, files in people.items() for file in files}
        files = [f"{self.holdout_path.name}/{entry['file']}" for entry in self.holdout_entries()]
        return tuple(owner.get(file, file) for file in files) if people else None

    def people(self) -> dict[str, list[str]]:
        """The exemplars and sealed images of each patient, where patients are known."""
        if not self.people_path.exists():
            return {}
        return dict(read_object(self.people_path, "patients")["patients"])

    def trained_patients(self) -> list[str]:
        """Whose images were trained on for the first time in this version, where patients are known."""
        if not self.people_path.exists():
            return []
        return list(read_object(self.people_path, "patients").get("trained", []))

    def provenance(self) -> dict[str, Any]:
        return read_object(self.provenance_path, *PROVENANCE, newest_format=FORMAT)

    def metrics(self) -> dict[str, Any]:
        return read_object(self.metrics_path, *METRICS, newest_format=FORMAT)

    def forgetting(self) -> dict[str, Any] | None:
        """What the update that wrote it cost; the first version has no such file."""
        with reading(self.root):
            if not self.forgetting_path.exists():
                return None
        return read_object(self.forgetting_path, newest_format=FORMAT)

    def calibration(self) -> "Calibration":
        from medcil.clinic.calibration import Calibration

        with reading(self.root):
            if not self.calibration_path.exists():
                raise DamagedFile(f"{self.calibration_path} is missing; restore it.")
            return Calibration.read(self.calibration_path)


@dataclass(frozen=True)
class ModelFolder:
    """A model with its versions. Nothing is read until it is asked for; then a folder that is no model,
    a damaged one and one of a newer medcil each get a message of their own."""

    root: Path

    @property
    def manifest_path(self) -> Path:
        return self.root / "model.json"

    @property
    def versions_path(self) -> Path:
        return self.root / "versions"

    @property
    def exists(self) -> bool:
        with reading(self.root):
            return self.manifest_path.is_file()

    @property
    def versions(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(self._read()["versions"])

    @property
    def current(self) -> str:
        return str(self._read()["current"])

    def version(self, name: str | None = None) -> VersionFolder:
        """The current version, or the one of this name."""
        content = self._read()
        name = name or content["current"]
        if name not in content["versions"]:
            raise InvalidInput(
                f"{self.root} has no version {name!r}. {nearest(name, content['versions'])}\n"
                f"`medcil history {self.root}` lists them."
            )
        folder = self.versions_path / name
        with reading(self.root):
            if not folder.is_dir() and self.standby(name).is_dir():
                folder = self.standby(name)
            if not folder.is_dir():
                raise DamagedFile(f"{folder} is missing, though model.json lists it; restore it.")
        return VersionFolder(folder)

    @property
    def erasure_path(self) -> Path:
        """There while a patient is being erased; left where that was interrupted."""
        return self.root / ".erasing.json"

    @property
    def copying_path(self) -> Path:
        """There until `update --out` is done with the folder: the versions in it are copies."""
        return self.root / ".copying.json"

    def refuse_half_erased(self) -> None:
        with reading(self.root):
            is_unfinished = self.erasure_path.exists()
        if is_unfinished:
            raise RunConflict(
                f"A patient is being erased in {self.root}, and nothing is learned from it before that is "
                "done: wait, or run `medcil erase` again if it was interrupted."
            )

    def standby(self, name: str) -> Path:
        """Where a version lies whole for the moment in which `erase` puts it in the old one's place."""
        return self.versions_path / f".{name}{STANDBY}"

    def next_name(self) -> str:
        return f"v{1 + max((int(name[1:]) for name in self.versions), default=0)}" if self.exists else "v1"

    def write(self, versions: tuple[str, ...], current: str) -> None:
        """The one write that promotes a version, or goes back to one."""
        content = {"format": FORMAT, "current": current, "versions": list(versions)}
        with writing(self.root):
            write_json(self.manifest_path, content)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes that would write out; the system releases it however this one ends."""
        lock = FileLock(self.root / ".lock", timeout=0)
        try:
            with writing(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                lock.acquire()
        except Timeout:
            raise RunLocked(f"Another process is working on {self.root}. Wait for it to end.") from None
        try:
            for unfinished in self.root.glob(f".*{TEMPORARY}"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def _what_instead(self) -> str:
        if any(self.versions_path.glob(".v*.part")):
            return "is a model whose training is not finished: run the same `medcil train` command again."
        if self.root.is_dir():
            return "is no model folder (no model.json). Give the folder that `medcil train` wrote."
        if self.root.exists():
            return "is a file: this needs the model folder that `medcil train` wrote."
        return "does not exist. Give the folder that `medcil train` wrote."

    def _read(self) -> dict[str, Any]:
        if not self.exists:
            raise InvalidInput(f"{self.root} {self._what_instead()}")
        content = read_object(self.manifest_path, "current", "versions", newest_format=FORMAT)
        versions = content["versions"]
        is_sound = isinstance(versions, list) and all(
            isinstance(name, str) and name[:1] == "v" and name[1:].isdecimal() for name in versions
        )
        if not is_sound or content["current"] not in versions:
            raise DamagedFile(f"{self.manifest_path} is damaged (its versions make no sense); restore it.")
        return content
