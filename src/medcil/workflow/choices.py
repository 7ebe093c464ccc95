"""Settings from the images: what a practitioner would otherwise have to know. Each comes with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medcil.bench.search import alpha_from_counts
from medcil.build import parse_recipe, resolve
from medcil.config import RunConfig
from medcil.data.catalog import OWN
from medcil.engine.draws import EXEMPLAR_SHARE
from medcil.recipe import laid_over
from medcil.suite import nested

SIDES = (32, 64, 128, 256)
CROPS = {32: 28, 64: 56, 128: 112, 256: 224}
SIDE_WITHOUT_GPU = 64
IMAGES_SEEN = {False: 100_000, True: 50_000}
"""Over all epochs, without and with pretrained weights: minutes on a CPU at 64 pixels."""
EPOCHS = (10, 100)
BATCHES = {32: 320, 16: 80}
"""Batch sizes, and the fewest images for which an epoch of such batches has ten or five steps."""
BASE = {"name": "balanced", "distillation": "kl", "distillation_weight": 1.0}
"""What `gaussians` stands around where nothing is said, so that more can be said of it."""


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

    def laid_over(self, earlier: Mapping[str, Any]) -> "Asked":
        """With what was asked for when the model was trained, where nothing else is said now."""
        now = {"method": self.method, "training.epochs": self.epochs, "memory": self.exemplars}
        overruled = tuple(key for key, value in now.items() if value is not None)
        kept = [one for one in earlier.get("set", ()) if not _is_of(one, overruled)]
        return Asked(
            method=self.method or earlier.get("method"),
            epochs=self.epochs or earlier.get("epochs"),
            exemplars=self.exemplars or earlier.get("exemplars"),
            set=(*kept, *self.set),
        )

    def to_keep(self) -> dict[str, Any]:
        """What concerns later updates too, without any path."""
        kept = [setting for setting in self.set if not _is_of(setting, ("network", "data", "execution"))]
        return {"method": self.method, "epochs": self.epochs, "exemplars": self.exemplars, "set": kept}


def _is_of(setting: str, keys: tuple[str, ...]) -> bool:
    """Whether a `key.subkey=value` says something of one of these keys."""
    said = setting.partition("=")[0].strip()
    return any(said == key or said.startswith(f"{key}.") for key in keys)


def settings_to_train(
    counts: Sequence[int], shorter_side: int, asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """For a model's first classes, of so many images each."""
    side, why = _side(shorter_side)
    side, why = (asked.side, "asked for") if asked.side else (side, why)
    is_pretrained = asked.weights is not None
    backbone = "resnet18" if side > SIDES[0] or is_pretrained else "resnet20_cifar"
    rate = 0.001 if is_pretrained else 0.01
    choices = [
        Choice("data.side", side, why),
        Choice("data.crop", CROPS.get(side, max(1, side * 7 // 8)), "seven eighths of it"),
        _asked_or("network.backbone", asked.backbone, backbone, f"usual for {side} pixels"),
        Choice("network.weights", asked.weights, "asked for" if is_pretrained else "none were given"),
        Choice(
            "training.learning_rates",
            {"classifier": 0.1, "backbone": rate},
            "pretrained weights move slowly" if is_pretrained else "random weights have far to go",
        ),
        *_of_training(sum(counts), counts, asked, is_pretrained=is_pretrained),
    ]
    content: dict[str, Any] = {"data": {"name": OWN}, "scenario": {"steps": [len(counts)]}}
    return _config(content, choices, asked)


def settings_to_update(
    parent: Mapping[str, Any], old_counts: Sequence[int], new_counts: Sequence[int], asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """The parent's, but for what depends on how many images there are."""
    is_pretrained = parent["network"]["weights"] is not None
    per_class = asked.exemplars or parent["memory"]["per_class"] or 20
    n_new, n_exemplars = sum(new_counts), sum(min(per_class, n) for n in old_counts)
    counts = [*old_counts, *new_counts]
    choices = _of_training(n_new + n_exemplars, counts, asked, is_pretrained=is_pretrained)
    where = _place_of_balanced(choices[0].value, asked)
    if where is not None and n_exemplars >= EXEMPLAR_SHARE * n_new:
        # A stream of their own would bring hardly more exemplars than there are, in fewer batches.
        why = f"{n_exemplars:,} exemplars to {n_new:,} new images: enough in every batch"
        choices.append(Choice(f"{where}.sampler", None, why))
    content = {**parent, "label": None, "method": {}, "scenario": {"steps": [len(new_counts)]}}
    return _config(content, choices, asked)


def _config(
    content: Mapping[str, Any], choices: Sequence[Choice], asked: Asked
) -> tuple[RunConfig, list[Choice]]:
    """And the choices, without those that --set overrules."""
    content = dict(content)
    for choice in choices:
        content = laid_over(content, nested(choice.key, choice.value))
    config = resolve(parse_recipe(content, asked.set, source="the settings"))
    said = [setting.partition("=") for setting in asked.set]
    left = [c for c in choices if not any(_is_of(c.key, (key.strip(),)) for key, _, _ in said)]
    return config, [*left, *(Choice(key.strip(), value, "asked for") for key, _, value in said)]


def _of_training(
    n_images: int, class_counts: Sequence[int], asked: Asked, *, is_pretrained: bool
) -> list[Choice]:
    seen = IMAGES_SEEN[is_pretrained]
    epochs = min(EPOCHS[1], max(EPOCHS[0], round(seen / n_images)))
    batch = next((size for size, fewest in BATCHES.items() if n_images >= fewest), 8)
    per_class = asked.exemplars or 20
    choices = [
        _asked_or("method.name", asked.method, "balanced", "made for classes of unequal size"),
        _asked_or(
            "training.epochs", asked.epochs, epochs, f"about {seen:,} images seen, {EPOCHS[0]} to {EPOCHS[1]}"
        ),
        Choice("training.batch_size", batch, f"{n_images:,} images"),
        _asked_or("memory.per_class", asked.exemplars, 20, "as in the published experiments"),
    ]
    where = _place_of_balanced(choices[0].value, asked)
    if where == "method.base":
        choices.append(Choice(where, BASE, "the method it stands around"))
    if where is not None:
        alpha = alpha_from_counts(class_counts, per_class)
        choices.append(Choice(f"{where}.alpha", alpha, "from the class counts; docs/tuning.md"))
    return choices


def _place_of_balanced(method: str, asked: Asked) -> str | None:
    """Where in a recipe the settings of `balanced` are, if it is at work."""
    said = {setting.partition("=")[0].strip() for setting in asked.set}
    if method == "gaussians" and not said & {"method.base", "method.base.name"}:
        return "method.base"
    return "method" if method == "balanced" else None


def _asked_or(key: str, asked: Any, otherwise: Any, why: str) -> Choice:
    return Choice(key, otherwise, why) if asked is None else Choice(key, asked, "asked for")


def _side(shorter_side: int) -> tuple[int, str]:
    """The smallest usual side that loses little of the images."""
    side = next((usual for usual in SIDES if usual >= 0.8 * shorter_side), SIDES[-1])
    if side > SIDE_WITHOUT_GPU and not torch.cuda.is_available():
        return SIDE_WITHOUT_GPU, f"there is no GPU here; the images would suffice for {side}"
    return side, f"images have {shorter_side} pixels on the shorter side"
