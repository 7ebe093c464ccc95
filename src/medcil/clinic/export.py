"""Export a model to one ONNX file that needs neither torch nor medcil to run. See docs/how-to/export.md."""

import json
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from medcil.clinic.calibration import Calibration, uncalibrated
from medcil.clinic.inference import EXPORTED, FORMAT, KEY, NO_SHA256, OnnxModel, with_sha256
from medcil.clinic.model_dir import ModelFolder
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.errors import InvalidInput, MedcilError, needs_extra
from medcil.report.evaluation import NOTICE
from medcil.storage.atomic import write_bytes, writing
from medcil.storage.overwrite_guard import check_output_file
from medcil.training.inference import Scorer, ScoringNetwork
from medcil.training.state import State

OPSET = 20
LARGEST_DIFFERENCE = 1e-4
"""Between file and network, in probability and likeness. No file is written above it."""
MOST_COMPARED = 500
OUTPUTS = ("scores", "embedding", "likeness", "probabilities")


@dataclass(frozen=True)
class Exported:
    """The written file, and how well it agrees with the network."""

    path: Path
    size: int
    """Bytes."""
    difference: float
    """The largest difference in a probability or likeness."""
    n_compared: int
    compared_on: str

    def sentence(self) -> str:
        return (
            f"{self.path}: {self.size / 1e6:.1f} MB. Its answers and the network's differ by at most "
            f"{self.difference:.1e} on {self.n_compared} {self.compared_on}."
        )


def export(model: Path | str, out: Path | str, *, version: str | None = None) -> Exported:
    """Export a version of a model folder (default: the current one) to ONNX, checked on the images in it."""
    folder = ModelFolder(Path(model)).version(version)
    return export_state(folder.load_state(), Path(out), folder.calibration(), folder.holdout())


def export_state(
    state: State, path: Path, calibration: Calibration | None = None, holdout: Samples | None = None
) -> Exported:
    """Write the file if its probabilities are those of the network: on the hold-out, else on exemplars, else
    on noise."""
    if not state.class_names:
        raise InvalidInput("This model knows no class yet. Train it first.")
    check_output_file(path, b"medcil")  # the producer, named after the version of the format
    if path.suffix.lower() != EXPORTED:
        raise InvalidInput(f"{path} must end in {EXPORTED}. Name it {path}{EXPORTED}.")
    images, compared_on = holdout, "images of the hold-out"
    if images is None or not len(images):
        images, compared_on = state.memory, "exemplars"
    if not len(images):
        images, compared_on = _noise(state), "images of noise, for the folder holds no other"
    calibration = calibration or uncalibrated(state.readout.temperature, state.readout.log_prior.tolist())
    content = onnx_bytes(state, calibration)
    compared = images.select(torch.linspace(0, len(images) - 1, min(len(images), MOST_COMPARED)).long())
    difference = largest_difference(state, calibration, OnnxModel(content), compared)
    if not difference <= LARGEST_DIFFERENCE:  # NaN compares false
        raise MedcilError(
            f"The exported model differs from the network by {difference:.1e}: no file was written. Use the "
            "model folder."
        )
    with writing(path.parent):
        write_bytes(path, content)
    return Exported(path, len(content), difference, len(compared), compared_on)


def largest_difference(state: State, calibration: Calibration, model: OnnxModel, images: Samples) -> float:
    """Compare likeness, and probabilities under a uniform and a skewed prior."""
    pixels = images.read_all().numpy()
    scores, likeness = Scorer(state, ExecutionConfig(device="cpu")).answer(pixels)
    n = len(state.class_names)
    skewed = np.geomspace(1, 100, n)
    differences = [0.0]
    for prior in (np.full(n, 1 / n), skewed / skewed.sum()):
        ours = calibration.probabilities(scores, prior.tolist())
        theirs = model.answers(pixels, prior.tolist())
        differences.append(float(np.abs(ours - theirs.probabilities).max(initial=0.0)))
        differences.append(float(np.abs(likeness - theirs.likeness).max(initial=0.0)))
    return float(np.max(differences))


class _Graph(nn.Module):
    """The exported graph: from bytes to probabilities."""

    def __init__(self, state: State, calibration: Calibration) -> None:
        super().__init__()
        self.model = ScoringNetwork(state)
        self.preprocessing = state.preprocessing
        self.temperature = calibration.temperature
        self.prior_in_scores = nn.Buffer(torch.tensor(calibration.class_prior_in_scores))
        self.mean = nn.Buffer(torch.tensor(state.preprocessing.mean).view(1, 3, 1, 1))
        self.std = nn.Buffer(torch.tensor(state.preprocessing.std).view(1, 3, 1, 1))

    def forward(
        self, images: UInt8[Tensor, "n 3 side side"], log_prior: Float[Tensor, "classes"]
    ) -> tuple[Tensor, ...]:
        start = self.preprocessing.slack // 2
        end = start + self.preprocessing.crop
        pixels = images[:, :, start:end, start:end].float()
        scores, embedding = self.model((pixels / 255 - self.mean) / self.std)
        likeness = (F.normalize(embedding) @ self.model.readout.class_means.T).amax(dim=1)
        evidence = (scores - self.prior_in_scores) / self.temperature
        return scores, embedding, likeness, torch.softmax(evidence + log_prior, dim=1)


def onnx_bytes(state: State, calibration: Calibration) -> bytes:
    """Return the content of the file."""
    with needs_extra("export"):
        import onnx
        import onnxscript  # noqa: F401  # what torch.onnx builds on
    from onnx.numpy_helper import from_array

    proto, n_classes = _without_traces(_traced(state, calibration)), len(state.class_names)
    # An input with an initializer of its name is optional: its default is the uniform prior.
    uniform = np.full(n_classes, -np.log(n_classes), dtype=np.float32)
    proto.graph.initializer.append(from_array(uniform, "log_prior"))
    description = json.dumps({"sha256": NO_SHA256, **describe(state, calibration)}, allow_nan=False)
    onnx.helper.set_model_props(proto, {KEY: description, "notice": NOTICE})
    proto.producer_name, proto.producer_version = "medcil", metadata.version("medcil")
    onnx.checker.check_model(proto)
    return with_sha256(proto.SerializeToString())


def _traced(state: State, calibration: Calibration) -> Any:
    """Trace the graph with torch."""
    side, n_classes = state.preprocessing.side, len(state.class_names)
    example = (torch.zeros(2, 3, side, side, dtype=torch.uint8), torch.zeros(n_classes))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter itself
            program = torch.onnx.export(
                _Graph(state, calibration).cpu().eval(),
                example,
                dynamo=True,
                external_data=False,
                opset_version=OPSET,
                input_names=["images", "log_prior"],
                output_names=OUTPUTS,
                dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, None),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        name, reason = state.network.spec().backbone, error.__cause__ or error
        raise MedcilError(f"{name} cannot be written as ONNX. Use the model folder.\n{reason}") from None
    assert program is not None
    return program.model_proto


def _without_traces(proto: Any) -> Any:
    """Remove source locations, which the exporter notes for every node."""
    graph = proto.graph
    inside = (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for part in (proto, graph, *inside):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return proto


def describe(state: State, calibration: Calibration) -> dict[str, Any]:
    """Describe what anyone who runs the file elsewhere has to know."""
    preprocessing = state.preprocessing
    return {
        "format": FORMAT,
        "medcil": metadata.version("medcil"),
        "notice": NOTICE,
        "class_names": list(state.class_names),
        "training_images": state.inherent_counts.tolist(),
        "preprocessing": {
            "decode": "8-bit RGB, turned upright as EXIF says; a large JPEG at a half, a quarter or an "
            "eighth of its size, where that is no less than side x side (Pillow's draft)",
            "resize": {
                "side": preprocessing.side,
                "filter": "bilinear, antialiased (Pillow's Resampling.BILINEAR)",
                "keeps_aspect_ratio": False,
            },
            "inside_the_graph": {
                "crop": preprocessing.crop,
                "crop_at": "center",
                "crop_starts_at": preprocessing.slack // 2,
                "divide_by": 255,
                "mean": list(preprocessing.mean),
                "std": list(preprocessing.std),
                "views": preprocessing.views,
            },
        },
        "input_layout": "uint8, batch x 3 (red, green, blue) x side x side",
        "readout": state.readout.kind,
        "probabilities": "softmax((scores - class_prior_in_scores) / temperature + log_prior)",
        "calibration": calibration.to_json(),
    }


def _noise(state: State) -> Samples:
    side, generator = state.preprocessing.side, torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (16, 3, side, side), dtype=torch.uint8, generator=generator)
    return Samples(TensorImages(pixels), torch.zeros(16, dtype=torch.int64))
