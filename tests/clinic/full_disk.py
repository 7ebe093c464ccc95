"""Run where file systems may be mounted: every command that writes, on a disk without a free byte.

    unshare --map-root-user --mount python -m tests.clinic.full_disk MODEL LABELED NEW FOLDER

Mounts a small disk at FOLDER, and prints what became of each command, as JSON.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medcil.cli.main import main
from medcil.clinic.model_dir import ModelFolder

from .commands import WRITING, Place, arguments
from .generated import content


def ended(given: list[str]) -> tuple[int | str, str]:
    """The exit code, or the exception that came out; and what was said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(given)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
        except BaseException as error:
            return repr(error), said.getvalue()
    return "did not end", said.getvalue()


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with pytest.raises(OSError, match="No space left on device"):
        path.with_name("more").write_bytes(b"x")


def of_versions(model: Path) -> dict[str, bytes]:
    """Without what is being made, which the same command goes on with."""
    folder = ModelFolder(model)
    listed = {image for name in folder.versions for image in folder.version(name).image_names()}
    return {
        name: found
        for name, found in content(model).items()
        if "/." not in f"/{name}" and (not name.endswith(".png") or Path(name).name in listed)
    }


def all_commands(model: Path, labeled: Path, new: Path, disk: Path) -> dict[str, object]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], check=True)
    place = Place(Path(shutil.copytree(model, disk / "model")), new, labeled, disk)
    before = of_versions(place.model)
    fill(disk / "filler")
    found: dict[str, object] = {}
    for command in (*WRITING, "history"):
        code, said = ended(arguments(command, place))
        written = sorted({path.name for path in disk.iterdir()} - {"model", "filler", "more", "trained"})
        found[command] = {
            "code": code,
            "said": said,
            "is_as_before": of_versions(place.model) == before,
            "written": [name for name in written if any((disk / name).rglob("*")) or (disk / name).is_file()],
        }
    return found


if __name__ == "__main__":
    print(json.dumps(all_commands(*map(Path, sys.argv[1:]))))
