"""The demonstration: three methods learn the synthetic `phantom` classes, two more in each step."""

from medcil.config import RunConfig

SETTINGS = {
    "fine-tuning": {"name": "finetune"},
    "cross-entropy + distillation": {
        "name": "balanced",
        "classification": "cross_entropy",
        "margin": "none",
    },
    "balanced": {"name": "balanced"},
}


def demo_configs() -> dict[str, RunConfig]:
    """Folder name -> configuration: the same in everything but the method."""
    return {
        label.replace(" + ", "-").replace(" ", "-"): RunConfig.model_validate(
            {
                "label": label,
                "data": {"name": "phantom", "side": 36, "crop": 32},
                "scenario": {"base": 3, "increment": 2, "order": 1},
                "network": {"backbone": "resnet8_cifar"},
                "memory": {"per_class": 10},
                "training": {"epochs": 30, "learning_rates": {"classifier": 0.1, "backbone": 0.05}},
                "method": method,
            }
        )
        for label, method in SETTINGS.items()
    }
