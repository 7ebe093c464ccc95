"""Merge models of one frozen network: the statistics of their classes are added, without any image."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from medcil.build import RunConfig
from medcil.clinic.calibration import calibrate
from medcil.clinic.corrections.learned import Learned, hash_images
from medcil.clinic.holdout import Measure, Seen
from medcil.clinic.measure import measured, sealed_or_exemplars
from medcil.clinic.model_dir import FORMAT, Draft, File, LabelledImage, ModelFolder, Source, VersionFolder
from medcil.clinic.train import (
    FIRST,
    Lesson,
    Trained,
    analytic_state,
    check_new_model,
    describe,
    eval_images,
    provenance,
    store,
    write_first,
)
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.sources.folder import folded
from medcil.errors import InvalidInput, nearest
from medcil.readouts.statistics import StatisticsReadout
from medcil.recipe import laid_over, parse
from medcil.storage.atomic import reading, write_json
from medcil.storage.overwrite_guard import check_writable, refuse_within_model
from medcil.training.environment import prepare_machine
from medcil.training.state import State, without_classes


def merge(
    *models: Path | str,
    out: Path | str,
    with_holdouts: bool = False,
    ridge_of_first: bool = False,
    eval: Path | str | None = None,
    rename: Mapping[str, str] | None = None,
) -> Trained:
    """Join models of `analytic` that share the frozen network, as the new model `out`.

    It is the model that would have been trained on the images of all. It contains none of them, unless
    `with_holdouts` copies the sealed ones; `eval` has other images to measure on. `rename` maps names of
    classes to their names in `out`. Classes are those of the first model, then the new ones of the next.
    Models whose ridge ρ differs are refused, unless `ridge_of_first` takes that of the first. One model alone
    is copied without images.
    """
    if not models:
        raise InvalidInput("There is no model to merge. Name one, or several.", code="model.merge.nothing")
    partners: Partners = [Partner.opened(Path(model)) for model in models]
    _refuse_other_features(partners, NUMBERS.keys() - {"ridge" if ridge_of_first else ""})
    _refuse_counting_twice(partners)
    partners = _renamed(partners, rename or {})
    _refuse_similar_names(partners)
    draft = Draft(ModelFolder(Path(out)), FIRST)
    root = draft.model.root
    refuse_within_model(root.resolve().parent)
    with reading(root):
        check_new_model(draft)
    check_writable(root)
    lesson = _lesson(partners)
    state = _added(partners, lesson.class_names)
    prepare_machine(lesson.config.execution)
    seen = Seen(trained=_trained_patients(partners))
    given_eval = None if eval is None else eval_images(Path(eval), lesson, seen)
    sealed = Sealed.of(partners) if with_holdouts else Sealed()
    request = {
        "format": FORMAT,
        "merged_from": _sources(partners),
        "class_names": list(lesson.class_names),
        "with_holdouts": with_holdouts,
        "ridge_of_first": ridge_of_first,
    }
    write = partial(_write, draft, lesson, partners, state, given_eval, sealed)
    return write_first(draft, request, write)


@dataclass(frozen=True, eq=False)
class Partner:
    """One of the models, in its current version."""

    model: ModelFolder
    version: VersionFolder
    state: State
    class_names: tuple[str, ...]
    """Of the state, as the merged model calls them."""

    @classmethod
    def opened(cls, path: Path) -> "Partner":
        model = ModelFolder(path)
        model.refuse_half_erased()
        version = model.version()
        state = analytic_state(version)
        return cls(model, version, state, state.class_names)

    @property
    def readout(self) -> StatisticsReadout:
        assert isinstance(self.state.readout, StatisticsReadout)
        return self.state.readout

    @property
    def seen(self) -> Seen:
        return Seen.by(self.model, self.version)

    @property
    def features(self) -> dict[str, Any]:
        """What an image's features are made of, and whether their moments are pooled."""
        return asdict(self.readout.feature_spec) | {"pooled": self.readout.is_pooled}

    def hashes(self) -> set[str]:
        """Name all versions of the model, and those that they were merged from."""
        versions = [self.model.version(name) for name in self.model.versions]
        merged = [source for version in versions for source in version.provenance().get("merged_from", ())]
        return {version.sha256 for version in versions} | {source["sha256"] for source in merged}


Partners = Sequence[Partner]


def _renamed(partners: Partners, names: Mapping[str, str]) -> Partners:
    known = [name for partner in partners for name in partner.class_names]
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"No model has a class {name!r} to rename. {nearest(name, dict.fromkeys(known))}",
                code="model.merge.rename",
            )
    renamed = []
    for partner in partners:
        new = tuple(names.get(name, name) for name in partner.class_names)
        if len(set(new)) < len(new):
            raise InvalidInput(
                f"Two classes of {partner.model.root} would have one name. Rename them to different ones.",
                code="model.merge.rename",
            )
        renamed.append(replace(partner, class_names=new))
    return renamed


FROZEN = {
    "network.backbone": "The frozen network",
    "readout.companion": "The copy of the network from before the first task",
    "readout.projection": "The random projection",
}
"""Files of tensors that must be equal."""
NUMBERS = {"balance": "β", "ridge": "ρ", "sharpness": "The sharpness of the scores"}
ROUNDING = 1e-9


def _refuse_other_features(partners: Partners, numbers: Set[str]) -> None:
    """Refuse models whose statistics are of different features, or weighed differently."""
    first = partners[0]
    for other in partners[1:]:
        for key, ours in asdict(first.state.preprocessing).items():
            theirs = getattr(other.state.preprocessing, key)
            if key != "augmentation" and ours != theirs:
                raise _different(f"data.{key}", ours, theirs)
        for (key, ours), theirs in zip(first.features.items(), other.features.values(), strict=True):
            if ours != theirs:
                raise _different(f"The feature setting {key}", ours, theirs)
        for part, what in FROZEN.items():
            if first.version.tensors().get(part) != other.version.tensors().get(part):
                raise _different(what)
        for name in sorted(numbers):
            of_both = [float(getattr(partner.readout, name)) for partner in (first, other)]
            if not isclose(*of_both, rel_tol=ROUNDING):
                raise _different(NUMBERS[name], *(f"{number:.6g}" for number in of_both))


def _different(what: str, *values: object) -> InvalidInput:
    detail = ": {} and {}".format(*values) if values else ""
    return InvalidInput(
        f"{what} differs{detail}. Start both models from one: `medcil train --from`.\n"
        "`medcil train DIR --out MODEL --from OTHER` makes a model with the network of OTHER, which can be "
        "merged\nwith OTHER and with every other model that was started from it. Where only ρ differs, "
        "because images\nwere erased or relabelled, `--ridge-of-first` takes that of the first model.",
        code="model.merge.different",
    )


def _refuse_counting_twice(partners: Partners) -> None:
    for a, b in combinations(partners, 2):
        if a.hashes() & b.hashes():
            raise InvalidInput(
                f"{a.model.root} and {b.model.root} have images in common. Each may be counted once.\n"
                "One is a copy of the other, or was merged from it, or both were merged from the same model.",
                code="model.merge.repeated",
            )


def _refuse_similar_names(partners: Partners) -> None:
    """Refuse names that differ in case or spacing only: they may be one class, or two."""
    first_of: dict[str, str] = {}
    for name in (name for partner in partners for name in partner.class_names):
        similar = first_of.setdefault(re.sub(r"[\s_-]+", "", folded(name)), name)
        if similar != name:
            raise InvalidInput(
                f"{name!r} and {similar!r} differ in case or spacing only. Use --rename {name!r}=NAME.\n"
                f"If they are one class, write --rename {name!r}={similar!r}, else give another name.",
                code="model.merge.similar",
            )


def _lesson(partners: Partners) -> Lesson:
    """Describe the new version: no image, the classes of all, and the settings of the first model."""
    names = tuple(dict.fromkeys(name for partner in partners for name in partner.class_names))
    facts = [partner.version.provenance() for partner in partners]
    over = {"label": None, "scenario": {"steps": [len(names)]}, "memory": {"per_class": 0}}
    config = parse(laid_over(facts[0]["settings"], over), RunConfig, source="the settings")
    nothing = np.empty(0, dtype=np.int64)
    table = ImageTable(MemoryFiles({}), (), nothing, names, sha256=())
    asked = tuple(sorted(set(facts[0]["asked"]).intersection(*(own["asked"] for own in facts))))
    per_class = max(own["holdout_per_class"] for own in facts)
    state, weights = without_classes(partners[0].state), facts[0].get("weights")
    return Lesson(table, nothing, nothing, state, None, config, asked, per_class, weights=weights)


def _added(partners: Partners, names: Sequence[str]) -> State:
    """Add the statistics of all, and solve the classifier."""
    state, counts = without_classes(partners[0].state), torch.zeros(len(names), dtype=torch.int64)
    readout, dim = state.readout, state.network.classifier.dim
    assert isinstance(readout, StatisticsReadout)
    for partner in partners:
        labels = [names.index(name) for name in partner.class_names]
        readout.merge(partner.readout, labels)
        counts[labels] += partner.state.inherent_counts
    state.network.grow(F.normalize(readout.sums[:, :dim]).float())
    readout.solve()
    readout.finish_task(torch.zeros(len(names), dim), torch.zeros(len(names)))
    decisions = tuple(dict.fromkeys(decision for partner in partners for decision in partner.state.decisions))
    return replace(state, class_names=tuple(names), inherent_counts=counts, decisions=decisions)


def _write(
    draft: Draft,
    lesson: Lesson,
    partners: Partners,
    state: State,
    given_eval: Measure | None,
    sealed: "Sealed",
) -> None:
    """Write all files, unless the draft has them already. Measure on `--eval`, else on sealed images."""
    version, execution = draft.version, lesson.config.execution
    sealed.write(version)
    state = version.load_state() if version.state_path.exists() else store(draft, lesson, state)
    own = sealed_or_exemplars(version, state)
    measure = given_eval or own
    best = own if len(own.samples) else measure
    calibration = calibrate(state, best.samples, execution, groups=best.groups, measured_on=best.kind)
    calibration.write(version.root / File.CALIBRATION)
    of_class = Counter(entry["class"] for entry in version.holdout_entries())
    facts = {
        **provenance(draft, lesson, state, promoted=True),
        "images": dict(zip(state.class_names, state.inherent_counts.tolist(), strict=True)),
        "holdout": {name: of_class[name] for name in state.class_names},
        "merged_from": _sources(partners),
    }
    figures, _ = measured(measure, None, state, execution)
    describe(version, facts, figures, None)


@dataclass(frozen=True)
class SealedImage:
    content: bytes
    class_name: str
    patient: str
    """Empty where unknown."""
    is_trained_on: bool
    """One of the models has learned from this picture."""


@dataclass(frozen=True)
class Sealed:
    """The hold-out of a merged model."""

    images: tuple[SealedImage, ...] = ()

    @classmethod
    def of(cls, partners: Partners) -> "Sealed":
        """Collect the sealed images of all models that none of them was trained on.

        A patient or a picture may be sealed in one and trained on in another; a picture may be sealed in two,
        in different classes. Such images are left out.
        """
        images = [image for partner in partners for image in _sealed_in(partner, partners)]
        trained = _trained_patients(partners)
        classes = defaultdict[bytes, set[str]](set)
        for image in images:
            classes[image.content].add(image.class_name)
        used = [
            image
            for image in images
            if not image.is_trained_on
            and folded(image.patient) not in trained
            and len(classes[image.content]) == 1
        ]
        if n_left := len(images) - len(used):
            warnings.warn(
                f"{n_left} sealed images are left out: another model was trained on them or on their "
                "patients, or has the same picture in another class.",
                stacklevel=3,
            )
        return cls(tuple(used))

    def write(self, version: VersionFolder) -> None:
        """Write the images, and whose they are. Of other patients nothing is written."""
        if version.has(File.HOLDOUT):
            return
        entries: dict[str, LabelledImage] = {}
        files = defaultdict[str, set[str]](set)
        version.store.create_key()
        for image in self.images:
            name = version.store.put(image.content, "png")
            entries[name] = {"file": name, "class": image.class_name}
            if image.patient:
                files[image.patient].add(f"holdout/{name}")
        if files:
            patients = {patient: sorted(own) for patient, own in sorted(files.items())}
            write_json(version.root / File.PEOPLE, {"format": FORMAT, "patients": patients, "trained": []})
        write_json(version.root / File.HOLDOUT, {"format": FORMAT, "images": list(entries.values())})


def _sealed_in(partner: Partner, partners: Partners) -> Iterator[SealedImage]:
    called = dict(zip(partner.state.class_names, partner.class_names, strict=True))
    owner = {file: patient for patient, own in partner.version.people().items() for file in own}
    samples, trained = partner.version.holdout(), set[int]()
    for other in (other.version for other in partners if other.version.learned() is not None):
        learned = {image.image for image in Learned.read(other).images}
        hashes = hash_images(samples, other.store)
        trained |= {place for place, image in enumerate(hashes) if image in learned}
    for place, entry in enumerate(partner.version.holdout_entries()):
        content, patient = (
            partner.version.store.read(entry["file"]),
            owner.get(f"holdout/{entry['file']}", ""),
        )
        yield SealedImage(content, called[entry["class"]], patient, is_trained_on=place in trained)


def _trained_patients(partners: Partners) -> frozenset[str]:
    return frozenset[str]().union(*(partner.seen.trained for partner in partners))


def _sources(partners: Partners) -> list[Source]:
    return [partner.version.source for partner in partners]
