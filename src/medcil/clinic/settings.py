"""Settings from the images: what a practitioner would otherwise have to know. Each comes with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medcil.build import resolve, with_preset
from medcil.config import MemoryConfig, RunConfig
from medcil.data.catalog import OWN
from medcil.errors import InvalidInput
from medcil.methods.presets import alpha_from_counts
from medcil.recipe import laid_over, leaves, nested, override, parse_config, place_of, with_name
from medcil.training.sampling import EXEMPLAR_SHARE

SIDES = (32, 64, 128, 256)
CROPS = {32: 28, 64: 56, 128: 112, 256: 224}
SIDE_WITHOUT_GPU = 64
IMAGES_SEEN = {False: 100_000, True: 50_000}
"""Over all epochs, without and with pretrained weights: minutes on a CPU at 64 pixels."""
EPOCHS = (10, 100)
BATCHES = {32: 320, 16: 80}
"""Batch sizes, and the fewest images for which an epoch of such batches has ten or five steps."""
BALANCED = "balanced"
"""The method where none is asked for; what is known of α and of drawing batches is known of it."""


@dataclass(frozen=True)
class Choice:
    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Asked:
    """What someone asked for; it goes before any choice, in this update and in later ones."""

    method: str | None = None
    epochs: int | None = None
    exemplars: int | None = None
    side: int | None = None
    backbone: str | None = None
    weights: str | None = None
    set: tuple[str, ...] = ()

    def check(self) -> None:
        """Before any work: what contradicts itself, and what no model folder is written with."""
        for setting in self.set:
            for option, (key, value) in self._options().items():
                heard = dict(leaves(laid_over(nested(key, value), _piece((setting,)))))
                if heard.get(key) != value:
                    raise InvalidInput(
                        f"{option} {value} and --set {setting} contradict each other: give one of them."
                    )
        processes = dict(leaves(self.said())).get("execution.processes", 1)
        if processes != 1:
            raise InvalidInput(
                f"execution.processes={processes}: a model folder is written by one process. Leave it out; "
                "`medcil run` and `medcil bench` train with several."
            )

    def said(self) -> dict[str, Any]:
        """All of it, as a piece of a recipe."""
        piece: dict[str, Any] = {}
        for key, value in self._options().values():
            piece = laid_over(piece, nested(key, value))
        return laid_over(piece, _piece(self.set))

    def _options(self) -> dict[str, tuple[str, Any]]:
        """Those that were given, each with the setting that it stands for."""
        options = {
            "--method": ("method.name", self.method),
            "--epochs": ("training.epochs", self.epochs),
            "--exemplars": ("memory.per_class", self.exemplars),
            "--side": ("data.side", self.side),
            "--backbone": ("network.backbone", self.backbone),
            "--weights": ("network.weights", self.weights),
        }
        return {option: (key, value) for option, (key, value) in options.items() if value is not None}

    def settings(self, content: Mapping[str, Any]) -> RunConfig:
        """The content, the preset that was asked for over it, and all that was asked for over both."""
        heard = with_preset(laid_over({"method": {"name": BALANCED}}, self.said()))
        return resolve(parse_config(laid_over(content, heard), source="the settings"))

    def laid_over(self, earlier: Mapping[str, Any]) -> "Asked":
        """With what was asked for when the model was trained, where nothing else is said now."""
        now = [key for key, _ in leaves(self.said())]
        is_said_now = {
            "method": "method.name" in now,
            "memory": any(_is_of(key, ("memory",)) for key in now),
            "training.epochs": self.epochs is not None,
        }
        overruled = tuple(key for key, is_said in is_said_now.items() if is_said)
        kept = [one for one in earlier.get("set", ()) if not _is_of(one, overruled)]
        return Asked(
            method=self.method or earlier.get("method"),
            epochs=self.epochs or earlier.get("epochs"),
            exemplars=self.exemplars if is_said_now["memory"] else earlier.get("exemplars"),
            set=(*kept, *self.set),
        )

    def to_keep(self) -> dict[str, Any]:
        """What concerns later updates too, without any path."""
        kept = [setting for setting in self.set if not _is_of(setting, ("network", "data", "execution"))]
        return {"method": self.method, "epochs": self.epochs, "exemplars": self.exemplars, "set": kept}


def _piece(settings: Sequence[str]) -> dict[str, Any]:
    """What `key.subkey=value` say, as a piece of a recipe."""
    piece = override({}, settings)
    return {key: with_name(value) if key == "method" else value for key, value in piece.items()}


def _is_of(setting: str, keys: tuple[str, ...]) -> bool:
    """Whether a `key.subkey=value` says something of one of these keys."""
    said = setting.partition("=")[0].strip()
    return any(said == key or said.startswith(f"{key}.") for key in keys)


def settings_to_train(
    counts: Sequence[int], shorter_side: int, asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """For a model's first classes, of so many images each."""
    # Until a crop is chosen, one that fits every side that may be asked for.
    content: dict[str, Any] = {"data": {"name": OWN, "crop": 1}, "scenario": {"steps": [len(counts)]}}
    heard = asked.settings(content)
    side, why = _side(shorter_side)
    if "side" in asked.said().get("data", {}):
        side = heard.data.side
    is_pretrained = heard.network.weights is not None
    backbone = "resnet18" if side > SIDES[0] or is_pretrained else "resnet20_cifar"
    rate = 0.001 if is_pretrained else 0.01
    choices = [
        Choice("data.side", side, why),
        Choice("data.crop", CROPS.get(side, max(1, side * 7 // 8)), "seven eighths of it"),
        Choice("network.backbone", backbone, f"usual for {side} pixels"),
        Choice("network.weights", None, "none were given"),
        Choice(
            "training.learning_rates",
            {"classifier": 0.1, "backbone": rate},
            "pretrained weights move slowly" if is_pretrained else "random weights have far to go",
        ),
        *_of_training(sum(counts), counts, heard, is_pretrained=is_pretrained),
        Choice("memory.per_class", MemoryConfig().quota(len(counts)), "as in the published experiments"),
    ]
    return _decided(content, choices, asked)


def settings_to_update(
    parent: Mapping[str, Any], old_counts: Sequence[int], new_counts: Sequence[int], asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """The parent's, but for what depends on how many images there are."""
    # An update has no first task: what the model's had must not contradict the schedule of another method.
    not_kept: dict[str, Any] = {"label": None, "method": {}, "first_task": {}}
    content = {**parent, **not_kept, "scenario": {"steps": [len(new_counts)]}}
    heard = asked.settings(content)
    is_pretrained = parent["network"]["weights"] is not None
    per_class = MemoryConfig(**parent["memory"]).quota(len(old_counts))
    n_new, n_exemplars = sum(new_counts), sum(min(per_class, n) for n in old_counts)
    counts = [*old_counts, *new_counts]
    choices = _of_training(n_new + n_exemplars, counts, heard, is_pretrained=is_pretrained)
    balanced = place_of(BALANCED, heard.method)
    if balanced is not None and n_exemplars >= EXEMPLAR_SHARE * n_new:
        # A stream of their own would bring hardly more exemplars than there are, in fewer batches.
        why = f"{n_exemplars:,} exemplars to {n_new:,} new images: enough in every batch"
        choices.append(Choice(f"{balanced[0]}.sampler", None, why))
    return _decided(content, choices, asked)


def _of_training(
    n_images: int, class_counts: Sequence[int], heard: RunConfig, *, is_pretrained: bool
) -> list[Choice]:
    seen = IMAGES_SEEN[is_pretrained]
    epochs = min(EPOCHS[1], max(EPOCHS[0], round(seen / n_images)))
    batch = next((size for size, fewest in BATCHES.items() if n_images >= fewest), 8)
    n_classes = len(class_counts)
    heard.memory.check_suffices(n_classes)
    choices = [
        Choice("method.name", heard.method["name"], "made for classes of unequal size"),
        Choice("training.epochs", epochs, f"about {seen:,} images seen, {EPOCHS[0]} to {EPOCHS[1]}"),
        Choice("training.batch_size", batch, f"{n_images:,} images"),
    ]
    if (balanced := place_of(BALANCED, heard.method)) is not None:
        alpha = alpha_from_counts(class_counts, heard.memory.quota(n_classes))
        choices.append(Choice(f"{balanced[0]}.alpha", alpha, "from the class counts; docs/how-to/tune.md"))
    return choices


def _decided(
    content: Mapping[str, Any], choices: Sequence[Choice], asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """What was asked for, over what was chosen; and of both, what came to be."""
    for choice in choices:
        content = laid_over(content, nested(choice.key, choice.value))
    config = asked.settings(content)
    said = {key: Choice(key, value, "asked for") for key, value in leaves(asked.said())}
    shown = {choice.key: choice for choice in choices} | said
    held = config.model_dump()
    return config, [one for one in shown.values() if one.key in said or _at(one.key, held) == one.value]


def _at(key: str, content: Any) -> Any:
    for part in key.split("."):
        content = content[part]
    return content


def _side(shorter_side: int) -> tuple[int, str]:
    """The smallest usual side that loses little of the images."""
    side = next((usual for usual in SIDES if usual >= 0.8 * shorter_side), SIDES[-1])
    if side > SIDE_WITHOUT_GPU and not torch.cuda.is_available():
        return SIDE_WITHOUT_GPU, f"there is no GPU here; the images would suffice for {side}"
    return side, f"images have {shorter_side} pixels on the shorter side"
