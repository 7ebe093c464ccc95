"""The prior that is asked for, as it is read."""

import pytest

from medcil.clinic.calibration import uncalibrated
from medcil.clinic.inference import OpenModel
from medcil.clinic.predict import choose_prior
from medcil.errors import InvalidInput


def model_of(names: tuple[str, ...], counts: tuple[int, ...] = ()) -> OpenModel:
    """That answers nothing."""
    return OpenModel(
        name="skin.onnx",
        class_names=names,
        side=8,
        calibration=uncalibrated(1.0, [0.0] * len(names)),
        training_counts=counts,
        answer=lambda pixels: pytest.fail("a prior needs no answer"),
    )


def test_names_are_those_that_are_written(tmp_path):
    """YAML would take them for false, eight, a date and nothing."""
    names = ("no", "010", "2024-01-01", "null")
    path = tmp_path / "prior.yaml"
    path.write_text("no: 0.1\n010: 0.2\n2024-01-01: .3\nnull: 4e-1\n")
    assert choose_prior(model_of(names), path).shares == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_a_model_that_does_not_know_what_it_learned_from_says_so():
    with pytest.raises(InvalidInput, match=r"skin\.onnx does not say how many images"):
        choose_prior(model_of(("a", "b"), (0, 0)), "training")
    assert choose_prior(model_of(("a", "b"), (3, 1)), "training").shares == (0.75, 0.25)
