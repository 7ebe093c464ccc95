"""Names in a configuration become things: the only reader of the tables of methods and datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from medcil.config import RunConfig
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
from medcil.models.backbones import load_weights
from medcil.models.network import NetworkSpec
from medcil.readouts import READOUTS
from medcil.recipe import laid_over, override, parse_config, read_recipe, with_name
from medcil.training.state import State, initial_state


def load_recipe(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """A recipe's file with its preset, and with `key.subkey=value` settings laid over it."""
    return parse_recipe(read_recipe(path), settings, source=str(path))


def parse_recipe(
    content: Mapping[str, Any], settings: Sequence[str] = (), *, source: str = "the recipe"
) -> RunConfig:
    """The same from a dictionary."""
    return parse_config(with_preset(content, settings), source=source)


def with_preset(content: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's content with `key.subkey=value` settings and the one preset that counts.

    A preset that the recipe names is the lowest layer; one that a setting names is applied over the recipe
    and below the settings. It is the only one: a setting's preset takes the place of the recipe's, and a
    setting that changes the method leaves the recipe's preset behind with the old one.
    """
    changed = override(content, settings)
    method = changed.get("method")
    if not isinstance(method, Mapping) or method.get("preset") is None or "name" not in method:
        return changed
    said = override({}, settings)
    if isinstance(said.get("method"), Mapping) and "preset" in said["method"]:
        return laid_over(laid_over(changed, find_preset(method)), said)
    if method.get("name") != content["method"].get("name"):
        return {**changed, "method": {key: value for key, value in method.items() if key != "preset"}}
    return laid_over(find_preset(method), changed)


def find_preset(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """The piece of a recipe that a method's settings name."""
    name, preset = method["name"], method["preset"]
    _check_name(name, "method")
    presets = PRESETS.get(name, {})
    if not presets:
        raise InvalidInput(f"method.preset: {name} has no presets: leave the key out.")
    if not isinstance(preset, str) or preset not in presets:
        raise InvalidInput(f"method.preset: {name} has no preset {preset!r}. {nearest(str(preset), presets)}")
    return presets[preset]


def build_method(settings: Mapping[str, Any]) -> Method:
    """`{"name": "balanced", "alpha": 0.5}` -> Balanced(alpha=0.5); every value checked against its field.

    `plugins` puts loss terms around it. `preset` is for the record: `parse_recipe` has laid it beneath.
    """
    own = {key: value for key, value in settings.items() if key not in ("preset", "plugins")}
    method = _build_bare_method(own, "method")
    return _with_plugins(method, settings.get("plugins"))


def _build_bare_method(settings: Any, where: str, default: Method | None = None) -> Method:
    """A mapping without a name says what differs from the default."""
    settings = with_name(settings)
    if isinstance(settings, Mapping) and "name" not in settings and default is not None:
        settings = laid_over(method_settings(default), settings)
    if not isinstance(settings, Mapping) or "name" not in settings:
        example = f"`{{name: {next(iter(METHODS))}}}`"
        raise InvalidInput(f"{where} has no name: write, for example, {example} (got {settings!r})")
    _check_name(settings["name"], where)
    method = METHODS[settings["name"]]
    hints = get_type_hints(method, include_extras=True)
    hints = {field.name: hints[field.name] for field in fields(method)}  # type: ignore[arg-type]  # a dataclass
    options = {key: value for key, value in settings.items() if key != "name"}
    values = _checked(options, hints, where, of=settings["name"])
    try:
        return method(**values)
    except ValueError as error:  # about the method as a whole: the message names the field and its value
        raise InvalidInput(f"{where}: {error}") from None


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or name not in METHODS:
        raise InvalidInput(f"{where}.name: there is no method {name!r}. {nearest(str(name), METHODS)}")


def _checked(given: Mapping[str, Any], hints: Mapping[str, Any], where: str, *, of: str) -> dict[str, Any]:
    """The values given, each as its type has it."""
    values = {}
    for key, value in given.items():
        if key not in hints:
            raise InvalidInput(f"unknown key '{where}.{key}' of {of}. {nearest(str(key), hints)}")
        if hints[key] is Method:
            values[key] = _build_bare_method(value, f"{where}.{key}", getattr(METHODS[of], key, None))
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[key], config=ConfigDict(allow_inf_nan=False))
            values[key] = adapter.validate_python(value)
        except ValidationError as error:
            # A type with alternatives has a problem for each of them.
            message = ", or ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
            raise InvalidInput(f"{where}.{key}: {message} (got {value!r})") from None
    return values


def method_settings(method: Method) -> dict[str, Any]:
    """What `build_method` builds this method from, with every default written out."""
    if isinstance(method, WithPlugins):
        return {**method_settings(method.base), "plugins": dict(method.plugins)}
    names = [name for name, kind in METHODS.items() if type(method) is kind]
    if not names:
        raise LookupError(f"{type(method).__name__} is not in medcil.methods.METHODS: add it")
    values = {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
    settings = {key: method_settings(v) if isinstance(v, Method) else v for key, v in values.items()}
    return {"name": names[0], **settings}


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


@dataclass(frozen=True, kw_only=True)
class WithPlugins(WithTerms):
    """`WithTerms` that knows the recipe's words for its terms."""

    plugins: Mapping[str, Any]


def _with_plugins(method: Method, settings: Any) -> Method:
    """The method with a recipe's `method.plugins`; the method itself where these change nothing."""
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        example = "`plugins: {classification: cil_balanced}`"
        raise InvalidInput(f"method.plugins: write, for example, {example} (got {settings!r})")
    known = (*PLUGINS, "drop", "phases")
    for key in settings:
        if key not in known:
            raise InvalidInput(f"unknown key 'method.plugins.{key}'. {nearest(str(key), known)}")
    chosen = {key: _plugin_options(key, settings.get(key)) for key in PLUGINS}
    terms = {key: _plugin_term(key, options) for key, options in chosen.items() if options is not None}
    drop, phases = _names(settings, "drop", ()), _names(settings, "phases", ("learn",))
    if terms or drop or "phases" in settings:
        check_reach(method, drop, phases)
    if not terms and not drop:
        return method
    written = {**chosen, "drop": list(drop), "phases": list(phases)}
    return WithPlugins(method, terms, drop, phases, plugins=written)


def _plugin_options(key: str, given: Any) -> dict[str, Any] | None:
    """The kind of a plug-in and all options of this kind."""
    where, kinds = f"method.plugins.{key}", PLUGINS[key]
    options = {"kind": given} if isinstance(given, str) else given
    if options is None:
        return None
    if not isinstance(options, Mapping) or not isinstance(options.get("kind"), str):
        example = f"`{key}: {{kind: {next(iter(kinds))}}}`"
        raise InvalidInput(f"{where} has no kind: write, for example, {example} (got {given!r})")
    kind = options["kind"]
    if kind not in kinds:
        raise InvalidInput(f"{where}.kind: there is no {key} {kind!r}. {nearest(kind, kinds)}")
    parameters = signature(kinds[kind]).parameters
    hints = get_type_hints(kinds[kind], include_extras=True)
    given = {name: value for name, value in options.items() if name != "kind"}
    checked = _checked(given, {name: hints[name] for name in parameters}, where, of=kind)
    return {"kind": kind, **{name: checked.get(name, p.default) for name, p in parameters.items()}}


def _plugin_term(key: str, options: Mapping[str, Any]) -> LossTerm:
    try:
        return PLUGINS[key][options["kind"]](**{k: v for k, v in options.items() if k != "kind"})
    except ValueError as error:
        raise InvalidInput(f"method.plugins.{key}: {error}") from None


def _names(settings: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    given = settings.get(key)
    if given is None:
        return default
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(f"method.plugins.{key}: write a list of names, `{key}: [...]` (got {given!r})")
    return tuple(dict.fromkeys(given))


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with its method's defaults written out; method, dataset and scenario are checked.

    The classes of one's own images are not known yet: `build_stream` checks what depends on them.
    """
    method = build_method(config.method)
    dataset = find_dataset(config.data.name)
    if dataset.class_names:
        arrangement(config, dataset)
    elif config.data.split == "benchmark":
        raise InvalidInput("data.split: one's own images have no benchmark; write given, groups or images.")
    if config.scenario.cumulative and isinstance(method, WithPlugins):
        raise InvalidInput("method.plugins: in a cumulative scenario no class is ever old; leave them out.")
    if config.training.schedule == "cosine" and config.first_task.milestones is not None:
        raise InvalidInput(
            "first_task.milestones: a cosine schedule has none; leave them out (null), or write "
            "training.schedule: milestones."
        )
    settings = method_settings(method)
    if config.method.get("preset") is not None:
        find_preset(config.method)
        # Without plug-ins this is said too, or the preset's would come back when this is run as a recipe.
        record = {"name": settings["name"], "preset": config.method["preset"]}
        settings = {**record, **settings, "plugins": settings.get("plugins")}
    return config.model_copy(update={"method": settings, "label": config.label or _label(settings)})


def _label(settings: Mapping[str, Any]) -> str:
    """`lws(podnet) + cil_balanced + distribution`"""
    plugins = settings.get("plugins") or {}
    name = f"{settings['name']}({settings['base']['name']})" if "base" in settings else settings["name"]
    return " + ".join([name, *(plugins[key]["kind"] for key in PLUGINS if plugins.get(key))])


def arrangement(config: RunConfig, dataset: Dataset) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of the classes and the sizes of the tasks, checked against the classes there are."""
    scenario, n_classes = config.scenario, len(dataset.class_names)
    order = class_order(scenario.order, dataset.class_names, dataset.orders)
    if scenario.base is not None and scenario.increment is not None:
        sizes = task_sizes(n_classes, scenario.base, scenario.increment)
    else:
        sizes = checked_steps(scenario.steps or (), n_classes)
    config.memory.check_suffices(n_classes)
    return order, sizes


def build_state(config: RunConfig) -> State:
    """The state before the first task."""
    network = config.network
    spec = NetworkSpec(
        backbone=network.backbone,
        last_relu=network.last_relu,
        classifier=network.classifier,
        learn_scale=network.learn_scale,
        scale=network.scale,
    )
    dataset = find_dataset(config.data.name)
    preprocessing = Preprocessing(
        side=config.data.side,
        crop=config.data.crop,
        mean=dataset.mean,
        std=dataset.std,
        augmentation=config.data.augmentation or dataset.augmentation,
        views=config.data.views or 1,
    )
    state = initial_state(spec, preprocessing, seed=config.seed)
    if network.weights is not None:
        load_weights(state.network.backbone, network.weights, name=network.backbone)
    return state


def build_stream(config: RunConfig) -> Stream:
    """Lists the images, checks the scenario against their classes, splits them, and decodes what is used."""
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
