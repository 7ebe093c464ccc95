"""The run directory: where a run keeps everything. A crash at any moment loses nothing.

Files are replaced atomically and logs grow by whole lines. docs/reference/run-directory.md describes them.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.recipe import Model, differences, identity, parse
from medcil.storage.atomic import TEMPORARY, flush_folder, locked_folder, write_bytes


class RunDir:
    """The paths of a run, its lock, its recipe and its logs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config_path = root / "config.yaml"
        self.data_path = root / "data.json"
        self.environment_path = root / "environment.json"
        self.metrics_path = root / "metrics.json"
        self.log_path = root / "log.jsonl"
        self.timings_path = root / "timings.jsonl"

    def task(self, number: int) -> "TaskDir":
        return TaskDir(self.root / "tasks" / f"{number:02d}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out; refuse a folder that holds something else."""
        self._check_folder()  # before the lock file is created in it
        with locked_folder(self.root):
            for unfinished in self.root.rglob(f".*{TEMPORARY}"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
            yield

    def check(self, config: BaseModel) -> None:
        """Refuse a folder that holds something else, or a run of another recipe; change nothing."""
        self._check_folder()
        if self.config_path.exists():
            changes = list(differences(identity(self.read_config(type(config))), identity(config)))
            if changes:
                raise RunConflict(
                    f"{self.root} holds a run of another recipe. Give another --out, or that recipe.\n"
                    + "\n".join(f"  {change}" for change in changes),
                    code="run.recipe.mismatch",
                )

    def claim(self, config: BaseModel) -> None:
        """Check the folder and, if it is new, write the resolved configuration into it."""
        self.check(config)
        if not self.config_path.exists():
            content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            write_bytes(self.config_path, content.encode())

    def _check_folder(self) -> None:
        try:
            names = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        except NotADirectoryError:
            raise InvalidInput(
                f"{self.root} is not a folder. Give another --out.", code="run.folder.invalid"
            ) from None
        except OSError as error:
            raise InvalidInput(
                f"Cannot open {self.root}: {error.strerror}. Give another --out.",
                code="run.folder.unreadable",
            ) from None
        others = [name for name in names if not name.startswith(".")]
        if others and not self.config_path.exists():
            raise RunConflict(
                f"{self.root} holds {others[0]!r} and no run. Give a new or empty folder as --out.",
                code="run.folder.occupied",
            )

    def read_config(self, model: type[Model]) -> Model:
        """Read the resolved configuration that the run was started with."""
        try:
            content = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
            return parse(content, model, source=str(self.config_path))
        except (yaml.YAMLError, ValueError, InvalidInput) as error:
            raise DamagedFile(
                f"{self.config_path} is not a readable configuration. Restore it.\n{error}",
                code="run.config.damaged",
            ) from None

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append one JSON line; start a new line after half a line left by a crash."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    def flush_log(self) -> None:
        """Flush the log to the disk: a checkpoint relies on its length."""
        if self.log_path.exists():
            with self.log_path.open("rb") as file:
                os.fsync(file.fileno())
            flush_folder(self.root)

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def truncate_log(self, size: int) -> None:
        """Drop the lines after the checkpoint from which a run resumes, so that none appears twice."""
        if self.log_size() > size:
            with self.log_path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        elif self.log_size() < size:
            raise DamagedFile(
                f"{self.log_path} is shorter than its checkpoint says. Restore it.", code="run.log.damaged"
            )


class TaskDir:
    """One task of a run: its checkpoint during training, its state and results afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.progress = root / "progress"
        self.state = root / "state"
        self.confusion_path = root / "confusion.csv"
        self.predictions_path = root / "predictions.csv"
        self.result_path = root / "result.json"

    @property
    def is_learned(self) -> bool:
        return (self.state / "manifest.json").exists()

    @property
    def is_done(self) -> bool:
        return self.result_path.exists()

    def discard_progress(self) -> None:
        shutil.rmtree(self.progress, ignore_errors=True)
