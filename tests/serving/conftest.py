"""A model of two versions, trained for a moment; no test changes it."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medcil.clinic.train import train
from medcil.clinic.update import update
from medcil.config import ExecutionConfig

from ..clinic.generated import FEW, QUICK, write_counts, write_folder

CPU = ExecutionConfig(device="cpu", threads=1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    counts = {"alpha": 45, "beta": 25, "gamma": 22}  # so that the priors differ
    train(write_counts(root / "data", counts), root / "model", **QUICK)
    update(root / "model", write_folder(root / "more", "delta"), **FEW)
    return root / "model"


def picture(color: tuple[int, int, int], *, file_format: str = "PNG", side: int = 40) -> bytes:
    noisy = np.array(color) + np.random.default_rng(0).normal(0, 40, (side, side, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(buffer, file_format)
    return buffer.getvalue()
