"""Stands in for `medcil run`: a folder with a lock and a log that only grows, so that work done twice shows.

    fake_run.py FOLDER EPOCHS SECONDS [EXIT_CODE]

Each epoch takes so many seconds; an exit code other than 0 fails after the last one.
"""

import json
import os
import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout


def main(folder: Path, epochs: int, seconds: float, code: int = 0) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        print("Another process is working here.")
        return 3
    with (folder / "starts.txt").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    log = folder / "log.jsonl"
    try:
        for epoch in range(len(log.read_text().splitlines()) if log.exists() else 0, epochs):
            time.sleep(seconds)
            with log.open("a") as file:
                file.write(json.dumps({"epoch": epoch, "pid": os.getpid()}) + "\n")
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        return 130
    if code:
        print("first line\nthe reason it failed")
        return code
    (folder / "metrics.json").write_text(json.dumps({"finished": True}))
    return 0


if __name__ == "__main__":
    folder, epochs, seconds, *code = sys.argv[1:]
    sys.exit(main(Path(folder), int(epochs), float(seconds), *map(int, code)))
