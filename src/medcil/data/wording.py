"""Names that come from data, in messages: they may hold anything, also what a terminal would obey."""

from collections.abc import Sequence

NAMED = 20  # in one message
NO_PATIENTS = (
    "No patient is known, and images of one may be trained on and measured on as well: name the patients in "
    "a manifest, in the column `patient`, unless every image is of another one."
)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed_below(first_line: str, names: Sequence[str]) -> str:
    """A message whose further lines name what its first line counts."""
    lines = [f"  {printable(name)}" for name in names[:NAMED]]
    lines += [f"  and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    return "\n".join([first_line, *lines])
