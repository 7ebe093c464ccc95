"""Features of test images after the last step of a run, stored in its directory for t-SNE figures."""

import copy
import json
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Int
from torch import Tensor

from medcil.build import RunConfig, build_stream
from medcil.data.stream import Stream
from medcil.errors import InvalidInput, MedcilError
from medcil.experiments.suite import Place, load_suite
from medcil.storage.atomic import read_json, write_bytes
from medcil.storage.run_dir import RunDir
from medcil.training.environment import prepare_machine
from medcil.training.feed import Feed
from medcil.training.inference import choose_device, embed
from medcil.training.state import load_state

FILE = "features.safetensors"
PER_CLASS = 150
SEED = 0


def write_features(run_dir: Path, config: RunConfig, *, stream: Stream | None = None) -> Path:
    """Write features.safetensors: `features`, `labels` in order of arrival, `images` (test indices).

    Runs on the same data use the same images in the same order, so that figures are comparable. An existing
    file is kept. `stream` saves reading the data again when several runs share it.
    """
    file = run_dir / FILE
    if file.is_file():
        return file
    stream = stream or build_stream(config)
    last = RunDir(run_dir).task(len(stream.sizes))
    if not last.is_done:
        raise InvalidInput(f"Finish the run in {run_dir} first: features are those after its last step.")
    prepare_machine(config.execution)
    state, device = load_state(last.state), choose_device(config.execution)
    arrival = {c: i for i, c in enumerate(stream.order[: sum(stream.sizes)])}
    images = chosen_images(stream.test.labels, sorted(arrival))
    samples = stream.test.select(images)
    network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
    with Feed(samples, state.preprocessing, device, config.execution) as feed:
        features = embed(network, feed, torch.arange(len(samples))).cpu()
    tensors = {
        "features": features.to(torch.float16).contiguous(),
        "labels": torch.tensor([arrival[c] for c in samples.labels.tolist()]),
        "images": images,
    }
    # One entry: the order of several is left to chance, and equal runs should have equal files.
    about = {"class_names": list(state.class_names), "n_old": sum(stream.sizes[:-1])}
    write_bytes(file, safetensors.torch.save(tensors, {"medcil": json.dumps(about)}))
    return file


def write_features_for_figures(folder: Path) -> list[str]:
    """Write the features of the finished runs in a suite's t-SNE figures; return a sentence per failure."""
    suite, problems = load_suite(str(folder / "suite.yaml")), []
    shown = {
        suite.place_shown(figure, row.name, setting)
        for figure in suite.figures
        if figure.kind == "tsne"
        for setting in figure.settings or suite.settings
        for row in suite.expanded_rows()
        if not figure.rows or row.name in figure.rows
    }
    streams: dict[str, Stream] = {}
    for entry in read_json(folder / "runs.json")["runs"]:
        run_dir = folder / entry["path"]
        is_shown = any(Place(*place) in shown for place in entry["places"])
        if not is_shown or entry["state"] != "finished" or (run_dir / FILE).is_file():
            continue
        try:
            config = _for_this_machine(RunDir(run_dir).read_config(RunConfig))
            data = config.model_dump_json(include={"data", "scenario"})
            streams[data] = streams.get(data) or build_stream(config)
            write_features(run_dir, config, stream=streams[data])
        except (MedcilError, RuntimeError, OSError) as error:  # nor is a lack of memory the tables' fault
            why = next(iter(str(error).splitlines()), type(error).__name__)
            problems.append(f"No features of {run_dir}, so no t-SNE: {why}")
    return problems


def _for_this_machine(config: RunConfig) -> RunConfig:
    """Compute on this machine's device: the run may have been computed on another machine."""
    execution = config.execution.model_copy(update={"device": "auto", "processes": 1})
    return config.model_copy(update={"execution": execution})


def chosen_images(labels: Int[Tensor, "n"], classes: list[int]) -> Int[Tensor, "m"]:
    """Choose up to PER_CLASS images of each class, always the same ones, in the order of the test set."""
    generator = torch.Generator().manual_seed(SEED)
    chosen = []
    for c in classes:
        own = torch.nonzero(labels == c).flatten()
        chosen.append(own[torch.randperm(len(own), generator=generator)[:PER_CLASS]])
    return torch.cat(chosen).sort().values
