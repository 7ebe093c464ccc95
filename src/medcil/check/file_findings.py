"""Findings about single files: what cannot be read, what is unlike the rest."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from medcil.check.near_duplicates import is_blank
from medcil.check.report import Finding, Severity, finding
from medcil.check.scan import Look, Thumbnail
from medcil.data.decoding.image import ImageFacts

MAX_ASPECT = 3.0  # pictures are resized to squares: beyond, what they show is squeezed past recognition
MIN_SIDE = 32  # pixels; CIFAR's images have 32

Named = Sequence[tuple[str, ImageFacts]]


def file_findings(
    names: Sequence[str], looks: Sequence[Look], *, may_be_tiny: bool = False
) -> Iterator[Finding]:
    """Of a dataset that is known by name, the size of its images is known too."""
    named = list(zip(names, looks, strict=True))
    bad = [f"{name}: {'; '.join(look.problems)}" for name, look in named if look.problems]
    advice = "Files that are missing, damaged, cut short or no image: replace them, or leave them out."
    yield from finding("error", "unreadable", bad, advice)
    facts = [(name, look.facts) for name, look in named if not look.problems]
    yield from _unlike_the_rest(facts)
    yield from _odd_shapes(facts)
    if not may_be_tiny:
        yield from _tiny(facts)
    yield from _blank([(name, look.thumbnail) for name, look in named if look.thumbnail is not None])


def _unlike_the_rest(facts: Named) -> Iterator[Finding]:
    follow = "Make sure that it does not follow the class: a network would learn that."
    yield from _odd("note", "odd-format", "format", [(name, f.format) for name, f in facts], follow)
    yield from _odd("warning", "odd-mode", "kind of pixels", [(name, f.mode) for name, f in facts], follow)
    resized = "All are resized to one square, whatever their shape."
    yield from _odd("note", "odd-size", "size", [(name, size_of(f)) for name, f in facts], resized)


def _odd(
    severity: Severity, code: str, trait: str, values: Sequence[tuple[str, str]], advice: str
) -> Iterator[Finding]:
    """Those unlike the majority; where there is none, the values themselves."""
    frequent = Counter(value for _, value in values).most_common()
    if len(frequent) < 2:
        return
    common, count = frequent[0]
    if 2 * count > len(values):
        odd = [f"{name}: {value}" for name, value in values if value != common]
        yield from finding(severity, code, odd, f"Another {trait} than {common}, which most have. {advice}")
    else:
        several = [f"{value}: {n:,} images" for value, n in frequent]
        yield from finding(severity, code, several, f"No {trait} is that of most images. {advice}")


def size_of(facts: ImageFacts) -> str:
    return f"{facts.width} x {facts.height}"


def _odd_shapes(facts: Named) -> Iterator[Finding]:
    advice = f"Sides in a ratio beyond {MAX_ASPECT:.0f} : 1, to be squeezed into a square: crop them first."
    long = _sized(facts, lambda f: max(f.width, f.height) > MAX_ASPECT * min(f.width, f.height))
    yield from finding("warning", "extreme-aspect", long, advice)


def _tiny(facts: Named) -> Iterator[Finding]:
    advice = f"Fewer than {MIN_SIDE} pixels on a side: rather previews or icons than images. Look at them."
    small = _sized(facts, lambda f: min(f.width, f.height) < MIN_SIDE)
    yield from finding("warning", "tiny", small, advice)


def _sized(facts: Named, test: Callable[[ImageFacts], bool]) -> list[str]:
    return [f"{name}: {size_of(f)}" for name, f in facts if test(f)]


def ignored_findings(files: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """By extension, what lies in class folders and is not read."""
    n_files = sum(map(len, files.values()))
    lines = [f"{extension}: {len(names):,}, e.g. {names[0]}" for extension, names in files.items()]
    advice = (
        f"{n_files:,} files in class folders that are not read, by extension: convert the pictures among "
        "them to PNG or JPEG, and move the rest elsewhere."
    )
    yield from finding("warning", "ignored-files", lines, advice, {"files": n_files})


def _blank(shown: Sequence[tuple[str, Thumbnail]]) -> Iterator[Finding]:
    if shown:
        blank = is_blank(np.stack([thumbnail for _, thumbnail in shown])).tolist()
        empty = [name for (name, _), is_empty in zip(shown, blank, strict=True) if is_empty]
        advice = "Pictures of a single color: look at them, and leave out what was not meant to be empty."
        yield from finding("warning", "blank", empty, advice)
