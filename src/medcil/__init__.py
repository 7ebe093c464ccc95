"""Class-incremental learning for imbalanced medical images.

The names below are public, as are `medcil.losses`, `medcil.metrics` and the modules `terms` and `protocol`
of `medcil.methods`. Each is imported when it is first used, so that `import medcil` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medcil.build import load_recipe, parse_recipe, register
    from medcil.clinic.erase import erase
    from medcil.clinic.evaluate import evaluate
    from medcil.clinic.explain import explain
    from medcil.clinic.export import export
    from medcil.clinic.predict import predict
    from medcil.clinic.train import train
    from medcil.clinic.update import history, rollback, update
    from medcil.config import RunConfig
    from medcil.data.samples import Samples, TensorImages
    from medcil.data.sources import DATASETS
    from medcil.data.stream import Task, class_incremental
    from medcil.experiments.run import run_experiment
    from medcil.methods import METHODS
    from medcil.serving.server import serve
    from medcil.training.inference import predict_scores
    from medcil.training.loop import learn_task
    from medcil.training.state import State, load_state, save_state

__all__ = [
    "DATASETS",
    "METHODS",
    "RunConfig",
    "Samples",
    "State",
    "Task",
    "TensorImages",
    "class_incremental",
    "erase",
    "evaluate",
    "explain",
    "export",
    "history",
    "learn_task",
    "load_recipe",
    "load_state",
    "parse_recipe",
    "predict",
    "predict_scores",
    "register",
    "rollback",
    "run_experiment",
    "save_state",
    "serve",
    "train",
    "update",
]

_HOME = {
    "DATASETS": "medcil.data.sources",
    "METHODS": "medcil.methods",
    "RunConfig": "medcil.config",
    "Samples": "medcil.data.samples",
    "State": "medcil.training.state",
    "Task": "medcil.data.stream",
    "TensorImages": "medcil.data.samples",
    "class_incremental": "medcil.data.stream",
    "evaluate": "medcil.clinic.evaluate",
    "explain": "medcil.clinic.explain",
    "export": "medcil.clinic.export",
    "erase": "medcil.clinic.erase",
    "history": "medcil.clinic.update",
    "learn_task": "medcil.training.loop",
    "load_recipe": "medcil.build",
    "load_state": "medcil.training.state",
    "parse_recipe": "medcil.build",
    "predict": "medcil.clinic.predict",
    "predict_scores": "medcil.training.inference",
    "register": "medcil.build",
    "rollback": "medcil.clinic.update",
    "run_experiment": "medcil.experiments.run",
    "save_state": "medcil.training.state",
    "serve": "medcil.serving.server",
    "train": "medcil.clinic.train",
    "update": "medcil.clinic.update",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'medcil' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
