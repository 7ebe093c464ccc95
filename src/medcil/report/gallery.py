"""The memory as small pictures that travel inside the page."""

import base64
import io
from collections import Counter
from dataclasses import dataclass

from PIL import Image

from medcil.report.read import Exemplar, RunRecord

MAX_SIDE = 72


@dataclass(frozen=True)
class Shelf:
    """The pictures of one class, first chosen first; `n_stored` may be more than are shown."""

    class_name: str
    n_stored: int
    pictures: tuple[str, ...]  # data URIs


def shelves(run: RunRecord, budget: int) -> list[Shelf]:
    """As many pictures as fit into `budget` characters: every class's first choice, then the second ones."""
    pictures: dict[str, list[str]] = {name: [] for name in run.class_names}
    ordered = sorted(run.exemplars, key=lambda exemplar: exemplar.rank)
    spent = 0
    for exemplar in ordered:
        picture = data_uri(exemplar)
        if picture is None:
            continue
        spent += len(picture)
        if spent > budget:
            break
        pictures.setdefault(exemplar.class_name, []).append(picture)
    stored = Counter(exemplar.class_name for exemplar in ordered)
    return [Shelf(name, stored[name], tuple(shown)) for name, shown in pictures.items() if stored[name]]


def data_uri(exemplar: Exemplar) -> str | None:
    """Encoded anew, so that no metadata of the file comes along; None for a file that cannot be shown."""
    buffer = io.BytesIO()
    try:
        with Image.open(exemplar.path) as image:
            picture = image.convert("L" if image.mode in ("L", "1") else "RGB")
        kind = "webp" if max(picture.size) > MAX_SIDE else "png"
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        picture.save(buffer, kind, quality=80)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
