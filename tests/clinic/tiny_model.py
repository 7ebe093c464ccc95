"""A model folder with one version, written by hand around an untrained network."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from medcil.clinic.calibration import calibrate
from medcil.clinic.model_dir import FORMAT, ModelFolder, VersionFolder
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, encode_png
from medcil.training.state import State, save_state

from ..small import SMALLEST, new_state, random_samples, readout_of

NAMES = ("melanoma", "nevus", "wart")
COUNTS = (60, 30, 10)


def tiny_state(*, readout: str = "classifier", seed: int = 0) -> State:
    """Three classes, with weights as they are drawn."""
    state = new_state(seed=seed, spec=SMALLEST)
    generator = torch.Generator().manual_seed(seed)
    dim = state.network.classifier.dim
    state.network.grow(F.normalize(torch.randn(3, dim, generator=generator)))
    log_prior = torch.tensor(COUNTS).div(sum(COUNTS)).log()
    return replace(
        state,
        memory=random_samples([2, 2, 2], seed=seed + 5),
        class_names=NAMES,
        inherent_counts=torch.tensor(COUNTS),
        readout=readout_of(
            F.normalize(torch.randn(3, dim, generator=generator)),
            log_prior if readout == "classifier" else torch.zeros(3),
            kind=readout,
        ),
    )


def write_model(root: Path, state: State, holdout: Samples | None = None) -> Path:
    """The files of docs/reference/model-folder.md that predicting and evaluating need."""
    folder = ModelFolder(root)
    version = VersionFolder(folder.versions_path / "v1", folder.store)
    version.root.mkdir(parents=True)
    save_state(state, version.state_path, folder.store)
    holdout = holdout or random_samples([20, 20, 20], seed=11)
    entries = [
        {"file": folder.store.put(encode_png(pixels), "png"), "class": state.class_names[label]}
        for pixels, label in zip(holdout.read_all(), holdout.labels.tolist(), strict=True)
    ]
    (version.root / "holdout.json").write_text(json.dumps({"format": FORMAT, "images": entries}))
    calibrate(state, holdout, ExecutionConfig(device="cpu")).write(version.root / "calibration.json")
    folder.write({"v1": version.seal()}, "v1")
    return root


def write_png(path: Path, pixels: UInt8[Tensor, "3 height width"]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(pixels))
