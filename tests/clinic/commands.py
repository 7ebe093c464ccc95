"""Every command of the workflow as a user calls it, and what it said."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from medcil.cli.main import main

FEW = ("--epochs", "1", "--set", "execution.threads=1")
PATIENT = "ALPHA-PERSON-1"


@dataclass(frozen=True)
class Place:
    """Where a command finds everything, and what it may write."""

    model: Path
    new: Path
    """Images of a class that the model does not know."""
    labeled: Path
    out: Path
    """The folder for whatever is written beside the model."""

    @property
    def image(self) -> Path:
        return self.labeled / "alpha" / "000.png"


def arguments(command: str, place: Place) -> list[str]:
    rest: dict[str, tuple[object, ...]] = {
        "update": (place.model, place.new, *FEW),
        "predict": (place.model, place.labeled, "-o", place.out / "predictions.csv"),
        "evaluate": (place.model, place.labeled, "-o", place.out / "evaluation", "--draws", "5"),
        "export": (place.model, "-o", place.out / "model.onnx"),
        "explain": (place.model, place.image, "-o", place.out / "explanation"),
        "erase": (place.model, "--patient", PATIENT),
        "history": (place.model,),
        "merge": (place.model, "--out", place.out / "merged"),
        "rebalance": (place.model, "--balance", "1"),
        "retire": (place.model, "alpha"),
        "rollback": (place.model, "v1"),
        "serve": (place.model, "--port", "0"),
        "train": (place.labeled, "--out", place.out / "trained", "--backbone", "resnet8_cifar", *FEW),
    }
    return [command, *map(str, rest[command])]


COMMANDS = (
    "update",
    "predict",
    "evaluate",
    "export",
    "explain",
    "erase",
    "history",
    "merge",
    "rebalance",
    "retire",
    "rollback",
    "serve",
)
"""That take a model."""
WRITING = ("train", "update", "predict", "evaluate", "export", "explain", "erase", "rollback")


@dataclass(frozen=True)
class Said:
    code: int
    first: str
    """Line of the message; how the work went on until then may stand before it."""
    err: str
    out: str


def run(capsys: pytest.CaptureFixture[str], *given: object) -> Said:
    """In this process. Anything but an exit code comes out as the exception that it is."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in given])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not re.search(r" images/s$| s$| epoch \d+/\d+ ", line)]
    return Said(int(ended.value.code or 0), lines[0] if lines else "", err, out)
