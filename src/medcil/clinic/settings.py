"""Choose settings from the images, each with its reason."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from medcil.build import RunConfig, method_settings, resolve, with_preset
from medcil.config import MemoryConfig
from medcil.data.image_table import OWN
from medcil.errors import InvalidInput
from medcil.methods.outline import outline
from medcil.methods.presets import alpha_from_counts
from medcil.methods.protocol import Method
from medcil.models.weights import backbone_of, fixed_side, weights_for
from medcil.readouts import keeps_statistics
from medcil.recipe import laid_over, leaves, nested, override, parse, place_of, with_name, with_values
from medcil.training.sampling import EXEMPLAR_SHARE

SIDES = (32, 64, 128, 256)
SIDE_WITHOUT_GPU = 64
IMAGES_SEEN = {False: 100_000, True: 50_000}
"""Over all epochs, without and with pretrained weights: minutes on a CPU at 64 pixels."""
EPOCHS = (10, 100)
BATCHES = {32: 320, 16: 80}
"""Batch sizes, and the fewest images for which an epoch of such batches has ten or five steps."""
BALANCED = "balanced"
"""The default method, and the one that α and the way of drawing batches are chosen for."""
ANALYTIC = "analytic"
FEATURES: Mapping[bool, Mapping[str, Any]] = {
    False: {"stages": 2, "pretrained": False},
    True: {"stages": 2, "pretrained": True},
}
"""What `analytic` reads of an image, without and with pretrained weights: `pretrained`, a second network."""
VIEWS = 1
"""Of an image, where a method keeps statistics. Every view takes a pass of every network."""
USUAL = "resnet18"
"""The backbone for images of more than the smallest side."""
ASKED = "asked for"
Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """What `train` or `update` would do, for `--dry-run`."""

    version: str
    parent: str | None
    remarks: tuple[str, ...]
    """How the files of the images were understood."""
    images: dict[str, int]
    """Training images of each class."""
    known: dict[str, int] | None
    """Of those classes that the model knows: how many images they were learned from; None without a model."""
    holdout: dict[str, int]
    visible_losses: dict[str, float | None]
    """The smallest loss of each new class that so many sealed images can show."""
    choices: list[Choice]
    epochs: int
    """0 for a method that does not train."""
    images_per_epoch: int
    seconds: float | None
    """On this machine, or for an update on one like that of the parent; None if the pace is unknown."""


OPTIONS = {
    "method": "method.name",
    "epochs": "training.epochs",
    "exemplars": "memory.per_class",
    "side": "data.side",
    "backbone": "network.backbone",
    "weights": "network.weights",
}
"""The settings that options of `train` and `update` set."""


def requested(settings: Sequence[str] = (), **options: str | int | None) -> Recipe:
    """Put the options and `key.subkey=value` settings into one piece of a recipe; refuse contradictions."""
    piece: Recipe = {}
    for option, value in options.items():
        if value is None:
            continue
        key = OPTIONS[option]
        piece = laid_over(piece, nested(key, value))
        for setting in settings:
            if dict(leaves(laid_over(nested(key, value), _piece((setting,))))).get(key) != value:
                raise InvalidInput(
                    f"--{option} {value} and --set {setting} contradict each other: give one of them.",
                    code="option.contradiction",
                )
    piece = laid_over(piece, _piece(settings))
    if (processes := dict(leaves(piece)).get("execution.processes", 1)) != 1:
        raise InvalidInput(
            f"execution.processes={processes}: one process trains a model folder. Leave it out.",
            code="model.processes.unsupported",
        )
    return piece


def _piece(settings: Sequence[str]) -> Recipe:
    piece = override({}, settings)
    return {key: with_name(value) if key == "method" else value for key, value in piece.items()}


def settings_to_train(
    counts: Sequence[int], shorter_side: int, piece: Recipe
) -> tuple[RunConfig, list[Choice]]:
    """Choose the settings for the first classes of a model, from the number of images of each."""
    # Until a crop is chosen: one that fits every side.
    content: dict[str, Any] = {"data": {"name": OWN, "crop": 1}, "scenario": {"steps": [len(counts)]}}
    resolved = _resolved(content, piece)
    network = _of_network(shorter_side, resolved, piece)
    images = _of_images(shorter_side, network[0].value, resolved, piece)
    resolved = _resolved(with_values(content, {choice.key: choice.value for choice in network}), piece)
    is_pretrained = resolved.network.weights is not None
    rate = 0.001 if is_pretrained else 0.01
    choices = [
        *images,
        *network,
        Choice(
            "training.learning_rates",
            {"classifier": 0.1, "backbone": rate},
            "pretrained weights move slowly" if is_pretrained else "random weights have far to go",
        ),
        *_of_training(sum(counts), counts, resolved),
        *_of_memory(len(counts), resolved),
    ]
    return _decided(content, choices, piece)


def side_to_train(shorter_side: int, piece: Recipe) -> int:
    """Return the side that `settings_to_train` chooses, before the images are counted."""
    content: dict[str, Any] = {"data": {"name": OWN, "crop": 1}, "scenario": {"steps": [2]}}
    resolved = _resolved(content, piece)
    backbone = _of_network(shorter_side, resolved, piece)[0].value
    side = _of_images(shorter_side, backbone, resolved, piece)[0].value
    return _resolved(with_values(content, {"data.side": side}), piece).data.side


def _asked_side(resolved: RunConfig, piece: Recipe) -> int | None:
    return resolved.data.side if "side" in piece.get("data", {}) else None


def _of_network(shorter_side: int, resolved: RunConfig, piece: Recipe) -> list[Choice]:
    """Choose the backbone and its weights: those that are asked for, else registered ones, else none."""
    asked = _with_preset({}, piece).get("network", {})
    backbone = resolved.network.backbone if "backbone" in asked else None
    if (weights := resolved.network.weights) is not None:
        of_file = backbone or backbone_of(weights) or USUAL
        return [
            Choice("network.backbone", of_file, "that of the weights"),
            Choice("network.weights", weights, ASKED),
        ]
    if "weights" not in asked and (registered := weights_for(backbone, else_for=USUAL)) is not None:
        return [
            Choice("network.backbone", backbone or registered.backbone, "its weights are registered"),
            Choice("network.weights", registered.name, "registered; another or none: --weights"),
        ]
    side = _asked_side(resolved, piece) or _side(shorter_side)[0]
    usual = USUAL if side > SIDES[0] else "resnet20_cifar"
    return [
        Choice("network.backbone", backbone or usual, f"usual for {side} pixels"),
        Choice("network.weights", None, "none are registered: `medcil weights`"),
    ]


def _of_images(shorter_side: int, backbone: str, resolved: RunConfig, piece: Recipe) -> list[Choice]:
    """Choose the side of the images and of the crop, which some backbones take in one size only."""
    asked, fixed = _asked_side(resolved, piece), fixed_side(backbone)
    side, why = _side(shorter_side)
    if fixed is not None and (asked or fixed) >= fixed:
        why = f"{backbone} takes {fixed} pixels"
        return [Choice("data.side", asked or -(-fixed * 8 // 7), why), Choice("data.crop", fixed, why)]
    side = asked or side
    return [
        Choice("data.side", side, why),
        Choice("data.crop", max(1, side * 7 // 8), "seven eighths of it"),
    ]


def settings_to_update(
    parent: Recipe, asked: Sequence[str], old_counts: Sequence[int], new_counts: Sequence[int], piece: Recipe
) -> tuple[RunConfig, list[Choice]]:
    """Merge the piece into the parent's settings; what depends on the images is chosen again, but for `asked`
    keys."""
    # An update has no first task: what the model's had must not contradict the schedule of another method.
    steps = {"steps": [len(new_counts)]}
    content: Recipe = {**parent, "label": None, "first_task": {}, "scenario": steps}
    chosen = {"training.epochs", "training.batch_size"}
    per_class = MemoryConfig(**parent["memory"]).quota(len(old_counts))
    if _with_preset(parent, piece)["method"]["name"] != parent["method"]["name"]:
        content = {**content, "method": {}}
        chosen |= set() if per_class else {"memory.per_class"}
    if (balanced := place_of(BALANCED, parent["method"])) is not None:
        chosen |= {f"{balanced[0]}.alpha", f"{balanced[0]}.sampler"}
    for key in chosen - set(asked):
        content = _without(content, key.split("."))
    resolved = _resolved(content, piece)
    n_new, n_exemplars = sum(new_counts), sum(min(per_class, n) for n in old_counts)
    choices: list[Choice] = []
    if any(phase.task == "later" for phase in outline(resolved.method)):
        choices = _of_training(n_new + n_exemplars, [*old_counts, *new_counts], resolved)
    if per_class == 0 and not keeps_statistics(resolved.method.readout):
        choices += _of_memory(len(old_counts) + len(new_counts), resolved)
    balanced = place_of(BALANCED, method_settings(resolved.method))
    if balanced is not None and n_exemplars >= EXEMPLAR_SHARE * n_new:
        # Plain batches hold nearly as many exemplars as a separate stream would bring.
        why = f"{n_exemplars:,} exemplars to {n_new:,} new images: enough in every batch"
        choices.append(Choice(f"{balanced[0]}.sampler", None, why))
    still_asked = asked_keys(parent, asked, piece)
    return _decided(content, [choice for choice in choices if choice.key not in still_asked], piece)


def method_to_update(parent: Recipe, piece: Recipe) -> Method:
    """Return the method that `settings_to_update` chooses, before the images are counted."""
    return settings_to_update(parent, (), [1], [1], piece)[0].method


def settings_to_start(other: Recipe, counts: Sequence[int], piece: Recipe) -> tuple[RunConfig, list[Choice]]:
    """Take over the settings of the model whose network a new model starts from.

    Nothing that the features or the classifier depend on may differ: the two models are to be merged.
    """
    content = {**other, "label": None, "scenario": {"steps": [len(counts)]}, "memory": {"per_class": 0}}
    choices = [
        Choice("network.backbone", other["network"]["backbone"], "of the model of --from, and frozen"),
        Choice("memory.per_class", 0, "sums over all images are kept instead"),
    ]
    config, in_effect = _decided(content, choices, piece)
    was, now = dict(leaves(other)), config.identity()
    for key, value in leaves({part: now[part] for part in ("method", "network", "data")}):
        if key != "data.augmentation" and was.get(key, value) != value:
            raise InvalidInput(
                f"{key}={value} differs from {was[key]}, which the model of --from has. Leave it out.",
                code="model.start.settled",
            )
    return config, in_effect


def asked_keys(parent: Recipe, asked: Sequence[str], piece: Recipe) -> list[str]:
    """List the keys that someone has set, now or for an earlier version; another method forgets those of its
    predecessor."""
    before = parent.get("method", {}).get("name", BALANCED)
    over = _with_preset(parent, piece)
    is_same_method = over["method"]["name"] == before
    earlier = [key for key in asked if is_same_method or not key.startswith("method.")]
    return sorted({*earlier, *(key for key, _ in leaves(over)), "method.name"})


def inherited(
    config: RunConfig, choices: Sequence[Choice], parent: Recipe, asked: Sequence[str], version: str
) -> list[Choice]:
    """List what an update takes over: settings that have an option, and those that someone has set."""
    chosen = {choice.key for choice in choices}
    before, now = dict(leaves(parent)), dict(leaves(config.identity()))
    return [
        Choice(key, now[key], f"inherited from {version}")
        for key in dict.fromkeys([*OPTIONS.values(), *asked])
        if key not in chosen and now.get(key) is not None and now[key] == before.get(key)
    ]


def _without(content: Recipe, key: Sequence[str]) -> Recipe:
    first, *rest = key
    if rest and first in content:
        return {**content, first: _without(content[first], rest)}
    return {name: value for name, value in content.items() if name != first}


def _with_preset(content: Recipe, piece: Recipe) -> Recipe:
    name = content.get("method", {}).get("name", BALANCED)
    return with_preset(laid_over({"method": {"name": name}}, piece))


def _resolved(content: Recipe, piece: Recipe) -> RunConfig:
    """Merge the preset that the piece names into the content, and the piece into both."""
    over = _with_preset(content, piece)
    return resolve(parse(laid_over(content, over), RunConfig, source="the settings"))


def _of_training(n_images: int, class_counts: Sequence[int], resolved: RunConfig) -> list[Choice]:
    seen = IMAGES_SEEN[resolved.network.weights is not None]
    epochs = min(EPOCHS[1], max(EPOCHS[0], round(seen / n_images)))
    batch = next((size for size, fewest in BATCHES.items() if n_images >= fewest), 8)
    n_classes = len(class_counts)
    resolved.memory.check_suffices(n_classes)
    choices = [
        Choice("method.name", method_settings(resolved.method)["name"], "made for classes of unequal size"),
        Choice("training.epochs", epochs, f"about {seen:,} images seen, {EPOCHS[0]} to {EPOCHS[1]}"),
        Choice("training.batch_size", batch, f"{n_images:,} images"),
    ]
    if (balanced := place_of(BALANCED, method_settings(resolved.method))) is not None:
        alpha = alpha_from_counts(class_counts, resolved.memory.quota(n_classes))
        choices.append(Choice(f"{balanced[0]}.alpha", alpha, "from the class counts; docs/how-to/tune.md"))
    return choices


def _of_memory(n_classes: int, resolved: RunConfig) -> list[Choice]:
    """Choose how many exemplars are kept, or what statistics are kept of."""
    if not keeps_statistics(resolved.method.readout):
        return [
            Choice("memory.per_class", MemoryConfig().quota(n_classes), "as in the published experiments")
        ]
    choices = [
        Choice("memory.per_class", 0, "sums over all images are kept instead"),
        Choice("data.views", VIEWS, "each takes as long again; 8 for images without an up or down"),
    ]
    if (analytic := place_of(ANALYTIC, method_settings(resolved.method))) is not None:
        is_pretrained = resolved.network.weights is not None
        why = f"{'pretrained' if is_pretrained else 'random'} weights; docs/how-to/train.md"
        choices += [Choice(f"{analytic[0]}.{key}", v, why) for key, v in FEATURES[is_pretrained].items()]
    return choices


def _decided(content: Recipe, choices: Sequence[Choice], piece: Recipe) -> tuple[RunConfig, list[Choice]]:
    """Merge the piece into the choices; return the configuration, and the choices and wishes in effect."""
    for choice in choices:
        content = laid_over(content, nested(choice.key, choice.value))
    config = _resolved(content, piece)
    asked = {key: Choice(key, value, ASKED) for key, value in leaves(piece)}
    shown = {choice.key: choice for choice in choices} | asked
    settled = config.model_dump()
    in_effect = [
        choice
        for key, choice in shown.items()
        if key in asked or reduce(operator.getitem, key.split("."), settled) == choice.value
    ]
    return config, in_effect


def _side(shorter_side: int) -> tuple[int, str]:
    """Return the smallest usual side that loses little of the images."""
    side = next((usual for usual in SIDES if usual >= 0.8 * shorter_side), SIDES[-1])
    if side > SIDE_WITHOUT_GPU and not torch.cuda.is_available():
        return SIDE_WITHOUT_GPU, f"there is no GPU here; the images would suffice for {side}"
    return side, f"images have {shorter_side} pixels on the shorter side"
