"""One picture in several classes: refused, skipped, or of the class that is believed."""

import shutil
import warnings

import numpy as np
import pytest

from medcil.clinic.train import train
from medcil.clinic.update import update
from medcil.data.image_table import ImageTable, MemoryFiles, without_conflicts
from medcil.errors import InvalidInput

from .generated import FEW, QUICK, write_folder

LABELS, CLASSES = np.array([0, 1, 1, 2, 0, 2]), ("MEL", "NV", "BCC")
SHA256S, NAMES = ("a", "a", "b", "b", "c", "c"), tuple("012345")


def kept(rule, sha256s=SHA256S):
    table = ImageTable(MemoryFiles({}), NAMES, LABELS, CLASSES, sha256=sha256s)
    return [int(name) for name in without_conflicts(table, rule).names]


def test_the_rule_decides_which_copies_are_used():
    assert kept("refuse", tuple("abcdef")) == list(range(6))
    assert kept("skip", ("a", "a", "b", "d", "c", "e")) == [2, 3, 4, 5]
    assert kept("NV", ("a", "a", "b", "b", "c", "d")) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("refuse", "data.conflicts.unsolved"),
        ("NV", "data.conflicts.unsolved"),  # picture c is in MEL and BCC
        ("nevus", "data.conflicts.unknown"),
        ("skip", "data.conflicts.empty"),
    ],
)
def test_what_no_rule_decides_is_refused(rule, code):
    with pytest.raises(InvalidInput) as error:
        kept(rule)
    assert error.value.code == code


def test_one_picture_in_two_classes_stops_training_unless_a_rule_decides(tmp_path):
    data = write_folder(tmp_path / "data", "alpha", "beta", images=12)
    shutil.copy(data / "alpha" / "003.png", data / "beta" / "again.png")
    with pytest.raises(InvalidInput, match="--conflicts"):
        train(data, tmp_path / "model", **QUICK)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        done = train(data, tmp_path / "model", **QUICK, conflicts="alpha")
    assert any("1 images are left out" in str(warning.message) for warning in seen)
    assert sum(done.provenance["images"].values()) + sum(done.provenance["holdout"].values()) == 24


def test_a_near_duplicate_in_two_classes_is_a_warning(model, tmp_path):
    from PIL import Image

    data = write_folder(tmp_path / "data", "delta", "epsilon", images=12)
    picture = Image.open(data / "delta" / "003.png")
    Image.fromarray(np.asarray(picture) // 2 + 60).save(data / "epsilon" / "again.png")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert update(model, data, **FEW).version == "v2"
    assert any("Almost the same picture" in str(warning.message) for warning in seen)
