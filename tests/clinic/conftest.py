import shutil
from pathlib import Path

import pytest

from medcil.clinic.train import train
from medcil.training.state import State

from .generated import QUICK, write_folder
from .patients import write_model_of_patients
from .tiny_model import tiny_state, write_model


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


@pytest.fixture(scope="session")
def state() -> State:
    """Three classes, untrained."""
    return tiny_state()


@pytest.fixture(scope="session")
def skin(state: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of that state; no test changes it."""
    return write_model(tmp_path_factory.mktemp("untrained") / "skin", state)
