"""docs/add-a-method.md, followed to the letter."""

import re
from pathlib import Path

import torch

from medcil.config import LearningConfig
from medcil.data.preprocess import Preprocessing
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import class_incremental
from medcil.engine.predict import predict_scores
from medcil.engine.state import initial_state
from medcil.engine.train import learn_task
from medcil.models.network import NetworkSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-method.md"


def test_the_method_on_the_page_learns_and_remembers() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert code is not None
    names: dict[str, object] = {"__name__": "added_method"}
    exec(code.group(1), names)
    method = names["Replay"]()  # type: ignore[operator]

    # Four classes that differ in color only.
    colors = torch.tensor([[220, 40, 40], [40, 220, 40], [40, 40, 220], [200, 200, 40]], dtype=torch.float)
    labels = torch.arange(4).repeat_interleave(12)
    noise = torch.randn(48, 3, 18, 18, generator=torch.Generator().manual_seed(0)) * 20
    pixels = (colors[labels][:, :, None, None] + noise).clamp(0, 255).to(torch.uint8)
    samples = Samples(TensorImages(pixels), labels)

    config = LearningConfig.model_validate(
        {
            "memory": {"per_class": 6},
            "training": {
                "epochs": 12,
                "batch_size": 8,
                "learning_rates": {"classifier": 0.1, "backbone": 0.05},
            },
            "execution": {"device": "cpu"},
        }
    )
    spec = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True)
    state = initial_state(spec, Preprocessing(side=18, crop=16), seed=0)
    for task in class_incremental(samples, samples, "abcd", range(4), [2, 2]):
        state = learn_task(state, task, method, config)
    predictions = predict_scores(state, samples, config.execution).argmax(dim=1)
    assert (predictions == labels).float().mean() > 0.8
