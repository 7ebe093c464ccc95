"""Which class of a model a class of new images is: that of the same name, one of a similar name, or none."""

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence

from medcil.data.sources.folder import folded
from medcil.errors import InvalidInput, listed_below, nearest

LOOK_ALIKES = str.maketrans(
    "АВЕЅІЈКМНОРСТУХ" + "аеѕіјорсухӏԁԛԝһкмнтв" + "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ" + "αγικνορυχ" + "ıłøđ",
    "ABESIJKMHOPCTYX" + "aesijopcyxldqwhkmhtb" + "ABEZHIKMNOPTYX" + "ayikvopux" + "ilod",
)
"""Cyrillic, Greek and other letters, and the Latin ones that they look like."""
PLURALS = (("", "s"), ("", "es"), ("y", "ies"), ("us", "i"), ("is", "es"), ("a", "ae"), ("a", "ata"))
"""English and Latin endings."""
SHORT = 5
"""In words with fewer letters, one letter makes another name: SCC is not BCC."""


def names_in_model(
    names: Sequence[str],
    known: Sequence[str],
    *,
    as_new: Sequence[str] = (),
    same_as: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Map each class of new images to the class of the model that it is, or to itself.

    A name that differs from a known one in case or encoding only is that class. One that is similar to a
    known one is refused, unless `as_new` lists it, or `same_as` says which class it is.
    """
    in_model = {folded(name): name for name in known}
    _check_answers(names, known, as_new, same_as := same_as or {})
    meant = in_model | {folded(name): in_model[folded(other)] for name, other in same_as.items()}
    settled = {*meant, *map(folded, as_new)}
    similar = {
        name: [other for other in known if are_similar(name, other)]
        for name in names
        if folded(name) not in settled
    }
    if any(similar.values()):
        _refuse_similar({name: others for name, others in similar.items() if others})
    return {name: meant.get(folded(name), name) for name in names}


def _check_answers(
    names: Sequence[str], known: Sequence[str], as_new: Sequence[str], same_as: Mapping[str, str]
) -> None:
    """Refuse answers about classes that nobody asks about."""
    for asked, there, place in (
        ((*as_new, *same_as), names, "the new images"),
        (same_as.values(), known, "the model"),
    ):
        for name in asked:
            if folded(name) not in map(folded, there):
                raise InvalidInput(
                    f"--as-new, --same-as: there is no class {name!r} in {place}. {nearest(name, there)}",
                    code="option.class.unknown",
                )
    settled = {*map(folded, known)}
    for name in (*same_as, *as_new):
        if folded(name) in settled:
            raise InvalidInput(
                f"--as-new, --same-as: it is settled already which class {name!r} is. Leave it out.",
                code="option.class.settled",
            )
        settled.add(folded(name))


def _refuse_similar(similar: Mapping[str, Sequence[str]]) -> None:
    name, others = next(iter(similar.items()))
    lines = [
        f"--same-as {shlex.quote(f'{name}={other}')} or --as-new {shlex.quote(name)}"
        + ("" if name.isascii() and other.isascii() else f"  ({name!a} and {other!a})")
        for name, others in similar.items()
        for other in others
    ]
    first = f"The class {name!r} is nearly the model's {others[0]!r}: give --same-as or --as-new."
    raise InvalidInput(listed_below(first, lines), code="model.class.similar")


def are_similar(one: str, other: str) -> bool:
    """Tell whether two names differ in one word only, by its plural or by one letter, or in less.

    Case, accents, letters that look alike, and what separates words make no difference. Numbers do.
    """
    words, others = _words(one), _words(other)
    if "".join(words) == "".join(others):
        return True
    if len(words) != len(others):
        words, others = ["".join(words)], ["".join(others)]
    different = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
    is_one = len(different) == 1 and not re.search(r"\d", "".join(different[0]))
    return is_one and (_is_plural(*different[0]) or _is_one_letter_apart(*different[0]))


def _words(name: str) -> list[str]:
    """Split a name into words of plain small letters, numbers and signs such as +."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).translate(LOOK_ALIKES))
    without_accents = "".join(c for c in plain if unicodedata.category(c) not in ("Mn", "Cf"))
    return re.findall(r"\d+|[^\W\d_]+|[^\w\s.,/-]", without_accents.translate(LOOK_ALIKES).casefold())


def _is_plural(one: str, other: str) -> bool:
    return any(
        singular.endswith(end) and singular.removesuffix(end) + ending == plural
        for singular, plural in ((one, other), (other, one))
        for end, ending in PLURALS
    )


def _is_one_letter_apart(one: str, other: str) -> bool:
    """Tell whether a letter is another, too many, or two neighbors have changed places."""
    short, long = sorted((one, other), key=len)
    if len(short) < SHORT or len(long) > len(short) + 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    short, long = short[same:], long[same:]
    return (
        short in (long[1:], "")
        or short[1:] == long[1:]
        or (short[:2] == long[1::-1] and short[2:] == long[2:])
    )
