"""The errors that end a command, each with an exit code for its kind and a dotted code for its cause.

An error is raised with a message for people and, where one cause is told from others, a code of its own:

    raise InvalidInput(f"No such folder: {root}. Check data.root.", code="data.root.missing")

The code names the cause from the general to the special: two to four words in lower case, joined by dots.
The first word is the area (data, image, config, method, model, run, suite, output, ...), the last one the
problem (missing, unknown, invalid, damaged, locked, exists, mismatch, ...). It is a literal at the place that
creates the error, it stays when the message changes, and two places share it only for one and the same
cause. An error without a code of its own has that of its class.

Message: what is wrong: the value. What to do. The first line has less than 100 characters.
Exit codes for people: docs/reference/exit-codes.md. Errors with a code of their own, and their messages:
tests/errors/messages.txt.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

NAMED = 20
"""Names listed in one message."""


class MedcilError(Exception):
    """Ends a command. The first line of the message says what is wrong and what to do."""

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidInput(MedcilError):
    """A recipe, an option, a path or data cannot be used."""

    exit_code = 2
    code = "input.invalid"


class RunLocked(MedcilError):
    """Another process is working in this folder."""

    exit_code = 3
    code = "run.locked"


class RunConflict(MedcilError):
    """The folder holds something else; it is left as it is."""

    exit_code = 4
    code = "run.conflict"


class DamagedFile(MedcilError):
    """A file written by medcil does not have the content that its manifest promises."""

    exit_code = 5
    code = "file.damaged"


class ProcessLost(MedcilError):
    """One of the processes that train together has ended; finished work is kept."""

    exit_code = 6
    code = "process.lost"


class RunsFailed(MedcilError):
    """Some runs of a suite have failed; the others are finished."""

    exit_code = 7
    code = "suite.runs.failed"


class NotPromoted(MedcilError):
    """An update forgot more than was allowed: its version is written, but the old one stays current."""

    exit_code = 8
    code = "model.update.not_promoted"


class NotSubtracted(MedcilError):
    """A patient is erased, but the statistics of classes still contain the patient's images."""

    exit_code = 9
    code = "model.erase.not_subtracted"


def nearest(name: str, known: Iterable[str]) -> str:
    """Write a sentence that leads from a mistyped name to the right one."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known: " + ", ".join(sorted(names)) + "." if names else "There are none."


def known_classes(name: str, class_names: Sequence[str]) -> str:
    """Write which class a mistyped name may mean, and on a second line all that the model knows."""
    close = difflib.get_close_matches(name, class_names, n=1, cutoff=0.5)
    advice = f"Did you mean {close[0]!r}?" if close else "Name one that it knows."
    return f"{advice}\nThe model knows: {', '.join(class_names)}."


def printable(text: str) -> str:
    """Escape what a terminal would obey in names that come from data."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed_below(first_line: str, names: Sequence[str]) -> str:
    """Build a message whose further lines name what its first line counts."""
    lines = [f"  {printable(name)}" for name in names[:NAMED]]
    lines += [f"  and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    return "\n".join([first_line, *lines])


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say how to install a package whose import fails; the extras are in pyproject.toml."""
    try:
        yield
    except ImportError as error:
        raise InvalidInput(
            f"{error.name} is not installed. Run pip install 'medcil[{extra}]'.", code="dependency.missing"
        ) from None
