"""A version in the making, in a hidden folder beside its place, so that a killed command can go on."""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.errors import RunConflict
from medcil.recipe import differences
from medcil.storage.atomic import TEMPORARY, flush_folder, read_json, write_json
from medcil.storage.run_dir import RunDir


@dataclass(frozen=True)
class Draft:
    model: ModelFolder
    name: str

    @property
    def part(self) -> Path:
        return self.model.versions_path / f".{self.name}.part"

    @property
    def request_path(self) -> Path:
        """What is being made, so that nothing else is made of it."""
        return self.part / "request.json"

    @property
    def training(self) -> RunDir:
        """The log and the checkpoints."""
        return RunDir(self.part / "training")

    @property
    def version(self) -> VersionFolder:
        """Still growing."""
        return VersionFolder(self.part / "version")

    @property
    def place(self) -> VersionFolder:
        """Where it will appear whole."""
        return VersionFolder(self.model.versions_path / self.name)

    @property
    def is_begun(self) -> bool:
        """Until it is tidied away; killed before that, the same command goes on."""
        return self.request_path.exists()

    def is_of(self, request: dict[str, Any]) -> bool:
        """A setting that is unset has no say, so that a draft outlives a medcil which learns to know it."""
        return self.is_begun and not any(differences(read_json(self.request_path), request))

    def refuse_unlisted(self) -> None:
        """Refuse to replace a version that model.json does not list, unless the part beside it says that a
        command was killed before its last write: an older model.json may have been restored."""
        if self.place.root.exists() and not self.part.exists():
            raise RunConflict(
                f"{self.place.root} exists, but model.json does not list it. Restore the newer "
                "model.json, or move that folder out of the model. Nothing was changed.",
                code="model.version.unlisted",
            )

    def begin(self, request: dict[str, Any]) -> None:
        """Goes on with what the same command left; what another one left was never a version, and goes."""
        if self.is_of(request):
            for unfinished in self.part.rglob(f".*{TEMPORARY}"):
                unfinished.unlink(missing_ok=True)
            if self.place.root.exists():  # not listed yet: it may be measured on other images now
                self.place.root.rename(self.version.root)
            return
        if self.is_begun:
            warnings.warn(
                f"An unfinished {self.name} with other images or settings is thrown away: it starts over.",
                stacklevel=2,
            )
            self.request_path.unlink()  # first, so that nobody goes on with what is left of it
        self.refuse_unlisted()
        for folder in (self.place.root, self.part):  # the part last: it says that the rest is a draft
            if folder.exists():
                shutil.rmtree(folder)
        write_json(self.request_path, request)

    def finish(self) -> None:
        self.version.root.rename(self.place.root)
        flush_folder(self.model.versions_path)

    def clean(self) -> None:
        """The request last: killed before, the same command is known by it, and goes on tidying up."""
        for path in self.part.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.part, ignore_errors=True)
