"""A suite: the runs behind one table of results, and what is shown of them, in one YAML file.

It has rows (methods, variants) times settings (protocols, datasets) times class orders (times seeds). The
recipe of a run is `common`, overridden by the setting, then the row, then the order and the seed. Suites
contain no label, root or device, so that a run that belongs to two suites is computed once.

The results of suites are in one folder: what was requested, the record of its runs, whether all is done.
Several sweeps may share it; tables are made under its lock, from the record of one sweep. No torch is
imported here, so that a call that finds everything finished ends within a second.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from filelock import FileLock, Timeout
from pydantic import Field, model_validator

from medcil.config import Section
from medcil.errors import DamagedFile, InvalidInput, nearest
from medcil.metrics.catalogue import METRICS
from medcil.recipe import laid_over, parse, read_recipe, with_values
from medcil.storage.atomic import read_json, sha256, write_bytes, write_json, writing
from medcil.storage.overwrite_guard import claim_output_folder
from medcil.storage.run_dir import RunDir

if TYPE_CHECKING:
    from medcil.experiments.plan import PlannedRun, SweepPlan

SHARED = ("runs", "recipes", "stores", "logs")
"""Folders of the results that all suites share."""

Piece = Mapping[str, Any]
"""A part of a recipe."""
OF_A_STEP = ("micro", "balanced", "forgetting", "old", "new")
SHOWN_BY: Mapping[str, Collection[str]] = {"curves": OF_A_STEP, "heatmap": METRICS, "line": METRICS}
"""Kind of a figure -> the metrics it can show; other kinds have no metric, or keys of their own."""
FILE_NAME = r"^[\w-][\w.-]*$"


def checked_name(name: str) -> str:
    """Check a name of files: it must not lead out of their folder."""
    if not re.fullmatch(FILE_NAME, name):
        raise InvalidInput(
            f"{name!r} is not a valid file name. Use letters, digits, '_', '-' and, inside, '.'.",
            code="suite.name.invalid",
        )
    return name


class Place(NamedTuple):
    """The place of a run in a suite's tables."""

    row: str
    setting: str
    order: int | str
    seed: int | None = None
    """None: the suite has no seeds, and the run that of its recipe."""

    @property
    def order_and_seed(self) -> int | str:
        return order_and_seed(self.order, self.seed)

    def as_list(self) -> list[str | int]:
        """Convert it for runs.json; `Place(*parts)` is the inverse."""
        return [part for part in self if part is not None]


def order_name(order: int | str | Sequence[int | str]) -> int | str:
    """Name a class order in tables: `0`, `seed-1`, and `2-0-1` for a list of classes."""
    return order if isinstance(order, int | str) else "-".join(map(str, order))


def order_and_seed(order: int | str, seed: int | str | None) -> int | str:
    """Name a run within its row: `0`, or `0, seed 1` in a suite with seeds."""
    return order if seed is None else f"{order}, seed {seed}"


class FigureSpec(Section):
    kind: Literal["curves", "heatmap", "line", "tsne", "confusion", "tradeoff"]
    number: str | None = None
    """As in the paper, `Figure 3b`."""
    title: str
    file: Annotated[str, Field(pattern=FILE_NAME)]
    """Name of the files, without ending."""
    settings: tuple[str, ...] = ()
    """Panels, one for each; none: all settings."""
    rows: tuple[str, ...] = ()
    """None: all rows."""
    metric: str | None = None
    """A metric of a step (`micro`, `balanced`, `forgetting`) for curves, of a run for heat maps and lines."""
    x: str | None = None
    y: str | None = None
    """Columns of the table on the axes of a trade-off."""
    order: int | str | None = None
    """The class order of a figure that shows a single run (t-SNE, confusion)."""

    @model_validator(mode="after")
    def _check_metric(self) -> "FigureSpec":
        known = SHOWN_BY.get(self.kind, ())
        if self.metric is not None and self.metric not in known:
            hint = nearest(self.metric, known) if known else "Leave it out."
            raise ValueError(f"metric: a figure of kind {self.kind} cannot show {self.metric!r}. {hint}")
        for key, column in (("x", self.x), ("y", self.y)):
            if column is None and self.kind == "tradeoff":
                raise ValueError(f"{key} is missing. Add it: the column of the table on this axis.")
            if column is not None and self.kind != "tradeoff":
                raise ValueError(f"{key}: a figure of kind {self.kind} has no such key. Omit it.")
        return self


class Suite(Section):
    title: str
    about: str = ""
    number: str | None = None
    """The number of the table in the paper."""
    metrics: Mapping[str, str]
    """Title of a column -> key of metrics.json."""
    orders: tuple[int | str | tuple[int | str, ...], ...] = (0, 1, 2)
    """Class orders, as in `scenario.order`; a setting with its own `scenario.order` has only that one."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = ()
    """Each run is repeated with every seed; empty: once, with the seed of its recipe."""
    common: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, Mapping[str, Any]]
    vary: Mapping[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """`key.subkey` -> values: each row is repeated for every combination, as in a sensitivity study."""
    symbols: Mapping[str, str] = Field(default_factory=dict)
    """Key of `vary` -> its symbol in tables and on axes."""
    compare: tuple[tuple[str, str], ...] = ()
    """(row, the row it is compared with); empty: the last row is compared with all others."""
    published: Mapping[str, Mapping[str, Mapping[str, tuple[float, ...]]]] = Field(default_factory=dict)
    """Row -> setting -> column -> (mean,) or (mean, standard deviation), in percent, as printed."""
    figures: tuple[FigureSpec, ...] = ()

    @model_validator(mode="after")
    def _check_lists(self) -> "Suite":
        for where, names in (
            ("orders", [order_name(order) for order in self.orders]),
            ("seeds", self.seeds),
            ("compare", [" minus ".join(pair) for pair in self.compare]),
            ("figures: file", [figure.file for figure in self.figures]),
            *(("compare", pair) for pair in self.compare),
        ):
            if twice := [name for i, name in enumerate(names) if name in names[:i]]:
                raise ValueError(f"{where}: {twice[0]!r} appears twice. Name each once.")
        pieces = [self.common, self.vary, *self.settings.values(), *self.rows.values()]
        if self.seeds and any("seed" in piece for piece in pieces):
            raise ValueError("`seeds` sets every run's seed. Remove the key `seed` elsewhere.")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> "Suite":
        rows = [row.name for row in self.expanded_rows()]
        for where, names, known in (
            ("metrics", self.metrics.values(), list(METRICS)),
            ("published", self.published, rows),
            ("compare", [name for pair in self.compare for name in pair], rows),
            *((f"published.{row}", cells, list(self.settings)) for row, cells in self.published.items()),
            *(
                (f"published.{row}.{setting}", columns, list(self.metrics))
                for row, cells in self.published.items()
                for setting, columns in cells.items()
            ),
            *((f"figures.{f.file}.settings", f.settings, list(self.settings)) for f in self.figures),
            *((f"figures.{f.file}.rows", f.rows, rows) for f in self.figures),
            *((f"figures.{f.file}.x", [f.x], list(self.metrics)) for f in self.figures if f.x is not None),
            *((f"figures.{f.file}.y", [f.y], list(self.metrics)) for f in self.figures if f.y is not None),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"{where}: there is no {name!r}. {nearest(name, known)}")
        for figure in self.figures:
            for setting in figure.settings or self.settings:
                orders = self.orders_of(setting)
                if figure.order is not None and figure.order not in orders:
                    hint = nearest(str(figure.order), map(str, orders))
                    raise ValueError(
                        f"figures.{figure.file}.order, {setting}: there is no {figure.order!r}. {hint}"
                    )
        return self

    def orders_of(self, setting: str) -> dict[int | str, Any]:
        """Map the name of each class order of a setting to its value in a recipe."""
        own = self.settings[setting].get("scenario", {}).get("order")
        return {order_name(order): order for order in (self.orders if own is None else (own,))}

    def places(self, row: str, setting: str) -> list[Place]:
        """List the places of one cell of the table."""
        seeds = self.seeds or (None,)
        return [Place(row, setting, order, seed) for order in self.orders_of(setting) for seed in seeds]

    def place_shown(self, figure: FigureSpec, row: str, setting: str) -> Place:
        """Find the run of a figure that shows a single one: its order, or the first, and the first seed."""
        order = next(iter(self.orders_of(setting))) if figure.order is None else figure.order
        return Place(row, setting, order, self.seeds[0] if self.seeds else None)

    def expanded_rows(self) -> list["SuiteRow"]:
        """Repeat the rows for every combination of the values of `vary`."""
        rows = []
        for base, piece in self.rows.items():
            for values in product(*self.vary.values()):
                varied = dict(zip(self.vary, values, strict=True))
                parts = [f"{self.symbols.get(key, key)} = {value}" for key, value in varied.items()]
                rows.append(SuiteRow(", ".join([base, *parts]), base, piece, varied))
        return rows


@dataclass(frozen=True)
class SuiteRow:
    name: str
    base: str
    """The row that it was expanded from."""
    piece: Piece
    varied: Mapping[str, Any]


def cells(suite: Suite) -> Iterator[tuple[Place, dict[str, Any]]]:
    """List the place and the recipe of every run."""
    for setting, piece in suite.settings.items():
        for row in suite.expanded_rows():
            content = with_values(laid_over(laid_over(suite.common, piece), row.piece), row.varied)
            orders = suite.orders_of(setting)
            for place in suite.places(row.name, setting):
                recipe = with_values(content, {"scenario.order": orders[place.order]})
                yield place, recipe if place.seed is None else recipe | {"seed": place.seed}


def known_suites() -> dict[str, Path]:
    """Map the names of the suites that come with medcil to their files."""
    inside = Path(__file__).parents[1] / "suites"
    folder = inside if inside.is_dir() else Path(__file__).parents[3] / "recipes" / "suites"  # a checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_suite(name: str) -> Path:
    """Find the file of a suite that comes with medcil by its name, or your own by its path."""
    path = known_suites().get(name, Path(name))
    if path.suffix != ".yaml" or not path.is_file():
        raise InvalidInput(f"There is no suite or .yaml file {name!r}. {nearest(name, known_suites())}")
    checked_name(path.stem)
    return path


def load_suite(name: str) -> Suite:
    """Read a suite by the name of one that comes with medcil, or by the path of your own file."""
    path = find_suite(name)
    return parse(read_recipe(path), Suite, source=str(path))


# The folder of its results.


@dataclass(frozen=True)
class Request:
    """The arguments of `medcil bench`."""

    suite: str
    """A name, or the path of a file."""
    out: Path
    data: tuple[str, ...] = ()
    """`DIR` or `NAME=DIR`."""
    settings: tuple[str, ...] = ()
    """`key=value`, for every recipe."""
    weights: str | None = None
    only: tuple[str, ...] = ()
    """Patterns of rows and settings; no pattern for the one or the other: all of them."""
    orders: tuple[str, ...] = ()
    """Empty: all."""
    seeds: tuple[str, ...] = ()
    """Empty: all."""
    device: str = "auto"

    @property
    def name(self) -> str:
        name = find_suite(self.suite).stem
        if name in SHARED:
            raise InvalidInput(
                f"A suite cannot be called {name!r}, like a folder of the results. Rename its file.",
                code="suite.name.reserved",
            )
        return name

    @property
    def results(self) -> "ResultsFolder":
        return ResultsFolder(self.out)

    @property
    def folder(self) -> Path:
        """The folder of this suite's tables and figures."""
        return self.out / self.name

    def digest(self) -> str:
        """Hash everything that decides which runs are shown and how, medcil's code included."""
        arguments = {
            key: value for key, value in asdict(self).items() if key not in ("out", "device", "suite")
        }
        digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
        package = Path(__file__).parents[1]
        sources = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        for path in [find_suite(self.suite), *sorted(sources)]:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class ResultsFolder:
    """The paths that all suites share; docs/how-to/run-a-suite.md describes them."""

    root: Path

    def run(self, key: str) -> Path:
        return self.root / "runs" / key

    def recipe(self, key: str) -> Path:
        return self.root / "recipes" / f"{key}.yaml"

    def store(self, dataset: str, side: int) -> Path:
        return self.root / "stores" / f"{dataset}-{side}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def is_finished(self, key: str) -> bool:
        try:
            return bool(read_json(RunDir(self.run(key)).metrics_path).get("finished") is True)
        except (FileNotFoundError, NotADirectoryError, DamagedFile):  # the run itself reports the damage
            return False

    def state(self, key: str) -> str:
        """Return `finished`, `begun` or `to do`."""
        if self.is_finished(key):
            return "finished"
        return "begun" if self.run(key).exists() else "to do"

    def is_running(self, key: str) -> bool:
        """Whether any process holds the run's lock."""
        lock = self.run(key) / ".lock"
        try:
            if lock.exists():
                with FileLock(lock, timeout=0):
                    return False
        except Timeout:
            return True
        return False


def begin_record(plan: "SweepPlan") -> None:
    """Create the folder and its record."""
    claim_output_folder(plan.request.folder, "bench")
    with writing(plan.request.folder), final_record(plan, {}):
        pass


def update_record(plan: "SweepPlan", failed: Mapping[str, str]) -> None:
    """Record the states of the runs; skip it while another sweep makes results from its own record."""
    with suppress(Timeout), final_record(plan, failed, timeout=0):
        pass


@contextmanager
def final_record(plan: "SweepPlan", failed: Mapping[str, str], *, timeout: float = -1) -> Iterator[None]:
    """Write this sweep's record and hold the folder's lock while results are made from it."""
    with FileLock(plan.request.folder / ".lock", timeout=timeout):
        _discard_results(plan.request)
        _write_record(plan, failed)
        yield


def mark_done(request: Request, files: list[Path]) -> None:
    """Record that all is finished, and the files that were drawn: the same call then returns at once."""
    names = [str(path.relative_to(request.folder)) for path in files]
    runs_sha256 = sha256((request.folder / "runs.json").read_bytes())
    content = {"asked": request.digest(), "runs_sha256": runs_sha256, "made": names}
    write_json(request.folder / "done.json", content)


def is_done(request: Request) -> bool:
    """Whether `mark_done` was called for this request and everything still exists."""
    folder, results = request.folder, request.results
    try:
        done, runs = read_json(folder / "done.json"), read_json(folder / "runs.json")
        return (
            done["asked"] == request.digest()
            and done["runs_sha256"] == sha256((folder / "runs.json").read_bytes())
            and all((folder / name).exists() for name in done["made"])
            and all(run["state"] == "finished" and results.is_finished(run["key"]) for run in runs["runs"])
        )
    except (OSError, DamagedFile, KeyError, TypeError):
        return False


def _write_record(plan: "SweepPlan", failed: Mapping[str, str]) -> None:
    """Write runs.json (the runs of each place and their states) and suite.yaml."""

    def entry(run: "PlannedRun") -> dict[str, Any]:
        is_finished = request.results.is_finished(run.key)
        why = None if is_finished else failed.get(run.key)
        state = "finished" if is_finished else "unfinished" if why is None else "failed"
        path, places = f"../runs/{run.key}", [place.as_list() for place in run.places]
        return {"key": run.key, "path": path, "places": places, "state": state, "why": why}

    request = plan.request
    weights = [] if request.weights is None else [f"network.weights={Path(request.weights).name}"]
    content = {
        "format": 1,
        "suite": request.name,
        "set": [*request.settings, *weights],
        "left_out": list(plan.left_out),
        "runs": [entry(run) for run in plan.shown],
    }
    write_json(request.folder / "runs.json", content)
    write_bytes(request.folder / "suite.yaml", find_suite(request.suite).read_bytes())


def _discard_results(request: Request) -> None:
    """Delete the mark that all is done, and what was drawn for another request."""
    folder = request.folder
    with suppress(FileNotFoundError, DamagedFile, KeyError, TypeError):
        done = read_json(folder / "done.json")
        if done["asked"] != request.digest():
            for path in ((folder / name).resolve() for name in done["made"]):
                if path.is_relative_to(folder.resolve()):
                    path.unlink(missing_ok=True)
    (folder / "done.json").unlink(missing_ok=True)
