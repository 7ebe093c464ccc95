"""Names in a recipe become things: the only reader of the tables of methods and datasets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from medcil.config import DataConfig, LearningConfig, NetworkConfig, ScenarioConfig
from medcil.data.image_table import OWN
from medcil.data.sources import DATASETS, Dataset, find_dataset, open_dataset
from medcil.data.splits import train_and_test
from medcil.data.stream import Stream, check_classes, checked_steps, class_order, task_sizes
from medcil.data.transforms import Preprocessing
from medcil.errors import InvalidInput, nearest
from medcil.methods import METHODS, PRESETS
from medcil.methods.outline import check_reach
from medcil.methods.protocol import LossTerm, Method, WithTerms
from medcil.methods.terms import PLUGINS
from medcil.metrics.catalogue import METRICS
from medcil.models.network import NetworkSpec
from medcil.models.weights import find_weights, load_weights
from medcil.readouts import READOUTS
from medcil.recipe import identity, laid_over, override, parse, read_recipe, with_name
from medcil.training.state import State, initial_state

# Methods, from a recipe's words and back.


@dataclass(frozen=True, eq=False, kw_only=True)
class WithPlugins(WithTerms):
    """A method with the terms of a recipe's `method.plugins`, and these words with every option."""

    plugins: Mapping[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithPlugins) and (self.base, self.plugins) == (other.base, other.plugins)

    def __reduce__(self) -> tuple[Callable[..., Method], tuple[Any, ...]]:
        return _with_plugins, (self.base, self.plugins)  # terms are closures, which cannot be pickled


def build_method(settings: Any) -> Method:
    """`{"name": "balanced", "alpha": 0.5}` -> Balanced(alpha=0.5); every value is checked by its type.

    A word is a name without settings. `plugins` puts loss terms around the method. A method stays as it is.
    """
    if isinstance(settings, Method):
        return settings
    settings, plugins = with_name(settings), None
    if isinstance(settings, Mapping):
        settings = dict(settings)
        plugins = settings.pop("plugins", None)
    return _with_plugins(_build_bare_method(settings, "method"), plugins)


def _build_bare_method(settings: Any, where: str, default: Any = None) -> Method:
    """Build a method without plug-ins; settings without a name are changes of the default."""
    settings = with_name(settings)
    if isinstance(settings, Mapping) and "name" not in settings and isinstance(default, Method):
        settings = laid_over(method_settings(default), settings)
    built: Method = _build(settings, "name", METHODS, where, "method")[0]
    return built


def _build(
    settings: Any, key: str, table: Mapping[str, Callable[..., Any]], where: str, what: str
) -> tuple[Any, dict[str, Any]]:
    """Build what `settings[key]` names in a table; return it, and the settings with every option."""
    if not isinstance(settings, Mapping) or key not in settings:
        example = f"`{{{key}: {next(iter(table))}}}`"
        raise InvalidInput(f"{where} has no {key}: write, for example, {example} (got {settings!r})")
    name = settings[key]
    _check_name(name, table, f"{where}.{key}", what)
    options = {option: value for option, value in settings.items() if option != key}
    built, every_option = _call(table[name], options, where, name=name)
    return built, {key: name, **every_option}


def _check_name(name: Any, table: Mapping[str, Any], where: str, what: str) -> None:
    if not isinstance(name, str) or name not in table:
        raise InvalidInput(f"{where}: there is no {what} {name!r}. {nearest(str(name), table)}")


def _call(
    function: Callable[..., Any], options: Mapping[str, Any], where: str, *, name: str
) -> tuple[Any, dict[str, Any]]:
    """Call a method's class or a loss with options checked by its annotations; return all options too."""
    parameters = signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    values = {key: p.default for key, p in parameters.items() if p.default is not Parameter.empty}
    for key, value in options.items():
        if key not in parameters:
            raise InvalidInput(f"unknown key '{where}.{key}' of {name}. {nearest(str(key), parameters)}")
        if hints[key] is Method:
            values[key] = _build_bare_method(value, f"{where}.{key}", parameters[key].default)
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[key], config=ConfigDict(allow_inf_nan=False))
            values[key] = adapter.validate_python(value)
        except ValidationError as error:
            # A type with alternatives has a problem for each of them.
            message = ", or ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
            raise InvalidInput(f"{where}.{key}: {message} (got {value!r})") from None
    try:
        return function(**values), values
    except ValueError as error:  # about all options together: the message names the field and its value
        raise InvalidInput(f"{where}: {error}") from None


def method_settings(method: Method) -> dict[str, Any]:
    """Write a method as a recipe does, with every default; `build_method` is the inverse."""
    if isinstance(method, WithPlugins):
        return {**method_settings(method.base), "plugins": dict(method.plugins)}
    names = [name for name, kind in METHODS.items() if type(method) is kind]
    if not names:
        raise LookupError(f"{type(method).__name__} is not in medcil.methods.METHODS: add it")
    values = {key: getattr(method, key) for key in signature(type(method)).parameters}
    settings = {key: method_settings(v) if isinstance(v, Method) else v for key, v in values.items()}
    return {"name": names[0], **settings}


def _with_plugins(method: Method, settings: Any) -> Method:
    """Put a recipe's `method.plugins` around a method; return the method itself if they change nothing."""
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        example = "`plugins: {classification: cil_balanced}`"
        raise InvalidInput(f"method.plugins: write, for example, {example} (got {settings!r})")
    known = (*PLUGINS, "drop", "phases", "tasks")
    for key in settings:
        if key not in known:
            raise InvalidInput(f"unknown key 'method.plugins.{key}'. {nearest(str(key), known)}")
    terms: dict[str, LossTerm] = {}
    words: dict[str, Any] = dict.fromkeys(PLUGINS)
    for key in PLUGINS:
        if settings.get(key) is not None:
            plugin = {"kind": settings[key]} if isinstance(settings[key], str) else settings[key]
            terms[key], words[key] = _build(plugin, "kind", PLUGINS[key], f"method.plugins.{key}", key)
    drop, phases = _names(settings, "drop", ()), _names(settings, "phases", ("learn",))
    tasks = settings.get("tasks", "later")
    if tasks not in ("first", "later"):
        raise InvalidInput(
            f"method.plugins.tasks: write first or later (got {tasks!r})", code="config.plugins.tasks"
        )
    if terms or drop or "phases" in settings:
        check_reach(method, drop, phases, tasks)
    if not terms and not drop:
        return method
    words |= {"drop": list(drop), "phases": list(phases)} | ({"tasks": tasks} if tasks == "first" else {})
    return WithPlugins(method, terms, drop, phases, tasks, plugins=words)


def _names(settings: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    names = settings.get(key)
    if names is None:
        return default
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"method.plugins.{key}: write a list of names, `{key}: [...]` (got {names!r})")
    return tuple(dict.fromkeys(names))


# Recipes.


class RunConfig(LearningConfig):
    """A whole run: a dataset, cut into tasks, learned by a method. A recipe is this, in YAML."""

    label: str | None = None
    """The name of this run in tables and plots; unset: the method's name."""
    data: DataConfig
    scenario: ScenarioConfig
    method: Annotated[Method, PlainValidator(build_method), PlainSerializer(method_settings)]
    """In a recipe: `name`, from `medcil methods`, that method's own hyper-parameters, and `plugins`."""
    network: NetworkConfig = NetworkConfig()

    def identity(self) -> dict[str, Any]:
        return identity(self)


def load_recipe(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Read a recipe's file with its preset and with `key.subkey=value` settings."""
    return parse_recipe(read_recipe(path), settings, source=str(path))


def parse_recipe(
    content: Mapping[str, Any], settings: Sequence[str] = (), *, source: str = "the recipe"
) -> RunConfig:
    """Parse a recipe from a dictionary with its preset and with `key.subkey=value` settings."""
    return parse(with_preset(content, settings), RunConfig, source=source)


def with_preset(content: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """Apply `key.subkey=value` settings and one preset to a recipe, and leave `method.preset` out.

    The recipe and the settings override a preset that the recipe names. A preset that a setting names
    overrides the recipe, and replaces the recipe's preset. A setting that changes the method drops the
    recipe's preset with the old method.
    """
    changed = override(content, settings)
    method = changed.get("method")
    if not isinstance(method, Mapping) or "preset" not in method:
        return changed
    own = {**changed, "method": {key: value for key, value in method.items() if key != "preset"}}
    if method["preset"] is None or "name" not in method:
        return own
    of_settings = override({}, settings)
    if isinstance(of_settings.get("method"), Mapping) and "preset" in of_settings["method"]:
        del of_settings["method"]["preset"]
        return laid_over(laid_over(own, _find_preset(method)), of_settings)
    if method["name"] != content["method"].get("name"):
        return own
    return laid_over(_find_preset(method), own)


def _find_preset(method: Mapping[str, Any]) -> Mapping[str, Any]:
    name, preset = method["name"], method["preset"]
    _check_name(name, METHODS, "method.name", "method")
    presets = PRESETS.get(name, {})
    if not presets:
        raise InvalidInput(f"method.preset: {name} has no presets: leave the key out.")
    if not isinstance(preset, str) or preset not in presets:
        raise InvalidInput(f"method.preset: {name} has no preset {preset!r}. {nearest(str(preset), presets)}")
    return presets[preset]


def resolve(config: RunConfig) -> RunConfig:
    """Check that dataset, scenario and method fit each other; name the run.

    The classes of one's own images are not known yet: `build_stream` checks what depends on them.
    """
    dataset = find_dataset(config.data.name)
    if dataset.class_names:
        arrangement(config, dataset)
    elif config.data.split == "benchmark":
        raise InvalidInput("data.split: one's own images have no benchmark; write given, groups or images.")
    if config.scenario.cumulative and isinstance(config.method, WithPlugins):
        raise InvalidInput("method.plugins: in a cumulative scenario no class is ever old; leave them out.")
    if config.training.schedule == "cosine" and config.first_task.milestones is not None:
        raise InvalidInput(
            "first_task.milestones: a cosine schedule has none; leave them out (null), or write "
            "training.schedule: milestones."
        )
    method = method_settings(config.method)
    is_frozen = method["name"] == "analytic" and method["adapt"] == "never"
    if is_frozen and config.network.recalibrate_batch_norm:
        raise InvalidInput(
            "network.recalibrate_batch_norm changes a network that method.adapt: never leaves as it came. "
            "Set it to false.",
            code="config.network.frozen",
        )
    return config.model_copy(update={"label": config.label or _label(method)})


def _label(settings: Mapping[str, Any]) -> str:
    """`lws(podnet) + cil_balanced + distribution`"""
    plugins = settings.get("plugins") or {}
    name = f"{settings['name']}({settings['base']['name']})" if "base" in settings else settings["name"]
    return " + ".join([name, *(plugins[key]["kind"] for key in PLUGINS if plugins.get(key))])


# Datasets and states.


def register(kind: Literal["method", "loss", "readout", "dataset", "metric"], name: str, thing: Any) -> None:
    """Add a method, loss, readout, dataset or metric under a new name, for recipes, suites and commands.

    The name of a loss begins with the term that it replaces: `classification.mine`. With a new term,
    `smoothness.mine`, it is added to the terms of a method.
    """
    tables: dict[str, dict[str, Any]] = {
        "method": METHODS,
        "readout": READOUTS,
        "dataset": DATASETS,
        "metric": METRICS,
    }
    table, key = tables.get(kind), name
    if kind == "loss":
        term, _, key = name.partition(".")
        table = PLUGINS.setdefault(term, {}) if term and key else None
    if table is None:
        raise InvalidInput(
            f"Cannot register the {kind} {name!r}. Write TERM.NAME for a loss, for example margin.mine; the "
            "other kinds are method, readout, dataset and metric.",
            code="config.registry.unknown",
        )
    if key in table:
        raise InvalidInput(
            f"A {kind} called {name!r} exists already. Choose another name.", code="config.registry.exists"
        )
    table[key] = thing


def arrangement(config: RunConfig, dataset: Dataset) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of the classes and the sizes of the tasks, checked against the classes there are."""
    scenario, n_classes = config.scenario, len(dataset.class_names)
    order = class_order(scenario.order, dataset.class_names, dataset.orders)
    if scenario.base is not None and scenario.increment is not None:
        sizes = task_sizes(n_classes, scenario.base, scenario.increment)
    else:
        sizes = checked_steps(scenario.steps or (), n_classes)
    config.memory.check_suffices(n_classes)
    return order, sizes


def build_state(config: RunConfig) -> State:
    """Build the state before the first task."""
    network = config.network
    spec = NetworkSpec(
        backbone=network.backbone,
        last_relu=network.last_relu,
        classifier=network.classifier,
        learn_scale=network.learn_scale,
        scale=network.scale,
    )
    dataset = find_dataset(config.data.name)
    mean, std = _normalization(config, dataset)
    preprocessing = Preprocessing(
        side=config.data.side,
        crop=config.data.crop,
        mean=mean,
        std=std,
        augmentation=config.data.augmentation or dataset.augmentation,
        views=config.data.views or 1,
    )
    state = initial_state(spec, preprocessing, seed=config.seed)
    if network.weights is not None:
        load_weights(state.network.backbone, network.weights, name=network.backbone)
    return state


def _normalization(config: RunConfig, dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation: of the weights for one's own images and where asked, else of the dataset."""
    network = config.network
    rule = config.data.normalization or ("weights" if config.data.name == OWN else "dataset")
    if rule == "weights" and network.weights is not None:
        weights = find_weights(network.weights, network.backbone)
        if weights.normalization is not None:
            return weights.normalization
    if config.data.normalization == "weights":
        raise InvalidInput(
            "data.normalization: weights of a known normalization are not used here. Leave it out.",
            code="config.normalization.unknown",
        )
    return dataset.mean, dataset.std


def build_stream(config: RunConfig) -> Stream:
    """List the images, check the scenario against their classes, split them, and decode what is used."""
    dataset = find_dataset(config.data.name)
    table = open_dataset(config.data.name, config.data.root, side=config.data.side)
    if not dataset.class_names:
        natural = tuple(range(len(table.class_names)))
        dataset = replace(dataset, class_names=table.class_names, orders=(natural,))
    order, sizes = arrangement(config, dataset)
    rule, train, test = train_and_test(table, config.data, config.scenario.long_tail)
    check_classes(table.labels[train], table.class_names, order, sizes)
    images = table.loaded(config.data.side, np.concatenate([train, test])).samples(config.data.side)
    return Stream(
        train=images.select(torch.arange(len(train))),
        test=images.select(torch.arange(len(train), len(images))),
        class_names=table.class_names,
        order=order,
        sizes=sizes,
        is_synthetic=dataset.is_synthetic,
        is_cumulative=config.scenario.cumulative,
        split=rule,
    )
