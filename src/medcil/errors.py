"""What can go wrong by someone's doing, and the exit code each kind ends with.

The table in docs/exit-codes.md is this file in prose; every command keeps it.
"""

import difflib
from collections.abc import Iterable


class MedcilError(Exception):
    """Ends a command. The first line of the message says what is wrong and what to do."""

    exit_code = 1


class InvalidInput(MedcilError):
    """A recipe, an option, a path or data that cannot be used as given."""

    exit_code = 2


class RunLocked(MedcilError):
    """Another process is working in this folder."""

    exit_code = 3


class RunConflict(MedcilError):
    """The folder holds something else than what was asked for; it is left as it is."""

    exit_code = 4


class ProcessLost(MedcilError):
    """One of the processes that train together has ended; what was finished is kept."""

    exit_code = 6


class RunsFailed(MedcilError):
    """Some runs of a sweep have failed; the others are finished."""

    exit_code = 7


class NotPromoted(MedcilError):
    """An update forgot more than was allowed: its version is written, the model goes on with the old one."""

    exit_code = 8


class DamagedFile(MedcilError):
    """A file of ours does not have the content its manifest promises."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that leads from a mistyped name to the right one."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known: " + ", ".join(sorted(known)) + "."
