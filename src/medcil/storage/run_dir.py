"""The run directory: where a run keeps everything, written so that a crash at any moment loses nothing.

Every file appears whole or not at all: it is written under a temporary name in its own folder, flushed to
the disk, and renamed; then the folder is flushed. Logs grow by whole lines.
docs/reference/run-directory.md describes the files.
"""

import csv
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medcil.errors import DamagedFile, InvalidInput, RunConflict, RunLocked

if TYPE_CHECKING:  # what only a run needs is imported there: an exported model writes its table at once
    from medcil.config import RunConfig

TEMPORARY = ".tmp"
FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the wide ones of East Asian keyboards."""
UMASK = os.umask(0o077)
"""Asked once: asking changes it for a moment, for all threads."""
os.umask(UMASK)


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic and durable: after a crash the file has its old content or the new one, never a part."""
    if path.exists() and not path.is_file():  # a device would be gone, replaced by a file
        raise InvalidInput(f"{path} is no regular file and is left as it is: give another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Names come from anywhere: none becomes a formula when a spreadsheet opens the file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_no_formula(cell) for cell in row] for row in (header, *rows))
    write_bytes(path, text.getvalue().encode())


def _no_formula(cell: object) -> object:
    """An apostrophe before text that a spreadsheet would compute; a number is a number, also as text."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError):
        raise DamagedFile(f"{path} is not readable as JSON; restore it from a backup.") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_verified(path: Path, expected: str) -> bytes:
    """The content of a file whose manifest promises this sha256."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing, though its manifest lists it; restore it.") from None
    if sha256(content) != expected:
        raise DamagedFile(f"{path} was changed or damaged (sha256 differs from its manifest); restore it.")
    return content


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RunDir:
    """Names every path of a run; knows which tasks are done."""

    root: Path

    @property
    def config_path(self) -> Path:
        return self.root / "config.yaml"

    @property
    def data_path(self) -> Path:
        return self.root / "data.json"

    @property
    def environment_path(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.json"

    @property
    def log_path(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def timings_path(self) -> Path:
        return self.root / "timings.jsonl"

    def task(self, number: int) -> "TaskDir":
        return TaskDir(self.root / "tasks" / f"{number:02d}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other process out; the system releases it when this one ends, however it ends."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.root / ".lock", timeout=0)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._refuse_strangers()  # before the lock's own file lies in someone else's folder
            lock.acquire()
        except Timeout:
            raise RunLocked(
                f"Another process is working in {self.root}. Wait for it, or give another --out."
            ) from None
        except OSError as error:
            raise InvalidInput(
                f"{self.root} cannot be written to ({error.strerror}). Give another --out."
            ) from None
        try:
            for unfinished in self.root.rglob(f".*{TEMPORARY}"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def check(self, config: "RunConfig") -> None:
        """Refuses a folder that holds another recipe's run, or something else; changes nothing."""
        from medcil.recipe import differences

        if not self.root.exists():
            return
        self._refuse_strangers()
        if self.config_path.exists():
            changes = list(differences(self.read_config().identity(), config.identity()))
            if changes:
                raise RunConflict(
                    f"{self.root} holds a run of another recipe. Give another --out, or the recipe it was "
                    "started with.\n" + "\n".join(f"  {change}" for change in changes)
                )

    def claim(self, config: "RunConfig") -> None:
        """Writes the resolved configuration into a new folder; refuses one that is another's."""
        import yaml

        self.check(config)
        if self.config_path.exists():
            return
        content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        write_bytes(self.config_path, content.encode())

    def _refuse_strangers(self) -> None:
        if not self.root.is_dir():
            raise InvalidInput(f"{self.root} is not a folder. Give another --out.")
        strangers = sorted(path.name for path in self.root.iterdir() if not path.name.startswith("."))
        if strangers and not self.config_path.exists():
            raise RunConflict(
                f"{self.root} is not empty and holds no run (found {strangers[0]!r}). "
                "Give a new or empty folder as --out."
            )

    def read_config(self) -> "RunConfig":
        """The resolved configuration this folder was started with."""
        import yaml

        from medcil.recipe import parse_config

        try:
            content = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
            return parse_config(content, source=str(self.config_path))
        except (yaml.YAMLError, ValueError, InvalidInput) as error:
            raise DamagedFile(
                f"{self.config_path} is not a readable configuration; restore it.\n{error}"
            ) from None

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """One JSON line; a half line left by a crash stays apart from it. `flush_log` puts it on the disk."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    def flush_log(self) -> None:
        """What was logged is on the disk before this returns: a checkpoint counts on its length."""
        if self.log_path.exists():
            with self.log_path.open("rb") as file:
                os.fsync(file.fileno())
            flush_folder(self.root)

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def truncate_log(self, size: int) -> None:
        """Drops what was logged after the checkpoint a run continues from, so that no line comes twice."""
        if self.log_size() > size:
            with self.log_path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        elif self.log_size() < size:
            raise DamagedFile(f"{self.log_path} is shorter than its checkpoint says; restore it.")


@dataclass(frozen=True)
class TaskDir:
    """One task of a run: its checkpoint while it is learned, its state and results afterwards."""

    root: Path

    @property
    def progress(self) -> Path:
        return self.root / "progress"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def confusion_path(self) -> Path:
        return self.root / "confusion.csv"

    @property
    def predictions_path(self) -> Path:
        return self.root / "predictions.csv"

    @property
    def result_path(self) -> Path:
        return self.root / "result.json"

    @property
    def is_learned(self) -> bool:
        return (self.state / "manifest.json").exists()

    @property
    def is_done(self) -> bool:
        return bool(self.result_path.exists())

    def discard_progress(self) -> None:
        shutil.rmtree(self.progress, ignore_errors=True)
