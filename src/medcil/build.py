"""Names in a configuration become things: the only reader of the tables of methods and datasets."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from medcil.config import RunConfig
from medcil.data.datasets import Dataset, find_dataset
from medcil.data.preprocess import Preprocessing
from medcil.data.samples import Samples
from medcil.data.stream import Task, class_incremental, task_sizes
from medcil.engine.state import State, initial_state
from medcil.errors import InvalidInput, nearest
from medcil.method import Method
from medcil.methods import METHODS
from medcil.models.backbones import load_weights
from medcil.models.network import NetworkSpec


def build_method(settings: Mapping[str, Any]) -> Method:
    """`{"name": "balanced", "alpha": 0.5}` -> Balanced(alpha=0.5); every value checked against its field."""
    name, options = settings["name"], {key: value for key, value in settings.items() if key != "name"}
    if name not in METHODS:
        raise InvalidInput(f"method.name: there is no method {name!r}. {nearest(name, METHODS)}")
    method = METHODS[name]
    known = [field.name for field in fields(method)]  # type: ignore[arg-type]  # every method is a dataclass
    for key in options:
        if key not in known:
            raise InvalidInput(f"unknown key 'method.{key}' of {name}. {nearest(key, known)}")
    try:
        return TypeAdapter(method).validate_python(options)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # about the method as a whole: the message names the field and its value
            raise InvalidInput(f"method: {message}") from None
        raise InvalidInput(f"method.{problem['loc'][0]}: {message} (got {problem['input']!r})") from None


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with its method's defaults written out; method, dataset and scenario are checked."""
    method = build_method(config.method)
    dataset = find_dataset(config.data.name)
    class_order(config, dataset)
    n_classes = len(dataset.class_names)
    task_sizes(n_classes, config.scenario.base, config.scenario.increment)
    if config.memory.quota(n_classes) < 1:
        raise InvalidInput(f"memory.total is {config.memory.total}, less than {n_classes} classes: raise it.")
    settings = {"name": config.method["name"], **asdict(method)}  # type: ignore[call-overload]
    return config.model_copy(update={"method": settings, "label": config.label or config.method["name"]})


def class_order(config: RunConfig, dataset: Dataset) -> tuple[int, ...]:
    order = config.scenario.order
    if isinstance(order, int):
        if not 0 <= order < len(dataset.orders):
            raise InvalidInput(
                f"scenario.order: {config.data.name} has orders 0..{len(dataset.orders) - 1}, not {order}."
            )
        return dataset.orders[order]
    if sorted(order) != list(range(len(dataset.class_names))):
        raise InvalidInput(
            f"scenario.order: {list(order)} must name each of 0..{len(dataset.class_names) - 1} exactly once."
        )
    return order


def build_state(config: RunConfig) -> State:
    """The state before the first task."""
    network = config.network
    spec = NetworkSpec(
        backbone=network.backbone,
        last_relu=network.last_relu,
        learn_scale=network.learn_scale,
        scale=network.scale,
    )
    preprocessing = Preprocessing(side=config.data.side, crop=config.data.crop)
    state = initial_state(spec, preprocessing, seed=config.seed)
    if network.weights is not None:
        load_weights(state.network.backbone, network.weights, name=network.backbone)
    return state


@dataclass(frozen=True, eq=False)
class Stream:
    """A dataset cut into tasks."""

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    """In the dataset's own order."""
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    is_synthetic: bool

    def tasks(self) -> Iterator[Task]:
        return class_incremental(self.train, self.test, self.class_names, self.order, self.sizes)


def build_stream(config: RunConfig) -> Stream:
    dataset = find_dataset(config.data.name)
    train, test = dataset.read(config.data.root, config.data.side)
    return Stream(
        train=train,
        test=test,
        class_names=dataset.class_names,
        order=class_order(config, dataset),
        sizes=task_sizes(len(dataset.class_names), config.scenario.base, config.scenario.increment),
        is_synthetic=dataset.is_synthetic,
    )
