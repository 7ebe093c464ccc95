"""The sections of a recipe: typed, frozen, strict. `medcil.build.RunConfig` is the whole recipe.

`execution` and `data.root` say *where* a run is computed; everything else says *what* it is and must stay the
same for the run to be resumed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from medcil.errors import InvalidInput

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sampler = Literal["plain", "balanced", "class_aware", "two_stream"]
"""How an epoch draws its samples, in `medcil.training.sampling`."""
Augmentation = Literal["crop", "resized_crop", "fundus", "dihedral", "strong"]
"""How training images are transformed at random, in `medcil.data.transforms`."""
Views = Literal[1, 2, 4, 8]
"""Symmetries of an image: 1 is the image, 2 adds its mirror image, 4 half a turn of both, 8 every turn."""
SplitRule = Literal["benchmark", "given", "groups", "images"]
ClassifierKind = Literal["cosine", "linear"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    name: str
    """A name from `medcil datasets`; `own` for one's own images."""
    root: Path | None = None
    """The folder, archive, manifest or prepared store that holds the images; `phantom` needs none."""
    side: PositiveInt = 256
    """Images are resized to side x side once, when they are read."""
    crop: PositiveInt = 224
    """Training takes a random crop of this side and a random flip; evaluation the center crop."""
    augmentation: Augmentation | None = None
    """That crop, or another of `medcil.data.transforms`; unset: the dataset's own."""
    normalization: Literal["dataset", "weights"] | None = None
    """The mean and deviation of the dataset, or of the images that the weights were trained on; unset: those
    of the weights for one's own images, else of the dataset."""
    views: Views | None = None
    """Scores are the mean over so many symmetries; 8 is for images without an up or down. Unset: 1."""
    split: SplitRule | None = None
    """The test images: of a published split or of the data itself, or drawn by patients or by images."""
    split_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    split_seed: Annotated[int, Field(ge=0)] = 0
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate on this share of the training images, to choose settings; the test images are not read."""

    @model_validator(mode="after")
    def _crop_fits(self) -> "DataConfig":
        if self.crop > self.side:
            raise ValueError(f"crop {self.crop} is larger than side {self.side}: lower crop or raise side")
        return self


class LongTailConfig(Section):
    ratio: Fraction
    """Training images of the last class as a share of the first; in between they fall exponentially."""
    seed: Annotated[int, Field(ge=0)] = 0


class ScenarioConfig(Section):
    base: PositiveInt | None
    """Classes of the first task."""
    increment: PositiveInt | None
    """Classes of each later task (the last may have fewer)."""
    steps: tuple[PositiveInt, ...] | None = None
    """Classes of every task, instead of `base` and `increment`."""
    order: int | str | tuple[int | str, ...] = 0
    """A published class order by its number, `seed-1993` to draw one, or all classes by number or name."""
    long_tail: LongTailConfig | None = None
    cumulative: bool = False
    """Every step trains a new model on all images of all classes so far: the upper bound, "joint"."""

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_cut(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or content.get("steps") is None:
            return content
        if content.get("base") is not None or content.get("increment") is not None:
            raise ValueError("scenario has steps and also base or increment: keep the one or the other")
        return {**content, "base": None, "increment": None}


class NetworkConfig(Section):
    backbone: str = "resnet18"
    """`resnet32_cifar` (also 8, 14, 20) or any timm name."""
    weights: str | None = None
    """A file, a name from `medcil weights`, or `hub` to download timm's; unset or `none`: random weights."""
    classifier: ClassifierKind = "cosine"
    """Logits are η cos(h, w), or <h, w>."""
    last_relu: bool = False
    """Keep the last ReLU of a ResNet, so that embeddings are not negative; other families keep theirs."""
    recalibrate_batch_norm: bool = False
    """Replace the weights' batch-norm statistics by those of the first task's images."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """η of Eq. 1 at the start."""
    learn_scale: bool = True
    """Learn η, as in Eq. 1, or keep it constant."""

    @field_validator("weights")
    @classmethod
    def _none_is_unset(cls, weights: str | None) -> str | None:
        return None if weights == "none" else weights


class MemoryConfig(Section):
    per_class: Annotated[int, Field(ge=0)] | None = None
    """Exemplars of each class; 20 if neither key is set."""
    total: PositiveInt | None = None
    """Exemplars of all classes together, shared equally by the classes seen so far."""

    @model_validator(mode="after")
    def _one_policy(self) -> "MemoryConfig":
        if self.per_class is not None and self.total is not None:
            raise ValueError("memory has both per_class and total: keep one of them")
        return self

    def quota(self, n_classes: int) -> int:
        """Return the exemplars per class after n_classes."""
        if self.total is not None:
            return self.total // n_classes
        return 20 if self.per_class is None else self.per_class

    def check_suffices(self, n_classes: int) -> None:
        if self.total is not None and self.quota(n_classes) < 1:
            raise InvalidInput(f"memory.total is {self.total}, less than {n_classes} classes: raise it.")


class LearningRates(Section):
    classifier: Annotated[float, Field(ge=0)] = 0.1
    backbone: Annotated[float, Field(ge=0)] = 0.001


class TrainingConfig(Section):
    epochs: PositiveInt = 100
    batch_size: Annotated[int, Field(ge=2)] = 32
    """An epoch is cut into batches of about this size: equal, give or take one image."""
    learning_rates: LearningRates = LearningRates()
    schedule: Literal["milestones", "cosine"] = "milestones"
    milestones: tuple[Fraction, ...] = (0.4, 0.8)
    """Shares of the epochs after which the learning rates are multiplied by `decay`; unused by `cosine`."""
    decay: Fraction = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    gradient_clamp: Annotated[float, Field(gt=0)] | None = 5.0
    """Gradients are clamped to ± this, element by element."""
    sampler: Sampler = "plain"
    """`balanced` is the benchmark's: exemplars once, new classes resampled to their mean size."""
    exemplar_share: Annotated[float, Field(gt=0)] | None = None
    """Of `two_stream`: exemplars beside the new images, as a share of the batch size; unset: a quarter, or
    more where it takes more to see each of them once an epoch."""
    batch_norm: Literal["frozen"] | None = None
    """After the first task, `frozen` normalizes by the statistics that the network came with, and keeps them;
    unset: by those of the batch."""

    def changed(self, **changes: Any) -> "TrainingConfig":
        """Return a copy with other values, validated like a recipe's."""
        return TrainingConfig.model_validate({**self.model_dump(), **changes})

    def share_of_epochs(self, share: float) -> int:
        """Return the epochs of a second stage: with a share of 0.2, 20 after 100 and 4 after 20."""
        return max(1, round(share * self.epochs)) if share > 0 else 0

    def stage(self, share: float, **changes: Any) -> "TrainingConfig":
        """Return the settings of a second stage, so long as a share of the epochs, with other values."""
        return self.changed(epochs=self.share_of_epochs(share), **changes)


class FirstTaskConfig(Section):
    """Settings of the first task; unset keys are those of `training`."""

    epochs: PositiveInt | None = None
    learning_rates: LearningRates | None = None
    milestones: tuple[Fraction, ...] | None = None
    sampler: Sampler | None = None


class ExecutionConfig(Section):
    """Where and how fast a run is computed; docs/explanation/speed.md says which keys affect results."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    """CPU threads; unset: one for each core. Recorded, because the last bits of sums depend on it."""
    resident: Literal["auto"] | bool = "auto"
    """Keep the training images decoded in the device's memory, or stream them."""
    workers: PositiveInt | None = None
    """Threads that read images when they are streamed; unset: one for each core."""
    precision: Literal["auto", "float32"] = "auto"
    """`auto`: bfloat16 on a GPU, with float32 where it matters; float32 on the CPU."""
    processes: PositiveInt = 1
    """Processes that train together on this machine, each on its own GPU or, without GPUs, on the CPU."""
    capture: bool = True
    """On a GPU, replay the training step as a CUDA graph."""
    checkpoint_every: PositiveInt | None = None
    """Epochs between checkpoints; unset: after each epoch, at most one in ten seconds."""


class LearningConfig(Section):
    """The settings of learning a task."""

    seed: Annotated[int, Field(ge=0)] = 0
    memory: MemoryConfig = MemoryConfig()
    training: TrainingConfig = TrainingConfig()
    first_task: FirstTaskConfig = FirstTaskConfig()
    execution: ExecutionConfig = ExecutionConfig()

    def training_of_task(self, *, is_first: bool) -> TrainingConfig:
        if not is_first:
            return self.training
        changes = {key: value for key, value in self.first_task if value is not None}
        # The first task learns the statistics that later tasks keep.
        return self.training.model_copy(update={**changes, "batch_norm": None})


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Limit of a container (cgroup v2): microseconds of computing in a period of microseconds, or `max`."""


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Count the cores that this process may use; in a container often fewer than the machine has."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = (int(word) for word in quota.read_text().split())
    except (OSError, ValueError):  # no container, or `max`
        return bound
    return max(1, min(bound, round(allowed / period)))
