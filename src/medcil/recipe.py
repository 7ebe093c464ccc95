"""Recipes as text and as nested mappings: read, override, merge, check, compare."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from medcil.errors import InvalidInput, nearest

Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeys(yaml.SafeLoader):
    """Refuse a mapping with a duplicate key: YAML itself would silently use the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                mark = key.start_mark
                if key.value in lines:
                    raise InvalidInput(
                        f"{mark.name}, line {mark.line + 1}: duplicate key {key.value!r}, "
                        f"first in line {lines[key.value]}. Keep one of them."
                    )
                lines[key.value] = mark.line + 1
        return node


def load_yaml(text: str, *, source: str, as_text: bool = False) -> Any:
    """Parse YAML with unique keys; `source` names the text in messages.

    With `as_text` every value stays a string: `no` is no false, and `010` no eight.
    """
    loader = _UniqueKeys(text)
    loader.name = source
    if as_text:
        loader.yaml_implicit_resolvers = {}
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_recipe(path: Path) -> dict[str, Any]:
    """What a recipe's file says, unchecked; `medcil.build.load_recipe` makes a configuration of it."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except (FileNotFoundError, IsADirectoryError):
        raise InvalidInput(f"There is no recipe file {path}. Give the path of a YAML file.") from None
    except OSError as error:
        raise InvalidInput(f"The recipe {path} cannot be read: {error.strerror}. Give a YAML file.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date and is none
        raise InvalidInput(f"The recipe {path} is not valid YAML; fix it and try again.\n{error}") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"The recipe {path} holds no settings. See recipes/ for complete ones.")
    return content


def parse(content: Any, model: type[Model], *, source: str) -> Model:
    """Validate parsed YAML; every problem is a line of the error, the first after the source."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        message = f"{source}: " + "\n".join(_problems(error, model))
        raise InvalidInput(message, code="config.invalid") from None


def identity(config: BaseModel) -> dict[str, Any]:
    """What must be equal for a run to be continued: everything but where it is computed."""
    content = config.model_dump(mode="json", exclude={"execution": True, "data": {"root"}})
    if content["network"]["weights"] is not None:
        content["network"]["weights"] = Path(content["network"]["weights"]).name
    return content


def override(content: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The content with each `a.b=value` put in its place; values are read as YAML."""
    changed = dict(content)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidInput(f"--set {setting!r} is not key=value, as in --set training.epochs=5")
        *parents, last = key.strip().split(".")
        section = changed
        for parent in parents:
            below = section.get(parent)
            if parent in ("method", "base"):
                below = with_name(below)
            section[parent] = dict(below) if isinstance(below, Mapping) else {}
            section = section[parent]
        try:
            section[last] = load_yaml(text, source=f"--set {key.strip()}")
        except (yaml.YAMLError, ValueError):
            raise InvalidInput(f"--set {setting!r}: {text!r} is not a YAML value; quote it.") from None
    return changed


def with_name(method: Any) -> Any:
    """`ucir` -> {"name": "ucir"}: a word names a method, and the one within a method."""
    if isinstance(method, str):
        return {"name": method}
    if isinstance(method, Mapping) and "base" in method:
        return {**method, "base": with_name(method["base"])}
    return method


def place_of(
    name: str, method: Mapping[str, Any], where: str = "method"
) -> tuple[str, Mapping[str, Any]] | None:
    """Find a method in a resolved recipe (`method.base` inside another) and its settings."""
    if method["name"] == name:
        return where, method
    return place_of(name, method["base"], f"{where}.base") if "base" in method else None


def laid_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and where both say something, what the upper one says."""
    one_of = {"per_class", "total"}  # of the memory: a word for the one takes the other back
    result = {key: value for key, value in lower.items() if not (key in one_of and one_of & set(upper))}
    for key, value in upper.items():
        below = result.get(key)
        mixes = isinstance(below, Mapping) and isinstance(value, Mapping) and _are_alike(below, value)
        result[key] = laid_over(below, value) if mixes else value  # type: ignore[arg-type]
    return result


def with_values(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set dotted keys: `a.b` -> value."""
    result = dict(content)
    for key, value in values.items():
        result = laid_over(result, nested(key, value))
    return result


def _are_alike(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> bool:
    """The options of one method or loss are not those of another."""
    return all(lower[key] == upper[key] for key in ("name", "kind") if key in lower and key in upper)


def _problems(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Describe each problem in a line; after an unknown key comes the nearest known one."""
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            *parents, key = problem["loc"]
            yield f"unknown key {where!r}. {nearest(str(key), _keys_at(model, parents))}"
        elif problem["type"] == "missing":
            yield f"the key {where!r} is missing: add it"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{where}: {message} (got {problem['input']!r})" if where else message


def _keys_at(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    for part in path:
        kind = model.model_fields[str(part)].annotation
        model = next(k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel))
    return list(model.model_fields)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: old -> new` for each leaf in which two configurations differ."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}: {before!r} -> {after!r}"


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`key.subkey` and its value, for everything that is no mapping itself."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def written(value: Any) -> str:
    """As in a recipe, with as many digits as a person reads."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(below)}' for key, below in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(part) for part in value)}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}"""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)
