import shutil
from pathlib import Path

import pytest

from medcil.clinic.train import train

from .generated import QUICK, write_folder
from .patients import write_model_of_patients


@pytest.fixture(scope="session")
def first_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, trained once; tests copy it."""
    root = tmp_path_factory.mktemp("first")
    data = write_folder(root / "data", "alpha", "beta", "gamma")
    train(data, root / "model", **QUICK)
    return root / "model"


@pytest.fixture
def model(first_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a new class."""
    return write_folder(tmp_path_factory.mktemp("delta"), "delta")


@pytest.fixture(scope="session")
def of_patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of patients in first/ and second/, and the model of both; tests copy it."""
    return write_model_of_patients(tmp_path_factory.mktemp("patients"))
