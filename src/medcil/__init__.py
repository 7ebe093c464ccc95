"""Class-incremental learning for imbalanced medical images.

The names below are public, as are `medcil.losses`, `medcil.metrics`, `medcil.terms`, `medcil.method`. Each is
imported when it is first used, so that `import medcil` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medcil.bench.experiment import run_experiment
    from medcil.build import load_recipe, parse_recipe
    from medcil.config import RunConfig
    from medcil.data.datasets import DATASETS
    from medcil.data.samples import Samples, TensorImages
    from medcil.data.stream import Task, class_incremental
    from medcil.engine.predict import predict_scores
    from medcil.engine.state import State, load_state, save_state
    from medcil.engine.train import learn_task
    from medcil.methods import METHODS
    from medcil.server.serve import serve
    from medcil.workflow.evaluate import evaluate
    from medcil.workflow.explain import explain
    from medcil.workflow.export import export
    from medcil.workflow.forget import erase
    from medcil.workflow.history import history, rollback
    from medcil.workflow.predict import predict
    from medcil.workflow.train import train
    from medcil.workflow.update import update

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
    "rollback",
    "run_experiment",
    "save_state",
    "serve",
    "train",
    "update",
]

_HOME = {
    "DATASETS": "medcil.data.datasets",
    "METHODS": "medcil.methods",
    "RunConfig": "medcil.config",
    "Samples": "medcil.data.samples",
    "State": "medcil.engine.state",
    "Task": "medcil.data.stream",
    "TensorImages": "medcil.data.samples",
    "class_incremental": "medcil.data.stream",
    "evaluate": "medcil.workflow.evaluate",
    "explain": "medcil.workflow.explain",
    "export": "medcil.workflow.export",
    "erase": "medcil.workflow.forget",
    "history": "medcil.workflow.history",
    "learn_task": "medcil.engine.train",
    "load_recipe": "medcil.build",
    "load_state": "medcil.engine.state",
    "parse_recipe": "medcil.build",
    "predict": "medcil.workflow.predict",
    "predict_scores": "medcil.engine.predict",
    "rollback": "medcil.workflow.history",
    "run_experiment": "medcil.bench.experiment",
    "save_state": "medcil.engine.state",
    "serve": "medcil.server.serve",
    "train": "medcil.workflow.train",
    "update": "medcil.workflow.update",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'medcil' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
