"""Names in a recipe become things, or an error that says what to do."""

import pytest

from medcil.build import build_method, build_stream, class_order, resolve
from medcil.config import RunConfig
from medcil.data.datasets import find_dataset
from medcil.errors import InvalidInput
from medcil.methods.balanced import Balanced


def config(**changes) -> RunConfig:
    content = {
        "data": {"name": "phantom", "side": 12, "crop": 8},
        "scenario": {"base": 3, "increment": 2},
        "method": {"name": "balanced"},
    }
    return RunConfig.model_validate({**content, **changes})


def test_a_method_is_built_from_its_fields():
    assert build_method({"name": "balanced", "alpha": 0.7, "margin": "none"}) == Balanced(
        alpha=0.7, margin="none"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "balnced"}, r"no method 'balnced'. Did you mean 'balanced'\?"),
        ({"name": "balanced", "alhpa": 1}, r"unknown key 'method.alhpa' of balanced. Did you mean 'alpha'\?"),
        ({"name": "balanced", "alpha": 2}, r"alpha must lie in \(0, 1\]"),
        ({"name": "balanced", "margin": "large"}, r"method.margin"),
        ({"name": "balanced", "detach_range": "perhaps"}, r"method.detach_range"),
    ],
)
def test_a_wrong_method_is_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        build_method(settings)


def test_the_resolved_recipe_holds_every_default_of_its_method():
    resolved = resolve(config())
    assert resolved.label == "balanced"
    assert resolved.method["alpha"] == Balanced().alpha
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": {"base": 3, "increment": 2, "order": 3}}, "has orders 0..2, not 3"),
        ({"scenario": {"base": 3, "increment": 2, "order": [0, 1]}}, "must name each of 0..6"),
        ({"scenario": {"base": 9, "increment": 2}}, "only 7 classes"),
        ({"memory": {"total": 6}}, "less than 7 classes"),
        ({"data": {"name": "phantm"}}, "Did you mean 'phantom'"),
    ],
)
def test_an_impossible_scenario_is_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(config(**changes))


def test_a_stream_follows_the_order_of_the_recipe():
    stream = build_stream(config(scenario={"base": 4, "increment": 2, "order": [6, 5, 4, 3, 2, 1, 0]}))
    names = find_dataset("phantom").class_names
    assert stream.sizes == (4, 2, 1)
    assert [task.class_names for task in stream.tasks()] == [names[:2:-1], names[2:0:-1], names[:1]]
    assert class_order(config(), find_dataset("phantom")) == find_dataset("phantom").orders[0]
