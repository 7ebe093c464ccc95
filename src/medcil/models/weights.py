"""Pretrained weights: files, the folder of those that the user has registered, and which backbone they fit.

A state dict of PyTorch is a pickle, which can hold code. It is read by a reader that knows tensors and plain
containers only and runs nothing. Registered weights are safetensors files in the names of timm.
"""

import hashlib
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from medcil.errors import DamagedFile, InvalidInput, nearest
from medcil.models.backbones import CIFAR_RESNETS, Backbone, create_model, in_stages
from medcil.storage.atomic import read_json, read_verified, sha256, write_bytes, write_json, writing

HUB = "hub"
FORMAT = 1
PICKLES = (".pth", ".pt", ".bin", ".tar")
Normalization = tuple[tuple[float, ...], tuple[float, ...]]
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Known:
    """A backbone that suits a clinic, the usual weights for it, and the images that these were trained on."""

    source: str
    license: str
    side: int = 224
    normalization: Normalization = IMAGENET
    is_fixed: bool = False
    """It takes images of this side only."""


KNOWN = {
    "resnet18": Known("torchvision, ImageNet", "BSD-3-Clause"),
    "resnet34": Known("torchvision, ImageNet", "BSD-3-Clause"),
    "resnet50": Known("torchvision, ImageNet", "BSD-3-Clause"),
    "tf_efficientnet_lite0": Known("Google, ImageNet", "Apache-2.0", normalization=HALVES),
    "efficientnet_b0": Known("timm, ImageNet", "Apache-2.0"),
    "mobilenetv3_large_100": Known("timm, ImageNet", "Apache-2.0"),
    "convnext_atto": Known("timm, ImageNet", "Apache-2.0"),
    "convnext_tiny": Known("torchvision, ImageNet", "BSD-3-Clause"),
    "vit_small_patch16_224": Known("Google, ImageNet-21k", "Apache-2.0", normalization=HALVES, is_fixed=True),
    "vit_small_patch14_dinov2": Known("Meta, DINOv2", "Apache-2.0", side=518, is_fixed=True),
}
HEAD = re.compile(r"(fc|classifier|head|head_dist)\.|mask_token$")
"""What files hold beside the network: a classifier, and what training alone needs."""
WRAPPERS = ("state_dict", "model", "model_state_dict")
TORCHVISION_CONVNEXT: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"features\.0\.([01])\.", lambda m: f"stem.{m[1]}."),
    (r"features\.([246])\.([01])\.", lambda m: f"stages.{int(m[1]) // 2}.downsample.{m[2]}."),
    (r"features\.([1357])\.(\d+)\.", lambda m: f"stages.{int(m[1]) // 2}.blocks.{m[2]}."),
    (r"block\.0\.", lambda m: "conv_dw."),
    (r"block\.2\.", lambda m: "norm."),
    (r"block\.3\.", lambda m: "mlp.fc1."),
    (r"block\.5\.", lambda m: "mlp.fc2."),
    (r"layer_scale$", lambda m: "gamma"),
    (r"classifier\.0\.", lambda m: "head.norm."),
    (r"classifier\.2\.", lambda m: "head.fc."),
)


@dataclass(frozen=True)
class Weights:
    """Weights to start from: registered, in a file, or on timm's hub (which has no path here)."""

    name: str
    backbone: str
    path: Path | None
    source: str | None = None
    license: str | None = None
    registered: str | None = None
    """When, in UTC; None for a file that is not registered."""
    registered_sha256: str | None = None
    registered_normalization: Normalization | None = None

    @cached_property
    def normalization(self) -> Normalization | None:
        """Mean and deviation of the images that they were trained on; None if nobody knows."""
        return self.registered_normalization or normalization_of(self.backbone)

    @cached_property
    def sha256(self) -> str | None:
        if self.path is None or self.registered_sha256:
            return self.registered_sha256
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        if self.path is None:
            return _hub_tensors(self.backbone)
        if self.registered_sha256:
            return safetensors.torch.load(read_verified(self.path, self.registered_sha256))
        return read_tensors(self.path)


def find_weights(name: str, backbone: str) -> Weights:
    """Find what `network.weights` names: `hub`, a file, or registered weights."""
    if name == HUB:
        return Weights(HUB, backbone, None, source="timm's hub")
    if (path := Path(name)).is_file():
        return Weights(path.name, backbone, path)
    if name not in (names := _names()):
        raise InvalidInput(
            f"network.weights: no such file: {name}. Give a file, a name from `medcil weights`, or `hub`.\n"
            f"Registered weights: {nearest(name, names)}",
            code="network.weights.missing",
        )
    return _registered(name)


def load_weights(backbone: Backbone, weights: str, *, name: str) -> None:
    """Load a file, registered weights, or those of timm's hub (`hub`) into a backbone."""
    fit = Fit.of(find_weights(weights, name).tensors(), name)
    if fit.missing or fit.misshapen:
        raise InvalidInput(
            f"network.weights: {weights} does not fit {name} ({fit.lack()}). Give this backbone's own.",
            code="network.weights.mismatch",
        )
    model = create_model(name)
    wanted = model.state_dict()
    used = {key: value.to(wanted[key].dtype) for key, value in fit.tensors.items()}
    model.load_state_dict(used, strict=False)
    backbone.load_state_dict(in_stages(model, name=name, last_relu=backbone.last_relu).state_dict())


def backbone_of(name: str) -> str | None:
    """Return the backbone of registered weights or of a file, if it is a known one."""
    if (path := Path(name)).is_file():
        fit = recognize(read_tensors(path))
        return None if fit is None else fit.backbone
    return _registered(name).backbone if name in _names() else None


def normalization_of(backbone: str) -> Normalization | None:
    """Return the mean and deviation of the images that timm's weights of a backbone were trained on."""
    if backbone in KNOWN:
        return KNOWN[backbone].normalization
    settings = _timm_settings(backbone)
    return None if settings is None else (tuple(settings.mean), tuple(settings.std))


def fixed_side(backbone: str) -> int | None:
    """Return the only side of images that a backbone takes; None if it takes any."""
    if backbone in KNOWN:
        return KNOWN[backbone].side if KNOWN[backbone].is_fixed else None
    settings = _timm_settings(backbone)
    return int(settings.input_size[1]) if settings is not None and settings.fixed_input_size else None


def _timm_settings(backbone: str) -> Any:
    if backbone in CIFAR_RESNETS:
        return None
    import timm

    try:
        return timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None
    except RuntimeError:  # the part after the dot names no weights; creating the network says so
        return None


# Files.


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a state dict of PyTorch without running what a pickle holds."""
    if not path.is_file():
        message = f"No such file: {path}. Give a safetensors file or a state dict of PyTorch."
        raise InvalidInput(message, code="network.weights.missing")
    try:
        is_pickle = path.suffix.lower() in PICKLES
        tensors = _state_dict(path) if is_pickle else safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        message = f"{path} is not a safetensors file ({error}). Give another file."
        raise InvalidInput(message, code="network.weights.invalid") from None
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}). Make it readable."
        raise InvalidInput(message, code="network.weights.unreadable") from None
    return _names_of_timm(tensors)


def _state_dict(path: Path) -> dict[str, Tensor]:
    try:
        _refuse_expanding(path)
        with warnings.catch_warnings(action="ignore"):  # of old formats
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged and hostile pickles fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"{path} is damaged or holds code, which was not run. Give another file.\n"
            f"Its owner can save the state dict alone: torch.save(model.state_dict(), FILE).\n{reason}",
            code="network.weights.invalid",
        ) from None
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(map(_is_plain, content, content.values())):
        raise InvalidInput(
            f"{path} holds more than named tensors. Save its state dict alone: "
            "torch.save(model.state_dict(), FILE).",
            code="network.weights.invalid",
        )
    return {name.removeprefix("module."): tensor.detach() for name, tensor in content.items()}


def _refuse_expanding(path: Path) -> None:
    """Refuse a zip file with more content than bytes: PyTorch compresses nothing, and reads all of it."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("its content is compressed, which PyTorch never does")


def _is_plain(name: object, value: object) -> bool:
    """Tell whether this is a name and a tensor with its own numbers."""
    if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized and not value.is_complex()


def _names_of_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of torchvision's ConvNeXt; its ResNets have the names of timm."""
    if "features.1.0.layer_scale" not in tensors:
        return tensors
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, of_timm in TORCHVISION_CONVNEXT:
            name = re.sub(pattern, of_timm, name)
        renamed[name] = tensor.flatten() if name.endswith("gamma") else tensor
    return renamed


def _hub_tensors(name: str) -> dict[str, Tensor]:
    import timm

    try:
        return timm.create_model(name, pretrained=True, num_classes=0).state_dict()
    except RuntimeError as error:
        message = f"network.weights: the hub has none for {name} ({error}). Give a safetensors file."
        raise InvalidInput(message, code="network.weights.unavailable") from None
    except OSError as error:
        reason = str(error).splitlines()[0]
        message = f"network.weights: no connection to the hub ({reason}). Give a safetensors file."
        raise InvalidInput(message, code="network.weights.unreachable") from None


@dataclass(frozen=True)
class Fit:
    """How the tensors of a file fit a backbone without its classifier."""

    backbone: str
    tensors: dict[str, Tensor]
    """Those that fit, by the names of timm."""
    missing: list[str]
    misshapen: list[str]
    head: list[str]
    """Tensors of a classifier, which are left out."""
    foreign: list[str]
    """Tensors of another network."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], backbone: str) -> "Fit":
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # shapes alone, and no draws
            wanted = create_model(backbone).state_dict()
        is_shaped = {k: wanted[k].shape == tensors[k].shape for k in wanted if k in tensors}
        others = [key for key in tensors if key not in wanted]
        head = [key for key in others if HEAD.match(key)]
        return cls(
            backbone,
            tensors={key: tensors[key] for key, fits in is_shaped.items() if fits},
            missing=sorted(k for k in wanted if k not in tensors and not _is_counter(k)),
            misshapen=sorted(key for key, fits in is_shaped.items() if not fits),
            head=head,
            foreign=sorted(key for key in others if key not in head and not _is_counter(key)),
        )

    @property
    def problems(self) -> list[str]:
        return [*self.missing, *self.misshapen, *self.foreign]

    def lack(self) -> str:
        """Say what does not fit, with an example."""
        foreign = f", {len(self.foreign)} of another network" if self.foreign else ""
        return (
            f"{len(self.missing)} tensors missing, {len(self.misshapen)} of another shape{foreign}, "
            f"e.g. {self.problems[0]}"
        )


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def recognize(tensors: Mapping[str, Tensor]) -> Fit | None:
    """Find the known backbone that tensors fit without a rest."""
    fits = (Fit.of(tensors, backbone) for backbone in KNOWN)
    return next((fit for fit in fits if not fit.problems), None)


# Registered weights.


def weights_folder() -> Path | None:
    """Return the folder of registered weights, as the XDG base directories have it; None without a home."""
    data = os.environ.get("XDG_DATA_HOME", "")
    place = Path(data if os.path.isabs(data) else os.path.expanduser("~/.local/share"))
    return place / "medcil" / "weights" if place.is_absolute() else None


def registered_weights() -> list[Weights]:
    """List registered weights, the newest first."""
    found = map(_registered, _names())
    return sorted(found, key=lambda weights: weights.registered or "", reverse=True)


def _names() -> list[str]:
    folder = weights_folder()
    return [] if folder is None else sorted(path.stem for path in folder.glob("*.json"))


def weights_for(backbone: str | None, *, else_for: str) -> Weights | None:
    """Return the newest registered weights of a backbone, whatever the tag after the dot.

    Without a backbone: those for `else_for`, or else of any backbone.
    """
    registered = registered_weights()
    base = (backbone or else_for).partition(".")[0]
    fitting = [weights for weights in registered if weights.backbone.partition(".")[0] == base]
    return next(iter(fitting or ([] if backbone else registered)), None)


def origin_of(name: str | None, backbone: str) -> dict[str, str | None]:
    """Describe the weights that a model started from; random ones have no name."""
    weights = None if name is None else find_weights(name, backbone)
    return {key: getattr(weights, key, None) for key in ("name", "sha256", "source", "license")}


def _registered(name: str) -> Weights:
    folder = _folder()
    place = folder / f"{name}.json"
    content = read_json(place)
    try:
        mean, std = content["mean"], content["std"]
        return Weights(
            name,
            content["backbone"],
            folder / f"{name}.safetensors",
            source=content["source"],
            license=content["license"],
            registered=content["registered"],
            registered_sha256=content["sha256"],
            registered_normalization=None if mean is None else (tuple(mean), tuple(std)),
        )
    except (KeyError, TypeError):
        raise DamagedFile(
            f"{place} is damaged. Run `medcil weights remove {name}` and add the file again.",
            code="weights.entry.damaged",
        ) from None


def _folder() -> Path:
    if (folder := weights_folder()) is None:
        raise InvalidInput(
            "There is no home folder for weights. Set XDG_DATA_HOME to an absolute path.",
            code="weights.folder.missing",
        )
    return folder


def add_weights(
    file: Path, *, backbone: str | None = None, license: str | None = None, source: str | None = None
) -> tuple[Weights, Fit]:
    """Check a local file, and copy what a backbone needs of it into the folder of registered weights.

    The same numbers have the same name; adding them again changes what is said of them.
    """
    folder, tensors = _folder(), read_tensors(file)
    fit = _fitting(file, tensors, backbone)
    used = {
        k: fit.tensors[k].clone(memory_format=torch.contiguous_format)
        for k in sorted(fit.tensors)
        if not _is_counter(k)
    }
    if unusable := [key for key, tensor in used.items() if not tensor.float().isfinite().all()]:
        raise InvalidInput(
            f"{file} holds numbers that are not finite, in {unusable[0]}. Give another file.",
            code="weights.file.not_finite",
        )
    content = safetensors.torch.save(used)
    digest = sha256(content)
    name = f"{fit.backbone}-{digest[:8]}"
    entry = folder / f"{name}.json"
    earlier = read_json(entry) if entry.is_file() else {}
    mean, std = normalization_of(fit.backbone) or (None, None)
    facts = {
        "format": FORMAT,
        "backbone": fit.backbone,
        "sha256": digest,
        "mean": mean,
        "std": std,
        "source": source or earlier.get("source"),
        "license": license or earlier.get("license"),
        "registered": earlier.get("registered") or datetime.now(UTC).isoformat(timespec="seconds"),
        "added_from": {"file": file.name, "sha256": sha256(file.read_bytes())},
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        write_bytes(folder / f"{name}.safetensors", content)
        write_json(entry, facts)  # last: this registers the file
    return _registered(name), fit


def _fitting(file: Path, tensors: Mapping[str, Tensor], backbone: str | None) -> Fit:
    """Return how the tensors fit the backbone, or the known one that they fit; refuse half a fit."""
    fits = [Fit.of(tensors, name) for name in (KNOWN if backbone is None else (backbone,))]
    best = min(fits, key=lambda fit: len(fit.problems))
    if not best.problems:
        return best
    listed = "\n".join(f"  {name}" for name in best.problems[:20])
    if backbone is None:
        raise InvalidInput(
            f"{file} fits none of the known backbones. Name its own with --backbone, if it is a whole file.\n"
            f"The nearest is {best.backbone}: {best.lack()}.\n{listed}",
            code="weights.backbone.unknown",
        )
    raise InvalidInput(
        f"{file} does not fit {backbone}. Give another --backbone or file.\n{best.lack()}\n{listed}",
        code="weights.backbone.mismatch",
    )


def remove_weights(name: str) -> None:
    """Remove registered weights; models that began with them have their own and stay."""
    folder = _folder()
    if name not in (names := _names()):
        raise InvalidInput(
            f"No registered weights are called {name!r}. {nearest(name, names)}", code="weights.name.unknown"
        )
    with writing(folder):
        (folder / f"{name}.json").unlink()
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
