"""State: everything that passes from one task to the next, in memory and on disk.

On disk it is a folder: a JSON manifest that lists every other file with its hash, the tensors as safetensors,
and the exemplars as PNG files under random names. Each part of the network and of the readout has a file, and
so has each class whose statistics the readout keeps: the versions of a model share the files that are equal.
Reading executes nothing.
"""

import copy
import secrets
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Int, UInt8
from safetensors import SafetensorError
from torch import Tensor, nn

from medcil.data.samples import Samples, TensorImages, decode_image, encode_png, no_samples
from medcil.data.transforms import Preprocessing
from medcil.errors import DamagedFile, InvalidInput, MedcilError, RunConflict
from medcil.methods.protocol import Decision
from medcil.models.network import Network, NetworkSpec
from medcil.readouts import READOUTS, Readout, build_readout
from medcil.readouts.statistics import StatisticsReadout
from medcil.storage.atomic import (
    flush_folder,
    read_json,
    read_verified,
    sha256,
    write_bytes,
    write_json,
    writing,
)
from medcil.storage.content_store import ContentStore
from medcil.training.checkpoint import check_finite
from medcil.training.distributed import Instead
from medcil.training.sampling import Key, Purpose

FORMAT = 4


@dataclass(frozen=True, eq=False)
class State:
    network: Network
    memory: Samples
    class_names: tuple[str, ...]
    readout: Readout
    """How outputs of the network become scores."""
    inherent_counts: Int[Tensor, "classes"]
    """q_c: the number of images each class was learned from."""
    preprocessing: Preprocessing
    decisions: tuple[Decision, ...] = ()
    """What methods chose by themselves."""


def initial_state(spec: NetworkSpec, preprocessing: Preprocessing, *, seed: int) -> State:
    """Build a state without classes, from which the first task starts like any other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Key(seed).integer(Purpose.NETWORK))
        network = spec.build()
    return State(
        network=network,
        memory=no_samples(preprocessing.side),
        class_names=(),
        readout=READOUTS["classifier"](0, network.classifier.dim),
        inherent_counts=torch.empty(0, dtype=torch.int64),
        preprocessing=preprocessing,
    )


def without_classes(state: State) -> State:
    """Return the network and the choice of features alone, from which a new model can start.

    Scores need statistics of classes, and `StatisticsReadout.solve`.
    """
    network, readout = copy.deepcopy(state.network), copy.deepcopy(state.readout)
    network.classifier.clear()
    if isinstance(readout, StatisticsReadout):
        readout.clear()
    return replace(
        state,
        network=network,
        memory=no_samples(state.preprocessing.side),
        class_names=(),
        readout=readout,
        inherent_counts=state.inherent_counts[:0],
    )


def save_state(state: State, folder: Path, store: ContentStore | None = None) -> None:
    """Write a folder that appears whole. An existing folder is not replaced.

    Tensors and exemplars go into the store if there is one, else into the folder.
    """
    files = _grouped(state)
    for tensors in (tensors for group in files.values() for tensors in group):
        check_finite(tensors)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    place = store or ContentStore(part)
    manifest = {
        "format": FORMAT,
        "class_names": list(state.class_names),
        "inherent_counts": state.inherent_counts.tolist(),
        "network": asdict(state.network.spec()),
        "readout": state.readout.spec(),
        "preprocessing": asdict(state.preprocessing),
        "decisions": [asdict(decision) for decision in state.decisions],
        "tensors": {
            name: [place.put(safetensors.torch.save(tensors), "safetensors") for tensors in group]
            for name, group in files.items()
        },
        "exemplars": _save_exemplars(state, part, store),
    }
    write_json(part / "manifest.json", manifest)
    try:
        with writing(folder):
            part.rename(folder)
    except (OSError, MedcilError):
        if not folder.exists():
            raise
        raise RunConflict(
            f"{folder} exists already and is unchanged. Give another folder.", code="state.folder.exists"
        ) from None
    flush_folder(folder.parent)


def _grouped(state: State) -> dict[str, list[dict[str, Tensor]]]:
    """Group tensors by file: each part of network and readout has one, and each class with statistics."""
    files = defaultdict[str, list[dict[str, Tensor]]](lambda: [{}])
    for module in ("network", "readout"):
        for name, tensor in getattr(state, module).state_dict(prefix=f"{module}.").items():
            files[".".join(name.split(".")[:2])][0][name] = tensor.contiguous()
    if isinstance(state.readout, StatisticsReadout):
        by_class = state.readout.statistics_by_class()
        for name in by_class[0]:
            del files[f"readout.{name}"]
        files["readout.statistics"] = [
            {f"readout.{name}": rows.contiguous() for name, rows in of_class.items()} for of_class in by_class
        ]
    return files


def _save_exemplars(state: State, folder: Path, store: ContentStore | None) -> list[dict[str, Any]]:
    if store is not None:
        store.create_key()

    def save(pixels: UInt8[Tensor, "3 side side"]) -> dict[str, Any]:
        content = encode_png(pixels)
        if store is not None:
            return {"file": store.put(content, "png")}
        name = f"exemplars/{secrets.token_hex(8)}.png"  # reveals nothing of the image's origin
        write_bytes(folder / name, content)
        return {"file": name, "sha256": sha256(content)}

    with ThreadPoolExecutor() as pool:
        files = list(pool.map(save, state.memory.read_all()))
    entries: list[dict[str, Any]] = []
    ranks: dict[int, int] = {}
    for file, label in zip(files, state.memory.labels.tolist(), strict=True):
        ranks[label] = ranks.get(label, -1) + 1
        entries.append({**file, "class": state.class_names[label], "rank": ranks[label]})
    return entries


def load_state(folder: Path, store: ContentStore | None = None) -> State:
    """Read what `save_state` wrote with the same store."""
    if not (folder / "manifest.json").is_file():
        raise InvalidInput(
            f"No model in {folder}: manifest.json is missing. Give a folder with a model.",
            code="state.manifest.missing",
        )
    manifest = read_json(folder / "manifest.json")
    try:
        if manifest["format"] != FORMAT:
            raise InvalidInput(
                f"{folder} has format {manifest['format']!r}; this medcil reads {FORMAT}. Use the version of "
                "medcil that wrote it, or update medcil.",
                code="state.format.unsupported",
            )
        return _state_from(manifest, folder, store)
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DamagedFile(
            f"{folder / 'manifest.json'} is incomplete ({error!r}). Restore it.",
            code="state.manifest.damaged",
        ) from None


def _state_from(manifest: dict[str, Any], folder: Path, store: ContentStore | None) -> State:
    tensors = _load_tensors(manifest["tensors"], store or ContentStore(folder))
    fields = manifest["network"]
    tuples = {key: tuple(fields[key]) for key in ("block_sizes", "calibration_sizes")}
    with _undrawn():
        network = NetworkSpec(**{**fields, **tuples}).build()
    readout = build_readout(manifest["readout"])
    network.load_state_dict(_part("network.", tensors))
    readout.load_state_dict(_part("readout.", tensors))
    fields = manifest["preprocessing"]
    tuples = {key: tuple(fields[key]) for key in ("mean", "std")}
    preprocessing = Preprocessing(**{**fields, **tuples})
    names = tuple(manifest["class_names"])
    return State(
        network=network,
        memory=_load_exemplars(manifest["exemplars"], names, folder, store, preprocessing.side),
        class_names=names,
        readout=readout,
        inherent_counts=torch.tensor(manifest["inherent_counts"], dtype=torch.int64),
        preprocessing=preprocessing,
        decisions=tuple(Decision(**decision) for decision in manifest.get("decisions", ())),
    )


def _load_tensors(files: dict[str, list[str]], store: ContentStore) -> dict[str, Tensor]:
    """Read all files; what several files of a group hold are rows of one tensor."""
    rows = defaultdict[str, list[Tensor]](list)
    for name in (name for group in files for name in files[group]):
        for key, tensor in safetensors.torch.load(store.read(name)).items():
            rows[key].append(tensor)
    return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in rows.items()}


def _part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _inside(folder: Path, name: str) -> Path:
    """Refuse names that lead out of the folder: a manifest may come from elsewhere."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside the folder")
    return path


def _undrawn() -> Instead:
    """Skip drawing random weights for a new network, whose weights are all replaced next."""

    def leave(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return tensor

    return Instead(dict.fromkeys((nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_), leave))


def _load_exemplars(
    entries: list[dict[str, Any]], names: tuple[str, ...], folder: Path, store: ContentStore | None, side: int
) -> Samples:
    if not entries:
        return no_samples(side)

    def load(entry: dict[str, Any]) -> UInt8[Tensor, "3 side side"]:
        if store is not None:
            return decode_image(store.read(entry["file"]), side)
        return decode_image(read_verified(_inside(folder, entry["file"]), entry["sha256"]), side)

    with ThreadPoolExecutor() as pool:
        exemplars = list(pool.map(load, entries))
    labels = torch.tensor([names.index(e["class"]) for e in entries])
    return Samples(TensorImages(torch.stack(exemplars)), labels)
